//! Why a configuration cannot be used.

use unweight_format::bundle::BundleError;

/// Why a configuration cannot be used: the file, the key with its path (`rope_scaling.factor`), the value, and what to
/// do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The bundle could not be read.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The bundle keeps no such file.
    #[error("the bundle has no {file}; make it from a directory that has one")]
    NoFile {
        /// The file.
        file: &'static str,
    },
    /// Not JSON, or not an object.
    #[error("{file}: not a JSON object: {reason}; fetch the file again")]
    Json {
        /// The file.
        file: &'static str,
        /// What the parser says.
        reason: String,
    },
    /// A key without which nothing is known.
    #[error("{file}: no {key}; add it ({expected})")]
    Missing {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// What it should hold.
        expected: String,
    },
    /// A value of another type.
    #[error("{file}: {key} is {value}, it should be {expected}")]
    Type {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// Its value, as JSON, shortened.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A value out of its range, or that does not fit another's.
    #[error("{file}: {key} is {value}, it must be {limit}")]
    Range {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// Its value, as JSON, shortened.
        value: String,
        /// What it must be.
        limit: String,
    },
    /// A model that this program does not know how to run.
    #[error("{file}: {key} is {value}, which is not supported; {instead}")]
    Unsupported {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// Its value, as JSON, shortened.
        value: String,
        /// What is supported, or what to do.
        instead: String,
    },
}

impl ConfigError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Bundle(error) => error.code(),
            Self::NoFile { .. } => "config-missing",
            Self::Json { .. } => "config-invalid",
            Self::Missing { .. } => "config-key-missing",
            Self::Type { .. } => "config-value-type",
            Self::Range { .. } => "config-value-out-of-range",
            Self::Unsupported { .. } => "unsupported-model",
        }
    }
}
