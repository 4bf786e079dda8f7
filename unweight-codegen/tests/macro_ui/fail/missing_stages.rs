//! A matmul needs its number of stages.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2)]
struct Gate;

fn main() {}
