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
//!
//! A draft model takes a step per token, for all sequences together, before the step that verifies. It learns only from
//! verified guesses, so it keeps trying: whenever a hundredth of the time of plain steps pays for it, one guess is
//! verified although it is probably wrong. It also must see a prompt before it can draft; it does so if the sequence
//! can be expected to gain more than that takes.

use super::{Running, Schedule, chunks::time_of};
use crate::{
    draft::{Acceptance, DraftRequest, Drafter, ModelDrafter, NgramDrafter, Proposal},
    options::{BUCKETS, EngineOptions, KvCache, bucket},
    pages::PAGE_TOKENS,
    request::Event,
};

/// How drafts are made and what they cost. Times are relative to a step of 1 row.
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
    /// The draft model; `None` drafts by n-gram lookup.
    pub(crate) model: Option<DraftModelLimits>,
}

/// Returns the time of a step of a draft model, relative to a step of its target, by the bytes of the weights and the
/// number of layers of both.
pub fn draft_step_time(draft: (u64, u32), target: (u64, u32)) -> f32 {
    /// Kernels that read no weights take as long in a layer as reading this many bytes does, by the kernel times of
    /// Llama-3.1-8B on an H200 (docs/benchmarks.md).
    const LAYER_BYTES: f32 = 64e6;
    let time = |(weights, layers): (u64, u32)| weights as f32 + layers as f32 * LAYER_BYTES;
    time(draft) / time(target).max(1.0)
}

/// What a schedule knows of a draft model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftModelLimits {
    /// The maximum number of tokens of a sequence that it drafts for, the draft included.
    pub context: u32,
    /// The time of a step of 1 row.
    pub step_time: f32,
}

impl DraftModelLimits {
    /// Returns the time to draft `steps` tokens of each sequence.
    fn drafting_time(&self, steps: u32) -> f32 {
        // The device waits for the host once.
        if steps == 0 { 0.0 } else { steps as f32 * self.step_time + ROUND_TIME }
    }

    /// Returns the time until the model has seen `tokens` more tokens.
    fn catch_up_time(&self, tokens: u32) -> f32 {
        // Steps take two tokens as fast as one.
        if tokens <= 2 { 0.0 } else { self.step_time * time_of(tokens) as f32 / time_of(1) as f32 }
    }
}

impl Speculation {
    /// The speculation of an engine with these options, for a model whose weights have as many bytes as `weight_tokens`
    /// tokens of the KV cache.
    pub fn of(options: &EngineOptions, is_mixture: bool, weight_tokens: u32) -> Self {
        let (tokens, rows) = (options.speculate, options.verified_rows());
        Self { tokens, rows, is_mixture, weight_tokens, model: None }
    }

    /// Drafts with a model, for sequences of up to `context` tokens, the draft included. Its step of 1 row takes
    /// `step_time`, relative to a step of the target.
    #[must_use]
    pub fn with_model(self, context: u32, step_time: f32) -> Self {
        Self { model: Some(DraftModelLimits { context, step_time }), ..self }
    }

    /// Returns the drafter of a sequence; `all` is the acceptance of all sequences by the draft model.
    pub(super) fn drafter(&self, all: Acceptance) -> Option<Drafter> {
        (self.tokens > 0).then(|| match self.model {
            Some(_) => Drafter::Model(ModelDrafter::new(all)),
            None => Drafter::Ngram(NgramDrafter::new()),
        })
    }

    /// Returns the time of a step of `rows` rows without attention, relative to a step of 1 row. Taken from kernel
    /// times of Llama-3.1-8B and step times of Qwen3-30B-A3B on an H200 (docs/benchmarks.md).
    pub(super) fn step_time(&self, rows: u32) -> f32 {
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
/// The estimated time that the host adds to the steps of a draft model.
const ROUND_TIME: f32 = 0.05;
/// The share of the time of plain steps that guesses may take although they are probably wrong, and the limit of this
/// time.
const TRIAL_SHARE: f32 = 0.01;
const TRIAL_TIME_MAX: f32 = 8.0;
/// A prompt is worth seeing for at most this many new tokens, because most answers end early.
const WORTH_TOKENS_MAX: u32 = 256;

/// Counts of drafted tokens since the engine was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DraftCounts {
    /// The number of tokens that steps verified.
    pub drafted: u64,
    /// The number of these that the model sampled, too.
    pub accepted: u64,
}

/// The state of all drafts of a schedule.
#[derive(Debug, Default)]
pub(super) struct Drafts {
    pub(super) counts: DraftCounts,
    /// The acceptance of all sequences by a draft model.
    pub(super) acceptance: Acceptance,
    /// The time that trials of a draft model may take.
    trial_time: f32,
    /// Whether the draft model has answered, so that the next step can verify.
    are_set: bool,
}

/// What the next step verifies.
struct DraftPlan {
    /// The number of drafted tokens of each row.
    counts: Vec<u32>,
    /// The time of a trial; 0 if drafts are probably right.
    trial_time: f32,
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
    fn draft_limits(&self, cache: KvCache, speculation: &Speculation) -> Option<(f32, u32)> {
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
        let model_limit = speculation.model.map_or(u32::MAX, |model| model.context.saturating_sub(position));
        // The last token of a sequence needs no guess.
        let sequence_limit = self.max_new_tokens - self.launched - 1;
        Some((chance, speculation.tokens.min(page_limit).min(model_limit).min(sequence_limit)))
    }

