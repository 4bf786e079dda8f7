//! Attention over the pages of a KV cache: `templates/include/unweight/kernels/attention`.
//!
//! ```text
//! decode   bytes = warps * (stages * (slot + 8) + 128) + 36 * head_dim
//!          slot = 64 * head_dim; cache = packed: 48 * head_dim + 64 (96 if head_dim > 80), in whole 128 bytes
//! prefill  bytes = stages * (256 * head_dim + 16); head_dim = 256: stages * (128 * head_dim + 16)
//! ```
//!
//! With `copy = async` there are no barriers, so a stage has 8 or 16 bytes less.
//!
//! With `split`, the blocks that share a row and KV head combine their results in device memory; the launch sets their
//! number:
//! ```text
//! decode   workspace = blocks * (128 + 64 * head_dim) bytes, and a counter for each row and KV head
//! ```

use super::{
    Edge, Family, Op, VariantSpec,
    entry::Entry,
    shared::{ClusterSize, SmemCopy},
};
use crate::{
    args::args,
    axes::{Arch, axes, range_axis, set_axis, word_axis},
    block::{
        BlockPlan, Constraint, GemmShape, LaunchGrid, LaunchPlan, PipelinePlan, RolePlan, SmemPlan, Work,
        WorkspacePlan, largest_fitting, with_axis,
    },
    kv,
    limits::{Instruction, Instructions},
};

word_axis! {
    /// The tokens whose attention is computed.
    AttentionStep, "step" {
        /// The newest token of each of many sequences. The kernel also applies bias, norm and rotation to its heads,
        /// and stores its key and value in the cache.
        Decode = "decode",
        /// A chunk of tokens of one sequence, whose keys and values are already in the cache.
        Prefill = "prefill",
    }
}

word_axis! {
    /// How the pages of the cache are stored.
    KvCache, "cache" {
        /// All pages in BF16 ([`crate::kv`]).
        Bf16 = "bf16",
        /// 12 bits per element, except the page that a sequence is writing (`docs/kv-cache.md`).
        Packed = "packed",
    }
}

set_axis! {
    /// Elements of a head of `attention`.
    AttentionHeadDim, "head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 256],
    "16, 32, 48, 64, 80, 96, 112, 128 or 256 (elements of a head)"
}

set_axis! {
    /// Elements of a head of packed pages.
    HeadDim, "head_dim", [16, 32, 48, 64, 80, 96, 112, 128], "16, 32, 48, 64, 80, 96, 112 or 128 (elements of a head)"
}

set_axis! {
    /// Warps of an `attention` block.
    AttentionWarps, "warps", [1, 2, 4, 8], "1, 2, 4 or 8 (warps of op attention)"
}

range_axis! {
    /// Stages of a ring in an `attention` block.
    AttentionStages, "stages", 1..=8, "1..=8 (stages of op attention)"
}

