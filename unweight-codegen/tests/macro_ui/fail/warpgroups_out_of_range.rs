//! A block holds three warpgroups that multiply, and one that loads.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = 64, warpgroups = 4, stages = 4)]
struct Down;

fn main() {}
