//! Compiles, caches, loads and launches Unweight's kernels.
//!
//! ```text
//! CompileRequest --(compiler: NVRTC)--> Artifact {cubin, resources, log} --(driver)--> loaded kernel
//!        |                                   ^
//!        +---------- cache: by content ------+
//! ```
//!
//! This crate owns everything that needs a compiler, a driver or a device. It does not know what a kernel means: that
//! is `unweight_codegen`. Nothing here is linked against CUDA; every library is looked for at run time by
//! [`jit::toolchain`], and what is missing is an error that says where it was looked for and what to install.
//!
//! What programs use: [`Device`], [`Stream`], [`KernelSet`], [`Loader`], [`LayerBuilder`], [`Linear`], [`Lane`],
//! matrices and their views, and the errors. The modules behind them are public for benchmarks, tests and kernels of
//! one's own; they change without notice.

#[doc(hidden)]
pub mod choose;
pub mod device;
pub mod env;
pub mod jit;
pub mod launcher;
pub mod layer;
#[doc(hidden)]
pub mod ops;
pub mod remedy;
#[doc(hidden)]
pub mod weight;

#[doc(inline)]
pub use choose::candidates::RegisterError;
#[doc(inline)]
pub use device::{
    Device, DeviceBuffer, DeviceError, Graph, KernelSet, LaneSize, MatrixMut, MatrixRef, Refusal, RowFault, Stream,
};
#[doc(inline)]
pub use jit::error::Error;
#[doc(inline)]
pub use launcher::{Launcher, LoadVariant};
#[doc(inline)]
pub use layer::{
    build::LayerBuilder,
    linear::Linear,
    loader::{Expand, Linears, LoadError, LoadOptions, Loader, Merge, Resident},
};
#[doc(inline)]
pub use ops::lane::Lane;
#[doc(inline)]
pub use remedy::Remedy;
#[doc(inline)]
pub use weight::{DeviceMatrix, DevicePacked};
