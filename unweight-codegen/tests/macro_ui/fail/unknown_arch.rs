//! Unknown architecture.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, arch = sm75)]
struct Gate;

fn main() {}
