//! Variant specs to CUDA sources.
pub mod abi;
