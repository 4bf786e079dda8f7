//! Compiles, caches, loads and launches Unweight's kernels.
//!
//! ```text
//! CompileRequest --(compiler: NVRTC)--> Artifact {cubin, resources, log} --(driver)--> loaded kernel
//!        |                                   ^
//!        +---------- cache: by content ------+
//! ```
//!
//! This crate owns everything that needs a compiler, a driver or a device. It does not know what a kernel means: that is
//! `unweight_codegen`. Nothing here is linked against CUDA; every library is looked for at run time by [`jit::toolchain`], and
//! what is missing is an error that says where it was looked for and what to install.

pub mod choose;
pub mod device;
pub mod env;
pub mod jit;
pub mod layer;
pub mod ops;
pub mod remedy;
pub mod weight;

pub use jit::error::Error;
pub use remedy::Remedy;
