//! Which variant of attention works on how many rows and KV heads, and the memory that its parts share.

use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    kv::packed,
    plan::{GemmShape, Plan},
    spec::{Arch, AttentionSpec, AttentionStages, AttentionStep, KvCache, Op, catalog},
};
use unweight_model::{ModelConfig, NormKind, QkNorm, RopePairs};
use unweight_rt::{
    ContextSize,
    raw::{choose::cost::gpu_model::GpuModel, ops::attention::PARTS_MAX},
};

/// What works on a pair of a row and a KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Of a block.
    pub warps: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    /// By a kernel whose blocks meet in memory.
    pub split: bool,
    /// Such blocks.
    pub parts: u32,
    /// Whether a multiprocessor has work for two blocks of a packed cache: then shorter rings, of which it holds two.
    pub crowded: bool,
}

/// Multiprocessors that parts are dealt to, at most: more than any device has, so that their memory can be counted
/// without one.
pub const SMS_MAX: u32 = 256;
/// Tokens that a warp of a part takes at a time.
const TILE_TOKENS: u32 = 16;

impl Shape {
    /// A block, and nothing else.
    pub const BLOCK: Self = Self { warps: 8, cluster: 1, split: false, parts: 1, crowded: false };

    /// For so many pairs on a device, in sequences of up to so many tokens.
    ///
    /// With clusters: what was fastest within a whole step on an H200 (docs/records/2026-11-22), at as many pairs
    /// for each multiprocessor. Without: as many parts as give each multiprocessor a block, but none that could never
    /// have a token. A block has 64 KB in flight, so that is several times what the memory of any of them needs.
    ///
    /// The length that sequences have does not enter: a recorded step runs at all of them.
    pub fn of(gpu: &GpuModel, pairs: u32, tokens: u32) -> Self {
        let (pairs, sms) = (pairs.max(1), gpu.sms.clamp(1, SMS_MAX));
        if !gpu.arch.has(Instruction::Cluster) {
            let warps = 4;
            let most = tokens.div_ceil(warps * TILE_TOKENS).clamp(1, PARTS_MAX);
            return Self { warps, split: true, parts: (sms / pairs).clamp(1, most), ..Self::BLOCK };
        }
        // As many on an H200.
        match u64::from(pairs) * u64::from(GpuModel::H200.sms) / u64::from(sms) {
            0..24 => Self { warps: 4, cluster: 8, ..Self::BLOCK },
            24..96 => Self { cluster: 2, ..Self::BLOCK },
            pairs => Self { crowded: pairs >= u64::from(2 * GpuModel::H200.sms), ..Self::BLOCK },
        }
    }
}

/// Bytes of what parts leave for each other, on any device.
pub fn parts_bytes(config: &ModelConfig) -> u64 {
    let shape = Shape { warps: 4, split: true, ..Shape::BLOCK };
    let kernel = variant(Arch::Sm80, (AttentionStep::Decode, KvCache::Bf16), config.head_dim, shape);
    let plan = kernel.and_then(|spec| Plan::new(&spec).ok());
    // Several parts of a pair are no more than the multiprocessors.
    plan.map_or(0, |plan| ContextSize::from(plan.workspace(GemmShape::rows(SMS_MAX), SMS_MAX)).bytes())
}

/// The variant that a step of a bucket of `rows` rows takes for sequences of up to `tokens` tokens, and its parts.
/// `heads` are KV heads and their elements.
pub fn decode_variant(
    gpu: &GpuModel,
    cache: KvCache,
    heads: (u32, u32),
    rows: u32,
    tokens: u32,
) -> Option<(VariantSpec, u32)> {
    let (kv_heads, head_dim) = heads;
    // A pair of a row and a KV head is a block's work, or a cluster's, or that of several blocks.
    let shape = Shape::of(gpu, rows * kv_heads, tokens);
    Some((variant(gpu.arch, (AttentionStep::Decode, cache), head_dim, shape)?, shape.parts))
}

/// The same attention as a model computes it: how it rotates and norms heads of new tokens, and caps scores.
pub fn of_model(spec: VariantSpec, config: &ModelConfig) -> VariantSpec {
    let Op::Attention(op) = spec.op else { return spec };
    let is_decode = op.step == AttentionStep::Decode;
    let own = AttentionSpec {
        adjacent: is_decode && config.rope.pairs == RopePairs::Adjacent,
        plus_one: is_decode && norms_heads_plus_one(config),
        softcap: config.soft_caps.attention.is_some(),
        ..op
    };
    VariantSpec::attention(spec.arch, own)
}

/// Whether queries and keys are normed, and with one plus the weight.
pub fn norms_heads_plus_one(config: &ModelConfig) -> bool {
    config.qk_norm == QkNorm::Head && config.norm == NormKind::RmsPlusOne
}

/// The shipped attention for heads of this size that is nearest to so many warps and blocks: those of sizes that few
/// models have come with clusters of one. Only warps and clusters that both caches have are taken, so that their sums
/// have the same order and the same bits; heads that cannot be packed have one cache.
pub fn variant(
    arch: Arch,
    (step, cache): (AttentionStep, KvCache),
    head_dim: u32,
    shape: Shape,
) -> Option<VariantSpec> {
    let Shape { warps, cluster, split, crowded, .. } = shape;
    let pdl = arch.has(Instruction::DependentLaunch);
    let shipped = catalog::on::<AttentionSpec>(arch).filter_map(|spec| match spec.op {
        Op::Attention(op) if op.step == step && op.head_dim.get() == head_dim && !op.adjacent => Some(op),
        _ => None,
    });
    let (own, others): (Vec<_>, Vec<_>) =
        shipped.filter(|op| op.pdl == pdl && op.split == split).partition(|op| op.cache == cache);
    let is_one = !packed::takes(head_dim);
    let is_shared =
        |own: &AttentionSpec| is_one || others.iter().any(|op| (op.warps, op.cluster) == (own.warps, own.cluster));
    let rank = |op: &AttentionSpec| (op.warps.get() * op.cluster.get()).abs_diff(warps * cluster);
    // Where variants differ in their rings alone, the shorter one is for a crowded device.
    let ring =
        |op: &AttentionSpec| if crowded { op.stages.get() } else { AttentionStages::MAX.get() - op.stages.get() };
    let far = |op: &AttentionSpec| (rank(op), op.warps.get().abs_diff(warps), ring(op));
    // Prompts are attended to in BF16 by either cache.
    let fits = own.into_iter().filter(|op| step == AttentionStep::Prefill || is_shared(op));
    fits.min_by_key(far).map(|op| VariantSpec::attention(arch, op))
}
