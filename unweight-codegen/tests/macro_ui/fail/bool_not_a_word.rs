//! A switch is a bool, not a word.
use unweight_codegen::unweight_variant;

#[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 4, warps = 8, stages = 2, epilogue = true)]
struct Down;

fn main() {}
