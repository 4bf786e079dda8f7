//! The scheduler decides which sequence has which row, and what the device does next. It is a pure state machine that
//! launches nothing.
//!
//! ```text
//! add --> waiting --(prefill by chunks: pages of the prompt, the first token)--> row --(a token a step)--> finished
//! ```
//! The host launches steps before it has read the tokens of earlier steps, because a step takes these tokens on the
//! device. Rows, pages and sampling parameters change only while no step is in flight: a sequence that joins or leaves
//! costs one pause of the device. If a sequence ends while a later step is in flight, the token of that step is
//! dropped.
//!
//! One prompt runs at a time, cut by [`Cut`]. While sequences run, a chunk runs in one pass with a step
//! ([`Limits::mixes`]). Without such passes, at most [`Limits::chunk`] prompt tokens run between two steps, so that no
//! sequence waits for a long prompt. If at most a chunk of prompt tokens waits in all, steps have priority: prompts are
//! cut into quarters of chunks (halves if many sequences run). Between two chunks of a long prompt, a short one of at
//! most a quarter of a chunk passes it.
//!
//! A sequence takes pages as it grows. If none is free, the youngest sequence is preempted: it returns its pages,
//! waits, and is computed again from its tokens. A sequence of a packed KV cache is also preempted if a page can be
//! kept neither packed nor in BF16.

mod chunks;
mod prefill;
mod speculate;

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use rayon::prelude::*;
use unweight_model::sampling::{Adjustments, History, NO_TOKEN, SampleParams};

use self::chunks::ChunkStart;
pub use self::prefill::Chunk;
use self::prefill::Prefill;
use self::speculate::Drafts;
pub use self::speculate::{DraftCounts, Speculation, draft_step_time};
use crate::{
    constraint::{self, ConstraintState},
    draft::{Drafter, TokenKind},
    options::KvCache,
    pages::{IndexPool, PAGE_TOKENS, sequence_pages, step_pages},
    prefix::{Cut, NodeId, PrefixCache},
    request::{AdmissionError, Event, Finish, Request, SeqId},
};

/// A sequence that waits for a row.
#[derive(Debug)]
struct Waiting {
    id: SeqId,
    request: Request,
    /// The state of the request's constraint.
    constraint: Option<Box<dyn ConstraintState>>,
    /// The number of tokens that were reported before the sequence was preempted; they are the end of the prompt.
    produced: u32,
    /// The sequence is tried again once [`Schedule::ended`] has reached this number, or if nothing runs.
    retry_at_ended: u64,
    /// The nodes of the cached prefix of the prompt, at a [`PrefixCache::version`].
    shared: Mutex<(u64, Vec<NodeId>)>,
}

impl Waiting {
    /// Whether the sequence needs a state slot.
    fn is_adjusted(&self) -> bool {
        !self.request.adjustments.is_none() || self.constraint.is_some()
    }
}

/// A sequence that has a row.
#[derive(Debug)]
pub struct Running {
    /// The id of the sequence.
    pub id: SeqId,
    /// The sampling parameters.
    pub params: SampleParams,
    /// The adjustments of logits.
    pub adjustments: Adjustments,
    /// The number of most likely tokens requested ([`Request::logprobs`]).
    pub logprobs: Option<u32>,
    /// The state of the constraint after the reported tokens.
    constraint: Option<Box<dyn ConstraintState>>,
    /// The index of the sequence's token states on the device, if its logits are adjusted or it has a constraint.
    pub state_slot: Option<u32>,
    /// The pages of the keys and values, in the order of the tokens; in a packed cache without the last page.
    pub pages: Vec<u32>,
    /// Prompt chunks that other sequences may read; their pages are the first of `pages`.
    shared: Vec<NodeId>,
    /// The hot page of a packed cache: the page that the sequence is writing.
    pub hot: u32,
    /// The token id that the next step takes as input.
    pub last: u32,
    /// The position of that token in the sequence, from 0.
    pub position: u32,
    /// Drafted tokens after `last`, which the step verifies.
    draft: Vec<u32>,
    /// The number of tokens that a draft model is to draft.
    wanted_draft: u32,
    drafter: Option<Drafter>,
    max_new_tokens: u32,
    stop: Vec<u32>,
    /// The prompt and the tokens that were reported.
    tokens: Vec<u32>,
    /// The number of reported tokens.
    produced: u32,
    /// The number of tokens that were reported or are in flight.
    launched: u32,
    done: bool,
    /// Whether a page is lost, so that results in flight are wrong and the sequence must be computed again.
    must_recompute: bool,
}

