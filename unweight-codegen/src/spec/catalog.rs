//! The variants that ship, as an explicit list.
//!
//! ```text
//! matmul  Table 5 (8 rings) x exponent                              x {store, store_add}
//!         Table 5 (8 rings) x palette x verbatim {0,4,8,16,32,64}   x {store, store_add}
//! decode  {full, exponent, palette} x code limits 6..=15
//! encode  the six stages and palette packing
//! ```
//!
//! Combinations whose shared memory exceeds the architecture's limit are left out; nothing else is. A spec outside this list is
//! as good as one inside: it is compiled on demand, only not shipped, snapshot or tuned.

use super::{
    Arch, CodeLimit, DecodeOutput, EncodeStage, Epilogue, NTiles, Stages, VariantSpec, VerbatimRows, WeightSource,
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

/// Every shipped variant: family by family, and within a family in the order of the tables above.
pub fn all() -> Vec<VariantSpec> {
    let mut specs: Vec<_> = decoders().chain(encoders()).collect();
    specs.extend(matmuls().filter(|spec| Plan::new(spec).is_ok()));
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

/// The report's matmul family, feasible or not.
pub fn matmuls() -> impl Iterator<Item = VariantSpec> {
    let sources = std::iter::once(WeightSource::Exponent)
        .chain(VerbatimRows::ALL.into_iter().map(|verbatim| WeightSource::Palette { verbatim }));
    sources.flat_map(|source| {
        TABLE_5.into_iter().flat_map(move |(n, stages)| {
            Epilogue::ALL.iter().map(move |epilogue| VariantSpec::matmul(Arch::Sm90a, source, n, stages, *epilogue))
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
        assert_eq!(matmuls().count(), 8 * 2 + 8 * 6 * 2);
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
                let ours = Plan::new(&VariantSpec::matmul(Arch::Sm90a, source, n, stages, Epilogue::Store)).is_ok();
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
            Plan::new(&VariantSpec::matmul(Arch::Sm90a, source, n, stages, Epilogue::Store)).is_ok()
        };
        assert!(fits(4, 2, 64) && !fits(4, 3, 8) && fits(1, 6, 64) && fits(1, 8, 16) && !fits(1, 8, 32));
    }
}
