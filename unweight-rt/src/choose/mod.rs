//! From a weight to kernels, without a device: which forms it can take, which variant computes a problem, and what must
//! be compiled for a bundle.
//!
//! | module | what it knows |
//! |---|---|
//! | [`graph`] | the forms and the families between them: two static lists, and their walk |
//! | [`reachable`] | the route of a weight, the kernels of every batch, and all that a bundle can ask for |
//! | [`model`] | the register-sourced matmuls: a model of the machine, overridden by measurements |
//! | [`table`] | what was measured |
//! | [`cost`] | what a product costs by path, as formulas of records |
//! | [`recon`] | the report's matmuls |
//!
//! Everything is a pure function of shapes, forms and options, for use before anything has been measured on the machine
//! at hand. Loading, warming (`kernels compile --bundle`), benchmarks and tests ask the same functions.

pub mod cost;
pub mod graph;
pub mod model;
pub mod reachable;
pub mod recon;
pub mod table;
