//! The argument structs of the kernels, field for field as in the headers.
//!
//! Each kernel takes exactly one of them by value (`__grid_constant__`). Device pointers are `u64` (`CUdeviceptr`), 0 =
//! null. A struct stands in the file of its family; the rendered source asserts `sizeof`, and a test holds every field
//! against the header.

pub use crate::{
    args::{ArgsInfo, Field, KernelArgs, TensorMap},
    family::{
        attention::AttentionArgs, decode_compact::DecodeCompactArgs, decode_huffman::DecodeHuffmanArgs,
        embed::EmbedArgs, encode_compact::EncodeCompactArgs, encode_huffman::EncodeHuffmanArgs,
        gemm_compact::GemmCompactArgs, gemm_grouped::GemmGroupedArgs, gemm_mma::GemmPackedArgs,
        gemm_recon::GemmReconArgs, kv_pack::KvPackArgs, kv_unpack::KvUnpackArgs, logprobs::LogprobsArgs,
        norm::NormArgs, pack::PackArgs, rope::RopeArgs, route::RouteArgs, sample::AdjustRow, sample::SampleArgs,
        sample::SampleRow, sample::TokenState, scale::ScaleArgs, silu_mul::SiluMulArgs,
    },
};
