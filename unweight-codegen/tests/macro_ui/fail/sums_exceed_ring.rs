//! A warp's sums overlay its drained ring, so they must fit.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 64, row_blocks = 8, warps = 4, stages = 1)]
struct Down;

fn main() {}
