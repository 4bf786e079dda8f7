//! Palettes of exponents (report section 3.3; `docs/format.md` A.3), and length-limited canonical Huffman codes over
//! palette indices (section 3.4; A.4).

use crate::{
    CodecError, Histogram, Matrix,
    layout::{CODE_LENGTH_MAX, PALETTE_MAX},
};

/// The palette (report section 3.3): up to 16 distinct exponents, most frequent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Palette {
    exponents: [u8; PALETTE_MAX],
    len: u8,
}

impl Palette {
    /// The palette of the most frequent exponents. Of equal counts the smaller exponent comes first, so that every
    /// encoder agrees. `None` for an empty histogram.
    pub fn from_histogram(histogram: &Histogram) -> Option<Self> {
        let mut order: Vec<u8> = (0..=255u8).filter(|&e| histogram.count(e) > 0).collect();
        order.sort_by_key(|&e| (std::cmp::Reverse(histogram.count(e)), e));
        order.truncate(PALETTE_MAX);
        let mut exponents = [0; PALETTE_MAX];
        exponents[..order.len()].copy_from_slice(&order);
        (!order.is_empty()).then_some(Self { exponents, len: order.len() as u8 })
    }

    /// Reads a stored palette of `len` entries.
    ///
    /// # Errors
    /// Entries repeat, an unused entry is not 0, or `len` is not in 1..=16.
    pub fn from_stored(stored: [u8; PALETTE_MAX], len: usize) -> Result<Self, CodecError> {
        let fail = |reason| Err(CodecError::Code { section: "palette", reason });
        if !(1..=PALETTE_MAX).contains(&len) {
            return fail("it must have 1 to 16 entries");
        }
        let mut is_used = [false; 256];
        if stored[..len].iter().any(|&e| std::mem::replace(&mut is_used[usize::from(e)], true)) {
            return fail("an exponent appears twice");
        }
        if stored[len..].iter().any(|&e| e != 0) {
            return fail("an unused entry is not 0");
        }
        Ok(Self { exponents: stored, len: len as u8 })
    }

    /// Returns the exponents of the entries.
    pub fn exponents(&self) -> &[u8] {
        &self.exponents[..self.len.into()]
    }

    /// The stored bytes: unused entries are 0.
    pub fn stored(&self) -> [u8; PALETTE_MAX] {
        self.exponents
    }

    /// The palette index of every exponent; `None` outside the palette (`symbol_to_palette_idx` of the report).
    pub fn index(&self) -> [Option<u8>; 256] {
        let mut index = [None; 256];
        for (i, &exponent) in self.exponents().iter().enumerate() {
            index[usize::from(exponent)] = Some(i as u8);
        }
        index
    }
}

/// The maximum code length that an encoder may use, in bits: 6..=15.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CodeLimit(u8);

impl CodeLimit {
    /// 7 bits. It costs 0.04 bits per element more than an unlimited code, and two symbols always fit a 14-bit lookup
    /// (`docs/benchmarks.md`, "code limit").
    pub const DEFAULT: Self = Self(7);

    /// A limit of `bits` bits.
    ///
    /// # Errors
    /// `bits` is not in 6..=15.
    pub const fn new(bits: u32) -> Result<Self, CodecError> {
        if bits >= 6 && bits <= CODE_LENGTH_MAX {
            Ok(Self(bits as u8))
        } else {
            Err(CodecError::CodeLimit { got: bits })
        }
    }

    /// The limit in bits.
    pub const fn bits(self) -> u32 {
        self.0 as u32
    }
}

impl Default for CodeLimit {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A complete prefix code over a palette.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    palette: Palette,
    lengths: [u8; PALETTE_MAX],
    codes: [u16; PALETTE_MAX],
}

impl Code {
    /// The optimal code of a tensor with this histogram under `limit`. `None` for an empty histogram.
    pub fn from_histogram(histogram: &Histogram, limit: CodeLimit) -> Option<Self> {
        let palette = Palette::from_histogram(histogram)?;
        let weights: Vec<u64> = palette.exponents().iter().map(|&e| histogram.count(e)).collect();
        let mut lengths = [0; PALETTE_MAX];
        lengths[..weights.len()].copy_from_slice(&package_merge(&weights, limit.bits()));
        Some(Self::assemble(palette, lengths))
    }

