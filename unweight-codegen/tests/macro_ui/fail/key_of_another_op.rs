//! A decoder has no axis `stages`.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = decode_huffman, output = full, stages = 4)]
struct Full;

fn main() {}
