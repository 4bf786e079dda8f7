//! Numbers are limited to 32 bits.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 4294967298, stages = 4)]
struct Gate;

fn main() {}
