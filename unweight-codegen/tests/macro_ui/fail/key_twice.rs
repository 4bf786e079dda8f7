//! A key must not be repeated.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, n = 1)]
struct Gate;

fn main() {}