    /// The optimal code of a matrix under `limit`.
    pub(crate) fn of(matrix: Matrix<'_>, limit: CodeLimit) -> Self {
        Self::from_histogram(&Histogram::of(matrix.bytes()), limit).expect("a matrix has elements")
    }

    /// Reads a code from stored sections.
    ///
    /// # Errors
    /// The palette or the lengths break invariant 3 of `docs/format.md`.
    pub fn from_stored(palette: [u8; PALETTE_MAX], lengths: [u8; PALETTE_MAX]) -> Result<Self, CodecError> {
        let fail = |reason| Err(CodecError::Code { section: "code_lengths", reason });
        let len = lengths.iter().position(|&l| l == 0).unwrap_or(PALETTE_MAX);
        let used = &lengths[..len];
        if lengths[len..].iter().any(|&l| l != 0) {
            return fail("a length follows an unused entry");
        }
        if used.iter().any(|&l| u32::from(l) > CODE_LENGTH_MAX) {
            return fail("a code is longer than 15 bits");
        }
        if !used.is_sorted() {
            return fail("lengths decrease");
        }
        let kraft: u32 = used.iter().map(|&l| 1 << (CODE_LENGTH_MAX - u32::from(l))).sum();
        if len == 1 && used[0] != 1 || len > 1 && kraft != 1 << CODE_LENGTH_MAX {
            return fail("the code is not complete (Kraft sum is not 1)");
        }
        Ok(Self::assemble(Palette::from_stored(palette, len)?, lengths))
    }

    /// Assigns canonical codes to lengths that never decrease.
    fn assemble(palette: Palette, lengths: [u8; PALETTE_MAX]) -> Self {
        let mut codes = [0u16; PALETTE_MAX];
        let mut next = 0u32;
        for i in 0..palette.exponents().len() {
            if i > 0 {
                next = (next + 1) << (lengths[i] - lengths[i - 1]);
            }
            codes[i] = (next.reverse_bits() >> (32 - u32::from(lengths[i]))) as u16;
        }
        Self { palette, lengths, codes }
    }

    /// The palette whose indices are coded.
    pub fn palette(&self) -> &Palette {
        &self.palette
    }

    /// The stored bytes: 16 lengths, 0 for unused entries.
    pub fn lengths(&self) -> [u8; PALETTE_MAX] {
        self.lengths
    }

    /// The length of the longest code in bits (`L` of the report).
    pub fn max_length(&self) -> u32 {
        self.lengths.into_iter().max().unwrap_or(0).into()
    }

    /// The `(code, length)` of a palette index. The code is LSB-first.
    pub fn code(&self, index: usize) -> (u32, u32) {
        (self.codes[index].into(), self.lengths[index].into())
    }

    /// The `(code, length)` of every exponent. The length is 0 outside the palette.
    pub fn encode_table(&self) -> [(u16, u8); 256] {
        let mut table = [(0, 0); 256];
        for (i, &exponent) in self.palette.exponents().iter().enumerate() {
            table[usize::from(exponent)] = (self.codes[i], self.lengths[i]);
        }
        table
    }

    /// The flat terminal table of the report, with `2^max_length` entries: one lookup per symbol.
    pub fn decode_table(&self) -> Vec<DecodeEntry> {
        let bits = self.max_length();
        let mut table = vec![DecodeEntry::default(); 1 << bits];
        for (i, &symbol) in self.palette.exponents().iter().enumerate() {
            let (code, length) = self.code(i);
            let entry = DecodeEntry { symbol, length: length as u8, palette_index: i as u8 };
            // The code of a single symbol is not complete: the other half of the table decodes to the same symbol.
            let step = if self.palette.exponents().len() == 1 { 1 } else { 1 << length };
            (code as usize..1 << bits).step_by(step).for_each(|slot| table[slot] = entry);
        }
        table
    }

