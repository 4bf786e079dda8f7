//! A tensor in each of its stored forms (`docs/format.md` A.6 - A.9), owned or borrowed.

use std::borrow::Cow;

use crate::{
    Code, CodecError, Grid, PackedTensor, Palette, TileMetadata,
    bundle::Encoding,
    layout::{PALETTE_MAX, PALETTE_TILE_BYTES, ROW_BITS_MIN, TILE, WORDS_ALIGN},
    packed,
};

/// A named part of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Section {
    /// u8 `[n, k]`.
    SignMantissa,
    /// u32 `[words]`.
    EncodedExp,
    /// u8 `[tiles, 64]`.
    RowLengths,
    /// u32 `[tiles, 4]`.
    TileMetadata,
    /// u8 `[rows, 64]`.
    VerbatimExponents,
    /// u8 `[16]`.
    Palette,
    /// u8 `[16]`.
    CodeLengths,
    /// u8 `[tiles, 64, 32]`.
    PaletteIndex,
    /// u8 `[tiles, 6144]`.
    Packed,
    /// u32 `[tiles, 4]`.
    EscapeHeads,
    /// u32 `[words]`.
    Escapes,
    /// u8 `[16]`.
    PackedWindow,
}

impl Section {
    /// The sections of a Huffman tensor, in stored order.
    pub const HUFFMAN: [Self; 7] = [
        Self::Palette,
        Self::CodeLengths,
        Self::TileMetadata,
        Self::RowLengths,
        Self::VerbatimExponents,
        Self::EncodedExp,
        Self::SignMantissa,
    ];
    /// The sections of a palette tensor, in stored order.
    pub const PALETTE: [Self; 5] =
        [Self::Palette, Self::TileMetadata, Self::VerbatimExponents, Self::PaletteIndex, Self::SignMantissa];
    /// The sections of a packed tensor, in stored order.
    pub const PACKED: [Self; 4] = [Self::PackedWindow, Self::EscapeHeads, Self::Escapes, Self::Packed];

    /// The field's name in the specification.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SignMantissa => "sign_mantissa",
            Self::EncodedExp => "encoded_exp",
            Self::RowLengths => "row_lengths",
            Self::TileMetadata => "tile_metadata",
            Self::VerbatimExponents => "verbatim_exponents",
            Self::Palette => "palette",
            Self::CodeLengths => "code_lengths",
            Self::PaletteIndex => "palette_index",
            Self::Packed => "packed",
            Self::EscapeHeads => "escape_heads",
            Self::Escapes => "escapes",
            Self::PackedWindow => "packed_window",
        }
    }

    /// Bytes of one stored element: 4 for the u32 sections, 1 for the others.
    pub const fn element_bytes(self) -> usize {
        if matches!(self, Self::EncodedExp | Self::TileMetadata | Self::EscapeHeads | Self::Escapes) { 4 } else { 1 }
    }

    /// Shape of the stored section with `bytes` bytes in a tensor of this grid.
    pub fn shape(self, grid: Grid, bytes: usize) -> Vec<usize> {
        match self {
            Self::SignMantissa => vec![grid.rows(), grid.cols()],
            Self::EncodedExp | Self::Escapes => vec![bytes / 4],
            Self::RowLengths => vec![grid.tiles(), TILE],
            Self::TileMetadata | Self::EscapeHeads => vec![grid.tiles(), 4],
            Self::VerbatimExponents => vec![bytes / TILE, TILE],
            Self::Palette | Self::CodeLengths => vec![PALETTE_MAX],
            Self::PaletteIndex => vec![grid.tiles(), TILE, TILE / 2],
            Self::Packed => vec![grid.tiles(), packed::TILE_BYTES],
            Self::PackedWindow => vec![packed::WINDOW_BYTES],
        }
    }

    /// Bytes that the grid alone determines; `None` for the sections whose size depends on the weights.
    pub fn fixed_bytes(self, grid: Grid) -> Option<usize> {
        match self {
            Self::SignMantissa => Some(grid.elements()),
            Self::RowLengths => Some(grid.tiles() * TILE),
            Self::TileMetadata => Some(grid.tiles() * TileMetadata::BYTES),
            Self::Palette | Self::CodeLengths => Some(PALETTE_MAX),
            Self::PaletteIndex => Some(grid.tiles() * PALETTE_TILE_BYTES),
            Self::Packed => Some(grid.tiles() * packed::TILE_BYTES),
            Self::EscapeHeads => Some(grid.tiles() * packed::ROW_BLOCKS * 4),
            Self::PackedWindow => Some(packed::WINDOW_BYTES),
            Self::EncodedExp | Self::VerbatimExponents | Self::Escapes => None,
        }
    }

    pub(crate) fn check<B: AsRef<[u8]>>(self, grid: Grid, bytes: &B) -> Result<(), CodecError> {
        let got = bytes.as_ref().len() as u64;
        let expected = match self {
            Self::EncodedExp | Self::Escapes => got.next_multiple_of(4 * WORDS_ALIGN as u64),
            Self::VerbatimExponents => got.next_multiple_of(TILE as u64),
            _ => self.fixed_bytes(grid).expect("the other sections are fixed") as u64,
        };
        if got == expected { Ok(()) } else { Err(CodecError::SectionBytes { section: self.name(), expected, got }) }
    }
}

