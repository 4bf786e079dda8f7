//! wgmma is Hopper's alone; what other architectures offer instead is named.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, arch = sm100a)]
struct Gate;

fn main() {}
