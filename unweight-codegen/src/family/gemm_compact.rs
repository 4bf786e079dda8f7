//! Matmul for small batches from the compact encoding (docs/format.md A.11):
//! `templates/include/unweight/kernels/gemm_compact.cuh`.
//!
//! ```text
//! bytes = warps * (align1024(stages * stage + early * 1232) + 8 * stages) + 2048 * tables
//!         + persistent * 4 * batch_tile * 256
//! early = batch_tile == 8
//! stage = batch_tile * 128 + 5120 + 1232      64 columns of X, the dense part of a tile, its streams
//! ```
//!
//! The fp32 sums of a warp, `batch_tile * 256`, overlay its drained ring, which is always larger.

use super::{
    Edge, Family, Op, PRODUCT, VariantSpec, decode_compact,
    entry::Entry,
    gemm_mma::Warps,
    shared::{ClusterSize, Epilogue},
};
use crate::{
    args::{TensorMap, args},
    axes::{Arch, axes, range_axis, set_axis},
    block::{
        BlockPlan, Constraint, LaunchGrid, LaunchPlan, PipelinePlan, RolePlan, SmemPlan, largest_fitting, with_axis,
    },
    limits::{Instruction, Instructions},
};
use unweight_format::{EncodingId, raw::layout};

set_axis! {
    /// Batch rows that a `gemm_compact` variant multiplies at a time: `n` of `mma.m16n8k16` is eight rows per fragment.
    CompactBatchTile, "batch_tile", [8, 16, 32], "8, 16 or 32 (batch rows of op gemm_compact)"
}

range_axis! {
    /// Stages of each warp's ring in a `gemm_compact` block. One may suffice, because the rings of other warps load
    /// meanwhile.
    CompactStages, "stages", 1..=16, "1..=16 (stages of op gemm_compact)"
}

set_axis! {
    /// Copies of the code table in a `gemm_compact` block: lanes with different copies never have a bank conflict.
    CompactTables, "tables", [1, 8, 16, 32], "1, 8, 16 or 32 (tables of op gemm_compact)"
}

axes! {
    /// A variant of the matmul from the compact encoding (`mma.m16n8k16`): every warp decodes and multiplies tiles of
    /// 64 output features by `batch_tile` batch rows, and the warps of a cluster share k.
    pub struct GemmCompactSpec {
        /// Batch rows of a cluster.
        batch_tile: CompactBatchTile "b",
        /// Warps of a block.
        warps: Warps "_w",
        /// Stages of each warp's ring.
        stages: CompactStages "p",
        /// Blocks that share k.
        cluster: ClusterSize "c" = 1,
        /// Copies of the code table.
        tables: CompactTables "_t" = 1 unnamed,
        /// Rows of tiles are distributed over as many clusters as fit the device, and the tiles of a row over the warps
        /// of a cluster. Otherwise a cluster processes one row of tiles.
        persistent: flag "_persistent" = false,
        /// Programmatic dependent launch: the kernel starts while the stream's previous kernel still runs, and waits
        /// for it before it reads X.
        pdl: flag "_pdl" = false,
        /// How the product is stored.
        epilogue: Epilogue "_" = Store,
    }
}

args! {
    /// Arguments of `gemm_compact`.
    pub struct GemmCompactArgs {
        /// bf16 `[m, k]`, box 64 x the variant's batch tile, 128-byte swizzle, zero fill.
        pub x: TensorMap,
        /// u8 `[tiles, 5120]`.
        pub dense: u64,
        /// u32 `[tiles + 1, 2]`: `class_tiles`.
        pub tiles: u64,
        /// u32 `[stream_words]`: `class_streams`.
        pub streams: u64,
        /// u32 `[record_words]`: `class_escapes`.
        pub records: u64,
        /// u32 `[512]`: `ClassBook::kernel_table`.
        pub table: u64,
        /// bf16 `[m, n]`; `silu_mul`: `[m, n / 2]`.
        pub y: u64,
        /// `2^(base - 96)`.
        pub scale: f32,
        /// Words in `streams`, a multiple of 4.
        pub stream_words: u32,
        /// Words in `records`.
        pub record_words: u32,
        /// Batch rows.
        pub m: u32,
        /// Output features, a multiple of 64.
        pub n: u32,
        /// Input features, a multiple of 64.
        pub k: u32,
        /// `k / 64`.
        pub tile_cols: u32,
        /// Must be 0.
        pub reserved: [u32; 13],
    }
}

