//! The preprocess family: `templates/include/unweight/kernels/decode.cuh`.

use super::{LaunchGrid, LaunchPlan, PipelinePlan, Plan, RolePlan, SmemPlan, Work};
use crate::spec::{CodeLimit, DecodeOutput, DecodeSpec, VariantSpec};

/// One block fills an SM: the table is then built and held once per SM.
const BLOCKS_PER_SM: u32 = 1;
const WARPS: u32 = 32;
/// Buffers of a warp for the bits of a tile: one per half.
const STAGES: u32 = 2;
/// 16 B in front, and 32 rows of at most 319 bits rounded out to 16 B at both ends.
const STAGE_BYTES: u32 = 16 + 1312;
const MBARRIER_BYTES: u32 = 8;
/// Code words and single-symbol entries while the table is built.
const SCRATCH_BYTES: u32 = 1024;
/// Up to here a table is repeated, so that lanes look up in different banks.
const TABLE_BYTES_MAX: u32 = 65_536;
const TABLE_COPIES_MAX: u32 = 32;
/// A half tile, one row per lane, is staged before it is written.
const ROWS_PER_HALF: u32 = 32;

/// Bytes of the lookup table. Up to 7 bits: one table of pairs, indexed by two codes. Above: single symbols, repeated.
const fn table_bytes(output: DecodeOutput, limit: CodeLimit) -> u32 {
    let bits = limit.get();
    if bits <= 7 {
        return (if matches!(output, DecodeOutput::Exponent) { 4 } else { 2 }) << (2 * bits);
    }
    let one = (if bits == 15 { 2 } else { 4 }) << bits;
    let fit = TABLE_BYTES_MAX / one;
    one * if fit < TABLE_COPIES_MAX { fit } else { TABLE_COPIES_MAX }
}

pub(super) const fn plan(spec: &VariantSpec, op: &DecodeSpec) -> Plan {
    // `full` decodes to indices, too: its table and staging area are then half as large, and 32 warps fit their registers.
    let row_bytes = if matches!(op.output, DecodeOutput::Exponent) { 64 } else { 32 };
    let warps = WARPS;
    let smem = SmemPlan::new()
        .section("table", 1, table_bytes(op.output, op.code_limit), 16)
        .section("scratch", 1, SCRATCH_BYTES, 16)
        .section("barriers", STAGES * warps, MBARRIER_BYTES, 8)
        .section("stage", STAGES * warps, STAGE_BYTES, 16)
        .section("output", warps, ROWS_PER_HALF * row_bytes, 16);
    Plan {
        spec: *spec,
        smem,
        // Private to a warp, which knows its own progress: no barrier says that a stage is empty.
        pipeline: Some(PipelinePlan {
            rings: warps,
            stages: STAGES,
            stage_bytes: STAGE_BYTES,
            full_arrivals: 1,
            empty_arrivals: 0,
        }),
        roles: RolePlan::one("decode", warps),
        launch: LaunchPlan::ordinary(
            warps * spec.arch.limits().warp_threads,
            BLOCKS_PER_SM,
            LaunchGrid::Persistent { work: Work::WeightTiles, per_block: 1, blocks_per_sm: BLOCKS_PER_SM },
        ),
    }
}
