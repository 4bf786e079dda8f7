//! A word is not a path.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, epilogue = Epilogue::Store)]
struct Gate;

fn main() {}
