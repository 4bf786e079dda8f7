//! The register-sourced family for large batches: `templates/include/unweight/kernels/fused_wide.cuh`.
//!
//! ```text
//! bytes = stages * (batch_tile * 128 + warpgroups * 6144 + 16)    X and packed weights of 64 k, a full and an empty barrier
//! ```

use super::{Grid, Infeasible, LaunchPlan, PipelinePlan, Plan, Problem, Role, RolePlan, SmemPlan, Work, WorkspacePlan};
use crate::spec::{FusedStages, FusedWideSpec, VariantSpec, Warpgroups};

/// A row of X: 64 columns, bf16.
const X_ROW_BYTES: u32 = 128;
/// Rows and columns of a stored tile, 12 bits an element.
const TILE: u32 = 64;
const TILE_BYTES: u32 = 6144;
const SWIZZLE_ALIGN: u32 = 1024;
const BULK_ALIGN: u32 = 128;
const MBARRIER_BYTES: u32 = 8;
/// A full and an empty one.
const BARRIERS_PER_STAGE: u32 = 2;
const PRODUCER_WARPS: u32 = 4;
const BLOCKS_PER_SM: u32 = 1;

/// X and W of one stage.
const fn stage_bytes(op: &FusedWideSpec) -> u32 {
    op.batch_tile.get() * X_ROW_BYTES + op.warpgroups.get() * TILE_BYTES
}

const fn smem(op: &FusedWideSpec) -> SmemPlan {
    let stages = op.stages.get();
    SmemPlan::new()
        .section("x", stages, op.batch_tile.get() * X_ROW_BYTES, SWIZZLE_ALIGN)
        .section("w", stages, op.warpgroups.get() * TILE_BYTES, BULK_ALIGN)
        .section("barriers", stages, BARRIERS_PER_STAGE * MBARRIER_BYTES, MBARRIER_BYTES)
}

const fn fits(spec: &VariantSpec, op: &FusedWideSpec) -> bool {
    smem(op).bytes() <= spec.arch.limits().smem_bytes_per_block
}

/// The most stages that fit, all else being equal.
const fn fitting_stages(spec: &VariantSpec, op: &FusedWideSpec) -> Option<u32> {
    let mut stages = op.stages.get();
    while let Ok(value) = FusedStages::new(stages - 1) {
        if fits(spec, &FusedWideSpec { stages: value, ..*op }) {
            return Some(value.get());
        }
        stages -= 1;
    }
    None
}

/// The most warpgroups that fit, all else being equal.
const fn fitting_warpgroups(spec: &VariantSpec, op: &FusedWideSpec) -> Option<(&'static str, u32)> {
    let mut warpgroups = op.warpgroups.get();
    while let Ok(value) = Warpgroups::new(warpgroups - 1) {
        if fits(spec, &FusedWideSpec { warpgroups: value, ..*op }) {
            return Some(("warpgroups", value.get()));
        }
        warpgroups -= 1;
    }
    None
}

pub(super) const fn plan(spec: &VariantSpec, op: &FusedWideSpec) -> Result<Plan, Infeasible> {
    let limits = spec.arch.limits();
    let (smem, stages) = (smem(op), op.stages.get());
    if !fits(spec, op) {
        let stage_bytes = stage_bytes(op) + BARRIERS_PER_STAGE * MBARRIER_BYTES;
        return Err(Infeasible::SharedMemory {
            spec: *spec,
            fixed_bytes: smem.bytes() - stages * stage_bytes,
            stages,
            stage_bytes,
            limit_bytes: limits.smem_bytes_per_block,
            fitting_stages: fitting_stages(spec, op),
            fitting_other: fitting_warpgroups(spec, op),
        });
    }
    let consumer_warps = op.warpgroups.get() * limits.warpgroup_warps;
    let work = Work::OutputTiles { rows: op.batch_tile.get(), columns: op.warpgroups.get() * TILE };
    Ok(Plan {
        spec: *spec,
        smem,
        pipeline: Some(PipelinePlan {
            rings: 1,
            stages,
            stage_bytes: stage_bytes(op),
            full_arrivals: 1,
            empty_arrivals: consumer_warps,
        }),
        roles: RolePlan {
            first: Role { name: "load", warps: PRODUCER_WARPS, registers: None },
            second: Some(Role { name: "decode and multiply", warps: consumer_warps, registers: None }),
        },
        launch: LaunchPlan {
            threads: (PRODUCER_WARPS + consumer_warps) * limits.warp_threads,
            blocks_per_sm: BLOCKS_PER_SM,
            grid: Grid::Persistent { work, per_block: 1, blocks_per_sm: BLOCKS_PER_SM },
            cluster: 1,
            dependent: op.dependent,
        },
    })
}

pub(super) fn workspace(op: &FusedWideSpec, problem: Problem, _sms: u32) -> WorkspacePlan {
    if op.dump { WorkspacePlan::operands(problem) } else { WorkspacePlan::default() }
}
