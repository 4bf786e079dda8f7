//! Each operation has stages of its own.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = pack, stage = stats)]
struct Down;

fn main() {}
