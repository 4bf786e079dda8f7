//! A pipeline needs at least two stages.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 1)]
struct Gate;

fn main() {}
