//! Errors of the tensor codec. File and tensor names are added by the bundle layer.

use super::float::Float;

/// Why a tensor cannot be encoded, or a stored tensor cannot be trusted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The bytes given do not hold the matrix that was announced.
    #[error("a matrix [{rows}, {cols}] of {} has {expected} bytes, got {got}", .float.name())]
    MatrixBytes {
        /// Type announced.
        float: Float,
        /// Rows announced.
        rows: usize,
        /// Columns announced.
        cols: usize,
        /// Bytes such a matrix has (saturated).
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// The encoding is for another type.
    #[error("the encoding does not take {}", .float.name())]
    Type {
        /// Type of the matrix.
        float: Float,
    },
    /// The buffer for a tensor has another size.
    #[error("the tensor has {expected} bytes, the buffer {got}")]
    TensorBytes {
        /// Bytes of the tensor.
        expected: u64,
        /// Bytes of the buffer.
        got: usize,
    },
    /// A matrix without elements, or with a dimension of 2^32 and more, has no tiles.
    #[error("a matrix [{rows}, {cols}] cannot be tiled (each dimension must be 1..=4294967295); store it raw")]
    MatrixShape {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// The packed encoding has whole tiles only.
    #[error("a packed matrix has rows and columns that are multiples of 64, got [{rows}, {cols}]")]
    PackedShape {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// A part of a packed matrix that is not a matrix of whole tiles.
    #[error(
        "{axis} {start}..{end} cannot be cut out of {of}: a packed matrix is cut in multiples of 64, at least one; unpack it to cut elsewhere"
    )]
    Slice {
        /// `rows` or `columns`.
        axis: &'static str,
        /// First one asked for.
        start: usize,
        /// The one after the last.
        end: usize,
        /// How many the matrix has.
        of: usize,
    },
    /// The code limit is not one that the format knows.
    #[error("code limit {got} is outside 6..=15")]
    CodeLimit {
        /// The limit given.
        got: u32,
    },
    /// The coded words exceed the reach of a tile's `start_word`.
    #[error("coded exponents need {words} words, above the format's 2^32; store the tensor raw")]
    TooManyWords {
        /// Words needed.
        words: u64,
    },
    /// A stored tensor has too few or too many sections.
    #[error("{got} sections stored, the encoding has {expected}")]
    Sections {
        /// Sections of the encoding.
        expected: usize,
        /// Sections given.
        got: usize,
    },
    /// A stored section has the wrong size.
    #[error("section {section}: {got} bytes stored, the shape asks for {expected}")]
    SectionBytes {
        /// Section name.
        section: &'static str,
        /// Bytes that shape and metadata ask for.
        expected: u64,
        /// Bytes stored.
        got: u64,
    },
    /// Stored palette, code lengths, window or padding that no encoder writes.
    #[error("{section}: {reason}")]
    Code {
        /// Section name.
        section: &'static str,
        /// What is wrong.
        reason: &'static str,
    },
    /// A tile's metadata breaks invariant 1 or 2.
    #[error("tile {tile}: {field} is {got}, the tiles before it give {expected}")]
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
    /// A row's stored length differs from what its codes use, a pad row is not empty, or a row block's escapes are not
    /// canonical.
    #[error("tile {tile}, row {row}: {reason}")]
    Row {
        /// Tile index.
        tile: usize,
        /// Row in the tile; of a row block, the first.
        row: usize,
        /// What is wrong.
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
