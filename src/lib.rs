//! Lossless compression of BF16 weights, and generated CUDA kernels that compute from the compressed form.
//!
//! A BF16 weight spends 8 of its 16 bits on an exponent that carries fewer than 3 bits of information. Unweight
//! entropy-codes or packs the exponents and keeps sign and mantissa unchanged. A model takes about two
//! thirds to three quarters of its space, and decompression restores every bit.
//!
//! This package is a facade; each of its crates can be used alone.
//!
//! | module | crate | what it does | needs |
//! |---|---|---|---|
//! | [`format`](mod@format) | `unweight-format` | tensor codec and model bundles, on the CPU | nothing |
#![cfg_attr(
    feature = "dfloat11",
    doc = "| [`rivals`] | `unweight-rivals` | formats of other systems, read and written | nothing |"
)]
#![cfg_attr(
    feature = "model",
    doc = "| [`model`] | `unweight-model` | what a model is: configuration, weights by role, an f32 reference | nothing |"
)]
#![cfg_attr(
    feature = "gpu",
    doc = "| [`codegen`] | `unweight-codegen` | kernel specs to specialised CUDA source | nothing |",
    doc = "| [`rt`] | `unweight-rt` | compiles, caches, loads and launches kernels | NVRTC to compile, a driver to launch |",
    doc = "| [`engine`] | `unweight-engine` | runs whole models from bundles | as `rt` |"
)]
//!
//! | feature | what it adds | commands |
//! |---|---|---|
//! | `cli` (default) | the `unweight` command | `compress`, `merge`, `plan`, `decompress`, `verify`, `inspect`, `extract`, `demo`, `man`, `completions` |
//! | `gpu` | `model`, `codegen`, `rt`, `engine`; nothing is linked against CUDA | `budget`, `tune`, `kernels`, `cache`, `doctor`; `compress --device cuda` |
//! | `text` | `text`: tokenizers and chat templates | with `gpu`: `generate` |
//! | `serve` | `serve`: an HTTP server; brings `gpu` and `text` | `serve` |
//! | `hub` | models and bundles of the Hugging Face Hub as `org/name` | `card`, `push` |
//! | `sign` | | `prove`; `compress --sign`, `merge --sign` |
//! | `dfloat11` | `rivals`: formats of other systems | `convert`; DFloat11 directories as sources |
//! | `plots` | | `inspect --svg`, `tune --svg` |
//! | `full` | all of the above | every command |
//! | `model` | `model`; part of `gpu` | |
//! | `testing` | the demo model and random weights in `format`; part of `cli` | |
//!
//! A program that only reads bundles on the CPU can disable the default features.
//!
//! Compress a model to a bundle, verify it and restore the model:
//! ```
//! use unweight::format::bundle::{self, CompressOptions, DecompressOptions, Silent};
//! # use unweight::format::testing::demo_model::{self, DemoOptions};
//! # let home = tempfile::tempdir()?;
//! # let (model, bundle_dir, restored) = (home.path().join("model"), home.path().join("bundle"), home.path().join("restored"));
//! # let small = DemoOptions { layers: 2, hidden: 64, intermediate: 192, heads: 4, kv_heads: 2, vocab: 256, ..DemoOptions::default() };
//! # demo_model::write(&model, &small)?;
//! let report = bundle::compress(&model, &bundle_dir, &CompressOptions::default(), &Silent)?;
//! println!("{:.1} % of the original", report.ratio * 100.0);
//! assert!(bundle::verify(&bundle_dir, Some(&model), &Silent)?.is_ok());
//! bundle::decompress(&bundle_dir, &restored, &DecompressOptions::default(), &Silent)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// The command-line modules refer to this library by its name, as any other program does.
#[cfg(feature = "cli")]
extern crate self as unweight;

pub use unweight_format as format;
#[cfg(feature = "model")]
pub use unweight_model as model;
#[cfg(feature = "dfloat11")]
pub use unweight_rivals as rivals;

#[cfg(feature = "gpu")]
pub use unweight_codegen as codegen;
#[cfg(feature = "gpu")]
pub use unweight_engine as engine;
#[cfg(feature = "gpu")]
pub use unweight_macros::facade_unweight_variant as unweight_variant;
#[cfg(feature = "gpu")]
pub use unweight_rt as rt;

#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "serve")]
pub mod serve;
#[cfg(feature = "text")]
pub mod text;

/// The first example of docs/guide/rust.md.
///
/// ```no_run
/// use unweight::format::bundle::{self, CompressOptions, Silent};
///
/// bundle::compress("model".as_ref(), "bundle".as_ref(), &CompressOptions::default(), &Silent)?;
/// let bytes = bundle::Bundle::open("bundle".as_ref())?.tensor("lm_head.weight")?.decode()?;   // Err: damage
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(doctest)]
struct FirstExample;
