//! Packed palette indices (`docs/format.md` A.3, A.7): 4 bits per exponent, which kernels read without decoding.

use std::borrow::Cow;

pub use super::code::Palette;
use super::{
    Encoding, EncodingId, Extent, NotEncodable, ReadTileRows, Sample, Section, Sections, StoredTensor, Survey,
    TileRows,
    bands::bands,
    sample::fixed_bytes,
    tiles::{check_metadata, check_out, debug_sizes, fixed_section, join, low_bits},
};
use crate::{
    Code, CodeLimit, CodecError, FloatMatrix, Matrix, TileGrid, TileMetadata,
    layout::{PALETTE_MAX, PALETTE_TILE_BYTES, TILE},
    parallel,
    safetensors::Dtype,
};

/// The palette encoding.
#[derive(Debug, Clone, Copy)]
pub struct PaletteEncoding;

impl EncodingId {
    /// Packed palette indices.
    pub const PALETTE: Self = Self::new("palette");
}

impl Section {
    /// u8 `[tiles, 64, 32]`: two indices per byte.
    pub const PALETTE_INDEX: Self =
        Self::new("palette_index", Dtype::U8, &[Extent::Tiles, Extent::Fixed(TILE), Extent::Fixed(TILE / 2)]);
}

impl PaletteEncoding {
    /// The sections in stored order.
    const SECTIONS: &'static [Section] = &[
        Section::PALETTE,
        Section::TILE_METADATA,
        Section::VERBATIM_EXPONENTS,
        Section::PALETTE_INDEX,
        Section::SIGN_MANTISSA,
    ];
}

impl Encoding for PaletteEncoding {
    fn id(&self) -> EncodingId {
        EncodingId::PALETTE
    }

    fn sections(&self) -> &'static [Section] {
        Self::SECTIONS
    }

    fn fits(&self, _: TileGrid) -> Result<(), NotEncodable> {
        Ok(())
    }

    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable> {
        Ok(fixed_bytes(Self::SECTIONS, grid) + sample.verbatim_bytes(grid) as u64)
    }

    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        PaletteTensor::from_sections(grid, |section| sections.get(section)).map(|_| ())
    }

    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable> {
        let code = Code::from_histogram(&survey.histogram, limit).expect("a matrix has elements");
        Ok(encode_with(matrix.bf16()?, &code)?.into_sections())
    }

    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        decode_into(&PaletteTensor::from_sections(grid, |section| sections.get(section))?, out)
    }

    fn tile_rows(&self) -> Option<ReadTileRows> {
        Some(read_tile_rows)
    }
}

/// See [`Encoding::tile_rows`].
fn read_tile_rows<'a>(grid: TileGrid, sections: &Sections<'a>) -> Result<TileRows<'a>, CodecError> {
    let tensor = PaletteTensor::from_sections(grid, |section| sections.get(section))?;
    Ok(Box::new(move |first, out| {
        decode_tile_rows(&tensor, first, out);
        Ok(())
    }))
}

/// Encodes a matrix to packed palette indices. `limit` only determines which rows are verbatim (`docs/format.md` A.7).
///
/// # Errors
/// As [`huffman::encode`](crate::huffman::encode).
pub fn encode(matrix: Matrix<'_>, limit: CodeLimit) -> Result<PaletteTensor<Vec<u8>>, CodecError> {
    encode_with(matrix, &Code::of(matrix, limit))
}

/// Packs palette indices; the rows that `code` cannot code are verbatim.
///
/// # Errors
/// As [`encode`].
pub fn encode_with(matrix: Matrix<'_>, code: &Code) -> Result<PaletteTensor<Vec<u8>>, CodecError> {
    let [sign_mantissa, packed, metadata, _, verbatim] = bands::<false>(matrix.into(), code, PALETTE_TILE_BYTES)?;
    Ok(PaletteTensor::from_encoder(matrix.grid(), *code.palette(), [sign_mantissa, packed, metadata, verbatim]))
}

/// Decodes packed palette indices into `out`, on the current rayon pool.
///
/// # Errors
/// `out` is not `n * k * 2` bytes long.
pub fn decode_into<B: AsRef<[u8]> + Sync>(tensor: &PaletteTensor<B>, out: &mut [u8]) -> Result<(), CodecError> {
    check_out(tensor.grid(), out)?;
    decode_tile_rows(tensor, 0, out);
    Ok(())
}

