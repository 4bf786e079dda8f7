//! Tiles stay within the width of a tensor core instruction.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 5, stages = 2)]
struct Gate;

fn main() {}
