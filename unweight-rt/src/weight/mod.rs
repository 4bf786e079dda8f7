//! Weights on the device. Each encoding has a file; its sections are buffers in the layouts of `docs/format.md` part A.
//! Each section has its own buffer, which is 256-byte aligned and readable past its end
//! ([`DeviceBuffer::PAD_BYTES`](crate::device::DeviceBuffer::PAD_BYTES)). `upload` requires a validated tensor;
//! `from_sections` accepts unchecked sections, because kernels bounds-check every index that they read. No safe call
//! replaces a buffer of a weight, so sizes are checked only once, on creation.

mod coded;
mod compact;
mod experts;
mod exponents;
mod huffman;
mod matrix;
mod packed;
mod palette;

use bytemuck::Pod;
use unweight_format::{TileGrid, raw::TileMetadata};

use crate::device::LaunchError;

pub use self::{
    coded::CodedSections,
    compact::DeviceCompact,
    experts::ExpertWeights,
    exponents::{DeviceExponents, ExponentsSections},
    huffman::{DeviceHuffman, ExponentView, HuffmanSections},
    matrix::DeviceMatrix,
    packed::DevicePacked,
    palette::{DevicePalette, PaletteSections, PaletteView},
};

pub(crate) use self::{coded::DeviceCoded, compact::CompactTables, packed::PackedEscapes};

/// Checks that the number of tiles fits the 32-bit counters of kernels.
fn device_shape(grid: TileGrid) -> Result<(), LaunchError> {
    const LIMIT: u64 = (1 << 31) - 1;
    match grid.tiles() as u64 {
        tiles if tiles <= LIMIT => Ok(()),
        tiles => Err(LaunchError::TooLarge { what: "tiles", value: tiles, limit: LIMIT }),
    }
}

/// Checks that a buffer or section has exactly the number of elements that a shape needs.
pub(crate) fn elements(buffer: &'static str, got: usize, expected: usize) -> Result<(), LaunchError> {
    if got == expected {
        Ok(())
    } else {
        Err(LaunchError::Elements { buffer, got: got as u64, expected: expected as u64 })
    }
}

/// Checks that a buffer has room for `need` elements.
pub(crate) fn check_capacity(buffer: &'static str, have: usize, need: usize) -> Result<(), LaunchError> {
    let refusal = LaunchError::Room { buffer, need: need as u64, have: have as u64 };
    if have >= need { Ok(()) } else { Err(refusal) }
}

/// Checks a section of verbatim exponents: whole rows, which kernels count in 32 bits.
fn verbatim_rows(bytes: &[u8]) -> Result<(), LaunchError> {
    if !bytes.len().is_multiple_of(64) {
        return Err(LaunchError::Partial { section: "verbatim_exponents", bytes: bytes.len() as u64, unit: 64 });
    }
    count("verbatim rows", bytes.len() / 64)
}

/// Checks that a count fits 32 bits.
pub(crate) fn count(what: &'static str, value: usize) -> Result<(), LaunchError> {
    match u32::try_from(value) {
        Ok(_) => Ok(()),
        Err(_) => Err(LaunchError::TooLarge { what, value: value as u64, limit: u32::MAX.into() }),
    }
}

/// Reads the values of a section of any alignment.
pub(crate) fn pods<T: Pod>(bytes: &[u8]) -> Result<Vec<T>, LaunchError> {
    if !bytes.len().is_multiple_of(size_of::<T>()) {
        let unit = size_of::<T>() as u64;
        return Err(LaunchError::Partial { section: "a section", bytes: bytes.len() as u64, unit });
    }
    Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
}

fn most_verbatim(metadata: &[TileMetadata]) -> u32 {
    metadata.iter().map(|tile| tile.bitmask().count_ones()).max().unwrap_or(0)
}

/// Returns `[rows, columns]`.
pub(crate) fn shape(grid: TileGrid) -> [u64; 2] {
    [grid.rows() as u64, grid.cols() as u64]
}
