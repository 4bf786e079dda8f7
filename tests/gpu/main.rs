//! Tests of the kernels and the engine on a GPU. Ignored by default: `cargo test --test gpu -- --include-ignored
//! --test-threads=1`.

mod activations;
mod adjusted;
mod attention;
mod bench;
mod cublas;
mod decode_compact;
mod decode_huffman;
mod encode_compact;
mod encode_huffman;
mod engine;
mod exponents;
mod families;
mod gemm_compact;
mod gemm_packed;
mod gemm_recon;
mod harness;
mod hostile;
mod interop;
mod jit;
mod kv_attack;
mod kv_cache;
mod kv_engine;
mod linear;
mod mixtures;
mod moe;
mod pack;
mod pipelines;
mod registered;
mod rivals;
mod sample;
#[cfg(feature = "serve")]
mod serve;
mod slot;
mod speculate;
mod streams;
