//! The encodings that a weight is stored in (`docs/format.md` A.6 - A.14), one module each, and the list of them.
//!
//! ```text
//! floats [n, k] --Survey--> histogram, digest --Encoding::encode--> StoredTensor {encoding, grid, sections} --decode--> floats [n, k]
//! ```
//! Manifests, bundles, plans, sums and the command line use [`ENCODINGS`], so a new encoding is a module and a line in
//! that list. Code that needs the fields of one encoding uses its typed view ([`HuffmanTensor`](crate::HuffmanTensor),
//! ...), which the encoding's module defines.

mod bands;
pub(crate) mod code;
pub mod compact;
pub mod exponents;
pub mod huffman;
mod id;
pub mod oracle;
pub mod packed;
pub mod palette;
pub mod rans;
pub mod raw;
mod sample;
mod section;
mod stored;
mod survey;
mod tiles;

use std::{error::Error, fmt, sync::Arc};

pub use id::EncodingId;
pub use sample::Sample;
pub(crate) use section::Extent;
pub use section::{Section, Sections};
pub use stored::StoredTensor;
pub use survey::Survey;

use crate::{CodeLimit, CodecError, Float, FloatMatrix, TileGrid};

/// All encodings that bundles may contain, in the order of reports.
pub static ENCODINGS: &[&dyn Encoding] = &[
    &raw::Raw,
    &huffman::Huffman,
    &palette::PaletteEncoding,
    &packed::Packed,
    &compact::Compact,
    &exponents::Exponents,
    &rans::Rans,
    &rans::planes::Planes,
];

/// Decodes the tile rows from an index on that fill the bytes, on the current rayon pool.
pub(crate) type TileRows<'a> = Box<dyn Fn(usize, &mut [u8]) -> Result<(), CodecError> + Sync + 'a>;
/// Checks the sections of a matrix, and returns a decoder of its tile rows.
pub(crate) type ReadTileRows = for<'a> fn(TileGrid, &Sections<'a>) -> Result<TileRows<'a>, CodecError>;

/// How a matrix of floats `[n, k]` is stored: the sections, and functions that predict, check, encode and decode them.
///
/// An encoding is a type without values; [`ENCODINGS`] lists all of them, and [`EncodingId::encoding`] finds one by its
/// name.
pub trait Encoding: Sync {
    /// The encoding's name in manifests, plan files and reports.
    fn id(&self) -> EncodingId;

    /// The sections of a tensor in this encoding, in stored order.
    fn sections(&self) -> &'static [Section];

    /// The element types that the encoding supports. The default is BF16.
    fn floats(&self) -> &'static [Float] {
        &[Float::Bf16]
    }

    /// The encoding to try next for a matrix that this one cannot store. The last fallback is raw, which can store all.
    fn fallback(&self) -> EncodingId {
        EncodingId::RAW
    }

    /// Checks whether a matrix of this shape can have the encoding.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn fits(&self, grid: TileGrid) -> Result<(), NotEncodable>;

    /// Predicts the bytes of all sections of a matrix `[n, k]` whose elements are distributed as in the sample.
    ///
    /// # Errors
    /// Such a matrix cannot have the encoding.
    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable>;

    /// Checks stored sections: their sizes and every offset in them. A reader may trust them afterwards.
    ///
    /// # Errors
    /// The first violation and its position.
    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError>;

    /// Encodes a matrix to its sections, in stored order. `survey` is the survey of this matrix.
    ///
    /// # Errors
    /// The matrix cannot have the encoding, or has another type.
    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable>;

    /// Checks the sections, then decodes them to `n * k` little-endian elements.
    ///
    /// # Errors
    /// The errors of [`Encoding::check`]; `out` has another size; or the codes are not those of any matrix.
    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError>;

    /// Returns a function that checks the sections and returns a decoder of tile rows (64 rows of the matrix, or the
    /// rest). `None` if only whole matrices can be decoded. The errors are those of [`Encoding::decode`].
    fn tile_rows(&self) -> Option<ReadTileRows> {
        None
    }
}

/// Why a matrix cannot have an encoding. Wraps the error of that encoding, which [`NotEncodable::reason`] returns.
#[derive(Debug, Clone)]
pub struct NotEncodable(Arc<dyn Error + Send + Sync>);

impl NotEncodable {
    /// Wraps an encoding's error.
    pub fn new(reason: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(reason))
    }

    /// The encoding's error, if it has the type `E`.
    pub fn reason<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

impl fmt::Display for NotEncodable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for NotEncodable {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// Two reasons are equal if their messages are.
impl PartialEq for NotEncodable {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for NotEncodable {}

impl From<CodecError> for NotEncodable {
    fn from(error: CodecError) -> Self {
        Self::new(error)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn encodings_are_listed_consistently() {
        let ids: HashSet<EncodingId> = ENCODINGS.iter().map(|encoding| encoding.id()).collect();
        assert_eq!(ids.len(), ENCODINGS.len(), "an id is listed twice");
        for encoding in ENCODINGS {
            assert_eq!(encoding.id().name().parse(), Ok(encoding.id()));
            assert_eq!(encoding.id().encoding().id(), encoding.id());
            // Every chain of fallbacks ends at raw.
            let mut at = encoding.id();
            for _ in 0..ENCODINGS.len() {
                at = at.encoding().fallback();
            }
            assert_eq!(at, EncodingId::RAW);
            assert!(!encoding.floats().is_empty());
        }
        // Every type that can be coded has an encoding.
        for float in Float::ALL {
            assert!(
                ENCODINGS.iter().any(|encoding| encoding.id() != EncodingId::RAW && encoding.floats().contains(&float))
            );
        }
        // A section name has the same meaning in every encoding.
        let mut sections: Vec<Section> = ENCODINGS.iter().flat_map(|encoding| encoding.sections()).copied().collect();
        sections.sort_by_key(|section| section.name());
        sections.windows(2).for_each(|pair| assert!(pair[0] == pair[1] || pair[0].name() != pair[1].name()));
    }
}
