//! The reconstructive matmul of the report (section 8): `templates/include/unweight/kernels/gemm_recon.cuh`.
//!
//! ```text
//! bytes = fixed(n) + stages * stage(n)
//! fixed = X that does not depend on the stages + its barriers + three buffers of joined weights
//! stage = n * (sign-mantissa tile + exponent tile or (nibbles + verbatim rows + bitmask)) + two barriers
//!         + its share of X
//! ```
//!
//! With two tiles, the weights occupy the rows of wgmma (`weight_rows`): X has a ring of 768 rows, whatever the number
//! of stages. With 1, 3 or 4 tiles (`batch_rows`), X has 128 rows per stage, and one more slot. The sums that the
//! blocks of a split exchange overlay X.

use super::{DECODED_EXPONENTS, Edge, Family, Op, PRODUCT, VariantSpec, entry::Entry, shared::Epilogue};
use crate::{
    args::{TensorMap, args},
    axes::{AXES_MAX, Arch, Axis, Only, Raw, range_axis, set_axis},
    block::{
        BlockPlan, Constraint, LaunchGrid, LaunchPlan, PipelinePlan, Role, RolePlan, SmemPlan, Work, largest_fitting,
        with_axis,
    },
    limits::{Instruction, Instructions},
};
use unweight_format::{EncodingId, raw::layout};

range_axis! {
    /// 64-row tiles of `W` that a block multiplies at a time: columns of `Y` in units of 64, and `n` of the WGMMA
    /// instruction.
    NTiles, "n", 1..=4, "1..=4 (tiles of 64 output features; wgmma has n <= 256)"
}

range_axis! {
    /// Stages of the shared-memory ring between producer and consumers.
    Stages, "stages", 2..=8, "2..=8 (one stage cannot overlap loads with work; 8 fill the shared memory at n = 1)"
}

set_axis! {
    /// The maximum number of verbatim rows per tile that a palette variant has room for (report: `MAX_VERBATIM_ROWS`).
    ///
    /// A tensor needs the smallest budget that is at least its maximum of verbatim rows per tile.
    VerbatimRows, "verbatim", [0, 4, 8, 16, 32, 64], "0, 4, 8, 16, 32 or 64 (rows per tile)"
}

set_axis! {
    /// Blocks that share the k of a task and exchange their sums through distributed shared memory; 1 for none. For
    /// shapes with fewer tasks than SMs.
    Splits, "splits", [1, 2, 4], "1, 2 or 4 (blocks that share k)"
}

/// The source of the exponents of a matmul (report section 8.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightSource {
    /// Decoded exponents, u8 `[tiles, 64, 64]`.
    Exponent,
    /// Packed palette indices, u8 `[tiles, 64, 32]`, with verbatim rows next to them.
    Palette {
        /// Verbatim rows that each stage has room for.
        verbatim: VerbatimRows,
    },
}

/// A variant of the report's matmul family: 128 batch rows by `64 * n_tiles` output features per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GemmReconSpec {
    /// Source of the exponents.
    pub source: WeightSource,
    /// Tiles of `W` side by side.
    pub n_tiles: NTiles,
    /// Stages of the ring.
    pub stages: Stages,
    /// Blocks that share k.
    pub splits: Splits,
    /// How the product is stored.
    pub epilogue: Epilogue,
}

/// The index of `palette` in the first axis of [`GemmReconSpec::AXES`].
const PALETTE: u32 = 1;

