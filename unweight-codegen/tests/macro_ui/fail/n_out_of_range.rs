//! The number of tiles is limited by the width of the tensor core instruction.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 5, stages = 2)]
struct Gate;

fn main() {}
