//! Matrices, their tiles, and a tile's metadata (`docs/format.md` A.1, A.2, A.6).

use bytemuck::{Pod, Zeroable};

use crate::{
    CodecError, Float,
    layout::{TILE, TILE_METADATA_BYTES},
};

/// A BF16 matrix `[rows, cols]`, row-major, little-endian, of any alignment.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    bytes: &'a [u8],
    grid: TileGrid,
}

impl<'a> Matrix<'a> {
    /// A matrix of `rows * cols` little-endian elements of two bytes.
    ///
    /// # Errors
    /// The matrix has no elements or too many rows or columns, or `bytes` is not `rows * cols * 2` long.
    pub fn new(bytes: &'a [u8], rows: usize, cols: usize) -> Result<Self, CodecError> {
        let grid = TileGrid::new(rows, cols)?;
        if grid.elements().checked_mul(2) != Some(bytes.len()) {
            let expected = grid.elements().saturating_mul(2);
            return Err(CodecError::MatrixBytes { float: Float::Bf16, rows, cols, expected, got: bytes.len() });
        }
        Ok(Self { bytes, grid })
    }

    /// The bytes of all elements, row by row.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The matrix's shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// The BF16 bits of the element at (`row`, `col`).
    ///
    /// # Panics
    /// `row` or `col` is outside the matrix.
    pub fn get(&self, row: usize, col: usize) -> u16 {
        assert!(row < self.grid.rows && col < self.grid.cols);
        let at = (row * self.grid.cols + col) * 2;
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }
}

/// A matrix `[rows, cols]` of any [`Float`] type, row-major, little-endian, of any alignment.
#[derive(Debug, Clone, Copy)]
pub struct FloatMatrix<'a> {
    float: Float,
    bytes: &'a [u8],
    grid: TileGrid,
}

impl<'a> FloatMatrix<'a> {
    /// A matrix of `rows * cols` little-endian elements of [`Float::bytes`] each.
    ///
    /// # Errors
    /// As [`Matrix::new`], with [`Float::bytes`] bytes per element.
    pub fn new(float: Float, bytes: &'a [u8], rows: usize, cols: usize) -> Result<Self, CodecError> {
        let grid = TileGrid::new(rows, cols)?;
        // No overflow: the grid has checked four bytes per element.
        let expected = grid.elements() * float.bytes();
        if expected != bytes.len() {
            return Err(CodecError::MatrixBytes { float, rows, cols, expected, got: bytes.len() });
        }
        Ok(Self { float, bytes, grid })
    }

    /// The matrix as BF16.
    ///
    /// # Errors
    /// The elements have another type.
    pub fn bf16(&self) -> Result<Matrix<'a>, CodecError> {
        match self.float {
            Float::Bf16 => Ok(Matrix { bytes: self.bytes, grid: self.grid }),
            float => Err(CodecError::Type { float }),
        }
    }

    /// Type of the elements.
    pub fn float(&self) -> Float {
        self.float
    }

    /// The bytes of all elements, row by row.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The matrix's shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// The bits of the element at (`row`, `col`), in the lowest bits of the result.
    ///
    /// # Panics
    /// `row` or `col` is outside the matrix.
    pub fn get(&self, row: usize, col: usize) -> u32 {
        assert!(row < self.grid.rows && col < self.grid.cols);
        let width = self.float.bytes();
        self.float.read(&self.bytes[(row * self.grid.cols + col) * width..][..width])
    }
}

impl<'a> From<Matrix<'a>> for FloatMatrix<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        Self { float: Float::Bf16, bytes: matrix.bytes, grid: matrix.grid }
    }
}

/// The shape `[n, k]` of a matrix and its tiling by tiles of 64x64 (`docs/format.md` A.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileGrid {
    rows: usize,
    cols: usize,
}

impl TileGrid {
    /// The grid of a matrix `[rows, cols]`.
    ///
    /// # Errors
    /// A dimension is 0 or does not fit 32 bits, or the elements do not fit the address space.
    pub fn new(rows: usize, cols: usize) -> Result<Self, CodecError> {
        let fits = |d: usize| (1..=u32::MAX as usize).contains(&d);
        // The padded elements must be countable as well; four bytes per element leave room for the size of every
        // section.
        let padded = rows.checked_next_multiple_of(TILE).zip(cols.checked_next_multiple_of(TILE));
        let countable = padded.and_then(|(r, c)| r.checked_mul(c)).and_then(|e| e.checked_mul(4)).is_some();
        if fits(rows) && fits(cols) && countable {
            Ok(Self { rows, cols })
        } else {
            Err(CodecError::MatrixShape { rows, cols })
        }
    }

