//! Runs language models from compressed weights on one GPU. Prompts and output are token ids; tokenization is left to
//! the caller.
//!
//! | start with | for |
//! |---|---|
//! | [`Engine`], [`EngineOptions`] | a model on a device: load it, add sequences, step |
//! | [`Request`], [`SampleParams`], [`Event`] | a sequence, how its tokens are sampled, and each token |
//! | [`Memory`] | bytes of weights, KV cache and working memory |
//! | [`budget`] | an encoding per tensor so that a model fits in the given memory |
//! | [`raw`] | everything below, without a promise of stability |

mod attention;
pub mod budget;
mod constraint;
mod draft;
mod engine;
mod error;
mod forward;
mod kernels;
mod kv_cache;
mod memory;
mod options;
mod pages;
#[cfg(feature = "pipelines")]
mod pipelines;
mod prefix;
pub mod raw;
mod request;
mod sampling;
mod schedule;
mod weights;

#[doc(inline)]
pub use constraint::{Constraint, ConstraintState};
#[doc(inline)]
pub use engine::{Engine, LoadProgress};
#[doc(inline)]
pub use error::{EngineError, NoHostMemory, NoMemory};
#[doc(inline)]
pub use memory::Memory;
#[doc(inline)]
pub use options::{EngineOptions, KvCache, OptionError, Placement, Plan};
#[cfg(feature = "pipelines")]
#[doc(inline)]
pub use pipelines::PlanError;
#[doc(inline)]
pub use request::{AdmissionError, Event, Finish, Request, SeqId};
#[doc(inline)]
pub use schedule::DraftCounts;
#[doc(inline)]
pub use unweight_model::{
    SampleParams,
    sampling::{Adjustments, Logprobs, NO_TOKEN},
};
#[doc(inline)]
pub use unweight_rt::experts::ExpertTraffic;
