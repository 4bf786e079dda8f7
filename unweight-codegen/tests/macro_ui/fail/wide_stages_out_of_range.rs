//! One step is decoded while another is multiplied, so a ring needs at least three stages.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = 128, stages = 1)]
struct Down;

fn main() {}
