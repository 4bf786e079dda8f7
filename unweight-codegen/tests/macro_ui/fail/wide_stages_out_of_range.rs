//! A step is decoded while another multiplies.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = 128, stages = 1)]
struct Down;

fn main() {}
