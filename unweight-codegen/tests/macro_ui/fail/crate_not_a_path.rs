//! The value of `crate` is a path.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, crate = 1)]
struct Gate;

fn main() {}
