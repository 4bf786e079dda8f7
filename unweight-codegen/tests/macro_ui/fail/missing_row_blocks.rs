//! A small matmul needs the number of row blocks of a task.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, warps = 8, stages = 2)]
struct Down;

fn main() {}
