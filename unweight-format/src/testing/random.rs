//! Random numbers and random weights: the only generator of this repository. The same seed yields the same bytes on
//! every machine.

use crate::Float;

/// The splitmix64 generator. It is small and deterministic, so that a failure is reproducible from its seed. Good
/// enough for weights, not for secrets.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator that starts from `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator for a position that several numbers identify, such as seed, tensor and row.
    pub fn at(place: &[u64]) -> Self {
        let mut random = Self(0x6a09_e667_f3bc_c908);
        for &number in place {
            random.0 ^= number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            random.0 = random.bits();
        }
        random
    }

    /// Returns the next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a number below `bound`, which must not be 0. (The bias is below `bound / 2^64`.)
    pub fn below(&mut self, bound: u64) -> u64 {
        self.bits() % bound
    }

    /// Returns a number in 0..1 with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Samples the normal distribution N(0, 1), by the Box-Muller transform.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().max(1e-300).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Samples Student's t distribution, by its definition.
    pub fn student(&mut self, degrees: u32) -> f64 {
        let chi_squared: f64 = (0..degrees).map(|_| self.normal().powi(2)).sum();
        self.normal() / (chi_squared / f64::from(degrees)).sqrt()
    }

    /// Returns `count` bytes that do not compress.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.bits() as u8).collect()
    }
}

/// A kind of BF16 weights.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Weights {
    /// N(0, sigma^2); 0.02 is typical of a trained projection.
    Gaussian {
        /// Standard deviation.
        sigma: f64,
    },
    /// N(0, 0.02^2) divided by the square of a uniform number: the exponents exceed any window of 16.
    HeavyTails,
    /// Any sign and mantissa, exponent 126.
    OneExponent,
    /// Any sign and mantissa, exponents 120 to 122.
    FewExponents,
    /// Sixteen exponents, all in a palette. Every 64th row of a matrix of `cols` columns has the rare ones, and is
    /// longer than 319 bits if codes may be long.
    LongRows {
        /// Columns of the matrix.
        cols: usize,
    },
    /// Zeros of both signs.
    Zeros,
    /// Subnormals of both signs; no zeros.
    Subnormals,
    /// Inf and NaN with every sign and payload.
    NonFinite,
    /// The 65,536 bit patterns in order, starting at one that the seed determines.
    AllPatterns,
    /// Uniformly random bits.
    Noise,
}

impl Weights {
    /// Weights like those of a trained projection.
    pub const TRAINED: Self = Self::Gaussian { sigma: 0.02 };

    /// All kinds.
    pub const ALL: [Self; 10] = [
        Self::TRAINED,
        Self::HeavyTails,
        Self::OneExponent,
        Self::FewExponents,
        Self::LongRows { cols: 64 },
        Self::Zeros,
        Self::Subnormals,
        Self::NonFinite,
        Self::AllPatterns,
        Self::Noise,
    ];

    /// Returns `elements` little-endian weights of two bytes.
    pub fn bytes(self, elements: usize, seed: u64) -> Vec<u8> {
        self.iter(seed).take(elements).flat_map(u16::to_le_bytes).collect()
    }

    /// Returns an infinite iterator of weights.
    pub fn iter(self, seed: u64) -> impl Iterator<Item = u16> {
        let mut random = Random::new(seed);
        let mut pattern = random.bits() as u16;
        let mut random = Random::new(seed);
        let mut element = 0usize;
        std::iter::repeat_with(move || match self {
            Self::Gaussian { sigma } => bf16((random.normal() * sigma) as f32),
            Self::HeavyTails => bf16((random.normal() * 0.02 / random.uniform().max(1e-9).powi(2)) as f32),
            Self::OneExponent => random.bits() as u16 & 0x807f | 126 << 7,
            Self::FewExponents => random.bits() as u16 & 0x807f | (120 + random.below(3) as u16) << 7,
            Self::LongRows { cols } => {
                let rare = element / cols.max(1) % 64 == 5;
                element = element.wrapping_add(1);
                let exponent = 100 + random.below(if rare { 16 } else { 2 }) as u16;
                random.bits() as u16 & 0x807f | exponent << 7
            }
            Self::Zeros => random.bits() as u16 & 0x8000,
            Self::Subnormals => random.bits() as u16 & 0x8000 | (1 + random.below(127) as u16),
            Self::NonFinite => random.bits() as u16 | 0x7f80,
            Self::AllPatterns => {
                pattern = pattern.wrapping_add(1);
                pattern
            }
            Self::Noise => random.bits() as u16,
        })
    }
}

/// Replaces about one element in `one_in`, at random, with weights of another kind.
pub fn sprinkle(weights: &mut [u8], one_in: u64, with: Weights, seed: u64) {
    let (mut random, mut others) = (Random::new(seed), with.iter(seed ^ 1));
    for element in weights.chunks_exact_mut(2) {
        if random.below(one_in) == 0 {
            element.copy_from_slice(&others.next().unwrap_or(0).to_le_bytes());
        }
    }
}

/// Rounds to the nearest BF16, ties to even; Inf stays Inf, and NaN stays NaN.
pub fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 1;
    }
    ((bits + (0x7fff + (bits >> 16 & 1))) >> 16) as u16
}

