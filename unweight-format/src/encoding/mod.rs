//! The encodings that a weight is stored in (`docs/format.md` A.6 - A.12), one module each, and the list of them.
//!
//! ```text
//! floats [n, k] --Survey--> histogram, digest --Encoding::encode--> StoredTensor {encoding, grid, sections} --decode--> floats [n, k]
//! ```
//! Manifests, bundles, plans, sums and the command line go through [`ENCODINGS`], so another encoding is a module and a
//! line in that list. Code that needs the fields of one encoding takes its typed view
//! ([`HuffmanTensor`](crate::HuffmanTensor), ...), which the encoding's module defines.

mod bands;
pub(crate) mod code;
pub mod compact;
pub mod exponents;
pub mod huffman;
mod id;
pub mod oracle;
pub mod packed;
pub mod palette;
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

/// Every encoding that bundles know, in the order of reports.
pub static ENCODINGS: &[&dyn Encoding] = &[
    &raw::Raw,
    &huffman::Huffman,
    &palette::PaletteEncoding,
    &packed::Packed,
    &compact::Compact,
    &exponents::Exponents,
];

/// How a matrix of floats `[n, k]` is stored: its sections as data, and six functions.
///
/// An encoding is a type without values; [`ENCODINGS`] lists all of them, and [`EncodingId::encoding`] finds one by its
/// name.
pub trait Encoding: Sync {
    /// Its name in manifests, plan files and reports.
    fn id(&self) -> EncodingId;

    /// The sections of a tensor in this encoding, in stored order.
    fn sections(&self) -> &'static [Section];

    /// The element types that it takes: BF16, unless it says otherwise.
    fn floats(&self) -> &'static [Float] {
        &[Float::Bf16]
    }

    /// What is tried next for a matrix that it does not fit. The last one is raw, which fits everything.
    fn fallback(&self) -> EncodingId {
        EncodingId::RAW
    }

    /// Bytes that it has to save at least, or the tensor is stored raw.
    fn least_saved(&self) -> u64 {
        1
    }

    /// Whether a matrix of this shape can have the encoding.
    ///
    /// # Errors
    /// It cannot, and why.
    fn fits(&self, grid: TileGrid) -> Result<(), NotEncodable>;

    /// Bytes of all sections of a matrix `[n, k]`, if all of it is like the sample.
    ///
    /// # Errors
    /// Such a matrix would not fit.
    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable>;

    /// Checks stored sections: sizes and every offset inside. A reader may trust them afterwards.
    ///
    /// # Errors
    /// What is wrong, and where.
    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError>;

    /// The sections of a matrix in stored order; `survey` is that of the matrix.
    ///
    /// # Errors
    /// The matrix does not fit, or has another type.
    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable>;

    /// Decodes to `n * k` little-endian elements. Checks the sections first.
    ///
    /// # Errors
    /// As [`Encoding::check`]; `out` has another size; or the codes are not those of any matrix.
    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError>;
}

/// Why a matrix cannot have an encoding. It wraps the error type of that encoding; [`NotEncodable::reason`] returns it.
#[derive(Debug, Clone)]
pub struct NotEncodable(Arc<dyn Error + Send + Sync>);

impl NotEncodable {
    /// Wraps the reason of an encoding.
    pub fn new(reason: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(reason))
    }

    /// The encoding's own reason, if it is of this type.
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
            // Falling back ends at raw, which fits everything.
            let mut at = encoding.id();
            for _ in 0..ENCODINGS.len() {
                at = at.encoding().fallback();
            }
            assert_eq!(at, EncodingId::RAW);
            assert!(!encoding.floats().is_empty());
        }
        // Whatever can be coded has an encoding that takes it.
        for float in Float::ALL {
            assert!(
                ENCODINGS.iter().any(|encoding| encoding.id() != EncodingId::RAW && encoding.floats().contains(&float))
            );
        }
        // One name has one meaning, whatever the encoding.
        let mut sections: Vec<Section> = ENCODINGS.iter().flat_map(|encoding| encoding.sections()).copied().collect();
        sections.sort_by_key(|section| section.name());
        sections.windows(2).for_each(|pair| assert!(pair[0] == pair[1] || pair[0].name() != pair[1].name()));
    }
}
