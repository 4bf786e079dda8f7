//! Weights with Huffman-coded exponents (`docs/format.md` A.4), and views of their decoded exponents.

use std::ops::Range;

use unweight_format::{TileGrid, raw::HuffmanTensor};

use super::{
    DevicePalette, PaletteView,
    coded::{CodedSections, DeviceCoded},
    elements,
};
use crate::device::{Device, DeviceBuffer, DeviceError, LaunchError, Upload};

/// The sections of a Huffman tensor as unchecked host slices.
#[derive(Clone, Copy, Debug)]
pub struct HuffmanSections<'a> {
    /// u8 `[n, k]`.
    pub sign_mantissa: &'a [u8],
    /// The sections from which a decoder reads the exponents.
    pub exponents: CodedSections<'a>,
}

/// A Huffman tensor on the device.
#[derive(Debug)]
pub struct DeviceHuffman {
    pub(crate) coded: DeviceCoded,
    pub(crate) sign_mantissa: DeviceBuffer<u8>,
}

impl DeviceHuffman {
    /// Copies a tensor to the device. Waits for the copy.
    pub fn upload<B: AsRef<[u8]>>(to: impl Upload, tensor: &HuffmanTensor<B>) -> Result<Self, DeviceError> {
        let sections = HuffmanSections { sign_mantissa: tensor.sign_mantissa(), exponents: tensor.exponents().into() };
        Self::from_sections(to, tensor.grid(), &sections)
    }

    /// Copies unchecked sections to the device. Checks only their sizes against the grid; decoders bounds-check the
    /// rest. Waits for the copy.
    pub fn from_sections(
        mut to: impl Upload,
        grid: TileGrid,
        sections: &HuffmanSections<'_>,
    ) -> Result<Self, DeviceError> {
        elements("sign_mantissa", sections.sign_mantissa.len(), grid.elements())?;
        let coded = DeviceCoded::from_sections(&mut to, grid, sections.exponents)?;
        let tensor = Self { coded, sign_mantissa: to.section(sections.sign_mantissa)? };
        to.finish()?;
        Ok(tensor)
    }

    /// Returns shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.coded.grid
    }

    /// Returns the length of the longest code in bits.
    pub fn code_bits(&self) -> u32 {
        self.coded.code_bits
    }

    /// Returns the maximum number of verbatim rows in a tile.
    pub fn max_verbatim_rows(&self) -> u32 {
        self.coded.max_verbatim_rows
    }

    /// Returns the device of the tensor.
    pub fn device(&self) -> &Device {
        self.sign_mantissa.device()
    }

    /// Returns the address ranges of the sections, except palette and code.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 5] {
        let [encoded, lengths, metadata, verbatim] = self.coded.spans();
        [("sign_mantissa", self.sign_mantissa.span()), encoded, lengths, metadata, verbatim]
    }

    /// Returns the size of the buffers' elements in bytes, including `sign_mantissa`: the most that a decoder reads.
    pub fn bytes(&self) -> u64 {
        (self.sign_mantissa.bytes() + self.coded_exponent_bytes()) as u64
    }

    /// Returns the size of everything except `sign_mantissa`, in bytes.
    pub fn coded_exponent_bytes(&self) -> usize {
        self.coded.bytes()
    }

    /// Returns the weights as a palette source, with the indices that a transcoder wrote to `palette_index`.
    pub fn as_palette<'a>(&'a self, palette_index: &'a DeviceBuffer<u8>) -> PaletteView<'a> {
        PaletteView {
            grid: self.coded.grid,
            max_verbatim_rows: self.coded.max_verbatim_rows,
            sign_mantissa: &self.sign_mantissa,
            palette_index,
            tile_metadata: &self.coded.tile_metadata,
            verbatim_exponents: &self.coded.verbatim_exponents,
            palette: &self.coded.palette,
        }
    }

    /// Converts the tensor to the palette encoding, with indices that a transcoder wrote; frees the codes.
    ///
    /// # Errors
    /// `palette_index` has the wrong size for this number of tiles.
    pub fn into_palette(self, palette_index: DeviceBuffer<u8>) -> Result<DevicePalette, LaunchError> {
        elements("palette_index", palette_index.len(), self.grid().tiles() * 2048)?;
        let Self { coded, sign_mantissa } = self;
        let DeviceCoded { grid, max_verbatim_rows, tile_metadata, verbatim_exponents, palette, .. } = coded;
        let sections = (sign_mantissa, palette_index, tile_metadata, verbatim_exponents, palette);
        Ok(DevicePalette::of_parts(grid, max_verbatim_rows, sections))
    }

    /// Returns the weights as an exponent source, with the exponents that a decoder wrote to `exponents`.
    pub fn as_exponent<'a>(&'a self, exponents: &'a DeviceBuffer<u8>) -> ExponentView<'a> {
        ExponentView { grid: self.coded.grid, sign_mantissa: &self.sign_mantissa, exponents }
    }
}

/// Weights as the exponent source of a matmul: decoded exponents, u8 each.
#[derive(Clone, Copy, Debug)]
pub struct ExponentView<'a> {
    pub(crate) grid: TileGrid,
    pub(crate) sign_mantissa: &'a DeviceBuffer<u8>,
    pub(crate) exponents: &'a DeviceBuffer<u8>,
}

impl ExponentView<'_> {
    /// Returns the minimum number of bytes that a matmul reads.
    pub fn bytes(&self) -> usize {
        self.sign_mantissa.bytes() + self.exponents.bytes()
    }
}
