//! Generates specialised CUDA sources from variant specs.
//!
//! ```text
//! VariantSpec --plan::Plan::new--> Plan --tera, lint--> Source { name, text, headers, options }
//! ```
//!
//! Nothing here touches a GPU, a compiler or a clock: a spec renders to the same bytes everywhere. `unweight-rt`
//! compiles and launches the sources.
//!
//! - [`spec`]: identifies a kernel: axes, canonical names, attributes, and the catalogue of shipped variants
//! - [`family`]: the kernel families, one file each
//! - [`limits`]: hardware limits of each architecture
//! - [`plan`]: shared memory, pipeline, roles, launch
//! - [`render()`], [`lint`]: render a plan to source text and check it
//! - [`abi`]: the argument structs of the kernels
//! - [`external`]: kernels defined by other crates
//! - [`kv`]: the layout of the KV cache
//!
//! The attribute of `unweight-macros` declares a variant as a type:
//!
//! ```
//! use unweight_codegen::{Variant, unweight_variant};
//!
//! /// Two tiles of W per block, four stages; palette source with room for 8 verbatim rows, plain store.
//! #[unweight_variant(n = 2, stages = 4)]
//! struct GateProjection;
//!
//! #[unweight_variant(op = decode_huffman, output = full, code_limit = 7)]
//! struct FullDecode;
//!
//! /// Batches of up to 8 from packed weights, launched before the previous kernel is done.
//! #[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 4, warps = 8, stages = 2, pdl = true)]
//! struct TokenProjection;
//!
//! assert_eq!(GateProjection::SPEC.to_string(), "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
//! assert_eq!(FullDecode::SPEC.to_string(), "uw_sm90a_decode_huffman_full_l7");
//! assert_eq!(TokenProjection::SPEC.to_string(), "uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_pdl_store");
//! ```

pub mod abi;
#[doc(hidden)]
pub mod args;
mod axes;
mod block;
mod error;
pub mod external;
pub mod family;
pub mod kv;
pub mod limits;
pub mod lint;
pub mod plan;
mod render;
mod source;
pub mod spec;
pub mod text;

pub use error::CodegenError;
pub use external::ExternalSource;
pub use render::{catalog_digest, render};
pub use source::Source;
pub use spec::{Variant, VariantSpec};
pub use unweight_macros::unweight_variant;