    /// The request to draft `count` tokens.
    pub(crate) fn draft_request(&self, count: u32) -> DraftRequest<'_> {
        DraftRequest { id: self.id, tokens: &self.tokens, count, params: self.params }
    }

    /// The number of the sequence's tokens that a draft model has not seen.
    fn unseen(&self) -> u32 {
        match &self.drafter {
            // The length of a sequence fits in 32 bits.
            Some(Drafter::Model(drafter)) => drafter.unseen(self.tokens.len() as u32),
            _ => 0,
        }
    }

    /// Whether a draft model should see the sequence's tokens: with `count` drafted tokens per step at this chance, the
    /// sequence gains more time than that takes.
    fn is_worth_seeing(&self, speculation: &Speculation, model: &DraftModelLimits, chance: f32, count: u32) -> bool {
        let time = model.catch_up_time(self.unseen());
        if time == 0.0 {
            return true;
        }
        let (mut expected, mut gain) = (1.0, 0.0f32);
        for drafted in 1..=count {
            expected += chance.powi(drafted.cast_signed());
            let step = speculation.step_time(1 + drafted) + VERIFICATION_TIME + model.drafting_time(drafted);
            gain = gain.max(1.0 - step / expected);
        }
        let new_tokens = (self.max_new_tokens - self.launched).min(WORTH_TOKENS_MAX);
        gain * new_tokens as f32 > time
    }

    /// Records the tokens that a step sampled for the sequence, one per row, up to the first that differs from its
    /// guess. Appends their events.
    pub(super) fn verify(&mut self, tokens: &[u32], drafts: &mut Drafts, events: &mut Vec<Event>) {
        let draft = std::mem::take(&mut self.draft);
        let mut accepted = 0;
        for (&token, guess) in tokens.iter().zip(draft.iter().map(Some).chain([None])) {
            self.position += 1;
            events.push(self.record_token(token));
            let is_right = guess == Some(&token);
            if let (Some(Drafter::Model(drafter)), Some(_)) = (&mut self.drafter, guess) {
                drafter.observe(is_right);
                drafts.acceptance.observe(is_right);
            }
            if self.done || !is_right {
                break;
            }
            accepted += 1;
        }
        drafts.counts.accepted += accepted;
        if draft.is_empty() {
            return;
        }
        // No token of the sequence is in flight.
        self.launched = self.produced;
        if let Some(Drafter::Model(drafter)) = &mut self.drafter {
            // The model has not seen the newest token, nor the one before it if that was its last guess.
            let unseen = 1 + u32::from(accepted as usize == draft.len());
            drafter.set_seen((self.tokens.len() as u32).saturating_sub(unseen));
        }
    }
}

