//! A matmul of packed weights needs its batch tile.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, stages = 4)]
struct Down;

fn main() {}
