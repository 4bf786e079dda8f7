//! A variant is a struct, not a function.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4)]
fn gate() {}

fn main() {}
