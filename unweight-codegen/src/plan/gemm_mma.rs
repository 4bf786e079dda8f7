//! The register-sourced family for small batches: `templates/include/unweight/kernels/gemm_mma.cuh`.
//!
//! ```text
//! bytes = warps * (align1024(stages * stage) + 8 * stages + stream * sums)
//! stage = batch_tile * 128 + row_blocks * 1536        X of 64 k, packed weights of 64 k
//! sums  = row_blocks * batch_tile * 64                fp32; without `persistent` they lie over the drained ring
//! ```

use super::{
    GemmShape, Infeasible, LaunchGrid, LaunchPlan, PipelinePlan, Plan, RolePlan, SmemPlan, WorkspacePlan, named,
};
use crate::spec::{Epilogue, GemmMmaSpec, SmallStages, VariantSpec, Warps};

/// A row of X: 64 columns, bf16.
const X_ROW_BYTES: u32 = 128;
/// 16 rows and 64 columns of W, 12 bits each.
const BLOCK_BYTES: u32 = 1536;
const BLOCK_ROWS: u32 = 16;
/// Where the copy engine's swizzle repeats, and with it each ring.
const SWIZZLE_ALIGN: u32 = 1024;
const MBARRIER_BYTES: u32 = 8;
/// Two blocks of one kernel hide each other's start and end; with three of 8 warps the registers no longer hold the decode.
const BLOCKS_PER_SM_MAX: u32 = 2;
/// Below this many registers per thread one block has the SM for itself: even a single row block would be short of them.
const REGISTERS_MIN: u32 = 80;

/// Row blocks that one task must have together: of a gate and of its up.
const fn together(op: &GemmMmaSpec) -> u32 {
    if matches!(op.epilogue, Epilogue::SiluMul) { 2 } else { 1 }
}

/// X and W of one slot of a warp's ring.
const fn slot_bytes(op: &GemmMmaSpec) -> u32 {
    op.batch_tile.get() * X_ROW_BYTES + op.row_blocks.get() * BLOCK_BYTES
}

/// One warp's ring.
const fn ring_bytes(op: &GemmMmaSpec) -> u32 {
    (op.stages.get() * slot_bytes(op)).next_multiple_of(SWIZZLE_ALIGN)
}

/// One warp's sums, fp32.
const fn sum_bytes(op: &GemmMmaSpec) -> u32 {
    op.row_blocks.get() * BLOCK_ROWS * op.batch_tile.get() * 4
}

const fn smem(op: &GemmMmaSpec) -> SmemPlan {
    let warps = op.warps.get();
    SmemPlan::new()
        .section("rings", warps, ring_bytes(op), SWIZZLE_ALIGN)
        .section("sums", if op.persistent { warps } else { 0 }, sum_bytes(op), SWIZZLE_ALIGN)
        .section("barriers", warps * op.stages.get(), MBARRIER_BYTES, MBARRIER_BYTES)
}

const fn fits(spec: &VariantSpec, op: &GemmMmaSpec) -> bool {
    smem(op).bytes() <= spec.arch.limits().smem_bytes_per_block
}

pub(super) const fn plan(spec: &VariantSpec, op: &GemmMmaSpec) -> Result<Plan, Infeasible> {
    let limits = spec.arch.limits();
    let (smem, warps, stages) = (smem(op), op.warps.get(), op.stages.get());
    if !op.row_blocks.get().is_multiple_of(together(op)) {
        let what = "epilogue = silu_mul takes row blocks in pairs; row_blocks must be even";
        return Err(Infeasible::Conflict { spec: *spec, what });
    }
    let stage_bytes = warps * (slot_bytes(op) + MBARRIER_BYTES);
    if !fits(spec, op) {
        return Err(Infeasible::SharedMemory {
            spec: *spec,
            fixed_bytes: smem.bytes() - stages * stage_bytes,
            stages,
            stage_bytes,
            limit_bytes: limits.smem_bytes_per_block,
            fitting_stages: most_fitting!(fits(spec, op), GemmMmaSpec { stages: SmallStages }),
            fitting_other: named("warps", most_fitting!(fits(spec, op), GemmMmaSpec { warps: Warps })),
        });
    }
    if !op.persistent && sum_bytes(op) > ring_bytes(op) {
        return Err(Infeasible::SumsExceedRing {
            spec: *spec,
            sum_bytes: sum_bytes(op),
            ring_bytes: ring_bytes(op),
            fitting_stages: sum_bytes(op).div_ceil(slot_bytes(op)),
        });
    }
    let threads = warps * limits.warp_threads;
    let resident = limits.blocks_by_smem_and_threads(threads, smem.bytes());
    let mut blocks_per_sm = if resident < BLOCKS_PER_SM_MAX { resident } else { BLOCKS_PER_SM_MAX };
    while blocks_per_sm > 1 && limits.registers_for(threads, blocks_per_sm) < REGISTERS_MIN {
        blocks_per_sm -= 1;
    }
    Ok(Plan {
        spec: *spec,
        smem,
        pipeline: Some(PipelinePlan {
            rings: warps,
            stages,
            stage_bytes: slot_bytes(op),
            full_arrivals: 1,
            empty_arrivals: 0,
        }),
        roles: RolePlan::one("load, decode and multiply", warps),
        launch: LaunchPlan {
            threads,
            blocks_per_sm,
            grid: LaunchGrid::DealtRowBlocks {
                batch_rows: op.batch_tile.get(),
                rows: together(op) * BLOCK_ROWS,
                share: if op.persistent { None } else { Some(op.row_blocks.get() / together(op)) },
                cluster: op.cluster.get(),
                blocks_per_sm,
            },
            cluster: op.cluster.get(),
            pdl: op.pdl,
            co_resident: false,
        },
    })
}

pub(super) fn workspace(op: &GemmMmaSpec, problem: GemmShape) -> WorkspacePlan {
    if op.dump { WorkspacePlan::operands(problem) } else { WorkspacePlan::default() }
}
