//! Packs BF16 as a packed tensor (docs/format.md A.9): `templates/include/unweight/kernels/pack.cuh`.

use super::{Edge, Family, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::Instructions,
};
use unweight_format::EncodingId;

word_axis! {
    /// A stage of packing (docs/format.md A.9).
    PackStage, "stage" {
        /// Writes packed tiles and escape heads, and counts the words that the lists need.
        Tiles = "tiles",
        /// Writes the lists of row blocks with more than one escape.
        Lists = "lists",
    }
}

axes! {
    /// A kernel that packs a BF16 matrix.
    pub struct PackSpec {
        /// The stage of packing.
        stage: PackStage "",
    }
}

args! {
    /// Arguments of families `pack` and `unpack`: all kernels share one struct.
    pub struct PackArgs {
        /// bf16 `[n, k]`: read by `pack`, written by `unpack`.
        pub weights: u64,
        /// u8 `[tiles, 6144]`.
        pub packed: u64,
        /// u32 `[tiles, 4]`.
        pub escape_heads: u64,
        /// u32 `[escape_words]`; unused by stage `tiles`.
        pub escapes: u64,
        /// u32 `[ceil(tiles / 16)]`, zeroed before `tiles`: words of the lists of each 64 row blocks; unused by
        /// `unpack`.
        pub group_words: u64,
        /// u64, zeroed before `tiles`: `!(row * k + column)` of the first element that no operand can represent, 0 if
        /// there is none; unused by `unpack`.
        pub inexact: u64,
        /// Words in `escapes`.
        pub escape_words: u32,
        /// Lowest exponent of the window, 1..=239.
        pub base: u32,
        /// Output features, a multiple of 64.
        pub n: u32,
        /// Input features, a multiple of 64.
        pub k: u32,
        /// `n / 64`.
        pub tile_rows: u32,
        /// `k / 64`.
        pub tile_cols: u32,
    }
}

impl VariantSpec {
    /// Returns a stage of packing.
    pub const fn pack(arch: Arch, stage: PackStage) -> Self {
        Self { arch, op: super::Op::Pack(PackSpec { stage }) }
    }
}

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;
/// A warp processes one row block, a quarter of a tile.
const TILES_PER_BLOCK: u32 = 2;
/// A warp processes eight row blocks.
const LIST_TILES_PER_BLOCK: u32 = 16;

impl PackSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let work = Work::WeightTiles;
        let none = SmemPlan::new();
        let (smem, per_block) = match self.stage {
            PackStage::Tiles => (none, TILES_PER_BLOCK),
            // For each warp, its own words and those of the preceding groups.
            PackStage::Lists => (none.section("sums", WARPS, 8, 8), LIST_TILES_PER_BLOCK),
        };
        Ok(BlockPlan {
            smem,
            pipeline: None,
            roles: RolePlan::one("convert", WARPS),
            launch: LaunchPlan::ordinary(
                WARPS * arch.limits().warp_threads,
                BLOCKS_PER_SM,
                LaunchGrid::Covering { work, per_block },
            ),
        })
    }
}

impl Family for PackSpec {
    type Args = PackArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[Edge { from: EncodingId::RAW, to: EncodingId::PACKED }];

    fn summary(&self, _: &BlockPlan) -> String {
        let summary = match self.stage {
            PackStage::Tiles => "bf16 [n, k] -> packed tiles, escape heads and sizes of the lists.",
            PackStage::Lists => "bf16 [n, k] and sizes of the lists -> lists of escapes and their places.",
        };
        summary.to_owned()
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().packed_layout()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        PackStage::ALL.iter().map(move |stage| VariantSpec::pack(arch, *stage))
    }
}