axes! {
    /// A variant of attention over a paged KV cache.
    pub struct AttentionSpec {
        /// The tokens whose attention is computed.
        step: AttentionStep "",
        /// Elements of a head.
        head_dim: AttentionHeadDim "_d",
        /// Warps of a block.
        warps: AttentionWarps "_w",
        /// Stages of each warp's ring.
        stages: AttentionStages "p",
        /// Blocks that share the tokens of a row.
        cluster: ClusterSize "c" = 1,
        /// For architectures without clusters: the launch sets how many blocks share the tokens of a row; they combine
        /// their results in device memory. A unit of the launch's problem is a block: rows x KV heads x parts.
        split: flag "_split" = false,
        /// How the pages that are read are stored.
        cache: KvCache "_" = Bf16 unnamed,
        /// How keys and values are copied to shared memory.
        copy: SmemCopy "_" = Bulk unnamed,
        /// `decode`: elements `2 * i` and `2 * i + 1` of a head are rotated together instead of `i` and
        /// `i + rope_dim / 2`.
        adjacent: flag "_adjacent" = false,
        /// Scores are capped: `cap * tanh(score / cap)`.
        softcap: flag "_softcap" = false,
        /// `decode`: norms multiply by one plus the weight, and round once.
        plus_one: flag "_plus_one" = false,
        /// Programmatic dependent launch: the kernel starts while the stream's previous kernel still runs, and waits
        /// for it before it reads QKV.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of attention; `h = kv_heads * group`.
    pub struct AttentionArgs {
        /// bf16 `[m, (h + 2 * kv_heads) * head_dim]`: query heads, key heads, value heads.
        pub qkv: u64,
        /// bf16 `[m, h * head_dim]`.
        pub out: u64,
        /// The pages of one layer ([`crate::kv`]).
        pub layer: u64,
        /// `decode`: u32 `[m]`: the position of each row's token, or `u32::MAX` for a row without a token.
        pub positions: u64,
        /// u32 `[m, table_pages]`; `prefill`: `[table_pages]`.
        pub page_table: u64,
        /// `decode`, as are the next four: bf16 `[max_positions, rope_dim / 2]`; `adjacent`: angles `i` and
        /// `i + rope_dim / 4` are next to each other.
        pub cosines: u64,
        /// Sines, in the layout of `cosines`.
        pub sines: u64,
        /// bf16 `[(h + 2 * kv_heads) * head_dim]`, or null.
        pub bias: u64,
        /// bf16 `[head_dim]`, or null.
        pub q_norm: u64,
        /// Weights of the norm of keys: bf16 `[head_dim]`, or null.
        pub k_norm: u64,
        /// u32, set to `1 + row` for a row that exceeds the tables or the cache.
        pub fault: u64,
        /// With `split` and several parts, as is the next: [`WorkspacePlan::bytes`] of workspace.
        pub partials: u64,
        /// [`WorkspacePlan::counters`] of the workspace, zero before and after.
        pub counters: u64,
        /// Elements between rows of QKV.
        pub qkv_pitch: u64,
        /// Elements between rows of the result.
        pub out_pitch: u64,
        /// The number of rows.
        pub m: u32,
        /// Heads of keys and values.
        pub kv_heads: u32,
        /// Query heads per KV head, 1..=16.
        pub group: u32,
        /// Pages of the layer.
        pub pages: u32,
        /// Entries of a row's page table, at least 1.
        pub table_pages: u32,
        /// The limit of positions: each is below it.
        pub max_positions: u32,
        /// Tokens that a token attends to, itself included; 0: all earlier tokens and itself.
        pub window: u32,
        /// Elements of a head that are rotated: a multiple of 4, at most `head_dim`, or 0.
        pub rope_dim: u32,
        /// `prefill`: position of the first row's token.
        pub start: u32,
        /// The factor of scores, times log2(e); `softcap`: the cap, times log2(e).
        pub scale: f32,
        /// The epsilon of the norms of queries and keys; `softcap`, which has no norms: the factor of scores divided by
        /// the cap.
        pub eps: f32,
        /// `split`: blocks that share the tokens of a row and KV head, 1 to [`PARTS_MAX`].
        pub parts: u32,
        /// `cache = packed`, as are all below: the records of the layer's packed pages ([`crate::kv`]).
        pub records: u64,
        /// BF16 operands of the units that do not pack.
        pub unit_pages: u64,
        /// BF16 pages of the layer that sequences are writing.
        pub hot: u64,
        /// u32 `[m]`: the hot page of each row.
        pub hot_table: u64,
        /// Hot pages of the layer.
        pub hot_pages: u32,
        /// Units of `unit_pages`.
        pub units: u32,
    }
}

impl VariantSpec {
    /// Returns a variant of attention over a paged KV cache.
    pub const fn attention(arch: Arch, spec: AttentionSpec) -> Self {
        Self { arch, op: Op::Attention(spec) }
    }
}

/// The maximum number of blocks that share the tokens of a row and KV head through device memory.
pub const PARTS_MAX: u32 = 32;

/// Tokens in a slot of a ring.
const TILE_TOKENS: u32 = kv::packed::TILE_TOKENS;
/// Rows of a tensor core fragment: the heads of a group.
const ROWS: u32 = 16;
const ELEMENT_BYTES: u32 = 2;
/// The maximum and the sum of a row.
const STATE_BYTES: u32 = 8;
const MBARRIER_BYTES: u32 = 8;

/// Bytes of a ring slot: K and V of a tile or a page; for a packed tile also the records of its page, rounded up to 128
/// bytes.
const fn slot_bytes(spec: &AttentionSpec) -> u32 {
    if matches!(spec.cache, KvCache::Packed) {
        let head_dim = spec.head_dim.get();
        return (2 * (kv::packed::tile_bytes(head_dim) + kv::packed::record_bytes(head_dim))).next_multiple_of(128);
    }
    let tokens = match spec.step {
        AttentionStep::Decode => TILE_TOKENS,
        AttentionStep::Prefill if spec.head_dim.get() > kv::packed::HEAD_DIM_MAX => kv::PAGE_TOKENS / 2,
        AttentionStep::Prefill => kv::PAGE_TOKENS,
    };
    2 * tokens * spec.head_dim.get() * ELEMENT_BYTES
}

/// Number of rings of a block.
const fn rings(spec: &AttentionSpec) -> u32 {
    match spec.step {
        AttentionStep::Decode => spec.warps.get(),
        AttentionStep::Prefill => 1,
    }
}

/// Bytes of the barriers of a slot that the copy engine fills: `full`, and `empty` in a ring that several warps share.
const fn barrier_bytes(spec: &AttentionSpec) -> u32 {
    match spec.step {
        _ if matches!(spec.copy, SmemCopy::Async) => 0,
        AttentionStep::Decode => MBARRIER_BYTES,
        AttentionStep::Prefill => 2 * MBARRIER_BYTES,
    }
}

/// Registers per thread below which the compiler spills: O, queries, scores, and working registers.
const fn registers(arch: Arch, spec: &AttentionSpec) -> u32 {
    let head_dim = spec.head_dim.get();
    let packed = matches!(spec.cache, KvCache::Packed);
    match spec.step {
        // As many as a thread can address.
        _ if head_dim > kv::packed::HEAD_DIM_MAX => arch.limits().registers_per_thread,
        // Queries stay in shared memory, so that an SM holds twice as many warps.
        AttentionStep::Decode if packed && matches!(arch, Arch::Sm90a) && !spec.split && head_dim > 112 => head_dim,
        // Slots of records need more registers with the assemblers of other generations than with Hopper's.
        AttentionStep::Decode if packed && !matches!(arch, Arch::Sm90a) => head_dim + 56,
        // Adding up the parts of the largest heads needs more registers than three blocks of four warps leave.
        AttentionStep::Decode if spec.split && head_dim > 112 => head_dim + 48,
        AttentionStep::Decode => head_dim + 40,
        // Heads above 88 need no more than the registers that three blocks of four warps leave.
        AttentionStep::Prefill if head_dim > 88 => 168,
        AttentionStep::Prefill => head_dim + 80,
    }
}

const fn smem(spec: &AttentionSpec) -> SmemPlan {
    let (warps, stages, row_bytes) = (spec.warps.get(), spec.stages.get(), spec.head_dim.get() * ELEMENT_BYTES);
    if matches!(spec.step, AttentionStep::Prefill) {
        return SmemPlan::new().section("ring", stages, slot_bytes(spec), 128).section(
            "barriers",
            stages,
            barrier_bytes(spec),
            MBARRIER_BYTES,
        );
    }
    SmemPlan::new()
        .section("rings", warps, stages * slot_bytes(spec), 128)
        .section("queries", ROWS, row_bytes, 16)
        .section("fresh", 2, row_bytes, 16)
        .section("states", warps, ROWS * STATE_BYTES, STATE_BYTES)
        .section("barriers", warps * stages, barrier_bytes(spec), MBARRIER_BYTES)
}

const fn fits(arch: Arch, spec: &AttentionSpec) -> bool {
    smem(spec).bytes() <= arch.limits().smem_bytes_per_block
}

impl AttentionSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
            .with(Instruction::Mma)
            .with(self.copy.instruction())
            .when(self.cluster.get() > 1, Instruction::Cluster)
            .when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let limits = arch.limits();
        let (smem, warps, stages, cluster) = (smem(self), self.warps.get(), self.stages.get(), self.cluster.get());
        let (prefill, bulk) = (matches!(self.step, AttentionStep::Prefill), matches!(self.copy, SmemCopy::Bulk));
        if prefill && cluster != 1 {
            let what = "step = prefill has enough rows to fill the device; cluster must be 1";
            return Err(Constraint::Conflict { what });
        }
        if self.split && (prefill || cluster != 1) {
            let what =
                "split divides a row of step = decode among blocks through memory, not in a cluster; cluster must be 1";
            return Err(Constraint::Conflict { what });
        }
        let packed = matches!(self.cache, KvCache::Packed);
        if packed && prefill {
            let what = "step = prefill reads BF16 pages, which kv_unpack writes; cache must be bf16";
            return Err(Constraint::Conflict { what });
        }
        if packed && self.head_dim.get() > kv::packed::HEAD_DIM_MAX {
            let what = "cache = packed has 11 bits for the index of an element; head_dim must be at most 128";
            return Err(Constraint::Conflict { what });
        }
        if self.softcap && self.plus_one {
            let what = "softcap does not support norms; plus_one must be false";
            return Err(Constraint::Conflict { what });
        }
        if packed && stages == 1 {
            let what = "cache = packed stores a warp's sums in two slots of its ring; stages must be at least 2";
            return Err(Constraint::Conflict { what });
        }
        if prefill && (self.adjacent || self.plus_one) {
            let what =
                "step = prefill reads queries that are already normed and rotated; adjacent and plus_one must be false";
            return Err(Constraint::Conflict { what });
        }
        if prefill && stages == 1 {
            let what = "step = prefill loads a page while it computes on another; stages must be at least 2";
            return Err(Constraint::Conflict { what });
        }
        let stage_bytes = rings(self) * (slot_bytes(self) + barrier_bytes(self));
        if !fits(arch, self) {
            return Err(Constraint::SharedMemory {
                fixed_bytes: smem.bytes() - stages * stage_bytes,
                stages,
                stage_bytes,
                limit_bytes: limits.smem_bytes_per_block,
                fitting_stages: largest_fitting!(fits(arch, self), AttentionSpec { stages: AttentionStages }),
                fitting_other: with_axis("head_dim", largest_head(arch, self)),
            });
        }
        let threads = warps * limits.warp_threads;
        let mut blocks_per_sm = limits.blocks_by_smem_and_threads(threads, smem.bytes());
        while blocks_per_sm > 1 && limits.registers_for(threads, blocks_per_sm) < registers(arch, self) {
            blocks_per_sm -= 1;
        }
        let work = Work::Rows;
        Ok(BlockPlan {
            smem,
            pipeline: Some(PipelinePlan {
                rings: rings(self),
                stages,
                stage_bytes: slot_bytes(self),
                full_arrivals: bulk as u32,
                empty_arrivals: if prefill && bulk { warps } else { 0 },
            }),
            roles: RolePlan::one("load and attend", warps),
            launch: LaunchPlan {
                threads,
                blocks_per_sm,
                grid: match cluster {
                    1 => LaunchGrid::Covering { work, per_block: 1 },
                    _ => LaunchGrid::Clusters { work, cluster },
                },
                cluster,
                pdl: self.pdl,
                co_resident: false,
            },
        })
    }
}

