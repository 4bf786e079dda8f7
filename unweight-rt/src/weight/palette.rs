//! Weights as palette indices (`docs/format.md` A.8), stored in a bundle or produced by a transcoder.

use unweight_format::{
    TileGrid,
    raw::{PaletteTensor, TileMetadata},
};

use super::{device_shape, elements, most_verbatim, pods, verbatim_rows};
use crate::device::{DeviceBuffer, DeviceError, Stream};

/// Sign and mantissa, indices, metadata, verbatim exponents, palette.
pub(super) type Sections =
    (DeviceBuffer<u8>, DeviceBuffer<u8>, DeviceBuffer<TileMetadata>, DeviceBuffer<u8>, DeviceBuffer<u8>);

/// A palette tensor on the device.
#[derive(Debug)]
pub struct DevicePalette {
    grid: TileGrid,
    max_verbatim_rows: u32,
    sign_mantissa: DeviceBuffer<u8>,
    palette_index: DeviceBuffer<u8>,
    tile_metadata: DeviceBuffer<TileMetadata>,
    verbatim_exponents: DeviceBuffer<u8>,
    palette: DeviceBuffer<u8>,
}

impl DevicePalette {
    /// Copies a tensor to the device.
    pub fn upload<B: AsRef<[u8]>>(stream: &Stream, tensor: &PaletteTensor<B>) -> Result<Self, DeviceError> {
        let sections = PaletteSections {
            sign_mantissa: tensor.sign_mantissa(),
            palette_index: tensor.palette_index(),
            tile_metadata: tensor.tile_metadata(),
            verbatim_exponents: tensor.verbatim_exponents(),
            palette: tensor.palette(),
        };
        Self::from_sections(stream, tensor.grid(), &sections)
    }

    /// Copies unchecked sections to the device. Checks only their sizes against the grid; the matmul bounds-checks the
    /// rest.
    pub fn from_sections(stream: &Stream, grid: TileGrid, sections: &PaletteSections<'_>) -> Result<Self, DeviceError> {
        device_shape(grid)?;
        elements("sign_mantissa", sections.sign_mantissa.len(), grid.elements())?;
        elements("palette_index", sections.palette_index.len(), grid.tiles() * 2048)?;
        elements("tile_metadata", sections.tile_metadata.len(), grid.tiles() * TileMetadata::BYTES)?;
        verbatim_rows(sections.verbatim_exponents)?;
        let metadata: Vec<TileMetadata> = pods(sections.tile_metadata)?;
        Ok(Self {
            grid,
            max_verbatim_rows: most_verbatim(&metadata),
            sign_mantissa: DeviceBuffer::from_host(stream, sections.sign_mantissa)?,
            palette_index: DeviceBuffer::from_host(stream, sections.palette_index)?,
            tile_metadata: DeviceBuffer::from_host(stream, &metadata)?,
            verbatim_exponents: DeviceBuffer::from_host(stream, sections.verbatim_exponents)?,
            palette: DeviceBuffer::from_host(stream, &sections.palette)?,
        })
    }

    /// Creates a tensor from sections on the device, whose sizes must match the grid.
    pub(super) fn of_parts(grid: TileGrid, max_verbatim_rows: u32, sections: Sections) -> Self {
        let (sign_mantissa, palette_index, tile_metadata, verbatim_exponents, palette) = sections;
        Self { grid, max_verbatim_rows, sign_mantissa, palette_index, tile_metadata, verbatim_exponents, palette }
    }

    /// Returns shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// Returns the maximum number of verbatim rows in a tile.
    pub fn max_verbatim_rows(&self) -> u32 {
        self.max_verbatim_rows
    }

    /// Returns the size of the buffers' elements in bytes.
    pub fn bytes(&self) -> u64 {
        (self.view().bytes() + self.palette.bytes()) as u64
    }

    /// Returns the buffers that a matmul reads.
    pub fn view(&self) -> PaletteView<'_> {
        PaletteView {
            grid: self.grid,
            max_verbatim_rows: self.max_verbatim_rows,
            sign_mantissa: &self.sign_mantissa,
            palette_index: &self.palette_index,
            tile_metadata: &self.tile_metadata,
            verbatim_exponents: &self.verbatim_exponents,
            palette: &self.palette,
        }
    }
}

/// The sections of a palette tensor as unchecked host slices.
#[derive(Clone, Copy, Debug)]
pub struct PaletteSections<'a> {
    /// u8 `[n, k]`.
    pub sign_mantissa: &'a [u8],
    /// u8 `[tiles, 64, 32]`.
    pub palette_index: &'a [u8],
    /// `[tiles]` of 16 bytes.
    pub tile_metadata: &'a [u8],
    /// u8 `[rows, 64]`.
    pub verbatim_exponents: &'a [u8],
    /// Exponents of the palette.
    pub palette: [u8; 16],
}

/// Weights as the palette source of a matmul.
#[derive(Clone, Copy, Debug)]
pub struct PaletteView<'a> {
    pub(crate) grid: TileGrid,
    pub(crate) max_verbatim_rows: u32,
    pub(crate) sign_mantissa: &'a DeviceBuffer<u8>,
    pub(crate) palette_index: &'a DeviceBuffer<u8>,
    pub(crate) tile_metadata: &'a DeviceBuffer<TileMetadata>,
    pub(crate) verbatim_exponents: &'a DeviceBuffer<u8>,
    pub(crate) palette: &'a DeviceBuffer<u8>,
}

impl PaletteView<'_> {
    /// Returns the minimum number of bytes that a matmul reads.
    pub fn bytes(&self) -> usize {
        self.sign_mantissa.bytes()
            + self.palette_index.bytes()
            + self.tile_metadata.bytes()
            + self.verbatim_exponents.bytes()
    }
}
