//! A step is decoded while another multiplies.
use unweight_macros::unweight_variant;

#[unweight_variant(op = fused_wide, batch_tile = 128, stages = 1)]
struct Down;

fn main() {}
