//! Kernels for these formats, launched as external kernels of the runtime (feature `gpu`).
//!
//! ```text
//! kernels/<format>.cuh   the kernel and its contract             <format>.rs   argument struct, shared memory, launch
//! ```
//! Kernels accept the checked output of the encoders here, but also any other bytes: a kernel never accesses memory
//! outside its buffers, and it counts what it could not decode.

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

/// Returns every kernel that this crate launches on an architecture.
pub fn kernels(arch: Arch) -> Vec<ExternalSource> {
    let mut kernels = vec![dfloat11::kernel(arch), zipserv::decompress(arch), zipserv::reduce(arch)];
    kernels.extend(zipserv::BATCH_TILES.map(|tile| zipserv::gemm(arch, tile)));
    kernels.extend([matvans::rows(arch), matvans::stripes(arch), matvans::lanes(arch), matvans::dense(arch)]);
    if tans::runs_on(arch) {
        kernels.extend([tans::add(arch), tans::plain(arch)]);
    }
    kernels
}

/// The reason why a kernel did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device, the compiler or the driver failed, or operands are invalid.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A DFloat11 unit is damaged.
    #[error("a DFloat11 unit: {0}")]
    Unit(#[from] crate::dfloat11::UnitError),
    /// A ZipServ matrix is damaged.
    #[error("a TCA-TBE matrix: {0}")]
    Zipserv(#[from] crate::zipserv::Error),
    /// An FP8 vector is damaged.
    #[error("a tANS vector: {0}")]
    Tans(#[from] crate::tans::Error),
}

impl From<LaunchError> for Error {
    fn from(refusal: LaunchError) -> Self {
        Self::Device(refusal.into())
    }
}
