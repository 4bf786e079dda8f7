//! Errors of converting to DFloat11 and of reading DFloat11 directories.

use std::path::PathBuf;

use unweight_format::bundle::{BundleError, ErrorClass};

use super::{CODE_BITS_MAX, COUNT_MAX, FIRST_JUMP};

/// Why a unit cannot be stored as DFloat11.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotEncodable {
    /// No weights at all.
    #[error("it has no elements")]
    Empty,
    /// The tables have no place for an exponent.
    #[error("exponent {exponent} occurs {count} times; the tables hold those below {FIRST_JUMP}")]
    Exponent {
        /// The largest one.
        exponent: u8,
        /// How often it occurs.
        count: u64,
    },
    /// More than the kernel counts.
    #[error("{got} {what}; the kernel counts to {COUNT_MAX}")]
    Count {
        /// `elements`, `bytes of codes`.
        what: &'static str,
        /// How many.
        got: u64,
    },
    /// Codes above 32 bits are shortened by making rare exponents rarer; which, the package leaves to chance.
    #[error(
        "codes above {CODE_BITS_MAX} bits, and exponents that occur {count} times each; the package shortens by chance"
    )]
    Tie {
        /// How often they occur.
        count: u64,
    },
    /// Codes above 32 bits that remain.
    #[error("codes above {CODE_BITS_MAX} bits, however rare the rare exponents are made")]
    Long,
    /// A table of more rows than jumps can name.
    #[error("the tables have {got} rows; a jump names one of {limit}")]
    Rows {
        /// Rows.
        got: usize,
        /// Most rows.
        limit: usize,
    },
    /// The package fails where no code begins with zeros, as with a single exponent.
    #[error("no exponent's code begins with eight zeros, and the package cannot make tables of such codes")]
    NoFirst,
    /// A code whose prefix has no row.
    #[error(
        "a prefix of {bits} bits of the code of exponent {exponent} has no row; the package cannot make such tables"
    )]
    NoRow {
        /// The exponent.
        exponent: u8,
        /// Bits of the prefix.
        bits: u8,
    },
}

/// Why sections of a unit cannot be trusted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// A section of another size.
    #[error("{section}: {got} bytes, expected {expected}")]
    Size {
        /// The section.
        section: &'static str,
        /// Bytes expected.
        expected: u64,
        /// Bytes found.
        got: u64,
    },
    /// Threads a block that no GPU has.
    #[error("{got} threads a block; 1 to {} are possible", super::THREADS_MAX)]
    Threads {
        /// As given.
        got: u64,
    },
    /// More than the format counts, or nothing.
    #[error("{section}: {got} bytes; 1 to {COUNT_MAX} are possible")]
    Count {
        /// The section.
        section: &'static str,
        /// Bytes found.
        got: u64,
    },
    /// Tables that are not a prefix code.
    #[error("luts, row {row}, entry {entry}: {reason}")]
    Luts {
        /// Row.
        row: usize,
        /// Entry of the row.
        entry: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// A position that is not between its neighbours.
    #[error("output_positions, block {block}: element {got}, expected {least} to {most}")]
    Position {
        /// Block.
        block: usize,
        /// Element found.
        got: u64,
        /// First possible.
        least: u64,
        /// Last possible.
        most: u64,
    },
    /// A gap that is not where a code begins.
    #[error("gaps, window {window}: {got}, but a code begins at bit {expected}")]
    Gap {
        /// Window.
        window: u64,
        /// Gap found.
        got: u64,
        /// Where the code begins, from the window's first bit.
        expected: u64,
    },
    /// Bits that no code begins with.
    #[error("encoded_exponent, bit {bit}: no code begins with these bits (element {element})")]
    NoCode {
        /// Bit of the section.
        bit: u64,
        /// Element that it would be.
        element: u64,
    },
    /// Codes that end too early or too late.
    #[error("encoded_exponent: the codes of {elements} elements end in byte {expected}, the section has {got}")]
    End {
        /// Elements.
        elements: u64,
        /// Bytes that the codes take.
        expected: u64,
        /// Bytes of the section.
        got: u64,
    },
}

impl UnitError {
    /// The section that is not as it should be.
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

/// Why a directory could not be read, made or trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// Files and the system.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A unit's sections are damaged.
    #[error("{}: unit '{unit}' at byte {offset}: not what DFloat11 writes; fetch the file again", path.display())]
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
    /// A section of a unit is missing, or no section at all.
    #[error("{}: tensor '{tensor}': {reason}; fetch the model again", path.display())]
    Section {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// A `config.json` that does not tell what is needed.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is missing, and what to do.
        reason: String,
    },
    /// A weight whose shape is not known: the format does not hold shapes.
    #[error("{}: the shape of '{tensor}' ({elements} elements) is not known: {reason}", path.display())]
    Shape {
        /// The `config.json` that was asked.
        path: PathBuf,
        /// The weight.
        tensor: String,
        /// Its elements.
        elements: u64,
        /// Why not, and what to do.
        reason: String,
    },
    /// Two tensors of one name.
    #[error("{}: tensor '{tensor}' is in another file, too; move one away", path.display())]
    Twice {
        /// The second file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Nothing to do.
    #[error("{}: {reason}", path.display())]
    Nothing {
        /// The source.
        path: PathBuf,
        /// Why.
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

    /// Damage, failure or interruption.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Bundle(error) => error.class(),
            Self::Unit { .. } | Self::Section { .. } => ErrorClass::Mismatch,
            _ => ErrorClass::Failed,
        }
    }
}
