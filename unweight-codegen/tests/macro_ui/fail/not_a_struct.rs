//! A variant is a struct, not an enum.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4)]
enum Gate {}

fn main() {}
