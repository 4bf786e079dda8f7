//! What tests, benchmarks and demonstrations compress: a model that looks trained, and random weights of every kind.

pub mod demo_model;
mod random;

/// Whether a record of a finished shard would be looked at by a run that resumes: for a fuzz target.
pub fn is_resume_record(bytes: &[u8]) -> bool {
    crate::bundle::compress::journal::Record::parse(bytes).is_some()
}

pub use random::{Random, Weights, bf16, float_weights, round_to, sprinkle};
