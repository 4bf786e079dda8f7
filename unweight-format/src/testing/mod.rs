//! What tests, benchmarks and demonstrations compress: a model that looks trained, and random weights of every kind.

pub mod demo_model;
mod random;

pub use random::{Random, Weights, bf16, sprinkle};
