//! A value is an integer, a switch, a word or a path.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = "4")]
struct Gate;

fn main() {}
