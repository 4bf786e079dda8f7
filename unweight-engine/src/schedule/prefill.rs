//! The prompts that run: their sequences' pages, chunks and first tokens.

use std::ops::Range;

use unweight_model::sampling::NO_TOKEN;

use super::{Running, Schedule, Waiting, chunks::time_of};
use crate::{
    draft::TokenKind,
    prefix::NodeId,
    request::{Event, Finish},
};

/// A short prompt has at most this part of a chunk: the next chunk of a long prompt takes several times as long.
const SHORT: u32 = 4;

/// What a sequence takes from the pools to run.
#[derive(Debug)]
pub(super) struct Holding {
    /// Nodes of the prefix cache; their pages are the first of `pages`.
    shared: Vec<NodeId>,
    pages: Vec<u32>,
    hot: u32,
    state_slot: Option<u32>,
}

/// A sequence during its prefill.
#[derive(Debug)]
pub(super) struct Prefill {
    /// The number of tokens before the next chunk.
    pub(super) start: u32,
    /// Its pages are set as those of the prompt that runs.
    is_set: bool,
    /// No other sequence held BF16 units when a chunk was run, so preemption cannot free any.
    sole_holder: bool,
    /// The state of the sequence after its first token.
    pub(super) running: Running,
}

/// The next chunk of a prompt.
#[derive(Debug)]
pub struct Chunk<'a> {
    /// The sequence of the chunk.
    pub running: &'a Running,
    /// The token ids of the chunk.
    pub tokens: &'a [u32],
    /// The position of the first token.
    pub start: u32,
    /// Whether the sequence's pages must be set first, because another prompt ran before.
    pub sets_pages: bool,
    /// Whether the sequence's first token is sampled after the chunk.
    pub is_last: bool,
}

impl Schedule {
    /// Starts the prefill of the next waiting sequence, if [`Schedule::next_action`] returned [`super::Next::Prefill`]
    /// or [`super::Next::Mixed`], and no prompt runs or the sequence passes it. It may free pages
    /// ([`Schedule::take_freed`]).
    pub fn begin_prefill(&mut self) {
        if let Some(next) = self.passing() {
            self.passed = self.prefill.take().map(|prefill| Prefill { is_set: false, ..prefill });
            if !self.begin(next) {
                self.prefill = self.passed.take();
            }
        } else if self.prefill.is_none()
            && let Some(next) = self.next_waiting()
        {
            self.begin(next);
        }
    }

    /// Whether [`Schedule::begin_prefill`] would let a short prompt pass the current one, of which no page may be lost
    /// then ([`Schedule::abort_prefill`]).
    pub(crate) fn passes(&self) -> bool {
        self.passing().is_some()
    }

    /// Returns the index of the waiting sequence that passes the current prompt. Chunks of a long prompt and short
    /// prompts alternate.
    pub(super) fn passing(&self) -> Option<usize> {
        let long = self.prefill.as_ref().filter(|prefill| prefill.is_set && self.passed.is_none())?;
        let (left, short) = (long.running.tokens.len() as u32 - long.start, self.cut.fraction(SHORT));
        let is_short = |waiting: &Waiting| waiting.request.prompt.len() as u32 <= short && self.has_slot(waiting);
        let next = self.waiting.iter().position(is_short).filter(|_| left > self.cut.chunk())?;
        self.room_for(&self.waiting[next]).map(|_| next)
    }

    /// The sequences whose prompts run.
    pub(super) fn prefills(&self) -> impl Iterator<Item = &Prefill> + Clone {
        self.prefill.iter().chain(&self.passed)
    }

    /// Removes a sequence whose prompt runs. The prompt that it passed goes on.
    pub(super) fn take_prefill_if(&mut self, is_it: impl Fn(&Prefill) -> bool) -> Option<Prefill> {
        if let Some(passed) = self.passed.take_if(|passed| is_it(passed)) {
            return Some(passed);
        }
        let prefill = self.prefill.take_if(|prefill| is_it(prefill))?;
        self.prefill = self.passed.take();
        Some(prefill)
    }

    /// Starts the prefill of a waiting sequence. Returns whether there was room for it.
    fn begin(&mut self, next: usize) -> bool {
        let Some((shared, need)) = self.waiting.get(next).and_then(|waiting| self.room_for(waiting)) else {
            return false;
        };
        let Some(waiting) = self.waiting.remove(next) else { return false };
        match self.take_holding(shared, need, waiting.is_adjusted()) {
            Some(holding) => self.prefill = Some(self.prefill_of(waiting, holding)),
            None => self.waiting.insert(next, waiting),
        }
        self.prefill.is_some()
    }

