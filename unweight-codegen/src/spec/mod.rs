//! What is compiled: a [`VariantSpec`] is the whole identity of a kernel.
//!
//! The spec knows axes, names and attributes. It refuses to know shared memory, threads or files: those follow from it
//! in [`plan`](crate::plan) and [`render`](crate::render()), family by family ([`family`](crate::family)).

mod axes;
pub mod catalog;
mod name;
pub mod pairs;

pub use crate::family::{
    AttentionSpec, DecodeCompactSpec, DecodeHuffmanSpec, EmbedSpec, EncodeCompactSpec, EncodeHuffmanSpec, Family,
    GemmCompactSpec, GemmGroupedSpec, GemmMmaSpec, GemmReconSpec, GemmWgmmaSpec, NormSpec, Op, PackSpec, RopeSpec,
    RouteSpec, SampleSpec, SiluMulSpec, UnpackSpec,
    attention::{AttentionStages, AttentionStep, AttentionWarps, HeadDim},
    decode_compact::DecodeCompactStage,
    decode_huffman::{CodeLimit, DecodeElement, DecodeOutput, DecodeWarps},
    embed::EmbedSource,
    encode_compact::EncodeCompactStage,
    encode_huffman::EncodeHuffmanStage,
    gemm_compact::{CompactBatchTile, CompactStages},
    gemm_mma::{RowBlocks, SmallBatchTile, SmallStages, Warps},
    gemm_recon::{NTiles, Splits, Stages, VerbatimRows, WeightSource},
    gemm_wgmma::{Warpgroups, WideBatchTile, WideStages},
    norm::NormThreads,
    pack::PackStage,
    rope::RopeHeadDim,
    route::RouteStage,
    silu_mul::SiluMulThreads,
};
pub(crate) use axes::{AXES_MAX, Raw, axes, range_axis, raw_of, set_axis, word_axis};
pub use axes::{Arch, Axis, AxisError, ClusterSize, Epilogue, Only, SmemCopy, Values};
pub use name::ParseNameError;

/// One kernel: architecture and operation. Its name is `Display`, `FromStr` and the serde form.
///
/// ```
/// # use unweight_codegen::spec::VariantSpec;
/// let spec: VariantSpec = "uw_sm90a_gemm_recon_palette_n2p4_v8_store".parse()?;
/// assert_eq!(spec.name().as_str(), "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VariantSpec {
    /// What it is compiled for.
    pub arch: Arch,
    /// What it does.
    pub op: Op,
}

impl VariantSpec {
    /// What stands where an attribute has no spec because it is wrong.
    #[doc(hidden)]
    pub const SOME: Self = Self::encode_huffman(Arch::Sm90a, EncodeHuffmanStage::Stats);
}

/// The family of [`VariantSpec::SOME`].
#[doc(hidden)]
pub type SomeFamily = EncodeHuffmanSpec;

/// A kernel that is known when the program is compiled: what `#[unweight_variant]` implements.
///
/// ```
/// use unweight_codegen::{Variant, spec::{Arch, EncodeHuffmanSpec, EncodeHuffmanStage, VariantSpec}};
/// struct Histogram;
/// impl Variant for Histogram {
///     type Family = EncodeHuffmanSpec;
///     const SPEC: VariantSpec = VariantSpec::encode_huffman(Arch::Sm90a, EncodeHuffmanStage::Stats);
/// }
/// assert_eq!(Histogram::SPEC.name().as_str(), "uw_sm90a_encode_huffman_stats");
/// ```
pub trait Variant {
    /// The spec of its family, such as [`GemmMmaSpec`]: what the runtime's launcher is chosen by
    /// (`unweight_rt::LoadVariant`).
    type Family: Family;
    /// The spec.
    const SPEC: VariantSpec;
}
