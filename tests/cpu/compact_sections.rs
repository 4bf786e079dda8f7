//! A compact tensor in buffers for kernels in the simulator.

use unweight_format::raw::CompactTensor;

use crate::harness::Buffer;

/// The sections of a tensor as a device holds them.
pub struct Sections {
    pub dense: Buffer,
    pub tiles: Buffer,
    pub streams: Buffer,
    pub records: Buffer,
    pub table: Buffer,
}

impl Sections {
    pub fn of(tensor: &CompactTensor<Vec<u8>>) -> Self {
        let table: Vec<u8> = tensor.book().kernel_table().iter().flat_map(|entry| entry.to_le_bytes()).collect();
        let [dense, tiles, streams, records] =
            [tensor.dense(), tensor.tiles(), tensor.streams(), tensor.escapes()].map(Buffer::of);
        Self { dense, tiles, streams, records, table: Buffer::of(&table) }
    }
}
