//! A block has at most 32 warps.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 1, warps = 33, stages = 1)]
struct Down;

fn main() {}
