//! Each operation has its own stages.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = pack, stage = stats)]
struct Down;

fn main() {}
