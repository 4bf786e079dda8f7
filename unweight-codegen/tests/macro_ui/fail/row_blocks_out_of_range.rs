//! A warp keeps the sums of its row blocks in registers.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 9, warps = 8, stages = 2)]
struct Down;

fn main() {}
