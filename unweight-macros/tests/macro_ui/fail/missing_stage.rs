//! An encoder needs its stage.
use unweight_macros::unweight_variant;

#[unweight_variant(op = encode)]
struct Stats;

fn main() {}
