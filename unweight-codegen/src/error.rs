//! Errors of generating a source from a spec.

use crate::plan::Infeasible;

/// The reason why a variant has no source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodegenError {
    /// The variant cannot exist on its architecture.
    #[error(transparent)]
    Infeasible(#[from] Infeasible),
    /// A template does not parse, or uses a value that its context does not contain.
    #[error("template {template} for variant {variant}: {message}")]
    Template {
        /// File name in `templates/kernels`.
        template: &'static str,
        /// Canonical name of the variant.
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

/// A rule of [`lint`](crate::lint) that a rendered source breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file} line {line}: {what}; fix the template or header in templates/")]
pub struct LintError {
    /// The variant or header.
    pub file: String,
    /// Line number, counted from 1; 0 for the whole file.
    pub line: usize,
    /// The violated rule, in words.
    pub what: String,
}

impl LintError {
    pub(crate) fn at(file: &str, line: usize, what: String) -> Self {
        Self { file: file.to_owned(), line, what }
    }
}
