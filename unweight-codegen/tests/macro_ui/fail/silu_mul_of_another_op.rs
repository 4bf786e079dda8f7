//! Only products of packed weights fuse the activation.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, epilogue = silu_mul)]
struct Down;

fn main() {}
