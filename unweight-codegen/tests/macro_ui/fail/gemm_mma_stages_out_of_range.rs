//! A ring has at least one stage.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 4, warps = 8, stages = 0)]
struct Down;

fn main() {}
