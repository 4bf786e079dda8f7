//! What a device can be asked to do, one file a kernel family. Every call takes typed operands and checks them before anything is enqueued.

pub mod cublas;
pub mod decode;
pub mod encode;
pub mod gemm_packed;
pub mod gemm_recon;
pub mod repack;
