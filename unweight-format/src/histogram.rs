//! Counts of exponents.

use crate::bf16;

/// How often each exponent occurs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: Box<[u64; 256]>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: Box::new([0; 256]) }
    }
}

impl Histogram {
    /// Counts little-endian BF16 elements; an odd last byte is ignored.
    pub fn of(bytes: &[u8]) -> Self {
        let mut counter = Counter::default();
        counter.add(bytes);
        counter.finish()
    }

    /// Adds `count` occurrences.
    pub fn add(&mut self, exponent: u8, count: u64) {
        self.counts[usize::from(exponent)] += count;
    }

    /// Adds another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts.iter()).for_each(|(total, &count)| *total += count);
    }

    /// Occurrences of an exponent.
    pub fn count(&self, exponent: u8) -> u64 {
        self.counts[usize::from(exponent)]
    }

    /// All counts.
    pub fn counts(&self) -> &[u64; 256] {
        &self.counts
    }

    /// Elements counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Shannon entropy of the exponents, bits per element.
    pub fn entropy_bits(&self) -> f64 {
        let total = self.total() as f64;
        self.counts.iter().filter(|&&c| c > 0).map(|&c| c as f64 / total).map(|p| -p * p.log2()).sum()
    }
}

/// Counts exponents fast.
///
/// Increments are what counting costs, so two neighbours share one: the tables are indexed by pairs of exponents and folded
/// once in [`finish`](Self::finish). Two tables, because equal pairs in a row would wait for each other's store.
#[derive(Debug)]
pub(crate) struct Counter {
    pairs: Vec<[u64; 1 << 16]>,
    rest: Histogram,
}

impl Default for Counter {
    fn default() -> Self {
        Self { pairs: vec![[0; 1 << 16]; 2], rest: Histogram::default() }
    }
}

impl Counter {
    /// Counts little-endian BF16 elements; an odd last byte is ignored.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let [left, right] = self.pairs.as_mut_slice() else { unreachable!("two tables") };
        let mut quads = bytes.chunks_exact(8);
        for quad in &mut quads {
            let word = u64::from_le_bytes(quad.try_into().expect("8 bytes")) >> 7;
            // Bits 0..8 and 16..24 of each half are the exponents of a pair.
            let index = |pair: u64| ((pair & 0xff) | (pair >> 8 & 0xff00)) as usize;
            left[index(word)] += 1;
            right[index(word >> 32)] += 1;
        }
        for element in quads.remainder().chunks_exact(2) {
            self.rest.add(bf16::exponent(u16::from_le_bytes([element[0], element[1]])), 1);
        }
    }

    /// The counts.
    pub(crate) fn finish(self) -> Histogram {
        let mut histogram = self.rest;
        for table in &self.pairs {
            for (high, row) in table.chunks_exact(256).enumerate() {
                for (low, &count) in row.iter().enumerate() {
                    histogram.counts[low] += count;
                    histogram.counts[high] += count;
                }
            }
        }
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_pairs_agrees_with_counting_elements() {
        let mut state = 1u64;
        let bytes: Vec<u8> = (0..(1 << 19) + 13)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            })
            .collect();
        let mut obvious = Histogram::default();
        for element in bytes.chunks_exact(2) {
            obvious.add(bf16::exponent(u16::from_le_bytes([element[0], element[1]])), 1);
        }
        assert_eq!(Histogram::of(&bytes), obvious);
        assert_eq!(obvious.total(), bytes.len() as u64 / 2);
    }

    #[test]
    fn entropy_of_a_fair_pair_is_one_bit() {
        let mut histogram = Histogram::default();
        histogram.add(1, 10);
        histogram.add(2, 10);
        assert!((histogram.entropy_bits() - 1.0).abs() < 1e-12);
        assert_eq!(Histogram::default().entropy_bits(), 0.0);
    }
}
