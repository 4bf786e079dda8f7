//! Errors from source to loadable kernel.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use crate::{
    env::EnvError,
    jit::{
        cubin::CubinError,
        failure::CompileFailure,
        miss::Miss,
        remedy::Remedy,
        toolchain::{Library, MissingLibrary, OldNvrtc},
    },
};

/// Why a kernel could not be compiled or found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable has a value that is not documented.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// A library is missing, or not usable.
    #[error(transparent)]
    Library(#[from] MissingLibrary),
    /// NVRTC is too old for the architecture.
    #[error(transparent)]
    OldNvrtc(#[from] OldNvrtc),
    /// The source of a variant could not be generated.
    #[error(transparent)]
    Codegen(#[from] unweight_codegen::CodegenError),
    /// The compiler rejected a source. Boxed, because it contains the log and the source.
    #[error(transparent)]
    Compile(#[from] Box<CompileFailure>),
    /// The compiler's output is not a cubin that this crate can read.
    #[error("kernel {name}: {source}")]
    Cubin {
        /// The name of the kernel.
        name: String,
        /// The defect.
        source: CubinError,
    },
    /// Kernels are not in the cache and must not or cannot be compiled.
    #[error("{}: {why}\n  {}", absent(.missing, .cache_dir.as_deref()), lines(.missing))]
    NotCached {
        /// Every missing kernel.
        missing: Vec<MissingKernel>,
        /// The cache that was searched, if there is one.
        cache_dir: Option<PathBuf>,
        /// Why they were not compiled.
        why: NotCompiled,
    },
    /// A kernel's name is not valid as a directory and a symbol.
    #[error("{0}")]
    BadName(String),
    /// More than one kernel failed.
    #[error("{} kernels failed:\n{}", .0.len(), list(.0))]
    Several(Vec<Error>),
}

impl Error {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Env(error) => error.code(),
            Self::Library(error) => error.code(),
            Self::OldNvrtc(error) => error.code(),
            Self::Codegen(error) => error.code(),
            Self::Compile(error) => error.code(),
            Self::Cubin { source, .. } => source.code(),
            Self::NotCached { .. } => "kernels-not-cached",
            Self::BadName(_) => "kernel-name-unsafe",
            Self::Several(_) => "kernels-failed",
        }
    }

    /// Returns the next step, if one action resolves the error.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Library(missing) => Some(Remedy::Install(missing.library)),
            Self::OldNvrtc(_) => Some(Remedy::Install(Library::Nvrtc)),
            Self::NotCached { .. } => Some(Remedy::CompileKernels),
            Self::Several(errors) => errors.iter().find_map(Self::remedy),
            _ => None,
        }
    }
}

impl From<CompileFailure> for Error {
    fn from(failure: CompileFailure) -> Self {
        Error::Compile(Box::new(failure))
    }
}

/// A kernel that is not in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingKernel {
    /// The name of the kernel.
    pub name: String,
    /// Why the cache has no valid entry.
    pub why: Miss,
}

impl fmt::Display for MissingKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            Miss::Damaged(damage) => write!(f, "{} (damaged: {damage})", self.name),
            Miss::NoStore(unusable) => write!(f, "{} ({unusable})", self.name),
            _ => f.write_str(&self.name),
        }
    }
}

/// Why missing kernels were not compiled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotCompiled {
    /// `UNWEIGHT_JIT=cache-only` forbids compiling.
    #[error("UNWEIGHT_JIT=cache-only; compile them with UNWEIGHT_JIT=auto where the cache is writable")]
    CacheOnly,
    /// The compiler cannot be used.
    #[error(transparent)]
    NoCompiler(Box<Error>),
}

fn absent(missing: &[MissingKernel], dir: Option<&Path>) -> String {
    let cache = dir.map_or_else(|| "no cache directory".to_owned(), |dir| dir.display().to_string());
    let kernels = if missing.len() == 1 { "1 kernel is".to_owned() } else { format!("{} kernels are", missing.len()) };
    format!("{kernels} not in the cache ({cache}) and not compiled")
}

fn lines(missing: &[MissingKernel]) -> String {
    missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  ")
}

fn list(errors: &[Error]) -> String {
    errors.iter().map(|error| format!("- {error}")).collect::<Vec<_>>().join("\n")
}
