//! Compiles, caches, loads and launches Unweight's kernels.
//!
//! ```text
//! CompileRequest --(compiler: NVRTC)--> Artifact {cubin, resources, log} --(driver)--> loaded kernel
//!        |                                   ^
//!        +---------- cache: by content ------+
//! ```
//!
//! This crate owns everything that needs a compiler, a driver or a device. It does not know what a kernel computes:
//! `unweight_codegen` defines that. Nothing is linked against CUDA: every library is loaded at run time. The error for
//! a missing library lists where it was searched for and what to install. Functions that return a [`DeviceError`] fail
//! if a call of the driver fails, or as they say.
//!
//! | start with | for |
//! |---|---|
//! | [`Device`], [`Stream`], [`DeviceMatrix`] | a GPU, work in order, a BF16 matrix |
//! | [`KernelSet`] | the kernels of a GPU, compiled or found in the [`cache`] |
//! | [`Loader`], [`LayerBuilder`] | layers of a bundle, or of matrices on the GPU |
//! | [`Linear`], [`experts`] | the matmuls of layers, run in an [`ExecContext`] |
//! | [`interop`] | layers in the memory and on the streams of another framework |
//! | [`raw`] | everything else, without a promise of stability |

mod choose;
mod device;
pub mod env;
mod exec;
mod jit;
pub mod launcher;
mod layer;
mod ops;
pub mod raw;
mod weight;

#[doc(inline)]
pub use choose::{candidates::RegisterError, route::Expand};
#[doc(inline)]
pub use device::{
    ContextSize, Device, DeviceBuffer, DeviceError, DeviceInfo, Event, Graph, KernelSet, LaunchError, MatrixMut,
    MatrixRef, Prepared, RowFault, Stream,
    error::{MapRule, PitchRule},
};
#[doc(inline)]
pub use exec::ExecContext;
#[doc(inline)]
pub use jit::{
    error::{Error, MissingKernel, NotCompiled},
    remedy::Remedy,
    toolchain::Library,
};
#[doc(inline)]
pub use launcher::{Launcher, LoadVariant};
#[doc(inline)]
pub use layer::{
    build::LayerBuilder,
    error::{LoadError, Unsuitable},
    linear::{Bf16Linear, CompactLinear, Linear, PackedLinear},
    loader::Loader,
    options::{LoadOptions, Merge},
};
#[doc(inline)]
pub use unweight_format::Placement;
#[doc(inline)]
pub use weight::{DeviceMatrix, DevicePacked};

/// Compiled kernels and how the cache found each: the arguments of progress callbacks.
pub mod cache {
    #[doc(inline)]
    pub use crate::jit::cache::{Artifact, CacheState, Miss, Progress};
}

/// The experts of a mixture-of-experts layer: all of them on the device, or in host memory with slots on the device.
pub mod experts {
    #[doc(inline)]
    pub use crate::{
        layer::{
            build::{ExpertPart, FillExperts},
            experts::{
                Experts, ExpertsShape, Routed, RoutedAt, RouterConfig,
                offload::{ExpertTraffic, Fetcher, HostEncoding, OffloadedExperts, ReplaceRouting},
            },
            loader::{ExpertTensors, SharedTensors},
        },
        weight::ExpertWeights,
    };
}

/// Layers in the memory and on the streams of another framework, such as PyTorch.
pub mod interop {
    #[doc(inline)]
    pub use crate::{
        layer::interop::{ElementsAt, Interop, PackedAt, Scratch},
        ops::{pack::PackError, update::Updated},
    };
}
