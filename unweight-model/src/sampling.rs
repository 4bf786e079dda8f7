//! Chooses a token from logits: the parameters, and [`sample`], a slow and simple reference. The kernel
//! (`templates/include/unweight/kernels/sample.cuh`) agrees with it in every bit.
//!
//! To make this possible, no logarithm or exponential comes from a library: both are polynomials of fused
//! multiply-adds, and sums are sums of integers.

mod adjust;

use half::bf16;

pub use adjust::{Adjustments, BIASES_MAX, BiasError, History, Logprobs, TOP_LOGPROBS_MAX, adjust, forbid, logprobs};

/// Parameters of sampling. Filters apply in this order, as in transformers: temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SampleParams {
    /// The divisor of logits; 0 takes the token with the largest logit, the lowest token if several are equal.
    pub temperature: f32,
    /// Keeps only tokens whose logit is among the `top_k` largest, equal ones included; 0 keeps all.
    pub top_k: u32,
    /// Keeps only the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps only tokens with at least this share of the probability of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// The seed of the random numbers. The same seed at the same position of a sequence results in the same number.
    pub seed: u64,
}

impl Default for SampleParams {
    /// Greedy sampling.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// A sampling parameter is out of range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{name} = {value} is not {range}")]
pub struct OutOfRange {
    /// The name of the parameter.
    pub name: &'static str,
    /// The value of the parameter.
    pub value: f32,
    /// The valid values, as text.
    pub range: &'static str,
}

impl OutOfRange {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "sampling-option-out-of-range"
    }
}

impl SampleParams {
    /// Sets the divisor of logits.
    #[must_use]
    pub fn temperature(self, temperature: f32) -> Self {
        Self { temperature, ..self }
    }

    /// Sets the number of largest logits to keep.
    #[must_use]
    pub fn top_k(self, top_k: u32) -> Self {
        Self { top_k, ..self }
    }

    /// Sets the probability of the most likely tokens to keep.
    #[must_use]
    pub fn top_p(self, top_p: f32) -> Self {
        Self { top_p, ..self }
    }

    /// Sets the smallest share of the most likely token's probability to keep.
    #[must_use]
    pub fn min_p(self, min_p: f32) -> Self {
        Self { min_p, ..self }
    }

    /// Sets the seed of the random numbers.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Checks that every parameter is in its range.
    ///
    /// # Errors
    /// [`OutOfRange`] for the first parameter that is not.
    pub fn check(&self) -> Result<(), OutOfRange> {
        let check = |name, value, ok, range| if ok { Ok(()) } else { Err(OutOfRange { name, value, range }) };
        let Self { temperature, top_p, min_p, .. } = *self;
        // Logits of bf16 divided by less than this may not be numbers in f32.
        const TEMPERATURE_MIN: f32 = 1e-3;
        let in_range = temperature == 0.0 || (TEMPERATURE_MIN..=100.0).contains(&temperature);
        check("temperature", temperature, in_range, "0 or a number from 0.001 to 100")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number from 0 to 1")
    }
}

/// The token of a row whose logits are all NaN; no vocabulary contains it.
pub const NO_TOKEN: u32 = u32::MAX;

/// Returns the token for a row of logits whose newest token is at `position`.
///
/// - NaN is below all numbers. If all logits are NaN, or if there are none, the result is [`NO_TOKEN`].
/// - At temperature 0, the token with the largest logit; of equal ones the lowest.
/// - A token's weight is `exp((logit - largest) / temperature)`; it is 1 for logits equal to the largest, also for
///   infinite ones.
/// - top-k keeps logits that are not below the k-th largest. top-p keeps the fewest logits, from the largest down,
///   whose tokens have `top_p` of the weight of all that top-k kept. min-p keeps tokens whose weight is at least
///   `min_p`. Equal logits are kept together or dropped together.
/// - Of the kept tokens, the one with the largest `(logit - largest) / temperature + noise`, with Gumbel noise from
///   Philox4x32-10: key `seed`, counter `(token / 4, position, 0, 0)`, word `token % 4`. This is a draw from the
///   softmax, which depends only on the row, its parameters and its position.
///
/// ```
/// # use half::bf16;
/// # use unweight_model::sampling::{SampleParams, sample};
/// let logits = [1.0, 3.0, 3.0, 2.0].map(bf16::from_f32);
/// assert_eq!(sample(&logits, &SampleParams::default(), 0), 1);
/// let drawn = sample(&logits, &SampleParams::default().temperature(0.8).top_k(2).seed(7), 0);
/// assert!(drawn == 1 || drawn == 2);
/// ```
pub fn sample(logits: &[bf16], params: &SampleParams, position: u32) -> u32 {
    let logits: Vec<f32> = logits.iter().map(|logit| logit.to_f32()).collect();
    choose(&logits, params, position)
}

