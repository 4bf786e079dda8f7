//! Packed matmul for large batches, from packed weights: `templates/include/unweight/kernels/gemm_wgmma.cuh`.
//!
//! ```text
//! bytes    = stages * (batch_tile * 128 + warpgroups * (6144 + escapes * 256) + barriers)
//!            + warpgroups * (buffers * store_rows * 128 + 8)
//! barriers = 32 with late weights (batch tile 256, two warpgroups), else 16
//! buffers  = pieces of store_rows batch rows in which a warpgroup stores its part of Y, 2 or 3
//! ```

use super::{
    Edge, Family, Op, PRODUCT, VariantSpec,
    entry::Entry,
    gemm_mma::{GemmPackedArgs, PackedSummary},
    shared::{ClusterSize, Epilogue},
};
use crate::{
    axes::{Arch, axes, range_axis, set_axis},
    block::{
        BlockPlan, Constraint, GemmShape, LaunchGrid, LaunchPlan, PipelinePlan, Role, RolePlan, SmemPlan, Work,
        WorkspacePlan, largest_fitting, with_axis,
    },
    limits::{Instruction, Instructions},
};
use unweight_format::{EncodingId, raw::layout};

set_axis! {
    /// Batch rows of a `gemm_wgmma` variant's tile of Y: `n` of WGMMA, with the widths of `ptx/wgmma.cuh`.
    WideBatchTile, "batch_tile", [32, 64, 96, 128, 160, 192, 224, 256], "a multiple of 32 up to 256 (batch rows of op gemm_wgmma)"
}

range_axis! {
    /// Warpgroups of a `gemm_wgmma` block that multiply, 64 output features each.
    Warpgroups, "warpgroups", 1..=3, "1..=3 (of 64 output features; a fourth loads)"
}

range_axis! {
    /// Stages of the ring of a `gemm_wgmma` block.
    WideStages, "stages", 3..=16, "3..=16 (stages of op gemm_wgmma: one step multiplies, one is decoded, one is read)"
}

axes! {
    /// A variant of the packed family for large batches (`wgmma`): `64 * warpgroups` output features by
    /// `batch_tile` batch rows per output tile.
    pub struct GemmWgmmaSpec {
        /// Batch rows of an output tile.
        batch_tile: WideBatchTile "b",
        /// Warpgroups that multiply.
        warpgroups: Warpgroups "_g" = 2,
        /// Stages of the ring.
        stages: WideStages "p",
        /// Blocks that share the k of an output tile; each sums a part.
        cluster: ClusterSize "c" = 1 unnamed,
        /// Stream-K: the k steps of all output tiles are distributed evenly over the blocks. Otherwise a block computes
        /// whole output tiles.
        stream_k: flag "_streamk" = false,
        /// The kernel handles escapes ([`GemmMmaSpec::escapes`](super::GemmMmaSpec::escapes)).
        escapes: flag "_esc" = true,
        /// The kernel uses programmatic dependent launch ([`GemmMmaSpec::pdl`](super::GemmMmaSpec::pdl)).
        pdl: flag "_pdl" = false,
        /// How the product is stored.
        epilogue: Epilogue "_" = Store,
        /// The kernel also writes its operands to the workspace ([`GemmMmaSpec::dump`](super::GemmMmaSpec::dump)).
        dump: flag "_dump" = false,
    }
}

impl VariantSpec {
    /// Returns a packed matmul for large batches.
    pub const fn gemm_wgmma(arch: Arch, spec: GemmWgmmaSpec) -> Self {
        Self { arch, op: Op::GemmWgmma(spec) }
    }
}

