//! A token of each row of logits: `templates/include/unweight/kernels/sample.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry, shared::ClusterSize};
use crate::{
    args::args,
    axes::{Arch, axes},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::{Instruction, Instructions},
};
use bytemuck::{Pod, Zeroable};

axes! {
    /// Sampling, a cluster a row.
    pub struct SampleSpec {
        /// Blocks that share the logits of a row.
        cluster: ClusterSize "t1024_c" = 8,
        /// Programmatic dependent launch: reads its parameters while the stream's previous kernel still runs.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of sampling.
    pub struct SampleArgs {
        /// bf16 `[m, vocabulary]`.
        pub logits: u64,
        /// [`SampleRow`] `[m]`.
        pub rows: u64,
        /// u32 `[m]`: the position of the token whose logits these are, or `u32::MAX` of a row without one; 1 is added.
        pub positions: u64,
        /// u32 `[m]`: the token that was chosen.
        pub ids: u64,
        /// u32, set to 1 and a row whose logits are all NaN.
        pub fault: u64,
        /// Elements from one row of logits to the next, a multiple of 8.
        pub pitch: u64,
        /// Logits of a row, 1 to [`VOCABULARY_MAX`].
        pub vocabulary: u32,
        /// 0.
        pub reserved: u32,
    }
}

/// Sampling parameters of one row. Filters apply in the order temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SampleRow {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Logits are divided by it; 0 takes the token of the largest logit, of equal ones the lowest.
    pub temperature: f32,
    /// Tokens whose logit is among the `top_k` largest, equal ones included; 0 keeps all.
    pub top_k: u32,
    /// The most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Tokens with at least this share of the probability of the most likely one; 0 keeps all.
    pub min_p: f32,
}

impl VariantSpec {
    /// Sampling.
    pub const fn sample(arch: Arch, spec: SampleSpec) -> Self {
        Self { arch, op: Op::Sample(spec) }
    }
}

/// The most logits of a row: sums of their fixed-point weights stay below 2^52.
pub const VOCABULARY_MAX: u32 = 1 << 20;

const THREADS: u32 = 1024;
/// Bins of a histogram: half of a key.
const BINS: u32 = 256;
/// Each bin has a counter for every so many lanes, so that few lanes meet at one.
const COPIES: u32 = 16;
/// A u64.
const SUM_BYTES: u32 = 8;

impl SampleSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
            .when(self.cluster.get() > 1, Instruction::Cluster)
            .when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let warps = THREADS / arch.limits().warp_threads;
        let (work, cluster) = (Work::Rows, self.cluster.get());
        let smem = SmemPlan::new()
            .section("low", BINS, COPIES * 4, 16)
            .section("high", BINS, COPIES * 4, 16)
            .section("sums", 2, BINS * SUM_BYTES, 8)
            .section("merged", BINS, SUM_BYTES, 8)
            .section("warps", warps, SUM_BYTES, 8)
            .section("best", 2, SUM_BYTES, 8)
            .section("found", 2, SUM_BYTES, 8);
        let grid = match cluster {
            1 => LaunchGrid::Covering { work, per_block: 1 },
            _ => LaunchGrid::Clusters { work, cluster },
        };
        Ok(BlockPlan {
            smem,
            pipeline: None,
            roles: RolePlan::one("sample", warps),
            launch: LaunchPlan { cluster, pdl: self.pdl, ..LaunchPlan::ordinary(THREADS, 1, grid) },
        })
    }
}

impl Family for SampleSpec {
    type Args = SampleArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let group = match self.cluster.get() {
            1 => "block".to_owned(),
            cluster => format!("cluster of {cluster}"),
        };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        format!("A token of each row of logits: temperature, top-k, top-p, min-p; a {group} a row{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new()
            .check("SampleRow", "sizeof(uw::SampleRow)", size_of::<SampleRow>() as u32)
            .check("vocabulary", "uw::sample::kVocabularyMax", VOCABULARY_MAX)
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        ClusterSize::ALL.into_iter().flat_map(move |cluster| {
            [false, true].map(move |pdl| VariantSpec::sample(arch, SampleSpec { cluster, pdl }))
        })
    }
}