    /// Takes `need` pages, a hot page and, for adjusted logits, a state slot: all of them or none.
    pub(super) fn take_holding(&mut self, shared: Vec<NodeId>, need: u32, is_adjusted: bool) -> Option<Holding> {
        // Held before pages are taken, because that may evict nodes that no sequence reads.
        self.prefixes.hold(&shared);
        let (own, hot) = (self.take_pages(need), self.hot_pages.take(1));
        let state_slot = self.state_slots.take(u32::from(is_adjusted));
        if let (Some(own), Some([hot]), Some(state_slot)) = (&own, hot.as_deref(), &state_slot) {
            let pages = [&self.prefixes.pages(&shared)[..], own].concat();
            return Some(Holding { shared, pages, hot: *hot, state_slot: state_slot.first().copied() });
        }
        self.prefixes.release(&shared);
        self.give_pages(own.unwrap_or_default());
        self.hot_pages.give(hot.unwrap_or_default());
        self.state_slots.give(state_slot.unwrap_or_default());
        None
    }

    fn prefill_of(&mut self, waiting: Waiting, holding: Holding) -> Prefill {
        let is_adjusted = waiting.is_adjusted();
        let Waiting { id, request, constraint, produced, .. } = waiting;
        let Holding { shared, pages, hot, state_slot } = holding;
        let start = self.tokens_of(&shared);
        self.shared_prompt_tokens += u64::from(start);
        let running = Running {
            id,
            params: request.params,
            adjustments: request.adjustments,
            logprobs: request.logprobs,
            constraint,
            state_slot,
            pages,
            shared,
            hot,
            last: 0,
            position: request.prompt.len() as u32,
            draft: Vec::new(),
            wanted_draft: 0,
            drafter: self.limits.speculation.drafter(self.drafts.acceptance).filter(|_| !is_adjusted),
            max_new_tokens: request.max_new_tokens,
            stop: request.stop,
            tokens: request.prompt,
            produced,
            launched: produced + 1,
            done: false,
            must_recompute: false,
        };
        Prefill { start, is_set: false, sole_holder: true, running }
    }

    /// The next chunk of the current prompt.
    pub fn next_chunk(&self) -> Option<Chunk<'_>> {
        let prefill = self.prefill.as_ref()?;
        let Range { start, end } = self.chunk_of(prefill);
        let tokens = &prefill.running.tokens;
        Some(Chunk {
            running: &prefill.running,
            tokens: &tokens[start as usize..end as usize],
            start,
            sets_pages: !prefill.is_set,
            is_last: end as usize == tokens.len(),
        })
    }

    /// Records that the chunk of [`Schedule::next_chunk`] was enqueued.
    pub fn note_chunk_launched(&mut self) {
        if let Some(mut prefill) = self.prefill.take() {
            prefill.sole_holder &= self.rows.is_empty() && self.passed.is_none();
            let Range { start, end } = self.chunk_of(&prefill);
            // Without rows, no sequence waits for the chunk.
            self.spent = if self.rows.is_empty() { 0 } else { self.spent + time_of(end - start) };
            let Running { drafter, tokens, .. } = &mut prefill.running;
            if let Some(drafter) = drafter {
                drafter.observe(&tokens[..end as usize], TokenKind::Prompt);
            }
            self.prefill = Some(Prefill { start: end, is_set: true, ..prefill });
        }
    }

    /// Whether the prompt of a sequence runs.
    pub fn is_prefilling(&self) -> bool {
        self.prefill.is_some()
    }

    /// Takes the current prefill; the prompt that it passed goes on.
    fn take_current(&mut self) -> Option<Prefill> {
        std::mem::replace(&mut self.prefill, self.passed.take())
    }

    /// Ends the current prefill, which is complete: records the sequence's first token and gives it a row.
    pub fn finish_prefill(&mut self, token: u32) -> Option<Event> {
        let Prefill { mut running, .. } = self.take_current()?;
        if self.limits.shares_prefixes {
            // Before the first token is appended to the tokens.
            self.prefixes.insert(&mut running.shared, &running.tokens, &running.pages);
        }
        let event = running.record_token(token);
        self.rows.push(running);
        self.changed = true;
        Some(event)
    }

    /// Preempts the sequence of the current prefill, because a page was lost. If nothing else holds BF16 units, ends it
    /// instead.
    pub fn abort_prefill(&mut self) -> Option<Event> {
        let Prefill { mut running, sole_holder, .. } = self.take_current()?;
        // Sampling of its token has overwritten the first row.
        self.changed = true;
        let dropped = self.drop_idle();
        let (id, ends) = (running.id, sole_holder && !dropped);
        running.must_recompute = !ends;
        self.retire(running);
        ends.then_some(Event { seq: id, token: NO_TOKEN, finish: Some(Finish::UnitsFull), logprobs: None })
    }

    /// The mask of the sequence whose prompt runs; empty if it has no constraint.
    pub fn prefill_mask(&mut self) -> Vec<u32> {
        self.prefill.as_mut().map_or_else(Vec::new, |prefill| prefill.running.mask(self.limits.vocab))
    }
}
