//! A number fits 32 bits.
use unweight_macros::unweight_variant;

#[unweight_variant(n = 4294967298, stages = 4)]
struct Gate;

fn main() {}
