//! Ranks the matmuls from exponents or palette indices for a problem.
//!
//! Small batches are multiplied by `gemm_join`. The ranking of `gemm_recon` is the report's heuristic (section 8.4), as
//! far as measurements on an H200 confirm it (docs/records/2026-11-20/matmul-reconstructive-log.md).

use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{
        Arch, Epilogue, GemmJoinSpec, GemmReconSpec, JoinSource, Op, SmallBatchTile, Splits, VerbatimRows,
        WeightSource, catalog,
    },
};

/// Multiprocessors of an H100 or H200 (SXM).
const SMS: u32 = 132;
/// The minimum steps of 64 of k per block of a split, below which the exchange of sums is not worth it.
const SPLIT_STEPS: u32 = 8;
/// The largest batch for which `gemm_join` always comes first. Up to its largest batch tile it comes first if all its
/// blocks run at once: at batch 64, 4096x14336 takes 34 us (`gemm_recon` 45), 14336x4096 47 (41), from palette indices.
pub(super) const JOIN_BATCH: u32 = 32;
/// Shapes of `gemm_join` for a batch tile and a number of output features.
const JOIN_SHAPES: usize = 2;

/// The source of a matmul's weights, as far as dispatch distinguishes sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Exponent bytes.
    Exponent,
    /// Palette indices.
    Palette {
        /// The maximum number of verbatim rows in a tile.
        max_verbatim_rows: u32,
    },
}

/// Returns the matmul variants that can compute a problem on `sms` multiprocessors, best guess first.
///
/// Up to a batch of 32, and to 64 if all its blocks run at once, `gemm_join` with the smallest batch tile that holds it
/// comes first. Its other batch tiles come last.
///
/// Of `gemm_recon`, N1P6 comes first if its tasks of 128 rows by 64 columns do not outnumber the multiprocessors: wider
/// variants leave some of them idle (4096x14336 at batch 1: 69 us, N2P4 94). If it has at most half as many tasks, it
/// is split along k, by 4 or by 2. Otherwise the report's small-batch order N2P4, N2P3, N2P2 comes first: its wide
/// rings for batches of 256 and more (N4P2, N3P2) were never the fastest here. The rest of Table 5 follows in its
/// order, so that every `n` that is a multiple of 64 has a variant, and splits that may be worth measuring.
///
/// The set of variants depends only on `n`, `k` and the source; `m` and `sms` determine the order. Empty if no variant
/// supports the shape, because `n` or `k` is not a multiple of 64.
///
/// ```
/// use unweight_codegen::{plan::GemmShape, spec::{Arch, Epilogue}};
/// use unweight_rt::raw::choose::recon::{Source, candidates};
/// let names = |m, n| -> Vec<String> {
///     let problem = GemmShape { m, n, k: 4096 };
///     candidates(Arch::Sm90a, Source::Palette { max_verbatim_rows: 5 }, problem, 132, Epilogue::Store)
///         .iter().map(|spec| spec.to_string()).collect()
/// };
/// assert_eq!(names(1, 14336)[0], "uw_sm90a_gemm_join_palette_b8_r4w8p1c1_store");
/// assert_eq!(names(1024, 14336)[0], "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
/// assert_eq!(names(256, 4096)[0], "uw_sm90a_gemm_recon_palette_n1p6_v8_store");
/// assert_eq!(names(128, 4096)[0], "uw_sm90a_gemm_recon_palette_n1p6s2_v8_store");
/// assert!(names(1, 100).is_empty());
/// ```
pub fn candidates(arch: Arch, source: Source, problem: GemmShape, sms: u32, epilogue: Epilogue) -> Vec<VariantSpec> {
    let GemmShape { m, n, k } = problem;
    if n == 0 || k == 0 || !k.is_multiple_of(64) {
        return Vec::new();
    }
    let (source, join_source) = match source {
        Source::Exponent => (WeightSource::Exponent, JoinSource::Exponent),
        Source::Palette { max_verbatim_rows } => match VerbatimRows::at_least(max_verbatim_rows) {
            Some(verbatim) => (WeightSource::Palette { verbatim }, JoinSource::Palette),
            None => return Vec::new(),
        },
    };
    let recon = recon(arch, source, problem, sms, epilogue);
    // Decoders of exponents and indices ship where `gemm_recon` ships.
    if recon.is_empty() {
        return recon;
    }
    let tile = SmallBatchTile::at_least(m);
    let join = joins(arch, join_source, [n, k], epilogue);
    let comes_first =
        |(spec, at_once): &(GemmJoinSpec, bool)| Some(spec.batch_tile) == tile && (m <= JOIN_BATCH || *at_once);
    let (first, last): (Vec<_>, Vec<_>) = join.into_iter().partition(comes_first);
    let of = |(spec, _)| VariantSpec::gemm_join(arch, spec);
    first.into_iter().map(of).chain(recon).chain(last.into_iter().map(of)).collect()
}

