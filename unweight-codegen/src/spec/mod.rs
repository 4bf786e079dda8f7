//! A [`VariantSpec`] identifies a kernel completely.
//!
//! The spec defines axes, names and attributes. Shared memory, threads and files follow from it in
//! [`plan`](crate::plan) and [`render`](crate::render()), family by family ([`family`](crate::family)).

pub mod catalog;
pub mod pairs;

pub use crate::axes::{Arch, Axis, AxisError, Only, Values};
pub use crate::family::{
    AttentionSpec, ClusterSize, DecodeCompactSpec, DecodeHuffmanSpec, EmbedSpec, EncodeCompactSpec, EncodeHuffmanSpec,
    Epilogue, Family, GemmCompactSpec, GemmGroupedSpec, GemmJoinSpec, GemmMmaSpec, GemmReconSpec, GemmWgmmaSpec,
    KvPackSpec, KvUnpackSpec, LogprobsSpec, NormSpec, Op, PackSpec, ParseNameError, RopeSpec, RouteSpec, SampleSpec,
    ScaleSpec, SiluMulSpec, SmemCopy, UnpackSpec, UpdateSpec, VariantSpec,
    attention::{AttentionHeadDim, AttentionStages, AttentionStep, AttentionWarps, HeadDim, KvCache},
    decode_compact::DecodeCompactStage,
    decode_huffman::{CodeLimit, DecodeElement, DecodeOutput, DecodeWarps},
    embed::EmbedSource,
    encode_compact::EncodeCompactStage,
    encode_huffman::EncodeHuffmanStage,
    gemm_compact::{CompactBatchTile, CompactStages},
    gemm_join::JoinSource,
    gemm_mma::{RowBlocks, SmallBatchTile, SmallStages, Warps},
    gemm_recon::{NTiles, Splits, Stages, VerbatimRows, WeightSource},
    gemm_wgmma::{Warpgroups, WideBatchTile, WideStages},
    kv_pack::KvPackStage,
    logprobs::LogprobsThreads,
    norm::{NormKind, NormThreads},
    pack::PackStage,
    rope::RopeHeadDim,
    route::RouteStage,
    scale::ScaleForm,
    silu_mul::{GateFunction, SiluMulThreads},
    update::UpdateStage,
};

/// The family of [`VariantSpec::PLACEHOLDER`].
#[doc(hidden)]
pub type PlaceholderFamily = EncodeHuffmanSpec;

/// A kernel that is known at compile time: `#[unweight_variant]` implements it.
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
    /// The spec of the kernel's family, such as [`GemmMmaSpec`]; `unweight_rt::LoadVariant` chooses the launcher by it.
    type Family: Family;
    /// The spec that the attribute declares.
    const SPEC: VariantSpec;
}
