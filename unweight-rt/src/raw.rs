//! The parts that the public types are made of: dispatch, kernels by family, weights section by section, the driver's
//! objects, the compiler and the cache's files.
//!
//! For benchmarks, tests and experts. Nothing here is stable: names and behaviour change in any release.

/// Chooses kernels and routes, as pure functions of shapes and the GPU's description.
pub mod choose {
    #[doc(inline)]
    pub use crate::choose::*;
}

/// The driver's objects: memory, streams, modules, launches.
pub mod device {
    #[doc(inline)]
    pub use crate::device::*;
}

/// Where launches run: a stream with its memory, and cuBLAS.
pub mod exec {
    #[doc(inline)]
    pub use crate::exec::*;
}

/// Compiles kernels, reads what came out, and keeps it.
pub mod jit {
    #[doc(inline)]
    pub use crate::jit::*;
}

/// Layers, and what a loader needs for them.
pub mod layer {
    #[doc(inline)]
    pub use crate::layer::*;
}

/// Launches of each kernel family.
pub mod ops {
    #[doc(inline)]
    pub use crate::ops::*;
}

/// Weights on the device, by encoding and section.
pub mod weight {
    #[doc(inline)]
    pub use crate::weight::*;
}
