//! Layers out of bundles: a loader that makes them, and what they are when they are loaded.

pub mod build;
pub mod experts;
pub mod guest;
pub mod linear;
pub mod loader;
pub mod offload;
