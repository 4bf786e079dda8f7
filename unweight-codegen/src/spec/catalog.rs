//! The variants that ship, as an explicit list.
//!
//! ```text
//! matmul       Table 5 (8 rings) x exponent                              x {store, store_add}
//!              Table 5 (8 rings) x palette x verbatim {0,4,8,16,32,64}   x {store, store_add}
//! decode       {full, exponent, palette} x code limits 6..=15
//! encode       the six stages and palette packing
//! gemm_mma  GEMM_MMA (23 shapes) x {ordinary, dependent} x escapes x {store, store_add}
//!              those of batch tile 8   x {ordinary, dependent} x no escapes x store
//!              those of even row blocks x {ordinary, dependent} x escapes x silu_mul
//!              one dump for each number of row blocks
//! gemm_wgmma   GEMM_WGMMA (14 shapes)  x {ordinary, dependent} x escapes x {store, store_add}
//!              a dump for each whose blocks take whole tiles
//! packed       pack, lists, unpack
//! ```
//!
//! Of matmul, combinations whose shared memory exceeds the architecture's limit are left out. A spec outside this list is as good as one
//! inside: it is compiled on demand, only not shipped, snapshot or tuned.

use super::{
    Arch, ClusterSize, CodeLimit, DecodeOutput, EncodeStage, Epilogue, GemmMmaSpec, GemmWgmmaSpec, NTiles, RepackStage,
    RowBlocks, SmallBatchTile, SmallStages, Stages, VariantSpec, VerbatimRows, Warpgroups, Warps, WeightSource,
    WideBatchTile, WideStages,
};
use crate::plan::Plan;

/// The rings of the report's Table 5 as (N tiles, stages), in its order.
pub const TABLE_5: [(NTiles, Stages); 8] =
    [ring(1, 6), ring(1, 4), ring(1, 2), ring(2, 4), ring(2, 3), ring(2, 2), ring(3, 2), ring(4, 2)];

const fn ring(n: u32, stages: u32) -> (NTiles, Stages) {
    match (NTiles::new(n), Stages::new(stages)) {
        (Ok(n), Ok(stages)) => (n, stages),
        _ => panic!("Table 5 lies within the axes"),
    }
}

/// The shapes of the register-sourced family for small batches that measured best, by batch tile and within it by growing `n`
/// (docs/adr/0004-register-sourced-kernels.md).
pub const GEMM_MMA: [GemmMmaSpec; 23] = [
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
            persistent: false,
            escapes: true,
            pdl: false,
            epilogue: Epilogue::Store,
            dump: false,
        },
        _ => panic!("the shapes lie within the axes"),
    }
}

/// The shapes of the register-sourced family for large batches that measured best, by batch tile
/// (docs/adr/0004-register-sourced-kernels.md).
pub const GEMM_WGMMA: [GemmWgmmaSpec; 14] = [
    wide(64, 10, false),
    wide(64, 10, true),
    clustered(64, 2, 10, 2),
    wide(128, 6, false),
    wide(128, 6, true),
    clustered(128, 2, 6, 2),
    clustered(128, 2, 6, 4),
    clustered(128, 1, 8, 2),
    clustered(128, 1, 8, 4),
    wide(192, 4, false),
    wide(192, 4, true),
    wide(256, 4, false),
    wide(256, 4, true),
    clustered(256, 2, 4, 2),
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
        _ => panic!("the shapes lie within the axes"),
    }
}

/// Every shipped variant: family by family, and within a family in the order of the tables above.
pub fn all() -> Vec<VariantSpec> {
    let mut specs: Vec<_> = decoders()
        .chain(encoders())
        .chain(gemm_mma())
        .chain(gemm_mma_silu_mul())
        .chain(gemm_wgmma())
        .chain(repack())
        .collect();
    specs.extend(gemm_recon().filter(|spec| Plan::new(spec).is_ok()));
    specs
}

/// The preprocess family.
pub fn decoders() -> impl Iterator<Item = VariantSpec> {
    DecodeOutput::ALL
        .iter()
        .flat_map(|output| CodeLimit::all().map(|limit| VariantSpec::decode(Arch::Sm90a, *output, limit)))
}

/// The encoding family.
pub fn encoders() -> impl Iterator<Item = VariantSpec> {
    EncodeStage::ALL.iter().map(|stage| VariantSpec::encode(Arch::Sm90a, *stage))
}

/// The register-sourced family for small batches.
pub fn gemm_mma() -> impl Iterator<Item = VariantSpec> {
    let used = GEMM_MMA.into_iter().flat_map(|shape| {
        let ways = [(true, Epilogue::Store), (true, Epilogue::StoreAdd), (false, Epilogue::Store)];
        ways.into_iter()
            // Without escapes there is less to hide and nothing to gain but at the smallest batches; beyond, some shapes spill.
            .filter(move |(escapes, _)| *escapes || shape.batch_tile.get() == 8)
            .flat_map(move |(escapes, epilogue)| {
                [false, true].map(|pdl| GemmMmaSpec { escapes, pdl, epilogue, ..shape })
            })
    });
    // The first shape of each number of row blocks: what differs between them is how row blocks are laid over tiles.
    let dumps = RowBlocks::all().filter_map(|row_blocks| {
        let shape = GEMM_MMA.into_iter().find(|shape| shape.row_blocks == row_blocks)?;
        Some(GemmMmaSpec { dump: true, ..shape })
    });
    used.chain(dumps).map(|spec| VariantSpec::gemm_mma(Arch::Sm90a, spec))
}