impl VariantSpec {
    /// Returns a matmul for small batches from the compact encoding.
    pub const fn gemm_compact(arch: Arch, spec: GemmCompactSpec) -> Self {
        Self { arch, op: Op::GemmCompact(spec) }
    }
}

/// The shapes that ship, by batch tile: each measured fastest for some problem (docs/adr/0013). Clusters of 4 are not
/// persistent: of 33 such clusters on 132 SMs, some have to wait for others.
pub const SHAPES: [GemmCompactSpec; 11] = [
    shape(8, 8, 1, 16, false),
    shape(8, 16, 1, 32, false),
    shape(8, 16, 2, 32, false),
    shape(8, 16, 2, 32, true),
    shape(16, 8, 1, 8, false),
    shape(16, 16, 1, 32, false),
    shape(16, 16, 2, 32, false),
    shape(16, 16, 2, 32, true),
    shape(32, 12, 1, 16, false),
    shape(32, 12, 2, 16, false),
    shape(32, 12, 2, 16, true),
];

const fn shape(batch_tile: u32, warps: u32, cluster: u32, tables: u32, persistent: bool) -> GemmCompactSpec {
    match (
        CompactBatchTile::new(batch_tile),
        Warps::new(warps),
        CompactStages::new(1),
        ClusterSize::new(cluster),
        CompactTables::new(tables),
    ) {
        (Ok(batch_tile), Ok(warps), Ok(stages), Ok(cluster), Ok(tables)) => GemmCompactSpec {
            batch_tile,
            warps,
            stages,
            cluster,
            tables,
            persistent,
            pdl: false,
            epilogue: Epilogue::Store,
        },
        _ => panic!("the shapes are within the axes"),
    }
}

/// Rows of a task, and columns of a step.
const TILE: u32 = 64;
/// A row of X: 64 columns, bf16.
const X_ROW_BYTES: u32 = 128;
/// The alignment of the copy engine's swizzle pattern, and so of each ring.
const SWIZZLE_ALIGN: u32 = 1024;
const MBARRIER_BYTES: u32 = 8;
/// `persistent`: the maximum number of rows of tiles that end within a block, each with its own buffer of sums.
const FLUSHES: u32 = 4;
/// As in `gemm_mma`, two blocks hide each other's start and end.
const BLOCKS_PER_SM_MAX: u32 = 2;

/// Bytes of X, dense part and streams in one slot of a warp's ring.
const fn slot_bytes(spec: &GemmCompactSpec) -> u32 {
    spec.batch_tile.get() * X_ROW_BYTES + layout::DENSE_TILE_BYTES as u32 + decode_compact::SLOT_BYTES
}

/// Bytes of one warp's ring. At batch tile 8, a slot is refilled while its tile's streams are still read, so streams
/// have one more slot.
const fn ring_bytes(spec: &GemmCompactSpec) -> u32 {
    let more = if spec.batch_tile.get() == 8 { decode_compact::SLOT_BYTES } else { 0 };
    (spec.stages.get() * slot_bytes(spec) + more).next_multiple_of(SWIZZLE_ALIGN)
}

const fn smem(spec: &GemmCompactSpec) -> SmemPlan {
    let warps = spec.warps.get();
    let smem = SmemPlan::new().section("rings", warps, ring_bytes(spec), SWIZZLE_ALIGN).section(
        "table",
        spec.tables.get(),
        decode_compact::TABLE_BYTES,
        16,
    );
    let smem =
        if spec.persistent { smem.section("flushed", FLUSHES, spec.batch_tile.get() * TILE * 4, 16) } else { smem };
    smem.section("barriers", warps * spec.stages.get(), MBARRIER_BYTES, MBARRIER_BYTES)
}

const fn fits(arch: Arch, spec: &GemmCompactSpec) -> bool {
    smem(spec).bytes() <= arch.limits().smem_bytes_per_block
}

/// Registers per thread below which the compiler spills: two row blocks are decoded together, and each batch row needs
/// two sums and one register of X. At batch tile 8, the dense part of a tile also stays in registers, so that its slot
/// can be refilled.
const fn registers_min(spec: &GemmCompactSpec) -> u32 {
    if spec.batch_tile.get() <= 16 { 128 } else { 168 }
}