    /// The rank-2 shape of a tensor of any rank (`docs/format.md` A.1); `None` for ranks 0 and 1, and for tensors
    /// without elements.
    pub fn fold(shape: &[usize]) -> Option<Self> {
        let padded_area = |grid: &TileGrid| grid.tiles();
        (1..shape.len())
            .rev()
            .filter_map(|split| {
                let product = |dims: &[usize]| dims.iter().try_fold(1usize, |p, &d| p.checked_mul(d));
                TileGrid::new(product(&shape[..split])?, product(&shape[split..])?).ok()
            })
            .min_by_key(padded_area)
    }

    /// Rows (`n`, output features).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (`k`, input features).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// `rows * cols`.
    pub fn elements(&self) -> usize {
        self.rows * self.cols
    }

    /// `ceil(rows / 64)`.
    pub fn tile_rows(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    /// `ceil(cols / 64)`.
    pub fn tile_cols(&self) -> usize {
        self.cols.div_ceil(TILE)
    }

    /// `tile_rows * tile_cols`.
    pub fn tiles(&self) -> usize {
        self.tile_rows() * self.tile_cols()
    }

    /// Matrix rows in a tile row: 64, or fewer in the last one.
    pub(crate) fn rows_in(&self, tile_row: usize) -> usize {
        TILE.min(self.rows - tile_row * TILE)
    }

    /// Matrix columns in a tile column: 64, or fewer in the last one.
    pub(crate) fn cols_in(&self, tile_col: usize) -> usize {
        TILE.min(self.cols - tile_col * TILE)
    }
}

/// Offsets of a tile's coded bits and verbatim rows (report, section 3.5); 16 bytes as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct TileMetadata {
    /// First 32-bit word of the tile in `encoded_exp`.
    pub start_word: u32,
    /// First row of the tile in `verbatim_exponents`.
    pub verbatim_row_offset: u32,
    /// Bits 0..32 of the bitmask of verbatim rows.
    pub verbatim_low: u32,
    /// Bits 32..64 of that bitmask.
    pub verbatim_high: u32,
}

impl TileMetadata {
    /// Bytes of a stored record.
    pub const BYTES: usize = size_of::<Self>();

    /// A record with this bitmask of verbatim rows.
    pub fn new(start_word: u32, verbatim_row_offset: u32, bitmask: u64) -> Self {
        Self { start_word, verbatim_row_offset, verbatim_low: bitmask as u32, verbatim_high: (bitmask >> 32) as u32 }
    }

    /// Reads the record of a tile from a stored section.
    ///
    /// # Panics
    /// The section is too short.
    pub fn read(section: &[u8], tile: usize) -> Self {
        let at = tile * Self::BYTES;
        let field = |i: usize| u32::from_le_bytes(section[at + 4 * i..at + 4 * i + 4].try_into().expect("4 bytes"));
        Self { start_word: field(0), verbatim_row_offset: field(1), verbatim_low: field(2), verbatim_high: field(3) }
    }

    /// Returns the stored bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let fields = [self.start_word, self.verbatim_row_offset, self.verbatim_low, self.verbatim_high];
        bytes.chunks_exact_mut(4).zip(fields).for_each(|(b, f)| b.copy_from_slice(&f.to_le_bytes()));
        bytes
    }

    /// The bitmask of verbatim rows: bit `r` is set if row `r` is verbatim.
    pub fn bitmask(self) -> u64 {
        u64::from(self.verbatim_high) << 32 | u64::from(self.verbatim_low)
    }
}

const _: () = assert!(TileMetadata::BYTES == TILE_METADATA_BYTES, "stated in docs/format.md A.6");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_follows_the_specification() {
        let fold = |shape: &[usize]| TileGrid::fold(shape).map(|g| (g.rows(), g.cols()));
        assert_eq!(fold(&[128, 64]), Some((128, 64)));
        assert_eq!(fold(&[8, 128, 256]), Some((8 * 128, 256)), "experts");
        assert_eq!(fold(&[64, 64, 3, 3]), Some((64, 64 * 9)), "a convolution: trailing dimensions together");
        assert_eq!(fold(&[7]), None);
        assert_eq!(fold(&[]), None);
        assert_eq!(fold(&[0, 64]), None);
        assert_eq!(fold(&[usize::MAX, usize::MAX]), None);
    }

    #[test]
    fn edges() {
        let grid = TileGrid::new(65, 130).unwrap();
        assert_eq!((grid.tile_rows(), grid.tile_cols(), grid.tiles()), (2, 3, 6));
        assert_eq!((grid.rows_in(0), grid.rows_in(1), grid.cols_in(2)), (64, 1, 2));
        assert!(Matrix::new(&[0; 10], 2, 3).is_err());
        assert!(TileGrid::new(1 << 32, 1).is_err());
    }

    #[test]
    fn metadata_bytes() {
        let metadata = TileMetadata::new(1, 2, 0x8000_0000_0000_0003);
        assert_eq!(TileMetadata::read(&metadata.to_bytes(), 0), metadata);
        assert_eq!(metadata.to_bytes()[8..], [3, 0, 0, 0, 0, 0, 0, 0x80]);
        assert_eq!(metadata.bitmask(), 0x8000_0000_0000_0003);
    }
}