/// Of the same family, the gate and the up of an MLP as one matmul: every shape whose row blocks come in pairs.
pub fn gemm_mma_silu_mul() -> impl Iterator<Item = VariantSpec> {
    let shapes = GEMM_MMA.into_iter().filter(|shape| shape.row_blocks.get() % 2 == 0);
    shapes.flat_map(|shape| {
        [false, true].map(|pdl| {
            let spec = GemmMmaSpec { pdl, epilogue: Epilogue::SiluMul, ..shape };
            VariantSpec::gemm_mma(Arch::Sm90a, spec)
        })
    })
}

/// The register-sourced family for large batches.
pub fn gemm_wgmma() -> impl Iterator<Item = VariantSpec> {
    let used = GEMM_WGMMA.into_iter().flat_map(|shape| {
        [Epilogue::Store, Epilogue::StoreAdd]
            .into_iter()
            .flat_map(move |epilogue| [false, true].map(|pdl| GemmWgmmaSpec { pdl, epilogue, ..shape }))
    });
    let dumps = GEMM_WGMMA
        .into_iter()
        .filter(|shape| !shape.stream_k && shape.cluster.get() == 1)
        .map(|shape| GemmWgmmaSpec { dump: true, ..shape });
    used.chain(dumps).map(|spec| VariantSpec::gemm_wgmma(Arch::Sm90a, spec))
}

/// The conversions between BF16 and the packed form.
pub fn repack() -> impl Iterator<Item = VariantSpec> {
    RepackStage::ALL.iter().map(|stage| VariantSpec::repack(Arch::Sm90a, *stage))
}

/// The report's matmul family, feasible or not.
pub fn gemm_recon() -> impl Iterator<Item = VariantSpec> {
    let sources = std::iter::once(WeightSource::Exponent)
        .chain(VerbatimRows::ALL.into_iter().map(|verbatim| WeightSource::Palette { verbatim }));
    sources.flat_map(|source| {
        TABLE_5.into_iter().flat_map(move |(n, stages)| {
            [Epilogue::Store, Epilogue::StoreAdd]
                .map(|epilogue| VariantSpec::gemm_recon(Arch::Sm90a, source, n, stages, epilogue))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_variant_is_listed_twice() {
        let specs = all();
        assert_eq!(specs.iter().collect::<BTreeSet<_>>().len(), specs.len());
    }

    #[test]
    fn the_list_covers_the_axes() {
        assert_eq!(decoders().count(), 3 * 10);
        assert_eq!(encoders().count(), 7);
        assert_eq!(gemm_recon().count(), 8 * 2 + 8 * 6 * 2);
        assert_eq!(gemm_mma().count(), 23 * 2 * 2 + 8 * 2 + 6);
        assert_eq!(gemm_mma_silu_mul().count(), 14 * 2);
        assert_eq!(gemm_wgmma().count(), 14 * 2 * 2 + 4);
        assert_eq!(repack().count(), 3);
    }

    /// As docs/adr/0004 recommends them: the blocks that one SM holds decide the grid.
    #[test]
    fn small_shapes_have_the_blocks_per_sm_that_were_measured() {
        let blocks = GEMM_MMA.map(|shape| {
            Plan::new(&VariantSpec::gemm_mma(Arch::Sm90a, shape)).expect("the shape fits").launch.blocks_per_sm
        });
        assert_eq!(blocks, [1, 1, 2, 1, 1, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 2, 2]);
    }

    /// Table 6 of the report, (verbatim budget) -> does the ring fit?
    fn table_6(budget: u32, n: u32, stages: u32) -> bool {
        match budget {
            0..=8 => true,
            16 => stages <= 4,
            32 => stages <= 2,
            // "narrow N only": Table 5 calls N = 1 narrow and N = 2 standard.
            _ => stages <= 2 && n == 1,
        }
    }

    /// Where our frontier is not the report's. docs/kernels.md explains each line.
    #[test]
    fn the_frontier_differs_from_table_6_exactly_as_documented() {
        let mut differences = Vec::new();
        for verbatim in VerbatimRows::ALL {
            for (n, stages) in TABLE_5 {
                let source = WeightSource::Palette { verbatim };
                let ours = Plan::new(&VariantSpec::gemm_recon(Arch::Sm90a, source, n, stages, Epilogue::Store)).is_ok();
                let theirs = table_6(verbatim.get(), n.get(), stages.get());
                if ours != theirs {
                    differences.push((verbatim.get(), n.get(), stages.get(), ours));
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

    /// The sum decides, so rings beyond Table 5 must meet the limit somewhere.
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