    /// The mean code length in bits over the elements that the palette covers.
    pub fn mean_bits(&self, histogram: &Histogram) -> f64 {
        let (mut bits, mut covered) = (0u64, 0u64);
        for (i, &exponent) in self.palette.exponents().iter().enumerate() {
            covered += histogram.count(exponent);
            bits += histogram.count(exponent) * u64::from(self.lengths[i]);
        }
        bits as f64 / covered.max(1) as f64
    }
}

/// One entry of the flat decode table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DecodeEntry {
    /// The decoded exponent.
    pub symbol: u8,
    /// Bits to consume.
    pub length: u8,
    /// Palette index.
    pub palette_index: u8,
}

/// Optimal code lengths under `limit` for weights that never increase (package-merge, Larmore and Hirschberg 1990).
///
/// There are `limit` rounds. Each merges the leaves, lightest first, with the packages of the previous round; of equal
/// weights the leaf comes first. Only the number of leaves in each round's chosen prefix matters, so a round is kept as
/// a list of flags. The GPU encoder does the same.
pub(crate) fn package_merge(weights: &[u64], limit: u32) -> Vec<u8> {
    let m = weights.len();
    debug_assert!((1..=1 << limit).contains(&m) && weights.is_sorted_by(|a, b| a >= b));
    let mut lengths = vec![0u8; m];
    if m == 1 {
        lengths[0] = 1;
        return lengths;
    }
    let mut rounds: Vec<Vec<bool>> = Vec::with_capacity(limit as usize);
    let mut packages: Vec<u64> = Vec::new();
    for _ in 0..limit {
        let (mut leaf, mut package) = (m, 0);
        let (mut merged, mut is_leaf) = (Vec::with_capacity(2 * m), Vec::with_capacity(2 * m));
        while leaf > 0 || package < packages.len() {
            let take_leaf = leaf > 0 && (package == packages.len() || weights[leaf - 1] <= packages[package]);
            is_leaf.push(take_leaf);
            if take_leaf {
                leaf -= 1;
                merged.push(weights[leaf]);
            } else {
                merged.push(packages[package]);
                package += 1;
            }
        }
        packages = merged.chunks_exact(2).map(|pair| pair[0] + pair[1]).collect();
        rounds.push(is_leaf);
    }
    // 2m - 2 items of the last round are chosen; each chosen package stands for two items of the previous round.
    let mut chosen = 2 * m - 2;
    for is_leaf in rounds.iter().rev() {
        let leaves = is_leaf[..chosen].iter().filter(|&&l| l).count();
        // The chosen leaves are the lightest: the last of the palette.
        lengths[m - leaves..m].iter_mut().for_each(|l| *l += 1);
        chosen = 2 * (chosen - leaves);
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kraft(lengths: &[u8]) -> f64 {
        lengths.iter().filter(|&&l| l > 0).map(|&l| 0.5f64.powi(l.into())).sum()
    }

    /// The cost of the best code, found by trying every non-decreasing complete length vector.
    fn best_cost(weights: &[u64], limit: u8) -> u64 {
        fn walk(weights: &[u64], i: usize, min: u8, limit: u8, left: u32, cost: u64, best: &mut u64) {
            if i == weights.len() {
                if left == 0 {
                    *best = (*best).min(cost);
                }
                return;
            }
            for length in min..=limit {
                let share = 1u32 << (15 - length);
                if share <= left {
                    walk(weights, i + 1, length, limit, left - share, cost + weights[i] * u64::from(length), best);
                }
            }
        }
        let mut best = u64::MAX;
        walk(weights, 0, 1, limit, 1 << 15, 0, &mut best);
        best
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn package_merge_is_optimal_and_complete(
            mut weights in prop::collection::vec(1u64..100_000, 2..=9),
            limit in 6u8..=9,
        ) {
            weights.sort_by(|a, b| b.cmp(a));
            let lengths = package_merge(&weights, limit.into());
            prop_assert_eq!(kraft(&lengths), 1.0);
            prop_assert!(lengths.is_sorted());
            prop_assert!(lengths.iter().all(|&l| l <= limit));
            let cost: u64 = weights.iter().zip(lengths).map(|(&w, l)| w * u64::from(l)).sum();
            prop_assert_eq!(cost, best_cost(&weights, limit));
        }
    }

    #[test]
    fn geometric_weights_reach_the_limit() {
        let weights: Vec<u64> = (0..16).map(|i| 1 << (40 - 2 * i)).collect();
        for limit in 6..=15 {
            let lengths = package_merge(&weights, limit);
            assert_eq!(u32::from(*lengths.iter().max().unwrap()), limit);
            assert_eq!(kraft(&lengths), 1.0);
        }
    }

    #[test]
    fn decode_table_inverts_the_code() {
        let mut histogram = Histogram::default();
        (0..16u8).for_each(|i| histogram.add(100 + i, 1 << (16 - i)));
        for limit in 6..=15 {
            let code = Code::from_histogram(&histogram, CodeLimit::new(limit).unwrap()).unwrap();
            let table = code.decode_table();
            for index in 0..16 {
                let (bits, length) = code.code(index);
                for rest in 0..table.len() >> length {
                    let entry = table[bits as usize | rest << length];
                    assert_eq!((usize::from(entry.palette_index), u32::from(entry.length)), (index, length));
                }
            }
        }
    }

    #[test]
    fn one_symbol_takes_one_bit() {
        let mut histogram = Histogram::default();
        histogram.add(7, 100);
        let code = Code::from_histogram(&histogram, CodeLimit::DEFAULT).unwrap();
        assert_eq!(code.code(0), (0, 1));
        assert!(code.decode_table().iter().all(|e| e.symbol == 7 && e.length == 1));
        assert_eq!(Code::from_stored(code.palette().stored(), code.lengths()), Ok(code));
    }

    #[test]
    fn stored_codes_are_checked() {
        let palette: [u8; 16] = std::array::from_fn(|i| i as u8 + 1);
        let with = |lengths: &[u8]| {
            let (mut p, mut l) = ([0; 16], [0; 16]);
            p[..lengths.len()].copy_from_slice(&palette[..lengths.len()]);
            l[..lengths.len()].copy_from_slice(lengths);
            Code::from_stored(p, l)
        };
        assert!(with(&[1, 2, 2]).is_ok());
        assert!(with(&[2, 2, 1]).is_err(), "decreasing");
        assert!(with(&[1, 2, 3]).is_err(), "incomplete");
        assert!(with(&[1, 1, 1]).is_err(), "oversubscribed");
        assert!(with(&[1, 16]).is_err(), "too long");
        assert!(with(&[2]).is_err());
        assert!(with(&[]).is_err());
        assert!(Code::from_stored(palette, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]).is_err());
    }

    #[test]
    fn ties_go_to_the_smaller_exponent() {
        let mut histogram = Histogram::default();
        for (exponent, count) in [(9, 5), (3, 5), (200, 7), (0, 1)] {
            histogram.add(exponent, count);
        }
        let palette = Palette::from_histogram(&histogram).unwrap();
        assert_eq!(palette.exponents(), [200, 3, 9, 0]);
        assert_eq!(palette.index()[9], Some(2));
        assert_eq!(palette.index()[10], None);
    }

    #[test]
    fn only_sixteen_fit() {
        let mut histogram = Histogram::default();
        (0..=255u8).for_each(|e| histogram.add(e, 1));
        assert_eq!(Palette::from_histogram(&histogram).unwrap().exponents(), (0..16).collect::<Vec<u8>>());
        assert!(Palette::from_histogram(&Histogram::default()).is_none());
    }

    #[test]
    fn stored_palettes_are_checked() {
        let mut stored = [0; 16];
        assert!(Palette::from_stored(stored, 1).is_ok());
        assert!(Palette::from_stored(stored, 2).is_err(), "0 twice");
        assert!(Palette::from_stored(stored, 0).is_err());
        stored[5] = 7;
        assert!(Palette::from_stored(stored, 1).is_err(), "unused entry set");
    }
}
