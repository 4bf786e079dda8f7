//! Huffman-coded exponents (`docs/format.md` A.4 - A.6): the smallest form, decoded or transcoded before a kernel multiplies.

pub(crate) mod code;
mod decode;
pub(crate) mod encode;

use std::borrow::Cow;

pub use self::{
    code::{Code, CodeLimit, DecodeEntry},
    decode::{decode, decode_into, transcode},
};
use super::{
    Extent, Form, FormId, Sample, Section, Sections, StoredTensor, Survey, Unfit,
    sample::fixed_bytes,
    tiles::{check_metadata, debug_sizes, low_bits, small},
};
use crate::{
    CodecError, Matrix, TileGrid, TileMetadata,
    layout::{PALETTE_MAX, ROW_BITS_MIN, SECTION_ALIGN, TILE, WORDS_ALIGN},
    safetensors::Dtype,
};

/// The Huffman form.
#[derive(Debug, Clone, Copy)]
pub struct Huffman;

impl FormId {
    /// Huffman-coded exponents.
    pub const HUFFMAN: Self = Self::new("huffman");
}

impl Section {
    /// u8 `[16]`: bits of the palette entries' codes.
    pub const CODE_LENGTHS: Self = Self::new("code_lengths", Dtype::U8, &[Extent::Fixed(PALETTE_MAX)]);
    /// u8 `[tiles, 64]`: bits of each row, less 64.
    pub const ROW_LENGTHS: Self = Self::new("row_lengths", Dtype::U8, &[Extent::Tiles, Extent::Fixed(TILE)]);
    /// u32 `[words]`: the coded rows.
    pub const ENCODED_EXP: Self = Self::new("encoded_exp", Dtype::U32, &[Extent::Open]).padded_to(SECTION_ALIGN);
}

impl Form for Huffman {
    const ID: FormId = FormId::HUFFMAN;
    const SECTIONS: &'static [Section] = &[
        Section::PALETTE,
        Section::CODE_LENGTHS,
        Section::TILE_METADATA,
        Section::ROW_LENGTHS,
        Section::VERBATIM_EXPONENTS,
        Section::ENCODED_EXP,
        Section::SIGN_MANTISSA,
    ];
    const HARD: bool = true;

    fn fits(_: TileGrid) -> Result<(), Unfit> {
        Ok(())
    }

    fn predict(grid: TileGrid, sample: &Sample) -> Result<u64, Unfit> {
        Ok(fixed_bytes(Self::SECTIONS, grid) + (sample.verbatim_bytes(grid) + sample.coded_bytes(grid)) as u64)
    }

    fn check(grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        HuffmanTensor::from_sections(grid, |section| sections.get(section)).map(|_| ())
    }

    fn encode(matrix: Matrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, Unfit> {
        let code = Code::from_histogram(&survey.histogram, limit).expect("a matrix has elements");
        Ok(encode_with(matrix, &code)?.into_sections())
    }

    fn decode(grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        decode_into(&HuffmanTensor::from_sections(grid, |section| sections.get(section))?, out)
    }
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
    let [sign_mantissa, row_lengths, metadata, mut words, verbatim] = encode::bands::<true>(matrix, code, TILE)?;
    words.resize(words.len().next_multiple_of(SECTION_ALIGN), 0);
    Ok(HuffmanTensor::from_encoder(matrix.grid(), *code, [sign_mantissa, words, row_lengths, metadata, verbatim]))
}

/// A tensor whose coded rows are Huffman bits. `B` owns (`Vec<u8>`) or borrows (`&[u8]`) the section bytes.
///
/// Constructing one validates it (invariants 1-3), so every offset inside may be trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct HuffmanTensor<B> {
    grid: TileGrid,
    code: Code,
    sign_mantissa: B,
    encoded_exp: B,
    row_lengths: B,
    tile_metadata: B,
    verbatim_exponents: B,
}

