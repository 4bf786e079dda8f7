//! A matmul needs its number of stages.
use unweight_macros::unweight_variant;

#[unweight_variant(n = 2)]
struct Gate;

fn main() {}
