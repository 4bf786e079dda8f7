//! A wide matmul streams along k.
use unweight_macros::unweight_variant;

#[unweight_variant(op = fused_wide, batch_tile = 128, stages = 4, stream = true)]
struct Down;

fn main() {}
