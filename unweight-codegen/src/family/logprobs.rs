//! Log probabilities of sampled tokens: `templates/include/unweight/kernels/logprobs.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry, sample::VOCABULARY_MAX};
use crate::{
    args::args,
    axes::{Arch, axes, set_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::{Instruction, Instructions},
};

set_axis! {
    /// Threads of a block of `logprobs`.
    LogprobsThreads, "threads", [1024], "1024"
}

axes! {
    /// Log probabilities, one block per row.
    pub struct LogprobsSpec {
        /// Threads of a block.
        threads: LogprobsThreads "t" = 1024,
        /// Programmatic dependent launch: its blocks start before the stream's previous kernel has ended.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of log probabilities.
    pub struct LogprobsArgs {
        /// bf16 `[m, vocabulary]`.
        pub logits: u64,
        /// u32 `[m]`: 0 for a row without log probabilities, otherwise `1 + n` to return the `n` most likely tokens,
        /// `n` up to [`TOP_MAX`].
        pub wanted: u64,
        /// u32 `[m]`: the sampled tokens.
        pub ids: u64,
        /// u32 and f32 `[m, 1 + TOP_MAX]`: token and log probability of the sampled token, then of the most likely
        /// tokens; `u32::MAX` and NaN where there is no token.
        pub out: u64,
        /// Elements from one row of logits to the next, a multiple of 8.
        pub pitch: u64,
        /// Logits of a row, 1 to [`VOCABULARY_MAX`].
        pub vocabulary: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// Returns a variant of the family `logprobs`.
    pub const fn logprobs(arch: Arch, spec: LogprobsSpec) -> Self {
        Self { arch, op: Op::Logprobs(spec) }
    }
}

/// The maximum number of tokens with a log probability in addition to the sampled one.
pub const TOP_MAX: u32 = 20;

impl LogprobsSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let threads = self.threads.get();
        let warps = threads / arch.limits().warp_threads;
        let grid = LaunchGrid::Covering { work: Work::Rows, per_block: 1 };
        Ok(BlockPlan {
            smem: SmemPlan::new().section("warps", 2 * warps, 8, 8),
            pipeline: None,
            roles: RolePlan::one("logprobs", warps),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(threads, 1, grid) },
        })
    }
}

impl Family for LogprobsSpec {
    type Args = LogprobsArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        format!("Log probabilities of the sampled token and the likeliest ones of each row; a block a row{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new()
            .check("tokens", "uw::logprobs::kTopMax", TOP_MAX)
            .check("vocabulary", "uw::sample::kVocabularyMax", VOCABULARY_MAX)
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let [threads] = LogprobsThreads::ALL;
        [false, true].into_iter().map(move |pdl| VariantSpec::logprobs(arch, LogprobsSpec { threads, pdl }))
    }
}