/// Written by hand instead of with `axes!`, because only the palette source has a budget of verbatim rows.
impl GemmReconSpec {
    pub(crate) const AXES: &'static [Axis] = &[
        Axis { default: Some(PALETTE), ..Axis::words("source", "WeightSource", &["exponent", "palette"]) },
        Axis { mark: "_n", field: "n_tiles", ..NTiles::AXIS },
        Axis { mark: "p", ..Stages::AXIS },
        Axis { mark: "s", default: Some(1), unnamed: Some(1), ..Splits::AXIS },
        Axis {
            mark: "_v",
            field: "verbatim_rows",
            // Enough for nearly every tile of trained weights.
            default: Some(8),
            only: Some(Only { axis: 0, value: PALETTE, why: "decoded exponents have no verbatim rows" }),
            ..VerbatimRows::AXIS
        },
        Axis { mark: "_", default: Some(Epilogue::Store.raw()), ..Epilogue::AXIS },
    ];

    pub(crate) const fn values(&self) -> Raw {
        let mut raw = [0; AXES_MAX];
        if let WeightSource::Palette { verbatim } = self.source {
            raw[0] = PALETTE;
            raw[4] = verbatim.raw();
        }
        raw[1] = self.n_tiles.raw();
        raw[2] = self.stages.raw();
        raw[3] = self.splits.raw();
        raw[5] = self.epilogue.raw();
        raw
    }

    pub(crate) const fn of(raw: &Raw) -> Self {
        let source = match raw[0] {
            PALETTE => WeightSource::Palette { verbatim: VerbatimRows::of_raw(raw[4]) },
            _ => WeightSource::Exponent,
        };
        let (n_tiles, stages, splits) = (NTiles::of_raw(raw[1]), Stages::of_raw(raw[2]), Splits::of_raw(raw[3]));
        Self { source, n_tiles, stages, splits, epilogue: Epilogue::of_raw(raw[5]) }
    }

    /// Returns the verbatim rows that a stage has room for; 0 for the exponent source, which has none.
    pub const fn verbatim_rows(&self) -> u32 {
        match self.source {
            WeightSource::Exponent => 0,
            WeightSource::Palette { verbatim } => verbatim.get(),
        }
    }
}

