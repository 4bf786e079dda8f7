//! The sum of shared memory stays below the limit.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 4, stages = 6)]
struct Gate;

fn main() {}