/// Like [`sample`], from logits in f32, such as those of [`adjust`].
pub fn choose(logits: &[f32], params: &SampleParams, position: u32) -> u32 {
    let row = Row::new(logits, params.temperature);
    if row.largest_key == NAN_KEY {
        return NO_TOKEN;
    }
    if params.temperature.is_nan() || params.temperature <= 0.0 {
        return row.keys.iter().position(|key| *key == row.largest_key).unwrap_or(0) as u32;
    }
    let scores = row
        .kept_tokens(params)
        .into_iter()
        .map(|token| (token, row.scaled(token) + noise(params.seed, position, token as u32)));
    // Of equal scores the first wins.
    let best = scores.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map_or(0, |(token, _)| token as u32)
}

/// The key of NaN, below all others.
const NAN_KEY: u32 = 0;

/// A number that orders logits; equal logits (both zeros) have the same key.
fn key(logit: f32) -> u32 {
    let bits = logit.to_bits();
    match bits {
        _ if logit.is_nan() => NAN_KEY,
        0x8000_0000 => 0x8000_0000,
        _ if bits >> 31 == 1 => !bits,
        _ => bits | 0x8000_0000,
    }
}

/// A row of logits at a temperature.
struct Row<'a> {
    logits: &'a [f32],
    keys: Vec<u32>,
    largest_key: u32,
    /// The largest logit.
    largest: f32,
    /// 1 / temperature.
    inverse: f32,
}

impl<'a> Row<'a> {
    fn new(logits: &'a [f32], temperature: f32) -> Self {
        let keys: Vec<_> = logits.iter().map(|logit| key(*logit)).collect();
        let largest_key = keys.iter().copied().max().unwrap_or(NAN_KEY);
        let largest = keys.iter().position(|key| *key == largest_key).map_or(0.0, |token| logits[token]);
        Self { logits, keys, largest_key, largest, inverse: 1.0 / temperature }
    }

    /// (logit - largest) / temperature, at most 0.
    fn scaled(&self, token: usize) -> f32 {
        if self.keys[token] == self.largest_key {
            return 0.0;
        }
        (self.logits[token] - self.largest) * self.inverse
    }

    /// The token's weight in units of 2^-31, truncated.
    fn weight(&self, token: usize) -> u64 {
        (exp_negative(self.scaled(token)) * 2_147_483_648.0) as u64
    }

    /// The tokens that the filters keep; those with the largest logit are always among them.
    fn kept_tokens(&self, params: &SampleParams) -> Vec<usize> {
        let floor = self.floor(params);
        // NaN keeps all tokens.
        let share = if params.min_p.is_nan() { 0.0 } else { params.min_p.min(1.0) };
        let is_kept = |token: &usize| {
            let scaled = self.scaled(*token);
            self.keys[*token] >= floor && scaled > f32::NEG_INFINITY && exp_negative(scaled) >= share
        };
        (0..self.keys.len()).filter(is_kept).collect()
    }

    /// The lowest key that top-k and top-p keep.
    fn floor(&self, params: &SampleParams) -> u32 {
        let mut sorted: Vec<_> = (0..self.keys.len()).filter(|token| self.keys[*token] != NAN_KEY).collect();
        sorted.sort_by_key(|token| std::cmp::Reverse(self.keys[*token]));
        let mut floor = NAN_KEY + 1;
        if params.top_k != 0 && sorted.len() >= params.top_k as usize {
            floor = self.keys[sorted[params.top_k as usize - 1]];
        }
        if params.top_p < 1.0 {
            sorted.retain(|token| self.keys[*token] >= floor);
            let total: u64 = sorted.iter().map(|token| self.weight(*token)).sum();
            // `top_p` in units of 2^-32; the product is rounded up.
            let part = u128::from(total) * u128::from((params.top_p * 4_294_967_296.0) as u64);
            let part = (part.div_ceil(1 << 32) as u64).max(1);
            let mut sum = 0;
            let reached = sorted.iter().find(|token| {
                sum += self.weight(**token);
                sum >= part
            });
            floor = reached.map_or(floor, |token| self.keys[*token]);
        }
        floor
    }
}

