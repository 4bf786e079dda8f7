//! Rotary position embedding: frequencies and tables, computed as transformers computes them.

use std::{f64::consts::TAU, sync::Arc};

use half::bf16;
use rayon::prelude::*;

/// Rotary position embedding of queries and keys.
///
/// Pair `i` of a head's elements is rotated by the angle `position * inv_freq[i]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// The number of elements of a head that are rotated, from the first on; even.
    pub dim: u32,
    /// The elements of a head that are rotated together.
    pub pairs: RopePairs,
    /// Scaling of the frequencies for contexts longer than those of training.
    pub kind: RopeKind,
}

/// The elements of a head that are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RopePairs {
    /// `i` and `i + dim / 2`.
    Halves,
    /// `2 * i` and `2 * i + 1`.
    Adjacent,
}

/// Scaling of frequencies for contexts longer than those of training.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeKind {
    /// Frequencies are not scaled.
    Default,
    /// All frequencies are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by a factor, high ones are kept, with a ramp between.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Frequencies with wavelengths above `original / low` are divided.
        low: f64,
        /// Frequencies with wavelengths below `original / high` are kept.
        high: f64,
        /// The context length of training in tokens.
        original: u32,
    },
    /// YaRN: like Llama 3.1, with the ramp over dimensions; cos and sin are multiplied by a factor, too.
    Yarn {
        /// The factor.
        factor: f64,
        /// Frequencies with more rotations within the original context are kept.
        beta_fast: f64,
        /// Frequencies with fewer rotations are divided.
        beta_slow: f64,
        /// The factor of cos and sin.
        attention_factor: f64,
        /// The context length of training in tokens.
        original: u32,
        /// Whether the ends of the ramp are whole dimensions.
        truncate: bool,
    },
    /// LongRoPE: each frequency is divided by its own factor, and cos and sin are multiplied by a common one.
    /// Both depend on the length of the context.
    Long {
        /// The `dim / 2` factors in contexts of up to `original` tokens.
        short: Arc<[f32]>,
        /// The `dim / 2` factors in longer contexts.
        long: Arc<[f32]>,
        /// The factors of cos and sin: in contexts of up to `original` tokens, and in longer ones.
        attention_factors: [f64; 2],
        /// The context length of training in tokens.
        original: u32,
    },
}

/// Cosines and sines of every position, `[positions, dim / 2]` each, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// Cosines times the attention factor.
    pub cos: Vec<bf16>,
    /// Sines times the attention factor.
    pub sin: Vec<bf16>,
    /// The number of elements of a head that are rotated; a row of the table has half as many values.
    pub dim: u32,
}

impl Rope {
    /// The factor of cos and sin in a context of `context` tokens: 1 unless YaRN or LongRoPE set another.
    pub fn attention_factor(&self, context: u32) -> f32 {
        match self.kind {
            RopeKind::Yarn { attention_factor, .. } => attention_factor as f32,
            RopeKind::Long { attention_factors: [short, long], original, .. } => {
                (if context > original { long } else { short }) as f32
            }
            _ => 1.0,
        }
    }

