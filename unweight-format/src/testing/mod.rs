//! Input for tests, benchmarks and demonstrations: a model that looks trained, and random weights of every kind.

pub mod demo_model;
mod random;

/// Whether a resuming run would accept these bytes as the record of a finished shard; for a fuzz target.
pub fn is_resume_record(bytes: &[u8]) -> bool {
    crate::bundle::compress::journal::Record::parse(bytes).is_some()
}

pub use random::{Random, Weights, bf16, float_weights, round_to, sprinkle};
