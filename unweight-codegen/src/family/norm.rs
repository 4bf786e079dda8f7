//! Norms of rows of activations: `templates/include/unweight/kernels/norm.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, set_axis, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::{Instruction, Instructions},
};

set_axis! {
    /// Threads of a block of `norm`, which share the columns of a row.
    NormThreads, "threads", [256, 512, 1024], "256, 512 or 1024 (they share the columns of a row)"
}

word_axis! {
    /// The formula of the norm, with `r = rsqrt(mean(square) + eps)`.
    NormKind, "kind" {
        /// `gamma * bf16(x * r)`.
        Rms = "rms",
        /// `gamma * (x * r)`, rounded once.
        RmsOnce = "rms_once",
        /// `gamma * ((x - mean(x)) * r)`, rounded once; `r` is that of `x - mean(x)`.
        Layer = "layer",
        /// `(1 + gamma) * (x * r)`, rounded once.
        RmsPlusOne = "rms_plus_one",
        /// As `layer`, plus a bias before the rounding.
        LayerBias = "layer_bias",
    }
}

axes! {
    /// A norm, one block per row.
    pub struct NormSpec {
        /// Threads of a block.
        threads: NormThreads "t" = 256,
        /// The formula of the norm.
        kind: NormKind "_" = Rms unnamed,
        /// Adds the result to the output.
        add: flag "_add" = false,
        /// Programmatic dependent launch: the kernel reads its weights while the stream's previous kernel still runs.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of a norm.
    pub struct NormArgs {
        /// bf16 `[source_rows, d]`.
        pub x: u64,
        /// bf16 `[d]`, of `layer_bias` `[2, d]`: the bias follows.
        pub gamma: u64,
        /// u32 `[m]`: indices of rows of `x`; null: all rows, in order.
        pub rows: u64,
        /// bf16 `[m, d]`.
        pub y: u64,
        /// u32, set to `1 + row` if the index for that row of `y` is not a row of `x`.
        pub fault: u64,
        /// Elements from one row of `x` to the next.
        pub x_pitch: u64,
        /// Elements from one row of `y` to the next.
        pub y_pitch: u64,
        /// Added to the mean square.
        pub eps: f32,
        /// Rows of `x`.
        pub source_rows: u32,
        /// Columns, a multiple of 8, at most [`COLUMNS_MAX`].
        pub d: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// Returns a variant of the family `norm`.
    pub const fn norm(arch: Arch, spec: NormSpec) -> Self {
        Self { arch, op: Op::Norm(spec) }
    }
}

/// The maximum number of columns: a row is held in the registers of its block.
pub const COLUMNS_MAX: u32 = 16384;

/// Leaves registers for two rows of pieces, and room for blocks of the next kernel.
const fn blocks_per_sm(threads: u32) -> u32 {
    if threads > 512 { 1 } else { 2 }
}

impl NormSpec {
    /// Returns the number of elements of `gamma` for rows of `d` columns: the weights, and the bias if there is one.
    pub const fn gamma_elements(&self, d: u32) -> u64 {
        if matches!(self.kind, NormKind::LayerBias) { 2 * d as u64 } else { d as u64 }
    }

    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    const fn smem(&self, warps: u32) -> SmemPlan {
        let sums = SmemPlan::new().section("sums", warps, 4, 4);
        match self.kind {
            NormKind::Layer | NormKind::LayerBias => sums.section("squares", warps, 4, 4),
            NormKind::Rms | NormKind::RmsOnce | NormKind::RmsPlusOne => sums,
        }
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let threads = self.threads.get();
        let warps = threads / arch.limits().warp_threads;
        let grid = LaunchGrid::Covering { work: Work::Rows, per_block: 1 };
        Ok(BlockPlan {
            smem: self.smem(warps),
            pipeline: None,
            roles: RolePlan::one("norm", warps),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(threads, blocks_per_sm(threads), grid) },
        })
    }
}

impl Family for NormSpec {
    type Args = NormArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        let sign = if self.add { "+=" } else { "=" };
        let (gamma, x, once) = match self.kind {
            NormKind::Rms => ("gamma", "X", ""),
            NormKind::RmsOnce => ("gamma", "X", ", rounded once"),
            NormKind::Layer => ("gamma", "(X - mean(X))", ", rounded once"),
            NormKind::RmsPlusOne => ("(1 + gamma)", "X", ", rounded once"),
            NormKind::LayerBias => ("gamma", "(X - mean(X))", " + beta, rounded once"),
        };
        format!("Y[m,d] {sign} {gamma} * {x} * rsqrt(mean({x}^2) + eps){once}, a block a row{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().check("columns", "uw::norm::kColumnsMax", COLUMNS_MAX)
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        // Blocks of 1024 threads are for rows longer than those of common models; they are compiled on demand.
        NormThreads::ALL.into_iter().filter(move |threads| threads.get() < 1024).flat_map(move |threads| {
            let kinds = NormKind::ALL.iter().flat_map(|&kind| [(kind, false), (kind, true)]);
            kinds.flat_map(move |(kind, add)| {
                [false, true].map(move |pdl| VariantSpec::norm(arch, NormSpec { threads, kind, add, pdl }))
            })
        })
    }
}
