//! `gemm_wgmma` has `stream_k` instead of `persistent`.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = 128, stages = 4, persistent = true)]
struct Down;

fn main() {}
