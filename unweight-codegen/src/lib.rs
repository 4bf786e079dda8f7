//! Variant specs to specialised CUDA sources.
//!
//! ```text
//! VariantSpec --plan::Plan::new--> Plan --tera, lint--> Source { name, text, headers, options }
//! ```
//!
//! Nothing here touches a GPU, a compiler or a clock: a spec gives the same bytes everywhere. `unweight-rt` compiles
//! and launches.
//!
//! - [`spec`]: what is compiled: axes, canonical names, attributes, and the catalogue of shipped variants
//! - [`family`]: the kernel families, one file each
//! - [`limits`]: what the architecture allows
//! - [`plan`]: shared memory, pipeline, roles, launch
//! - [`render()`], [`lint`]: the way from a plan to text
//! - [`abi`]: the argument structs of the kernels
//! - [`outside`]: kernels of crates above this one
//! - [`kv`]: where an element of the KV cache lies

pub mod abi;
mod error;
pub mod family;
pub mod kv;
pub mod limits;
pub mod lint;
pub mod outside;
pub mod plan;
mod render;
mod source;
pub mod spec;
pub mod text;

pub use error::CodegenError;
pub use outside::Outside;
pub use render::{catalog_digest, render};
pub use source::Source;
pub use spec::{Variant, VariantSpec};
pub use unweight_macros::unweight_variant;
