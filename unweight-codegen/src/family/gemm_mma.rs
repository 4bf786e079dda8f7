//! Packed matmul for small batches, from packed weights: `templates/include/unweight/kernels/gemm_mma.cuh`.
//! Its header describes the layout of shared memory, which `smem` computes.

use super::{
    Edge, Family, Op, PRODUCT, VariantSpec,
    entry::Entry,
    shared::{ClusterSize, Epilogue, SmemCopy},
};
use crate::{
    args::{TensorMap, args},
    axes::{Arch, axes, range_axis, set_axis},
    block::{
        BlockPlan, Constraint, GemmShape, LaunchGrid, LaunchPlan, PipelinePlan, RolePlan, SmemPlan, WorkspacePlan,
        largest_fitting, with_axis,
    },
    limits::{Instruction, Instructions},
};
use unweight_format::{EncodingId, raw::layout};

set_axis! {
    /// Batch rows that a `gemm_mma` variant multiplies at a time: `n` of `mma.m16n8k16` is eight rows per fragment.
    SmallBatchTile, "batch_tile", [8, 16, 32, 64], "8, 16, 32 or 64 (batch rows of op gemm_mma)"
}

range_axis! {
    /// 16-row blocks of W that one task of a `gemm_mma` variant multiplies.
    RowBlocks, "row_blocks", 1..=8, "1..=8 (blocks of 16 output features, whose sums one warp keeps)"
}

range_axis! {
    /// Warps of a `gemm_mma` block; each has its own ring.
    Warps, "warps", 1..=32, "1..=32 (a block has at most 1024 threads)"
}

range_axis! {
    /// Stages of each warp's ring in a `gemm_mma` block. One may suffice, because the rings of other warps load
    /// meanwhile.
    SmallStages, "stages", 1..=16, "1..=16 (stages of op gemm_mma)"
}

axes! {
    /// A variant of the packed family for small batches (`mma.m16n8k16`): every warp multiplies `row_blocks`
    /// blocks of 16 output features by `batch_tile` batch rows, and the warps of a cluster share k.
    pub struct GemmMmaSpec {
        /// Batch rows of a cluster.
        batch_tile: SmallBatchTile "b",
        /// Row blocks of a task.
        row_blocks: RowBlocks "_r",
        /// Warps of a block.
        warps: Warps "w",
        /// Stages of each warp's ring.
        stages: SmallStages "p",
        /// Blocks that share k.
        cluster: ClusterSize "c" = 1,
        /// How X and W are copied to the rings.
        copy: SmemCopy "_" = Bulk unnamed,
        /// A cluster processes several tasks, and its rings continue across them; otherwise it processes one.
        persistent: flag "_persistent" = false,
        /// Elements outside the window are replaced by their exact operands; otherwise the tensor must have none.
        escapes: flag "_esc" = true,
        /// Programmatic dependent launch: the kernel starts while the stream's previous kernel still runs, and waits
        /// for it before it reads X.
        pdl: flag "_pdl" = false,
        /// How the product is stored.
        epilogue: Epilogue "_" = Store,
        /// For tests: the operands of the tensor cores are written to the workspace.
        dump: flag "_dump" = false,
    }
}

args! {
    /// Arguments of the packed family (`gemm_mma`, `gemm_wgmma`).
    pub struct GemmPackedArgs {
        /// bf16 `[m, k]`, box 64 x the variant's batch tile, 128-byte swizzle, zero fill.
        pub x: TensorMap,
        /// The product `y`, for variants that store with the copy engine: boxes of 64 x 32 with the 128-byte swizzle;
        /// for a `silu_mul` variant 32 x 32 with the 64-byte swizzle.
        pub y_map: TensorMap,
        /// u8 `[tiles, 6144]`.
        pub packed: u64,
        /// u32 `[tiles, 4]`.
        pub escape_heads: u64,
        /// u32 `[escape_words]`.
        pub escapes: u64,
        /// bf16 `[m, n]`; `silu_mul`: `[m, n / 2]`.
        pub y: u64,
        /// f32 partial sums; the plan determines their number.
        pub workspace: u64,
        /// u32, zeroed once; every launch leaves them zero.
        pub counters: u64,
        /// `2^(base - 112)`.
        pub scale: f32,
        /// Words in `escapes`.
        pub escape_words: u32,
        /// Batch rows.
        pub m: u32,
        /// Output features, a multiple of 64.
        pub n: u32,
        /// Input features, a multiple of 64.
        pub k: u32,
        /// `k / 64`.
        pub tile_cols: u32,
        /// The address of `x`, bf16 `[m, k]`, for variants whose threads copy it.
        pub x_data: u64,
        /// Bytes from one row of `x` to the next.
        pub x_row_bytes: u64,
        /// bf16 `[n]`, which a `store_add` variant adds to each row of the product instead of `y`; 0 for none.
        pub bias: u64,
        /// Must be 0.
        pub reserved: [u32; 8],
    }
}

