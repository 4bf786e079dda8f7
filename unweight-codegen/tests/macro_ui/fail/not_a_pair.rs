//! The attribute holds key = value pairs.
use unweight_codegen::unweight_variant;

#[unweight_variant(2, 4)]
struct Gate;

fn main() {}
