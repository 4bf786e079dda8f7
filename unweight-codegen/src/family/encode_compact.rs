//! Encodes BF16 as compact (docs/format.md A.11): `templates/include/unweight/kernels/encode_compact.cuh`.

use super::{Edge, Family, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::Instructions,
};
use unweight_format::{EncodingId, raw::layout::STREAM_TILE_BYTES_MAX};

word_axis! {
    /// A stage of the encoder of compact tensors (docs/format.md A.11).
    EncodeCompactStage, "stage" {
        /// Counts quads of classes.
        Quads = "quads",
        /// Computes the sizes of the streams and escapes of each tile.
        Sizes = "sizes",
        /// Writes dense parts, streams, heads and lists.
        Write = "write",
    }
}

axes! {
    /// A kernel of the encoder of compact tensors.
    pub struct EncodeCompactSpec {
        /// The stage of the encoder.
        stage: EncodeCompactStage "",
    }
}

args! {
    /// Arguments of family `encode_compact`: all stages share one struct.
    pub struct EncodeCompactArgs {
        /// bf16 `[n, k]`, read only.
        pub weights: u64,
        /// u32 `[4096]`, zeroed before `quads`: the number of occurrences of each quad of classes.
        pub quads: u64,
        /// u32 `[4096]`: `compact::Coding::kernel_table`; not read by `quads`.
        pub table: u64,
        /// u32 `[tiles, 2]`: words of a tile's streams, and its escapes; written by `sizes`.
        pub sizes: u64,
        /// u64, zeroed before `sizes`: `!(row * k + column)` of the first element that no operand can represent, 0 if
        /// there is none.
        pub inexact: u64,
        /// u32 `[tiles + 1, 2]`: `class_tiles`, whose heads `write` completes.
        pub tiles: u64,
        /// u8 `[tiles, 5120]`; written by `write`.
        pub dense: u64,
        /// u32, with as many words as the last entry of `tiles` says; written by `write`.
        pub streams: u64,
        /// u32 `[record_words]`: lists of escapes; written by `write`.
        pub records: u64,
        /// Words in `records`.
        pub record_words: u32,
        /// Lowest exponent of the window of 32, 1..=223.
        pub base: u32,
        /// The class code of elements outside the window.
        pub filler: u32,
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
    /// Returns a stage of the encoder.
    pub const fn encode_compact(arch: Arch, stage: EncodeCompactStage) -> Self {
        Self { arch, op: super::Op::EncodeCompact(EncodeCompactSpec { stage }) }
    }
}

const WARPS: u32 = 8;
/// Counters or codes of 4096 quads.
const QUAD_BYTES: u32 = 4 << 12;
/// A warp processes eight row blocks.
const COUNT_TILES_PER_BLOCK: u32 = 16;
/// The longest streams of a tile, and one more word.
const SLOT_BYTES: u32 = (STREAM_TILE_BYTES_MAX as u32 + 4).next_multiple_of(16);

impl EncodeCompactSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let work = Work::WeightTiles;
        let smem = SmemPlan::new().section("quads", 1, QUAD_BYTES, 16);
        // A warp processes a tile.
        let (smem, blocks_per_sm, per_block) = match self.stage {
            EncodeCompactStage::Quads => (smem, 4, COUNT_TILES_PER_BLOCK),
            EncodeCompactStage::Sizes => (smem, 3, WARPS),
            // A lane keeps 32 codes in its registers.
            EncodeCompactStage::Write => (smem.section("slots", WARPS, SLOT_BYTES, 16), 2, WARPS),
        };
        Ok(BlockPlan {
            smem,
            pipeline: None,
            roles: RolePlan::one("encode", WARPS),
            launch: LaunchPlan::ordinary(
                WARPS * arch.limits().warp_threads,
                blocks_per_sm,
                LaunchGrid::Covering { work, per_block },
            ),
        })
    }
}

impl Family for EncodeCompactSpec {
    type Args = EncodeCompactArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[Edge { from: EncodingId::RAW, to: EncodingId::COMPACT }];

    fn summary(&self, _: &BlockPlan) -> String {
        let summary = match self.stage {
            EncodeCompactStage::Quads => "bf16 [n, k] -> how often each quad of classes occurs.",
            EncodeCompactStage::Sizes => "bf16 [n, k] and codes -> words and escapes of each tile.",
            EncodeCompactStage::Write => "bf16 [n, k], codes and places of tiles -> compact tensor.",
        };
        summary.to_owned()
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().packed_layout().compact_layout()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        EncodeCompactStage::ALL.iter().map(move |stage| VariantSpec::encode_compact(arch, *stage))
    }
}
