//! A matmul of packed weights must say for how many batch rows it is.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, stages = 4)]
struct Down;

fn main() {}
