//! A variant has no fields.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4)]
struct Gate {
    n: u32,
}

fn main() {}
