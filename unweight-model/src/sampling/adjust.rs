//! Adjustments of logits before a token is sampled, and log probabilities.

use std::collections::{HashMap, HashSet};

use half::bf16;

use super::{NAN_KEY, OutOfRange, Row, exp_negative, key, ln};

/// The maximum number of tokens with a bias per sequence.
pub const BIASES_MAX: usize = 1024;
/// The maximum number of tokens whose log probabilities are returned with each token.
pub const TOP_LOGPROBS_MAX: u32 = 20;

/// Adjustments of logits before a token is sampled, in this order: bias, repetition, frequency, presence penalty.
///
/// A token counts as soon as it is sampled: the next sampling already penalizes it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Adjustments {
    /// Added to the logits of these tokens: at most [`BIASES_MAX`] values from -100 to 100, each token once.
    pub bias: Vec<(u32, f32)>,
    /// Divides positive logits of tokens in prompt or answer and multiplies others; 1 disables it.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of a token for each of its occurrences in the answer; 0 disables it.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of a token that occurs in the answer; 0 disables it.
    pub presence_penalty: f32,
    /// The number of tokens of an answer before which no token that ends the sequence is sampled.
    pub min_new_tokens: u32,
}

impl Default for Adjustments {
    /// No adjustments.
    fn default() -> Self {
        Self {
            bias: Vec::new(),
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            min_new_tokens: 0,
        }
    }
}

/// The reason why a bias is invalid.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BiasError {
    /// A value is out of range.
    #[error("the bias {bias} of token {token} is not a number from -100 to 100")]
    Value {
        /// The token.
        token: u32,
        /// Its bias.
        bias: f32,
    },
    /// A token is outside the vocabulary.
    #[error("token {token} has a bias, but the vocabulary has {vocab} tokens; use a token of this model")]
    Token {
        /// The token.
        token: u32,
        /// The vocabulary size of the model.
        vocab: u32,
    },
    /// A token has several biases.
    #[error("token {token} has several biases; pass one per token")]
    Twice {
        /// The token.
        token: u32,
    },
    /// Too many tokens have a bias.
    #[error("{count} tokens have a bias; the limit is {BIASES_MAX}")]
    Count {
        /// The number of tokens with a bias.
        count: usize,
    },
}

impl BiasError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "sampling-option-out-of-range"
    }
}

impl Adjustments {
    /// Sets the biases.
    #[must_use]
    pub fn bias(self, bias: Vec<(u32, f32)>) -> Self {
        Self { bias, ..self }
    }

    /// Sets the repetition penalty.
    #[must_use]
    pub fn repetition_penalty(self, repetition_penalty: f32) -> Self {
        Self { repetition_penalty, ..self }
    }

    /// Sets the frequency penalty.
    #[must_use]
    pub fn frequency_penalty(self, frequency_penalty: f32) -> Self {
        Self { frequency_penalty, ..self }
    }

    /// Sets the presence penalty.
    #[must_use]
    pub fn presence_penalty(self, presence_penalty: f32) -> Self {
        Self { presence_penalty, ..self }
    }

    /// Sets the number of tokens before which the sequence does not end.
    #[must_use]
    pub fn min_new_tokens(self, min_new_tokens: u32) -> Self {
        Self { min_new_tokens, ..self }
    }

    /// Whether logits are not changed.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Checks that every penalty is in its range.
    ///
    /// # Errors
    /// [`OutOfRange`] for the first penalty that is not.
    pub fn check(&self) -> Result<(), OutOfRange> {
        let check = |name, value, ok, range| if ok { Ok(()) } else { Err(OutOfRange { name, value, range }) };
        let Self { repetition_penalty, frequency_penalty, presence_penalty, .. } = *self;
        let in_range = (0.01..=100.0).contains(&repetition_penalty);
        check("repetition_penalty", repetition_penalty, in_range, "a number from 0.01 to 100")?;
        let of = |value: f32| (-2.0..=2.0).contains(&value);
        check("frequency_penalty", frequency_penalty, of(frequency_penalty), "a number from -2 to 2")?;
        check("presence_penalty", presence_penalty, of(presence_penalty), "a number from -2 to 2")
    }

    /// Checks that every bias is valid for a model with this vocabulary size.
    ///
    /// # Errors
    /// [`BiasError`] for the first bias that is not.
    pub fn check_bias(&self, vocab: u32) -> Result<(), BiasError> {
        if self.bias.len() > BIASES_MAX {
            return Err(BiasError::Count { count: self.bias.len() });
        }
        let mut biased = HashSet::new();
        for &(token, bias) in &self.bias {
            if token >= vocab {
                return Err(BiasError::Token { token, vocab });
            }
            if !(-100.0..=100.0).contains(&bias) {
                return Err(BiasError::Value { token, bias });
            }
            if !biased.insert(token) {
                return Err(BiasError::Twice { token });
            }
        }
        Ok(())
    }
}