/// Returns the largest head dimension that fits with the other axes unchanged.
const fn largest_head(arch: Arch, spec: &AttentionSpec) -> Option<u32> {
    let mut i = AttentionHeadDim::ALL.len();
    while i > 0 {
        i -= 1;
        let head_dim = AttentionHeadDim::ALL[i];
        if fits(arch, &AttentionSpec { head_dim, ..*spec }) {
            return Some(head_dim.get());
        }
    }
    None
}

impl Family for AttentionSpec {
    type Args = AttentionArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let (head_dim, stages) = (self.head_dim.get(), self.stages.get());
        let group = match self.cluster.get() {
            _ if self.split => "launch's number of blocks".to_owned(),
            1 => "block".to_owned(),
            cluster => format!("cluster of {cluster}"),
        };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        let packed = if self.cache == KvCache::Packed { "packed " } else { "" };
        let causal = if self.softcap { "softly capped causal" } else { "causal" };
        if self.step == AttentionStep::Prefill {
            let rows = ROWS * self.warps.get();
            return format!(
                "A[m, h * {head_dim}] = {causal} attention of m tokens of a sequence over its pages; \
                 {rows} rows of tokens x heads of a group per block, a ring of {stages} pages{pdl}."
            );
        }
        let capped = if self.softcap { "softly capped " } else { "" };
        let normed = if self.plus_one { ", normed with 1 + weight" } else { "" };
        let adjacent = if self.adjacent { ", rotated by adjacent elements" } else { "" };
        format!(
            "A[m, h * {head_dim}] = {capped}attention of each row's newest token{normed}{adjacent} over its {packed}pages; \
             a {group} for a row and KV head, a ring of {stages} x {TILE_TOKENS} tokens per warp{pdl}."
        )
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().part(self.step.tag())
    }

    /// Sums of parts, and their counters. A unit of `problem` is a block.
    fn workspace(&self, plan: &BlockPlan, problem: GemmShape, sms: u32) -> WorkspacePlan {
        if !self.split {
            return WorkspacePlan::default();
        }
        // A grid that cannot be launched needs none. Rows times KV heads are at most the number of blocks.
        let blocks = u64::from(plan.launch.grid.blocks(problem, sms).unwrap_or_default());
        let part = ROWS * (STATE_BYTES + self.head_dim.get() * size_of::<f32>() as u32);
        WorkspacePlan { bytes: blocks * u64::from(part), counters: blocks }
    }

    /// `decode`: heads of 64, 128 and 256 with every cluster size, other heads with one block per row, and every head
    /// with `split` on architectures without clusters. `prefill`: every head. Each with and without `pdl`.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        AttentionHeadDim::ALL
            .into_iter()
            .flat_map(move |head_dim| {
                let stages = stages_of(head_dim);
                ClusterSize::ALL
                    .into_iter()
                    .filter(move |cluster| [64, 128, 256].contains(&head_dim.get()) || cluster.get() == 1)
                    .flat_map(move |cluster| {
                        [false, true].map(move |pdl| variant(AttentionStep::Decode, head_dim, 4, stages, cluster, pdl))
                    })
            })
            // For batches with about as many rows x KV heads as the GPU has SMs: eight warps per block, one block or
            // two (docs/records/2026-11-22).
            .chain(
                AttentionHeadDim::ALL.into_iter().filter(move |head_dim| [64, 128].contains(&head_dim.get())).flat_map(
                    move |head_dim| {
                        let stages = stages_of(head_dim);
                        [(stages, 0), (stages / 2, 1)].into_iter().flat_map(move |(stages, cluster)| {
                            let cluster = ClusterSize::ALL[cluster];
                            [false, true]
                                .map(move |pdl| variant(AttentionStep::Decode, head_dim, 8, stages, cluster, pdl))
                        })
                    },
                ),
            )
            .chain(AttentionHeadDim::ALL.into_iter().flat_map(move |head_dim| {
                [false, true].map(move |pdl| variant(AttentionStep::Prefill, head_dim, 4, 2, ClusterSize::ALL[0], pdl))
            }))
            .chain(AttentionSpec::in_parts().filter(move |_| !arch.has(Instruction::Cluster)))
            .flat_map(AttentionSpec::caches)
            .chain(AttentionSpec::with_tuned_rings())
            .map(move |spec| VariantSpec::attention(arch, AttentionSpec { copy: SmemCopy::of(arch), ..spec }))
    }
}

