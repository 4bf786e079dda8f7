//! Matmul of a mixture of experts, from one packed tensor or one BF16 matrix that holds all experts:
//! `templates/include/unweight/kernels/gemm_grouped.cuh`. A block is a `gemm_mma` block that copies by threads, with
//! the same shared memory, apart from larger slots for BF16.

use super::{
    Edge, Family, Op, PRODUCT, VariantSpec,
    entry::Entry,
    gemm_mma::{GemmMmaSpec, RingWeights, RowBlocks, SmallBatchTile, SmallStages, Warps},
    shared::{ClusterSize, Epilogue, SmemCopy},
};
use crate::{
    args::args,
    axes::{Arch, axes},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, Work},
    limits::Instructions,
};
use unweight_format::EncodingId;

axes! {
    /// A variant of the matmul of a mixture of experts: a block multiplies up to `batch_tile` rows of a list by
    /// `row_blocks` blocks of 16 output features of one expert.
    pub struct GemmGroupedSpec {
        /// Rows of an item.
        batch_tile: SmallBatchTile "b",
        /// Row blocks that a block multiplies.
        row_blocks: RowBlocks "_r",
        /// Warps of a block.
        warps: Warps "w",
        /// Stages of each warp's ring.
        stages: SmallStages "p",
        /// The weights are BF16, row-major; otherwise they are packed.
        bf16: flag "_bf16" = false,
        /// Programmatic dependent launch: its blocks start before the stream's previous kernel has ended.
        pdl: flag "_pdl" = false,
        /// How the product is stored: `store` or `silu_mul`.
        epilogue: Epilogue "_" = Store,
    }
}

args! {
    /// Arguments of the grouped product (`gemm_grouped`).
    pub struct GemmGroupedArgs {
        /// u8 `[experts * tiles, 6144]`; `bf16`: bf16 `[experts * n, k]`.
        pub packed: u64,
        /// u32 `[experts * tiles, 4]`; `bf16`: 0, as is the next.
        pub escape_heads: u64,
        /// u32 `[escape_words]`.
        pub escapes: u64,
        /// bf16 `[pairs, n]`; `silu_mul`: `[pairs, n / 2]`.
        pub y: u64,
        /// bf16 `[pairs / pairs_per_row, k]`.
        pub x_data: u64,
        /// Bytes from one row of `x_data` to the next.
        pub x_row_bytes: u64,
        /// u32 `[pairs]`, sorted by expert: rows of `y`. Divided by `pairs_per_row`, they are rows of `x_data`.
        pub pairs: u64,
        /// u32 `[items, 4]`: expert, first entry of `pairs`, number of entries, 0. Items without entries come last. If
        /// `is_pairs`: u32 `[items]`, the expert of each pair; `pairs` is not read.
        pub items: u64,
        /// `2^(base - 112)`; `bf16`: 1.
        pub scale: f32,
        /// Words in `escapes`.
        pub escape_words: u32,
        /// Output features of an expert, a multiple of 64.
        pub n: u32,
        /// Input features, a multiple of 64.
        pub k: u32,
        /// `k / 64`.
        pub tile_cols: u32,
        /// Pairs that share a row of `x_data`, at least 1.
        pub pairs_per_row: u32,
        /// 1: item i is pair i. It has one entry, or none if its expert is not below `experts`.
        pub is_pairs: u32,
        /// The number of experts; read if `is_pairs`.
        pub experts: u32,
    }
}

impl VariantSpec {
    /// Returns a matmul of a mixture of experts.
    pub const fn gemm_grouped(arch: Arch, spec: GemmGroupedSpec) -> Self {
        Self { arch, op: Op::GemmGrouped(spec) }
    }
}

/// The shapes that ship, by batch tile. All have the same number of warps, so that the bits of a row do not depend on
/// the batch. Each fits in 99 KB of shared memory. Batch tile 8 is the fastest of those measured on an H200 for a
/// mixture with 128 experts at 1 to 64 sequences (docs/records/2026-11-26).
pub const SHAPES: [GemmGroupedSpec; 4] =
    [shape(8, 3, 4, 2), shape(16, 3, 4, 2), shape(32, 2, 4, 2), shape(64, 2, 4, 2)];

/// [`SHAPES`] for BF16 weights, whose slots are larger.
pub const BF16_SHAPES: [GemmGroupedSpec; 4] = [
    shape(8, 2, 4, 2).of_bf16(),
    shape(16, 2, 4, 2).of_bf16(),
    shape(32, 2, 4, 2).of_bf16(),
    shape(64, 2, 4, 2).of_bf16(),
];

const fn shape(batch_tile: u32, row_blocks: u32, warps: u32, stages: u32) -> GemmGroupedSpec {
    match (SmallBatchTile::new(batch_tile), RowBlocks::new(row_blocks), Warps::new(warps), SmallStages::new(stages)) {
        (Ok(batch_tile), Ok(row_blocks), Ok(warps), Ok(stages)) => {
            let (bf16, pdl, epilogue) = (false, false, Epilogue::Store);
            GemmGroupedSpec { batch_tile, row_blocks, warps, stages, bf16, pdl, epilogue }
        }
        _ => panic!("the shapes are within the axes"),
    }
}

/// Rows of W in a fragment of the tensor cores.
const BLOCK_ROWS: u32 = 16;

impl GemmGroupedSpec {
    const fn of_bf16(self) -> Self {
        Self { bf16: true, ..self }
    }