impl Running {
    /// Tokens of the sequence so far.
    pub fn history(&self) -> History<'_> {
        let (prompt, answer) = self.tokens.split_at(self.tokens.len() - self.produced as usize);
        History { prompt, answer, ends: &self.stop }
    }

    /// Whether the sequence has a constraint.
    pub fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }

    /// The mask of the tokens that may be sampled next; empty without a constraint.
    fn mask(&mut self, vocab: u32) -> Vec<u32> {
        // Tokens of a sequence that has ended are not read.
        let runs = !self.done && !self.must_recompute;
        self.constraint.as_deref_mut().map_or_else(Vec::new, |constraint| constraint::mask(constraint, vocab, runs))
    }

    /// Whether another step may be launched before the steps in flight are read.
    fn may_run(&self) -> bool {
        !self.done && !self.must_recompute && self.launched < self.max_new_tokens
    }

    /// The number of pages needed before another step is launched, or for `tokens_ahead` tokens if that is more.
    fn need(&self, cache: KvCache, tokens_ahead: u32) -> u32 {
        let in_flight = self.launched - self.produced;
        // The last token is sampled, but no step reads it.
        let steps_left = (self.max_new_tokens - self.produced).saturating_sub(1);
        step_pages(cache, self.position + in_flight.max(tokens_ahead).min(steps_left))
    }

    /// Records a token and returns its event.
    fn record_token(&mut self, token: u32) -> Event {
        self.produced += 1;
        self.last = token;
        self.tokens.push(token);
        if let Some(drafter) = &mut self.drafter {
            drafter.observe(&self.tokens, TokenKind::Answer);
        }
        let finish = if token == NO_TOKEN {
            Some(if self.is_constrained() { Finish::Constraint } else { Finish::NotANumber })
        } else if self.stop.contains(&token) {
            Some(Finish::Stop)
        } else if self.constraint.as_mut().is_some_and(|constraint| constraint.take(token)) {
            Some(Finish::Complete)
        } else if self.produced >= self.max_new_tokens {
            Some(Finish::Length)
        } else {
            None
        };
        self.done = finish.is_some();
        Event { seq: self.id, token, finish, logprobs: None }
    }
}

/// The next action of the engine.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// No sequence runs or waits.
    Idle,
    /// Run a chunk of a prompt ([`Schedule::begin_prefill`], [`Schedule::next_chunk`]). If it is the last one of the
    /// prompt, no step is in flight.
    Prefill,
    /// Run a chunk of a prompt and a step of all rows in one pass. No step is in flight, and no token is drafted.
    Mixed {
        /// As for [`Next::Launch`].
        changed: bool,
    },
    /// Let the draft model draft ([`Schedule::draft_requests`], [`Schedule::set_drafts`]). No step is in flight.
    Draft,
    /// Launch a step of all rows.
    Launch {
        /// Whether the rows differ from those of the step before and must be copied to the device. No step is in flight
        /// then.
        changed: bool,
    },
    /// Read the tokens of the oldest step in flight.
    Read,
}

/// The limits of a schedule.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The maximum number of running sequences.
    pub max_batch: u32,
    /// The maximum number of tokens of a sequence, the prompt included.
    pub context: u32,
    /// The vocabulary size of the model.
    pub vocab: u32,
    /// The maximum number of steps in flight.
    pub steps_ahead_max: u32,
    /// The maximum number of waiting sequences.
    pub waiting_max: usize,
    /// How the pages of the cache are stored.
    pub kv_cache: KvCache,
    /// The number of prompt tokens of a chunk, a multiple of [`PAGE_TOKENS`].
    pub chunk: u32,
    /// Whether a chunk of a prompt may run in one pass with a step.
    pub mixes: bool,
    /// Whether sequences share the pages of equal prompt prefixes.
    pub shares_prefixes: bool,
    /// The maximum number of running sequences with adjusted logits.
    pub adjusted_max: u32,
    /// Drafts of sequences without adjusted logits.
    pub speculation: Speculation,
}

/// When a row needs a page, rows get pages for this many tokens if enough are free, because taking pages pauses the
/// device.
const TOKENS_AHEAD: u32 = PAGE_TOKENS;