/// Returns the `gemm_join` variants for `n` output features, by batch tile: the shapes with the fewest row blocks whose
/// blocks all run at once on a large device, or, if there are none, those with the most. The flag is whether they do.
fn joins(arch: Arch, source: JoinSource, [n, k]: [u32; 2], epilogue: Epilogue) -> Vec<(GemmJoinSpec, bool)> {
    // A shape, and whether its blocks run at once; `None` if `k` is too short for its clusters.
    let planned = |shape: GemmJoinSpec| {
        let spec = GemmJoinSpec { source, epilogue, ..shape };
        let launch = Plan::new(&VariantSpec::gemm_join(arch, spec)).ok()?.launch;
        let blocks = launch.grid.blocks(GemmShape { m: 1, n, k }, SMS)?;
        Some((spec, blocks <= SMS * launch.blocks_per_sm))
    };
    let shapes: Vec<_> = catalog::GEMM_JOIN.into_iter().filter_map(planned).collect();
    let of_tile = |tile: &SmallBatchTile| {
        let of_tile: Vec<_> = shapes.iter().filter(|(spec, _)| spec.batch_tile == *tile).copied().collect();
        let fitting: Vec<_> = of_tile.iter().filter(|(_, at_once)| *at_once).copied().collect();
        let most = of_tile.into_iter().rev();
        if fitting.is_empty() { most.take(JOIN_SHAPES).collect() } else { fitting }.into_iter().take(JOIN_SHAPES)
    };
    SmallBatchTile::ALL.iter().flat_map(of_tile).collect()
}

/// Returns the `gemm_recon` variants for a problem, best guess first.
fn recon(arch: Arch, source: WeightSource, problem: GemmShape, sms: u32, epilogue: Epilogue) -> Vec<VariantSpec> {
    let GemmShape { m, n, k } = problem;
    // Tasks of 128 rows by one column tile.
    let tasks = u64::from(m.div_ceil(128)) * u64::from(n.div_ceil(64));
    let fits = |splits: u32| {
        tasks * u64::from(splits) <= u64::from(resident_blocks(sms, splits)) && k / 64 >= SPLIT_STEPS * splits
    };
    let mut preferred: Vec<(u32, u32, u32)> =
        [4, 2].into_iter().filter(|splits| fits(*splits)).map(|splits| (1, 6, splits)).collect();
    preferred.extend(match tasks <= u64::from(sms) {
        true => [(1, 6, 1), (2, 4, 1), (2, 3, 1), (2, 2, 1)],
        false => [(2, 4, 1), (2, 3, 1), (2, 2, 1), (1, 6, 1)],
    });
    let rank = |spec: &GemmReconSpec| {
        let ring = (spec.n_tiles.get(), spec.stages.get(), spec.splits.get());
        preferred.iter().position(|preferred| *preferred == ring).unwrap_or(preferred.len())
    };
    let whole = catalog::TABLE_5.into_iter().map(|ring| (ring, Splits::ALL[0]));
    // Beyond two rounds on a large device, a split gains nothing.
    let split =
        catalog::SPLIT_RINGS.into_iter().flat_map(|ring| Splits::ALL[1..].iter().map(move |splits| (ring, *splits)));
    let split = split.filter(|(_, splits)| n.div_ceil(64) <= 2 * SMS / splits.get() && k / 64 >= splits.get());
    let mut specs: Vec<_> = whole
        .chain(split)
        .filter(|((tiles, _), _)| n.is_multiple_of(64 * tiles.get()))
        .map(|((n_tiles, stages), splits)| GemmReconSpec { source, n_tiles, stages, splits, epilogue })
        .collect();
    // Stable: variants that the heuristic does not rank keep Table 5's order.
    specs.sort_by_key(rank);
    let specs = specs.into_iter().map(|op| VariantSpec { arch, op: Op::GemmRecon(op) });
    specs.filter(|spec| Plan::new(spec).is_ok()).collect()
}

