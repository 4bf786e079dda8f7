//! The compiler shows all errors at once, and uses of the type add none.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_recon, n = two, epilogue = keep, colour = red, arch = sm75)]
struct Gate;

const NAME: unweight_codegen::text::Name = <Gate as unweight_codegen::Variant>::SPEC.name();

fn main() {}