/// The shapes that dispatch chooses from, by batch tile. Others that were measured hardly shorten products
/// (docs/records/2026-11-27/matmul-wgmma.csv).
pub const SHAPES: [GemmWgmmaSpec; 29] = [
    wide(64, 10, false),
    wide(64, 10, true),
    clustered(64, 2, 10, 2),
    clustered(64, 2, 10, 4),
    wide(96, 8, false),
    clustered(96, 2, 8, 2),
    clustered(96, 1, 10, 4),
    wide(128, 6, false),
    wide(128, 6, true),
    clustered(128, 2, 6, 2),
    clustered(128, 2, 6, 4),
    clustered(128, 1, 8, 2),
    clustered(128, 3, 5, 1),
    wide(160, 6, false),
    wide(160, 6, true),
    clustered(160, 2, 6, 2),
    clustered(160, 3, 4, 1),
    wide(192, 4, false),
    wide(192, 4, true),
    clustered(192, 2, 5, 2),
    clustered(192, 1, 7, 2),
    clustered(192, 1, 6, 1),
    wide(224, 5, false),
    wide(224, 5, true),
    clustered(224, 1, 6, 2),
    wide(256, 4, false),
    wide(256, 4, true),
    clustered(256, 1, 5, 2),
    clustered(256, 1, 5, 1),
];

const fn wide(batch_tile: u32, stages: u32, stream_k: bool) -> GemmWgmmaSpec {
    GemmWgmmaSpec { stream_k, ..clustered(batch_tile, 2, stages, 1) }
}

const fn clustered(batch_tile: u32, warpgroups: u32, stages: u32, cluster: u32) -> GemmWgmmaSpec {
    match (
        WideBatchTile::new(batch_tile),
        Warpgroups::new(warpgroups),
        WideStages::new(stages),
        ClusterSize::new(cluster),
    ) {
        (Ok(batch_tile), Ok(warpgroups), Ok(stages), Ok(cluster)) => GemmWgmmaSpec {
            batch_tile,
            warpgroups,
            stages,
            cluster,
            stream_k: false,
            escapes: true,
            pdl: false,
            epilogue: Epilogue::Store,
            dump: false,
        },
        _ => panic!("the shapes are within the axes"),
    }
}

/// A row of X, or of a piece of Y: 64 elements, bf16.
const ROW_BYTES: u32 = 128;
/// Rows and columns of a stored tile, with 12 bits per element.
const TILE: u32 = layout::TILE as u32;
const TILE_BYTES: u32 = layout::PACKED_TILE_BYTES as u32;
/// Records of the escapes of a tile, stored in a stage next to the tile.
const TILE_RECORD_BYTES: u32 = 256;
const SWIZZLE_ALIGN: u32 = 1024;
const BULK_ALIGN: u32 = 128;
const MBARRIER_BYTES: u32 = 8;
/// One warpgroup, of which at most four warps work: `setmaxnreg` applies to whole warpgroups.
const PRODUCER_WARPS: u32 = 4;
/// One block uses all registers of an SM.
const BLOCKS_PER_SM: u32 = 1;

/// Bytes of the barriers of one stage: a full and an empty one; with late weights (`kLateWeights` of the template), two
/// of each, for X and for W.
const fn barrier_bytes(spec: &GemmWgmmaSpec) -> u32 {
    let late_weights = spec.batch_tile.get() == 256 && spec.warpgroups.get() == 2;
    2 * MBARRIER_BYTES * if late_weights { 2 } else { 1 }
}

/// Batch rows of a piece of Y.
const fn store_rows(spec: &GemmWgmmaSpec) -> u32 {
    // Clusters use smaller pieces, because their blocks share them.
    let large = spec.batch_tile.get().is_multiple_of(64) && spec.batch_tile.get() > 64 && spec.cluster.get() == 1;
    if large { 64 } else { 32 }
}

/// Pieces of Y that a warpgroup has in flight.
const fn store_buffers(spec: &GemmWgmmaSpec) -> u32 {
    if spec.batch_tile.get() / store_rows(spec) <= 2 { 2 } else { 3 }
}

/// Bytes of the records of one stage.
const fn record_bytes(spec: &GemmWgmmaSpec) -> u32 {
    if spec.escapes { spec.warpgroups.get() * TILE_RECORD_BYTES } else { 0 }
}

/// Bytes of X, W and records of one stage.
const fn stage_bytes(spec: &GemmWgmmaSpec) -> u32 {
    spec.batch_tile.get() * ROW_BYTES + spec.warpgroups.get() * TILE_BYTES + record_bytes(spec)
}

