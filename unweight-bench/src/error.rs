//! Why a measurement was not made.

use unweight_codegen::plan::GemmShape;
use unweight_engine::{EngineError, raw::pipelines::tune::TuneError};
use unweight_format::{
    CodecError,
    bundle::io_code,
    raw::{compact::Uncompact, packed::Unpackable},
};
use unweight_rt::{DeviceError, LaunchError, Remedy};

/// Why there is no report. A kernel whose output is wrong is never timed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The device, the compiler or the driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A whole model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A search for settings.
    #[error(transparent)]
    Tune(#[from] TuneError),
    /// A folder for what a search measures.
    #[error("a temporary folder for measurements: {0}; set TMPDIR to one that can be written to")]
    Temporary(std::io::Error),
    /// Weights that cannot be coded.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// Weights that have no packed encoding.
    #[error("[{n}, {k}] cannot be packed: {why}")]
    Unpackable {
        /// Output features.
        n: u32,
        /// Input features.
        k: u32,
        /// Why.
        why: Unpackable,
    },
    /// A fault that none of the kernels can have.
    #[error("none of these kernels hands a slot to the copy engine; leave the fault out, or run those that do")]
    NoFence,
    /// Weights that have no compact encoding.
    #[error("[{n}, {k}] cannot be compact: {why}")]
    Uncompact {
        /// Output features.
        n: u32,
        /// Input features.
        k: u32,
        /// Why.
        why: Uncompact,
    },
    /// Weights that another system's format cannot hold.
    #[error("{system} cannot hold [{n}, {k}]: {why}; take a shape of multiples of 64")]
    Unheld {
        /// The system.
        system: &'static str,
        /// Output features.
        n: u32,
        /// Input features.
        k: u32,
        /// Why.
        why: String,
    },
    /// A conversion that does not give back what it should.
    #[error("{kernel} does not give the CPU's bits; run the GPU tests")]
    WrongBits {
        /// The kernel, or the operation.
        kernel: &'static str,
    },
    /// A product that is too far from cuBLAS's.
    #[error(
        "{kernel} differs from cuBLAS by {error:.2e} at m = {}, n = {}, k = {}, where {limit:.0e} is allowed; run the GPU tests",
        .problem.m, .problem.n, .problem.k
    )]
    WrongProduct {
        /// The variant.
        kernel: String,
        /// The problem.
        problem: GemmShape,
        /// `|y - y_cublas| / |y_cublas|`.
        error: f64,
        /// What is allowed.
        limit: f64,
    },
    /// A problem that no variant takes.
    #[error("no variant takes m = {}, n = {}, k = {}; both n and k must be multiples of 64", .0.m, .0.n, .0.k)]
    NoVariant(GemmShape),
    /// Longer codes than any decoder takes.
    #[error("no decoder takes codes of {bits} bits; the limit is 15")]
    CodeBits {
        /// The longest code.
        bits: u32,
    },
}

impl From<LaunchError> for BenchError {
    fn from(refusal: LaunchError) -> Self {
        Self::Device(refusal.into())
    }
}

impl BenchError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Device(error) => error.code(),
            Self::Engine(error) => error.code(),
            Self::Tune(error) => error.code(),
            Self::Temporary(error) => io_code(error),
            Self::Codec(error) => error.code(),
            Self::Unpackable { why, .. } => why.code(),
            Self::NoFence => "fault-not-plantable",
            Self::Uncompact { why, .. } => why.code(),
            Self::Unheld { .. } => "shape-not-storable",
            Self::WrongBits { .. } | Self::WrongProduct { .. } => "wrong-result",
            Self::NoVariant(_) => "no-kernel-for-shape",
            Self::CodeBits { .. } => "code-limit-out-of-range",
        }
    }

    /// What to do about it, where one thing is to be done.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Device(error) => error.remedy(),
            _ => None,
        }
    }

    /// Refuses a product that is further from cuBLAS's than two bf16 products may be.
    pub(crate) fn check_product(kernel: &str, problem: GemmShape, error: f64) -> Result<(), Self> {
        const LIMIT: f64 = 1e-2;
        if error <= LIMIT {
            return Ok(());
        }
        // NaN, too.
        Err(Self::WrongProduct { kernel: kernel.to_owned(), problem, error, limit: LIMIT })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_product_is_not_timed() {
        let problem = GemmShape { m: 3, n: 64, k: 128 };
        assert!(BenchError::check_product("k", problem, 1e-3).is_ok());
        for error in [0.02, f64::NAN, f64::INFINITY] {
            let refused = BenchError::check_product("k", problem, error).unwrap_err().to_string();
            assert!(refused.contains("m = 3, n = 64, k = 128, where 1e-2"), "{refused}");
        }
    }
}
