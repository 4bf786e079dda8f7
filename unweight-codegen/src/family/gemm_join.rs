//! Matmul for small batches from the operands of `gemm_recon`, joined in registers:
//! `templates/include/unweight/kernels/gemm_join.cuh`. A block is a `gemm_mma` block: the stored bytes of a row block
//! are as many as those of its packed (palette) or BF16 weights (exponents).

use super::{
    DECODED_EXPONENTS, Edge, Family, Op, PRODUCT, VariantSpec,
    entry::Entry,
    gemm_mma::{BLOCK_ROWS, GemmMmaSpec, RingWeights, RowBlocks, SmallBatchTile, SmallStages, Warps},
    gemm_recon::GemmReconArgs,
    shared::{ClusterSize, Epilogue, SmemCopy},
};
use crate::{
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, Work},
    limits::{Instruction, Instructions},
};
use unweight_format::EncodingId;

word_axis! {
    /// The source of the exponents of a `gemm_join` variant.
    JoinSource, "source" {
        /// Decoded exponents, u8 `[tiles, 64, 64]`.
        Exponent = "exponent",
        /// Palette indices, u8 `[tiles, 64, 32]`, with any number of verbatim rows.
        Palette = "palette",
    }
}

axes! {
    /// A variant of the matmul for small batches that joins weights in registers (`mma.m16n8k16`): every warp
    /// multiplies `row_blocks` blocks of 16 output features by `batch_tile` batch rows, and the warps of a cluster
    /// share k.
    pub struct GemmJoinSpec {
        /// Source of the exponents.
        source: JoinSource "",
        /// Batch rows of a cluster.
        batch_tile: SmallBatchTile "_b",
        /// Row blocks of a task.
        row_blocks: RowBlocks "_r",
        /// Warps of a block.
        warps: Warps "w",
        /// Stages of each warp's ring.
        stages: SmallStages "p",
        /// Blocks that share k.
        cluster: ClusterSize "c" = 1,
        /// How the product is stored: `store` or `store_add`.
        epilogue: Epilogue "_" = Store,
    }
}

impl VariantSpec {
    /// Returns a matmul for small batches that joins weights in registers.
    pub const fn gemm_join(arch: Arch, spec: GemmJoinSpec) -> Self {
        Self { arch, op: Op::GemmJoin(spec) }
    }
}

/// The shapes that ship, by batch tile and then by growing `n`, each for both sources as far as it fits: the fastest of
/// those measured on an H200.
pub const SHAPES: [GemmJoinSpec; 12] = [
    shape(8, 1, 16, 2, 2),
    shape(8, 2, 16, 2, 1),
    shape(8, 2, 8, 3, 1),
    shape(8, 4, 8, 1, 1),
    shape(8, 7, 8, 1, 1),
    shape(16, 1, 16, 2, 2),
    shape(16, 2, 8, 2, 1),
    shape(16, 4, 8, 1, 1),
    shape(32, 1, 8, 2, 2),
    shape(32, 2, 8, 2, 1),
    shape(32, 4, 4, 2, 1),
    shape(64, 2, 8, 2, 1),
];

const fn shape(batch_tile: u32, row_blocks: u32, warps: u32, stages: u32, cluster: u32) -> GemmJoinSpec {
    match (
        SmallBatchTile::new(batch_tile),
        RowBlocks::new(row_blocks),
        Warps::new(warps),
        SmallStages::new(stages),
        ClusterSize::new(cluster),
    ) {
        (Ok(batch_tile), Ok(row_blocks), Ok(warps), Ok(stages), Ok(cluster)) => GemmJoinSpec {
            source: JoinSource::Palette,
            batch_tile,
            row_blocks,
            warps,
            stages,
            cluster,
            epilogue: Epilogue::Store,
        },
        _ => panic!("the shapes are within the axes"),
    }
}

impl GemmJoinSpec {
    /// Returns the `gemm_mma` block that this kernel corresponds to.
    const fn dense(&self) -> GemmMmaSpec {
        GemmMmaSpec {
            batch_tile: self.batch_tile,
            row_blocks: self.row_blocks,
            warps: self.warps,
            stages: self.stages,
            cluster: self.cluster,
            copy: SmemCopy::Bulk,
            persistent: false,
            escapes: false,
            pdl: false,
            epilogue: self.epilogue,
            dump: false,
        }
    }

