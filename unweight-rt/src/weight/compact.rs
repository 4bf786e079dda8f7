//! Weights in the compact encoding (`docs/format.md` A.11) on the device.

use std::ops::Range;

use unweight_format::{
    TileGrid,
    raw::{CompactTensor, compact::ClassWindow},
};

use super::{count, device_shape};
use crate::device::{Device, DeviceBuffer, DeviceError, LaunchError, Upload};

/// A compact tensor on the device, with the table in which kernels look up its codes.
#[derive(Debug)]
pub struct DeviceCompact {
    grid: TileGrid,
    window: ClassWindow,
    dense: DeviceBuffer<u8>,
    tiles: DeviceBuffer<u32>,
    streams: DeviceBuffer<u32>,
    escapes: DeviceBuffer<u32>,
    table: DeviceBuffer<u32>,
}

impl DeviceCompact {
    /// Copies a tensor to the device. Waits for the copy.
    ///
    /// # Errors
    /// The tensor has more tiles or words than kernels can count, memory is short, or the driver failed.
    pub fn upload<B: AsRef<[u8]>>(mut to: impl Upload, tensor: &CompactTensor<B>) -> Result<Self, DeviceError> {
        check(tensor.grid(), tensor.streams().len() / 4, tensor.escapes().len() / 4)?;
        let table: Vec<u8> = tensor.book().kernel_table().into_iter().flat_map(u32::to_le_bytes).collect();
        let device = Self {
            grid: tensor.grid(),
            window: tensor.window(),
            dense: to.section(tensor.dense())?,
            tiles: to.section(tensor.tiles())?,
            streams: to.section(tensor.streams())?,
            escapes: to.section(tensor.escapes())?,
            table: to.section(&table)?,
        };
        to.finish()?;
        Ok(device)
    }

    /// Creates a tensor from sections on the device.
    ///
    /// # Errors
    /// The tensor has more tiles or words than kernels can count.
    pub(crate) fn new(
        grid: TileGrid,
        window: ClassWindow,
        dense: DeviceBuffer<u8>,
        tiles: DeviceBuffer<u32>,
        streams: DeviceBuffer<u32>,
        escapes: DeviceBuffer<u32>,
        table: DeviceBuffer<u32>,
    ) -> Result<Self, DeviceError> {
        check(grid, streams.len(), escapes.len())?;
        Ok(Self { grid, window, dense, tiles, streams, escapes, table })
    }

    /// Returns what all tiles share, and frees the rest.
    pub(crate) fn into_tables(self) -> CompactTables {
        let Self { window, escapes, table, .. } = self;
        CompactTables { window, escapes, table }
    }

    /// Returns the device of the tensor.
    pub fn device(&self) -> &Device {
        self.dense.device()
    }

    /// Returns the address ranges of the sections.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 5] {
        [
            ("dense", self.dense.span()),
            ("class_tiles", self.tiles.span()),
            ("class_streams", self.streams.span()),
            ("class_escapes", self.escapes.span()),
            ("the table of codes", self.table.span()),
        ]
    }

    /// Returns shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// Returns the window of exponents.
    pub fn window(&self) -> ClassWindow {
        self.window
    }

    /// Returns the dense section, u8 `[tiles, 5120]`.
    pub fn dense(&self) -> &DeviceBuffer<u8> {
        &self.dense
    }

    /// Returns stream offset and escape head of each tile, u32 `[tiles + 1, 2]`.
    pub fn tiles(&self) -> &DeviceBuffer<u32> {
        &self.tiles
    }

    /// Returns the code streams, u32 `[words]`.
    pub fn streams(&self) -> &DeviceBuffer<u32> {
        &self.streams
    }

    /// Returns the escape lists, u32 `[words]`.
    pub fn escapes(&self) -> &DeviceBuffer<u32> {
        &self.escapes
    }

    /// Returns the table of codes, u32 `[512]`.
    pub fn table(&self) -> &DeviceBuffer<u32> {
        &self.table
    }

    /// Returns the size of all sections in bytes.
    pub fn bytes(&self) -> u64 {
        let words = [&self.tiles, &self.streams, &self.escapes, &self.table];
        (self.dense.bytes() + words.iter().map(|words| words.bytes()).sum::<usize>()) as u64
    }
}

/// What the tiles of a compact tensor share: window, escape lists and codes.
#[derive(Debug)]
pub(crate) struct CompactTables {
    pub(crate) window: ClassWindow,
    pub(crate) escapes: DeviceBuffer<u32>,
    pub(crate) table: DeviceBuffer<u32>,
}

impl CompactTables {
    /// Returns the size on the device in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.escapes.bytes() + self.table.bytes()) as u64
    }
}

/// Checks that kernels can count the tiles and the words of streams and escapes.
fn check(grid: TileGrid, streams: usize, escapes: usize) -> Result<(), LaunchError> {
    device_shape(grid)?;
    count("words of streams", streams)?;
    count("words of escapes", escapes)
}
