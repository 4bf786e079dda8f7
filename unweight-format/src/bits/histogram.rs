//! Counts of exponents.

use crate::{Float, bf16};

/// The number of elements of a tensor per value of the exponent field.
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
    /// Counts the exponents of little-endian BF16 elements; an odd last byte is ignored.
    pub fn of(bytes: &[u8]) -> Self {
        Self::of_float(Float::Bf16, bytes)
    }

    /// Counts the exponents of little-endian elements of another type; an incomplete last element is ignored.
    pub(crate) fn of_float(float: Float, bytes: &[u8]) -> Self {
        let mut counter = Counter::default();
        counter.add_float(float, bytes);
        counter.finish()
    }

    /// Adds `count` occurrences of an exponent.
    pub fn add(&mut self, exponent: u8, count: u64) {
        self.counts[usize::from(exponent)] += count;
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts.iter()).for_each(|(total, &count)| *total += count);
    }

    /// The number of elements with an exponent.
    pub fn count(&self, exponent: u8) -> u64 {
        self.counts[usize::from(exponent)]
    }

    /// All counts, indexed by exponent.
    pub fn counts(&self) -> &[u64; 256] {
        &self.counts
    }

    /// The number of elements that were counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The Shannon entropy of the exponents in bits per element.
    pub fn entropy_bits(&self) -> f64 {
        let total = self.total() as f64;
        self.counts.iter().filter(|&&c| c > 0).map(|&c| c as f64 / total).map(|p| -p * p.log2()).sum()
    }
}

/// Counts exponents fast.
///
/// Plain counting costs one memory increment per element. Almost all elements of a tensor have one of 16 exponents, so
/// with AVX-512, 64 elements at a time are compared with each of these, and only the others are counted one by one.
/// With AVX2 they are successive, and a shuffle of 32 elements counts two. The 16 are guessed from the first bytes; a
/// wrong guess costs time, not correctness.
#[derive(Debug)]
pub(crate) struct Counter {
    /// Adjacent elements use separate tables, because equal exponents would wait for each other's store.
    tables: Box<[[u64; 4]; 256]>,
    #[cfg(target_arch = "x86_64")]
    common: Option<[u8; COMMON]>,
}

#[cfg(target_arch = "x86_64")]
const COMMON: usize = 16;

impl Default for Counter {
    fn default() -> Self {
        Self {
            tables: Box::new([[0; 4]; 256]),
            #[cfg(target_arch = "x86_64")]
            common: None,
        }
    }
}

impl Counter {
    /// Counts little-endian elements; an incomplete last element is ignored.
    pub(crate) fn add_float(&mut self, float: Float, bytes: &[u8]) {
        match float {
            Float::Bf16 => self.add(bytes),
            Float::E4M3 => self.add_each(bytes, |&[byte]| Float::E4M3.exponent(byte.into())),
            Float::E5M2 => self.add_each(bytes, |&[byte]| Float::E5M2.exponent(byte.into())),
            Float::F16 => self.add_each(bytes, |&half| Float::F16.exponent(u16::from_le_bytes(half).into())),
            Float::F32 => self.add_each(bytes, |&single| Float::F32.exponent(u32::from_le_bytes(single))),
        }
    }

    fn add_each<const BYTES: usize>(&mut self, bytes: &[u8], exponent: impl Fn(&[u8; BYTES]) -> u8) {
        let (quads, rest) = bytes.as_chunks::<BYTES>().0.as_chunks::<4>();
        for quad in quads {
            for (i, element) in quad.iter().enumerate() {
                self.tables[usize::from(exponent(element))][i] += 1;
            }
        }
        rest.iter().for_each(|element| self.tables[usize::from(exponent(element))][0] += 1);
    }

