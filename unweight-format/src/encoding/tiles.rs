//! Shared by the encodings whose tiles have verbatim rows (`docs/format.md` A.5 - A.7): sections, their invariants, and
//! joining bytes to weights.

use super::{Extent, Section};
use crate::{
    CodecError, Float, TileGrid, TileMetadata, bf16,
    layout::{PALETTE_MAX, TILE, TILE_METADATA_BYTES},
    safetensors::Dtype,
};

impl Section {
    /// u8 `[n, k]`: sign and mantissa of every weight.
    pub const SIGN_MANTISSA: Self = Self::new("sign_mantissa", Dtype::U8, &[Extent::Rows, Extent::Cols]);
    /// u32 `[tiles, 4]`: [`TileMetadata`].
    pub const TILE_METADATA: Self =
        Self::new("tile_metadata", Dtype::U32, &[Extent::Tiles, Extent::Fixed(TILE_METADATA_BYTES / 4)]);
    /// u8 `[rows, 64]`: exponents of the verbatim rows.
    pub const VERBATIM_EXPONENTS: Self =
        Self::new("verbatim_exponents", Dtype::U8, &[Extent::Open, Extent::Fixed(TILE)]);
    /// u8 `[16]`: exponents, most frequent first.
    pub const PALETTE: Self = Self::new("palette", Dtype::U8, &[Extent::Fixed(PALETTE_MAX)]);
}

/// The lowest `n` bits set, n in 0..=64.
pub(crate) fn low_bits(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

pub(crate) fn fixed_section<B: AsRef<[u8]>>(
    bytes: B,
    section: Section,
    grid: TileGrid,
) -> Result<[u8; PALETTE_MAX], CodecError> {
    section.check(grid, &bytes)?;
    Ok(bytes.as_ref().try_into().expect("its size was checked"))
}

/// Checks invariants 1 and 2: every offset is the sum of the sizes before it. `tile_bits` returns the coded bits of a
/// tile, given its index and the rows of the matrix in it.
pub(crate) fn check_metadata<B: AsRef<[u8]>>(
    grid: TileGrid,
    section: &B,
    verbatim: &B,
    tile_bits: impl Fn(usize, usize, TileMetadata) -> Result<u32, CodecError>,
) -> Result<(), CodecError> {
    Section::TILE_METADATA.check(grid, section)?;
    Section::VERBATIM_EXPONENTS.check(grid, verbatim)?;
    let (mut words, mut verbatim_rows) = (0u64, 0u64);
    // Not by dividing the index of each tile, which takes as long as the rest.
    let tiles = (0..grid.tile_rows()).flat_map(|row| std::iter::repeat_n(grid.rows_in(row), grid.tile_cols()));
    for (tile, rows) in tiles.enumerate() {
        let metadata = TileMetadata::read(section.as_ref(), tile);
        let fail = |field, expected, got: u32| Err(CodecError::TileMetadata { tile, field, expected, got: got.into() });
        if u64::from(metadata.start_word) != words {
            return fail("start_word", words, metadata.start_word);
        }
        if u64::from(metadata.verbatim_row_offset) != verbatim_rows {
            return fail("verbatim_row_offset", verbatim_rows, metadata.verbatim_row_offset);
        }
        let pad = metadata.bitmask() & !low_bits(rows);
        if pad != 0 {
            let row = pad.trailing_zeros() as usize;
            return Err(CodecError::Row { tile, row, reason: "a row below the matrix is marked verbatim" });
        }
        words += u64::from(tile_bits(tile, rows, metadata)?.div_ceil(32));
        verbatim_rows += u64::from(metadata.bitmask().count_ones());
    }
    let got = verbatim.as_ref().len() as u64;
    if verbatim_rows * TILE as u64 != got {
        let expected = verbatim_rows * TILE as u64;
        return Err(CodecError::SectionBytes { section: Section::VERBATIM_EXPONENTS.name(), expected, got });
    }
    Ok(())
}

/// Joins rows of any length, 64 elements at a time and the rest one by one.
#[inline(always)]
pub(crate) fn join(sign_mantissa: &[u8], exponents: &[u8], out: &mut [u8]) {
    let mut out = out.chunks_exact_mut(2 * TILE);
    let (mut s, mut e) = (sign_mantissa.chunks_exact(TILE), exponents.chunks_exact(TILE));
    for ((s, e), out) in (&mut s).zip(&mut e).zip(&mut out) {
        let mut joined = [0u16; TILE];
        for i in 0..TILE {
            joined[i] = bf16::join(s[i], e[i]).to_le();
        }
        out.copy_from_slice(bytemuck::bytes_of(&joined));
    }
    for ((&s, &e), out) in s.remainder().iter().zip(e.remainder()).zip(out.into_remainder().chunks_exact_mut(2)) {
        out.copy_from_slice(&bf16::join(s, e).to_le_bytes());
    }
}

/// Checks that `out` has the size of the BF16 weights of `grid`.
pub(crate) fn check_out(grid: TileGrid, out: &[u8]) -> Result<(), CodecError> {
    check_out_bytes(Float::Bf16, grid, out)
}

/// Like [`check_out`], for any type.
pub(crate) fn check_out_bytes(float: Float, grid: TileGrid, out: &[u8]) -> Result<(), CodecError> {
    // No overflow: the grid has checked four bytes per element.
    let expected = grid.elements() * float.bytes();
    if out.len() == expected {
        return Ok(());
    }
    Err(CodecError::MatrixBytes { float, rows: grid.rows(), cols: grid.cols(), expected, got: out.len() })
}

/// Implements `Debug`, which prints the sizes of sections instead of their bytes.
macro_rules! debug_sizes {
    ($name:ident, $sections:expr) => {
        impl<B: AsRef<[u8]>> std::fmt::Debug for $name<B> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut debug = f.debug_struct(stringify!($name));
                debug.field("grid", &self.grid());
                for section in $sections.iter().copied() {
                    debug.field(section.name(), &self.section(section).map_or(0, |bytes| bytes.len()));
                }
                debug.finish()
            }
        }
    };
}
pub(crate) use debug_sizes;
