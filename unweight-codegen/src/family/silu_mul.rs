//! The activation of a gated MLP, for products that were stored without it:
//! `templates/include/unweight/kernels/silu_mul.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, set_axis, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::{Instruction, Instructions},
};

set_axis! {
    /// Threads of a block of `silu_mul`, eight columns each.
    SiluMulThreads, "threads", [128, 256], "128 or 256 (of 8 columns)"
}

word_axis! {
    /// The activation function of the gate.
    GateFunction, "gate" {
        /// `x * sigmoid(x)`.
        Silu = "silu",
        /// GELU in its tanh approximation.
        Gelu = "gelu",
    }
}

axes! {
    /// `silu(gate) * up`, or with another activation function.
    pub struct SiluMulSpec {
        /// Threads of a block.
        threads: SiluMulThreads "t" = 128,
        /// The activation function of the gate.
        gate: GateFunction "_" = Silu unnamed,
        /// Programmatic dependent launch: its blocks start before the stream's previous kernel has ended.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of `silu_mul`.
    pub struct SiluMulArgs {
        /// bf16 `[m, columns]`: the product with the gate weights.
        pub gate: u64,
        /// bf16 `[m, columns]`: the product with the up weights, with the row pitch of `gate`.
        pub up: u64,
        /// bf16 `[m, columns]`.
        pub y: u64,
        /// Elements from one row of `gate` or `up` to the next.
        pub x_pitch: u64,
        /// Elements from one row of `y` to the next.
        pub y_pitch: u64,
        /// Columns of `y`, a multiple of 8.
        pub columns: u32,
        /// Blocks per row.
        pub row_blocks: u32,
        /// Distance between 8 columns of `gate` or `up` and the next 8, in units of 8 columns: 1, or 2 where they
        /// alternate.
        pub spread: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// Returns a variant of the family `silu_mul`.
    pub const fn silu_mul(arch: Arch, spec: SiluMulSpec) -> Self {
        Self { arch, op: Op::SiluMul(spec) }
    }
}

/// Columns per thread: 16 bytes.
const CHUNK: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;

impl SiluMulSpec {
    /// Returns the columns of a block.
    pub const fn block_columns(&self) -> u32 {
        self.threads.get() * CHUNK
    }

    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let threads = self.threads.get();
        let work = Work::OutputTiles { rows: 1, columns: self.block_columns() };
        let grid = LaunchGrid::Covering { work, per_block: 1 };
        Ok(BlockPlan {
            smem: SmemPlan::new(),
            pipeline: None,
            roles: RolePlan::one("activate", threads / arch.limits().warp_threads),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(threads, BLOCKS_PER_SM, grid) },
        })
    }
}

impl Family for SiluMulSpec {
    type Args = SiluMulArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        format!("Y[m,n] = {}(gate[m,n]) * up[m,n]{pdl}.", self.gate.tag())
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().check("columns", "Config::kThreads * uw::silu_mul::kChunk", self.block_columns())
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        GateFunction::ALL.iter().flat_map(move |&gate| {
            [false, true].map(move |pdl| {
                VariantSpec::silu_mul(arch, SiluMulSpec { threads: SiluMulThreads::ALL[0], gate, pdl })
            })
        })
    }
}
