//! When the next chunk of a prompt runs, and of how many tokens.

use std::ops::Range;

use super::{Prefill, Schedule};

/// When a chunk may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkStart {
    /// After steps in flight.
    AfterSteps,
    /// While no step is in flight: the sequence joins the rows after it.
    Alone,
    /// In one pass with a step, while no other step is in flight.
    WithStep,
}

/// From this many running sequences on, prompts are cut into halves of chunks instead of quarters while at most a chunk
/// waits: prefill limits the throughput of many sequences, and takes less time per token in larger pieces.
const MANY_ROWS: usize = 32;

/// Prefill of up to this many tokens takes about as long as that of one.
const PASS_TOKENS: u32 = 128;

/// The prefill time of `tokens` tokens, in tokens.
pub(super) fn time_of(tokens: u32) -> u32 {
    tokens.max(PASS_TOKENS)
}

impl Schedule {
    /// Returns when the next chunk of a prompt may run; `None` if no prompt waits, or if a step is due first.
    pub(super) fn chunk_is_due(&self) -> Option<ChunkStart> {
        let (start, len, next) = match (self.passing(), &self.prefill) {
            (None, Some(prefill)) => (prefill.start, prefill.running.tokens.len() as u32, None),
            (passing, _) => {
                let next = passing.or_else(|| self.next_waiting())?;
                let (shared, _) = self.room_for(&self.waiting[next])?;
                (self.tokens_of(&shared), self.waiting[next].request.prompt.len() as u32, Some(next))
            }
        };
        let backlog = self.backlog(start, len, next);
        let Range { end, .. } = self.next_cut(start, len, backlog);
        // Twice the backlog above a chunk, so that the backlog shrinks.
        let budget = backlog.saturating_sub(self.cut.chunk()).saturating_mul(2);
        let budget = budget.max(self.step_tokens()).min(self.cut.chunk());
        let mixes = self.mixes();
        let fits = self.rows.is_empty() || mixes || self.spent == 0 || self.spent + time_of(end - start) <= budget;
        fits.then_some(match mixes {
            true => ChunkStart::WithStep,
            false if end == len => ChunkStart::Alone,
            false => ChunkStart::AfterSteps,
        })
    }

    /// Whether chunks run in one pass with a step.
    fn mixes(&self) -> bool {
        self.limits.mixes && !self.rows.is_empty()
    }

    /// The number of prompt tokens of a piece while at most a chunk waits.
    fn step_tokens(&self) -> u32 {
        self.cut.fraction(if self.rows.len() < MANY_ROWS { 4 } else { 2 })
    }

    /// The prefill time of all prompts that wait, by [`time_of`]: `start..len` of one prompt, the rest of a prompt that
    /// it passes, and the prompts of all waiting sequences but that of index `except`.
    fn backlog(&self, start: u32, len: u32, except: Option<usize>) -> u32 {
        let others = self.waiting.iter().enumerate().filter(|(index, _)| Some(*index) != except);
        let others = others.map(|(_, waiting)| waiting.request.prompt.len() as u32);
        let passed = if except.is_some() { &self.prefill } else { &self.passed };
        let passed = passed.iter().map(|prefill| prefill.running.tokens.len() as u32 - prefill.start);
        others.chain(passed).map(time_of).fold(time_of(len - start), u32::saturating_add)
    }

    /// Returns the next tokens to run of a prompt of `len` tokens, of which `start..` are left.
    fn next_cut(&self, start: u32, len: u32, backlog: u32) -> Range<u32> {
        let steps_first = !self.rows.is_empty() && backlog.max(len) <= self.cut.chunk();
        if steps_first { start..len.min(start + self.step_tokens()) } else { self.cut.next(start, len) }
    }

    /// Returns the next tokens to run of the current prompt.
    pub(super) fn chunk_of(&self, prefill: &Prefill) -> Range<u32> {
        let (start, len) = (prefill.start, prefill.running.tokens.len() as u32);
        self.next_cut(start, len, self.backlog(start, len, None))
    }
}
