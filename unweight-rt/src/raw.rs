//! The building blocks of the public types: dispatch, launchers per kernel family, weights section by section, driver
//! objects, the compiler and the cache.
//!
//! For benchmarks, tests and experts. Nothing here is stable: names and behaviour may change in any release.

/// Chooses kernels and routes as pure functions of shapes and the GPU's description.
pub mod choose {
    #[doc(inline)]
    pub use crate::choose::*;
}

/// Driver objects: memory, streams, modules, launches.
pub mod device {
    #[doc(inline)]
    pub use crate::device::*;
}

/// Execution contexts: a stream with its memory, and cuBLAS.
pub mod exec {
    #[doc(inline)]
    pub use crate::exec::*;
}

/// Compiles kernels, parses the compiler's output and caches the results.
pub mod jit {
    #[doc(inline)]
    pub use crate::jit::*;
}

/// Layers, with the options and errors of loading them.
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