    /// Counts little-endian BF16 elements; an odd last byte is ignored.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        #[cfg(target_arch = "x86_64")]
        if bytes.len() >= 1 << 16 && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vbmi") {
            let common = *self.common.get_or_insert_with(|| {
                let mut sample = Self::default();
                sample.add_plain(&bytes[..1 << 14]);
                let sample = sample.finish();
                let mut order: [u8; 256] = std::array::from_fn(|e| e as u8);
                order.sort_by_key(|&e| std::cmp::Reverse(sample.count(e)));
                order[..COMMON].try_into().expect("16 of 256")
            });
            // SAFETY: the processor has the instructions.
            let rest = unsafe { self.add_avx512(bytes, &common) };
            return self.add_plain(rest);
        } else if bytes.len() >= 1 << 14
            && is_x86_feature_detected!("avx2")
            && let Some(first) = first_common(&bytes[..1 << 12])
        {
            // SAFETY: the processor has the instructions.
            let rest = unsafe { self.add_avx2(bytes, first) };
            return self.add_plain(rest);
        }
        self.add_plain(bytes);
    }

    fn add_plain(&mut self, bytes: &[u8]) {
        let mut quads = bytes.chunks_exact(8);
        for quad in &mut quads {
            let word = u64::from_le_bytes(quad.try_into().expect("8 bytes")) >> 7;
            for i in 0..4 {
                self.tables[(word >> (16 * i)) as usize & 0xff][i] += 1;
            }
        }
        for element in quads.remainder().chunks_exact(2) {
            self.tables[usize::from(bf16::exponent(u16::from_le_bytes([element[0], element[1]])))][0] += 1;
        }
    }

    /// Counts whole blocks of 32 elements and returns the remaining bytes. Most elements should have one of the 16
    /// exponents from `first` on.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn add_avx2<'a>(&mut self, bytes: &'a [u8], first: u8) -> &'a [u8] {
        use std::arch::x86_64::*;

        const PAIRS: usize = COMMON / 2;
        let (blocks, rest) = bytes.as_chunks::<64>();
        let (low_byte, low_nibble) = (_mm256_set1_epi16(0xff), _mm256_set1_epi8(15));
        let (zero, first_vector) = (_mm256_setzero_si256(), _mm256_set1_epi8(first as i8));
        // A byte counts the two exponents of a pair, in four bits each.
        let increments: [__m256i; PAIRS] = std::array::from_fn(|pair| {
            let word = _mm_set_epi64x(if pair < 4 { 0 } else { 0x1001 }, if pair < 4 { 0x1001 } else { 0 });
            _mm256_broadcastsi128_si256(_mm_sll_epi64(word, _mm_cvtsi32_si128(16 * (pair as i32 % 4))))
        });
        let mut sums = [[zero; 2]; PAIRS];
        // Four bits overflow after 15 vectors.
        for run in blocks.chunks(15) {
            let mut counters = [zero; PAIRS];
            for block in run {
                // SAFETY: a block has 64 bytes; loads need no alignment.
                let (low, high) = unsafe {
                    (_mm256_loadu_si256(block.as_ptr().cast()), _mm256_loadu_si256(block.as_ptr().add(32).cast()))
                };
                let low = _mm256_and_si256(_mm256_srli_epi16::<7>(low), low_byte);
                let high = _mm256_and_si256(_mm256_srli_epi16::<7>(high), low_byte);
                let exponents = _mm256_packus_epi16(low, high);
                // A shuffle takes the lower four bits, or yields 0 if the highest is set: as it is from 16 on.
                let index = _mm256_adds_epu8(_mm256_sub_epi8(exponents, first_vector), _mm256_set1_epi8(0x70));
                for (counter, &increments) in counters.iter_mut().zip(&increments) {
                    *counter = _mm256_add_epi8(*counter, _mm256_shuffle_epi8(increments, index));
                }
                let mut other_elements = _mm256_movemask_epi8(index) as u32;
                if other_elements != 0 {
                    let mut each = [0u8; 32];
                    // SAFETY: the array has 32 bytes; the store needs no alignment.
                    unsafe { _mm256_storeu_si256(each.as_mut_ptr().cast(), exponents) };
                    while other_elements != 0 {
                        self.tables[usize::from(each[other_elements.trailing_zeros() as usize])][0] += 1;
                        other_elements &= other_elements - 1;
                    }
                }
            }
            for (sums, &counter) in sums.iter_mut().zip(&counters) {
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(counter), low_nibble);
                let low = _mm256_and_si256(counter, low_nibble);
                sums[0] = _mm256_add_epi64(sums[0], _mm256_sad_epu8(low, zero));
                sums[1] = _mm256_add_epi64(sums[1], _mm256_sad_epu8(high, zero));
            }
        }
        for (i, sum) in sums.as_flattened().iter().enumerate() {
            let mut parts = [0u64; 4];
            // SAFETY: the array has 32 bytes; the store needs no alignment.
            unsafe { _mm256_storeu_si256(parts.as_mut_ptr().cast(), *sum) };
            self.tables[usize::from(first.wrapping_add(i as u8))][0] += parts.iter().sum::<u64>();
        }
        rest
    }

    /// Counts whole blocks of 64 elements and returns the remaining bytes.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,bmi1,popcnt")]
    fn add_avx512<'a>(&mut self, bytes: &'a [u8], common: &[u8; COMMON]) -> &'a [u8] {
        use std::arch::x86_64::*;

        let (blocks, rest) = bytes.as_chunks::<128>();
        let common_vectors = common.map(|e| _mm512_set1_epi8(e as i8));
        let mut member = [0u8; 256];
        common.iter().for_each(|&e| member[usize::from(e)] = 1);
        // SAFETY: four quarters of 64 bytes; loads need no alignment.
        let member: [__m512i; 4] =
            std::array::from_fn(|i| unsafe { _mm512_loadu_si512(member.as_ptr().add(64 * i).cast()) });
        // Byte counters overflow after 255 blocks.
        for run in blocks.chunks(255) {
            let mut counters = [_mm512_setzero_si512(); COMMON];
            for block in run {
                // SAFETY: a block has 128 bytes; loads need no alignment.
                let (low, high) = unsafe {
                    (_mm512_loadu_si512(block.as_ptr().cast()), _mm512_loadu_si512(block.as_ptr().add(64).cast()))
                };
                let low = _mm512_cvtepi16_epi8(_mm512_srli_epi16::<7>(low));
                let high = _mm512_cvtepi16_epi8(_mm512_srli_epi16::<7>(high));
                let exponents = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                for (counter, &common_vectors) in counters.iter_mut().zip(&common_vectors) {
                    let equal = _mm512_cmpeq_epi8_mask(exponents, common_vectors);
                    *counter = _mm512_mask_sub_epi8(*counter, equal, *counter, _mm512_set1_epi8(-1));
                }
                let low = _mm512_permutex2var_epi8(member[0], exponents, member[1]);
                let high = _mm512_permutex2var_epi8(member[2], exponents, member[3]);
                let is_common = _mm512_mask_blend_epi8(_mm512_movepi8_mask(exponents), low, high);
                let mut other_elements = _mm512_testn_epi8_mask(is_common, is_common);
                while other_elements != 0 {
                    let i = 2 * other_elements.trailing_zeros() as usize;
                    let exponent = crate::bf16::exponent(u16::from_le_bytes([block[i], block[i + 1]]));
                    self.tables[usize::from(exponent)][0] += 1;
                    other_elements &= other_elements - 1;
                }
            }
            for (&exponent, &counter) in common.iter().zip(&counters) {
                let count = _mm512_reduce_add_epi64(_mm512_sad_epu8(counter, _mm512_setzero_si512()));
                self.tables[usize::from(exponent)][0] += count as u64;
            }
        }
        rest
    }

    /// Returns the counts.
    pub(crate) fn finish(self) -> Histogram {
        Histogram { counts: Box::new(self.tables.map(|neighbours| neighbours.iter().sum())) }
    }
}

