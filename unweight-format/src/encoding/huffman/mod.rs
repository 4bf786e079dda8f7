//! Huffman-coded exponents (`docs/format.md` A.4 - A.6): the smallest encoding, which is decoded or transcoded before a
//! kernel multiplies.

mod coded;
pub(crate) mod decode;

use std::borrow::Cow;

use self::decode::SignMantissa;
pub use self::{
    coded::CodedExponents,
    decode::{decode, decode_into, transcode},
};
pub use super::code::{Code, CodeLimit, DecodeEntry};
use super::{
    Encoding, EncodingId, Extent, NotEncodable, ReadTileRows, Sample, Section, Sections, StoredTensor, Survey,
    TileRows, bands::bands, sample::fixed_bytes, tiles::debug_sizes,
};
use crate::{
    CodecError, FloatMatrix, Matrix, TileGrid, TileMetadata,
    layout::{PALETTE_MAX, SECTION_ALIGN, TILE},
    safetensors::Dtype,
};

/// The Huffman encoding.
#[derive(Debug, Clone, Copy)]
pub struct Huffman;

impl EncodingId {
    /// Huffman-coded exponents.
    pub const HUFFMAN: Self = Self::new("huffman");
}

impl Section {
    /// u8 `[16]`: code lengths of the palette entries, in bits.
    pub const CODE_LENGTHS: Self = Self::new("code_lengths", Dtype::U8, &[Extent::Fixed(PALETTE_MAX)]);
    /// u8 `[tiles, 64]`: bits of each row less 64.
    pub const ROW_LENGTHS: Self = Self::new("row_lengths", Dtype::U8, &[Extent::Tiles, Extent::Fixed(TILE)]);
    /// u32 `[words]`: the coded rows.
    pub const ENCODED_EXP: Self = Self::new("encoded_exp", Dtype::U32, &[Extent::Open]).padded_to(SECTION_ALIGN);
}

impl Huffman {
    /// The sections in stored order.
    pub(crate) const SECTIONS: &'static [Section] = &[
        Section::PALETTE,
        Section::CODE_LENGTHS,
        Section::TILE_METADATA,
        Section::ROW_LENGTHS,
        Section::VERBATIM_EXPONENTS,
        Section::ENCODED_EXP,
        Section::SIGN_MANTISSA,
    ];
}

impl Encoding for Huffman {
    fn id(&self) -> EncodingId {
        EncodingId::HUFFMAN
    }

    fn sections(&self) -> &'static [Section] {
        Self::SECTIONS
    }

    fn fits(&self, _: TileGrid) -> Result<(), NotEncodable> {
        Ok(())
    }

    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable> {
        Ok(fixed_bytes(Self::SECTIONS, grid) + (sample.verbatim_bytes(grid) + sample.coded_bytes(grid)) as u64)
    }

    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        HuffmanTensor::from_sections(grid, |section| sections.get(section)).map(|_| ())
    }

    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable> {
        let code = Code::from_histogram(&survey.histogram, limit).expect("a matrix has elements");
        Ok(encode_with(matrix.bf16()?, &code)?.into_sections())
    }

    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        decode_into(&HuffmanTensor::from_sections(grid, |section| sections.get(section))?, out)
    }

    fn tile_rows(&self) -> Option<ReadTileRows> {
        Some(read_tile_rows)
    }
}

/// See [`Encoding::tile_rows`].
fn read_tile_rows<'a>(grid: TileGrid, sections: &Sections<'a>) -> Result<TileRows<'a>, CodecError> {
    let tensor = HuffmanTensor::from_sections(grid, |section| sections.get(section))?;
    let (exponents, rest) = (tensor.exponents, SignMantissa(tensor.sign_mantissa));
    Ok(decode::tile_rows(exponents, rest))
}

/// Encodes a matrix with its own optimal code under `limit`.
///
/// # Errors
/// The coded words would exceed 2^32.
pub fn encode(matrix: Matrix<'_>, limit: CodeLimit) -> Result<HuffmanTensor<Vec<u8>>, CodecError> {
    encode_with(matrix, &Code::of(matrix, limit))
}

/// Encodes a matrix with a given code, which need not be the tensor's own.
///
/// # Errors
/// As [`encode`].
pub fn encode_with(matrix: Matrix<'_>, code: &Code) -> Result<HuffmanTensor<Vec<u8>>, CodecError> {
    let (exponents, sign_mantissa) = encode_exponents(matrix.into(), code)?;
    Ok(HuffmanTensor { exponents, sign_mantissa })
}

/// Encodes the exponents of a matrix of any type, and returns sign and mantissa if it is BF16.
pub(crate) fn encode_exponents(
    matrix: FloatMatrix<'_>,
    code: &Code,
) -> Result<(CodedExponents<Vec<u8>>, Vec<u8>), CodecError> {
    let [sign_mantissa, row_lengths, metadata, mut words, verbatim] = bands::<true>(matrix, code, TILE)?;
    words.resize(words.len().next_multiple_of(SECTION_ALIGN), 0);
    let sections = [words, row_lengths, metadata, verbatim];
    Ok((CodedExponents::from_encoder(matrix.grid(), *code, sections), sign_mantissa))
}

