//! A variant is one spec.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4)]
struct Gate<T>(T);

fn main() {}
