//! Samples a token from each row of logits: `templates/include/unweight/kernels/sample.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry, shared::ClusterSize};
use crate::{
    args::args,
    axes::{Arch, axes},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::{Instruction, Instructions},
};
use bytemuck::{Pod, Zeroable};

axes! {
    /// Sampling, one cluster per row.
    pub struct SampleSpec {
        /// Blocks that share the logits of a row.
        cluster: ClusterSize "t1024_c" = 8,
        /// Samples again from adjusted logits, for rows that have adjustments.
        adjusted: flag "_adjusted" = false,
        /// Programmatic dependent launch: the kernel reads its parameters while the stream's previous kernel still
        /// runs.
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
        /// u32 `[m]`: the position of the token that the logits belong to, or `u32::MAX` for a row without a token. The
        /// kernel adds 1. An adjusted variant, which runs afterwards, reads the advanced position and writes none.
        pub positions: u64,
        /// u32 `[m]`: the sampled tokens.
        pub ids: u64,
        /// u32, set to `1 + row` for a row whose logits are all NaN.
        pub fault: u64,
        /// [`AdjustRow`] `[m]`; adjusted variants only.
        pub adjusts: u64,
        /// [`TokenState`] `[slots, token_pitch]`; adjusted variants only.
        pub tokens: u64,
        /// u32 `[masks, ceil(vocabulary / 32)]`: bit `t % 32` of word `t / 32` is set if token `t` may be sampled;
        /// adjusted variants only.
        pub masks: u64,
        /// Elements from one row of logits to the next, a multiple of 8.
        pub pitch: u64,
        /// Logits of a row, 1 to [`VOCABULARY_MAX`].
        pub vocabulary: u32,
        /// Entries of `tokens` from one slot to the next, a multiple of 2.
        pub token_pitch: u32,
    }
}

/// Sampling parameters of one row. Filters apply in the order temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SampleRow {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Divides the logits; 0 selects the token with the largest logit, the lowest token of equal ones.
    pub temperature: f32,
    /// Keeps the tokens whose logit is among the `top_k` largest, including ties; 0 keeps all.
    pub top_k: u32,
    /// Keeps the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least this fraction of the probability of the most likely one; 0 keeps all.
    pub min_p: f32,
}

/// Adjustments of the logits of one row.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct AdjustRow {
    /// The row of the token states, or [`AdjustRow::NO_SLOT`] for a row without adjustments.
    pub slot: u32,
    /// Divides positive logits, and multiplies others, of tokens that are in the prompt or the answer.
    pub repetition: f32,
    /// Subtracted once for each occurrence of the token in the answer.
    pub frequency: f32,
    /// Subtracted once if the token is in the answer.
    pub presence: f32,
    /// The first position at which an end token may be sampled.
    pub end_from: u32,
    /// `1 + i` for row `i` of the masks, or 0 if any token may be sampled.
    pub mask: u32,
}

impl AdjustRow {
    /// [`AdjustRow::slot`] for a row without adjustments.
    pub const NO_SLOT: u32 = u32::MAX;
    /// The value for a row without adjustments.
    pub const NONE: Self =
        Self { slot: Self::NO_SLOT, repetition: 1.0, frequency: 0.0, presence: 0.0, end_from: 0, mask: 0 };
}

/// State of one token of the vocabulary that adjustments depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct TokenState {
    /// Added to the logit.
    pub bias: f32,
    /// [`TokenState::IN_PROMPT`], [`TokenState::ENDS`], and the number of occurrences in the answer.
    pub marks: u32,
}

impl TokenState {
    /// The token is in the prompt.
    pub const IN_PROMPT: u32 = 1 << 31;
    /// The token ends the sequence.
    pub const ENDS: u32 = 1 << 30;
}

impl VariantSpec {
    /// Returns a variant of the family `sample`.
    pub const fn sample(arch: Arch, spec: SampleSpec) -> Self {
        Self { arch, op: Op::Sample(spec) }
    }
}

/// The maximum number of logits of a row: sums of their fixed-point weights stay below 2^52.
pub const VOCABULARY_MAX: u32 = 1 << 20;

const THREADS: u32 = 1024;
/// Bins of a histogram, one for each value of half a key.
const BINS: u32 = 256;
/// Counters per bin: lanes use different ones, so that few lanes collide.
const COPIES: u32 = 16;
/// The size of a u64.
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
        let logits = if self.adjusted { "adjusted logits" } else { "logits" };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        format!("A token of each row of {logits}: temperature, top-k, top-p, min-p; a {group} a row{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new()
            .check("SampleRow", "sizeof(uw::SampleRow)", size_of::<SampleRow>() as u32)
            .check("AdjustRow", "sizeof(uw::AdjustRow)", size_of::<AdjustRow>() as u32)
            .check("TokenState", "sizeof(uw::TokenState)", size_of::<TokenState>() as u32)
            .check("tokens of the prompt", "uw::sample::kInPrompt", TokenState::IN_PROMPT)
            .check("end tokens", "uw::sample::kEnds", TokenState::ENDS)
            .check("vocabulary", "uw::sample::kVocabularyMax", VOCABULARY_MAX)
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let flags = [(false, false), (false, true), (true, false), (true, true)];
        ClusterSize::ALL.into_iter().flat_map(move |cluster| {
            flags.map(move |(adjusted, pdl)| VariantSpec::sample(arch, SampleSpec { cluster, adjusted, pdl }))
        })
    }
}
