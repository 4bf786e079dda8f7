//! The internals of an engine: its scheduler and pages, memory accounting, steps for measurements, and the pipelines of
//! MLPs with the search for their settings.
//!
//! For benchmarks, tests and experts. Nothing here is stable: names and behaviour may change in any release.

#[doc(inline)]
pub use crate::attention::decode_variant;

/// Measures steps of an engine: [`Engine::measure`](crate::Engine::measure).
pub mod measure {
    #[doc(inline)]
    pub use crate::{
        engine::{measure::*, routing::Routing},
        forward::StepPhase,
    };
}

/// Computes the bytes of an engine on the device before anything is allocated.
pub mod memory {
    #[doc(inline)]
    pub use crate::memory::*;
}

/// How the MLPs of a random model are stored: [`Engine::random_stored`](crate::Engine::random_stored).
#[cfg(feature = "pipelines")]
#[doc(inline)]
pub use crate::engine::RandomStored;

/// Measures settings of pipelines: [`Engine::tune_pipelines`](crate::Engine::tune_pipelines).
#[cfg(feature = "pipelines")]
pub mod objective {
    #[doc(inline)]
    pub use crate::engine::objective::*;
}

/// Pipelines, variants and settings by name, and the batches that steps are recorded for.
pub mod options {
    #[doc(inline)]
    pub use crate::options::*;
}

/// Pages of the KV cache.
pub mod pages {
    #[doc(inline)]
    pub use crate::pages::{PAGE_TOKENS, pages_for};
}

/// The report's runtime for MLPs whose weights stay in their stored encodings on the device.
#[cfg(feature = "pipelines")]
pub mod pipelines {
    #[doc(inline)]
    pub use crate::pipelines::*;
}

/// The scheduler: rows, pages and the next action, without a device.
pub mod schedule {
    #[doc(inline)]
    pub use crate::{
        draft::Proposal,
        schedule::{Chunk, Limits, Next, Running, Schedule, Speculation},
    };
}