/// The sequences of an engine with their rows and pages.
#[derive(Debug)]
pub struct Schedule {
    limits: Limits,
    pages: IndexPool,
    /// Hot pages of a packed cache, one per row.
    hot_pages: IndexPool,
    /// State slots of sequences with adjusted logits.
    state_slots: IndexPool,
    /// Packed pages that were given back since [`Schedule::take_freed`].
    freed: Vec<u32>,
    next_id: u64,
    /// Sequences that have ended or were preempted.
    ended: u64,
    preempted: u64,
    waiting: VecDeque<Waiting>,
    /// The sequence whose prompt runs.
    prefill: Option<Prefill>,
    /// A sequence with a long prompt, which the short one of `prefill` passes.
    passed: Option<Prefill>,
    cut: Cut,
    prefixes: PrefixCache,
    /// [`Schedule::shared_prompt_tokens`].
    shared_prompt_tokens: u64,
    drafts: Drafts,
    rows: Vec<Running>,
    /// The steps in flight, the oldest first.
    in_flight: VecDeque<StepInFlight>,
    /// The time of prompt tokens since the last launched step, by [`time_of`].
    spent: u32,
    /// Whether the rows differ from those on the device.
    changed: bool,
}

/// A step that was launched and not read.
#[derive(Debug)]
struct StepInFlight {
    /// At its launch, nothing but its single row held BF16 units, so preemption cannot free any.
    sole_holder: bool,
}

impl Schedule {
    /// An empty schedule over a KV cache of `pages` pages.
    pub fn new(limits: Limits, pages: u32) -> Self {
        Self {
            limits,
            pages: IndexPool::new(pages),
            hot_pages: IndexPool::new(limits.max_batch),
            state_slots: IndexPool::new(limits.adjusted_max),
            freed: Vec::new(),
            next_id: 0,
            ended: 0,
            preempted: 0,
            waiting: VecDeque::new(),
            prefill: None,
            passed: None,
            cut: Cut::new(limits.chunk),
            prefixes: PrefixCache::new(Cut::new(limits.chunk)),
            shared_prompt_tokens: 0,
            drafts: Drafts::default(),
            rows: Vec::new(),
            in_flight: VecDeque::new(),
            spent: 0,
            changed: false,
        }
    }

    /// Queues a request. A request with `max_new_tokens` 0 ends at once and has no events.
    ///
    /// # Errors
    /// [`AdmissionError`] if the request cannot run; the schedule is unchanged.
    pub fn add(&mut self, mut request: Request) -> Result<SeqId, AdmissionError> {
        self.check(&request)?;
        if self.waiting.len() >= self.limits.waiting_max {
            return Err(AdmissionError::Busy { waiting: self.waiting.len() });
        }
        let id = SeqId(self.next_id);
        self.next_id += 1;
        if request.max_new_tokens > 0 {
            let constraint = request.constraint.take().map(|constraint| constraint.start());
            self.waiting.push_back(Waiting {
                id,
                request,
                constraint,
                produced: 0,
                retry_at_ended: 0,
                shared: Mutex::default(),
            });
        }
        Ok(id)
    }

    /// Checks whether a request can ever run.
    ///
    /// # Errors
    /// [`AdmissionError`] if it cannot.
    pub fn check(&self, request: &Request) -> Result<(), AdmissionError> {
        let Limits { context, vocab, .. } = self.limits;
        if request.prompt.is_empty() {
            return Err(AdmissionError::Empty);
        }
        if let Some((at, &id)) = request.prompt.iter().enumerate().find(|(_, id)| **id >= vocab) {
            return Err(AdmissionError::UnknownToken { id, at, vocab });
        }
        request.check_sampling(vocab)?;
        let (prompt, max_new_tokens) = (request.prompt.len(), request.max_new_tokens);
        let tokens = u32::try_from(prompt).ok().and_then(|prompt| prompt.checked_add(max_new_tokens));
        let Some(tokens) = tokens.filter(|tokens| *tokens <= context) else {
            return Err(AdmissionError::TooLong { prompt, max_new_tokens, context });
        };
        let (pages, total) = (self.pages_of(tokens), self.pages.total());
        if pages > total {
            return Err(AdmissionError::NoRoom { pages, tokens: PAGE_TOKENS, total });
        }
        Ok(())
    }

