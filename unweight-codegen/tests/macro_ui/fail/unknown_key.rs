//! Unknown key.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stage = 4)]
struct Gate;

fn main() {}