/// The tokens of a sequence so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct History<'a> {
    /// Tokens of the prompt.
    pub prompt: &'a [u32],
    /// The answer so far.
    pub answer: &'a [u32],
    /// Tokens that end the sequence.
    pub ends: &'a [u32],
}

/// Returns adjusted logits. NaN marks a token that must not be sampled.
///
/// ```
/// # use half::bf16;
/// # use unweight_model::sampling::{Adjustments, History, adjust, choose, SampleParams};
/// let logits = [1.0, 3.0, 2.5].map(bf16::from_f32);
/// let history = History { prompt: &[0], answer: &[1, 1], ends: &[] };
/// let adjusted = adjust(&logits, &Adjustments::default().frequency_penalty(0.5), history);
/// assert_eq!(adjusted, [1.0, 2.0, 2.5]);
/// assert_eq!(choose(&adjusted, &SampleParams::default(), 2), 2);
/// ```
pub fn adjust(logits: &[bf16], adjustments: &Adjustments, history: History<'_>) -> Vec<f32> {
    let Adjustments { repetition_penalty, frequency_penalty, presence_penalty, min_new_tokens, .. } = *adjustments;
    let biases: HashMap<u32, f32> = adjustments.bias.iter().copied().collect();
    let prompt: HashSet<u32> = history.prompt.iter().copied().collect();
    let mut counts: HashMap<u32, u32> = HashMap::new();
    history.answer.iter().for_each(|token| *counts.entry(*token).or_default() += 1);
    let ends_early = history.answer.len() < min_new_tokens as usize;
    let one = |(token, logit): (u32, &bf16)| {
        if ends_early && history.ends.contains(&token) {
            return f32::NAN;
        }
        let count = counts.get(&token).copied().unwrap_or(0);
        let mut value = logit.to_f32() + biases.get(&token).copied().unwrap_or(0.0);
        if count > 0 || prompt.contains(&token) {
            value = if value > 0.0 { value / repetition_penalty } else { value * repetition_penalty };
        }
        if count > 0 {
            value = value - frequency_penalty * count as f32 - presence_penalty;
        }
        value
    };
    (0..).zip(logits).map(one).collect()
}

/// Forbids tokens: sets the logit of token `t` to NaN if bit `t % 32` of word `t / 32` is not set.
///
/// ```
/// # use unweight_model::sampling::forbid;
/// let mut logits = [1.0, 3.0, 2.5];
/// forbid(&mut logits, &[0b101]);
/// assert!(logits[1].is_nan() && logits[2] == 2.5);
/// ```
pub fn forbid(logits: &mut [f32], mask: &[u32]) {
    for (token, logit) in logits.iter_mut().enumerate() {
        if mask.get(token / 32).is_none_or(|word| word >> (token % 32) & 1 == 0) {
            *logit = f32::NAN;
        }
    }
}

/// Log probabilities at the position of a sampled token.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Logprobs {
    /// The log probability of the sampled token.
    pub sampled: f32,
    /// The most likely tokens, in descending order; of equal ones the lowest first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Log probabilities from that of the sampled token and those of the most likely ones.
    pub fn new(sampled: f32, top: Vec<(u32, f32)>) -> Self {
        Self { sampled, top }
    }
}

/// Log probabilities of a sampled token and of the `top` most likely ones: the log-softmax of unadjusted logits at
/// temperature 1.
///
/// Weights are summed in units of 2^-40, truncated, so that every order of the sum results in the same bits. NaN is
/// below all numbers and never among the most likely tokens.
pub fn logprobs(logits: &[bf16], sampled: u32, top: u32) -> Logprobs {
    const UNIT: f32 = 1_099_511_627_776.0;
    let values: Vec<f32> = logits.iter().map(|logit| logit.to_f32()).collect();
    let row = Row::new(&values, 1.0);
    if row.largest_key == NAN_KEY {
        return Logprobs { sampled: f32::NAN, top: Vec::new() };
    }
    let sum: u64 = (0..values.len()).map(|token| (exp_negative(row.scaled(token)) * UNIT) as u64).sum();
    let log_sum = ln(sum as f32 * (1.0 / UNIT));
    let of = |token: usize| row.scaled(token) - log_sum;
    let mut order: Vec<usize> = (0..values.len()).filter(|token| key(values[*token]) != NAN_KEY).collect();
    order.sort_by_key(|token| std::cmp::Reverse(key(values[*token])));
    let top = order.into_iter().take(top as usize).map(|token| (token as u32, of(token))).collect();
    let sampled = values.get(sampled as usize).map_or(f32::NAN, |_| of(sampled as usize));
    Logprobs { sampled, top }
}

#[cfg(test)]
mod tests {
    use super::super::{NO_TOKEN, SampleParams, choose, sample};
    use super::*;
    use unweight_format::testing::Random;

    fn row(values: &[f32]) -> Vec<bf16> {
        values.iter().copied().map(bf16::from_f32).collect()
    }

