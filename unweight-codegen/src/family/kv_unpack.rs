//! Unpacks packed pages of the KV cache to BF16 pages (`docs/kv-cache.md`):
//! `templates/include/unweight/kernels/kv_unpack.cuh`.

use super::{Edge, Family, Op, VariantSpec, attention::HeadDim, entry::Entry, kv_pack::packed_pages};
use crate::{
    args::args,
    axes::{Arch, axes},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    kv,
    limits::{Instruction, Instructions},
};

axes! {
    /// A kernel that unpacks pages of one layer and sequence to BF16 pages.
    pub struct KvUnpackSpec {
        /// Elements of a head.
        head_dim: HeadDim "d",
        /// Programmatic dependent launch. All reads wait for the stream's previous kernel.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of `kv_unpack`. Packed pages, records and units are those of [`crate::kv`].
    pub struct KvUnpackArgs {
        /// Packed pages of a layer.
        pub packed: u64,
        /// Records of the pages.
        pub records: u64,
        /// BF16 units.
        pub unit_pages: u64,
        /// u32 `[m]`: the pages of the sequence.
        pub page_table: u64,
        /// BF16 pages `[m]` ([`crate::kv`]).
        pub out: u64,
        /// u32, set to `1 + table entry` for a page that the cache does not have or that cannot be read.
        pub fault: u64,
        /// Pages of the table.
        pub m: u32,
        /// Heads of keys and values.
        pub kv_heads: u32,
        /// Packed pages of the layer.
        pub pages: u32,
        /// Units of `unit_pages`.
        pub units: u32,
    }
}

impl VariantSpec {
    /// Returns a kernel that unpacks pages to BF16.
    pub const fn kv_unpack(arch: Arch, spec: KvUnpackSpec) -> Self {
        Self { arch, op: Op::KvUnpack(spec) }
    }
}

/// Warps of a block: one for each tile of a page.
const WARPS: u32 = kv::packed::PAGE_TILES;
const BLOCKS_PER_SM: u32 = 4;

impl KvUnpackSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let tile_bytes = 2 * kv::packed::TILE_TOKENS * self.head_dim.get();
        let threads = WARPS * arch.limits().warp_threads;
        let grid = LaunchGrid::Covering { work: Work::Rows, per_block: 1 };
        Ok(BlockPlan {
            smem: SmemPlan::new().section("tiles", WARPS, tile_bytes, 128),
            pipeline: None,
            roles: RolePlan::one("a tile each", WARPS),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(threads, BLOCKS_PER_SM, grid) },
        })
    }
}

impl Family for KvUnpackSpec {
    type Args = KvUnpackArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        format!("Packed pages of heads of {} to BF16 pages{pdl}.", self.head_dim.get())
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        packed_pages(self.head_dim)
    }

    /// The counterparts of `attention` over packed pages, for the same heads.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let of = move |head_dim| [false, true].map(|pdl| VariantSpec::kv_unpack(arch, KvUnpackSpec { head_dim, pdl }));
        HeadDim::ALL.into_iter().flat_map(of)
    }
}
