//! Kernels for these formats, on the runtime's opening for kernels from outside (feature `cuda`).
//!
//! ```text
//! kernels/<format>.cuh   the kernel, with its contract       <format>.rs   argument struct, shared memory, launch
//! ```
//! Each takes what the encoders here give and has been checked, or any bytes: a kernel never leaves its buffers, and
//! counts what it could not decode.

pub mod dfloat11;
pub mod matvans;
pub mod tans;
pub mod zipserv;

use unweight_codegen::{ExternalSource, spec::Arch};
use unweight_rt::{DeviceError, LaunchError};

/// The headers of all kernels.
pub const HEADERS: &[(&str, &str)] = &[
    ("rivals/dfloat11.cuh", include_str!("../../kernels/dfloat11.cuh")),
    ("rivals/matvans.cuh", include_str!("../../kernels/matvans.cuh")),
    ("rivals/tans.cuh", include_str!("../../kernels/tans.cuh")),
    ("rivals/zipserv.cuh", include_str!("../../kernels/zipserv.cuh")),
];

/// Every kernel that this crate launches, for an architecture.
pub fn kernels(arch: Arch) -> Vec<ExternalSource> {
    let mut kernels = vec![dfloat11::kernel(arch), zipserv::decompress(arch), zipserv::reduce(arch)];
    kernels.extend(zipserv::BATCH_TILES.map(|tile| zipserv::gemm(arch, tile)));
    kernels.extend([matvans::rows(arch), matvans::stripes(arch), matvans::lanes(arch), matvans::dense(arch)]);
    if tans::runs_on(arch) {
        kernels.extend([tans::add(arch), tans::plain(arch)]);
    }
    kernels
}

/// Why something of a rival's did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device, the compiler or the driver failed, or operands do not fit.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A unit that is damaged.
    #[error("a DFloat11 unit: {0}")]
    Unit(#[from] crate::dfloat11::UnitError),
    /// A matrix of ZipServ's that is damaged.
    #[error("a TCA-TBE matrix: {0}")]
    Zipserv(#[from] crate::zipserv::Error),
    /// An FP8 vector that is damaged.
    #[error("a tANS vector: {0}")]
    Tans(#[from] crate::tans::Error),
}

impl From<LaunchError> for Error {
    fn from(refusal: LaunchError) -> Self {
        Self::Device(refusal.into())
    }
}
