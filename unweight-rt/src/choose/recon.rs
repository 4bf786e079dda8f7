//! Which of the report's reconstructive matmuls computes a problem, best guess first.
//!
//! It is the report's heuristic (section 8.4) as far as measurements on an H200 bear it out
//! (docs/adr/0003-matmul-log.md).

use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{Arch, Epilogue, NTiles, Stages, VerbatimRows, WeightSource, catalog},
};

/// Multiprocessors of an H100 or H200 (SXM). While one-tile columns of a problem do not outnumber them, the narrow and
/// deep N1P6 is fastest: anything wider leaves some of them idle (4096x14336 at batch 1: 69 us, N2P4 94).
const SMS: u32 = 132;

/// The source of a matmul, as far as dispatch cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Exponent bytes.
    Exponent,
    /// Palette indices.
    Palette {
        /// Most verbatim rows of a tile.
        max_verbatim_rows: u32,
    },
}

/// The matmul variants that can compute a problem, best guess first.
///
/// N1P6 comes first where it keeps all multiprocessors at most once busy, else the report's small-batch order N2P4,
/// N2P3, N2P2: its wide rings for batches from 256 on (N4P2, N3P2) were never best here. The rest of Table 5 follows in
/// its order, so that every `n` that is a multiple of 64 has one. Empty if no variant takes the shape: `n` or `k` is no
/// multiple of 64.
///
/// ```
/// use unweight_codegen::{plan::GemmShape, spec::{Arch, Epilogue}};
/// use unweight_rt::choose::recon::{Source, candidates};
/// let names = |m, n| -> Vec<String> {
///     let problem = GemmShape { m, n, k: 4096 };
///     candidates(Arch::Sm90a, Source::Palette { max_verbatim_rows: 5 }, problem, Epilogue::Store)
///         .iter().map(|spec| spec.to_string()).collect()
/// };
/// assert_eq!(names(1, 14336)[0], "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
/// assert_eq!(names(1024, 14336)[0], "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
/// assert_eq!(names(256, 4096)[0], "uw_sm90a_gemm_recon_palette_n1p6_v8_store");
/// assert!(names(1, 100).is_empty());
/// ```
pub fn candidates(arch: Arch, source: Source, problem: GemmShape, epilogue: Epilogue) -> Vec<VariantSpec> {
    let GemmShape { m, n, k } = problem;
    if n == 0 || k == 0 || !k.is_multiple_of(64) {
        return Vec::new();
    }
    let source = match source {
        Source::Exponent => WeightSource::Exponent,
        Source::Palette { max_verbatim_rows } => match VerbatimRows::at_least(max_verbatim_rows) {
            Some(verbatim) => WeightSource::Palette { verbatim },
            None => return Vec::new(),
        },
    };
    let preferred: [(u32, u32); 4] =
        if m <= narrow_batch(n) { [(1, 6), (2, 4), (2, 3), (2, 2)] } else { [(2, 4), (2, 3), (2, 2), (1, 6)] };
    let rank = |ring: &(NTiles, Stages)| {
        preferred
            .iter()
            .position(|(n, stages)| (ring.0.get(), ring.1.get()) == (*n, *stages))
            .unwrap_or(preferred.len())
    };
    let mut rings = catalog::TABLE_5;
    // Stable: what the heuristic does not name keeps Table 5's order.
    rings.sort_by_key(rank);
    rings
        .into_iter()
        .filter(|(tiles, _)| n.is_multiple_of(64 * tiles.get()))
        .map(|(tiles, stages)| VariantSpec::gemm_recon(arch, source, tiles, stages, epilogue))
        .filter(|spec| Plan::new(spec).is_ok())
        .collect()
}

/// The largest batch whose tasks of 128 rows by one tile do not outnumber the multiprocessors.
fn narrow_batch(n: u32) -> u32 {
    128 * (SMS / n.div_ceil(64).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARCH: Arch = Arch::Sm90a;

    fn rings(source: Source, m: u32, n: u32) -> Vec<String> {
        let specs = candidates(ARCH, source, GemmShape { m, n, k: 512 }, Epilogue::Store);
        specs.iter().map(|spec| spec.to_string().split('_').nth(5).unwrap().to_owned()).collect()
    }

    #[test]
    fn narrow_rings_where_they_fit_the_machine_else_the_reports_small_batch_order() {
        assert_eq!(rings(Source::Exponent, 1, 14336)[..3], ["n2p4", "n2p3", "n2p2"]);
        assert_eq!(rings(Source::Exponent, 1024, 14336)[..3], ["n2p4", "n2p3", "n2p2"]);
        // 64 one-tile columns: two rows of tasks fit 132 multiprocessors, three do not.
        assert_eq!(rings(Source::Exponent, 256, 4096)[..2], ["n1p6", "n2p4"]);
        assert_eq!(rings(Source::Exponent, 257, 4096)[..2], ["n2p4", "n2p3"]);
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
        assert_eq!(rings(Source::Exponent, 1, 64), ["n1p6", "n1p4", "n1p2"]);
        let odd_k = GemmShape { m: 1, n: 64, k: 65 };
        assert!(candidates(ARCH, Source::Exponent, odd_k, Epilogue::Store).is_empty());
    }

    #[test]
    fn candidates_divide_n_exist_and_have_room_for_the_verbatim_rows() {
        for rows in 0..=64 {
            for n in [64, 128, 192, 256, 768, 14336] {
                let problem = GemmShape { m: 17, n, k: 4096 };
                for spec in candidates(ARCH, Source::Palette { max_verbatim_rows: rows }, problem, Epilogue::StoreAdd) {
                    let unweight_codegen::spec::Op::GemmRecon(matmul) = spec.op else { panic!("{spec} is no matmul") };
                    assert!(n % (64 * matmul.n_tiles.get()) == 0 && matmul.verbatim_rows() >= rows, "{spec}");
                    assert!(Plan::new(&spec).is_ok() && catalog::all(Arch::Sm90a).contains(&spec), "{spec}");
                }
            }
        }
        let problem = GemmShape { m: 1, n: 64, k: 64 };
        assert!(candidates(ARCH, Source::Palette { max_verbatim_rows: 65 }, problem, Epilogue::Store).is_empty());
    }
}
