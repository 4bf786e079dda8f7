//! The register-sourced family for large batches: `templates/include/unweight/kernels/gemm_wgmma.cuh`.
//!
//! ```text
//! bytes   = stages * (batch_tile * 128 + warpgroups * (6144 + escapes * 256) + 16) + warpgroups * (buffers * store_rows * 128 + 8)
//! buffers = pieces of store_rows batch rows in which a warpgroup stores its part of Y, 2 at least and 3 at most
//! ```

use super::{
    GemmShape, Infeasible, LaunchGrid, LaunchPlan, PipelinePlan, Plan, Role, RolePlan, SmemPlan, Work, WorkspacePlan,
    named,
};
use crate::spec::{Epilogue, GemmWgmmaSpec, VariantSpec, Warpgroups, WideStages};

/// A row of X, or of a piece of Y: 64 elements, bf16.
const ROW_BYTES: u32 = 128;
/// Rows and columns of a stored tile, 12 bits an element.
const TILE: u32 = 64;
const TILE_BYTES: u32 = 6144;
/// Records of the escapes of a tile, beside it in a stage.
const TILE_RECORD_BYTES: u32 = 256;
const SWIZZLE_ALIGN: u32 = 1024;
const BULK_ALIGN: u32 = 128;
const MBARRIER_BYTES: u32 = 8;
/// A full and an empty barrier.
const RING_SLOT_BARRIER_BYTES: u32 = 2 * MBARRIER_BYTES;
/// One warpgroup, though at most four warps of it work: `setmaxnreg` is for whole warpgroups.
const PRODUCER_WARPS: u32 = 4;
/// The registers of an SM are one block's.
const BLOCKS_PER_SM: u32 = 1;

/// Batch rows of a piece of Y.
const fn store_rows(op: &GemmWgmmaSpec) -> u32 {
    // In a cluster smaller pieces: they are shared out.
    let large = op.batch_tile.get().is_multiple_of(64) && op.batch_tile.get() > 64 && op.cluster.get() == 1;
    if large { 64 } else { 32 }
}

/// Pieces of Y that a warpgroup has under way.
const fn store_buffers(op: &GemmWgmmaSpec) -> u32 {
    if op.batch_tile.get() / store_rows(op) <= 2 { 2 } else { 3 }
}

/// Records of one stage.
const fn record_bytes(op: &GemmWgmmaSpec) -> u32 {
    if op.escapes { op.warpgroups.get() * TILE_RECORD_BYTES } else { 0 }
}

/// X, W and records of one stage.
const fn stage_bytes(op: &GemmWgmmaSpec) -> u32 {
    op.batch_tile.get() * ROW_BYTES + op.warpgroups.get() * TILE_BYTES + record_bytes(op)
}

/// X and W of all stages.
const fn ring_bytes(op: &GemmWgmmaSpec) -> u32 {
    op.stages.get() * (stage_bytes(op) - record_bytes(op))
}

const fn smem(op: &GemmWgmmaSpec) -> SmemPlan {
    let (stages, warpgroups) = (op.stages.get(), op.warpgroups.get());
    SmemPlan::new()
        .section("x", stages, op.batch_tile.get() * ROW_BYTES, SWIZZLE_ALIGN)
        .section("w", stages, warpgroups * TILE_BYTES, BULK_ALIGN)
        .section("staging", warpgroups * store_buffers(op), store_rows(op) * ROW_BYTES, SWIZZLE_ALIGN)
        .section("records", stages, record_bytes(op), MBARRIER_BYTES)
        .section("barriers", stages, RING_SLOT_BARRIER_BYTES, MBARRIER_BYTES)
        .section("old_barriers", warpgroups, MBARRIER_BYTES, MBARRIER_BYTES)
}

const fn fits(spec: &VariantSpec, op: &GemmWgmmaSpec) -> bool {
    smem(op).bytes() <= spec.arch.limits().smem_bytes_per_block
}

/// Registers per thread of the loading and the multiplying warpgroups: 128 x (56 + 2 x 224) and 128 x (56 + 3 x 152) fit the 65536 of an
/// SM. With one warpgroup every thread has what it can address.
const fn registers(op: &GemmWgmmaSpec) -> (Option<u32>, Option<u32>) {
    match op.warpgroups.get() {
        1 => (None, None),
        2 => (Some(56), Some(224)),
        _ => (Some(56), Some(152)),
    }
}

