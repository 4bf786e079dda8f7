//! Coded exponents on the device: the sections shared by the encodings that store exponents as Huffman bits per tile
//! (`docs/format.md` A.4 - A.6).

use std::ops::Range;

use unweight_format::{
    TileGrid,
    raw::{TileMetadata, huffman::CodedExponents},
};

use super::{device_shape, elements, most_verbatim, pods, verbatim_rows};
use crate::device::{DeviceBuffer, DeviceError, Upload};

/// The sections of coded exponents as unchecked host slices.
#[derive(Clone, Copy, Debug)]
pub struct CodedSections<'a> {
    /// u32 `[words]`, as bytes.
    pub encoded_exp: &'a [u8],
    /// u8 `[tiles, 64]`.
    pub row_lengths: &'a [u8],
    /// `[tiles]` of 16 bytes.
    pub tile_metadata: &'a [u8],
    /// u8 `[rows, 64]`.
    pub verbatim_exponents: &'a [u8],
    /// Exponents of the palette.
    pub palette: [u8; 16],
    /// Lengths of the codes in bits.
    pub code_lengths: [u8; 16],
}

impl<'a, B: AsRef<[u8]>> From<&'a CodedExponents<B>> for CodedSections<'a> {
    fn from(exponents: &'a CodedExponents<B>) -> Self {
        Self {
            encoded_exp: exponents.encoded_exp(),
            row_lengths: exponents.row_lengths(),
            tile_metadata: exponents.tile_metadata(),
            verbatim_exponents: exponents.verbatim_exponents(),
            palette: exponents.code().palette().stored(),
            code_lengths: exponents.code().lengths(),
        }
    }
}

/// The sections that a decoder needs to find and decode the bits of a row.
#[derive(Debug)]
pub(crate) struct DeviceCoded {
    pub grid: TileGrid,
    pub code_bits: u32,
    pub max_verbatim_rows: u32,
    pub encoded_exp: DeviceBuffer<u32>,
    pub row_lengths: DeviceBuffer<u8>,
    pub tile_metadata: DeviceBuffer<TileMetadata>,
    pub verbatim_exponents: DeviceBuffer<u8>,
    pub palette: DeviceBuffer<u8>,
    pub code_lengths: DeviceBuffer<u8>,
}

impl DeviceCoded {
    /// Copies unchecked sections to the device. Checks only their sizes against the grid; decoders bounds-check the
    /// rest.
    pub(super) fn from_sections(
        to: &mut impl Upload,
        grid: TileGrid,
        sections: CodedSections<'_>,
    ) -> Result<Self, DeviceError> {
        device_shape(grid)?;
        elements("row_lengths", sections.row_lengths.len(), grid.tiles() * 64)?;
        elements("tile_metadata", sections.tile_metadata.len(), grid.tiles() * TileMetadata::BYTES)?;
        verbatim_rows(sections.verbatim_exponents)?;
        let metadata: Vec<TileMetadata> = pods(sections.tile_metadata)?;
        Ok(Self {
            grid,
            code_bits: sections.code_lengths.iter().copied().max().unwrap_or(0).into(),
            max_verbatim_rows: most_verbatim(&metadata),
            encoded_exp: to.section(sections.encoded_exp)?,
            row_lengths: to.section(sections.row_lengths)?,
            tile_metadata: to.section(sections.tile_metadata)?,
            verbatim_exponents: to.section(sections.verbatim_exponents)?,
            palette: to.section(&sections.palette)?,
            code_lengths: to.section(&sections.code_lengths)?,
        })
    }

    /// Returns the address ranges of the sections, except palette and code.
    pub fn spans(&self) -> [(&'static str, Range<u64>); 4] {
        [
            ("encoded_exp", self.encoded_exp.span()),
            ("row_lengths", self.row_lengths.span()),
            ("tile_metadata", self.tile_metadata.span()),
            ("verbatim_exponents", self.verbatim_exponents.span()),
        ]
    }

    /// Returns the total size of the buffers' elements in bytes.
    pub fn bytes(&self) -> usize {
        self.encoded_exp.bytes()
            + self.row_lengths.bytes()
            + self.tile_metadata.bytes()
            + self.verbatim_exponents.bytes()
            + self.palette.bytes()
            + self.code_lengths.bytes()
    }
}
