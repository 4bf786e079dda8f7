//! Runs whole language models from compressed weights, on one GPU. It speaks token ids; text is the caller's.

pub mod memory;
pub mod options;
pub mod pages;
pub mod schedule;

#[doc(inline)]
pub use memory::{Memory, NoMemory};
#[doc(inline)]
pub use options::{EngineOptions, Linears};
#[doc(inline)]
pub use schedule::{Event, Finish, Rejected, Request, SeqId};
#[doc(inline)]
pub use unweight_model::SampleParams;
