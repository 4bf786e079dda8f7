//! The activation of a gated MLP, for weights whose product was stored as it is:
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
    /// The function of the gate.
    GateFunction, "gate" {
        /// `x * sigmoid(x)`.
        Silu = "silu",
        /// GELU by its tanh approximation.
        Gelu = "gelu",
    }
}

axes! {
    /// `silu(gate) * up`, or with another function of the gate.
    pub struct SiluMulSpec {
        /// Threads of a block.
        threads: SiluMulThreads "t" = 128,
        /// The function of the gate.
        gate: GateFunction "_" = Silu unnamed,
        /// Programmatic dependent launch: its blocks are there before the stream's previous kernel has ended.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of `silu_mul`.
    pub struct SiluMulArgs {
        /// bf16 `[m, columns]`: the product with the gate.
        pub gate: u64,
        /// bf16 `[m, columns]`: that with the up, its rows as far from each other as the gate's.
        pub up: u64,
        /// bf16 `[m, columns]`.
        pub y: u64,
        /// Elements from one row of `gate` to the next.
        pub x_pitch: u64,
        /// Elements from one row of `y` to the next.
        pub y_pitch: u64,
        /// Columns of `y`, a multiple of 8.
        pub columns: u32,
        /// Blocks of a row.
        pub row_blocks: u32,
        /// From 8 columns of `gate` and `up` to the next 8: 8 times this. 1, or 2 where they alternate.
        pub spread: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// `silu(gate) * up`.
    pub const fn silu_mul(arch: Arch, spec: SiluMulSpec) -> Self {
        Self { arch, op: Op::SiluMul(spec) }
    }
}

/// Columns of a thread: 16 bytes.
const CHUNK: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;

impl SiluMulSpec {
    /// Columns of a block.
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
