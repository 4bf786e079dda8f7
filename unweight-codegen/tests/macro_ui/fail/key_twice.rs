//! A key is given once.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, n = 1)]
struct Gate;

fn main() {}