/// A tensor whose coded rows are Huffman bits. `B` owns (`Vec<u8>`) or borrows (`&[u8]`) the section bytes.
///
/// Constructing one validates it (invariants 1-3), so every offset inside may be trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct HuffmanTensor<B> {
    grid: Grid,
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
    pub fn from_sections(grid: Grid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let palette = small(section(Section::Palette), Section::Palette, grid)?;
        let lengths = small(section(Section::CodeLengths), Section::CodeLengths, grid)?;
        let tensor = Self {
            grid,
            code: Code::from_stored(palette, lengths)?,
            sign_mantissa: section(Section::SignMantissa),
            encoded_exp: section(Section::EncodedExp),
            row_lengths: section(Section::RowLengths),
            tile_metadata: section(Section::TileMetadata),
            verbatim_exponents: section(Section::VerbatimExponents),
        };
        Section::SignMantissa.check(grid, &tensor.sign_mantissa)?;
        Section::EncodedExp.check(grid, &tensor.encoded_exp)?;
        Section::RowLengths.check(grid, &tensor.row_lengths)?;
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
    pub(crate) fn from_encoder(grid: Grid, code: Code, sections: [B; 5]) -> Self {
        let [sign_mantissa, encoded_exp, row_lengths, tile_metadata, verbatim_exponents] = sections;
        Self { grid, code, sign_mantissa, encoded_exp, row_lengths, tile_metadata, verbatim_exponents }
    }

    /// Shape and tiling.
    pub fn grid(&self) -> Grid {
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
            Section::SignMantissa => Borrowed(self.sign_mantissa.as_ref()),
            Section::EncodedExp => Borrowed(self.encoded_exp.as_ref()),
            Section::RowLengths => Borrowed(self.row_lengths.as_ref()),
            Section::TileMetadata => Borrowed(self.tile_metadata.as_ref()),
            Section::VerbatimExponents => Borrowed(self.verbatim_exponents.as_ref()),
            Section::Palette => Owned(self.code.palette().stored().to_vec()),
            Section::CodeLengths => Owned(self.code.lengths().to_vec()),
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
        Section::HUFFMAN.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// Most verbatim rows in one tile: what selects the matmul's `MAX_VERBATIM_ROWS` (report section 4.3).
    pub fn max_verbatim_rows(&self) -> u32 {
        (0..self.grid.tiles()).map(|t| self.metadata(t).bitmask().count_ones()).max().unwrap_or(0)
    }
}

/// A tensor whose coded rows are packed 4-bit palette indices (report section 3.6).
///
/// Constructing one validates it, so every offset inside may be trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct PaletteTensor<B> {
    grid: Grid,
    palette: [u8; PALETTE_MAX],
    sign_mantissa: B,
    palette_index: B,
    tile_metadata: B,
    verbatim_exponents: B,
}

