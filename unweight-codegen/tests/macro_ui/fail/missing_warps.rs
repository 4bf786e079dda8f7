//! A small matmul needs the number of warps that share k.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 4, stages = 2)]
struct Down;

fn main() {}
