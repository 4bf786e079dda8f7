//! Batch tiles must be one of the supported sizes.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 12, row_blocks = 4, warps = 8, stages = 2)]
struct Down;

fn main() {}