/// A tensor whose coded rows are Huffman bits. `B` owns (`Vec<u8>`) or borrows (`&[u8]`) the section bytes.
///
/// Construction validates the sections (invariants 1-3), so every offset in them can be trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct HuffmanTensor<B> {
    exponents: CodedExponents<B>,
    sign_mantissa: B,
}

impl<B: AsRef<[u8]>> HuffmanTensor<B> {
    /// Reads and validates stored sections.
    ///
    /// # Errors
    /// A section has the wrong size, or invariant 1, 2 or 3 does not hold.
    pub fn from_sections(grid: TileGrid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let sign_mantissa = section(Section::SIGN_MANTISSA);
        Section::SIGN_MANTISSA.check(grid, &sign_mantissa)?;
        Ok(Self { exponents: CodedExponents::from_sections(grid, section)?, sign_mantissa })
    }

    /// Assembles an encoder's output without validation.
    pub(crate) fn from_encoder(grid: TileGrid, code: Code, sections: [B; 5]) -> Self {
        let [sign_mantissa, exponents @ ..] = sections;
        Self { exponents: CodedExponents::from_encoder(grid, code, exponents), sign_mantissa }
    }

    /// The coded exponents of the tensor.
    pub fn exponents(&self) -> &CodedExponents<B> {
        &self.exponents
    }

    /// The matrix's shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.exponents.grid()
    }

    /// Palette and code.
    pub fn code(&self) -> &Code {
        self.exponents.code()
    }

    /// Metadata of a tile ([`CodedExponents::metadata`]).
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn metadata(&self, tile: usize) -> TileMetadata {
        self.exponents.metadata(tile)
    }

    /// The coded bits of each row of a tile ([`CodedExponents::row_bits`]).
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn row_bits(&self, tile: usize) -> [u32; TILE] {
        self.exponents.row_bits(tile)
    }

    /// Bits from the tile's start to the end of each row ([`CodedExponents::row_end_offsets`]).
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn row_end_offsets(&self, tile: usize) -> [u16; TILE] {
        self.exponents.row_end_offsets(tile)
    }

    /// The bytes of one section.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        match section {
            Section::SIGN_MANTISSA => Some(Cow::Borrowed(self.sign_mantissa.as_ref())),
            _ => self.exponents.section(section),
        }
    }

    /// `sign_mantissa`: u8 `[n, k]`.
    pub fn sign_mantissa(&self) -> &[u8] {
        self.sign_mantissa.as_ref()
    }

    /// `encoded_exp` as little-endian bytes.
    pub fn encoded_exp(&self) -> &[u8] {
        self.exponents.encoded_exp()
    }

    /// `row_lengths`: u8 `[tiles, 64]`.
    pub fn row_lengths(&self) -> &[u8] {
        self.exponents.row_lengths()
    }

    /// `tile_metadata` as stored.
    pub fn tile_metadata(&self) -> &[u8] {
        self.exponents.tile_metadata()
    }

    /// `verbatim_exponents`: u8 `[rows, 64]`.
    pub fn verbatim_exponents(&self) -> &[u8] {
        self.exponents.verbatim_exponents()
    }

    /// Bytes of all sections together.
    pub fn coded_bytes(&self) -> u64 {
        Huffman::SECTIONS.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// The maximum number of verbatim rows in one tile ([`CodedExponents::max_verbatim_rows`]).
    pub fn max_verbatim_rows(&self) -> u32 {
        self.exponents.max_verbatim_rows()
    }
}

impl HuffmanTensor<Vec<u8>> {
    /// The sections in stored order.
    fn into_sections(self) -> Vec<Vec<u8>> {
        let mut sections = Vec::from(self.exponents.into_sections());
        sections.push(self.sign_mantissa);
        sections
    }
}

impl<B: AsRef<[u8]>> HuffmanTensor<B> {
    /// The typed view of a stored tensor; `None` if it has another encoding. To keep the tensor, pass
    /// [`StoredTensor::borrowed`].
    pub fn of(tensor: StoredTensor<B>) -> Option<Self> {
        let (grid, section) = tensor.take(EncodingId::HUFFMAN)?;
        Some(Self::from_sections(grid, section).expect("a stored tensor was checked"))
    }
}

impl From<HuffmanTensor<Vec<u8>>> for StoredTensor<Vec<u8>> {
    fn from(tensor: HuffmanTensor<Vec<u8>>) -> Self {
        Self::trusted(EncodingId::HUFFMAN, tensor.grid(), tensor.into_sections())
    }
}

debug_sizes!(HuffmanTensor, Huffman::SECTIONS);
