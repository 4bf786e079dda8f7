//! The encoding family: `templates/include/unweight/kernels/encode.cuh`.

use super::{LaunchGrid, LaunchPlan, Plan, RolePlan, SmemPlan, Work};
use crate::spec::{EncodeSpec, EncodeStage, VariantSpec};

/// 256 counters, one column per lane.
const HISTOGRAM_COUNTERS: u32 = 256;
const LANES: u32 = 32;
/// Stages that take a tile per warp.
const TILE_WARPS: u32 = 8;
const TILE_BLOCKS_PER_SM: u32 = 4;
/// What those stages look up per exponent.
const EXPONENT_TABLE_BYTES: u32 = 256 * 4;
/// A tile has at most 64 * 319 bits = 638 words, rounded up to 16 B.
const TILE_BUFFER_BYTES: u32 = 640 * 4;
const SCAN_TILES_PER_BLOCK: u32 = 1024;
const DECODE_TABLE_BLOCKS: u32 = 128;

pub(super) const fn plan(spec: &VariantSpec, op: &EncodeSpec) -> Plan {
    let tiles =
        LaunchGrid::Persistent { work: Work::WeightTiles, per_block: TILE_WARPS, blocks_per_sm: TILE_BLOCKS_PER_SM };
    let none = SmemPlan::new();
    let (smem, warps, blocks_per_sm, grid) = match op.stage {
        EncodeStage::Stats => (
            none.section("histogram", HISTOGRAM_COUNTERS, LANES * 4, 16),
            16,
            4,
            LaunchGrid::Persistent { work: Work::WeightTiles, per_block: 1, blocks_per_sm: 4 },
        ),
        EncodeStage::Table => (none.section("work", 1, 4096, 16), 8, 1, LaunchGrid::Fixed(1)),
        EncodeStage::DecodeTable => (none, 8, 1, LaunchGrid::Fixed(DECODE_TABLE_BLOCKS)),
        EncodeStage::Rows | EncodeStage::Palette => {
            (none.section("exponent_table", 1, EXPONENT_TABLE_BYTES, 16), TILE_WARPS, TILE_BLOCKS_PER_SM, tiles)
        }
        EncodeStage::Scan => (
            none.section("work", 1, 1024, 16),
            8,
            1,
            // Blocks wait for the sums of those before them, each for its own tiles: no other number is right.
            LaunchGrid::Covering { work: Work::WeightTiles, per_block: SCAN_TILES_PER_BLOCK },
        ),
        EncodeStage::Write => (
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
    Plan {
        spec: *spec,
        smem,
        pipeline: None,
        roles: RolePlan::one("encode", warps),
        launch: LaunchPlan::ordinary(warps * spec.arch.limits().warp_threads, blocks_per_sm, grid),
    }
}
