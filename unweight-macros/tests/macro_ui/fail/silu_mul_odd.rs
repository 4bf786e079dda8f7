//! A gate and its up are of one task.
use unweight_macros::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 3, warps = 8, stages = 2, epilogue = silu_mul)]
struct Down;

fn main() {}
