//! Each operation has stages of its own.
use unweight_macros::unweight_variant;

#[unweight_variant(op = repack, stage = stats)]
struct Down;

fn main() {}
