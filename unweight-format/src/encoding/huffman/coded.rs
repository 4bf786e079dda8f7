//! Coded exponents, shared by the encodings that store exponents as Huffman codes of tiles (`docs/format.md` A.4 -
//! A.6).

use std::borrow::Cow;

use super::Code;
use crate::{
    CodecError, Section, TileGrid, TileMetadata,
    encoding::tiles::{check_metadata, fixed_section, low_bits},
    layout::{ROW_BITS_MIN, TILE, WORDS_ALIGN},
};

/// The coded exponents of a matrix: the code, and the position of each row's bits. `B` owns (`Vec<u8>`) or borrows
/// (`&[u8]`) the section bytes.
///
/// Construction validates the sections (invariants 1-3), so every offset in them can be trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct CodedExponents<B> {
    grid: TileGrid,
    code: Code,
    encoded_exp: B,
    row_lengths: B,
    tile_metadata: B,
    verbatim_exponents: B,
}

impl<B: AsRef<[u8]>> CodedExponents<B> {
    /// Reads and validates stored sections.
    ///
    /// # Errors
    /// A section has the wrong size, or invariant 1, 2 or 3 does not hold.
    pub fn from_sections(grid: TileGrid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let palette = fixed_section(section(Section::PALETTE), Section::PALETTE, grid)?;
        let lengths = fixed_section(section(Section::CODE_LENGTHS), Section::CODE_LENGTHS, grid)?;
        let tensor = Self {
            grid,
            code: Code::from_stored(palette, lengths)?,
            encoded_exp: section(Section::ENCODED_EXP),
            row_lengths: section(Section::ROW_LENGTHS),
            tile_metadata: section(Section::TILE_METADATA),
            verbatim_exponents: section(Section::VERBATIM_EXPONENTS),
        };
        Section::ENCODED_EXP.check(grid, &tensor.encoded_exp)?;
        Section::ROW_LENGTHS.check(grid, &tensor.row_lengths)?;
        check_metadata(grid, &tensor.tile_metadata, &tensor.verbatim_exponents, |tile, rows, metadata| {
            tensor.tile_bits_checked(tile, rows, metadata)
        })?;
        let words = tensor.encoded_exp.as_ref().len() as u64 / 4;
        let last = grid.tiles() - 1;
        let metadata = tensor.metadata(last);
        let rows = grid.rows_in(grid.tile_rows() - 1);
        let end = u64::from(metadata.start_word) + u64::from(tensor.tile_bits(last, rows, metadata).div_ceil(32));
        if end.next_multiple_of(WORDS_ALIGN as u64) != words {
            let expected = end.next_multiple_of(WORDS_ALIGN as u64) * 4;
            return Err(CodecError::SectionBytes { section: "encoded_exp", expected, got: words * 4 });
        }
        Ok(tensor)
    }

    /// Assembles an encoder's output without validation.
    pub(crate) fn from_encoder(grid: TileGrid, code: Code, sections: [B; 4]) -> Self {
        let [encoded_exp, row_lengths, tile_metadata, verbatim_exponents] = sections;
        Self { grid, code, encoded_exp, row_lengths, tile_metadata, verbatim_exponents }
    }

    /// The matrix's shape and tiling.
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

    /// The coded bits of each row of a tile; 0 for verbatim and pad rows.
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

    /// The `row_end_offsets` of the report: bits from the tile's start to the end of each row.
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn row_end_offsets(&self, tile: usize) -> [u16; TILE] {
        let mut end = 0;
        // At most 64 * 319 bits, which fit u16 (const assert in `layout`).
        self.row_bits(tile).map(|bits| {
            end += bits as u16;
            end
        })
    }

    fn tile_bits(&self, tile: usize, rows: usize, metadata: TileMetadata) -> u32 {
        let coded = low_bits(rows) & !metadata.bitmask();
        let stored = &self.row_lengths.as_ref()[tile * TILE..][..TILE];
        // Rows without codes store 0 (checked), so all bytes can be summed.
        stored.iter().map(|&l| u32::from(l)).sum::<u32>() + coded.count_ones() * ROW_BITS_MIN
    }

    fn tile_bits_checked(&self, tile: usize, rows: usize, metadata: TileMetadata) -> Result<u32, CodecError> {
        let mut empty = !(low_bits(rows) & !metadata.bitmask());
        let stored = &self.row_lengths.as_ref()[tile * TILE..][..TILE];
        while empty != 0 {
            let row = empty.trailing_zeros() as usize;
            if stored[row] != 0 {
                return Err(CodecError::Row { tile, row, reason: "a row without codes has a stored length" });
            }
            empty &= empty - 1;
        }
        Ok(self.tile_bits(tile, rows, metadata))
    }

    /// The bytes of one section.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        use Cow::{Borrowed, Owned};
        Some(match section {
            Section::ENCODED_EXP => Borrowed(self.encoded_exp.as_ref()),
            Section::ROW_LENGTHS => Borrowed(self.row_lengths.as_ref()),
            Section::TILE_METADATA => Borrowed(self.tile_metadata.as_ref()),
            Section::VERBATIM_EXPONENTS => Borrowed(self.verbatim_exponents.as_ref()),
            Section::PALETTE => Owned(self.code.palette().stored().to_vec()),
            Section::CODE_LENGTHS => Owned(self.code.lengths().to_vec()),
            _ => return None,
        })
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

    /// The maximum number of verbatim rows in one tile, which selects the matmul's `MAX_VERBATIM_ROWS` (report section
    /// 4.3).
    pub fn max_verbatim_rows(&self) -> u32 {
        (0..self.grid.tiles()).map(|t| self.metadata(t).bitmask().count_ones()).max().unwrap_or(0)
    }
}

impl CodedExponents<Vec<u8>> {
    /// The sections in stored order.
    pub(crate) fn into_sections(self) -> [Vec<u8>; 6] {
        [
            self.code.palette().stored().to_vec(),
            self.code.lengths().to_vec(),
            self.tile_metadata,
            self.row_lengths,
            self.verbatim_exponents,
            self.encoded_exp,
        ]
    }
}