impl<B: AsRef<[u8]>> PaletteTensor<B> {
    /// Reads stored sections.
    ///
    /// # Errors
    /// A section has the wrong size, invariant 2 does not hold, a `start_word` is not 0, or the palette is not valid.
    pub fn from_sections(grid: Grid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let stored = small(section(Section::Palette), Section::Palette, grid)?;
        // Unused entries are 0, and so may be the last one in use: nothing tells them apart, and nothing needs to.
        Palette::from_stored(stored, stored.iter().rposition(|&e| e != 0).map_or(1, |last| last + 1))?;
        let tensor = Self {
            grid,
            palette: stored,
            sign_mantissa: section(Section::SignMantissa),
            palette_index: section(Section::PaletteIndex),
            tile_metadata: section(Section::TileMetadata),
            verbatim_exponents: section(Section::VerbatimExponents),
        };
        Section::SignMantissa.check(grid, &tensor.sign_mantissa)?;
        Section::PaletteIndex.check(grid, &tensor.palette_index)?;
        check_metadata(grid, &tensor.tile_metadata, &tensor.verbatim_exponents, |_, _| Ok(0))?;
        tensor.check_unused_indices()?;
        Ok(tensor)
    }

    /// Indices of verbatim rows, pad rows and pad columns are 0.
    fn check_unused_indices(&self) -> Result<(), CodecError> {
        for (tile, rows) in self.palette_index.as_ref().chunks_exact(PALETTE_TILE_BYTES).enumerate() {
            let (tile_row, tile_col) = (tile / self.grid.tile_cols(), tile % self.grid.tile_cols());
            let (bitmask, width) = (self.metadata(tile).bitmask(), self.grid.cols_in(tile_col));
            let coded = low_bits(self.grid.rows_in(tile_row)) & !bitmask;
            if coded == u64::MAX && width == TILE {
                continue;
            }
            for (row, indices) in rows.chunks_exact(TILE / 2).enumerate() {
                let used = if coded >> row & 1 == 1 { width } else { 0 };
                let half_used = used % 2 == 1 && indices[used / 2] >> 4 != 0;
                if half_used || indices[used.div_ceil(2)..].iter().any(|&pair| pair != 0) {
                    let reason = "palette indices that stand for nothing are not 0";
                    return Err(CodecError::Row { tile, row, reason });
                }
            }
        }
        Ok(())
    }

    /// Assembles what an encoder made.
    pub(crate) fn from_encoder(grid: Grid, palette: Palette, sections: [B; 4]) -> Self {
        let [sign_mantissa, palette_index, tile_metadata, verbatim_exponents] = sections;
        Self { grid, palette: palette.stored(), sign_mantissa, palette_index, tile_metadata, verbatim_exponents }
    }

    /// Shape and tiling.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// The palette's 16 stored entries.
    pub fn palette(&self) -> [u8; PALETTE_MAX] {
        self.palette
    }

    /// Metadata of a tile (`start_word` is 0).
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn metadata(&self, tile: usize) -> TileMetadata {
        TileMetadata::read(self.tile_metadata.as_ref(), tile)
    }

    /// The bytes of one section.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        use Cow::{Borrowed, Owned};
        Some(match section {
            Section::SignMantissa => Borrowed(self.sign_mantissa.as_ref()),
            Section::TileMetadata => Borrowed(self.tile_metadata.as_ref()),
            Section::VerbatimExponents => Borrowed(self.verbatim_exponents.as_ref()),
            Section::PaletteIndex => Borrowed(self.palette_index.as_ref()),
            Section::Palette => Owned(self.palette.to_vec()),
            _ => return None,
        })
    }

    /// `sign_mantissa`: u8 `[n, k]`.
    pub fn sign_mantissa(&self) -> &[u8] {
        self.sign_mantissa.as_ref()
    }

    /// `palette_index`: u8 `[tiles, 64, 32]`.
    pub fn palette_index(&self) -> &[u8] {
        self.palette_index.as_ref()
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
        Section::PALETTE.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// Most verbatim rows in one tile.
    pub fn max_verbatim_rows(&self) -> u32 {
        (0..self.grid.tiles()).map(|t| self.metadata(t).bitmask().count_ones()).max().unwrap_or(0)
    }
}

