//! Keys are known by name.
use unweight_macros::unweight_variant;

#[unweight_variant(n = 2, stage = 4)]
struct Gate;

fn main() {}
