use super::{Grid, LaunchPlan, Plan, RolePlan, SmemPlan, Work};
use crate::spec::{EncodeSpec, VariantSpec};
pub(super) const fn plan(spec: &VariantSpec, _op: &EncodeSpec) -> Plan {
    let warps = 8;
    Plan {
        spec: *spec,
        smem: SmemPlan::new(),
        pipeline: None,
        roles: RolePlan::one("encode", warps),
        launch: LaunchPlan {
            threads: warps * 32,
            blocks_per_sm: 1,
            grid: Grid::Covering { work: Work::WeightTiles, per_block: warps },
        },
    }
}
