//! The rings of all warps must fit in shared memory.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 4, warps = 16, stages = 3)]
struct Down;

fn main() {}
