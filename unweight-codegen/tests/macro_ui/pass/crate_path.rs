//! `crate = path`: a user of a facade does not depend on the code generator by name.
use unweight_codegen::unweight_variant;

mod facade {
    pub use unweight_codegen as codegen;
}

#[unweight_variant(n = 2, stages = 4, crate = crate::facade::codegen)]
struct Absolute;

#[unweight_variant(op = decode_huffman, output = full, crate = facade::codegen)]
struct Relative;

fn main() {
    use facade::codegen::Variant;
    assert_ne!(Absolute::SPEC, Relative::SPEC);
}
