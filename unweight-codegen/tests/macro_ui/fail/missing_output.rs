//! A decoder needs its output.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = decode_huffman, code_limit = 7)]
struct Full;

fn main() {}
