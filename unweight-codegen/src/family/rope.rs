//! Bias, QK-norm and rotation of the heads of a chunk of one sequence. Keys and values are stored in their pages:
//! `templates/include/unweight/kernels/rope.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, set_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    kv::PAGE_TOKENS,
    limits::{Instruction, Instructions},
};

set_axis! {
    /// Elements of a head of `rope`.
    RopeHeadDim, "head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256],
    "a multiple of 16 up to 256 (elements of a head)"
}

axes! {
    /// Rotation of the heads of a chunk, one block per token.
    pub struct RopeSpec {
        /// Elements of a head.
        head_dim: RopeHeadDim "d",
        /// Elements `2 * i` and `2 * i + 1` are rotated together instead of `i` and `i + rope_dim / 2`.
        adjacent: flag "_adjacent" = false,
        /// Norms multiply by one plus the weight, and round once.
        plus_one: flag "_plus_one" = false,
        /// Programmatic dependent launch: the kernel reads its tables while the stream's previous kernel still runs.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of the rotation of a chunk.
    pub struct RopeArgs {
        /// bf16 `[m, (heads + 2 * kv_heads) * head_dim]`; the query heads are overwritten.
        pub qkv: u64,
        /// bf16 `[(heads + 2 * kv_heads) * head_dim]`, or null.
        pub bias: u64,
        /// bf16 `[head_dim]`, or null.
        pub q_norm: u64,
        /// bf16 `[head_dim]`, or null.
        pub k_norm: u64,
        /// bf16 `[positions, rope_dim / 2]`; `adjacent`: angles `i` and `i + rope_dim / 4` are next to each other.
        pub cosines: u64,
        /// The sines, in the order of the cosines.
        pub sines: u64,
        /// bf16, the pages of one layer ([`crate::kv`]).
        pub cache: u64,
        /// u32: the pages of the sequence, up to the page of position `start + m - 1`.
        pub pages: u64,
        /// u32, set to `1 + row` for a token whose page the cache does not have.
        pub fault: u64,
        /// Elements from one row of `qkv` to the next.
        pub pitch: u64,
        /// Added to the mean square by both norms.
        pub eps: f32,
        /// Position of the first row.
        pub start: u32,
        /// Query heads.
        pub heads: u32,
        /// Key heads, and the same number of value heads.
        pub kv_heads: u32,
        /// The number of elements of a head that are rotated, from its first on; a multiple of 4, or 0.
        pub rope_dim: u32,
        /// Pages of the layer.
        pub cache_pages: u32,
    }
}

impl VariantSpec {
    /// Returns a variant of the family `rope`.
    pub const fn rope(arch: Arch, spec: RopeSpec) -> Self {
        Self { arch, op: Op::Rope(spec) }
    }
}

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;

impl RopeSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let threads = WARPS * arch.limits().warp_threads;
        let grid = LaunchGrid::Covering { work: Work::Rows, per_block: 1 };
        Ok(BlockPlan {
            smem: SmemPlan::new(),
            pipeline: None,
            roles: RolePlan::one("a head each", WARPS),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(threads, BLOCKS_PER_SM, grid) },
        })
    }
}

impl Family for RopeSpec {
    type Args = RopeArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        let adjacent = if self.adjacent { " of adjacent elements" } else { "" };
        let plus_one = if self.plus_one { " with 1 + weight" } else { "" };
        let head_dim = self.head_dim.get();
        format!("Heads of {head_dim}: bias, norm{plus_one} and rotation{adjacent}; K and V to their pages{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().check("tokens of a page", "uw::kv::kPageTokens", PAGE_TOKENS)
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        // Common heads; others are compiled on demand.
        let common = RopeHeadDim::ALL.into_iter().filter(|head_dim| matches!(head_dim.get(), 64 | 96 | 128 | 256));
        let adjacent = |head_dim: RopeHeadDim| if head_dim.get() == 128 { &[false, true][..] } else { &[false] };
        common.flat_map(move |head_dim| adjacent(head_dim).iter().map(move |adjacent| (head_dim, *adjacent))).flat_map(
            move |(head_dim, adjacent)| {
                let plus_one = false;
                [false, true].map(move |pdl| VariantSpec::rope(arch, RopeSpec { head_dim, adjacent, plus_one, pdl }))
            },
        )
    }
}
