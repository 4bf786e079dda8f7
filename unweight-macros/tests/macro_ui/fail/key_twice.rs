//! A key is given once.
use unweight_macros::unweight_variant;

#[unweight_variant(n = 2, stages = 4, n = 1)]
struct Gate;

fn main() {}
