//! Huffman-coded exponents (`docs/format.md` A.4), and what decoders make of them.

use std::ops::Range;

use unweight_format::{HuffmanTensor, TileGrid, TileMetadata};

use super::{DevicePalette, PaletteView, device_shape, elements, most_verbatim, pods, verbatim_rows};
use crate::device::{Device, DeviceBuffer, DeviceError, Refusal, Upload};

/// The sections of a Huffman tensor as host slices, checked by nobody.
#[derive(Clone, Copy, Debug)]
pub struct HuffmanSections<'a> {
    /// u8 `[n, k]`.
    pub sign_mantissa: &'a [u8],
    /// u32 `[words]`, as bytes.
    pub encoded_exp: &'a [u8],
    /// u8 `[tiles, 64]`.
    pub row_lengths: &'a [u8],
    /// `[tiles]` of 16 bytes.
    pub tile_metadata: &'a [u8],
    /// u8 `[rows, 64]`.
    pub verbatim_exponents: &'a [u8],
    /// Exponents.
    pub palette: [u8; 16],
    /// Bits.
    pub code_lengths: [u8; 16],
}

/// A Huffman tensor on the device.
#[derive(Debug)]
pub struct DeviceHuffman {
    grid: TileGrid,
    code_bits: u32,
    max_verbatim_rows: u32,
    pub(crate) sign_mantissa: DeviceBuffer<u8>,
    pub(crate) encoded_exp: DeviceBuffer<u32>,
    pub(crate) row_lengths: DeviceBuffer<u8>,
    pub(crate) tile_metadata: DeviceBuffer<TileMetadata>,
    pub(crate) verbatim_exponents: DeviceBuffer<u8>,
    pub(crate) palette: DeviceBuffer<u8>,
    pub(crate) code_lengths: DeviceBuffer<u8>,
}

impl DeviceHuffman {
    /// Copies a tensor to the device. Waits for the copy.
    pub fn upload<B: AsRef<[u8]>>(to: impl Upload, tensor: &HuffmanTensor<B>) -> Result<Self, DeviceError> {
        let sections = HuffmanSections {
            sign_mantissa: tensor.sign_mantissa(),
            encoded_exp: tensor.encoded_exp(),
            row_lengths: tensor.row_lengths(),
            tile_metadata: tensor.tile_metadata(),
            verbatim_exponents: tensor.verbatim_exponents(),
            palette: tensor.code().palette().stored(),
            code_lengths: tensor.code().lengths(),
        };
        Self::from_sections(to, tensor.grid(), &sections)
    }

    /// Copies sections that nobody has checked. Only their sizes are held against the grid; decoders bound the rest.
    /// Waits for the copy.
    pub fn from_sections(
        mut to: impl Upload,
        grid: TileGrid,
        sections: &HuffmanSections<'_>,
    ) -> Result<Self, DeviceError> {
        device_shape(grid)?;
        elements("sign_mantissa", sections.sign_mantissa.len(), grid.elements())?;
        elements("row_lengths", sections.row_lengths.len(), grid.tiles() * 64)?;
        elements("tile_metadata", sections.tile_metadata.len(), grid.tiles() * TileMetadata::BYTES)?;
        verbatim_rows(sections.verbatim_exponents)?;
        let metadata: Vec<TileMetadata> = pods(sections.tile_metadata)?;
        let tensor = Self {
            grid,
            code_bits: sections.code_lengths.iter().copied().max().unwrap_or(0).into(),
            max_verbatim_rows: most_verbatim(&metadata),
            sign_mantissa: to.section(sections.sign_mantissa)?,
            encoded_exp: to.section(sections.encoded_exp)?,
            row_lengths: to.section(sections.row_lengths)?,
            tile_metadata: to.section(sections.tile_metadata)?,
            verbatim_exponents: to.section(sections.verbatim_exponents)?,
            palette: to.section(&sections.palette)?,
            code_lengths: to.section(&sections.code_lengths)?,
        };
        to.finish()?;
        Ok(tensor)
    }

    /// Shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// Longest code, bits.
    pub fn code_bits(&self) -> u32 {
        self.code_bits
    }

    /// Most verbatim rows in one tile.
    pub fn max_verbatim_rows(&self) -> u32 {
        self.max_verbatim_rows
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        self.sign_mantissa.device()
    }

    /// The addresses of its sections, but for palette and code.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 5] {
        [
            ("sign_mantissa", self.sign_mantissa.span()),
            ("encoded_exp", self.encoded_exp.span()),
            ("row_lengths", self.row_lengths.span()),
            ("tile_metadata", self.tile_metadata.span()),
            ("verbatim_exponents", self.verbatim_exponents.span()),
        ]
    }

    /// Bytes of the buffers' elements: what a decoder reads at most, `sign_mantissa` included.
    pub fn bytes(&self) -> u64 {
        (self.sign_mantissa.bytes() + self.coded_exponent_bytes()) as u64
    }

    /// Bytes of everything but `sign_mantissa`.
    pub fn coded_exponent_bytes(&self) -> usize {
        self.encoded_exp.bytes()
            + self.row_lengths.bytes()
            + self.tile_metadata.bytes()
            + self.verbatim_exponents.bytes()
            + self.palette.bytes()
            + self.code_lengths.bytes()
    }

    /// The weights as a palette source, with the indices that a transcoder wrote to `palette_index`.
    pub fn as_palette<'a>(&'a self, palette_index: &'a DeviceBuffer<u8>) -> PaletteView<'a> {
        PaletteView {
            grid: self.grid,
            max_verbatim_rows: self.max_verbatim_rows,
            sign_mantissa: &self.sign_mantissa,
            palette_index,
            tile_metadata: &self.tile_metadata,
            verbatim_exponents: &self.verbatim_exponents,
            palette: &self.palette,
        }
    }

    /// The same weights as palette indices, which a transcoder wrote: the codes go.
    ///
    /// # Errors
    /// Indices of another number of tiles.
    pub fn into_palette(self, palette_index: DeviceBuffer<u8>) -> Result<DevicePalette, Refusal> {
        elements("palette_index", palette_index.len(), self.grid.tiles() * 2048)?;
        let Self { grid, max_verbatim_rows, sign_mantissa, tile_metadata, verbatim_exponents, palette, .. } = self;
        let sections = (sign_mantissa, palette_index, tile_metadata, verbatim_exponents, palette);
        Ok(DevicePalette::of_parts(grid, max_verbatim_rows, sections))
    }

    /// The weights as an exponent source, with the exponents that a decoder wrote to `exponents`.
    pub fn as_exponent<'a>(&'a self, exponents: &'a DeviceBuffer<u8>) -> ExponentView<'a> {
        ExponentView { grid: self.grid, sign_mantissa: &self.sign_mantissa, exponents }
    }
}

/// Weights as the exponent source of a matmul.
#[derive(Clone, Copy, Debug)]
pub struct ExponentView<'a> {
    pub(crate) grid: TileGrid,
    pub(crate) sign_mantissa: &'a DeviceBuffer<u8>,
    pub(crate) exponents: &'a DeviceBuffer<u8>,
}

impl ExponentView<'_> {
    /// Bytes that a matmul reads at least.
    pub fn bytes(&self) -> usize {
        self.sign_mantissa.bytes() + self.exponents.bytes()
    }
}
