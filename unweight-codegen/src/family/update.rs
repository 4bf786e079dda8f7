//! Replaces elements of a packed tensor in place (docs/format.md A.9):
//! `templates/include/unweight/kernels/update.cuh`.

use super::{Edge, Family, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::Instructions,
};

word_axis! {
    /// A stage of an update of a packed tensor.
    UpdateStage, "stage" {
        /// Finds the new elements of each 64 consecutive ones, and checks their order.
        Places = "places",
        /// Counts exponents and words of lists as they are after the update, and computes a digest. Writes no weights.
        Count = "count",
        /// Writes packed tiles and escape heads.
        Tiles = "tiles",
        /// Writes the lists of row blocks with more than one escape.
        Lists = "lists",
    }
}

axes! {
    /// A kernel that replaces elements of a packed tensor.
    pub struct UpdateSpec {
        /// The stage of the update.
        stage: UpdateStage "",
    }
}

args! {
    /// Arguments of family `update`: all stages share one struct.
    pub struct UpdateArgs {
        /// u8 `[tiles, 6144]`: read, and written by `tiles`.
        pub packed: u64,
        /// u32 `[tiles, 4]`: written by `tiles` and `lists`.
        pub escape_heads: u64,
        /// u32 `[escape_words]`: written by `lists`.
        pub escapes: u64,
        /// u32 `[tiles, 4]`: the heads before the update; a copy for `tiles` and `lists`.
        pub old_heads: u64,
        /// u32 `[old_escape_words]`: the lists before the update; a copy for `tiles` and `lists`.
        pub old_escapes: u64,
        /// i64 `[updates]`: `row * k + column`, ascending.
        pub index: u64,
        /// bf16 `[updates]`.
        pub values: u64,
        /// u32 `[n * k / 64 + 1]`: the number of updates before each 64 places; written by `places`.
        pub first: u64,
        /// u32 `[256]`, zeroed before `count`: how often each exponent occurs; null to compute only the digest.
        pub histogram: u64,
        /// u32, zeroed before `count`: words of all lists.
        pub list_words: u64,
        /// u32 `[ceil(tiles / 16)]`, zeroed before `tiles`: words of the lists of each 64 row blocks.
        pub group_words: u64,
        /// u64, zeroed before `count`: `!(row * k + column)` of the first element that no operand can represent, 0 if
        /// there is none.
        pub inexact: u64,
        /// u64, zeroed before `count`: a digest of the weights.
        pub digest: u64,
        /// u32 `[2]`, zeroed before `places`: 1 if a place is outside of the matrix; 1 if places do not ascend.
        pub faults: u64,
        /// The number of elements to replace.
        pub updates: u32,
        /// Words in `escapes`.
        pub escape_words: u32,
        /// Words in `old_escapes`.
        pub old_escape_words: u32,
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
    /// Returns a stage of an update.
    pub const fn update(arch: Arch, stage: UpdateStage) -> Self {
        Self { arch, op: super::Op::Update(UpdateSpec { stage }) }
    }
}

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;
/// A warp processes one row block, a quarter of a tile.
const TILES_PER_BLOCK: u32 = 2;
/// A warp processes eight row blocks.
const GROUP_TILES_PER_BLOCK: u32 = 16;
/// 256 exponents, 32 lanes.
const COUNT_BYTES: u32 = 256 * 32 * 4;

impl UpdateSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let none = SmemPlan::new();
        let (smem, blocks_per_sm, per_block) = match self.stage {
            // For each exponent a counter per lane.
            UpdateStage::Count => {
                let limits = arch.limits();
                let fit = limits.smem_bytes_per_sm / (COUNT_BYTES + limits.smem_reserved_bytes_per_block);
                let blocks = if fit < BLOCKS_PER_SM { fit } else { BLOCKS_PER_SM };
                (none.section("counts", 1, COUNT_BYTES, 16), blocks, GROUP_TILES_PER_BLOCK)
            }
            UpdateStage::Places => (none, BLOCKS_PER_SM, GROUP_TILES_PER_BLOCK),
            UpdateStage::Tiles => (none, BLOCKS_PER_SM, TILES_PER_BLOCK),
            // For each warp, its own words and those of the preceding groups.
            UpdateStage::Lists => (none.section("sums", WARPS, 8, 8), BLOCKS_PER_SM, GROUP_TILES_PER_BLOCK),
        };
        Ok(BlockPlan {
            smem,
            pipeline: None,
            roles: RolePlan::one("convert", WARPS),
            launch: LaunchPlan::ordinary(
                WARPS * arch.limits().warp_threads,
                blocks_per_sm,
                LaunchGrid::Covering { work: Work::WeightTiles, per_block },
            ),
        })
    }
}

impl Family for UpdateSpec {
    type Args = UpdateArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let summary = match self.stage {
            UpdateStage::Places => "Places of new elements -> those of each 64 consecutive elements.",
            UpdateStage::Count => "Packed tensor and new elements -> exponents, words of lists, digest.",
            UpdateStage::Tiles => {
                "Packed tensor and new elements -> packed tiles, escape heads and sizes of the lists."
            }
            UpdateStage::Lists => "Packed tensor, new elements and sizes of the lists -> lists of escapes.",
        };
        summary.to_owned()
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().packed_layout()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        UpdateStage::ALL.iter().map(move |stage| VariantSpec::update(arch, *stage))
    }
}