/// ln(1 + z) for z from sqrt(1/2) - 1 to sqrt(2) - 1.
fn log1p_near(z: f32) -> f32 {
    const OVER_Z: [f32; 10] = [
        -0.074_511_86,
        0.128_066_11,
        -0.132_660_31,
        0.141_996_5,
        -0.166_083_7,
        0.200_009_39,
        -0.250_015_8,
        0.333_333_46,
        -0.499_999_88,
        1.0,
    ];
    polynomial(&OVER_Z, z) * z
}

/// Evaluates a polynomial, whose coefficients are given from the highest power down.
fn polynomial(coefficients: &[f32], x: f32) -> f32 {
    let (first, others) = coefficients.split_first().expect("a polynomial has coefficients");
    others.iter().fold(*first, |sum, coefficient| sum.mul_add(x, *coefficient))
}

/// ln of a positive normal number.
fn ln(value: f32) -> f32 {
    const ROOT_HALF: u32 = 0x3f35_04f3;
    let bits = value.to_bits();
    let exponent = bits.wrapping_sub(ROOT_HALF).cast_signed() >> 23;
    let mantissa = f32::from_bits(bits.wrapping_sub(exponent.cast_unsigned() << 23));
    (exponent as f32).mul_add(LN_2, log1p_near(mantissa - 1.0))
}

const LN_2: f32 = std::f32::consts::LN_2;

/// exp(x) for x <= 0; 0 below -87.
fn exp_negative(x: f32) -> f32 {
    if x.is_nan() || x <= -87.0 {
        return 0.0;
    }
    // 2^f for f in (-1, 0].
    const POWER: [f32; 7] = [0.000_114_919_95, 0.001_291_636_8, 0.009_597_035, 0.055_499_23, 0.240_226_09, LN_2, 1.0];
    let power = x * std::f32::consts::LOG2_E;
    let whole = power as i32;
    let fraction = power - whole as f32;
    polynomial(&POWER, fraction) * f32::from_bits(((whole + 127) as u32) << 23)
}

/// Gumbel noise: -ln(-ln(1 - t)) for t in (0, 1).
fn noise(seed: u64, position: u32, token: u32) -> f32 {
    gumbel(philox(seed, [token / 4, position, 0, 0])[token as usize % 4])
}

/// The noise of a random word, with t = (word | 1) / 2^32. All bits of the result are accurate near both ends.
fn gumbel(word: u32) -> f32 {
    const UNIT: f32 = 1.0 / 4_294_967_296.0;
    let odd = word | 1;
    let t = odd as f32 * UNIT;
    let wait = if t < 0.25 { log1p_near(-t) } else { ln(odd.wrapping_neg() as f32 * UNIT) };
    -ln(-wait)
}

