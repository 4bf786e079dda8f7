//! What can go wrong between a spec and a source.

use crate::{lint::LintError, plan::Infeasible};

/// Why a variant has no source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodegenError {
    /// The variant cannot exist on its architecture.
    #[error(transparent)]
    Infeasible(#[from] Infeasible),
    /// A template does not parse, or asks for a value that its context does not have.
    #[error("template {template} for variant {variant}: {message}")]
    Template {
        /// File name in `templates/kernels`.
        template: &'static str,
        /// Canonical name.
        variant: String,
        /// tera's report, with line and caret.
        message: String,
    },
    /// The rendered text breaks a rule of [`lint`](crate::lint).
    #[error(transparent)]
    Lint(#[from] LintError),
}

impl CodegenError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Infeasible(error) => error.code(),
            Self::Template { .. } => "kernel-template-failed",
            Self::Lint(_) => "kernel-source-invalid",
        }
    }
}