/// Sizes, not megabytes.
macro_rules! debug_sizes {
    ($name:ident, $sections:expr) => {
        impl<B: AsRef<[u8]>> std::fmt::Debug for $name<B> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut debug = f.debug_struct(stringify!($name));
                debug.field("grid", &self.grid());
                for section in $sections {
                    debug.field(section.name(), &self.section(section).map_or(0, |bytes| bytes.len()));
                }
                debug.finish()
            }
        }
    };
}
debug_sizes!(HuffmanTensor, Section::HUFFMAN);
debug_sizes!(PaletteTensor, Section::PALETTE);
debug_sizes!(PackedTensor, Section::PACKED);

/// A tensor in the form that was chosen for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CompressedTensor<B: AsRef<[u8]>> {
    /// The original bytes.
    Raw(B),
    /// Huffman-coded exponents.
    Huffman(HuffmanTensor<B>),
    /// Packed palette indices.
    Palette(PaletteTensor<B>),
    /// The resident form.
    Packed(PackedTensor<B>),
}

impl<B: AsRef<[u8]>> CompressedTensor<B> {
    /// Its encoding.
    pub fn encoding(&self) -> Encoding {
        match self {
            Self::Raw(_) => Encoding::Raw,
            Self::Huffman(_) => Encoding::Huffman,
            Self::Palette(_) => Encoding::Palette,
            Self::Packed(_) => Encoding::Packed,
        }
    }

    /// The bytes of one section; `None` if this form does not have it.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        match self {
            Self::Raw(_) => None,
            Self::Huffman(tensor) => tensor.section(section),
            Self::Palette(tensor) => tensor.section(section),
            Self::Packed(tensor) => tensor.section(section),
        }
    }

    /// Bytes of all sections, or of the original.
    pub fn stored_bytes(&self) -> u64 {
        match self {
            Self::Raw(bytes) => bytes.as_ref().len() as u64,
            Self::Huffman(tensor) => tensor.coded_bytes(),
            Self::Palette(tensor) => tensor.coded_bytes(),
            Self::Packed(tensor) => tensor.stored_bytes(),
        }
    }
}

/// The lowest `n` bits set, n in 0..=64.
pub(crate) fn low_bits(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

fn small<B: AsRef<[u8]>>(bytes: B, section: Section, grid: Grid) -> Result<[u8; PALETTE_MAX], CodecError> {
    section.check(grid, &bytes)?;
    Ok(bytes.as_ref().try_into().expect("its size was checked"))
}

/// Invariants 1 and 2: every offset is the sum of what came before.
fn check_metadata<B: AsRef<[u8]>>(
    grid: Grid,
    section: &B,
    verbatim: &B,
    tile_bits: impl Fn(usize, TileMetadata) -> Result<u32, CodecError>,
) -> Result<(), CodecError> {
    Section::TileMetadata.check(grid, section)?;
    Section::VerbatimExponents.check(grid, verbatim)?;
    let (mut words, mut verbatim_rows) = (0u64, 0u64);
    for tile in 0..grid.tiles() {
        let metadata = TileMetadata::read(section.as_ref(), tile);
        let fail = |field, expected, got: u32| Err(CodecError::TileMetadata { tile, field, expected, got: got.into() });
        if u64::from(metadata.start_word) != words {
            return fail("start_word", words, metadata.start_word);
        }
        if u64::from(metadata.verbatim_row_offset) != verbatim_rows {
            return fail("verbatim_row_offset", verbatim_rows, metadata.verbatim_row_offset);
        }
        let pad = metadata.bitmask() & !low_bits(grid.rows_in(tile / grid.tile_cols()));
        if pad != 0 {
            let row = pad.trailing_zeros() as usize;
            return Err(CodecError::Row { tile, row, reason: "a row below the matrix is marked verbatim" });
        }
        words += u64::from(tile_bits(tile, metadata)?.div_ceil(32));
        verbatim_rows += u64::from(metadata.bitmask().count_ones());
    }
    let got = verbatim.as_ref().len() as u64;
    if verbatim_rows * TILE as u64 != got {
        let expected = verbatim_rows * TILE as u64;
        return Err(CodecError::SectionBytes { section: "verbatim_exponents", expected, got });
    }
    Ok(())
}