    /// Returns the shapes for packed or BF16 weights, by batch tile.
    pub const fn shapes(bf16: bool) -> &'static [Self; 4] {
        if bf16 { &BF16_SHAPES } else { &SHAPES }
    }

    /// Returns the `gemm_mma` block that this kernel corresponds to.
    const fn dense(&self) -> GemmMmaSpec {
        GemmMmaSpec {
            batch_tile: self.batch_tile,
            row_blocks: self.row_blocks,
            warps: self.warps,
            stages: self.stages,
            cluster: match ClusterSize::new(1) {
                Ok(one) => one,
                Err(_) => panic!("no cluster is a size of clusters"),
            },
            copy: SmemCopy::Async,
            persistent: false,
            escapes: !self.bf16,
            pdl: self.pdl,
            epilogue: self.epilogue,
            dump: false,
        }
    }

    pub(crate) const fn instructions(&self) -> Instructions {
        self.dense().instructions()
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        if matches!(self.epilogue, Epilogue::StoreAdd) {
            let what =
                "op gemm_grouped only overwrites, and rows are added when they are combined; use epilogue = store";
            return Err(Constraint::Conflict { what });
        }
        let weights = if self.bf16 { RingWeights::Bf16 } else { RingWeights::Packed };
        let dense = match self.dense().plan_of(arch, weights) {
            Ok(plan) => plan,
            Err(refused) => return Err(refused),
        };
        // `m` is the number of items.
        let work = Work::OutputTiles { rows: 1, columns: BLOCK_ROWS * self.row_blocks.get() };
        let grid = LaunchGrid::Covering { work, per_block: 1 };
        Ok(BlockPlan { launch: LaunchPlan { grid, ..dense.launch }, ..dense })
    }
}

impl Family for GemmGroupedSpec {
    type Args = GemmGroupedArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] =
        &[Edge { from: EncodingId::PACKED, to: PRODUCT }, Edge { from: EncodingId::RAW, to: PRODUCT }];

    fn edges(&self) -> &'static [Edge] {
        let (packed, bf16) = Self::EDGES.split_at(1);
        if self.bf16 { bf16 } else { packed }
    }

    fn summary(&self, _: &BlockPlan) -> String {
        let (batch_tile, rows, stages) = (self.batch_tile.get(), BLOCK_ROWS * self.row_blocks.get(), self.stages.get());
        let formula = match self.epilogue {
            Epilogue::SiluMul => "Y[pair,n/2] = silu(gate) * up of X[row of pair,k] * W[expert of pair,n,k]^T",
            Epilogue::Store | Epilogue::StoreAdd => "Y[pair,n] = X[row of pair,k] * W[expert of pair,n,k]^T",
        };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        let weights = if self.bf16 { "W in bf16" } else { "W packed to 12 bits, exact escapes" };
        format!("{formula}, {weights}; {batch_tile} pairs x {rows} of n per block, a ring of {stages} per warp{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        // The kernel is that of `gemm_mma`, so the axes that this family lacks are constants.
        Entry::new()
            .number("kCluster", 1)
            .word("kCopy", "SmemCopy", "kAsync")
            .flag("kEscapes", !self.bf16)
            .flag("kPersistent", false)
            .flag("kDump", false)
            .packed_layout()
            .gate_rows()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let shapes = [false, true].into_iter().flat_map(Self::shapes);
        shapes.flat_map(move |shape| {
            [Epilogue::Store, Epilogue::SiluMul].into_iter().flat_map(move |epilogue| {
                [false, true].map(move |pdl| VariantSpec::gemm_grouped(arch, Self { pdl, epilogue, ..*shape }))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{GemmShape, Plan};

    /// A row's sums are added in the order of its warps. They must be the same for every batch tile, or results would
    /// depend on the batch.
    #[test]
    fn all_shapes_split_k_over_the_same_warps() {
        for (&arch, bf16) in Arch::ALL.iter().flat_map(|arch| [(arch, false), (arch, true)]) {
            let shapes = GemmGroupedSpec::shapes(bf16);
            assert!(shapes.iter().all(|shape| shape.warps == SHAPES[0].warps && shape.bf16 == bf16), "{arch:?}");
            assert_eq!(shapes.map(|shape| shape.batch_tile.get()), [8, 16, 32, 64]);
            for shape in shapes {
                assert!(Plan::new(&VariantSpec::gemm_grouped(arch, *shape)).is_ok(), "{arch:?} {shape:?}");
            }
        }
    }

    /// A slot has 8 rows of X and 32 of W, 128 bytes each.
    #[test]
    fn bf16_slots_hold_two_bytes_per_weight() {
        let plan = Plan::new(&"uw_sm90a_gemm_grouped_b8_r2w4p2_bf16_pdl_store".parse().unwrap()).unwrap();
        assert_eq!(plan.pipeline.unwrap().stage_bytes, (8 + 32) * 128);
        assert_eq!((plan.smem.bytes(), plan.launch.blocks_per_sm), (2 * 4 * 40 * 128, 2));
    }

    #[test]
    fn every_item_has_blocks_for_all_rows_of_an_expert() {
        let plan = |name: &str| Plan::new(&name.parse().unwrap());
        let blocks = |name, m, n| plan(name).unwrap().launch.grid.blocks(GemmShape { m, n, k: 2048 }, 132);
        assert_eq!(blocks("uw_sm90a_gemm_grouped_b8_r4w8p2_silu_mul", 8, 1536), Some(8 * 24));
        assert_eq!(blocks("uw_sm90a_gemm_grouped_b64_r2w8p2_pdl_store", 3, 4160), Some(3 * 130));
        assert_eq!(blocks("uw_sm90a_gemm_grouped_b8_r4w8p2_store", 0, 1536), Some(0));
        let refused = plan("uw_sm90a_gemm_grouped_b8_r4w8p2_store_add").unwrap_err().to_string();
        assert!(refused.contains("use epilogue = store"), "{refused}");
    }
}