    #[test]
    fn penalties_apply_in_the_stated_order() {
        let logits = row(&[2.0, -2.0, 4.0, 1.0, 0.5]);
        let history = History { prompt: &[0, 1], answer: &[2, 2, 0], ends: &[4] };
        let all = Adjustments::default()
            .bias(vec![(2, 1.0), (3, -100.0)])
            .repetition_penalty(2.0)
            .frequency_penalty(0.5)
            .presence_penalty(0.25);
        // A token of the prompt only has the repetition penalty. A bias is added before the division.
        assert_eq!(adjust(&logits, &all, history), [2.0 / 2.0 - 0.75, -4.0, 5.0 / 2.0 - 1.25, -99.0, 0.5]);
        let negative = Adjustments::default().presence_penalty(-1.0).frequency_penalty(-1.0);
        assert_eq!(adjust(&logits, &negative, history), [4.0, -2.0, 7.0, 1.0, 0.5]);
        let none = adjust(&logits, &Adjustments::default(), history);
        assert_eq!(none, logits.iter().map(|logit| logit.to_f32()).collect::<Vec<_>>());
        assert!(Adjustments::default().is_none() && !negative.is_none());
    }

    #[test]
    fn end_tokens_wait_for_the_minimum() {
        let logits = row(&[1.0, f32::INFINITY, 2.0]);
        let min = Adjustments::default().min_new_tokens(2);
        let of = |answer: &[u32], ends: &[u32]| {
            let adjusted = adjust(&logits, &min, History { prompt: &[1], answer, ends });
            choose(&adjusted, &SampleParams::default(), 0)
        };
        assert_eq!([of(&[], &[1]), of(&[0], &[1]), of(&[0, 0], &[1])], [2, 2, 1]);
        assert_eq!(of(&[], &[0, 1, 2]), NO_TOKEN, "all tokens are forbidden");
    }

    #[test]
    fn values_out_of_range_are_named() {
        let named = |adjustments: Adjustments| adjustments.check().map_err(|error| error.name);
        let none = Adjustments::default;
        for bad in [f32::NAN, f32::INFINITY, -2.1, 2.1] {
            assert_eq!(named(none().frequency_penalty(bad)), Err("frequency_penalty"));
            assert_eq!(named(none().presence_penalty(bad)), Err("presence_penalty"));
        }
        for bad in [f32::NAN, f32::INFINITY, 0.0, -1.0, 1e-9] {
            assert_eq!(named(none().repetition_penalty(bad)), Err("repetition_penalty"));
        }
        assert_eq!(named(none().frequency_penalty(-2.0).presence_penalty(2.0).repetition_penalty(1.3)), Ok(()));
        let bias = |bias: Vec<(u32, f32)>| none().bias(bias).check_bias(2000);
        assert_eq!(bias((0..1024).map(|token| (token, -100.0)).collect()), Ok(()));
        assert_eq!(bias(vec![(1, 0.0); 1025]), Err(BiasError::Count { count: 1025 }));
        assert_eq!(bias(vec![(2000, 1.0)]), Err(BiasError::Token { token: 2000, vocab: 2000 }));
        assert_eq!(bias(vec![(1, 1.0), (1, 1.0)]), Err(BiasError::Twice { token: 1 }));
        assert!(matches!(bias(vec![(1, f32::NAN)]), Err(BiasError::Value { token: 1, .. })));
        assert_eq!(bias(vec![(3, 101.0)]), Err(BiasError::Value { token: 3, bias: 101.0 }));
    }

    #[test]
    fn logprobs_agree_with_double_precision() {
        let mut random = Random::new(9);
        for count in [1, 2, 100, 5000] {
            let logits: Vec<bf16> = (0..count).map(|_| bf16::from_f64(random.normal() * 4.0)).collect();
            let largest = logits.iter().map(|logit| logit.to_f64()).fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = logits.iter().map(|logit| (logit.to_f64() - largest).exp()).sum();
            let expected = |token: u32| logits[token as usize].to_f64() - largest - total.ln();
            let sampled = count as u32 / 2;
            let result = logprobs(&logits, sampled, 20);
            assert_eq!(result.top.len(), count.min(20));
            assert!((f64::from(result.sampled) - expected(sampled)).abs() < 1e-5);
            assert!(result.top.iter().all(|(token, value)| (f64::from(*value) - expected(*token)).abs() < 1e-5));
            assert!(result.top.is_sorted_by(|a, b| a.1 > b.1 || a.1 == b.1 && a.0 < b.0));
            assert_eq!(result.top[0].0, sample(&logits, &SampleParams::default(), 0));
        }
    }

    #[test]
    fn logprobs_of_special_values() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        assert!(logprobs(&row(&[nan, nan]), NO_TOKEN, 5).sampled.is_nan());
        let one = logprobs(&row(&[nan, 1.0, -inf]), 1, 5);
        assert_eq!(one, Logprobs::new(0.0, vec![(1, 0.0), (2, -inf)]));
        assert_eq!(logprobs(&row(&[inf, 5.0]), 0, 1), Logprobs::new(0.0, vec![(0, 0.0)]));
    }
}