args! {
    /// Arguments of the report's reconstructive matmul, and of `gemm_join`.
    pub struct GemmReconArgs {
        /// bf16 `[m, k]`, box 64 x 64 (`gemm_join`: 64 x the variant's batch tile), 128-byte swizzle, zero fill.
        pub x: TensorMap,
        /// u8 `[n, k]`, box 64 x 64 (`gemm_join`: 64 x the rows of a task), no swizzle.
        pub sign_mantissa: TensorMap,
        /// Exponent source: u8 `[tiles, 64, 64]`; palette source: u8 `[tiles, 64, 32]`.
        pub exponents: u64,
        /// Palette source only: `[tiles]` of 16 bytes.
        pub tile_metadata: u64,
        /// Palette source only: u8 `[verbatim_rows, 64]`.
        pub verbatim_exponents: u64,
        /// Palette source only: u8 `[16]`.
        pub palette: u64,
        /// bf16 `[m, n]`.
        pub y: u64,
        /// Rows in `verbatim_exponents`.
        pub verbatim_rows: u32,
        /// Batch rows.
        pub m: u32,
        /// Output features, a multiple of 64 times the variant's N tiles.
        pub n: u32,
        /// Input features, a multiple of 64.
        pub k: u32,
        /// `k / 64`.
        pub tile_cols: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// Returns a matmul whose blocks process whole tasks.
    pub const fn gemm_recon(
        arch: Arch,
        source: WeightSource,
        n_tiles: NTiles,
        stages: Stages,
        epilogue: Epilogue,
    ) -> Self {
        Self { arch, op: Op::GemmRecon(GemmReconSpec { source, n_tiles, stages, splits: Splits::ALL[0], epilogue }) }
    }
}

/// The rings of the report's Table 5 as (N tiles, stages), in its order.
pub const TABLE_5: [(NTiles, Stages); 8] =
    [ring(1, 6), ring(1, 4), ring(1, 2), ring(2, 4), ring(2, 3), ring(2, 2), ring(3, 2), ring(4, 2)];

/// The rings that also ship with a split of k. With fewer tasks than SMs, the narrow and deep ring was fastest
/// (docs/records/2026-11-20/matmul-reconstructive-log.md).
pub const SPLIT_RINGS: [(NTiles, Stages); 1] = [ring(1, 6)];

const fn ring(n: u32, stages: u32) -> (NTiles, Stages) {
    match (NTiles::new(n), Stages::new(stages)) {
        (Ok(n), Ok(stages)) => (n, stages),
        _ => panic!("Table 5 is within the axes"),
    }
}

/// Rows and columns of a stored tile, and the k step.
const TILE: u32 = layout::TILE as u32;
/// Warpgroups that multiply, 64 rows of X each.
const CONSUMER_WARPGROUPS: u32 = 2;
const CONSUMER_WARPS: u32 = 4 * CONSUMER_WARPGROUPS;
const PRODUCER_WARPS: u32 = 4;
/// Registers per thread of the two roles: 128 x 40 + 256 x 232 = 384 x 168, the limit for one block per SM.
const PRODUCER_REGISTERS: u32 = 40;
const CONSUMER_REGISTERS: u32 = 232;
const BLOCKS_PER_SM: u32 = 1;

/// 64 rows and 64 columns of X, bf16.
const X_BOX_BYTES: u32 = TILE * TILE * 2;
/// The tensor cores hold X longer than consumers hold the weight sources, so its ring is deeper.
const X_STAGES_MORE: u32 = 1;
/// Slots of X where the weights occupy the rows: three of 256 rows, six of 128 or twelve of 64, depending on the batch.
const WEIGHT_ROWS_X_SLOTS: u32 = 3;
const WEIGHT_ROWS_X_BOXES: u32 = 4;
/// Joined weights, bf16: one buffer is filled while two are multiplied.
const B_BUFFERS: u32 = 3;
const B_TILE_BYTES: u32 = TILE * TILE * 2;
const SIGN_TILE_BYTES: u32 = TILE * TILE;
/// A full and an empty barrier.
const RING_SLOT_BARRIER_BYTES: u32 = 2 * 8;
/// The alignment of a swizzled tile.
const SWIZZLE_ALIGN: u32 = 1024;

/// The ring of X.
struct Activations {
    slots: u32,
    slot_bytes: u32,
    /// Slots with barriers: a slot can be as small as one box.
    barriers: u32,
    /// Slots that each stage adds, or 0.
    slots_per_stage: u32,
}

impl Activations {
    const fn new(spec: &GemmReconSpec) -> Self {
        if weights_own_rows(spec) {
            Self {
                slots: WEIGHT_ROWS_X_SLOTS,
                slot_bytes: WEIGHT_ROWS_X_BOXES * X_BOX_BYTES,
                barriers: WEIGHT_ROWS_X_SLOTS * WEIGHT_ROWS_X_BOXES,
                slots_per_stage: 0,
            }
        } else {
            let slots = spec.stages.get() + X_STAGES_MORE;
            Self { slots, slot_bytes: CONSUMER_WARPGROUPS * X_BOX_BYTES, barriers: slots, slots_per_stage: 1 }
        }
    }
}

/// Returns whether a warpgroup owns a tile of W and computes a part of Y transposed.
const fn weights_own_rows(spec: &GemmReconSpec) -> bool {
    spec.n_tiles.get() == CONSUMER_WARPGROUPS
}

/// Bytes of one tile of W in a stage, in addition to its sign-mantissa bytes.
struct Source {
    exponent_bytes: u32,
    verbatim_bytes: u32,
    mask_bytes: u32,
}

impl Source {
    const fn new(spec: &GemmReconSpec) -> Self {
        match spec.source {
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

const fn smem(spec: &GemmReconSpec) -> SmemPlan {
    let (n, stages) = (spec.n_tiles.get(), spec.stages.get());
    let x = Activations::new(spec);
    let source = Source::new(spec);
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

/// Bytes of each stage.
const fn stage_bytes(spec: &GemmReconSpec) -> u32 {
    let x = Activations::new(spec);
    spec.n_tiles.get() * (SIGN_TILE_BYTES + Source::new(spec).bytes())
        + RING_SLOT_BARRIER_BYTES
        + x.slots_per_stage * (x.slot_bytes + RING_SLOT_BARRIER_BYTES)
}

const fn fits(arch: Arch, spec: &GemmReconSpec) -> bool {
    smem(spec).bytes() <= arch.limits().smem_bytes_per_block
}

impl GemmReconSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
            .with(Instruction::Wgmma)
            .with(Instruction::BulkCopy)
            .with(Instruction::TensorCopy)
            .with(Instruction::SetMaxRegisters)
            .when(self.splits.get() > 1, Instruction::Cluster)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let smem = smem(self);
        let stages = self.stages.get();
        if matches!(self.epilogue, Epilogue::SiluMul) {
            return Err(Constraint::without_silu_mul());
        }
        if self.splits.get() > 1 && self.n_tiles.get() > 1 {
            return Err(Constraint::Conflict {
                what: "only n = 1, whose tasks are the smallest, supports splits; use n = 1 or splits = 1",
            });
        }
        if !fits(arch, self) {
            return Err(Constraint::SharedMemory {
                fixed_bytes: smem.bytes() - stages * stage_bytes(self),
                stages,
                stage_bytes: stage_bytes(self),
                limit_bytes: arch.limits().smem_bytes_per_block,
                fitting_stages: largest_fitting!(fits(arch, self), GemmReconSpec { stages: Stages }),
                fitting_other: with_axis("n", largest_fitting!(fits(arch, self), GemmReconSpec { n_tiles: NTiles })),
            });
        }
        // The finest division of the work: where the weights occupy the rows, a task can be as small as one box of X.
        let rows = if weights_own_rows(self) { TILE } else { CONSUMER_WARPGROUPS * TILE };
        let work = Work::OutputTiles { rows, columns: self.n_tiles.get() * TILE };
        let grid = match self.splits.get() {
            1 => LaunchGrid::Persistent { work, per_block: 1, blocks_per_sm: BLOCKS_PER_SM },
            cluster => LaunchGrid::PersistentClusters { work, cluster },
        };
        Ok(BlockPlan {
            smem,
            // The ring of the weights: warp 0 arrives with the bytes, each consumer warp when its lanes have joined
            // theirs.
            pipeline: Some(PipelinePlan {
                rings: 1,
                stages,
                stage_bytes: stage_bytes(self),
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
            launch: LaunchPlan {
                cluster: self.splits.get(),
                ..LaunchPlan::ordinary(
                    (PRODUCER_WARPS + CONSUMER_WARPS) * arch.limits().warp_threads,
                    BLOCKS_PER_SM,
                    grid,
                )
            },
        })
    }
}

impl Family for GemmReconSpec {
    type Args = GemmReconArgs;
    const AXES: &'static [Axis] = Self::AXES;
    const EDGES: &'static [Edge] =
        &[Edge { from: DECODED_EXPONENTS, to: PRODUCT }, Edge { from: EncodingId::PALETTE, to: PRODUCT }];

    fn edges(&self) -> &'static [Edge] {
        match self.source {
            WeightSource::Exponent => &Self::EDGES[..1],
            WeightSource::Palette { .. } => &Self::EDGES[1..],
        }
    }

    fn summary(&self, _: &BlockPlan) -> String {
        let source = match self.source {
            WeightSource::Exponent => "decoded exponents".to_owned(),
            WeightSource::Palette { verbatim } => {
                format!("palette indices with room for {} verbatim rows per tile", verbatim.get())
            }
        };
        let (product, stages) = (self.epilogue.formula(), self.stages.get());
        let rows = if weights_own_rows(self) { 256 } else { 128 };
        let columns = TILE * self.n_tiles.get();
        let shared = match self.splits.get() {
            1 => "per block".to_owned(),
            splits => format!("by {splits} blocks that share k"),
        };
        format!("{product}, W from {source}; up to {rows} x {columns} of Y {shared}, {stages} stages.")
    }

    fn entry(&self, plan: &BlockPlan) -> Entry {
        let registers: Vec<u32> = plan.roles.roles().filter_map(|role| role.registers).collect();
        let blocks = plan.launch.blocks_per_sm;
        Entry::new().registers("uw::gemm_recon::Kernel<Config>", &registers).check(
            "blocks per SM",
            "uw::gemm_recon::kMinBlocksPerSm",
            blocks,
        )
    }

    /// Table 5, and the rings with splits, for every source, as `store` and `store_add`, as far as they fit.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let sources = std::iter::once(WeightSource::Exponent)
            .chain(VerbatimRows::ALL.into_iter().map(|verbatim| WeightSource::Palette { verbatim }));
        let all = sources.flat_map(move |source| {
            let whole = TABLE_5.into_iter().map(|ring| (ring, Splits::ALL[0]));
            let splits = |ring| Splits::ALL[1..].iter().map(move |splits| (ring, *splits));
            let split = SPLIT_RINGS.into_iter().flat_map(splits);
            whole.chain(split).flat_map(move |((n_tiles, stages), splits)| {
                [Epilogue::Store, Epilogue::StoreAdd].map(move |epilogue| {
                    let spec = GemmReconSpec { source, n_tiles, stages, splits, epilogue };
                    VariantSpec { arch, op: Op::GemmRecon(spec) }
                })
            })
        });
        all.filter(move |spec| spec.block().is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{GemmShape, Plan};

    /// Table 6 of the report: whether the ring fits with a verbatim budget.
    fn table_6(budget: u32, n: u32, stages: u32) -> bool {
        match budget {
            0..=8 => true,
            16 => stages <= 4,
            32 => stages <= 2,
            // "narrow N only": Table 5 calls N = 1 narrow and N = 2 standard.
            _ => stages <= 2 && n == 1,
        }
    }

    /// The combinations that fit here, but not in the report, or vice versa. docs/kernels.md explains each line.
    #[test]
    fn the_frontier_differs_from_table_6_exactly_as_documented() {
        let mut differences = Vec::new();
        for verbatim in VerbatimRows::ALL {
            for (n, stages) in TABLE_5 {
                let source = WeightSource::Palette { verbatim };
                let planned =
                    Plan::new(&VariantSpec::gemm_recon(Arch::Sm90a, source, n, stages, Epilogue::Store)).is_ok();
                let reported = table_6(verbatim.get(), n.get(), stages.get());
                if planned != reported {
                    differences.push((verbatim.get(), n.get(), stages.get(), planned));
                }
            }
        }
        assert_eq!(
            differences,
            [
                (16, 1, 6, true),
                (32, 1, 6, true),
                (32, 1, 4, true),
                (32, 2, 4, true),
                (32, 2, 3, true),
                (64, 1, 6, true),
                (64, 1, 4, true),
                (64, 2, 4, true),
                (64, 2, 3, true),
                (64, 2, 2, true),
                (64, 3, 2, true),
                (64, 4, 2, true),
            ]
        );
    }

    #[test]
    fn splits_are_of_one_tile_and_take_clusters() {
        let plan = |name: &str| Plan::new(&name.parse().unwrap());
        let why = plan("uw_sm90a_gemm_recon_exponent_n2p4s2_store").unwrap_err().to_string();
        assert!(why.contains("use n = 1 or splits = 1"), "{why}");
        let whole = plan("uw_sm90a_gemm_recon_palette_n1p6_v8_store").unwrap();
        let split = plan("uw_sm90a_gemm_recon_palette_n1p6s4_v8_store").unwrap();
        assert_eq!((split.launch.cluster, split.smem, split.launch.threads), (4, whole.smem, whole.launch.threads));
        let problem = |n, k| GemmShape { m: 1, n, k };
        assert_eq!(split.launch.grid.blocks(problem(1024, 4096), 132), Some(64));
        assert_eq!(split.launch.grid.blocks(problem(1024, 192), 132), None, "three steps for four blocks");
        assert_eq!(whole.launch.grid.blocks(problem(1024, 192), 132), Some(16));
        let ampere = "uw_sm80_gemm_recon_exponent_n1p6s2_store".parse().unwrap();
        assert!(matches!(Plan::new(&ampere), Err(why) if matches!(why.constraint, Constraint::Instruction { .. })));
    }

    /// The sum of the sections decides, so some ring beyond Table 5 must exceed the limit.
    #[test]
    fn the_frontier_exists() {
        let fits = |n: u32, stages: u32, rows: u32| {
            let source = WeightSource::Palette { verbatim: VerbatimRows::new(rows).unwrap() };
            let (n, stages) = (NTiles::new(n).unwrap(), Stages::new(stages).unwrap());
            Plan::new(&VariantSpec::gemm_recon(Arch::Sm90a, source, n, stages, Epilogue::Store)).is_ok()
        };
        assert!(fits(4, 2, 64) && !fits(4, 3, 8) && fits(1, 6, 64) && fits(1, 8, 16) && !fits(1, 8, 32));
    }
}
