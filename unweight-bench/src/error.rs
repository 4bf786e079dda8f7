//! Errors of the benchmarks.

use unweight_codegen::plan::GemmShape;
use unweight_engine::{EngineError, raw::pipelines::tune::TuneError};
use unweight_format::{
    CodecError,
    bundle::io_code,
    raw::{compact::Uncompact, packed::Unpackable},
};
use unweight_rt::{DeviceError, LaunchError, Remedy};

/// Why a benchmark returned no report. A kernel whose output is wrong is never timed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The device, the compiler or the driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine failed while it ran a whole model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The tuner's search failed.
    #[error(transparent)]
    Tune(#[from] TuneError),
    /// No temporary directory could be made for the tuner's measurements.
    #[error("cannot create a temporary directory for measurements: {0}; set TMPDIR to a writable directory")]
    Temporary(std::io::Error),
    /// The weights cannot be encoded.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The weights cannot be packed.
    #[error("cannot pack weights of shape [{n}, {k}]: {why}")]
    Unpackable {
        /// Output features.
        n: u32,
        /// Input features.
        k: u32,
        /// The reason.
        why: Unpackable,
    },
    /// The requested fault does not apply to any of the selected kernels.
    #[error(
        "none of the selected kernels refills a slot with the copy engine, so the fault cannot be planted; \
             select kernels that do"
    )]
    NoFence,
    /// The weights have no compact encoding.
    #[error("cannot encode weights of shape [{n}, {k}] as compact: {why}")]
    Uncompact {
        /// Output features.
        n: u32,
        /// Input features.
        k: u32,
        /// The reason.
        why: Uncompact,
    },
    /// Another system's format cannot hold the weights.
    #[error("{system} cannot store weights of shape [{n}, {k}]: {why}; choose N and K that are multiples of 64")]
    Unheld {
        /// The system.
        system: &'static str,
        /// Output features.
        n: u32,
        /// Input features.
        k: u32,
        /// The reason.
        why: String,
    },
    /// A conversion returned wrong bits.
    #[error("{kernel} returned other bits than the CPU; run the GPU tests")]
    WrongBits {
        /// The kernel, or the operation.
        kernel: &'static str,
    },
    /// A product differs too much from cuBLAS's.
    #[error(
        "{kernel} differs from cuBLAS by {error:.2e} at m = {}, n = {}, k = {}; the limit is {limit:.0e}; run the GPU tests",
        .problem.m, .problem.n, .problem.k
    )]
    WrongProduct {
        /// The variant.
        kernel: String,
        /// The problem.
        problem: GemmShape,
        /// `|y - y_cublas| / |y_cublas|`.
        error: f64,
        /// The limit.
        limit: f64,
    },
    /// No variant accepts the problem.
    #[error("no kernel variant supports m = {}, n = {}, k = {}; n and k must be multiples of 64", .0.m, .0.n, .0.k)]
    NoVariant(GemmShape),
    /// The Huffman codes are longer than any decoder accepts.
    #[error("no decoder supports Huffman codes of {bits} bits; the limit is 15")]
    CodeBits {
        /// Length of the longest code, bits.
        bits: u32,
    },
}

impl From<LaunchError> for BenchError {
    fn from(error: LaunchError) -> Self {
        Self::Device(error.into())
    }
}

impl BenchError {
    /// Returns the stable code of this error. docs/reference/errors.md lists all codes.
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

    /// Returns what the user can do about the error, if there is one clear remedy.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Device(error) => error.remedy(),
            _ => None,
        }
    }

    /// Returns an error if a product differs from cuBLAS's by more than two correct bf16 products may differ.
    pub(crate) fn check_product(kernel: &str, problem: GemmShape, error: f64) -> Result<(), Self> {
        const LIMIT: f64 = 1e-2;
        if error <= LIMIT {
            return Ok(());
        }
        // Also reached if `error` is NaN.
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
            let message = BenchError::check_product("k", problem, error).unwrap_err().to_string();
            assert!(message.contains("m = 3, n = 64, k = 128; the limit is 1e-2"), "{message}");
        }
    }
}