impl<B: AsRef<[u8]>> HuffmanTensor<B> {
    /// Reads stored sections.
    ///
    /// # Errors
    /// A section has the wrong size, or invariant 1, 2 or 3 does not hold.
    pub fn from_sections(grid: TileGrid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let palette = small(section(Section::PALETTE), Section::PALETTE, grid)?;
        let lengths = small(section(Section::CODE_LENGTHS), Section::CODE_LENGTHS, grid)?;
        let tensor = Self {
            grid,
            code: Code::from_stored(palette, lengths)?,
            sign_mantissa: section(Section::SIGN_MANTISSA),
            encoded_exp: section(Section::ENCODED_EXP),
            row_lengths: section(Section::ROW_LENGTHS),
            tile_metadata: section(Section::TILE_METADATA),
            verbatim_exponents: section(Section::VERBATIM_EXPONENTS),
        };
        Section::SIGN_MANTISSA.check(grid, &tensor.sign_mantissa)?;
        Section::ENCODED_EXP.check(grid, &tensor.encoded_exp)?;
        Section::ROW_LENGTHS.check(grid, &tensor.row_lengths)?;
        check_metadata(grid, &tensor.tile_metadata, &tensor.verbatim_exponents, |tile, metadata| {
            tensor.tile_bits_checked(tile, metadata)
        })?;
        let words = tensor.encoded_exp.as_ref().len() as u64 / 4;
        let last = grid.tiles() - 1;
        let metadata = tensor.metadata(last);
        let end = u64::from(metadata.start_word) + u64::from(tensor.tile_bits(last, metadata).div_ceil(32));
        if end.next_multiple_of(WORDS_ALIGN as u64) != words {
            let expected = end.next_multiple_of(WORDS_ALIGN as u64) * 4;
            return Err(CodecError::SectionBytes { section: "encoded_exp", expected, got: words * 4 });
        }
        Ok(tensor)
    }

    /// Assembles what an encoder made.
    pub(crate) fn from_encoder(grid: TileGrid, code: Code, sections: [B; 5]) -> Self {
        let [sign_mantissa, encoded_exp, row_lengths, tile_metadata, verbatim_exponents] = sections;
        Self { grid, code, sign_mantissa, encoded_exp, row_lengths, tile_metadata, verbatim_exponents }
    }

    /// Shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// Palette and code.
    pub fn code(&self) -> &Code {
        &self.code
    }

    /// Metadata of a tile.
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn metadata(&self, tile: usize) -> TileMetadata {
        TileMetadata::read(self.tile_metadata.as_ref(), tile)
    }

    /// Coded bits of each row of a tile: 0 for verbatim and pad rows.
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn row_bits(&self, tile: usize) -> [u32; TILE] {
        let bitmask = self.metadata(tile).bitmask();
        let rows = self.grid.rows_in(tile / self.grid.tile_cols());
        let stored = &self.row_lengths.as_ref()[tile * TILE..][..TILE];
        std::array::from_fn(|row| {
            if row < rows && bitmask >> row & 1 == 0 { u32::from(stored[row]) + ROW_BITS_MIN } else { 0 }
        })
    }

    /// `row_end_offsets` of the report: bits from the tile's start to the end of each row.
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn row_end_offsets(&self, tile: usize) -> [u16; TILE] {
        let mut end = 0;
        // At most 64 * 319 bits: it fits u16 (const assert in `layout`).
        self.row_bits(tile).map(|bits| {
            end += bits as u16;
            end
        })
    }

    fn tile_bits(&self, tile: usize, metadata: TileMetadata) -> u32 {
        let rows = self.grid.rows_in(tile / self.grid.tile_cols());
        let coded = low_bits(rows) & !metadata.bitmask();
        let stored = &self.row_lengths.as_ref()[tile * TILE..][..TILE];
        // The rows without codes store 0 (checked), so their bytes may be added.
        stored.iter().map(|&l| u32::from(l)).sum::<u32>() + coded.count_ones() * ROW_BITS_MIN
    }

