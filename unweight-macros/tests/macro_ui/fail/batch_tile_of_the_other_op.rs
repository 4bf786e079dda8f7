//! Small batches are for the other operation.
use unweight_macros::unweight_variant;

#[unweight_variant(op = fused_wide, batch_tile = 8, stages = 4)]
struct Down;

fn main() {}
