//! The forms a weight is stored in (`docs/format.md` A.6 - A.12), one file each, and the list of them.
//!
//! ```text
//! floats [n, k] --Survey--> histogram, digest --Form::encode--> StoredTensor {form, grid, sections} --decode--> floats [n, k]
//! ```
//! A form is a type without values that implements [`Form`]: its sections as data, and six functions. Everything else (manifests, bundles,
//! plans, sums, the command line) goes through [`FORMS`], so another form is a file and a line in that list. Those who need a form's
//! fields take its typed view ([`HuffmanTensor`](crate::HuffmanTensor), ...), which lies in the form's file.

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

pub use id::FormId;
pub use sample::Sample;
pub use section::{Extent, Section, Sections};
pub use stored::StoredTensor;
pub use survey::Survey;

use crate::{CodeLimit, CodecError, Float, FloatMatrix, TileGrid};

/// Every form that bundles know, in the order of reports.
pub static FORMS: &[&dyn DynForm] =
    &[&raw::Raw, &huffman::Huffman, &palette::PaletteForm, &packed::Packed, &compact::Compact, &exponents::Exponents];

/// How a matrix of floats is stored.
pub trait Form: Sync + 'static {
    /// Its name in manifests, plan files and reports.
    const ID: FormId;
    /// Its sections, in stored order.
    const SECTIONS: &'static [Section];
    /// What it takes: BF16, unless it says otherwise.
    const FLOATS: &'static [Float] = &[Float::Bf16];
    /// What takes its place for a matrix that it does not fit.
    const FALLBACK: FormId = FormId::RAW;
    /// Bytes that it has to save at least, or the tensor is stored raw.
    const LEAST_SAVED: u64 = 1;
    /// Whether it has to be decoded or transcoded before a matmul can read it: a layer with such a tensor is hard.
    const HARD: bool = false;

    /// Whether a matrix of this shape can have the form.
    ///
    /// # Errors
    /// It cannot, and why.
    fn fits(grid: TileGrid) -> Result<(), Unfit>;

    /// Bytes of all sections of a matrix `[n, k]`, if all of it is like the sample.
    ///
    /// # Errors
    /// Such a matrix would not fit.
    fn predict(grid: TileGrid, sample: &Sample) -> Result<u64, Unfit>;

    /// Whether stored sections may be trusted: sizes and every offset.
    ///
    /// # Errors
    /// What is wrong, and where.
    fn check(grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError>;

    /// The sections of a matrix in stored order; `survey` is that of the matrix.
    ///
    /// # Errors
    /// The matrix does not fit, or has another type.
    fn encode(matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, Unfit>;

    /// The weights: `n * k` elements, little-endian. Checks the sections first.
    ///
    /// # Errors
    /// As [`Form::check`]; `out` has another size; or the codes are not those of any matrix.
    fn decode(grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError>;
}

/// [`Form`] behind a pointer.
pub trait DynForm: Sync {
    /// [`Form::ID`].
    fn id(&self) -> FormId;
    /// [`Form::SECTIONS`].
    fn sections(&self) -> &'static [Section];
    /// [`Form::FLOATS`].
    fn floats(&self) -> &'static [Float];
    /// [`Form::FALLBACK`].
    fn fallback(&self) -> FormId;
    /// [`Form::LEAST_SAVED`].
    fn least_saved(&self) -> u64;
    /// [`Form::HARD`].
    fn is_hard(&self) -> bool;
    /// [`Form::fits`].
    ///
    /// # Errors
    /// As there.
    fn fits(&self, grid: TileGrid) -> Result<(), Unfit>;
    /// [`Form::predict`].
    ///
    /// # Errors
    /// As there.
    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, Unfit>;
    /// [`Form::check`].
    ///
    /// # Errors
    /// As there.
    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError>;
    /// [`Form::encode`].
    ///
    /// # Errors
    /// As there.
    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, Unfit>;
    /// [`Form::decode`].
    ///
    /// # Errors
    /// As there.
    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError>;
}

impl<F: Form> DynForm for F {
    fn id(&self) -> FormId {
        F::ID
    }

    fn sections(&self) -> &'static [Section] {
        F::SECTIONS
    }

    fn floats(&self) -> &'static [Float] {
        F::FLOATS
    }

    fn fallback(&self) -> FormId {
        F::FALLBACK
    }

    fn least_saved(&self) -> u64 {
        F::LEAST_SAVED
    }

    fn is_hard(&self) -> bool {
        F::HARD
    }

    fn fits(&self, grid: TileGrid) -> Result<(), Unfit> {
        F::fits(grid)
    }

    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, Unfit> {
        F::predict(grid, sample)
    }

    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        F::check(grid, sections)
    }

    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, Unfit> {
        F::encode(matrix, survey, limit)
    }

    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        F::decode(grid, sections, out)
    }
}

/// Why a matrix cannot have a form. Each form has an error type of its own for that; [`Unfit::reason`] gives it back.
#[derive(Debug, Clone)]
pub struct Unfit(Arc<dyn Error + Send + Sync>);

impl Unfit {
    /// A form's own reason.
    pub fn new(reason: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(reason))
    }

    /// The form's own reason, if it is of this type.
    pub fn reason<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Unfit {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// Two are equal that say the same.
impl PartialEq for Unfit {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for Unfit {}

impl From<CodecError> for Unfit {
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
        let ids: HashSet<FormId> = FORMS.iter().map(|form| form.id()).collect();
        assert_eq!(ids.len(), FORMS.len(), "an id is listed twice");
        for form in FORMS {
            assert_eq!(form.id().name().parse(), Ok(form.id()));
            assert_eq!(form.id().form().id(), form.id());
            // Falling back ends at raw, which fits everything.
            let mut at = form.id();
            for _ in 0..FORMS.len() {
                at = at.form().fallback();
            }
            assert_eq!(at, FormId::RAW);
            assert!(!form.floats().is_empty());
        }
        // Whatever can be coded has a form that takes it.
        for float in Float::ALL {
            assert!(FORMS.iter().any(|form| form.id() != FormId::RAW && form.floats().contains(&float)));
        }
        // One name has one meaning, whatever the form.
        let mut sections: Vec<Section> = FORMS.iter().flat_map(|form| form.sections()).copied().collect();
        sections.sort_by_key(|section| section.name());
        sections.windows(2).for_each(|pair| assert!(pair[0] == pair[1] || pair[0].name() != pair[1].name()));
    }
}
