//! A matmul needs its number of tiles.
use unweight_codegen::unweight_variant;

#[unweight_variant(stages = 4)]
struct Gate;

fn main() {}