/// Weights of any type, little-endian, from N(0, 0.02^2). FP8 weights are scaled as in checkpoints: the largest of each
/// run of 128 x 128 becomes the type's largest value.
pub fn float_weights(float: Float, elements: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let values: Vec<f32> = (0..elements).map(|_| (random.normal() * 0.02) as f32).collect();
    let largest = match float {
        Float::E4M3 => Some(448.0),
        Float::E5M2 => Some(57344.0),
        Float::F16 | Float::Bf16 | Float::F32 => None,
    };
    let mut bytes = Vec::with_capacity(elements * float.bytes());
    for run in values.chunks(128 * 128) {
        let most = run.iter().fold(f32::MIN_POSITIVE, |most, value| most.max(value.abs()));
        let scale = largest.map_or(1.0, |largest| largest / most);
        run.iter().for_each(|value| bytes.extend(&round_to(float, value * scale).to_le_bytes()[..float.bytes()]));
    }
    bytes
}

/// Rounds to the nearest number of a type, ties to even. The value is finite and at most the type's largest number.
pub fn round_to(float: Float, value: f32) -> u32 {
    let (fraction, bias) = (float.fraction_bits(), (1 << (float.exponent_bits() - 1)) - 1);
    let sign = u32::from(value.is_sign_negative()) << (8 * float.bytes() - 1);
    let size = f64::from(value.abs());
    // The value's binade, at least that of the subnormals.
    let exponent = ((size.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    let steps = (size * 2f64.powi(fraction as i32 - exponent)).round_ties_even() as u32;
    // A carry into the exponent adds up by itself, as does the implicit leading bit.
    sign | ((((exponent + bias - 1) as u32) << fraction) + steps)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn same_seed_same_weights() {
        // splitmix64 from 0, as published with the generator.
        let mut random = Random::new(0);
        assert_eq!([random.bits(), random.bits()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
        for kind in Weights::ALL {
            assert_eq!(kind.bytes(100, 3), kind.bytes(100, 3));
            assert_ne!(kind.bytes(100, 3), kind.bytes(100, 4), "{kind:?}");
        }
    }

    #[test]
    fn kinds_of_random_weights_have_their_statistics() {
        let of = |kind: Weights| kind.iter(5).take(1 << 16);
        assert!(of(Weights::Zeros).all(|w| w & 0x7fff == 0));
        assert!(of(Weights::Subnormals).all(|w| w & 0x7f80 == 0 && w & 0x7f != 0));
        assert!(of(Weights::NonFinite).all(|w| w & 0x7f80 == 0x7f80));
        assert_eq!(of(Weights::AllPatterns).collect::<HashSet<u16>>().len(), 1 << 16);
        let values: Vec<f64> = of(Weights::TRAINED).map(|w| half::bf16::from_bits(w).to_f64()).collect();
        let deviation = (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64).sqrt();
        assert!((deviation - 0.02).abs() < 0.001, "{deviation}");
        let largest = |kind| of(kind).map(|w| half::bf16::from_bits(w).to_f64().abs()).fold(0.0, f64::max);
        assert!(largest(Weights::HeavyTails) > 10.0 * largest(Weights::TRAINED));
        let exponents = |kind| of(kind).map(|w| w >> 7 & 0xff).collect::<std::collections::BTreeSet<u16>>();
        assert_eq!(exponents(Weights::OneExponent), [126].into());
        assert_eq!(exponents(Weights::FewExponents), (120..=122).collect());
        let rare = |w: u16| w >> 7 & 0xff > 101;
        let rows: Vec<usize> =
            of(Weights::LongRows { cols: 96 }).enumerate().filter(|(_, w)| rare(*w)).map(|(i, _)| i / 96).collect();
        assert!(rows.len() > 500 && rows.iter().all(|row| row % 64 == 5), "{}", rows.len());
    }

    #[test]
    fn rounding_to_any_dtype_matches_half() {
        let mut random = Random::new(3);
        for _ in 0..100_000 {
            let value = (random.normal() * 10f64.powi(random.below(12) as i32 - 8)) as f32;
            assert_eq!(round_to(Float::F16, value), u32::from(half::f16::from_f32(value).to_bits()), "{value}");
            assert_eq!(round_to(Float::Bf16, value), u32::from(half::bf16::from_f32(value).to_bits()), "{value}");
            assert_eq!(round_to(Float::F32, value), value.to_bits());
        }
        for (value, e4m3, e5m2) in [(1.0, 0x38, 0x3c), (-448.0, 0xfe, 0xdf), (0.0078125, 4, 0x20), (0.0, 0, 0)] {
            assert_eq!((round_to(Float::E4M3, value), round_to(Float::E5M2, value)), (e4m3, e5m2), "{value}");
        }
    }

    #[test]
    fn rounding_matches_half() {
        for bits in
            (0..=u16::MAX).flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001].map(|low| u32::from(high) << 16 | low))
        {
            let value = f32::from_bits(bits);
            let (got, expected) = (bf16(value), half::bf16::from_f32(value));
            assert!(got == expected.to_bits() || expected.is_nan() && half::bf16::from_bits(got).is_nan(), "{bits:#x}");
        }
    }
}
