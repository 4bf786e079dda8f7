//! Which drafts a step verifies.
//!
//! ```text
//! row of a sequence            position p      its newest token
//! rows of its draft            p + 1, p + 2, ...
//! tokens that the step samples t0, t1, t2, ...  t0 is right; t1 if t0 is the first token of the draft; and so on
//! ```
//! A draft takes a row per token in a step that verifies. Keys and values of a token that was wrong are overwritten by
//! the next step, before anything reads them. A step that verifies runs alone: what follows depends on its tokens.
//!
//! As many tokens are drafted as make the most tokens per time, by the chances of the drafters and a model of the time
//! of a step. So nothing is drafted where guesses are mostly wrong, where many sequences share a step, or at contexts
//! that take longer to attend to than weights take to read. Numbers of the model are constants, not measurements: the
//! same requests give the same steps.

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
    /// Whether the model is a mixture of experts, of which more rows read more.
    pub(crate) is_mixture: bool,
    /// Tokens of the KV cache that have as many bytes as the weights.
    pub(crate) weight_tokens: u32,
}

impl Speculation {
    /// By the options of an engine, for a model whose weights have as many bytes as `weight_tokens` tokens of the KV
    /// cache.
    pub fn of(options: &EngineOptions, is_mixture: bool, weight_tokens: u32) -> Self {
        Self { tokens: options.speculate, rows: options.verified_rows(), is_mixture, weight_tokens }
    }

    /// The time of a step of so many rows without attention, relative to one of 1 row: kernel times of Llama-3.1-8B and
    /// step times of Qwen3-30B-A3B on an H200 (docs/benchmarks.md).
    fn step_time(&self, rows: u32) -> f32 {
        const DENSE: [f32; 5] = [1.0, 1.03, 1.05, 1.2, 1.37];
        const MIXTURE: [f32; 5] = [1.0, 1.9, 2.4, 3.2, 4.2];
        let times = if self.is_mixture { MIXTURE } else { DENSE };
        let known = BUCKETS.into_iter().zip(times).find(|(of, _)| *of == bucket(rows));
        known.map_or(f32::INFINITY, |(_, time)| time)
    }

    /// The time of attention to so many tokens.
    fn attention_time(&self, tokens: u32) -> f32 {
        tokens as f32 / self.weight_tokens.max(1) as f32
    }
}

/// What verification adds to a step, estimated: keys and values are stored by a launch of their own in every layer, and
/// the device waits for the host.
const VERIFICATION_TIME: f32 = 0.1;

/// Drafted tokens since the engine was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DraftCounts {
    /// Tokens that steps verified.
    pub drafted: u64,
    /// Tokens of these that the model sampled, too.
    pub accepted: u64,
}

impl Running {
    /// Rows of the next step, or of the one in flight.
    pub fn step_rows(&self) -> u32 {
        1 + self.draft.len() as u32
    }

    /// The token and the position of each of these rows.
    pub fn inputs(&self) -> impl Iterator<Item = (u32, u32)> {
        [self.last].into_iter().chain(self.draft.iter().copied()).zip(self.position..)
    }

    /// The chance that the first token of a draft is right, and the maximum number of tokens of a draft behind the
    /// steps in flight.
    fn prospect(&self, cache: KvCache, most: u32) -> Option<(f32, u32)> {
        if !self.may_run() {
            return None;
        }
        let chance = self.drafter.as_ref()?.chance()?;
        let position = self.position + self.launched - self.produced;
        let room = match cache {
            KvCache::Bf16 => (self.pages.len() as u32 * PAGE_TOKENS).saturating_sub(position + 1),
            // A page is packed by the step that fills it, so its last token must be right.
            KvCache::Packed => (PAGE_TOKENS - 2).saturating_sub(position % PAGE_TOKENS),
        };
        // The last token of a sequence needs no guess.
        let left = self.max_new_tokens - self.launched - 1;
        Some((chance, most.min(room).min(left)))
    }
}

impl Schedule {
    /// By row: how many tokens the next step should verify. Empty if none.
    fn plan_drafts(&self) -> Vec<u32> {
        let limits = &self.limits.speculation;
        let rows = self.rows.len() as u32;
        if limits.tokens == 0 || rows >= limits.rows {
            return Vec::new();
        }
        // A token is right if all before it are, those in flight included.
        let mut guesses = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            let Some((chance, count)) = row.prospect(self.limits.kv_cache, limits.tokens) else { continue };
            let in_flight = row.launched - row.produced;
            guesses.extend((1..=count).map(|nth| (chance.powi((in_flight + nth).cast_signed()), at)));
        }
        guesses.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut attention: f32 = self.rows.iter().map(|row| limits.attention_time(row.position)).sum();
        let mut expected = rows as f32;
        let (mut best, mut taken) = (expected / (limits.step_time(rows) + attention), 0);
        for (total, (chance, at)) in (rows + 1..=limits.rows).zip(&guesses) {
            expected += chance;
            attention += limits.attention_time(self.rows[*at].position);
            let rate = expected / (limits.step_time(total) + attention + VERIFICATION_TIME);
            if rate > best {
                (best, taken) = (rate, (total - rows) as usize);
            }
        }
        if taken == 0 {
            return Vec::new();
        }
        let mut counts = vec![0; self.rows.len()];
        guesses[..taken].iter().for_each(|(_, at)| counts[*at] += 1);
        counts
    }

    /// Whether the next step should verify drafts: it waits for the steps in flight then.
    pub(super) fn wants_drafts(&self) -> bool {
        !self.plan_drafts().is_empty()
    }

    /// Drafts what the next step verifies. No step is in flight.
    pub(super) fn draft(&mut self) {
        let counts = self.plan_drafts();
        for (row, count) in self.rows.iter_mut().zip(counts.into_iter().chain(std::iter::repeat(0))) {
            let drafter = row.drafter.as_ref().filter(|_| count > 0);
            row.draft = drafter.map_or_else(Vec::new, |drafter| drafter.draft(&row.tokens, count as usize));
            // Rows are others than those of the step before, and of the step behind.
            self.changed |= !row.draft.is_empty();
        }
    }

    /// Drafted tokens so far.
    pub fn draft_counts(&self) -> DraftCounts {
        self.draft_counts
    }
}
