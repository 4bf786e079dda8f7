//! Runs whole language models from compressed weights, on one GPU. It speaks token ids; text is the caller's.

pub mod budget;
mod engine;
pub mod error;
mod forward;
mod kernels;
pub mod memory;
pub mod options;
pub mod pages;
#[cfg(feature = "pipelines")]
pub mod pipelines;
pub mod schedule;
mod weights;

#[doc(inline)]
pub use engine::{Engine, LoadProgress, measure};
#[cfg(feature = "pipelines")]
#[doc(inline)]
pub use engine::{RandomStored, objective};
#[doc(inline)]
pub use error::EngineError;
#[doc(inline)]
pub use forward::Part;
#[doc(inline)]
pub use memory::{Memory, NoMemory};
#[doc(inline)]
pub use options::{EngineOptions, Placement};
#[doc(inline)]
pub use schedule::{AdmissionError, Event, Finish, Request, SeqId};
#[doc(inline)]
pub use unweight_model::{SampleParams, sampling::NO_TOKEN};
#[doc(inline)]
pub use unweight_rt::experts::ExpertTraffic;