    /// Returns the radians per position of each of the `dim / 2` pairs, in a context of `context` tokens, on which only
    /// LongRoPE depends.
    ///
    /// Every step is rounded to f32 in the order of transformers, with torch's `x / t` for a number and a tensor: the
    /// reciprocal of `t` times `x`. Powers are rounded once from f64. Those of torch depend on the processor, and
    /// sometimes differ by one unit in the last place.
    pub fn inv_freq(&self, context: u32) -> Vec<f32> {
        let pairs = (0..self.dim / 2).map(|i| {
            let exponent = (2 * i) as f32 / self.dim as f32;
            f64::from(self.theta as f32).powf(f64::from(exponent)) as f32
        });
        match &self.kind {
            RopeKind::Long { short, long, original, .. } => {
                let factors = if context > *original { long } else { short };
                factors.iter().zip(pairs).map(|(factor, power)| (factor * power).recip()).collect()
            }
            RopeKind::Default => pairs.map(f32::recip).collect(),
            RopeKind::Linear { factor } => pairs.map(|power| power.recip() / *factor as f32).collect(),
            &RopeKind::Llama3 { factor, low, high, original } => {
                let (original, span) = (f64::from(original), (high - low) as f32);
                let (longest, shortest) = ((original / low) as f32, (original / high) as f32);
                let scale = |power: f32| {
                    let frequency = power.recip();
                    let wavelength = frequency.recip() * TAU as f32;
                    let scaled = if wavelength > longest { frequency / factor as f32 } else { frequency };
                    if wavelength < shortest || wavelength > longest {
                        return scaled;
                    }
                    let smooth = (wavelength.recip() * original as f32 - low as f32) / span;
                    (1.0 - smooth) * scaled / factor as f32 + smooth * scaled
                };
                pairs.map(scale).collect()
            }
            &RopeKind::Yarn { factor, beta_fast, beta_slow, original, truncate, .. } => {
                let dim = f64::from(self.dim);
                // The dimension whose frequency makes `rotations` rotations within the original context.
                let dimension_of =
                    |rotations: f64| dim * (f64::from(original) / (rotations * TAU)).ln() / (2.0 * self.theta.ln());
                let (mut low, mut high) = (dimension_of(beta_fast), dimension_of(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001;
                }
                let (start, span) = (low as f32, (high - low) as f32);
                let scale = |(i, power): (usize, f32)| {
                    let unscaled = 1.0 - ((i as f32 - start) / span).clamp(0.0, 1.0);
                    (factor as f32 * power).recip() * (1.0 - unscaled) + power.recip() * unscaled
                };
                pairs.enumerate().map(scale).collect()
            }
        }
    }

    /// The `dim / 2` cosines and sines of a position in a context of `context` tokens, times the attention factor.
    ///
    /// The angle is an f32 product, as in transformers: at position 131,071 an exact one would differ by 0.008 radians.
    pub fn cos_sin(&self, position: u32, context: u32) -> (Vec<f32>, Vec<f32>) {
        let (frequencies, factor) = (self.inv_freq(context), self.attention_factor(context));
        frequencies.iter().map(|&frequency| scaled_cos_sin(frequency, position, factor)).unzip()
    }

    /// Returns the tables of positions `0..positions` in a context of `positions` tokens, rounded to bf16 as in a bf16
    /// model. They take `2 * positions * dim` bytes.
    pub fn table(&self, positions: u32) -> RopeTable {
        let (frequencies, factor) = (self.inv_freq(positions), self.attention_factor(positions));
        let rows = (0..positions).into_par_iter();
        let pairs =
            rows.flat_map_iter(|position| frequencies.iter().map(move |&f| scaled_cos_sin(f, position, factor)));
        let (cos, sin) = pairs.map(|(cos, sin)| (bf16::from_f32(cos), bf16::from_f32(sin))).unzip();
        RopeTable { cos, sin, dim: self.dim }
    }
}

fn scaled_cos_sin(inv_freq: f32, position: u32, factor: f32) -> (f32, f32) {
    let (sin, cos) = f64::from(position as f32 * inv_freq).sin_cos();
    (cos as f32 * factor, sin as f32 * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rope_table_equals_its_rows() {
        let rope = Rope { theta: 10_000.0, dim: 6, pairs: RopePairs::Halves, kind: RopeKind::Default };
        let table = rope.table(5);
        assert_eq!((table.cos.len(), table.sin.len()), (15, 15));
        for position in 0..5 {
            let (cos, sin) = rope.cos_sin(position, 5);
            for i in 0..3 {
                let at = position as usize * 3 + i;
                assert_eq!((table.cos[at], table.sin[at]), (bf16::from_f32(cos[i]), bf16::from_f32(sin[i])));
            }
        }
        assert_eq!((table.cos[0], table.sin[0]), (bf16::ONE, bf16::ZERO));
    }

    #[test]
    fn rope_scalings_agree_at_their_limits() {
        let of = |kind| Rope { theta: 500_000.0, dim: 128, pairs: RopePairs::Halves, kind };
        let rope = |kind| of(kind).inv_freq(8192);
        let plain = rope(RopeKind::Default);
        assert_eq!(plain[0], 1.0);
        let linear = rope(RopeKind::Linear { factor: 4.0 });
        assert!(plain.iter().zip(&linear).all(|(a, b)| a / 4.0 == *b));
        let llama3 = rope(RopeKind::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 });
        assert_eq!(llama3[..20], plain[..20], "short wavelengths are kept");
        assert_eq!(llama3[63], plain[63] / 8.0, "long wavelengths are divided");
        assert!(llama3.windows(2).all(|pair| pair[0] > pair[1]), "the ramp is monotonic");
        let (factor, beta_fast, beta_slow, original) = (8.0, 32.0, 1.0, 8192);
        let yarn = RopeKind::Yarn { factor, beta_fast, beta_slow, attention_factor: 1.2, original, truncate: true };
        let scaled = rope(yarn.clone());
        assert_eq!((scaled[0], scaled[63]), (1.0, (8.0 * plain[63].recip()).recip()));
        assert_eq!(of(yarn).cos_sin(0, 1).0[0], 1.2);
        let factors = |factor: f32| std::iter::repeat_n(factor, 64).collect::<Arc<[f32]>>();
        let attention_factors = [1.25, 1.5];
        let long = RopeKind::Long { short: factors(1.0), long: factors(4.0), attention_factors, original: 8192 };
        assert_eq!(rope(long.clone()), plain, "a context of the training length");
        assert!(of(long.clone()).inv_freq(8193).iter().zip(&plain).all(|(a, b)| *a == b / 4.0));
        assert_eq!([8192, 8193].map(|context| of(long.clone()).cos_sin(0, context).0[0]), [1.25, 1.5]);
    }
}