/// Bytes of X and W of all stages.
const fn ring_bytes(spec: &GemmWgmmaSpec) -> u32 {
    spec.stages.get() * (stage_bytes(spec) - record_bytes(spec))
}

const fn smem(spec: &GemmWgmmaSpec) -> SmemPlan {
    let (stages, warpgroups) = (spec.stages.get(), spec.warpgroups.get());
    SmemPlan::new()
        .section("x", stages, spec.batch_tile.get() * ROW_BYTES, SWIZZLE_ALIGN)
        .section("w", stages, warpgroups * TILE_BYTES, BULK_ALIGN)
        .section("staging", warpgroups * store_buffers(spec), store_rows(spec) * ROW_BYTES, SWIZZLE_ALIGN)
        .section("records", stages, record_bytes(spec), MBARRIER_BYTES)
        .section("barriers", stages, barrier_bytes(spec), MBARRIER_BYTES)
        .section("old_barriers", warpgroups, MBARRIER_BYTES, MBARRIER_BYTES)
}

const fn fits(arch: Arch, spec: &GemmWgmmaSpec) -> bool {
    smem(spec).bytes() <= arch.limits().smem_bytes_per_block
}

/// Registers per thread of the loading and the multiplying warpgroups: 128 x (56 + 2 x 224) and 128 x (56 + 3 x 152)
/// fit the 65536 of an SM. With one warpgroup, every thread can have the maximum.
const fn registers(spec: &GemmWgmmaSpec) -> (Option<u32>, Option<u32>) {
    match spec.warpgroups.get() {
        1 => (None, None),
        2 => (Some(56), Some(224)),
        _ => (Some(56), Some(152)),
    }
}

impl GemmWgmmaSpec {
    /// Batch rows of a box of X. The copy engine copies only the boxes of a batch tile that contain rows of the batch.
    pub const X_BOX_ROWS: u32 = 32;

    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
            .with(Instruction::Wgmma)
            .with(Instruction::BulkCopy)
            .with(Instruction::TensorCopy)
            .when(self.cluster.get() > 1, Instruction::Cluster)
            .when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let limits = arch.limits();
        let (smem, stages) = (smem(self), self.stages.get());
        if self.dump && self.stream_k {
            return Err(Constraint::Conflict {
                what: "dump and stream_k both need the workspace; set only one of them",
            });
        }
        if self.stream_k && self.cluster.get() > 1 {
            return Err(Constraint::Conflict {
                what: "stream_k and cluster both split k; use cluster = 1 or stream_k = false",
            });
        }
        if self.cluster.get() > 1 && self.warpgroups.get() * TILE * self.batch_tile.get() * 4 > ring_bytes(self) {
            return Err(Constraint::Conflict {
                what: "the fp32 sums that a cluster exchanges exceed the ring of X and W; use more stages or fewer \
                       warpgroups",
            });
        }
        if !fits(arch, self) {
            let stage_bytes = stage_bytes(self) + barrier_bytes(self);
            return Err(Constraint::SharedMemory {
                fixed_bytes: smem.bytes() - stages * stage_bytes,
                stages,
                stage_bytes,
                limit_bytes: limits.smem_bytes_per_block,
                fitting_stages: largest_fitting!(fits(arch, self), GemmWgmmaSpec { stages: WideStages }),
                fitting_other: with_axis(
                    "warpgroups",
                    largest_fitting!(fits(arch, self), GemmWgmmaSpec { warpgroups: Warpgroups }),
                ),
            });
        }
        let consumer_warps = self.warpgroups.get() * limits.warpgroup_warps;
        let (rows, columns) = (self.batch_tile.get(), self.warpgroups.get() * TILE);
        let work =
            if self.stream_k { Work::OutputSteps { rows, columns } } else { Work::OutputTiles { rows, columns } };
        let grid = match self.cluster.get() {
            1 => LaunchGrid::Persistent { work, per_block: 1, blocks_per_sm: BLOCKS_PER_SM },
            cluster => LaunchGrid::Clusters { work, cluster },
        };
        let (producer_registers, consumer_registers) = registers(self);
        Ok(BlockPlan {
            smem,
            pipeline: Some(PipelinePlan {
                rings: 1,
                stages,
                stage_bytes: stage_bytes(self),
                // From the lane that loads, and from the warps that write records. With late weights, that is the full
                // barrier of W; that of X takes one arrival.
                full_arrivals: if self.escapes { 1 + self.warpgroups.get() } else { 1 },
                empty_arrivals: consumer_warps,
            }),
            roles: RolePlan {
                first: Role { name: "load and find escapes", warps: PRODUCER_WARPS, registers: producer_registers },
                second: Some(Role {
                    name: "decode and multiply",
                    warps: consumer_warps,
                    registers: consumer_registers,
                }),
            },
            launch: LaunchPlan {
                threads: (PRODUCER_WARPS + consumer_warps) * limits.warp_threads,
                blocks_per_sm: BLOCKS_PER_SM,
                grid,
                cluster: self.cluster.get(),
                pdl: self.pdl,
                co_resident: self.stream_k,
            },
        })
    }
}

