//! A fused matmul must say for how many batch rows it is.
use unweight_macros::unweight_variant;

#[unweight_variant(op = fused_wide, stages = 4)]
struct Down;

fn main() {}
