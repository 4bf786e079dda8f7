//! Runs whole language models from compressed weights, on one GPU. It speaks token ids; text is the caller's.

mod engine;
pub mod error;
pub mod fit;
#[doc(hidden)]
pub mod forward;
mod kernels;
pub mod memory;
pub mod options;
pub mod pages;
pub mod paths;
pub mod program;
pub mod run;
pub mod schedule;
pub mod tune;
mod weights;

#[doc(inline)]
pub use engine::{Engine, LoadProgress};
#[doc(inline)]
pub use error::EngineError;
#[doc(inline)]
pub use memory::{Memory, NoMemory};
#[doc(inline)]
pub use options::{EngineOptions, Linears, MlpWeights, Resident};
#[doc(inline)]
pub use schedule::{Event, Finish, Rejected, Request, SeqId};
#[doc(inline)]
pub use unweight_model::{SampleParams, sampling::NO_TOKEN};
#[doc(inline)]
pub use unweight_rt::experts::ExpertTraffic;
