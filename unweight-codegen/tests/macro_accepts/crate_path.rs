//! `crate = path`: a user of a facade does not depend on the code generator by name.
use unweight_codegen::unweight_variant;

mod facade {
    pub use unweight_codegen as codegen;
}

#[unweight_variant(n = 2, stages = 4, crate = crate::crate_path::facade::codegen)]
struct Absolute;

#[unweight_variant(op = decode_huffman, output = full, crate = facade::codegen)]
struct Relative;

#[test]
fn paths_to_the_crate_are_followed() {
    use facade::codegen::Variant;
    assert_ne!(Absolute::SPEC, Relative::SPEC);
}