impl VariantSpec {
    /// Returns a packed matmul for small batches.
    pub const fn gemm_mma(arch: Arch, spec: GemmMmaSpec) -> Self {
        Self { arch, op: Op::GemmMma(spec) }
    }
}

/// The fastest measured shapes of the packed family for small batches, by batch tile and then by growing `n`
/// (docs/records/2026-11-21/matmul-packed-log.md).
pub const SHAPES: [GemmMmaSpec; 23] = [
    small(8, 1, 16, 2, 2),
    small(8, 2, 16, 2, 1),
    small(8, 2, 8, 3, 1),
    small(8, 4, 16, 2, 1),
    small(8, 5, 12, 2, 1),
    small(8, 4, 8, 2, 1),
    small(8, 4, 8, 1, 1),
    small(8, 7, 8, 1, 1),
    small(16, 1, 8, 3, 2),
    small(16, 2, 12, 2, 1),
    small(16, 3, 8, 2, 1),
    small(16, 2, 8, 2, 1),
    small(16, 4, 8, 1, 1),
    GemmMmaSpec { persistent: true, ..small(16, 4, 8, 1, 1) },
    small(32, 1, 8, 2, 2),
    small(32, 2, 8, 2, 1),
    small(32, 3, 6, 2, 1),
    small(32, 4, 4, 2, 1),
    small(32, 7, 4, 1, 1),
    small(64, 1, 8, 2, 2),
    small(64, 2, 8, 2, 1),
    small(64, 2, 4, 2, 1),
    small(64, 4, 4, 2, 1),
];

/// Shapes for 99 KB of shared memory, where few of [`SHAPES`] fit: two blocks of four warps per SM for many output
/// features; one of 8 or 12 warps with one row block each for few. The cost model of the dispatch
/// (`unweight_rt::raw::choose::cost::gpu_model`) chose them for the linears of five models on 15 GPUs. They have not
/// run on such a GPU.
pub const SHAPES_99_KB: [GemmMmaSpec; 6] = [
    small(8, 1, 12, 3, 1),
    small(8, 7, 4, 1, 1),
    small(16, 1, 8, 3, 1),
    small(16, 6, 4, 1, 1),
    small(32, 1, 8, 2, 1),
    small(64, 2, 4, 1, 1),
];

/// Shapes for 163 KB of shared memory without clusters, for few output features, for which clusters would share k.
pub const SHAPES_163_KB: [GemmMmaSpec; 4] =
    [small(8, 1, 16, 4, 1), small(16, 1, 12, 3, 1), small(32, 1, 8, 3, 1), small(64, 1, 8, 2, 1)];

/// Shapes to which NVRTC 13.0 gives a stack frame on Blackwell's data center GPUs, with some epilogue.
const SPILLING: [GemmMmaSpec; 2] = [GemmMmaSpec { persistent: true, ..small(16, 4, 8, 1, 1) }, small(64, 4, 4, 2, 1)];
/// The shape that has a stack frame with a dump; another shape with as many row blocks replaces it.
const SPILLING_DUMP: GemmMmaSpec = small(8, 7, 8, 1, 1);

