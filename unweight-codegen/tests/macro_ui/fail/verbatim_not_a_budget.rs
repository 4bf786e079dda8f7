//! Budgets of verbatim rows are one of a short list.
use unweight_codegen::unweight_variant;

#[unweight_variant(n = 2, stages = 4, verbatim = 7)]
struct Gate;

fn main() {}
