//! A shard to make, and a unit of its tensors on the way from the reader.

use std::{mem, sync::Arc};

use super::{run::Run, shard_writer::Layout};
use crate::{
    bundle::{
        EncoderBuffer,
        files::Input,
        pipeline::{ReadUnit, batch_bytes_max, read_units_from},
        source::SourceFile,
    },
    safetensors::Header,
};

/// A safetensors file of the source, and the layout of its shard.
pub(super) struct ShardPlan<'a> {
    pub(super) file: &'a SourceFile,
    pub(super) header: &'a Header,
    /// The bytes of length and header.
    pub(super) header_bytes: &'a [u8],
    pub(super) layout: Layout,
}

impl ShardPlan<'_> {
    /// The units to read after the first `begun` tensors: at least one, which may be empty.
    pub(super) fn units(&self, begun: usize, ram_bytes: Option<u64>) -> Vec<ReadUnit> {
        let tensors = self.header.tensors.iter().zip(&self.layout.decisions);
        let units = read_units_from(
            begun,
            tensors.map(|(t, d)| (t.bytes, d.choice.grid().is_none())),
            batch_bytes_max(ram_bytes),
        );
        if units.is_empty() { vec![ReadUnit::Batch(begun..begun)] } else { units }
    }
}

/// The memory into which a unit is read.
pub(super) enum ReadBuffer {
    /// Memory of the run, which returns to the budget.
    Run(Vec<u8>),
    /// Memory of the encoder.
    Encoder(EncoderBuffer),
}

impl ReadBuffer {
    /// Nothing is read yet.
    pub(super) const EMPTY: Self = Self::Run(Vec::new());
}

/// A unit on its way from the reader: its tensors in memory, or a tensor that is read in pieces.
pub(super) struct LoadedUnit<'a> {
    /// The index of the shard.
    pub(super) shard: usize,
    /// The index of the unit among those of its shard.
    pub(super) index: usize,
    pub(super) input: Arc<Input>,
    pub(super) unit: ReadUnit,
    /// Bytes of the tensors, at the start of `buffer`; 0 for a tensor in pieces.
    pub(super) bytes: u64,
    pub(super) buffer: ReadBuffer,
    /// Bytes that are acquired in addition to a buffer of the run.
    pub(super) reserved: u64,
    pub(super) run: &'a Run,
}

impl LoadedUnit<'_> {
    pub(super) fn tensors(&self) -> &[u8] {
        let buffer: &[u8] = match &self.buffer {
            ReadBuffer::Run(buffer) => buffer,
            ReadBuffer::Encoder(buffer) => buffer,
        };
        &buffer[..self.bytes as usize]
    }
}

impl Drop for LoadedUnit<'_> {
    fn drop(&mut self) {
        if let ReadBuffer::Run(buffer) = &mut self.buffer
            && !buffer.is_empty()
        {
            self.run.budget.give_back(mem::take(buffer));
        }
    }
}
