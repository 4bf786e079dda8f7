//! A block holds three warpgroups that multiply, and one that loads.
use unweight_macros::unweight_variant;

#[unweight_variant(op = fused_wide, batch_tile = 64, warpgroups = 4, stages = 4)]
struct Down;

fn main() {}
