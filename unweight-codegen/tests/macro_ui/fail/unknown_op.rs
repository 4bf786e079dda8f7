//! Unknown operation.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = softmax, n = 2, stages = 4)]
struct Gate;

fn main() {}