/// Rings that were fastest on an H200 (docs/records/2026-11-26): warps, blocks per cluster, and stages for heads of 128
/// with BF16 and with packed pages.
const TUNED_RINGS: [(u32, ClusterSize, u32, u32); 3] =
    [(4, ClusterSize::ALL[0], 3, 2), (4, ClusterSize::ALL[3], 3, 5), (8, ClusterSize::ALL[1], 2, 3)];

impl AttentionSpec {
    /// Returns the variants of [`TUNED_RINGS`] for heads of 64 and 128. Slots for heads of 64 have half the bytes, so
    /// there are twice as many.
    fn with_tuned_rings() -> Vec<Self> {
        let mut specs = Vec::new();
        for head_dim in AttentionHeadDim::ALL.into_iter().filter(|head_dim| [64, 128].contains(&head_dim.get())) {
            for (warps, cluster, bf16, packed) in TUNED_RINGS {
                for (cache, stages) in [(KvCache::Bf16, bf16), (KvCache::Packed, packed)] {
                    let stages = (stages * 128 / head_dim.get()).min(AttentionStages::MAX.get());
                    let of = |pdl| variant(AttentionStep::Decode, head_dim, warps, stages, cluster, pdl);
                    specs.extend([false, true].map(|pdl| Self { cache, ..of(pdl) }));
                }
            }
        }
        specs
    }

