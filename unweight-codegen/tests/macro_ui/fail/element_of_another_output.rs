//! Palette indices have no element type.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = decode_huffman, output = palette, element = e4m3)]
struct Indices;

fn main() {}
