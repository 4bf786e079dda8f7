//! A block has at most three multiplying warpgroups and one that loads.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = 64, warpgroups = 4, stages = 4)]
struct Down;

fn main() {}