    /// Takes `counts[i]` pages for the `i`-th of several sequences, for all of them or none.
    ///
    /// # Errors
    /// [`AdmissionError::NoPages`] if too few pages are free.
    pub fn lend(&mut self, counts: &[u32]) -> Result<Vec<Vec<u32>>, AdmissionError> {
        let all = counts.iter().fold(0u32, |sum, count| sum.saturating_add(*count));
        let free = self.free_pages();
        if all > free {
            return Err(AdmissionError::NoPages { pages: all, tokens: PAGE_TOKENS, free });
        }
        Ok(counts.iter().filter_map(|count| self.take_pages(*count)).collect())
    }

    /// Returns pages that [`Schedule::lend`] took.
    pub fn give(&mut self, pages: Vec<Vec<u32>>) {
        pages.into_iter().for_each(|pages| self.give_pages(pages));
    }

    /// The number of pages that a sequence of `tokens` tokens takes.
    pub fn pages_of(&self, tokens: u32) -> u32 {
        sequence_pages(self.limits.kv_cache, tokens)
    }

    /// Takes pages, from the prefix cache if too few are free. Returns `None`, and takes no page, if both have too few.
    fn take_pages(&mut self, count: u32) -> Option<Vec<u32>> {
        if count > self.free_pages() {
            return None;
        }
        let evicted = self.prefixes.evict(count.saturating_sub(self.pages.free()));
        self.give_pages(evicted);
        self.pages.take(count)
    }

    fn give_pages(&mut self, pages: Vec<u32>) {
        if self.limits.kv_cache == KvCache::Packed {
            self.freed.extend(&pages);
        }
        self.pages.give(pages);
    }