pub(super) const fn plan(spec: &VariantSpec, op: &GemmWgmmaSpec) -> Result<Plan, Infeasible> {
    let limits = spec.arch.limits();
    let (smem, stages) = (smem(op), op.stages.get());
    if matches!(op.epilogue, Epilogue::SiluMul) {
        return Err(Infeasible::without_silu_mul(spec));
    }
    if op.dump && op.stream_k {
        return Err(Infeasible::Conflict {
            spec: *spec,
            what: "dump and stream_k both need the workspace; leave one out",
        });
    }
    if op.stream_k && op.cluster.get() > 1 {
        return Err(Infeasible::Conflict {
            spec: *spec,
            what: "stream_k and cluster both share out k; take cluster = 1 or stream_k = false",
        });
    }
    if op.cluster.get() > 1 && op.warpgroups.get() * TILE * op.batch_tile.get() * 4 > ring_bytes(op) {
        return Err(Infeasible::Conflict {
            spec: *spec,
            what: "the fp32 sums that a cluster exchanges exceed the ring of X and W; take more stages or fewer warpgroups",
        });
    }
    if !fits(spec, op) {
        let stage_bytes = stage_bytes(op) + RING_SLOT_BARRIER_BYTES;
        return Err(Infeasible::SharedMemory {
            spec: *spec,
            fixed_bytes: smem.bytes() - stages * stage_bytes,
            stages,
            stage_bytes,
            limit_bytes: limits.smem_bytes_per_block,
            fitting_stages: most_fitting!(fits(spec, op), GemmWgmmaSpec { stages: WideStages }),
            fitting_other: named("warpgroups", most_fitting!(fits(spec, op), GemmWgmmaSpec { warpgroups: Warpgroups })),
        });
    }
    let consumer_warps = op.warpgroups.get() * limits.warpgroup_warps;
    let (rows, columns) = (op.batch_tile.get(), op.warpgroups.get() * TILE);
    let work = if op.stream_k { Work::OutputSteps { rows, columns } } else { Work::OutputTiles { rows, columns } };
    let grid = match op.cluster.get() {
        1 => LaunchGrid::Persistent { work, per_block: 1, blocks_per_sm: BLOCKS_PER_SM },
        cluster => LaunchGrid::Clusters { work, cluster },
    };
    let (producer_registers, consumer_registers) = registers(op);
    Ok(Plan {
        spec: *spec,
        smem,
        pipeline: Some(PipelinePlan {
            rings: 1,
            stages,
            stage_bytes: stage_bytes(op),
            // Of the lane that loads, and of the warps that bring records.
            full_arrivals: if op.escapes { 1 + op.warpgroups.get() } else { 1 },
            empty_arrivals: consumer_warps,
        }),
        roles: RolePlan {
            first: Role { name: "load and find escapes", warps: PRODUCER_WARPS, registers: producer_registers },
            second: Some(Role { name: "decode and multiply", warps: consumer_warps, registers: consumer_registers }),
        },
        launch: LaunchPlan {
            threads: (PRODUCER_WARPS + consumer_warps) * limits.warp_threads,
            blocks_per_sm: BLOCKS_PER_SM,
            grid,
            cluster: op.cluster.get(),
            pdl: op.pdl,
            co_resident: op.stream_k,
        },
    })
}

/// Tiles of Y to which a block can leave a part of the sum: that in which its share of k begins, and that in which it ends.
const SHARED_TILES: u64 = 2;

/// fp32 sums of those tiles, and a counter for each warpgroup of each.
pub(super) fn workspace(op: &GemmWgmmaSpec, problem: GemmShape, blocks: u64) -> WorkspacePlan {
    if op.dump {
        return WorkspacePlan::operands(problem);
    }
    if !op.stream_k {
        return WorkspacePlan::default();
    }
    let parts = SHARED_TILES * blocks * u64::from(op.warpgroups.get());
    WorkspacePlan { bytes: parts * u64::from(TILE * op.batch_tile.get() * 4), counters: parts }
}
