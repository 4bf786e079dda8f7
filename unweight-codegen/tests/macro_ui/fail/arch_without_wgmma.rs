//! Only Hopper has wgmma; the message names the alternative on other architectures.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, arch = sm100a)]
struct Gate;

fn main() {}
