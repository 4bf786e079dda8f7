//! The report's matmul family: `templates/include/unweight/kernels/gemm_recon.cuh`.
//!
//! ```text
//! bytes = fixed(n) + stages * stage(n)
//! fixed = X that no stage pays for + three buffers of joined weights + the barriers of that X
//! stage = n * (sign-mantissa tile + exponent tile or (nibbles + verbatim rows + bitmask)) + two barriers + its share of X
//! ```
//!
//! With two tiles the weights own the rows of wgmma (`weight_rows`): X has a ring of 768 rows, whatever the stages are. With 1, 3 or
//! 4 (`batch_rows`) X has 128 rows per stage, and one slot more.

use super::{Infeasible, LaunchGrid, LaunchPlan, PipelinePlan, Plan, Role, RolePlan, SmemPlan, Work, named};
use crate::spec::{Epilogue, GemmReconSpec, NTiles, Stages, VariantSpec, WeightSource};

/// Rows and columns of a stored tile, and the k step.
const TILE: u32 = 64;
/// Warpgroups that multiply, 64 rows of X each.
const CONSUMER_WARPGROUPS: u32 = 2;
const CONSUMER_WARPS: u32 = 4 * CONSUMER_WARPGROUPS;
const PRODUCER_WARPS: u32 = 4;
/// Registers per thread of the two roles; 128 x 40 + 256 x 232 = 384 x 168, what one block per SM leaves.
const PRODUCER_REGISTERS: u32 = 40;
const CONSUMER_REGISTERS: u32 = 232;
const BLOCKS_PER_SM: u32 = 1;

/// 64 rows and 64 columns of X, bf16.
const X_BOX_BYTES: u32 = TILE * TILE * 2;
/// The tensor cores hold X longer than the sources are held, so its ring is deeper.
const X_STAGES_MORE: u32 = 1;
/// Slots of X where the weights own the rows: three of 256 rows, six of 128 or twelve of 64, as the batch asks.
const WEIGHT_ROWS_X_SLOTS: u32 = 3;
const WEIGHT_ROWS_X_BOXES: u32 = 4;
/// Joined weights, bf16: one buffer is filled while two are multiplied.
const B_BUFFERS: u32 = 3;
const B_TILE_BYTES: u32 = TILE * TILE * 2;
const SIGN_TILE_BYTES: u32 = TILE * TILE;
/// A full and an empty barrier.
const RING_SLOT_BARRIER_BYTES: u32 = 2 * 8;
/// Where a swizzled tile may begin.
const SWIZZLE_ALIGN: u32 = 1024;

/// The ring of X.
struct Activations {
    slots: u32,
    slot_bytes: u32,
    /// Slots that have barriers: a slot can be as small as one box.
    barriers: u32,
    /// Of those, what each stage adds: slots, or none.
    slots_per_stage: u32,
}

impl Activations {
    const fn new(op: &GemmReconSpec) -> Self {
        if weights_own_rows(op) {
            Self {
                slots: WEIGHT_ROWS_X_SLOTS,
                slot_bytes: WEIGHT_ROWS_X_BOXES * X_BOX_BYTES,
                barriers: WEIGHT_ROWS_X_SLOTS * WEIGHT_ROWS_X_BOXES,
                slots_per_stage: 0,
            }
        } else {
            let slots = op.stages.get() + X_STAGES_MORE;
            Self { slots, slot_bytes: CONSUMER_WARPGROUPS * X_BOX_BYTES, barriers: slots, slots_per_stage: 1 }
        }
    }
}

/// A warpgroup owns a tile of W and computes a part of Y transposed.
const fn weights_own_rows(op: &GemmReconSpec) -> bool {
    op.n_tiles.get() == CONSUMER_WARPGROUPS
}

/// What one tile of W needs in a stage beside its sign-mantissa bytes.
struct Source {
    exponent_bytes: u32,
    verbatim_bytes: u32,
    mask_bytes: u32,
}