/// Returns how many blocks run at once in clusters of this size, one block per multiprocessor. An H200 runs 66 clusters
/// of 2, but only 30 of 4: some of its parts have too few multiprocessors for a whole cluster.
fn resident_blocks(sms: u32, cluster: u32) -> u32 {
    if cluster > 2 { sms / 11 * 10 } else { sms }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARCH: Arch = Arch::Sm90a;

    fn rings(source: Source, m: u32, n: u32) -> Vec<String> {
        rings_on(source, GemmShape { m, n, k: 512 }, SMS)
    }

    fn rings_on(source: Source, problem: GemmShape, sms: u32) -> Vec<String> {
        let specs = candidates(ARCH, source, problem, sms, Epilogue::Store);
        let recon = specs.iter().filter(|spec| matches!(spec.op, Op::GemmRecon(_)));
        recon.map(|spec| spec.to_string().split('_').nth(5).unwrap().to_owned()).collect()
    }

    /// Names without source and epilogue, of `gemm_join` alone.
    fn joins(source: Source, m: u32, n: u32) -> Vec<String> {
        let specs = candidates(ARCH, source, GemmShape { m, n, k: 4096 }, SMS, Epilogue::Store);
        let names = specs.iter().map(|spec| spec.to_string());
        let short = |name: String| name.split('_').skip(5).take(2).collect::<Vec<_>>().join("_");
        names.filter(|name| name.contains("_gemm_join_")).map(short).collect()
    }

    const PALETTE: Source = Source::Palette { max_verbatim_rows: 3 };

    #[test]
    fn small_batches_are_joined_in_registers() {
        for (m, n, first) in [
            (1, 1024, "b8_r1w16p2c2"),
            (8, 4096, "b8_r2w16p2c1"),
            (1, 14336, "b8_r4w8p1c1"),
            (1, 8192, "b8_r2w8p3c1"),
            (1, 28672, "b8_r7w8p1c1"),
            (9, 4096, "b16_r2w8p2c1"),
            (16, 14336, "b16_r4w8p1c1"),
            (17, 4096, "b32_r2w8p2c1"),
            (32, 14336, "b32_r4w4p2c1"),
        ] {
            assert_eq!(joins(PALETTE, m, n)[0], first, "m = {m}, n = {n}");
        }
        let first = |m| candidates(ARCH, PALETTE, GemmShape { m, n: 4096, k: 4096 }, SMS, Epilogue::StoreAdd)[0];
        assert!([1, 8, 32].into_iter().all(|m| matches!(first(m).op, Op::GemmJoin(_))));
        // At 64 rows, one block per multiprocessor fits.
        assert!([33, 64].into_iter().all(|m| matches!(first(m).op, Op::GemmJoin(_))));
        assert!(matches!(first(65).op, Op::GemmRecon(_)));
        let wide = GemmShape { m: 33, n: 14336, k: 4096 };
        assert!(matches!(candidates(ARCH, PALETTE, wide, SMS, Epilogue::Store)[0].op, Op::GemmRecon(_)));
    }

    #[test]
    fn narrow_rings_are_preferred_where_they_fit() {
        assert_eq!(rings(Source::Exponent, 1, 14336)[..3], ["n2p4", "n2p3", "n2p2"]);
        assert_eq!(rings(Source::Exponent, 1024, 14336)[..3], ["n2p4", "n2p3", "n2p2"]);
        // 64 columns of one tile: two rows of tasks fit 132 multiprocessors, three do not.
        assert_eq!(rings(Source::Exponent, 256, 4096)[..2], ["n1p6", "n2p4"]);
        assert_eq!(rings(Source::Exponent, 257, 4096)[..2], ["n2p4", "n2p3"]);
    }

    #[test]
    fn k_is_split_if_sms_would_be_idle() {
        let first = |m, n, k, sms| rings_on(Source::Exponent, GemmShape { m, n, k }, sms)[0].clone();
        assert_eq!(first(1, 4096, 4096, SMS), "n1p6s2");
        assert_eq!(first(128, 4096, 14336, SMS), "n1p6s2");
        assert_eq!(first(129, 4096, 4096, SMS), "n1p6", "two rows of tasks");
        assert_eq!(first(1, 4096, 4096, 110), "n1p6", "on a part of the device");
        assert_eq!(first(1, 1024, 4096, SMS), "n1p6s4");
        // 30 clusters of 4 run at once.
        assert_eq!(first(1, 1920, 4096, SMS), "n1p6s4");
        assert_eq!(first(1, 1984, 4096, SMS), "n1p6s2");
        assert_eq!(first(1, 1024, 1024, SMS), "n1p6s2", "8 steps for each block");
        assert_eq!(first(1, 1024, 960, SMS), "n1p6");
        assert_eq!(first(1, 64, 64, SMS), "n1p6");
        assert_eq!(first(1, 14336, 4096, SMS), "n2p4");
    }

    /// A loader needs to request the variants only once for all batches.
    #[test]
    fn batch_and_multiprocessors_change_the_order_alone() {
        for (n, k) in [(64, 64), (4096, 4096), (4096, 192), (14336, 4096)] {
            let sorted = |m, sms| {
                let mut all = rings_on(Source::Exponent, GemmShape { m, n, k }, sms);
                all.sort_unstable();
                all
            };
            for (m, sms) in [(1, 1), (64, 110), (129, 132), (1024, 78), (u32::MAX, 132)] {
                assert_eq!(sorted(m, sms), sorted(1, SMS), "m = {m}, {n}x{k}, {sms}");
            }
        }
    }

    #[test]
    fn every_multiple_of_64_has_a_variant_and_nothing_else_has() {
        for n in 1..=1024 {
            for source in [Source::Exponent, Source::Palette { max_verbatim_rows: 64 }] {
                for m in [1, 256] {
                    let found = rings(source, m, n);
                    assert_eq!(found.is_empty(), n % 64 != 0, "n = {n}, {source:?}: {found:?}");
                }
            }
        }
        // 8 steps of k are too few to split.
        assert_eq!(rings(Source::Exponent, 1, 64), ["n1p6", "n1p4", "n1p2", "n1p6s2", "n1p6s4"]);
        let odd_k = GemmShape { m: 1, n: 64, k: 65 };
        assert!(candidates(ARCH, Source::Exponent, odd_k, SMS, Epilogue::Store).is_empty());
    }

    #[test]
    fn candidates_divide_n_exist_and_have_room_for_the_verbatim_rows() {
        for rows in 0..=64 {
            for n in [64, 128, 192, 256, 768, 14336] {
                let problem = GemmShape { m: 17, n, k: 4096 };
                let source = Source::Palette { max_verbatim_rows: rows };
                for spec in candidates(ARCH, source, problem, SMS, Epilogue::StoreAdd) {
                    match spec.op {
                        Op::GemmRecon(matmul) => {
                            assert!(n % (64 * matmul.n_tiles.get()) == 0 && matmul.verbatim_rows() >= rows, "{spec}");
                        }
                        Op::GemmJoin(matmul) => assert_eq!(matmul.source, JoinSource::Palette, "{spec}"),
                        _ => panic!("{spec} is no matmul"),
                    }
                    assert!(Plan::new(&spec).is_ok() && catalog::all(Arch::Sm90a).contains(&spec), "{spec}");
                }
            }
        }
        let problem = GemmShape { m: 1, n: 64, k: 64 };
        assert!(candidates(ARCH, Source::Palette { max_verbatim_rows: 65 }, problem, SMS, Epilogue::Store).is_empty());
    }
}
