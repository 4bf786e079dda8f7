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
        /// Samples again from adjusted logits, for rows with adjustments.
        adjusted: flag "_adjusted" = false,
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
        /// An adjusted variant reads the position behind it and writes nothing.
        pub positions: u64,
        /// u32 `[m]`: the token that was chosen.
        pub ids: u64,
        /// u32, set to 1 and a row whose logits are all NaN.
        pub fault: u64,
        /// [`AdjustRow`] `[m]`; only of an adjusted variant.
        pub adjusts: u64,
        /// [`TokenState`] `[slots, token_pitch]`; only of an adjusted variant.
        pub tokens: u64,
        /// u32 `[masks, vocabulary / 32, rounded up]`: bit `t % 32` of word `t / 32` is set if token `t` may be
        /// sampled; only of an adjusted variant.
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
    /// Logits are divided by it; 0 takes the token of the largest logit, of equal ones the lowest.
    pub temperature: f32,
    /// Tokens whose logit is among the `top_k` largest, equal ones included; 0 keeps all.
    pub top_k: u32,
    /// The most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Tokens with at least this share of the probability of the most likely one; 0 keeps all.
    pub min_p: f32,
}

/// Adjustments of the logits of one row.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct AdjustRow {
    /// The row of the token states, or [`AdjustRow::NO_SLOT`] of a row without adjustments.
    pub slot: u32,
    /// Divides positive logits of tokens in prompt or answer and multiplies others.
    pub repetition: f32,
    /// Subtracted for each time that a token is in the answer.
    pub frequency: f32,
    /// Subtracted for a token that is in the answer.
    pub presence: f32,
    /// The first position at which an end token may be sampled.
    pub end_from: u32,
    /// 1 and the row of the masks, or 0 if any token may be sampled.
    pub mask: u32,
}

impl AdjustRow {
    /// [`AdjustRow::slot`] of a row without adjustments.
    pub const NO_SLOT: u32 = u32::MAX;
    /// The value for a row without adjustments.
    pub const NONE: Self =
        Self { slot: Self::NO_SLOT, repetition: 1.0, frequency: 0.0, presence: 0.0, end_from: 0, mask: 0 };
}

/// What adjustments depend on for one token of the vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct TokenState {
    /// Added to the logit.
    pub bias: f32,
    /// [`TokenState::IN_PROMPT`], [`TokenState::ENDS`], and how often the token is in the answer.
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
