//! Code limits must be in the range of the format.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = decode_huffman, output = full, code_limit = 16)]
struct Full;

fn main() {}
