//! A number is not a word.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = two, stages = 4)]
struct Gate;

fn main() {}
