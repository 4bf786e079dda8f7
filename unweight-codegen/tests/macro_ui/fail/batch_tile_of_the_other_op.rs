//! Small batch tiles belong to the other operation.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_wgmma, batch_tile = 8, stages = 4)]
struct Down;

fn main() {}
