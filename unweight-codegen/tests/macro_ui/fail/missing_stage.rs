//! An encoder needs its stage.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = encode_huffman)]
struct Stats;

fn main() {}