    pub(crate) const fn instructions(&self) -> Instructions {
        self.dense().instructions()
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        if matches!(self.epilogue, Epilogue::SiluMul) {
            return Err(Constraint::without_silu_mul());
        }
        let weights = match self.source {
            JoinSource::Exponent => RingWeights::Exponents,
            JoinSource::Palette => RingWeights::Palette,
        };
        let dense = match self.dense().plan_of(arch, weights) {
            Ok(plan) => plan,
            Err(refused) => return Err(refused),
        };
        let work = Work::OutputTiles { rows: self.batch_tile.get(), columns: BLOCK_ROWS * self.row_blocks.get() };
        let grid = match self.cluster.get() {
            1 => LaunchGrid::Covering { work, per_block: 1 },
            cluster => LaunchGrid::Clusters { work, cluster },
        };
        Ok(BlockPlan { launch: LaunchPlan { grid, ..dense.launch }, ..dense })
    }
}

impl Family for GemmJoinSpec {
    type Args = GemmReconArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] =
        &[Edge { from: DECODED_EXPONENTS, to: PRODUCT }, Edge { from: EncodingId::PALETTE, to: PRODUCT }];

    fn edges(&self) -> &'static [Edge] {
        match self.source {
            JoinSource::Exponent => &Self::EDGES[..1],
            JoinSource::Palette => &Self::EDGES[1..],
        }
    }

    fn summary(&self, _: &BlockPlan) -> String {
        let (batch_tile, rows, stages) = (self.batch_tile.get(), BLOCK_ROWS * self.row_blocks.get(), self.stages.get());
        let source = match self.source {
            JoinSource::Exponent => "decoded exponents",
            JoinSource::Palette => "palette indices",
        };
        let group = match self.cluster.get() {
            1 => "block".to_owned(),
            cluster => format!("cluster of {cluster}"),
        };
        let product = self.epilogue.formula();
        format!(
            "{product}, W from {source}; {batch_tile} batch rows x {rows} of n per {group}, a ring of {stages} per warp."
        )
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().check("row blocks", "uw::gemm_join::kBlockRows", BLOCK_ROWS)
    }

    /// Each shape for both sources, as `store` and `store_add`, where the reconstructive matmul ships: decoders of
    /// exponents and palette indices do not ship elsewhere.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let ships = arch.has(Instruction::Wgmma);
        JoinSource::ALL.iter().filter(move |_| ships).flat_map(move |&source| {
            SHAPES.into_iter().flat_map(move |shape| {
                [Epilogue::Store, Epilogue::StoreAdd]
                    .map(move |epilogue| VariantSpec::gemm_join(arch, GemmJoinSpec { source, epilogue, ..shape }))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::{GemmShape, Plan};

    fn plan(name: &str) -> Plan {
        Plan::new(&name.parse().unwrap()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A slot has 8 rows of X, 128 bytes each, and per row block 1024 bytes of sign-mantissa with 1024 exponents or 512
    /// bytes of indices.
    #[test]
    fn slots_hold_the_stored_bytes() {
        let bytes = |name: &str| plan(name).pipeline.map(|ring| ring.stage_bytes);
        assert_eq!(bytes("uw_sm90a_gemm_join_palette_b8_r4w8p2c1_store"), Some(8 * 128 + 4 * 1536));
        assert_eq!(bytes("uw_sm90a_gemm_join_exponent_b8_r4w8p2c1_store"), Some(8 * 128 + 4 * 2048));
    }

    #[test]
    fn every_row_block_and_batch_row_has_a_block() {
        let blocks = |name: &str, n| plan(name).launch.grid.blocks(GemmShape { m: 1, n, k: 4096 }, 132);
        assert_eq!(blocks("uw_sm90a_gemm_join_palette_b8_r4w8p1c1_store", 14336), Some(224));
        assert_eq!(blocks("uw_sm90a_gemm_join_exponent_b8_r2w16p2c1_store", 4096), Some(128));
        assert_eq!(blocks("uw_sm90a_gemm_join_palette_b8_r1w16p2c2_store", 1024), Some(128));
        assert_eq!(blocks("uw_sm90a_gemm_join_palette_b8_r7w8p1c1_store", 192), Some(2));
        let short = plan("uw_sm90a_gemm_join_palette_b8_r1w16p2c2_store").launch.grid;
        assert_eq!(short.blocks(GemmShape { m: 1, n: 1024, k: 64 }, 132), None, "one step for two blocks");
    }

    #[test]
    fn a_gate_and_its_up_are_products_of_their_own() {
        let refused = Plan::new(&"uw_sm90a_gemm_join_palette_b8_r4w8p2c1_silu_mul".parse().unwrap()).unwrap_err();
        assert!(refused.to_string().contains("use store"), "{refused}");
    }
}