/// Philox4x32-10.
fn philox(seed: u64, counter: [u32; 4]) -> [u32; 4] {
    let (mut x, mut key) = (counter, [seed as u32, (seed >> 32) as u32]);
    for _ in 0..10 {
        let (a, b) = (0xd251_1f53 * u64::from(x[0]), 0xcd9e_8d57 * u64::from(x[2]));
        x = [(b >> 32) as u32 ^ x[1] ^ key[0], b as u32, (a >> 32) as u32 ^ x[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use unweight_format::testing::Random;

    #[test]
    fn parameters_out_of_range_are_named() {
        let greedy = SampleParams::default();
        assert_eq!(greedy.check(), Ok(()));
        assert_eq!(greedy.temperature(0.7).top_k(40).top_p(0.9).min_p(0.05).check(), Ok(()));
        let named = |params: SampleParams| params.check().map_err(|error| error.name);
        for bad in [-1.0, f32::NAN, f32::INFINITY, 1e-6, 101.0] {
            assert_eq!(named(greedy.temperature(bad)), Err("temperature"), "{bad}");
        }
        for bad in [0.0, -0.1, 1.1, f32::NAN] {
            assert_eq!(named(greedy.top_p(bad)), Err("top_p"), "{bad}");
        }
        for bad in [-0.1, 1.1, f32::NAN] {
            assert_eq!(named(greedy.min_p(bad)), Err("min_p"), "{bad}");
        }
    }

    /// Logits of a row, distributed as in models: most near each other, few far above.
    fn logits(random: &mut Random, count: usize) -> Vec<bf16> {
        let spread = [0.5, 2.0, 6.0][random.below(3) as usize];
        (0..count)
            .map(|_| {
                let offset = if random.below(20) == 0 { 8.0 } else { 0.0 };
                bf16::from_f64(random.normal() * spread + offset)
            })
            .collect()
    }

    /// The tokens that the filters keep in double precision, and how close any of the comparisons was to the other
    /// result.
    fn kept_in_f64(logits: &[bf16], params: &SampleParams) -> (Vec<usize>, f64) {
        let temperature = f64::from(params.temperature);
        let largest = logits.iter().map(|logit| logit.to_f64()).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| ((logit.to_f64() - largest) / temperature).exp()).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].to_f64().total_cmp(&logits[*a].to_f64()));
        let mut margin = f64::INFINITY;
        if params.top_k != 0 && order.len() > params.top_k as usize {
            let threshold = logits[order[params.top_k as usize - 1]];
            order.retain(|token| logits[*token] >= threshold);
        }
        if params.top_p < 1.0 {
            let total: f64 = order.iter().map(|token| weights[*token]).sum();
            let (mut sum, mut threshold) = (0.0, None);
            for token in &order {
                sum += weights[*token] / total;
                margin = margin.min((sum - f64::from(params.top_p)).abs());
                if sum >= f64::from(params.top_p) && threshold.is_none() {
                    threshold = Some(logits[*token]);
                }
            }
            order.retain(|token| threshold.is_none_or(|threshold| logits[*token] >= threshold));
        }
        let share = f64::from(params.min_p);
        margin = order.iter().map(|token| (weights[*token] / share - 1.0).abs()).fold(margin, f64::min);
        order.retain(|token| weights[*token] >= share);
        order.sort_unstable();
        (order, margin)
    }

    #[test]
    fn filters_agree_with_double_precision() {
        let mut random = Random::new(1);
        let (mut compared, mut filtered) = (0, 0);
        for case in 0..3000 {
            let count = [1, 2, 9, 100, 1500][case % 5];
            let logits = logits(&mut random, count);
            let mut uniform = || random.below(1 << 20) as f32 / (1 << 20) as f32;
            let params = SampleParams {
                temperature: 0.1 + 2.0 * uniform(),
                top_k: if uniform() < 0.5 { 0 } else { (uniform() * 60.0) as u32 },
                top_p: if uniform() < 0.4 { 1.0 } else { uniform().max(1e-3) },
                min_p: if uniform() < 0.5 { 0.0 } else { uniform() * uniform() },
                seed: 0,
            };
            let values: Vec<f32> = logits.iter().map(|logit| logit.to_f32()).collect();
            let kept = Row::new(&values, params.temperature).kept_tokens(&params);
            let (expected, margin) = kept_in_f64(&logits, &params);
            // Nearer than this, rounding decides; it must not happen often.
            if margin > 1e-5 {
                assert_eq!(kept, expected, "case {case}: {params:?}");
                compared += 1;
                filtered += usize::from(kept.len() > 1 && kept.len() < logits.len());
            }
        }
        assert!(compared > 2500 && filtered > 600, "{compared} cases were compared, {filtered} of them were filtered");
    }

    #[test]
    fn draws_follow_the_softmax() {
        const DRAWS: u32 = 20_000;
        let mut random = Random::new(2);
        for params in [
            SampleParams::default().temperature(1.0),
            SampleParams::default().temperature(0.6).top_p(0.9).seed(1),
            SampleParams::default().temperature(1.7).top_k(12).min_p(0.05).seed(u64::MAX),
        ] {
            let logits: Vec<_> = (0..40).map(|_| bf16::from_f64(random.normal() * 1.5)).collect();
            let (kept, _) = kept_in_f64(&logits, &params);
            let weight = |token: usize| (logits[token].to_f64() / f64::from(params.temperature)).exp();
            let total: f64 = kept.iter().map(|token| weight(*token)).sum();
            let mut counts = vec![0_u32; logits.len()];
            for position in 0..DRAWS {
                counts[sample(&logits, &params, position) as usize] += 1;
            }
            let (mut chi, mut cells, mut rare, mut rare_count) = (0.0, 0, 0.0, 0);
            let mut cell = |expected: f64, count: u32| {
                chi += (f64::from(count) - expected).powi(2) / expected;
                cells += 1;
            };
            for (token, count) in counts.into_iter().enumerate() {
                let expected = if kept.contains(&token) { f64::from(DRAWS) * weight(token) / total } else { 0.0 };
                assert!(expected > 0.0 || count == 0, "token {token} is not kept");
                if expected >= 10.0 {
                    cell(expected, count);
                } else {
                    rare += expected;
                    rare_count += count;
                }
            }
            if rare >= 10.0 {
                cell(rare, rare_count);
            }
            // Chi-squared with n degrees of freedom has mean n and variance 2 n.
            let freedom = f64::from(cells - 1);
            let limit = freedom + 5.0 * (2.0 * freedom).sqrt();
            assert!(cells > 4 && chi < limit, "chi-squared {chi} of {freedom} degrees of freedom: {params:?}");
        }
    }

    #[test]
    fn a_draw_depends_on_seed_and_position() {
        let flat = vec![bf16::ZERO; 4096];
        let draw = |seed, position| sample(&flat, &SampleParams::default().temperature(1.0).seed(seed), position);
        assert_eq!(draw(3, 5), draw(3, 5));
        let all: std::collections::BTreeSet<_> =
            (0..50).flat_map(|i| [draw(i, 0), draw(i << 32, 1), draw(0, i as u32 + 2)]).collect();
        assert!(all.len() > 140, "{} of 150 draws differ", all.len());
    }

    #[test]
    fn nan_logits_are_never_sampled() {
        let of = |logits: &[f32], params: SampleParams| {
            let logits: Vec<_> = logits.iter().map(|logit| bf16::from_f32(*logit)).collect();
            let drawn: std::collections::BTreeSet<_> =
                (0..64).map(|position| sample(&logits, &params, position)).collect();
            drawn.into_iter().collect::<Vec<_>>()
        };
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let greedy = SampleParams::default();
        let warm = greedy.temperature(1.0);
        for params in [greedy, warm, warm.top_k(1), warm.top_p(0.5), warm.min_p(0.5)] {
            assert_eq!(of(&[nan, nan], params), [NO_TOKEN], "{params:?}");
            assert_eq!(of(&[], params), [NO_TOKEN]);
            assert_eq!(of(&[nan, -inf, nan], params), [1]);
            assert_eq!(of(&[nan, -inf, -3e38], params), [2]);
            assert_eq!(of(&[1.0, nan, inf, 3e38], params), [2]);
        }
        assert_eq!(of(&[-1.0, -0.0, 0.0, -0.0], greedy), [1], "both zeros are equal");
        assert_eq!(of(&[-1.0, -0.0, 0.0, -0.0], warm.top_k(1)), [1, 2, 3]);
        assert_eq!(of(&[inf, 2.0, inf], warm), [0, 2]);
        assert_eq!(of(&[-inf, -inf], warm), [0, 1]);
        assert_eq!(of(&[nan, 1.0, 1.0], warm.top_k(3)), [1, 2], "top-k keeps more than there are numbers");
    }

    #[test]
    fn random_words_match_philox() {
        // The known answers that the authors of Philox published.
        assert_eq!(philox(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox(u64::MAX, [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(0x299f_31d0_a409_3822, pi), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn polynomials_approximate_their_functions() {
        let mut random = Random::new(3);
        let words = (0..100_000).map(|_| random.bits() as u32).chain([0, 1, u32::MAX, 1 << 30, (1 << 30) - 1]);
        for word in words.chain((0..31).map(|bit| 1 << bit)).chain((0..31).map(|bit| u32::MAX - (1 << bit))) {
            let t = f64::from(word | 1) / 2_f64.powi(32);
            let (noise, expected) = (f64::from(gumbel(word)), -(-(-t).ln_1p()).ln());
            assert!((noise - expected).abs() <= 1e-6 * expected.abs().max(0.3), "{word:#x}: {noise} for {expected}");
            // The kernel relies on these bounds of the noise.
            assert!(noise > -3.125 && noise < 22.25, "{word:#x}: {noise}");
        }
        for i in 0..100_000 {
            let x = -f64::from(i) * 0.00086;
            let (value, expected) = (f64::from(exp_negative(x as f32)), f64::from(x as f32).exp());
            // x * log2(e) is rounded, and so is log2(e).
            assert!((value / expected - 1.0).abs() < 2e-7 + 1.2e-7 * x.abs(), "{x}: {value} for {expected}");
        }
        assert_eq!((exp_negative(0.0), exp_negative(-88.0), exp_negative(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
    }
}