/// Tiles of Y to which a block can contribute a partial sum: those in which its share of k begins and ends.
const SHARED_TILES: u64 = 2;

impl Family for GemmWgmmaSpec {
    type Args = GemmPackedArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[Edge { from: EncodingId::PACKED, to: PRODUCT }];

    fn summary(&self, _: &BlockPlan) -> String {
        let cut = match (self.cluster.get(), self.stream_k) {
            (1, false) => "whole output tiles".to_owned(),
            (1, true) => "k cut evenly".to_owned(),
            (cluster, _) => format!("by a cluster of {cluster} that shares k"),
        };
        let (rows, columns, stages) = (self.batch_tile.get(), TILE * self.warpgroups.get(), self.stages.get());
        let block = format!("{rows} x {columns} of Y at a time, {cut}, a ring of {stages}");
        let Self { epilogue, escapes, pdl, dump, .. } = *self;
        PackedSummary { epilogue, escapes, pdl, dump }.of_block(&block)
    }

    fn entry(&self, plan: &BlockPlan) -> Entry {
        let entry = Entry::new().packed_layout().gate_rows().check("boxes of X", "Smem::kXBoxRows", Self::X_BOX_ROWS);
        let registers: Vec<u32> = plan.roles.roles().filter_map(|role| role.registers).collect();
        let entry =
            entry.check("registers", "uw::gemm_wgmma::Kernel<Config>::kBudgets", u32::from(!registers.is_empty()));
        entry.registers("uw::gemm_wgmma::Kernel<Config>", &registers)
    }

    /// fp32 partial sums of the tiles that a block shares, and a counter for each warpgroup of each tile.
    fn workspace(&self, plan: &BlockPlan, problem: GemmShape, sms: u32) -> WorkspacePlan {
        if self.dump {
            return WorkspacePlan::operands(problem);
        }
        if !self.stream_k {
            return WorkspacePlan::default();
        }
        // A grid that cannot be launched needs none.
        let blocks = plan.launch.grid.blocks(problem, sms).unwrap_or_default();
        let parts = SHARED_TILES * u64::from(blocks) * u64::from(self.warpgroups.get());
        WorkspacePlan { bytes: parts * u64::from(TILE * self.batch_tile.get() * 4), counters: parts }
    }

    /// Each shape with escapes, with every epilogue, with and without `pdl`; a dump for each shape whose blocks compute
    /// whole tiles.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let used = SHAPES.into_iter().flat_map(|shape| {
            Epilogue::ALL
                .iter()
                .copied()
                .flat_map(move |epilogue| [false, true].map(move |pdl| GemmWgmmaSpec { pdl, epilogue, ..shape }))
        });
        let dumps = SHAPES
            .into_iter()
            .filter(|shape| !shape.stream_k && shape.cluster.get() == 1)
            .map(|shape| GemmWgmmaSpec { dump: true, ..shape });
        used.chain(dumps).map(move |spec| VariantSpec::gemm_wgmma(arch, spec))
    }
}
