//! What can go wrong between a source and a kernel that is ready to run.

use std::path::PathBuf;

use crate::env::EnvError;
use crate::jit::compiler::CompileFailure;
use crate::jit::cubin::CubinError;
use crate::jit::toolchain::MissingLibrary;
use crate::remedy::Remedy;

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable holds a value that is not documented.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// A library is not there, or not usable.
    #[error(transparent)]
    Library(#[from] MissingLibrary),
    /// There is no source for a variant.
    #[error(transparent)]
    Codegen(#[from] unweight_codegen::CodegenError),
    /// The compiler refused a source. Boxed: it carries the log and the source.
    #[error(transparent)]
    Compile(#[from] Box<CompileFailure>),
    /// The compiler's output is no cubin that this crate can read.
    #[error("kernel {name}: {source}")]
    Cubin {
        /// The kernel.
        name: String,
        /// What is wrong with it.
        source: CubinError,
    },
    /// Kernels that the cache does not hold and that may not or cannot be compiled.
    #[error("{}", describe_missing(.missing, .cache_dir.as_deref(), .why))]
    NotCached {
        /// Every missing kernel.
        missing: Vec<String>,
        /// The cache that was looked into, if there is one.
        cache_dir: Option<PathBuf>,
        /// Why they were not compiled.
        why: String,
    },
    /// A kernel's name is not fit for a folder and a symbol.
    #[error("{0}")]
    BadName(String),
    /// More than one kernel failed.
    #[error("{} kernels failed:\n{}", .0.len(), list(.0))]
    Several(Vec<Error>),
}

impl Error {
    /// What to do about it, where one thing is to be done.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Library(missing) => Some(Remedy::Install(missing.library)),
            Self::NotCached { .. } => Some(Remedy::CompileKernels),
            Self::Several(errors) => errors.iter().find_map(Self::remedy),
            _ => None,
        }
    }
}

impl From<CompileFailure> for Error {
    fn from(failure: CompileFailure) -> Error {
        Error::Compile(Box::new(failure))
    }
}

fn describe_missing(missing: &[String], dir: Option<&std::path::Path>, why: &str) -> String {
    let place = dir.map_or_else(|| "no cache folder".to_owned(), |dir| dir.display().to_string());
    format!(
        "{} kernel{} not in the cache ({place}) and not compiled: {why}\n  {}",
        missing.len(),
        if missing.len() == 1 { "" } else { "s" },
        missing.join("\n  ")
    )
}

fn list(errors: &[Error]) -> String {
    errors.iter().map(|error| format!("- {error}")).collect::<Vec<_>>().join("\n")
}