impl Source {
    const fn new(op: &GemmReconSpec) -> Self {
        match op.source {
            WeightSource::Exponent => Self { exponent_bytes: TILE * TILE, verbatim_bytes: 0, mask_bytes: 0 },
            WeightSource::Palette { verbatim } => Self {
                exponent_bytes: TILE * TILE / 2,
                verbatim_bytes: verbatim.get() * TILE,
                mask_bytes: if verbatim.get() > 0 { 8 } else { 0 },
            },
        }
    }

    const fn bytes(&self) -> u32 {
        self.exponent_bytes + self.verbatim_bytes + self.mask_bytes
    }
}

const fn smem(op: &GemmReconSpec) -> SmemPlan {
    let (n, stages) = (op.n_tiles.get(), op.stages.get());
    let x = Activations::new(op);
    let source = Source::new(op);
    SmemPlan::new()
        .section("x", x.slots, x.slot_bytes, SWIZZLE_ALIGN)
        .section("b", B_BUFFERS, n * B_TILE_BYTES, SWIZZLE_ALIGN)
        .section("sign", stages, n * SIGN_TILE_BYTES, 128)
        .section("exponent", stages, n * source.exponent_bytes, 128)
        .section("verbatim", stages, n * source.verbatim_bytes, 16)
        .section("mask", stages, n * source.mask_bytes, 8)
        .section("source_barriers", stages, RING_SLOT_BARRIER_BYTES, 8)
        .section("x_barriers", x.barriers, RING_SLOT_BARRIER_BYTES, 8)
}

/// What each stage costs.
const fn stage_bytes(op: &GemmReconSpec) -> u32 {
    let x = Activations::new(op);
    op.n_tiles.get() * (SIGN_TILE_BYTES + Source::new(op).bytes())
        + RING_SLOT_BARRIER_BYTES
        + x.slots_per_stage * (x.slot_bytes + RING_SLOT_BARRIER_BYTES)
}

const fn fits(spec: &VariantSpec, op: &GemmReconSpec) -> bool {
    smem(op).bytes() <= spec.arch.limits().smem_bytes_per_block
}

pub(super) const fn plan(spec: &VariantSpec, op: &GemmReconSpec) -> Result<Plan, Infeasible> {
    let smem = smem(op);
    let stages = op.stages.get();
    if matches!(op.epilogue, Epilogue::SiluMul) {
        return Err(Infeasible::without_silu_mul(spec));
    }
    if !fits(spec, op) {
        return Err(Infeasible::SharedMemory {
            spec: *spec,
            fixed_bytes: smem.bytes() - stages * stage_bytes(op),
            stages,
            stage_bytes: stage_bytes(op),
            limit_bytes: spec.arch.limits().smem_bytes_per_block,
            fitting_stages: most_fitting!(fits(spec, op), GemmReconSpec { stages: Stages }),
            fitting_other: named("n", most_fitting!(fits(spec, op), GemmReconSpec { n_tiles: NTiles })),
        });
    }
    // The finest cut: where the weights own the rows, a task can be as small as one box of X.
    let rows = if weights_own_rows(op) { TILE } else { CONSUMER_WARPGROUPS * TILE };
    let work = Work::OutputTiles { rows, columns: op.n_tiles.get() * TILE };
    Ok(Plan {
        spec: *spec,
        smem,
        // The ring of the weights: warp 0 arrives with the bytes, each consumer warp once its lanes have joined.
        pipeline: Some(PipelinePlan {
            rings: 1,
            stages,
            stage_bytes: stage_bytes(op),
            full_arrivals: 1,
            empty_arrivals: CONSUMER_WARPS,
        }),
        roles: RolePlan {
            first: Role { name: "load", warps: PRODUCER_WARPS, registers: Some(PRODUCER_REGISTERS) },
            second: Some(Role {
                name: "join and multiply",
                warps: CONSUMER_WARPS,
                registers: Some(CONSUMER_REGISTERS),
            }),
        },
        launch: LaunchPlan::ordinary(
            (PRODUCER_WARPS + CONSUMER_WARPS) * spec.arch.limits().warp_threads,
            BLOCKS_PER_SM,
            LaunchGrid::Persistent { work, per_block: 1, blocks_per_sm: BLOCKS_PER_SM },
        ),
    })
}
