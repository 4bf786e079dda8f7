//! A cluster size is a power of two, because blocks share the rows of the sums.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 4, warps = 8, stages = 2, cluster = 3)]
struct Down;

fn main() {}