/// The first of the 16 successive exponents that at least seven eighths of these elements have.
#[cfg(target_arch = "x86_64")]
fn first_common(bytes: &[u8]) -> Option<u8> {
    let mut sample = Counter::default();
    sample.add_plain(bytes);
    let sample = sample.finish();
    let total = |first: u8| sample.counts()[first.into()..][..COMMON].iter().sum::<u64>();
    let first = (0..=u8::MAX - (COMMON as u8 - 1)).max_by_key(|&first| total(first))?;
    (total(first) * 8 >= sample.total() * 7).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, Weights};

    #[test]
    fn fast_counting_agrees_with_the_obvious_one() {
        let bytes = Random::new(1).bytes((1 << 19) + 13);
        let mut obvious = Histogram::default();
        for element in bytes.chunks_exact(2) {
            obvious.add(bf16::exponent(u16::from_le_bytes([element[0], element[1]])), 1);
        }
        let mut plain = Counter::default();
        plain.add_plain(&bytes);
        assert_eq!(plain.finish(), obvious);
        assert_eq!(Histogram::of(&bytes), obvious);
        assert_eq!(obvious.total(), bytes.len() as u64 / 2);
        for float in Float::ALL {
            let mut obvious = Histogram::default();
            let elements = bytes.chunks_exact(float.bytes());
            elements.for_each(|element| obvious.add(float.exponent(float.read(element)), 1));
            assert_eq!(Histogram::of_float(float, &bytes), obvious, "{}", float.name());
        }
    }

    /// Any exponents, and those of weights, wherever the 16 that are counted fast begin.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn shuffles_count_like_the_obvious_function() {
        if !is_x86_feature_detected!("avx2") {
            eprintln!("skipped: this processor has no AVX2");
            return;
        }
        let weights = Weights::TRAINED.bytes(1 << 16, 2);
        assert!(first_common(&weights).is_some_and(|first| (100..=120).contains(&first)), "weights are counted fast");
        for bytes in [weights, Random::new(2).bytes((1 << 15) + 13)] {
            let mut plain = Counter::default();
            plain.add_plain(&bytes);
            let plain = plain.finish();
            for first in [0, 1, 107, 112, 119, 240] {
                let mut counter = Counter::default();
                // SAFETY: the processor has the instructions.
                let rest = unsafe { counter.add_avx2(&bytes, first) };
                assert!(rest.len() < 64);
                counter.add_plain(rest);
                assert_eq!(counter.finish(), plain, "{first}");
            }
        }
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
