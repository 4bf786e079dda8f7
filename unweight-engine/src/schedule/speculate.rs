//! Decides which drafts a step verifies.
//!
//! ```text
//! row of a sequence            position p      its newest token
//! rows of its draft            p + 1, p + 2, ...
//! tokens that the step samples t0, t1, t2, ...  t0 is right; t1 if t0 is the first token of the draft; and so on
//! ```
//! In a step that verifies, every drafted token takes a row. Keys and values of a wrong token are overwritten by the
//! next step before any kernel reads them. A step that verifies runs alone, because later steps depend on its tokens.
//!
//! The number of drafted tokens maximizes the expected tokens per time, by the chances of the drafters and a model of
//! the time of a step. Nothing is drafted if guesses are mostly wrong, if many sequences share a step, or if attention
//! takes longer than reading the weights. The numbers of the model are constants, not measurements, so the same
//! requests give the same steps.

use super::{Running, Schedule};
use crate::{
    options::{BUCKETS, EngineOptions, KvCache, bucket},
    pages::PAGE_TOKENS,
};

/// How drafts are made and what they cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speculation {
    /// The maximum number of drafted tokens per sequence and step; 0 drafts none.
    pub(crate) tokens: u32,
    /// The maximum number of rows of a step that verifies.
    pub(crate) rows: u32,
    /// Whether the model is a mixture of experts, where more rows read more weights.
    pub(crate) is_mixture: bool,
    /// The number of tokens of the KV cache that have as many bytes as the weights.
    pub(crate) weight_tokens: u32,
}

impl Speculation {
    /// The speculation of an engine with these options, for a model whose weights have as many bytes as `weight_tokens`
    /// tokens of the KV cache.
    pub fn of(options: &EngineOptions, is_mixture: bool, weight_tokens: u32) -> Self {
        Self { tokens: options.speculate, rows: options.verified_rows(), is_mixture, weight_tokens }
    }

    /// Returns the time of a step of `rows` rows without attention, relative to a step of 1 row. Taken from kernel
    /// times of Llama-3.1-8B and step times of Qwen3-30B-A3B on an H200 (docs/benchmarks.md).
    fn step_time(&self, rows: u32) -> f32 {
        const DENSE: [f32; 5] = [1.0, 1.03, 1.05, 1.2, 1.37];
        const MIXTURE: [f32; 5] = [1.0, 1.9, 2.4, 3.2, 4.2];
        let times = if self.is_mixture { MIXTURE } else { DENSE };
        let entry = BUCKETS.into_iter().zip(times).find(|(of, _)| *of == bucket(rows));
        entry.map_or(f32::INFINITY, |(_, time)| time)
    }

    /// Returns the time of attention to `tokens` tokens, in the same unit.
    fn attention_time(&self, tokens: u32) -> f32 {
        tokens as f32 / self.weight_tokens.max(1) as f32
    }
}

/// The estimated time that verification adds to a step: every layer has one more launch, which stores keys and values,
/// and the device waits for the host.
const VERIFICATION_TIME: f32 = 0.1;

/// Counts of drafted tokens since the engine was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DraftCounts {
    /// The number of tokens that steps verified.
    pub drafted: u64,
    /// The number of these that the model sampled, too.
    pub accepted: u64,
}

impl Running {
    /// The number of rows of the sequence in the next step, or in the one in flight.
    pub fn step_rows(&self) -> u32 {
        1 + self.draft.len() as u32
    }

    /// The token and the position of each of the sequence's rows.
    pub fn inputs(&self) -> impl Iterator<Item = (u32, u32)> {
        [self.last].into_iter().chain(self.draft.iter().copied()).zip(self.position..)
    }

    /// Returns the chance that the first token of a draft is right, and the maximum number of tokens of a draft after
    /// the steps in flight.
    fn draft_limits(&self, cache: KvCache, tokens_max: u32) -> Option<(f32, u32)> {
        if !self.may_run() {
            return None;
        }
        let chance = self.drafter.as_ref()?.chance()?;
        let position = self.position + self.launched - self.produced;
        let page_limit = match cache {
            KvCache::Bf16 => (self.pages.len() as u32 * PAGE_TOKENS).saturating_sub(position + 1),
            // A page is packed by the step that fills it, so its last token must be right.
            KvCache::Packed => (PAGE_TOKENS - 2).saturating_sub(position % PAGE_TOKENS),
        };
        // The last token of a sequence needs no guess.
        let sequence_limit = self.max_new_tokens - self.launched - 1;
        Some((chance, tokens_max.min(page_limit).min(sequence_limit)))
    }
}

impl Schedule {
    /// Returns how many tokens of each row the next step should verify; empty if none.
    fn plan_drafts(&self) -> Vec<u32> {
        let limits = &self.limits.speculation;
        let rows = self.rows.len() as u32;
        if limits.tokens == 0 || rows >= limits.rows {
            return Vec::new();
        }
        // A token can be right only if all before it are, including those in flight.
        let mut guesses = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            let Some((chance, count)) = row.draft_limits(self.limits.kv_cache, limits.tokens) else { continue };
            let in_flight = row.launched - row.produced;
            guesses.extend((1..=count).map(|nth| (chance.powi((in_flight + nth).cast_signed()), at)));
        }
        guesses.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut attention: f32 = self.rows.iter().map(|row| limits.attention_time(row.position)).sum();
        let mut expected = rows as f32;
        let (mut best, mut drafted) = (expected / (limits.step_time(rows) + attention), 0);
        for (total, (chance, at)) in (rows + 1..=limits.rows).zip(&guesses) {
            expected += chance;
            attention += limits.attention_time(self.rows[*at].position);
            let rate = expected / (limits.step_time(total) + attention + VERIFICATION_TIME);
            if rate > best {
                (best, drafted) = (rate, (total - rows) as usize);
            }
        }
        if drafted == 0 {
            return Vec::new();
        }
        let mut counts = vec![0; self.rows.len()];
        guesses[..drafted].iter().for_each(|(_, at)| counts[*at] += 1);
        counts
    }

    /// Whether the next step should verify drafts. Such a step waits for the steps in flight.
    pub(super) fn wants_drafts(&self) -> bool {
        !self.plan_drafts().is_empty()
    }

    /// Drafts the tokens that the next step verifies. No step may be in flight.
    pub(super) fn draft(&mut self) {
        let counts = self.plan_drafts();
        for (row, count) in self.rows.iter_mut().zip(counts.into_iter().chain(std::iter::repeat(0))) {
            let drafter = row.drafter.as_ref().filter(|_| count > 0);
            row.draft = drafter.map_or_else(Vec::new, |drafter| drafter.draft(&row.tokens, count as usize));
            // The rows differ from those of the previous step and of the next one.
            self.changed |= !row.draft.is_empty();
        }
    }

    /// The counts of drafted tokens so far.
    pub fn draft_counts(&self) -> DraftCounts {
        self.draft_counts
    }
}
