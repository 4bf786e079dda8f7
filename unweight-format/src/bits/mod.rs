//! Bits and bytes: what every encoding is made of. Nothing here knows an encoding, a file or a model.

pub mod bf16;
pub mod bitstream;
mod buffer;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod float;
pub mod histogram;
pub mod layout;
pub mod named;
pub mod tile;

pub use buffer::{keep_freed_memory, return_freed_memory};
pub(crate) use buffer::{memory_bytes, try_zeroed, zeroed};
