//! The argument structs of the kernels, field by field as in the headers.
//!
//! Each kernel has exactly one of them as its parameter, by value (`__grid_constant__`). Device pointers are `u64`
//! (`CUdeviceptr`), 0 = null. A struct is defined in the file of its family. The rendered source asserts `sizeof`, and
//! a test compares every field with the header.

pub use crate::{
    args::{ArgsInfo, Field, KernelArgs, TensorMap},
    family::{
        attention::AttentionArgs, decode_compact::DecodeCompactArgs, decode_huffman::DecodeHuffmanArgs,
        embed::EmbedArgs, encode_compact::EncodeCompactArgs, encode_huffman::EncodeHuffmanArgs,
        gemm_compact::GemmCompactArgs, gemm_grouped::GemmGroupedArgs, gemm_mma::GemmPackedArgs,
        gemm_recon::GemmReconArgs, kv_pack::KvPackArgs, kv_unpack::KvUnpackArgs, logprobs::LogprobsArgs,
        norm::NormArgs, pack::PackArgs, rope::RopeArgs, route::RouteArgs, sample::AdjustRow, sample::SampleArgs,
        sample::SampleRow, sample::TokenState, scale::ScaleArgs, silu_mul::SiluMulArgs, update::UpdateArgs,
    },
};
