//! Encodes BF16 as a Huffman or palette tensor (report section 4):
//! `templates/include/unweight/kernels/encode_huffman.cuh`.

use super::{Edge, Family, VariantSpec};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::Instructions,
};
use unweight_format::EncodingId;

word_axis! {
    /// A stage of the encoder (report section 4).
    EncodeHuffmanStage, "stage" {
        /// Splits the elements and counts exponents.
        Stats = "stats",
        /// Chooses the palette and the code.
        Table = "table",
        /// Computes row lengths, verbatim rows and tile sizes.
        Rows = "rows",
        /// Converts tile sizes to offsets.
        Scan = "scan",
        /// Writes the bitstream and the verbatim rows.
        Write = "write",
        /// Writes packed palette indices instead of a bitstream.
        Palette = "palette",
    }
}

axes! {
    /// A kernel of the encoder of Huffman tensors.
    pub struct EncodeHuffmanSpec {
        /// The stage of the encoder.
        stage: EncodeHuffmanStage "",
    }
}

args! {
    /// Arguments of the family `encode_huffman`: all stages share one struct.
    pub struct EncodeHuffmanArgs {
        /// bf16 `[n, k]`.
        pub weights: u64,
        /// u8 `[n, k]`.
        pub sign_mantissa: u64,
        /// u32 `[256]`, zeroed before `stats`.
        pub histogram: u64,
        /// u8 `[16]`.
        pub palette: u64,
        /// u8 `[16]`.
        pub code_lengths: u64,
        /// u32 `[256]`: code | length << 16 | palette index << 24.
        pub encode_table: u64,
        /// Must be 0.
        pub reserved: u64,
        /// u8 `[tiles, 64]`.
        pub row_lengths: u64,
        /// `[tiles]` of 16 bytes.
        pub tile_metadata: u64,
        /// u32 `[capacity_words]`, zeroed before `write`.
        pub encoded_exp: u64,
        /// u8 `[capacity_rows, 64]`.
        pub verbatim_exponents: u64,
        /// u8 `[tiles, 64, 32]`, stage `palette` only.
        pub palette_index: u64,
        /// u64 `[4]`: words, verbatim rows, maximum of verbatim rows in a tile, fault.
        pub totals: u64,
        /// u64 scratch of `scan`, zeroed.
        pub scan_state: u64,
        /// Words that fit in `encoded_exp`.
        pub capacity_words: u64,
        /// Rows that fit in `verbatim_exponents`.
        pub capacity_rows: u32,
        /// Code limit L.
        pub code_limit: u32,
        /// Output features.
        pub n: u32,
        /// Input features.
        pub k: u32,
        /// `ceil(n / 64)`.
        pub tile_rows: u32,
        /// `ceil(k / 64)`.
        pub tile_cols: u32,
    }
}

impl VariantSpec {
    /// Returns an encoder stage.
    pub const fn encode_huffman(arch: Arch, stage: EncodeHuffmanStage) -> Self {
        Self { arch, op: super::Op::EncodeHuffman(EncodeHuffmanSpec { stage }) }
    }
}

/// 256 counters, with one column per lane.
const HISTOGRAM_COUNTERS: u32 = 256;
const LANES: u32 = 32;
/// Warps of a block in stages that process one tile per warp.
const TILE_WARPS: u32 = 8;
const TILE_BLOCKS_PER_SM: u32 = 4;
/// The table by exponent that these stages read.
const EXPONENT_TABLE_BYTES: u32 = 256 * 4;
/// A tile has at most 64 * 319 bits = 638 words, rounded up to 16 B.
const TILE_BUFFER_BYTES: u32 = 640 * 4;
const SCAN_TILES_PER_BLOCK: u32 = 1024;

impl EncodeHuffmanSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let tiles = LaunchGrid::Persistent {
            work: Work::WeightTiles,
            per_block: TILE_WARPS,
            blocks_per_sm: TILE_BLOCKS_PER_SM,
        };
        let none = SmemPlan::new();
        let (smem, warps, blocks_per_sm, grid) = match self.stage {
            EncodeHuffmanStage::Stats => (
                none.section("histogram", HISTOGRAM_COUNTERS, LANES * 4, 16),
                16,
                4,
                LaunchGrid::Persistent { work: Work::WeightTiles, per_block: 1, blocks_per_sm: 4 },
            ),
            EncodeHuffmanStage::Table => (none.section("work", 1, 4096, 16), 8, 1, LaunchGrid::Fixed(1)),
            EncodeHuffmanStage::Rows | EncodeHuffmanStage::Palette => {
                (none.section("exponent_table", 1, EXPONENT_TABLE_BYTES, 16), TILE_WARPS, TILE_BLOCKS_PER_SM, tiles)
            }
            EncodeHuffmanStage::Scan => (
                none.section("work", 1, 1024, 16),
                8,
                1,
                // Each block processes its own tiles and waits for the sums of the blocks before it, so the grid must
                // cover the tiles exactly.
                LaunchGrid::Covering { work: Work::WeightTiles, per_block: SCAN_TILES_PER_BLOCK },
            ),
            EncodeHuffmanStage::Write => (
                none.section("exponent_table", 1, EXPONENT_TABLE_BYTES, 16).section(
                    "tile",
                    TILE_WARPS,
                    TILE_BUFFER_BYTES,
                    16,
                ),
                TILE_WARPS,
                TILE_BLOCKS_PER_SM,
                tiles,
            ),
        };
        Ok(BlockPlan {
            smem,
            pipeline: None,
            roles: RolePlan::one("encode", warps),
            launch: LaunchPlan::ordinary(warps * arch.limits().warp_threads, blocks_per_sm, grid),
        })
    }
}

impl Family for EncodeHuffmanSpec {
    type Args = EncodeHuffmanArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[
        Edge { from: EncodingId::RAW, to: EncodingId::HUFFMAN },
        Edge { from: EncodingId::RAW, to: EncodingId::PALETTE },
    ];

    fn edges(&self) -> &'static [Edge] {
        match self.stage {
            EncodeHuffmanStage::Write => &Self::EDGES[..1],
            EncodeHuffmanStage::Palette => &Self::EDGES[1..],
            _ => Self::EDGES,
        }
    }

    fn summary(&self, _: &BlockPlan) -> String {
        let summary = match self.stage {
            EncodeHuffmanStage::Stats => "Elements -> sign_mantissa and the histogram of exponents.",
            EncodeHuffmanStage::Table => "Histogram -> palette, code lengths and encode table.",
            EncodeHuffmanStage::Rows => "Elements -> row lengths, verbatim rows, and words and rows of each tile.",
            EncodeHuffmanStage::Scan => "Words and rows of each tile -> offsets and totals.",
            EncodeHuffmanStage::Write => "Elements and offsets -> bitstream and verbatim rows.",
            EncodeHuffmanStage::Palette => "Elements and offsets -> packed palette indices and verbatim rows.",
        };
        summary.to_owned()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        EncodeHuffmanStage::ALL.iter().map(move |stage| VariantSpec::encode_huffman(arch, *stage))
    }
}
