//! The reasons why a configuration cannot be used.

use unweight_format::bundle::BundleError;

/// The reason why a configuration cannot be used: the file, the key with its path (`rope_scaling.factor`), the value,
/// and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The bundle could not be read.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The bundle does not contain the file.
    #[error("the bundle has no {file}; compress a model directory that contains it")]
    NoFile {
        /// The file.
        file: &'static str,
    },
    /// The file is not JSON, or not a JSON object.
    #[error("{file}: not a JSON object: {reason}; fetch the file again")]
    Json {
        /// The file.
        file: &'static str,
        /// The error of the parser.
        reason: String,
    },
    /// A required key is missing.
    #[error("{file}: {key} is missing; add it ({expected})")]
    Missing {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// The expected value.
        expected: String,
    },
    /// A value has another type than expected.
    #[error("{file}: {key} is {value}; it must be {expected}")]
    Type {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// Its value, as JSON, shortened.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A value is out of range, or does not match another one.
    #[error("{file}: {key} is {value}; it must be {limit}")]
    Range {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// Its value, as JSON, shortened.
        value: String,
        /// The valid values.
        limit: String,
    },
    /// The model is not supported.
    #[error("{file}: {key} is {value}, which is not supported; {instead}")]
    Unsupported {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// Its value, as JSON, shortened.
        value: String,
        /// The supported values, or the remedy.
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
