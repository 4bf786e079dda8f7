//! Chooses the attention kernel variant for a number of rows and KV heads, and sizes the workspace of split sequences.

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

/// How a pair of a row and a KV head is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitPlan {
    /// Warps per block.
    pub warps: u32,
    /// Blocks per cluster.
    pub cluster: u32,
    /// Whether blocks split a pair and exchange partial results in global memory.
    pub split: bool,
    /// The number of blocks that split a pair.
    pub splits: u32,
    /// Whether each multiprocessor has work for several blocks. With a packed cache, a shorter ring lets more of them
    /// fit.
    pub crowded: bool,
}

/// The maximum number of multiprocessors that the blocks of split pairs are distributed over. It exceeds that of
/// any device, so that their workspace can be sized without one.
pub const SMS_MAX: u32 = 256;
/// Tokens that a warp of a split pair processes at a time.
const TILE_TOKENS: u32 = 16;

impl SplitPlan {
    /// One block of 8 warps per pair.
    pub const BLOCK: Self = Self { warps: 8, cluster: 1, split: false, splits: 1, crowded: false };

    /// Returns the plan for `pairs` pairs on a device, in sequences of up to `tokens` tokens.
    ///
    /// With clusters: the fastest plan on an H200 (docs/records/2026-11-22 and 2026-11-26) with as many pairs per
    /// multiprocessor. Without clusters: as many blocks per pair as give each multiprocessor a block, but none that
    /// could never have a token. A block has 64 KB of loads in flight, which is several times what the memory of any
    /// such device needs.
    ///
    /// The current length of sequences has no effect, because a recorded step runs at all lengths.
    pub fn of(gpu: &GpuModel, pairs: u32, tokens: u32) -> Self {
        let (pairs, sms) = (pairs.max(1), gpu.sms.clamp(1, SMS_MAX));
        if !gpu.arch.has(Instruction::Cluster) {
            let warps = 4;
            let splits_max = tokens.div_ceil(warps * TILE_TOKENS).clamp(1, PARTS_MAX);
            return Self { warps, split: true, splits: (sms / pairs).clamp(1, splits_max), ..Self::BLOCK };
        }
        // The equivalent number of pairs on an H200.
        match u64::from(pairs) * u64::from(GpuModel::H200.sms) / u64::from(sms) {
            0..24 => Self { warps: 4, cluster: 8, ..Self::BLOCK },
            24..96 => Self { cluster: 2, ..Self::BLOCK },
            pairs if pairs < u64::from(2 * GpuModel::H200.sms) => Self::BLOCK,
            _ => Self { warps: 4, crowded: true, ..Self::BLOCK },
        }
    }
}

/// Returns the bytes of the workspace in which blocks of split pairs exchange results, on any device.
pub fn split_workspace_bytes(config: &ModelConfig) -> u64 {
    let wanted = SplitPlan { warps: 4, split: true, ..SplitPlan::BLOCK };
    let kernel = variant(Arch::Sm80, (AttentionStep::Decode, KvCache::Bf16), config.head_dim, wanted);
    let plan = kernel.and_then(|spec| Plan::new(&spec).ok());
    // All blocks of split pairs together are at most as many as the multiprocessors.
    plan.map_or(0, |plan| ContextSize::from(plan.workspace(GemmShape::rows(SMS_MAX), SMS_MAX)).bytes())
}

/// Returns the attention variant and the number of blocks per pair for a step of a bucket of `rows` rows, in sequences
/// of up to `tokens` tokens. `heads` holds the number of KV heads and the head dimension.
pub fn decode_variant(
    gpu: &GpuModel,
    cache: KvCache,
    heads: (u32, u32),
    rows: u32,
    tokens: u32,
) -> Option<(VariantSpec, u32)> {
    let (kv_heads, head_dim) = heads;
    // A block, a cluster or several blocks compute a pair of a row and a KV head.
    let wanted = SplitPlan::of(gpu, rows * kv_heads, tokens);
    Some((variant(gpu.arch, (AttentionStep::Decode, cache), head_dim, wanted)?, wanted.splits))
}

/// Adapts an attention variant to a model: how it rotates and norms the heads of new tokens, and caps scores.
pub fn of_model(spec: VariantSpec, config: &ModelConfig) -> VariantSpec {
    let Op::Attention(op) = spec.op else { return spec };
    let is_decode = op.step == AttentionStep::Decode;
    let adapted = AttentionSpec {
        adjacent: is_decode && config.rope.pairs == RopePairs::Adjacent,
        plus_one: is_decode && norms_heads_plus_one(config),
        softcap: config.soft_caps.attention.is_some(),
        ..op
    };
    VariantSpec::attention(spec.arch, adapted)
}

/// Whether queries and keys are normed per head with one plus the weight.
pub fn norms_heads_plus_one(config: &ModelConfig) -> bool {
    config.qk_norm == QkNorm::Head && config.norm == NormKind::RmsPlusOne
}

/// Returns the shipped attention variant for heads of this size that is nearest to the warps and cluster of `wanted`.
/// Rare head sizes ship with clusters of one only. Only warps and clusters that both KV caches have are chosen, so that
/// their sums have the same order and the same bits. Heads that cannot be packed have one cache.
pub fn variant(
    arch: Arch,
    (step, cache): (AttentionStep, KvCache),
    head_dim: u32,
    wanted: SplitPlan,
) -> Option<VariantSpec> {
    let SplitPlan { warps, cluster, split, crowded, .. } = wanted;
    let pdl = arch.has(Instruction::DependentLaunch);
    let shipped = catalog::on::<AttentionSpec>(arch).filter_map(|spec| match spec.op {
        Op::Attention(op) if op.step == step && op.head_dim.get() == head_dim && !op.adjacent => Some(op),
        _ => None,
    });
    let (same_cache, other_caches): (Vec<_>, Vec<_>) =
        shipped.filter(|op| op.pdl == pdl && op.split == split).partition(|op| op.cache == cache);
    let has_one_cache = !packed::takes(head_dim);
    let is_shared = |op: &AttentionSpec| {
        has_one_cache || other_caches.iter().any(|other| (other.warps, other.cluster) == (op.warps, op.cluster))
    };
    let rank = |op: &AttentionSpec| (op.warps.get() * op.cluster.get()).abs_diff(warps * cluster);
    let prefers_short_rings = crowded && cache == KvCache::Packed;
    let ring = |op: &AttentionSpec| {
        let stages = op.stages.get();
        if prefers_short_rings { stages } else { AttentionStages::MAX.get() - stages }
    };
    let distance = |op: &AttentionSpec| (rank(op), op.warps.get().abs_diff(warps), ring(op));
    // Prefill computes attention in BF16 with either cache.
    let fits = same_cache.into_iter().filter(|op| step == AttentionStep::Prefill || is_shared(op));
    fits.min_by_key(distance).map(|op| VariantSpec::attention(arch, op))
}
