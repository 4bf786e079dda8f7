//! The kernels' function on a CPU: what is rendered, built by a C++ compiler against `tests/simulator`, held against
//! the oracle.

mod activations;
mod attention;
mod attention_launch;
mod attention_packed;
mod compact_sections;
mod decode_compact;
mod encode_compact;
mod exponents;
mod gemm_compact;
mod gemm_mma;
mod gemm_recon;
mod gemm_wgmma;
mod harness;
mod huffman;
mod kv_cache;
mod kv_unpack;
mod logprobs;
mod moe;
mod pack;
mod packed_problem;
mod rivals;
mod sample;
mod scale;
mod simulator;