/// Returns the shapes for an architecture. Some may have no plan there.
fn shapes(arch: Arch) -> impl Iterator<Item = GemmMmaSpec> + Clone {
    let more: &[GemmMmaSpec] = match arch {
        Arch::Sm80 => &SHAPES_163_KB,
        Arch::Sm86 | Arch::Sm89 | Arch::Sm120a => &SHAPES_99_KB,
        Arch::Sm90a | Arch::Sm100a | Arch::Sm103a => &[],
    };
    // On sm_120a, NVRTC 13.0 gives variants with bulk copies a stack frame, and those with asynchronous copies none.
    let copy = if matches!(arch, Arch::Sm120a) { SmemCopy::Async } else { SmemCopy::of(arch) };
    let clean = move |shape: &&GemmMmaSpec| !is_server_blackwell(arch) || !SPILLING.contains(shape);
    SHAPES.iter().chain(more).filter(clean).map(move |shape| GemmMmaSpec { copy, ..*shape })
}

const fn is_server_blackwell(arch: Arch) -> bool {
    matches!(arch, Arch::Sm100a | Arch::Sm103a)
}

const fn small(batch_tile: u32, row_blocks: u32, warps: u32, stages: u32, cluster: u32) -> GemmMmaSpec {
    match (
        SmallBatchTile::new(batch_tile),
        RowBlocks::new(row_blocks),
        Warps::new(warps),
        SmallStages::new(stages),
        ClusterSize::new(cluster),
    ) {
        (Ok(batch_tile), Ok(row_blocks), Ok(warps), Ok(stages), Ok(cluster)) => GemmMmaSpec {
            batch_tile,
            row_blocks,
            warps,
            stages,
            cluster,
            copy: SmemCopy::Bulk,
            persistent: false,
            escapes: true,
            pdl: false,
            epilogue: Epilogue::Store,
            dump: false,
        },
        _ => panic!("the shapes are within the axes"),
    }
}

/// A row of X: 64 columns, bf16.
const X_ROW_BYTES: u32 = 128;
/// 16 rows and 64 columns of W, 12 bits each.
const BLOCK_BYTES: u32 = layout::PACKED_BLOCK_BYTES as u32;
pub(super) const BLOCK_ROWS: u32 = 16;
/// 16 rows and 64 columns of W, bf16.
const BF16_BLOCK_BYTES: u32 = BLOCK_ROWS * X_ROW_BYTES;
/// 16 rows and 64 columns of W, one byte each.
const STORED_BLOCK_BYTES: u32 = BLOCK_ROWS * layout::TILE as u32;
/// The alignment of the copy engine's swizzle pattern, and so of each ring.
const SWIZZLE_ALIGN: u32 = 1024;
const MBARRIER_BYTES: u32 = 8;
/// Two blocks of a kernel hide each other's start and end. With three blocks of 8 warps, a thread has too few registers
/// for the decode.
const BLOCKS_PER_SM_MAX: u32 = 2;
/// If two blocks would leave fewer registers per thread, an SM gets one block: even a single row block needs this many.
const REGISTERS_MIN: u32 = 80;

/// The encoding of the weights in a ring.
#[derive(Clone, Copy)]
pub(super) enum RingWeights {
    Packed,
    /// For the grouped product alone.
    Bf16,
    /// Sign-mantissa bytes with exponent bytes, for `gemm_join` alone, as is the next.
    Exponents,
    /// Sign-mantissa bytes with palette indices.
    Palette,
}

/// Bytes of X and W in one slot of a warp's ring.
const fn slot_bytes(spec: &GemmMmaSpec, weights: RingWeights) -> u32 {
    let block_bytes = match weights {
        RingWeights::Packed => BLOCK_BYTES,
        RingWeights::Bf16 => BF16_BLOCK_BYTES,
        RingWeights::Exponents => STORED_BLOCK_BYTES + STORED_BLOCK_BYTES,
        RingWeights::Palette => STORED_BLOCK_BYTES + STORED_BLOCK_BYTES / 2,
    };
    spec.batch_tile.get() * X_ROW_BYTES + spec.row_blocks.get() * block_bytes
}

/// Bytes of one warp's ring.
const fn ring_bytes(spec: &GemmMmaSpec, weights: RingWeights) -> u32 {
    (spec.stages.get() * slot_bytes(spec, weights)).next_multiple_of(SWIZZLE_ALIGN)
}

/// Bytes of one warp's fp32 sums.
const fn sum_bytes(spec: &GemmMmaSpec) -> u32 {
    spec.row_blocks.get() * BLOCK_ROWS * spec.batch_tile.get() * 4
}

