//! Chooses encodings and kernels for weights without a device: the encodings that a weight can have, the variant that
//! computes a problem, and the kernels to compile for a bundle.
//!
//! | module | contents |
//! |---|---|
//! | [`graph`] | the encodings and the kernel families between them: two static lists and a walk over them |
//! | [`candidates`] | the available matmul variants: built-in ones, and those that a program has registered |
//! | [`cost`] | the time of a product: [a model of a GPU](cost::gpu_model), and formulas fitted to records by path |
//! | [`table`] | measured times |
//! | [`policy`] | the choice among the candidates: by measurement, else by the model |
//! | [`route`] | the route of a weight through the graph, and the kernels of every batch |
//! | [`reachable`] | all kernels that the weights of a bundle can need |
//! | [`recon`] | the report's matmuls |
//!
//! Everything is a pure function of shapes, encodings and options, and works before anything was measured on this
//! machine. Loading, warming (`kernels compile --bundle`), benchmarks and tests use the same functions.

pub mod candidates;
pub mod cost;
pub mod graph;
pub mod policy;
pub mod reachable;
pub mod recon;
pub mod route;
pub mod table;

#[cfg(test)]
mod tests;
