//! From a source to a cubin: the libraries that are there, the compiler, and the cache of what it made.
//!
//! Nothing here opens a device.

pub mod cache;
pub mod compiler;
pub mod cubin;
pub mod error;
pub mod failure;
mod miss;
pub mod nvrtc;
pub mod process;
pub mod remedy;
pub mod request;
pub mod toolchain;
