//! Tests the kernels on a CPU: compiles the rendered source with a C++ compiler against `tests/simulator`, and compares
//! the results with the oracle.

mod activations;
mod attention;
mod attention_launch;
mod attention_packed;
mod compact_sections;
mod decode_compact;
mod encode_compact;
mod expert_pieces;
mod exponents;
mod gemm_compact;
mod gemm_join;
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
mod routers;
mod rows;
mod sample;
mod scale;
mod simulator;
mod update;
