//! Bits and bytes, of which every encoding is made. This module is independent of encodings, files and models.

pub mod bf16;
pub mod bitstream;
mod buffer;
pub(crate) mod delta;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod float;
pub mod histogram;
pub mod layout;
pub mod named;
pub(crate) mod parallel;
pub mod tile;

pub use buffer::zeroed;
pub use buffer::{keep_freed_memory, return_freed_memory};
pub(crate) use buffer::{memory_bytes, try_zeroed, with_capacity};
