//! Unknown source.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, source = bitmap)]
struct Gate;

fn main() {}
