//! Bundles: a model as a directory, a quarter to a third smaller, that standard safetensors tools can open
//! (`docs/format.md`, part B).
//!
//! ```text
//! source/                                      bundle/
//!   tokenizer.json, README.md, ... --copy----->   tokenizer.json, ...
//!   config.json                    --two keys->  config.json (+ .source: the original)
//!   model.safetensors.index.json  --rewrite-->   model.safetensors.index.json (+ .source: the original)
//!   model-00001-of-00002.safetensors --encode--> model-00001-of-00002.safetensors
//!   model-00002-of-00002.safetensors             model-00002-of-00002.safetensors
//!                                                unweight.json: descriptions and digests of all files
//!                                                (unweight.kernels: compiled kernels, if attached)
//! ```
//! [`compress`] makes a bundle, [`plan`] predicts its size, [`decompress`] restores the files byte for byte, [`verify`]
//! checks every byte, and [`Bundle`] reads tensors for a runtime. Several machines can make [parts](Part) of one
//! bundle, which [`merge`] joins. The source is never written to. An output appears under its name only when it is
//! complete.

mod attached;
mod base;
mod blocks;
pub(crate) mod compress;
mod config;
mod decompress;
mod encoder;
mod error;
pub(crate) mod files;
mod handle;
mod holder;
pub mod manifest;
mod manifest_file;
mod merge;
pub(crate) mod names;
pub(crate) mod options;
pub(crate) mod output;
mod part;
mod part_file;
pub(crate) mod pipeline;
pub(crate) mod plan;
mod progress;
mod read;
pub(crate) mod report;
mod section_bytes;
mod shard;
mod sign;
mod signer;
mod source;
pub(crate) mod stage;
mod stream;
pub(crate) mod trace;
mod verify;
mod version;

pub use attached::{
    Attached, AttachedBy, AttachedKernel, Detached, PLAN_BYTES_MAX, attach, attach_plan, detach, may_attach,
    may_attach_plan,
};
pub use compress::{compare, compress, compress_with, plan};
pub use decompress::decompress;
#[doc(hidden)]
pub use encoder::EncoderMemory;
pub use encoder::{CpuEncoder, Encoder, EncoderError};
pub use error::{BundleError, ErrorClass, Remedy, io_code};
pub use handle::TensorHandle;
pub use holder::Holder;
pub use merge::merge;
pub use names::ATTACHED_NAME;
pub use options::{
    CompressOptions, DecompressOptions, MergeOptions, Profile, Scope, Selection, VerifyAfter, VerifyOptions,
};
pub use part::{PARTS_MAX, Part};
pub use plan::{PlanFile, Rule};
pub use progress::{Progress, Silent};
pub use read::{Bundle, model_files};
pub use report::{
    CompareReport, CompareRow, CompressReport, DecompressReport, EncodingTotal, FileReport, LargeCopy, PlanReport,
    Problem, RoleTotal, TensorReport, UnmarkedConfig, VerifyReport,
};
#[doc(hidden)]
pub use section_bytes::{EncoderBuffer, SectionBytes};
pub use shard::TensorPart;
pub use signer::Signer;
pub(crate) use trace::{StageTime, Trace};
pub use verify::{verify, verify_with};
