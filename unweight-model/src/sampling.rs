//! How a token is chosen from logits.

/// How a token is chosen. Filters apply in this order, as in transformers: temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SampleParams {
    /// Logits are divided by it; 0 takes the token of the largest logit, of equal ones the lowest.
    pub temperature: f32,
    /// Only tokens whose logit is among the `top_k` largest, equal ones included; 0 keeps all.
    pub top_k: u32,
    /// Only the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Only tokens with at least this share of the probability of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Of the random numbers. The same seed at the same position of a sequence gives the same number.
    pub seed: u64,
}

impl Default for SampleParams {
    /// Greedy.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// A sampling parameter out of range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{name} = {value} is not {range}")]
pub struct OutOfRange {
    /// The parameter.
    pub name: &'static str,
    /// Its value.
    pub value: f32,
    /// What it may be.
    pub range: &'static str,
}

impl SampleParams {
    /// Logits are divided by it.
    #[must_use]
    pub fn temperature(self, temperature: f32) -> Self {
        Self { temperature, ..self }
    }

    /// Only the `top_k` largest.
    #[must_use]
    pub fn top_k(self, top_k: u32) -> Self {
        Self { top_k, ..self }
    }

    /// Only the most likely ones that together have this probability.
    #[must_use]
    pub fn top_p(self, top_p: f32) -> Self {
        Self { top_p, ..self }
    }

    /// Only what has this share of the most likely one's probability.
    #[must_use]
    pub fn min_p(self, min_p: f32) -> Self {
        Self { min_p, ..self }
    }

    /// Of the random numbers.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Whether every parameter is in its range.
    ///
    /// # Errors
    /// [`OutOfRange`], of the first that is not.
    pub fn check(&self) -> Result<(), OutOfRange> {
        let check = |name, value, ok, range| if ok { Ok(()) } else { Err(OutOfRange { name, value, range }) };
        let Self { temperature, top_p, min_p, .. } = *self;
        // Logits of bf16 over less than this are no numbers in f32.
        const COLDEST: f32 = 1e-3;
        let warm = temperature == 0.0 || (COLDEST..=100.0).contains(&temperature);
        check("temperature", temperature, warm, "0 or a number from 0.001 to 100")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number from 0 to 1")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