    fn tile_bits_checked(&self, tile: usize, metadata: TileMetadata) -> Result<u32, CodecError> {
        let rows = self.grid.rows_in(tile / self.grid.tile_cols());
        let mut empty = !(low_bits(rows) & !metadata.bitmask());
        let stored = &self.row_lengths.as_ref()[tile * TILE..][..TILE];
        while empty != 0 {
            let row = empty.trailing_zeros() as usize;
            if stored[row] != 0 {
                return Err(CodecError::Row { tile, row, reason: "a row without codes has a stored length" });
            }
            empty &= empty - 1;
        }
        Ok(self.tile_bits(tile, metadata))
    }

    /// The bytes of one section.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        use Cow::{Borrowed, Owned};
        Some(match section {
            Section::SIGN_MANTISSA => Borrowed(self.sign_mantissa.as_ref()),
            Section::ENCODED_EXP => Borrowed(self.encoded_exp.as_ref()),
            Section::ROW_LENGTHS => Borrowed(self.row_lengths.as_ref()),
            Section::TILE_METADATA => Borrowed(self.tile_metadata.as_ref()),
            Section::VERBATIM_EXPONENTS => Borrowed(self.verbatim_exponents.as_ref()),
            Section::PALETTE => Owned(self.code.palette().stored().to_vec()),
            Section::CODE_LENGTHS => Owned(self.code.lengths().to_vec()),
            _ => return None,
        })
    }

    /// `sign_mantissa`: u8 `[n, k]`.
    pub fn sign_mantissa(&self) -> &[u8] {
        self.sign_mantissa.as_ref()
    }

    /// `encoded_exp` as little-endian bytes.
    pub fn encoded_exp(&self) -> &[u8] {
        self.encoded_exp.as_ref()
    }

    /// `row_lengths`: u8 `[tiles, 64]`.
    pub fn row_lengths(&self) -> &[u8] {
        self.row_lengths.as_ref()
    }

    /// `tile_metadata` as stored.
    pub fn tile_metadata(&self) -> &[u8] {
        self.tile_metadata.as_ref()
    }

    /// `verbatim_exponents`: u8 `[rows, 64]`.
    pub fn verbatim_exponents(&self) -> &[u8] {
        self.verbatim_exponents.as_ref()
    }

    /// Bytes of all sections.
    pub fn coded_bytes(&self) -> u64 {
        Huffman::SECTIONS.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// Most verbatim rows in one tile: what selects the matmul's `MAX_VERBATIM_ROWS` (report section 4.3).
    pub fn max_verbatim_rows(&self) -> u32 {
        (0..self.grid.tiles()).map(|t| self.metadata(t).bitmask().count_ones()).max().unwrap_or(0)
    }
}

impl HuffmanTensor<Vec<u8>> {
    /// In stored order.
    fn into_sections(self) -> Vec<Vec<u8>> {
        vec![
            self.code.palette().stored().to_vec(),
            self.code.lengths().to_vec(),
            self.tile_metadata,
            self.row_lengths,
            self.verbatim_exponents,
            self.encoded_exp,
            self.sign_mantissa,
        ]
    }
}

impl<B: AsRef<[u8]>> HuffmanTensor<B> {
    /// The view of a stored tensor; `None` if it has another form. [`StoredTensor::borrowed`] keeps the tensor.
    pub fn of(tensor: StoredTensor<B>) -> Option<Self> {
        let (grid, section) = tensor.take(FormId::HUFFMAN)?;
        Some(Self::from_sections(grid, section).expect("a stored tensor was checked"))
    }
}

impl From<HuffmanTensor<Vec<u8>>> for StoredTensor<Vec<u8>> {
    fn from(tensor: HuffmanTensor<Vec<u8>>) -> Self {
        Self::trusted(FormId::HUFFMAN, tensor.grid, tensor.into_sections())
    }
}

debug_sizes!(HuffmanTensor, Huffman::SECTIONS);
