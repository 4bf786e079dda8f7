//! Decoded exponents have no verbatim rows.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, source = exponent, verbatim = 8)]
struct Gate;

fn main() {}
