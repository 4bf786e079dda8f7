//! Packs pages of the KV cache from BF16 to 12 bits per element (`docs/kv-cache.md`):
//! `templates/include/unweight/kernels/kv_pack.cuh`.
//!
//! ```text
//! step, chunk  bytes = 128 * head_dim + 240
//! ```

use super::{Edge, Family, Op, VariantSpec, attention::HeadDim, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    kv,
    limits::{Instruction, Instructions},
};

word_axis! {
    /// The pages that are packed or released.
    KvPackStage, "stage" {
        /// In all layers, packs the page of each row whose newest token is the last of a page.
        Step = "step",
        /// Packs consecutive pages of one layer to the packed pages of a table.
        Chunk = "chunk",
        /// Returns the BF16 units of the pages of a table, in all layers, to the pool.
        Release = "release",
    }
}

axes! {
    /// A stage of packing pages of a KV cache.
    pub struct KvPackSpec {
        /// The pages that are packed or released.
        stage: KvPackStage "",
        /// Elements of a head.
        head_dim: HeadDim "_d",
        /// Programmatic dependent launch. All reads wait for the stream's previous kernel.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of `kv_pack`. Packed pages, records and units are those of [`crate::kv`].
    pub struct KvPackArgs {
        /// BF16 pages; `step`: hot pages `[layers][source_pages]`; `chunk`: of one layer.
        pub source: u64,
        /// Packed pages `[layers][pages]`.
        pub packed: u64,
        /// Records `[layers][pages]`.
        pub records: u64,
        /// BF16 units `[units]`.
        pub unit_pages: u64,
        /// u32 `[1 + units]`: how many units are free, then their indices.
        pub free_units: u64,
        /// `step`: u32 `[m]`: the position of each row's newest token, or `u32::MAX` for a row without a token.
        pub positions: u64,
        /// `step`: u32 `[m, table_pages]`; `chunk`, `release`: `[m]`. `u32::MAX` marks a page to skip.
        pub page_table: u64,
        /// `step`: u32 `[m]`: the hot page of each row.
        pub hot_table: u64,
        /// u32; `step`: `[m]`, `chunk`: `[1]`. Set to 1 if a unit was needed and none was free.
        pub lost: u64,
        /// u32, set to `1 + row` or `1 + table entry` for a page that the cache does not have.
        pub fault: u64,
        /// Elements from one layer of `source` to the next.
        pub source_pitch: u64,
        /// Bytes from one layer of `packed` to the next.
        pub packed_pitch: u64,
        /// Bytes from one layer of `records` to the next.
        pub record_pitch: u64,
        /// `step`: number of rows; `chunk`, `release`: pages of the table.
        pub m: u32,
        /// The number of layers.
        pub layers: u32,
        /// Heads of keys and values.
        pub kv_heads: u32,
        /// Packed pages of a layer.
        pub pages: u32,
        /// BF16 pages per layer of `source`.
        pub source_pages: u32,
        /// `step`: entries of a row's page table.
        pub table_pages: u32,
        /// Units of `unit_pages`.
        pub units: u32,
        /// `chunk`: entry `i` of the table is packed from page `first + i` of `source`.
        pub first: u32,
    }
}

impl VariantSpec {
    /// Returns a stage of packing pages of a KV cache.
    pub const fn kv_pack(arch: Arch, spec: KvPackSpec) -> Self {
        Self { arch, op: Op::KvPack(spec) }
    }
}

/// Warps of a packing block: one for each tile of a page.
const WARPS: u32 = kv::packed::PAGE_TILES;
/// Warps of a releasing block.
const RELEASE_WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 3;
/// Per tile: the largest exponents of eight steps, the number of escapes, and the allocated unit, rounded up to 16
/// bytes.
const COUNT_BYTES: u32 = 48;
const RECORD_BYTES: u32 = 48;

impl KvPackSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        // The kernel loads tensor core operands with `ldmatrix`, which every architecture here has, but multiplies
        // none.
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let work = Work::Rows;
        let lanes = arch.limits().warp_threads;
        let (warps, grid) = match self.stage {
            KvPackStage::Step => (WARPS, LaunchGrid::Persistent { work, per_block: 1, blocks_per_sm: BLOCKS_PER_SM }),
            KvPackStage::Chunk => (WARPS, LaunchGrid::Covering { work, per_block: 1 }),
            KvPackStage::Release => (RELEASE_WARPS, LaunchGrid::Covering { work, per_block: RELEASE_WARPS * lanes }),
        };
        let smem = match self.stage {
            KvPackStage::Release => SmemPlan::new(),
            _ => SmemPlan::new()
                .section("tiles", WARPS, 2 * kv::packed::TILE_TOKENS * self.head_dim.get(), 128)
                .section("counts", WARPS, COUNT_BYTES, 16)
                .section("record", 1, RECORD_BYTES, 16),
        };
        Ok(BlockPlan {
            smem,
            pipeline: None,
            roles: RolePlan::one("a tile each", warps),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(warps * lanes, BLOCKS_PER_SM, grid) },
        })
    }
}

impl Family for KvPackSpec {
    type Args = KvPackArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let what = match self.stage {
            KvPackStage::Step => "Pages that rows have filled, of all layers",
            KvPackStage::Chunk => "Pages of a chunk, of one layer",
            KvPackStage::Release => "BF16 units of pages that are free",
        };
        let done = if self.stage == KvPackStage::Release { "back to the pool" } else { "BF16 to 12 bits" };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        format!("{what}, heads of {}: {done}{pdl}.", self.head_dim.get())
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        packed_pages(self.head_dim)
    }

    /// The counterparts of `attention` over packed pages, for the same heads.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        HeadDim::ALL.into_iter().flat_map(move |head_dim| {
            [KvPackStage::Step, KvPackStage::Chunk, KvPackStage::Release].into_iter().flat_map(move |stage| {
                [false, true].map(move |pdl| VariantSpec::kv_pack(arch, KvPackSpec { stage, head_dim, pdl }))
            })
        })
    }
}

/// Returns the equations for the sizes of packed pages.
pub(crate) fn packed_pages(head_dim: HeadDim) -> Entry {
    let head_dim = head_dim.get();
    let of = |what: &str| format!("uw::kv::Packed<{head_dim}>::{what}");
    Entry::new()
        .check("tokens of a page", "uw::kv::kPageTokens", kv::PAGE_TOKENS)
        .check("bytes of K or V of a tile", &of("kOperandBytes"), kv::packed::tile_bytes(head_dim))
        .check("bytes of a record", &of("kRecordBytes"), kv::packed::record_bytes(head_dim))
        .check("bytes of a unit", &of("kUnitBytes"), kv::packed::unit_bytes(head_dim))
}
