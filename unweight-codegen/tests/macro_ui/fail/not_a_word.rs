//! A word is not a number.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, epilogue = 1)]
struct Gate;

fn main() {}
