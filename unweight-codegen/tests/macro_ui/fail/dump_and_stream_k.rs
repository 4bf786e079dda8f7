//! The workspace holds either partial sums or operands.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = 128, stages = 4, stream_k = true, dump = true)]
struct Down;

fn main() {}