    /// Returns the packed pages that were returned to the pool since the last call. Their BF16 units must be released
    /// before any of these pages is packed again.
    pub fn take_freed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.freed)
    }

    /// The number of preemptions so far.
    pub fn preempted(&self) -> u64 {
        self.preempted
    }

    /// Ends a sequence and drops its tokens in flight. Returns `false` if there is no such sequence.
    pub fn cancel(&mut self, id: SeqId) -> bool {
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id) {
            self.waiting.remove(at);
            return true;
        }
        if let Some(prefill) = self.take_prefill_if(|prefill| prefill.running.id == id) {
            self.retire(prefill.running);
            return true;
        }
        match self.rows.iter_mut().find(|running| running.id == id && !running.done) {
            Some(running) => {
                (running.done, running.must_recompute) = (true, false);
                true
            }
            None => false,
        }
    }

    /// Returns the next action. Releases finished sequences and hands out pages if no step is in flight.
    pub fn next_action(&mut self) -> Next {
        if self.in_flight.is_empty() {
            self.compact();
            self.grow();
        }
        let chunk = self.chunk_is_due();
        if chunk == Some(ChunkStart::WithStep) && self.in_flight.is_empty() {
            self.drop_drafts();
            return Next::Mixed { changed: self.changed };
        }
        // If the queue is full, a step is read before a chunk is enqueued, because enqueueing may block.
        let may_launch = self.in_flight.len() < self.limits.steps_ahead_max as usize;
        let after_steps = chunk == Some(ChunkStart::AfterSteps) && may_launch;
        if after_steps || chunk == Some(ChunkStart::Alone) && self.in_flight.is_empty() {
            self.drop_drafts();
            return Next::Prefill;
        }
        if self.in_flight.is_empty() {
            return match self.draft() {
                true => Next::Draft,
                false if self.rows.is_empty() => Next::Idle,
                false => Next::Launch { changed: self.changed },
            };
        }
        let cache = self.limits.kv_cache;
        let can_run = |row: &Running| row.may_run() && row.need(cache, 0) <= row.pages.len() as u32;
        let ready = !self.changed && chunk.is_none() && self.rows.iter().all(can_run);
        if ready && may_launch && !self.wants_drafts() { Next::Launch { changed: false } } else { Next::Read }
    }

    /// The number of tokens of these nodes.
    fn tokens_of(&self, nodes: &[NodeId]) -> u32 {
        self.prefixes.pages_of(nodes) * PAGE_TOKENS
    }

    /// Returns the index of the waiting sequence that runs next. While no state slot is free, others pass a sequence
    /// that needs one.
    fn next_waiting(&self) -> Option<usize> {
        self.waiting.iter().position(|waiting| self.has_slot(waiting))
    }

    /// Whether a state slot is free for a sequence, or not needed.
    fn has_slot(&self, waiting: &Waiting) -> bool {
        self.state_slots.free() > 0 || !waiting.is_adjusted()
    }

    /// Returns the nodes of the cached prefix of a sequence's prompt, and the number of pages that it needs in
    /// addition. `None` if no row is free, or too few pages. One page is left for every running sequence that may need
    /// another one.
    fn room_for(&self, waiting: &Waiting) -> Option<(Vec<NodeId>, u32)> {
        // There are as many hot pages as rows.
        let is_too_early = !self.rows.is_empty() && self.ended < waiting.retry_at_ended;
        if self.hot_pages.free() == 0 || is_too_early {
            return None;
        }
        let cache = self.limits.kv_cache;
        let rows = self.rows.iter().filter(|row| row.need(cache, u32::MAX) > row.pages.len() as u32).count() as u32;
        let shares = self.limits.shares_prefixes;
        let shared = if shares { self.shared_of(waiting) } else { Vec::new() };
        let need = self.need(waiting) - self.prefixes.pages_of(&shared);
        (need + rows <= self.free_pages() - self.prefixes.idle_of(&shared)).then_some((shared, need))
    }

    /// Returns the nodes of the cached prefix of a sequence's prompt. They are looked up only after the cache changed,
    /// because a sequence may wait for many steps.
    fn shared_of(&self, waiting: &Waiting) -> Vec<NodeId> {
        let version = self.prefixes.version();
        let mut shared = waiting.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.0 != version {
            *shared = (version, self.prefixes.find(&waiting.request.prompt));
        }
        shared.1.clone()
    }

    /// The number of pages of a prompt and the first step after it.
    fn need(&self, waiting: &Waiting) -> u32 {
        // Checked when the request was added: both together fit in the context.
        let prompt = waiting.request.prompt.len() as u32;
        let whole = self.pages_of(prompt + waiting.request.max_new_tokens - waiting.produced);
        step_pages(self.limits.kv_cache, prompt).min(whole)
    }

    /// Gives rows the pages of their next step, and of some more while the device pauses anyway. Preempts the youngest
    /// sequence while too few pages are free.
    fn grow(&mut self) {
        let cache = self.limits.kv_cache;
        let lacks =
            |row: &Running, tokens_ahead: u32| row.need(cache, tokens_ahead).saturating_sub(row.pages.len() as u32);
        if !self.changed && self.rows.iter().all(|row| lacks(row, 0) == 0) {
            return;
        }
        while self.rows.iter().map(|row| lacks(row, 0)).sum::<u32>() > self.free_pages() {
            self.preempt_youngest();
        }
        for tokens_ahead in [0, TOKENS_AHEAD] {
            for at in 0..self.rows.len() {
                let count = lacks(&self.rows[at], tokens_ahead);
                // Pages that are not needed yet are not taken from the prefix cache.
                let count = if tokens_ahead == 0 { count } else { count.min(self.pages.free()) };
                if let Some(pages) = self.take_pages(count).filter(|pages| !pages.is_empty()) {
                    self.rows[at].pages.extend(pages);
                    self.changed = true;
                }
            }
        }
    }

    /// Preempts the youngest sequence, which is in a row or in its prefill.
    fn preempt_youngest(&mut self) {
        let row = (0..self.rows.len()).max_by_key(|at| self.rows[*at].id);
        let prefill_id = self.prefills().map(|prefill| prefill.running.id).max();
        let sequence = match row {
            Some(at) if prefill_id.is_none_or(|id| id < self.rows[at].id) => {
                self.changed = true;
                self.rows.swap_remove(at)
            }
            _ => match self.take_prefill_if(|prefill| Some(prefill.running.id) == prefill_id) {
                Some(prefill) => prefill.running,
                None => return,
            },
        };
        self.retire(Running { must_recompute: true, ..sequence });
    }

    /// Removes rows that have ended or must be computed again. The last row moves to the index of a removed one.
    fn compact(&mut self) {
        let mut at = 0;
        while at < self.rows.len() {
            if self.rows[at].done || self.rows[at].must_recompute {
                let sequence = self.rows.swap_remove(at);
                self.changed = true;
                self.retire(sequence);
            } else {
                at += 1;
            }
        }
    }

    /// Takes back what a sequence holds. A sequence that must be computed again is queued.
    fn retire(&mut self, mut sequence: Running) {
        self.ended += 1;
        let private_pages = sequence.pages.split_off(self.prefixes.pages_of(&sequence.shared) as usize);
        self.give_pages(private_pages);
        self.prefixes.release(&sequence.shared);
        self.hot_pages.give(vec![sequence.hot]);
        self.state_slots.give(sequence.state_slot.into_iter().collect());
        if sequence.must_recompute {
            let Running { id, params, adjustments, logprobs, tokens, max_new_tokens, stop, produced, .. } = sequence;
            let constraint = sequence.constraint;
            let request =
                Request { prompt: tokens, params, max_new_tokens, stop, adjustments, logprobs, constraint: None };
            self.preempted += 1;
            let retry_at_ended = self.ended + 1;
            let shared = Mutex::default();
            self.waiting.push_front(Waiting { id, request, constraint, produced, retry_at_ended, shared });
        }
    }

    /// Evicts all nodes that no sequence reads, with their BF16 units. Returns whether there were any.
    pub fn drop_idle(&mut self) -> bool {
        let evicted = self.prefixes.evict(self.prefixes.idle_pages());
        let any = !evicted.is_empty();
        self.give_pages(evicted);
        any
    }

    /// Records the launch of a step of all rows.
    pub fn note_step_launched(&mut self) {
        let sole_holder = self.rows.len() == 1 && self.prefill.is_none() && self.prefixes.idle_pages() == 0;
        self.in_flight.push_back(StepInFlight { sole_holder });
        self.changed = false;
        self.spent = 0;
        self.rows.iter_mut().for_each(|running| running.launched += running.step_rows());
        self.note_drafts_launched();
    }

    /// The number of rows of the next step, or of those in flight: one per sequence and one per drafted token.
    pub fn step_rows(&self) -> u32 {
        self.rows.iter().map(Running::step_rows).sum()
    }

    /// Records the tokens of the oldest step in flight, one per row of the step, and appends their events to `events`:
    /// the accepted tokens of a draft, and the token after them. `page_losses` has a word per row, which is not 0 if a
    /// page that the step filled is lost; if it is empty, none is. The token of that step is right, those of later
    /// steps in flight are not.
    pub fn record_step(&mut self, tokens: &[u32], page_losses: &[u32], events: &mut Vec<Event>) {
        debug_assert!(!self.in_flight.is_empty() && tokens.len() as u32 == self.step_rows());
        let sole_holder = self.in_flight.pop_front().is_some_and(|step| step.sole_holder);
        if page_losses.iter().any(|flag| *flag != 0) {
            self.drop_idle();
        }
        let mut first = 0;
        for running in &mut self.rows {
            let step_rows = first..first + running.step_rows() as usize;
            let at = first;
            first = step_rows.end;
            // A sequence that had already ended was still part of the step.
            if running.done || running.must_recompute {
                running.draft.clear();
                continue;
            }
            running.verify(&tokens[step_rows], &mut self.drafts, events);
            // In a packed cache, a step that fills a page of a sequence verifies no draft of that sequence.
            if !running.done && page_losses.get(at).is_some_and(|flag| *flag != 0) {
                if sole_holder {
                    // Nothing else holds units: computing the sequence again would end here, too.
                    running.done = true;
                    events.last_mut().into_iter().for_each(|event| event.finish = Some(Finish::UnitsFull));
                } else {
                    running.must_recompute = true;
                }
            }
        }
    }

    /// Ends all sequences, because results of a failed device cannot be trusted.
    pub fn clear(&mut self) {
        self.in_flight.clear();
        self.waiting.clear();
        while let Some(prefill) = self.take_prefill_if(|_| true) {
            self.retire(prefill.running);
        }
        for running in &mut self.rows {
            (running.done, running.must_recompute) = (true, false);
        }
        self.compact();
    }

    /// The masks of the rows with constraints, in the order of the rows, a word per 32 tokens of the vocabulary. Every
    /// token of earlier steps must have been read.
    pub fn masks(&mut self) -> Vec<u32> {
        let vocab = self.limits.vocab;
        // Each mask may take a millisecond.
        self.rows.par_iter_mut().flat_map_iter(|running| running.mask(vocab)).collect()
    }

    /// The running sequences in the order of their rows.
    pub fn rows(&self) -> &[Running] {
        &self.rows
    }

    /// The number of sequences that have no row yet.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.prefills().count()
    }

    /// The number of pages that no sequence reads; the prefix cache may hold some of them.
    pub fn free_pages(&self) -> u32 {
        self.pages.free() + self.prefixes.idle_pages()
    }

    /// Prompt tokens so far whose keys and values another sequence had computed.
    pub fn shared_prompt_tokens(&self) -> u64 {
        self.shared_prompt_tokens
    }
}

#[cfg(test)]
mod tests;
