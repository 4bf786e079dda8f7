use super::{Grid, LaunchPlan, Plan, RolePlan, SmemPlan, Work};
use crate::spec::{DecodeSpec, VariantSpec};
pub(super) const fn plan(spec: &VariantSpec, _op: &DecodeSpec) -> Plan {
    let warps = 8;
    Plan {
        spec: *spec,
        smem: SmemPlan::new().section("table", 1, 1024, 16),
        pipeline: None,
        roles: RolePlan::one("decode", warps),
        launch: LaunchPlan {
            threads: warps * 32,
            blocks_per_sm: 1,
            grid: Grid::Persistent { work: Work::WeightTiles, per_block: warps, blocks_per_sm: 1 },
        },
    }
}
