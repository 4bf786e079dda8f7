//! Layers: weights of a bundle with the kernels that every batch asks for.

pub mod linear;