const fn smem(spec: &GemmMmaSpec, weights: RingWeights) -> SmemPlan {
    let warps = spec.warps.get();
    SmemPlan::new()
        .section("rings", warps, ring_bytes(spec, weights), SWIZZLE_ALIGN)
        .section("sums", if spec.persistent { warps } else { 0 }, sum_bytes(spec), SWIZZLE_ALIGN)
        .section(
            "barriers",
            if spec.has_barriers() { warps * spec.stages.get() } else { 0 },
            MBARRIER_BYTES,
            MBARRIER_BYTES,
        )
}

const fn fits((arch, weights): (Arch, RingWeights), spec: &GemmMmaSpec) -> bool {
    smem(spec, weights).bytes() <= arch.limits().smem_bytes_per_block
}

impl GemmMmaSpec {
    /// Returns whether slots have mbarriers, which only the copy engine needs. Threads wait for their own copies.
    const fn has_barriers(&self) -> bool {
        matches!(self.copy, SmemCopy::Bulk)
    }

    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
            .with(Instruction::Mma)
            .with(self.copy.instruction())
            .when(matches!(self.copy, SmemCopy::Bulk), Instruction::TensorCopy)
            .when(self.cluster.get() > 1, Instruction::Cluster)
            .when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        self.plan_of(arch, RingWeights::Packed)
    }

    /// Returns the plan of a block whose rings hold weights of this encoding.
    pub(super) const fn plan_of(&self, arch: Arch, weights: RingWeights) -> Result<BlockPlan, Constraint> {
        let (limits, target) = (arch.limits(), (arch, weights));
        let (smem, warps, stages) = (smem(self, weights), self.warps.get(), self.stages.get());
        let slot_bytes = slot_bytes(self, weights);
        let stage_bytes = warps * (slot_bytes + if self.has_barriers() { MBARRIER_BYTES } else { 0 });
        if !fits(target, self) {
            return Err(Constraint::SharedMemory {
                fixed_bytes: smem.bytes() - stages * stage_bytes,
                stages,
                stage_bytes,
                limit_bytes: limits.smem_bytes_per_block,
                fitting_stages: largest_fitting!(fits(target, self), GemmMmaSpec { stages: SmallStages }),
                fitting_other: with_axis("warps", largest_fitting!(fits(target, self), GemmMmaSpec { warps: Warps })),
            });
        }
        let ring_bytes = ring_bytes(self, weights);
        if !self.persistent && sum_bytes(self) > ring_bytes {
            return Err(Constraint::SumsExceedRing {
                sum_bytes: sum_bytes(self),
                ring_bytes,
                fitting_stages: sum_bytes(self).div_ceil(slot_bytes),
            });
        }
        let threads = warps * limits.warp_threads;
        let resident = limits.blocks_by_smem_and_threads(threads, smem.bytes());
        let mut blocks_per_sm = if resident < BLOCKS_PER_SM_MAX { resident } else { BLOCKS_PER_SM_MAX };
        while blocks_per_sm > 1 && limits.registers_for(threads, blocks_per_sm) < REGISTERS_MIN {
            blocks_per_sm -= 1;
        }
        Ok(BlockPlan {
            smem,
            pipeline: Some(PipelinePlan {
                rings: warps,
                stages,
                stage_bytes: slot_bytes,
                full_arrivals: self.has_barriers() as u32,
                empty_arrivals: 0,
            }),
            roles: RolePlan::one("load, decode and multiply", warps),
            launch: LaunchPlan {
                threads,
                blocks_per_sm,
                grid: LaunchGrid::DistributedRowBlocks {
                    batch_rows: self.batch_tile.get(),
                    rows: BLOCK_ROWS,
                    share: if self.persistent { None } else { Some(self.row_blocks.get()) },
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

/// Describes how a matmul reads packed weights and what it omits.
pub(super) struct PackedSummary {
    pub epilogue: Epilogue,
    pub escapes: bool,
    pub pdl: bool,
    pub dump: bool,
}

impl PackedSummary {
    /// Returns the summary, with the part of the output that a block computes.
    pub fn of_block(&self, block: &str) -> String {
        let escapes = if self.escapes { "exact escapes" } else { "no escapes" };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        let dump = if self.dump { ", operands dumped" } else { "" };
        format!("{}, W packed to 12 bits, {escapes}; {block}{pdl}{dump}.", self.epilogue.formula())
    }
}

impl Family for GemmMmaSpec {
    type Args = GemmPackedArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[Edge { from: EncodingId::PACKED, to: PRODUCT }];

    fn summary(&self, _: &BlockPlan) -> String {
        let (batch_tile, rows, stages) = (self.batch_tile.get(), BLOCK_ROWS * self.row_blocks.get(), self.stages.get());
        let group = match self.cluster.get() {
            1 => "block".to_owned(),
            cluster => format!("cluster of {cluster}"),
        };
        let tasks = if self.persistent { "task after task" } else { "one task" };
        let block = format!("{batch_tile} batch rows x {rows} of n per {group}, {tasks}, a ring of {stages} per warp");
        let Self { epilogue, escapes, pdl, dump, .. } = *self;
        PackedSummary { epilogue, escapes, pdl, dump }.of_block(&block)
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().flag("kBf16", false).packed_layout().gate_rows()
    }

    fn workspace(&self, _: &BlockPlan, problem: GemmShape, _: u32) -> WorkspacePlan {
        if self.dump { WorkspacePlan::operands(problem) } else { WorkspacePlan::default() }
    }

    /// Each shape with escapes, with every epilogue, with and without `pdl`. Batch tile 8 also without escapes, as
    /// `store`. One dump for each number of row blocks.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let shapes = shapes(arch);
        let used = shapes.clone().flat_map(|shape| {
            let configs = [(true, Epilogue::Store), (true, Epilogue::StoreAdd), (false, Epilogue::Store)];
            configs
                .into_iter()
                // Variants without escapes are faster at the smallest batches only; beyond, some shapes spill.
                .filter(move |(escapes, _)| *escapes || shape.batch_tile.get() == 8)
                .flat_map(move |(escapes, epilogue)| {
                    [false, true].map(move |pdl| GemmMmaSpec { escapes, pdl, epilogue, ..shape })
                })
        });
        // The first shape of each number of row blocks: dumps differ in how row blocks are laid over tiles.
        let of_dumps = shapes.clone();
        let dumps = RowBlocks::all().filter_map(move |row_blocks| {
            let clean = |shape: &GemmMmaSpec| !is_server_blackwell(arch) || *shape != SPILLING_DUMP;
            let shape = of_dumps.clone().find(|shape| shape.row_blocks == row_blocks && clean(shape))?;
            Some(GemmMmaSpec { dump: true, ..shape })
        });
        // The gate and the up projection of an MLP as one matmul.
        let gated = shapes
            .flat_map(|shape| [false, true].map(move |pdl| GemmMmaSpec { pdl, epilogue: Epilogue::SiluMul, ..shape }));
        used.chain(dumps).chain(gated).map(move |spec| VariantSpec::gemm_mma(arch, spec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    /// The recommendations of docs/records/2026-11-21/matmul-packed-log.md: the number of blocks per SM determines the
    /// grid.
    #[test]
    fn small_shapes_have_the_blocks_per_sm_that_were_measured() {
        let blocks = SHAPES.map(|shape| {
            Plan::new(&VariantSpec::gemm_mma(Arch::Sm90a, shape)).expect("the shape fits").launch.blocks_per_sm
        });
        assert_eq!(blocks, [1, 1, 2, 1, 1, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 2, 2]);
    }

    /// A row block has rows of a gate and of its up projection, so it is distributed like any other.
    #[test]
    fn gate_and_up_rows_are_distributed_like_other_rows() {
        let plan = |name: &str| Plan::new(&name.parse().unwrap()).unwrap();
        let blocks = |name: &str, n| plan(name).launch.grid.blocks(GemmShape { m: 1, n, k: 4096 }, 132);
        assert_eq!(blocks("uw_sm90a_gemm_mma_b8_r2w8p3c1_esc_silu_mul", 4096), Some(132));
        assert_eq!(blocks("uw_sm90a_gemm_mma_b8_r2w8p3c1_esc_store", 4096), Some(132));
        assert_eq!(blocks("uw_sm90a_gemm_mma_b8_r7w8p1c1_esc_silu_mul", 28672), Some(264));
    }
}