impl Schedule {
    /// Returns what the next step should verify; `None` for nothing.
    fn plan_drafts(&self) -> Option<DraftPlan> {
        let limits = &self.limits.speculation;
        let rows = self.rows.len() as u32;
        if limits.tokens == 0 || rows >= limits.rows {
            return None;
        }
        // A token can be right only if all before it are; an n-gram also guesses those in flight.
        let mut guesses = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            let Some((chance, count)) = row.draft_limits(self.limits.kv_cache, limits) else { continue };
            if limits.model.is_some_and(|model| !row.is_worth_seeing(limits, &model, chance, count)) {
                continue;
            }
            let in_flight = if limits.model.is_none() { row.launched - row.produced } else { 0 };
            guesses.extend((1..=count).map(|nth| (chance.powi((in_flight + nth).cast_signed()), at, nth)));
        }
        guesses.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
        let mut attention: f32 = self.rows.iter().map(|row| limits.attention_time(row.position)).sum();
        let mut expected = rows as f32;
        let (mut best, mut drafted, mut steps) = (expected / (limits.step_time(rows) + attention), 0, 0);
        for (total, &(chance, at, nth)) in (rows + 1..=limits.rows).zip(&guesses) {
            expected += chance;
            attention += limits.attention_time(self.rows[at].position);
            steps = nth.max(steps);
            let drafting = limits.model.map_or(0.0, |model| model.drafting_time(steps));
            let rate = expected / (limits.step_time(total) + attention + VERIFICATION_TIME + drafting);
            if rate > best {
                (best, drafted) = (rate, (total - rows) as usize);
            }
        }
        if drafted == 0 {
            return self.plan_trial();
        }
        let mut counts = vec![0; self.rows.len()];
        guesses[..drafted].iter().for_each(|(_, at, _)| counts[*at] += 1);
        Some(DraftPlan { counts, trial_time: 0.0 })
    }

    /// Returns a plan to verify one guess of a draft model, if there is time for a trial.
    fn plan_trial(&self) -> Option<DraftPlan> {
        let limits = &self.limits.speculation;
        let model = limits.model?;
        let rows = self.rows.len() as u32;
        let verification = limits.step_time(rows + 1) - limits.step_time(rows) + VERIFICATION_TIME;
        let times = self.rows.iter().enumerate().filter_map(|(at, row)| {
            let (_, count) = row.draft_limits(self.limits.kv_cache, limits)?;
            let time = |unseen| verification + model.drafting_time(1) + model.catch_up_time(unseen);
            let fits = count > 0 && time(row.unseen()) <= self.drafts.trial_time;
            // A long prompt is seen by chunks, and the trial is over after the last one.
            fits.then(|| (at, time(row.unseen().min(self.limits.chunk))))
        });
        let (at, trial_time) = times.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        let mut counts = vec![0; self.rows.len()];
        counts[at] = 1;
        Some(DraftPlan { counts, trial_time })
    }

    /// Whether the next step should verify drafts. Such a step waits for the steps in flight.
    pub(super) fn wants_drafts(&self) -> bool {
        self.plan_drafts().is_some()
    }

    /// Drafts the tokens that the next step verifies. Returns whether the draft model must do so first. No step may be
    /// in flight.
    pub(super) fn draft(&mut self) -> bool {
        if self.drafts.are_set {
            return false;
        }
        let plan = self.plan_drafts();
        self.drafts.trial_time -= plan.as_ref().map_or(0.0, |plan| plan.trial_time);
        let counts = plan.map_or_else(Vec::new, |plan| plan.counts);
        let mut asks_model = false;
        for (row, count) in self.rows.iter_mut().zip(counts.into_iter().chain(std::iter::repeat(0))) {
            row.wanted_draft = 0;
            row.draft = match &row.drafter {
                Some(Drafter::Ngram(drafter)) if count > 0 => drafter.draft(&row.tokens, count as usize),
                Some(Drafter::Model(_)) => {
                    row.wanted_draft = count;
                    asks_model |= count > 0;
                    Vec::new()
                }
                _ => Vec::new(),
            };
            // The rows differ from those of the previous step and of the next one.
            self.changed |= !row.draft.is_empty();
        }
        asks_model
    }

    /// The sequences that the draft model drafts for, with the numbers of tokens, if [`Schedule::next_action`] returned
    /// [`Next::Draft`].
    ///
    /// [`Next::Draft`]: super::Next::Draft
    pub fn draft_requests(&self) -> Vec<(&Running, u32)> {
        let wanted = self.rows.iter().filter(|row| row.wanted_draft > 0);
        wanted.map(|row| (row, row.wanted_draft)).collect()
    }

    /// Sets the answers of the draft model to [`Schedule::draft_requests`], in their order.
    pub fn set_drafts(&mut self, proposals: Vec<Proposal>) {
        let wanted = self.rows.iter_mut().filter(|row| row.wanted_draft > 0);
        for (row, proposal) in wanted.zip(proposals) {
            let count = std::mem::take(&mut row.wanted_draft);
            let Some(Drafter::Model(drafter)) = &mut row.drafter else { continue };
            match proposal {
                Proposal::Tokens(mut tokens) => {
                    tokens.truncate(count as usize);
                    // The length of a sequence fits in 32 bits.
                    drafter.set_seen(row.tokens.len() as u32);
                    if tokens.is_empty() {
                        drafter.observe(false);
                    }
                    self.changed |= !tokens.is_empty();
                    row.draft = tokens;
                }
                Proposal::Behind(seen) => drafter.set_seen(seen),
                Proposal::Unavailable => row.drafter = None,
            }
        }
        self.drafts.are_set = true;
    }

    /// Drops the answers of the draft model, because another sequence may join before the next step.
    pub(super) fn drop_drafts(&mut self) {
        if std::mem::take(&mut self.drafts.are_set) {
            self.rows.iter_mut().for_each(|row| row.draft.clear());
        }
    }

    /// Records the launch of a step of all rows.
    pub(super) fn note_drafts_launched(&mut self) {
        let drafted = self.rows.iter().map(|row| row.draft.len() as u64).sum::<u64>();
        self.drafts.counts.drafted += drafted;
        self.drafts.are_set = false;
        if drafted == 0 {
            self.drafts.trial_time = (self.drafts.trial_time + TRIAL_SHARE).min(TRIAL_TIME_MAX);
        }
        // The next step has other rows.
        self.changed |= drafted > 0;
    }

    /// Sets the time of a step of the draft model.
    pub(crate) fn assume_draft_time(&mut self, step_time: f32) {
        self.limits.speculation.model.iter_mut().for_each(|model| model.step_time = step_time);
    }

    /// The counts of drafted tokens so far.
    pub fn draft_counts(&self) -> DraftCounts {
        self.drafts.counts
    }
}
