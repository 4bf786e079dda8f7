//! Unknown value of an enum.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, epilogue = keep)]
struct Gate;

fn main() {}
