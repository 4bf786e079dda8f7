//! The conversions between BF16 and the packed form: `templates/include/unweight/kernels/repack.cuh`.

use super::{LaunchGrid, LaunchPlan, Plan, RolePlan, SmemPlan, Work};
use crate::spec::{RepackSpec, RepackStage, VariantSpec};

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;
/// A warp takes a row block, a quarter of a tile.
const TILES_PER_BLOCK: u32 = 2;
/// Eight row blocks a warp.
const LIST_TILES_PER_BLOCK: u32 = 16;

pub(super) const fn plan(spec: &VariantSpec, op: &RepackSpec) -> Plan {
    let work = Work::WeightTiles;
    let none = SmemPlan::new();
    let (smem, grid) = match op.stage {
        RepackStage::Pack | RepackStage::Unpack => (none, LaunchGrid::Covering { work, per_block: TILES_PER_BLOCK }),
        // Per warp its own words and those of the groups before.
        RepackStage::Lists => {
            (none.section("sums", WARPS, 8, 8), LaunchGrid::Covering { work, per_block: LIST_TILES_PER_BLOCK })
        }
    };
    Plan {
        spec: *spec,
        smem,
        pipeline: None,
        roles: RolePlan::one("convert", WARPS),
        launch: LaunchPlan::ordinary(WARPS * spec.arch.limits().warp_threads, BLOCKS_PER_SM, grid),
    }
}
