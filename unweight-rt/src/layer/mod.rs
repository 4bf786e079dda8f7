//! Layers of bundles, or of matrices on the device: what makes them, and what they compute.

pub mod build;
pub mod error;
pub mod experts;
pub mod interop;
pub mod linear;
pub mod loader;
pub mod options;
