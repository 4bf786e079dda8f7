//! Variant specs to specialised CUDA sources.
//!
//! ```text
//! VariantSpec --plan::Plan::new--> Plan --context, tera, lint--> Source { name, text, headers, options }
//! ```
//!
//! Nothing here touches a GPU, a compiler or a clock: a spec gives the same bytes everywhere. `unweight-rt` compiles and launches.
//!
//! - [`spec`]: what is compiled, its canonical name, and the catalogue of shipped variants
//! - [`limits`]: what the architecture allows
//! - [`plan`]: shared memory, pipeline, roles, launch
//! - [`context`], [`render()`], [`lint`]: the way from a plan to text
//! - [`abi`]: the argument structs of the kernels

pub mod abi;
pub mod context;
mod error;
pub mod limits;
pub mod lint;
pub mod plan;
mod render;
mod source;
pub mod spec;
pub mod text;

pub use error::CodegenError;
pub use render::render;
pub use source::Source;
pub use spec::{Variant, VariantSpec};
pub use unweight_macros::unweight_variant;
