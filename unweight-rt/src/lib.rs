//! Compiles, caches, loads and launches Unweight's kernels.
//!
//! ```text
//! CompileRequest --(compiler: NVRTC)--> Artifact {cubin, resources, log} --(driver)--> loaded kernel
//!        |                                   ^
//!        +---------- cache: by content ------+
//! ```
//!
//! This crate owns everything that needs a compiler, a driver or a device. It does not know what a kernel means: that is
//! `unweight_codegen`. Nothing here is linked against CUDA; every library is looked for at run time by [`toolchain`], and
//! what is missing is an error that says where it was looked for and what to install.

pub mod bench;
pub mod cache;
pub mod compiler;
pub mod cubin;
pub mod cublas;
pub mod decoder;
pub mod device;
pub mod dispatch;
pub mod encoder;
pub mod env;
pub mod error;
pub mod fused;
pub mod launch;
pub mod linear;
pub mod matmul;
pub mod module;
pub mod nvrtc;
pub mod packer;
pub mod tensor;
pub mod tma;
pub mod toolchain;

pub use error::Error;