impl GemmCompactSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
            .with(Instruction::Mma)
            .with(Instruction::BulkCopy)
            .with(Instruction::TensorCopy)
            .when(self.cluster.get() > 1, Instruction::Cluster)
            .when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let limits = arch.limits();
        let (smem, warps, stages) = (smem(self), self.warps.get(), self.stages.get());
        let stage_bytes = warps * (slot_bytes(self) + MBARRIER_BYTES);
        if !fits(arch, self) {
            return Err(Constraint::SharedMemory {
                fixed_bytes: smem.bytes() - stages * stage_bytes,
                stages,
                stage_bytes,
                limit_bytes: limits.smem_bytes_per_block,
                fitting_stages: largest_fitting!(fits(arch, self), GemmCompactSpec { stages: CompactStages }),
                fitting_other: with_axis("warps", largest_fitting!(fits(arch, self), GemmCompactSpec { warps: Warps })),
            });
        }
        let threads = warps * limits.warp_threads;
        let resident = limits.blocks_by_smem_and_threads(threads, smem.bytes());
        let mut blocks_per_sm = if resident < BLOCKS_PER_SM_MAX { resident } else { BLOCKS_PER_SM_MAX };
        while blocks_per_sm > 1 && limits.registers_for(threads, blocks_per_sm) < registers_min(self) {
            blocks_per_sm -= 1;
        }
        Ok(BlockPlan {
            smem,
            pipeline: Some(PipelinePlan {
                rings: warps,
                stages,
                stage_bytes: slot_bytes(self),
                full_arrivals: 1,
                empty_arrivals: 0,
            }),
            roles: RolePlan::one("load, decode and multiply", warps),
            launch: LaunchPlan {
                threads,
                blocks_per_sm,
                // A chain of codes spans two row blocks, so rows of W are distributed in whole tiles.
                grid: LaunchGrid::DistributedRowBlocks {
                    batch_rows: self.batch_tile.get(),
                    rows: TILE,
                    share: Some(if self.persistent { FLUSHES * self.cluster.get() } else { 1 }),
                    cluster: self.cluster.get(),
                    blocks_per_sm,
                },
                cluster: self.cluster.get(),
                pdl: self.pdl,
                co_resident: false,
            },
        })
    }
}

impl Family for GemmCompactSpec {
    type Args = GemmCompactArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[Edge { from: EncodingId::COMPACT, to: PRODUCT }];

    fn summary(&self, _: &BlockPlan) -> String {
        let group = match self.cluster.get() {
            1 => "block".to_owned(),
            cluster => format!("cluster of {cluster}"),
        };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        let (formula, batch_tile, stages) = (self.epilogue.formula(), self.batch_tile.get(), self.stages.get());
        format!(
            "{formula}, W compact; {batch_tile} batch rows x {TILE} of n per {group}, a ring of {stages} per warp{pdl}."
        )
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().packed_layout().compact_layout().gate_rows()
    }

    /// Each shape with every epilogue, with and without `pdl`. None for sm_120a: NVRTC 13.0 gives them a stack frame
    /// there, as it does for `gemm_mma` with bulk copies.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let shapes = SHAPES.into_iter().filter(move |_| !matches!(arch, Arch::Sm120a));
        shapes.flat_map(move |shape| {
            Epilogue::ALL.iter().flat_map(move |&epilogue| {
                [false, true].map(|pdl| VariantSpec::gemm_compact(arch, GemmCompactSpec { pdl, epilogue, ..shape }))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{GemmShape, Plan};

    /// A task is a row of tiles, independent of the device.
    #[test]
    fn a_cluster_has_one_row_of_tiles_and_one_batch_tile() {
        for (name, m, blocks) in
            [("b8_w8p1c1_store", 8, 224), ("b8_w8p1c2_store", 9, 896), ("b32_w8p2c2_silu_mul", 32, 448)]
        {
            let plan = Plan::new(&format!("uw_sm90a_gemm_compact_{name}").parse().unwrap()).unwrap();
            for sms in [1, 78, 132] {
                let problem = GemmShape { m, n: 14336, k: 4096 };
                assert_eq!(plan.launch.grid.blocks(problem, sms), Some(blocks), "{name} on {sms}");
            }
        }
    }

    #[test]
    fn partial_sums_fit_in_the_ring() {
        for batch_tile in [8, 16, 32] {
            let spec = shape(batch_tile, 1, 1, 1, false);
            assert!(batch_tile * TILE * 4 <= ring_bytes(&spec), "{batch_tile}");
        }
    }
}
