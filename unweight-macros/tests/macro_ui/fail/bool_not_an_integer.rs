//! A switch is not a number.
use unweight_macros::unweight_variant;

#[unweight_variant(op = fused_wide, batch_tile = true, stages = 4)]
struct Down;

fn main() {}