/// Decodes the tile rows from index `first` on that fill `out`.
fn decode_tile_rows<B: AsRef<[u8]> + Sync>(tensor: &PaletteTensor<B>, first: usize, out: &mut [u8]) {
    let grid = tensor.grid();
    let palette = tensor.palette();
    // Looks up both nibbles of a byte at once.
    let pairs: Vec<[u8; 2]> = (0..256).map(|b| [palette[b & 15], palette[b >> 4]]).collect();
    parallel::for_each_chunk(out, TILE * grid.cols() * 2, &|tile_row, out| {
        let (tile_row, cols) = (first + tile_row, grid.cols());
        for tile_col in 0..grid.tile_cols() {
            let tile = tile_row * grid.tile_cols() + tile_col;
            let metadata = tensor.metadata(tile);
            let packed = &tensor.palette_index()[tile * PALETTE_TILE_BYTES..][..PALETTE_TILE_BYTES];
            let mut verbatim = metadata.verbatim_row_offset as usize;
            let width = grid.cols_in(tile_col);
            for row in 0..grid.rows_in(tile_row) {
                let mut exponents = [0u8; TILE];
                if metadata.bitmask() >> row & 1 == 1 {
                    exponents.copy_from_slice(&tensor.verbatim_exponents()[verbatim * TILE..][..TILE]);
                    verbatim += 1;
                } else {
                    for (pair, &byte) in exponents.chunks_exact_mut(2).zip(&packed[row * (TILE / 2)..][..TILE / 2]) {
                        pair.copy_from_slice(&pairs[usize::from(byte)]);
                    }
                }
                let at = row * cols + tile_col * TILE;
                let sign_mantissa = &tensor.sign_mantissa()[tile_row * TILE * cols + at..][..width];
                join(sign_mantissa, &exponents[..width], &mut out[at * 2..(at + width) * 2]);
            }
        }
    });
}

/// A tensor whose coded rows are packed 4-bit palette indices (report section 3.6).
///
/// Construction validates the sections, so every offset in them can be trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct PaletteTensor<B> {
    grid: TileGrid,
    palette: [u8; PALETTE_MAX],
    sign_mantissa: B,
    palette_index: B,
    tile_metadata: B,
    verbatim_exponents: B,
}

impl<B: AsRef<[u8]>> PaletteTensor<B> {
    /// Reads and validates stored sections.
    ///
    /// # Errors
    /// A section has the wrong size, invariant 2 does not hold, a `start_word` is not 0, or the palette is not valid.
    pub fn from_sections(grid: TileGrid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let stored = fixed_section(section(Section::PALETTE), Section::PALETTE, grid)?;
        // Unused entries are 0, and the last used entry may be 0, too. The two cases need not be distinguished.
        Palette::from_stored(stored, stored.iter().rposition(|&e| e != 0).map_or(1, |last| last + 1))?;
        let tensor = Self {
            grid,
            palette: stored,
            sign_mantissa: section(Section::SIGN_MANTISSA),
            palette_index: section(Section::PALETTE_INDEX),
            tile_metadata: section(Section::TILE_METADATA),
            verbatim_exponents: section(Section::VERBATIM_EXPONENTS),
        };
        Section::SIGN_MANTISSA.check(grid, &tensor.sign_mantissa)?;
        Section::PALETTE_INDEX.check(grid, &tensor.palette_index)?;
        check_metadata(grid, &tensor.tile_metadata, &tensor.verbatim_exponents, |_, _, _| Ok(0))?;
        tensor.check_unused_indices()?;
        Ok(tensor)
    }

    /// Checks that the indices of verbatim rows, pad rows and pad columns are 0.
    fn check_unused_indices(&self) -> Result<(), CodecError> {
        let grid = self.grid;
        let places = (0..grid.tile_rows()).flat_map(|row| (0..grid.tile_cols()).map(move |col| (row, col)));
        let tiles = self.palette_index.as_ref().chunks_exact(PALETTE_TILE_BYTES);
        for ((tile, indices), (tile_row, tile_col)) in tiles.enumerate().zip(places) {
            let width = grid.cols_in(tile_col);
            let coded = low_bits(grid.rows_in(tile_row)) & !self.metadata(tile).bitmask();
            // Rows without indices; and those with pad columns, which are all in a tile that is not full.
            let mut rows = if width == TILE { !coded } else { u64::MAX };
            while rows != 0 {
                let row = rows.trailing_zeros() as usize;
                rows &= rows - 1;
                let indices = &indices[row * (TILE / 2)..][..TILE / 2];
                let used = if coded >> row & 1 == 1 { width } else { 0 };
                let half_used = used % 2 == 1 && indices[used / 2] >> 4 != 0;
                // All bytes at once: a search would look at one after the other.
                if half_used || indices[used.div_ceil(2)..].iter().fold(0, |all, pair| all | pair) != 0 {
                    let reason = "unused palette indices are not 0";
                    return Err(CodecError::Row { tile, row, reason });
                }
            }
        }
        Ok(())
    }

