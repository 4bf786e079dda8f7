//! A warp's sums lie over its drained ring.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 64, row_blocks = 8, warps = 4, stages = 1)]
struct Down;

fn main() {}