    /// Returns this variant, and for `decode` its variants over packed pages. These have one more stage, because packed
    /// slots are smaller; with eight warps per block also the same number, so that an SM holds two blocks.
    fn caches(self) -> impl Iterator<Item = Self> {
        let stages = self.stages.get();
        let of = move |stages| match AttentionStages::new(stages) {
            Ok(stages)
                if self.step == AttentionStep::Decode && stages.get() > 1 && kv::packed::takes(self.head_dim.get()) =>
            {
                Some(Self { cache: KvCache::Packed, stages, ..self })
            }
            _ => None,
        };
        let (more, same) = (of(stages + 1), if self.warps.get() == 8 { of(stages) } else { None });
        std::iter::once(self).chain(more).chain(same)
    }

    /// The variants with `split`, for architectures without clusters: every head with four warps, with and without
    /// `pdl`.
    pub(crate) fn in_parts() -> impl Iterator<Item = Self> {
        AttentionHeadDim::ALL.into_iter().flat_map(|head_dim| {
            [false, true].map(move |pdl| {
                let one = ClusterSize::ALL[0];
                Self { split: true, ..variant(AttentionStep::Decode, head_dim, 4, stages_of(head_dim), one, pdl) }
            })
        })
    }
}

/// Returns the stages that fill 64 KB of rings with four warps; small heads have as many as heads of 64.
const fn stages_of(head_dim: AttentionHeadDim) -> u32 {
    match head_dim.get() {
        ..=64 => 4,
        65..=128 => 2,
        _ => 1,
    }
}

const fn variant(
    step: AttentionStep,
    head_dim: AttentionHeadDim,
    warps: u32,
    stages: u32,
    cluster: ClusterSize,
    pdl: bool,
) -> AttentionSpec {
    match (AttentionWarps::new(warps), AttentionStages::new(stages)) {
        (Ok(warps), Ok(stages)) => {
            let (split, cache, copy) = (false, KvCache::Bf16, SmemCopy::Bulk);
            let (adjacent, softcap, plus_one) = (false, false, false);
            AttentionSpec {
                step,
                head_dim,
                warps,
                stages,
                cluster,
                split,
                cache,
                copy,
                adjacent,
                softcap,
                plus_one,
                pdl,
            }
        }
        _ => panic!("what ships is within the axes"),
    }
}
