//! From source to cubin: finds the NVIDIA libraries, compiles kernels and caches the results.
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
