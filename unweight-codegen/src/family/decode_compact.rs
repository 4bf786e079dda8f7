//! Decodes compact tensors (docs/format.md A.11) to BF16 or to the packed encoding:
//! `templates/include/unweight/kernels/decode_compact.cuh`.

use super::{Edge, Family, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::Instructions,
};
use unweight_format::{EncodingId, raw::layout::STREAM_TILE_BYTES_MAX};

word_axis! {
    /// A stage of the decoder of compact tensors (docs/format.md A.11).
    DecodeCompactStage, "stage" {
        /// Decodes to BF16.
        Full = "full",
        /// Decodes to packed tiles and escape heads, and counts the words that the lists need.
        Packed = "packed",
        /// Writes the lists of row blocks with more than one escape.
        Lists = "lists",
    }
}

axes! {
    /// A kernel of the decoder of compact tensors.
    pub struct DecodeCompactSpec {
        /// The stage of the decoder.
        stage: DecodeCompactStage "",
    }
}

args! {
    /// Arguments of family `decode_compact`: all stages share one struct.
    pub struct DecodeCompactArgs {
        /// u8 `[tiles, 5120]`.
        pub dense: u64,
        /// u32 `[tiles + 1, 2]`: `class_tiles`.
        pub tiles: u64,
        /// u32 `[stream_words]`: `class_streams`.
        pub streams: u64,
        /// u32 `[record_words]`: `class_escapes`.
        pub records: u64,
        /// u32 `[512]`: `ClassBook::kernel_table`.
        pub table: u64,
        /// bf16 `[n, k]`: written by `full`.
        pub weights: u64,
        /// u8 `[tiles, 6144]`: written by `packed`.
        pub packed: u64,
        /// u32 `[tiles, 4]`: written by `packed` and `lists`.
        pub escape_heads: u64,
        /// u32 `[escape_words]`: written by `lists`.
        pub escapes: u64,
        /// u32 `[ceil(tiles / 16)]`, zeroed before `packed`: words of the lists of each 64 row blocks.
        pub group_words: u64,
        /// u64, zeroed before `packed`: `!(row * k + column)` of the first element that no operand can represent, 0 if
        /// there is none.
        pub inexact: u64,
        /// Words in `streams`, a multiple of 4.
        pub stream_words: u32,
        /// Words in `records`.
        pub record_words: u32,
        /// Lowest exponent of the window of 32, 1..=223.
        pub class_base: u32,
        /// Lowest exponent of the packed encoding's window of 16, 1..=239.
        pub base: u32,
        /// Words in `escapes`.
        pub escape_words: u32,
        /// Output features, a multiple of 64.
        pub n: u32,
        /// Input features, a multiple of 64.
        pub k: u32,
        /// `n / 64`.
        pub tile_rows: u32,
        /// `k / 64`.
        pub tile_cols: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// Returns a stage of the decoder.
    pub const fn decode_compact(arch: Arch, stage: DecodeCompactStage) -> Self {
        Self { arch, op: super::Op::DecodeCompact(DecodeCompactSpec { stage }) }
    }
}

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 3;
/// A warp processes one tile.
const TILES_PER_BLOCK: u32 = WARPS;
/// A warp processes eight row blocks.
const LIST_TILES_PER_BLOCK: u32 = 16;
/// 512 entries of 4 bytes.
pub(super) const TABLE_BYTES: u32 = 1 << 11;
/// The longest streams of a tile, with 16-byte boundaries at both ends, and the bytes that a chain may read past them.
pub(super) const SLOT_BYTES: u32 = (12 + STREAM_TILE_BYTES_MAX as u32 + 9 + 16).next_multiple_of(16);

impl DecodeCompactSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let work = Work::WeightTiles;
        let smem = SmemPlan::new().section("table", 1, TABLE_BYTES, 16).section("slots", WARPS, SLOT_BYTES, 16);
        let (smem, per_block) = match self.stage {
            DecodeCompactStage::Full | DecodeCompactStage::Packed => (smem, TILES_PER_BLOCK),
            // For each warp, its own words and those of the preceding groups.
            DecodeCompactStage::Lists => (smem.section("sums", WARPS, 8, 8), LIST_TILES_PER_BLOCK),
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

impl Family for DecodeCompactSpec {
    type Args = DecodeCompactArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[
        Edge { from: EncodingId::COMPACT, to: EncodingId::RAW },
        Edge { from: EncodingId::COMPACT, to: EncodingId::PACKED },
    ];

    fn edges(&self) -> &'static [Edge] {
        match self.stage {
            DecodeCompactStage::Full => &Self::EDGES[..1],
            DecodeCompactStage::Packed | DecodeCompactStage::Lists => &Self::EDGES[1..],
        }
    }

    fn summary(&self, _: &BlockPlan) -> String {
        let summary = match self.stage {
            DecodeCompactStage::Full => "Compact tensor -> bf16 [n, k], row-major.",
            DecodeCompactStage::Packed => "Compact tensor -> packed tiles, escape heads and sizes of the lists.",
            DecodeCompactStage::Lists => "Compact tensor and sizes of the lists -> lists of escapes and their places.",
        };
        summary.to_owned()
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().packed_layout().compact_layout()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        DecodeCompactStage::ALL.iter().map(move |stage| VariantSpec::decode_compact(arch, *stage))
    }
}
