//! The sections must fit in shared memory.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 4, stages = 6)]
struct Gate;

fn main() {}
