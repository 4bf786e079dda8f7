//! Launches, one module per kernel family.
//!
//! A launch accepts views of its operands and an [`ExecContext`](crate::exec::ExecContext). All operand errors (shapes,
//! pitches, alignment, devices, overlap, the context's size, the grid) are detected before anything is enqueued.

pub mod attention;
pub mod bundle_encoder;
pub mod decode_compact;
pub mod decode_huffman;
pub mod embed;
pub mod encode_compact;
pub mod encode_huffman;
pub mod gemm_compact;
pub mod gemm_grouped;
pub mod gemm_packed;
pub mod gemm_recon;
pub mod kv;
pub mod kv_pack;
pub mod kv_packed;
pub mod kv_unpack;
pub mod logprobs;
pub mod norm;
pub mod pack;
pub mod rope;
pub mod route;
pub mod sample;
pub mod scale;
pub mod silu_mul;
pub mod unpack;
pub mod update;
