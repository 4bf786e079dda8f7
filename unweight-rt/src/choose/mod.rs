//! From a weight to kernels, without a device: which encodings it can take, which variant computes a problem, and what
//! must be compiled for a bundle.
//!
//! | module | what it knows |
//! |---|---|
//! | [`graph`] | the encodings and the families between them: two static lists, and their walk |
//! | [`candidates`] | the matmul variants that there are: those that ship, and those that a program has registered |
//! | [`cost`] | what a product takes: [a model of a GPU](cost::gpu_model), and formulas of records by path |
//! | [`table`] | what was measured |
//! | [`policy`] | the choice among the candidates: what was measured, else the model |
//! | [`route`] | the route of a weight through the graph, and the kernels of every batch |
//! | [`reachable`] | all that the weights of a bundle can ask for |
//! | [`recon`] | the report's matmuls |
//!
//! Everything is a pure function of shapes, encodings and options, for use before anything has been measured on the
//! machine at hand. Loading, warming (`kernels compile --bundle`), benchmarks and tests ask the same functions.

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
