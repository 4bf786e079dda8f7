//! A switch is a bool, not a number.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = true, stages = 4)]
struct Down;

fn main() {}