    /// Assembles an encoder's output without validation.
    pub(crate) fn from_encoder(grid: TileGrid, palette: Palette, sections: [B; 4]) -> Self {
        let [sign_mantissa, palette_index, tile_metadata, verbatim_exponents] = sections;
        Self { grid, palette: palette.stored(), sign_mantissa, palette_index, tile_metadata, verbatim_exponents }
    }

    /// The matrix's shape and tiling.
    pub fn grid(&self) -> TileGrid {
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
            Section::SIGN_MANTISSA => Borrowed(self.sign_mantissa.as_ref()),
            Section::TILE_METADATA => Borrowed(self.tile_metadata.as_ref()),
            Section::VERBATIM_EXPONENTS => Borrowed(self.verbatim_exponents.as_ref()),
            Section::PALETTE_INDEX => Borrowed(self.palette_index.as_ref()),
            Section::PALETTE => Owned(self.palette.to_vec()),
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

    /// Bytes of all sections together.
    pub fn coded_bytes(&self) -> u64 {
        PaletteEncoding::SECTIONS.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// The maximum number of verbatim rows in one tile.
    pub fn max_verbatim_rows(&self) -> u32 {
        (0..self.grid.tiles()).map(|t| self.metadata(t).bitmask().count_ones()).max().unwrap_or(0)
    }
}

impl PaletteTensor<Vec<u8>> {
    /// The sections in stored order.
    fn into_sections(self) -> Vec<Vec<u8>> {
        vec![self.palette.to_vec(), self.tile_metadata, self.verbatim_exponents, self.palette_index, self.sign_mantissa]
    }
}

impl<B: AsRef<[u8]>> PaletteTensor<B> {
    /// The typed view of a stored tensor; `None` if it has another encoding. To keep the tensor, pass
    /// [`StoredTensor::borrowed`].
    pub fn of(tensor: StoredTensor<B>) -> Option<Self> {
        let (grid, section) = tensor.take(EncodingId::PALETTE)?;
        Some(Self::from_sections(grid, section).expect("a stored tensor was checked"))
    }
}

impl From<PaletteTensor<Vec<u8>>> for StoredTensor<Vec<u8>> {
    fn from(tensor: PaletteTensor<Vec<u8>>) -> Self {
        Self::trusted(EncodingId::PALETTE, tensor.grid, tensor.into_sections())
    }
}

debug_sizes!(PaletteTensor, PaletteEncoding::SECTIONS);

#[cfg(test)]
mod tests {
    use super::*;

    /// Every index that is not used, in full and in cut tiles, and none that is used.
    #[test]
    fn each_unused_index_must_be_zero() {
        let (rows, cols) = (70, 131);
        // Exponents in the palette, except for those of two rows of a tile.
        let element = |at: usize| -> u16 {
            let (row, col) = (at / cols, at % cols);
            let exponent = if (row == 5 || row == 66) && col < 64 { at as u16 % 256 } else { 120 + at as u16 % 5 };
            exponent << 7 | at as u16 & 0x7f
        };
        let bytes: Vec<u8> = (0..rows * cols).flat_map(|at| element(at).to_le_bytes()).collect();
        let tensor = encode(Matrix::new(&bytes, rows, cols).unwrap(), CodeLimit::DEFAULT).unwrap();
        let grid = tensor.grid();
        assert!(tensor.metadata(0).bitmask() == 1 << 5 && tensor.metadata(3).bitmask() == 1 << 2);
        let check =
            |indices: &[u8]| PaletteTensor { palette_index: indices.to_vec(), ..tensor.clone() }.check_unused_indices();
        check(tensor.palette_index()).unwrap();
        for at in 0..tensor.palette_index().len() * 2 {
            let (tile, row, col) = (at / 4096, at / 64 % 64, at % 64);
            let (tile_row, tile_col) = (tile / grid.tile_cols(), tile % grid.tile_cols());
            let is_inside = row < grid.rows_in(tile_row) && col < grid.cols_in(tile_col);
            let is_used = is_inside && tensor.metadata(tile).bitmask() >> row & 1 == 0;
            let mut indices = tensor.palette_index().to_vec();
            indices[at / 2] ^= 1 << (4 * (at % 2));
            match check(&indices) {
                Ok(()) => assert!(is_used, "index {at}"),
                Err(CodecError::Row { tile: failed, row: in_row, .. }) => {
                    assert_eq!((is_used, failed, in_row), (false, tile, row), "index {at}");
                }
                Err(other) => panic!("index {at}: {other}"),
            }
        }
    }
}
