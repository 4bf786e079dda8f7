//! Errors of the tensor codec. The bundle layer adds the names of files and tensors.

use super::float::Float;

/// Why a tensor cannot be encoded, or a stored tensor is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The number of bytes does not match the matrix's shape and type.
    #[error("a matrix [{rows}, {cols}] of {} has {expected} bytes, got {got}", .float.name())]
    MatrixBytes {
        /// Type of the matrix.
        float: Float,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Bytes of such a matrix (saturated).
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// The encoding does not support the matrix's type.
    #[error("the encoding does not support {}", .float.name())]
    Type {
        /// Type of the matrix.
        float: Float,
    },
    /// The buffer for a tensor has a different size than the tensor.
    #[error("the tensor has {expected} bytes, the buffer {got}")]
    TensorBytes {
        /// Bytes of the tensor.
        expected: u64,
        /// Bytes of the buffer.
        got: usize,
    },
    /// The matrix has no elements or a dimension of 2^32 or more, and so cannot be tiled.
    #[error("a matrix [{rows}, {cols}] cannot be tiled (each dimension must be from 1 to 4294967295); store it raw")]
    MatrixShape {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
    /// The packed encoding requires dimensions that are multiples of 64.
    #[error("rows and columns of a packed matrix must be multiples of 64, got [{rows}, {cols}]")]
    PackedShape {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
    /// The requested part of a packed matrix does not consist of whole tiles.
    #[error(
        "cannot slice {axis} {start}..{end} of {of}: the bounds of a packed matrix must be multiples of 64, and not empty; unpack it for others"
    )]
    Slice {
        /// `rows` or `columns`.
        axis: &'static str,
        /// First row or column requested.
        start: usize,
        /// End of the request, exclusive.
        end: usize,
        /// Rows or columns of the matrix.
        of: usize,
    },
    /// The code limit is not from 6 to 15.
    #[error("code limit {got} is not from 6 to 15")]
    CodeLimit {
        /// The limit given.
        got: u32,
    },
    /// The tensor needs more words than a tile's `start_word` can address.
    #[error("coded exponents need {words} words, above the format's 2^32; store the tensor raw")]
    TooManyWords {
        /// Words needed.
        words: u64,
    },
    /// A stored tensor has too few or too many sections.
    #[error("{got} sections stored, but the encoding has {expected}")]
    Sections {
        /// Sections of the encoding.
        expected: usize,
        /// Sections given.
        got: usize,
    },
    /// A stored section has the wrong size.
    #[error("section {section}: {got} bytes stored, but the shape needs {expected}")]
    SectionBytes {
        /// Section name.
        section: &'static str,
        /// Bytes that shape and metadata require.
        expected: u64,
        /// Bytes stored.
        got: u64,
    },
    /// A stored palette, code length, window or fill has a value that no encoder writes.
    #[error("{section}: {reason}")]
    Code {
        /// Section name.
        section: &'static str,
        /// The violated rule.
        reason: &'static str,
    },
    /// A tile's metadata breaks invariant 1 or 2.
    #[error("tile {tile}: {field} is {got}, expected {expected} after the previous tiles")]
    TileMetadata {
        /// Tile index.
        tile: usize,
        /// Field name.
        field: &'static str,
        /// Value that follows from the tiles before.
        expected: u64,
        /// Value stored.
        got: u64,
    },
    /// A row's codes do not have its stored length, a pad row is not empty, or the escapes of a row block are not
    /// canonical.
    #[error("tile {tile}, row {row}: {reason}")]
    Row {
        /// Tile index.
        tile: usize,
        /// Row in the tile; for a row block, its first row.
        row: usize,
        /// The violated rule.
        reason: &'static str,
    },
}

impl CodecError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::MatrixBytes { .. } => "matrix-size-mismatch",
            Self::Type { .. } => "unsupported-dtype",
            Self::TensorBytes { .. } => "buffer-size-mismatch",
            Self::MatrixShape { .. } => "shape-not-tileable",
            Self::PackedShape { .. } => "shape-not-packable",
            Self::Slice { .. } => "slice-not-aligned",
            Self::CodeLimit { .. } => "code-limit-out-of-range",
            Self::TooManyWords { .. } => "codes-too-long",
            Self::Sections { .. } => "section-count-mismatch",
            Self::SectionBytes { .. } => "section-size-mismatch",
            Self::Code { .. } => "section-invalid",
            Self::TileMetadata { .. } => "tile-metadata-invalid",
            Self::Row { .. } => "tile-row-invalid",
        }
    }
}
