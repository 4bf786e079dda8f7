//! A variant is a single spec, so its struct has no generics.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4)]
struct Gate<T>(T);

fn main() {}
