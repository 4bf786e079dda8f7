//! The ring must fit in shared memory.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = 256, stages = 8)]
struct Down;

fn main() {}
