//! Layers of a bundle or of matrices on the device: how they are loaded and launched.

pub mod build;
pub mod error;
pub mod experts;
pub mod interop;
pub mod linear;
pub mod loader;
pub mod options;
