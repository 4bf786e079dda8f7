//! Errors of converting to DFloat11 and of reading DFloat11 directories.

use std::path::PathBuf;

use unweight_format::bundle::{BundleError, ErrorClass};

use super::{CODE_BITS_MAX, COUNT_MAX, FIRST_JUMP};

/// The reason why weights cannot be a DFloat11 unit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotEncodable {
    /// There are no weights.
    #[error("has no elements")]
    Empty,
    /// The tables cannot hold an exponent.
    #[error("exponent {exponent} occurs {count} times, but the tables hold only exponents below {FIRST_JUMP}")]
    Exponent {
        /// The largest exponent.
        exponent: u8,
        /// Number of occurrences.
        count: u64,
    },
    /// The unit exceeds the counters of the kernel.
    #[error("{got} {what}, above the limit of the kernel, {COUNT_MAX}")]
    Count {
        /// `elements` or `bytes of codes`.
        what: &'static str,
        /// The number of these.
        got: u64,
    },
    /// The package shortens codes above 32 bits by lowering the frequency of rare exponents; with equal frequencies,
    /// its choice of exponents is random.
    #[error(
        "codes exceed {CODE_BITS_MAX} bits, and of the exponents that occur {count} times each, the package shortens \
         random ones"
    )]
    Tie {
        /// Frequency of these exponents.
        count: u64,
    },
    /// Some codes stay above 32 bits.
    #[error("codes exceed {CODE_BITS_MAX} bits, even with lowered frequencies of rare exponents")]
    Long,
    /// The tables have more rows than jumps can address.
    #[error("the tables have {got} rows, above the limit of {limit}")]
    Rows {
        /// Number of rows.
        got: usize,
        /// The maximum number of rows.
        limit: usize,
    },
    /// The package fails if no code begins with zeros, for example with a single exponent.
    #[error("no exponent's code begins with eight zeros; the package cannot build tables for such codes")]
    NoFirst,
    /// A prefix of a code has no row.
    #[error(
        "the first {bits} bits of the code of exponent {exponent} have no row; the package cannot build such tables"
    )]
    NoRow {
        /// The exponent.
        exponent: u8,
        /// Bits of the prefix.
        bits: u8,
    },
}

/// The reason why sections of a unit are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// A section has the wrong size.
    #[error("{section}: {got} bytes, expected {expected}")]
    Size {
        /// The section.
        section: &'static str,
        /// Bytes expected.
        expected: u64,
        /// Bytes found.
        got: u64,
    },
    /// An impossible number of threads per block.
    #[error("{got} threads per block; 1 to {} are supported", super::THREADS_MAX)]
    Threads {
        /// The configured number.
        got: u64,
    },
    /// A section is empty or exceeds the limit of the format.
    #[error("{section}: {got} bytes; 1 to {COUNT_MAX} are supported")]
    Count {
        /// The section.
        section: &'static str,
        /// Bytes found.
        got: u64,
    },
    /// The tables are not those of a prefix code.
    #[error("luts, row {row}, entry {entry}: {reason}")]
    Luts {
        /// Index of the row.
        row: usize,
        /// Entry of the row.
        entry: usize,
        /// The violated rule.
        reason: &'static str,
    },
    /// A position is not between its neighbours.
    #[error("output_positions, block {block}: element {got}, expected {least} to {most}")]
    Position {
        /// Index of the block.
        block: usize,
        /// Element found.
        got: u64,
        /// Lowest possible element.
        least: u64,
        /// Highest possible element.
        most: u64,
    },
    /// A gap is not the first bit of a code.
    #[error("gaps, window {window}: {got}, but a code begins at bit {expected}")]
    Gap {
        /// Index of the window.
        window: u64,
        /// Gap found.
        got: u64,
        /// First bit of the code, relative to the window.
        expected: u64,
    },
    /// No code begins with these bits.
    #[error("encoded_exponent, bit {bit}: no code begins with these bits (element {element})")]
    NoCode {
        /// Bit offset in the section.
        bit: u64,
        /// Index of the element.
        element: u64,
    },
    /// The codes end too early or too late.
    #[error("encoded_exponent: the codes of {elements} elements end in byte {expected}, the section has {got}")]
    End {
        /// Number of elements.
        elements: u64,
        /// Bytes that the codes take.
        expected: u64,
        /// Bytes of the section.
        got: u64,
    },
}

impl UnitError {
    /// Returns the section that the error is about.
    pub(super) fn section(&self) -> &'static str {
        match self {
            Self::Size { section, .. } | Self::Count { section, .. } => section,
            Self::Luts { .. } => "luts",
            Self::Position { .. } => "output_positions",
            Self::Gap { .. } => "gaps",
            Self::Threads { .. } | Self::NoCode { .. } | Self::End { .. } => "encoded_exponent",
        }
    }
}

/// The reason why a directory could not be read, written or trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// An error of a file or of a bundle.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A unit's sections are damaged.
    #[error(
        "{}: unit '{unit}' at byte {offset}: damaged, or not written by DFloat11; fetch the file again", path.display()
    )]
    Unit {
        /// The file.
        path: PathBuf,
        /// The unit.
        unit: String,
        /// First byte of the section in the file.
        offset: u64,
        /// What is wrong.
        source: UnitError,
    },
    /// A unit lacks a section, or a tensor is not a valid section.
    #[error("{}: tensor '{tensor}': {reason}; fetch the model again", path.display())]
    Section {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// `config.json` lacks required information.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is missing, and what to do.
        reason: String,
    },
    /// The shape of a weight is unknown. The format does not store shapes.
    #[error("{}: the shape of '{tensor}' ({elements} elements) is unknown: {reason}", path.display())]
    Shape {
        /// Path of the `config.json`.
        path: PathBuf,
        /// The weight.
        tensor: String,
        /// Number of its elements.
        elements: u64,
        /// The reason, and what to do.
        reason: String,
    },
    /// Two tensors have the same name.
    #[error("{}: tensor '{tensor}' is also in another file; move one of them away", path.display())]
    Twice {
        /// The second file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// There is nothing to convert.
    #[error("{}: {reason}", path.display())]
    Nothing {
        /// The source.
        path: PathBuf,
        /// The reason.
        reason: &'static str,
    },
}

impl ConvertError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Bundle(error) => error.code(),
            Self::Unit { .. } => "dfloat11-unit-damaged",
            Self::Section { .. } => "dfloat11-section-invalid",
            Self::Config { .. } => "dfloat11-config-invalid",
            Self::Shape { .. } => "dfloat11-shape-unknown",
            Self::Twice { .. } => "model-tensor-duplicate",
            Self::Nothing { .. } => "nothing-to-convert",
        }
    }

    /// Returns the class of the error: damage, failure or interruption.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Bundle(error) => error.class(),
            Self::Unit { .. } | Self::Section { .. } => ErrorClass::Mismatch,
            _ => ErrorClass::Failed,
        }
    }
}
