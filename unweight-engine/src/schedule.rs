//! The scheduler: which sequence has which row, and what the device does next. A pure state machine that launches
//! nothing.
//!
//! ```text
//! add --> pending --(prefill: pages, a row, the first token)--> row --(a token a step)--> finished
//! ```
//! The host launches steps before it has read the tokens of earlier steps, because a step takes these tokens on the
//! device. Rows, pages and sampling parameters change only while no step is in flight: a sequence that joins or leaves
//! costs one pause of the device. If a sequence ends while a later step is in flight, the token of that step is
//! dropped.
//!
//! A sequence takes its pages before it starts. If a page of a packed KV cache can be kept neither packed nor in BF16,
//! its sequence is preempted: it gives its pages back, waits, and computes them again from its tokens.

use std::collections::VecDeque;

use unweight_model::sampling::{NO_TOKEN, SampleParams};

use crate::{
    options::KvCache,
    pages::{PAGE_TOKENS, PagePool, sequence_pages},
};

/// Identifies a sequence of one engine. An engine never reuses an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub(crate) u64);

/// A prompt to continue, with sampling parameters and limits.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Request {
    /// The token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// The sampling parameters.
    pub params: SampleParams,
    /// The maximum number of new tokens; 0 ends the sequence without events.
    pub max_new_tokens: u32,
    /// Token ids that end the sequence. The event of such a token is reported like any other.
    pub stop: Vec<u32>,
}

impl Request {
    /// A request with greedy sampling, up to 256 new tokens and no stop tokens.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self { prompt, params: SampleParams::default(), max_new_tokens: 256, stop: Vec::new() }
    }

    /// Sets the sampling parameters.
    #[must_use]
    pub fn params(self, params: SampleParams) -> Self {
        Self { params, ..self }
    }

    /// Sets the maximum number of new tokens.
    #[must_use]
    pub fn max_new_tokens(self, max_new_tokens: u32) -> Self {
        Self { max_new_tokens, ..self }
    }

    /// Sets the token ids that end the sequence.
    #[must_use]
    pub fn stop(self, stop: Vec<u32>) -> Self {
        Self { stop, ..self }
    }
}

/// The reason why a request is rejected. Running sequences are not affected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    /// The prompt is empty.
    #[error("the prompt has no tokens; give one at least, such as the model's bos token")]
    Empty,
    /// The prompt has a token id that the model does not have.
    #[error("token {id} at place {at} of the prompt: the vocabulary ends at {vocab}; is this the model's tokenizer?")]
    UnknownToken {
        /// The token id.
        id: u32,
        /// Its index in the prompt, from 0.
        at: usize,
        /// The vocabulary size of the model.
        vocab: u32,
    },
    /// Prompt and new tokens exceed the context length of the engine.
    #[error(
        "{prompt} tokens of the prompt and {max_new_tokens} to make exceed the context of {context}; shorten one, or load with a longer \
         context"
    )]
    TooLong {
        /// The number of prompt tokens.
        prompt: usize,
        /// The maximum number of new tokens.
        max_new_tokens: u32,
        /// The context length of the engine in tokens.
        context: u32,
    },
    /// The request needs more pages than the KV cache has.
    #[error("{pages} pages of {tokens} tokens are needed and the cache has {total}; load with more memory for it")]
    NoRoom {
        /// The number of pages that the request needs.
        pages: u32,
        /// The number of tokens per page.
        tokens: u32,
        /// The number of pages of the KV cache.
        total: u32,
    },
    /// The KV cache has too few free pages at present.
    #[error("{pages} pages of {tokens} tokens are needed and {free} are free; try again when a sequence has ended")]
    NoPages {
        /// The number of pages that the call needs.
        pages: u32,
        /// The number of tokens per page.
        tokens: u32,
        /// The number of free pages.
        free: u32,
    },
    /// A page of the text cannot be packed, and all BF16 units of the packed KV cache are taken.
    #[error(
        "a page of the text fits neither 12 bits nor the {units} BF16 units of the KV cache; load with a BF16 cache"
    )]
    NoUnits {
        /// The number of BF16 units of the KV cache.
        units: u32,
    },
    /// The queue is full ([`EngineOptions::waiting`](crate::EngineOptions::waiting)), or the call needs an idle engine
    /// or fewer rows.
    #[error("{waiting} requests wait already, which is the limit; try again later")]
    Busy {
        /// The number of waiting sequences; from a call that needs an idle engine, of running sequences or of requested
        /// rows.
        waiting: usize,
    },
    /// A sampling parameter is out of range.
    #[error("{0}")]
    Params(String),
}

impl AdmissionError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Empty => "prompt-empty",
            Self::UnknownToken { .. } => "token-out-of-vocabulary",
            Self::TooLong { .. } => "context-exceeded",
            Self::NoRoom { .. } => "kv-cache-too-small",
            Self::NoPages { .. } => "kv-cache-full",
            Self::NoUnits { .. } => "kv-cache-units-full",
            Self::Busy { .. } => "queue-full",
            Self::Params(_) => "sampling-option-out-of-range",
        }
    }
}

/// The reason why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finish {
    /// The last token is one of [`Request::stop`].
    Stop,
    /// [`Request::max_new_tokens`] tokens were generated.
    Length,
    /// All logits of the row were NaN. The token of the event is [`NO_TOKEN`], which is not a token of the model. Other
    /// sequences are not affected.
    NotANumber,
    /// A page of the sequence cannot be packed, and the pool of BF16 units is too small for the sequence alone. The
    /// token of the event is right, or [`NO_TOKEN`] if the prompt itself does not fit.
    CacheFull,
}

impl Finish {
    /// The name in reports: `stop`, `length`, `nan` or `kv-cache-full`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::NotANumber => "nan",
            Self::CacheFull => "kv-cache-full",
        }
    }
}

/// A new token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The sequence.
    pub seq: SeqId,
    /// The token id.
    pub token: u32,
    /// The reason why the sequence ended with this token; `None` if it continues.
    pub finish: Option<Finish>,
}

/// A sequence that waits for a row.
#[derive(Debug)]
struct Waiting {
    id: SeqId,
    request: Request,
    /// Tokens that were reported before it was preempted; they are the end of the prompt.
    produced: u32,
    /// Sequences that must have ended before it is tried again, unless nothing runs.
    after: u64,
}

/// A sequence that has a row.
#[derive(Debug)]
pub struct Running {
    /// The sequence.
    pub id: SeqId,
    /// The sampling parameters.
    pub params: SampleParams,
    /// The pages of its keys and values, in the order of its tokens; in a packed cache without the last one.
    pub pages: Vec<u32>,
    /// The hot page of a packed cache: the page that the sequence is writing.
    pub hot: u32,
    /// The token id that the next step takes as input.
    pub last: u32,
    /// The position of that token in the sequence, from 0.
    pub position: u32,
    max_new_tokens: u32,
    stop: Vec<u32>,
    /// The prompt and the tokens that were reported.
    tokens: Vec<u32>,
    /// Tokens that were reported.
    produced: u32,
    /// Tokens that were reported or are being made.
    launched: u32,
    done: bool,
    /// A page of it is lost: what is in flight is wrong.
    lost: bool,
}

impl Running {
    /// Whether another step may be launched before something of it is read.
    fn may_run(&self) -> bool {
        !self.done && !self.lost && self.launched < self.max_new_tokens
    }

    /// Notes a token.
    fn note(&mut self, token: u32) -> Event {
        self.produced += 1;
        self.last = token;
        self.tokens.push(token);
        let finish = if token == NO_TOKEN {
            Some(Finish::NotANumber)
        } else if self.stop.contains(&token) {
            Some(Finish::Stop)
        } else if self.produced >= self.max_new_tokens {
            Some(Finish::Length)
        } else {
            None
        };
        self.done = finish.is_some();
        Event { seq: self.id, token, finish }
    }
}

/// The next action of the engine.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// No sequence runs or waits.
    Idle,
    /// Prefill a sequence ([`Schedule::begin`]). No step is in flight.
    Prefill,
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
    pub ahead: u32,
    /// The maximum number of waiting sequences.
    pub waiting: usize,
    /// How the pages of the cache are stored.
    pub kv_cache: KvCache,
}

/// The sequences of an engine with their rows and pages.
#[derive(Debug)]
pub struct Schedule {
    limits: Limits,
    pool: PagePool,
    /// Hot pages of a packed cache, one per row.
    hot: PagePool,
    /// Packed pages that were given back since [`Schedule::take_freed`].
    freed: Vec<u32>,
    next_id: u64,
    /// Sequences that have ended or were preempted.
    ended: u64,
    preempted: u64,
    waiting: VecDeque<Waiting>,
    rows: Vec<Running>,
    in_flight: u32,
    /// Rows are others than the device knows of.
    changed: bool,
}

/// A sequence during its prefill.
#[derive(Debug)]
pub struct Prefill {
    /// The token ids of the prompt.
    pub prompt: Vec<u32>,
    running: Running,
}

impl Prefill {
    /// The state of the sequence after its first token.
    pub fn running(&self) -> &Running {
        &self.running
    }
}

impl Schedule {
    /// An empty schedule over a KV cache of `pages` pages.
    pub fn new(limits: Limits, pages: u32) -> Self {
        Self {
            limits,
            pool: PagePool::new(pages),
            hot: PagePool::new(limits.max_batch),
            freed: Vec::new(),
            next_id: 0,
            ended: 0,
            preempted: 0,
            waiting: VecDeque::new(),
            rows: Vec::new(),
            in_flight: 0,
            changed: false,
        }
    }

    /// Queues a request. A request with `max_new_tokens` 0 ends at once and has no events.
    ///
    /// # Errors
    /// [`AdmissionError`] if the request cannot run; the schedule is unchanged.
    pub fn add(&mut self, request: Request) -> Result<SeqId, AdmissionError> {
        self.check(&request)?;
        if self.waiting.len() >= self.limits.waiting {
            return Err(AdmissionError::Busy { waiting: self.waiting.len() });
        }
        let id = SeqId(self.next_id);
        self.next_id += 1;
        if request.max_new_tokens > 0 {
            self.waiting.push_back(Waiting { id, request, produced: 0, after: 0 });
        }
        Ok(id)
    }

    /// Checks whether a request can ever run.
    ///
    /// # Errors
    /// [`AdmissionError`].
    pub fn check(&self, request: &Request) -> Result<(), AdmissionError> {
        let Limits { context, vocab, .. } = self.limits;
        if request.prompt.is_empty() {
            return Err(AdmissionError::Empty);
        }
        if let Some((at, &id)) = request.prompt.iter().enumerate().find(|(_, id)| **id >= vocab) {
            return Err(AdmissionError::UnknownToken { id, at, vocab });
        }
        request.params.check().map_err(|error| AdmissionError::Params(error.to_string()))?;
        let (prompt, max_new_tokens) = (request.prompt.len(), request.max_new_tokens);
        let tokens = u32::try_from(prompt).ok().and_then(|prompt| prompt.checked_add(max_new_tokens));
        let Some(tokens) = tokens.filter(|tokens| *tokens <= context) else {
            return Err(AdmissionError::TooLong { prompt, max_new_tokens, context });
        };
        let (pages, total) = (self.pages_of(tokens), self.pool.total());
        if pages > total {
            return Err(AdmissionError::NoRoom { pages, tokens: PAGE_TOKENS, total });
        }
        Ok(())
    }

    /// Takes `counts[i]` pages for the `i`-th of several sequences: all of them or none.
    ///
    /// # Errors
    /// [`AdmissionError::NoPages`].
    pub fn lend(&mut self, counts: &[u32]) -> Result<Vec<Vec<u32>>, AdmissionError> {
        let all = counts.iter().fold(0u32, |sum, count| sum.saturating_add(*count));
        let free = self.pool.free();
        if all > free {
            return Err(AdmissionError::NoPages { pages: all, tokens: PAGE_TOKENS, free });
        }
        Ok(counts.iter().filter_map(|count| self.pool.take(*count)).collect())
    }

    /// Returns pages that [`Schedule::lend`] took.
    pub fn give(&mut self, pages: Vec<Vec<u32>>) {
        pages.into_iter().for_each(|pages| self.give_pages(pages));
    }

    /// The number of pages that a sequence of so many tokens takes.
    pub fn pages_of(&self, tokens: u32) -> u32 {
        sequence_pages(self.limits.kv_cache, tokens)
    }

    fn give_pages(&mut self, pages: Vec<u32>) {
        if self.limits.kv_cache == KvCache::Packed {
            self.freed.extend(&pages);
        }
        self.pool.give(pages);
    }

    /// The packed pages that were given back since the last call. Their BF16 units are to be released before any of
    /// them is packed again.
    pub fn take_freed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.freed)
    }

    /// How often a sequence was preempted.
    pub fn preempted(&self) -> u64 {
        self.preempted
    }

    /// Ends a sequence and drops its tokens in flight. `false` if there is no such sequence.
    pub fn cancel(&mut self, id: SeqId) -> bool {
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id) {
            self.waiting.remove(at);
            return true;
        }
        match self.rows.iter_mut().find(|running| running.id == id && !running.done) {
            Some(running) => {
                (running.done, running.lost) = (true, false);
                true
            }
            None => false,
        }
    }

    /// Returns the next action. Releases finished sequences if no step is in flight.
    pub fn due(&mut self) -> Next {
        if self.in_flight == 0 {
            self.compact();
            if self.can_prefill() {
                return Next::Prefill;
            }
            if self.rows.is_empty() {
                return Next::Idle;
            }
            return Next::Launch { changed: self.changed };
        }
        let ready = !self.changed && self.rows.iter().all(Running::may_run) && !self.can_prefill();
        if ready && self.in_flight < self.limits.ahead { Next::Launch { changed: false } } else { Next::Read }
    }

    /// Whether the next sequence that waits has a row and pages.
    fn can_prefill(&self) -> bool {
        (self.rows.len() as u64) < u64::from(self.limits.max_batch)
            && self.waiting.front().is_some_and(|waiting| {
                self.need(waiting) <= self.pool.free() && (self.rows.is_empty() || self.ended >= waiting.after)
            })
    }

    /// Pages of a whole request.
    fn need(&self, waiting: &Waiting) -> u32 {
        // Checked when it was added: both together fit the context.
        self.pages_of(waiting.request.prompt.len() as u32 + waiting.request.max_new_tokens - waiting.produced)
    }

    /// Lets go of rows that are finished. The last row takes the place of one that goes.
    fn compact(&mut self) {
        let mut at = 0;
        while at < self.rows.len() {
            if self.rows[at].done || self.rows[at].lost {
                let gone = self.rows.swap_remove(at);
                self.changed = true;
                self.leave(gone);
            } else {
                at += 1;
            }
        }
    }

    /// Takes the pages of a sequence back. If one of them is lost, the sequence waits to be computed again.
    fn leave(&mut self, gone: Running) {
        self.ended += 1;
        self.give_pages(gone.pages);
        self.hot.give(vec![gone.hot]);
        if gone.lost {
            let Running { id, params, tokens, max_new_tokens, stop, produced, .. } = gone;
            let request = Request { prompt: tokens, params, max_new_tokens, stop };
            self.preempted += 1;
            self.waiting.push_front(Waiting { id, request, produced, after: self.ended + 1 });
        }
    }

    /// Takes the next waiting sequence. `None` if [`Schedule::due`] does not return [`Next::Prefill`].
    pub fn begin(&mut self) -> Option<Prefill> {
        if self.in_flight > 0 || !self.can_prefill() {
            return None;
        }
        let need = self.waiting.front().map(|waiting| self.need(waiting))?;
        // As many as there are rows, of which one is free.
        let hot = self.hot.take(1)?.pop()?;
        let Some(pages) = self.pool.take(need) else {
            self.hot.give(vec![hot]);
            return None;
        };
        let Waiting { id, request, produced, .. } = self.waiting.pop_front()?;
        let running = Running {
            id,
            params: request.params,
            pages,
            hot,
            last: 0,
            position: request.prompt.len() as u32,
            max_new_tokens: request.max_new_tokens,
            stop: request.stop,
            tokens: request.prompt.clone(),
            produced,
            launched: produced + 1,
            done: false,
            lost: false,
        };
        Some(Prefill { prompt: request.prompt, running })
    }

    /// Records the first token of a sequence after its prefill.
    pub fn begun(&mut self, prefill: Prefill, token: u32) -> Event {
        let mut running = prefill.running;
        let event = running.note(token);
        self.rows.push(running);
        self.changed = true;
        event
    }

    /// Releases a sequence whose prefill failed.
    pub fn failed(&mut self, prefill: Prefill) {
        self.leave(prefill.running);
    }

    /// Preempts a sequence a page of whose prompt is lost. If nothing else holds units, it ends instead.
    pub fn lost(&mut self, prefill: Prefill) -> Option<Event> {
        let mut running = prefill.running;
        let (id, alone) = (running.id, self.rows.is_empty());
        running.lost = !alone;
        self.leave(running);
        alone.then_some(Event { seq: id, token: NO_TOKEN, finish: Some(Finish::CacheFull) })
    }

    /// Records the launch of a step of all rows.
    pub fn launched(&mut self) {
        self.in_flight += 1;
        self.changed = false;
        for running in &mut self.rows {
            running.launched += 1;
        }
    }

    /// Records the tokens of the oldest step in flight, one per row, and appends their events to `events`. `lost` has a
    /// word per row that is not 0 if a page that the step filled is lost; empty: none is. The token of that step is
    /// right, those of later steps in flight are not.
    pub fn read(&mut self, tokens: &[u32], lost: &[u32], events: &mut Vec<Event>) {
        debug_assert!(self.in_flight > 0 && tokens.len() == self.rows.len());
        self.in_flight -= 1;
        let alone = self.rows.len() == 1;
        for (at, (running, &token)) in self.rows.iter_mut().zip(tokens).enumerate() {
            // A sequence that had ended already ran along.
            if running.done || running.lost {
                continue;
            }
            running.position += 1;
            let mut event = running.note(token);
            if !running.done && lost.get(at).is_some_and(|flag| *flag != 0) {
                if alone {
                    // Nothing else holds units: computing it again would end here again.
                    running.done = true;
                    event.finish = Some(Finish::CacheFull);
                } else {
                    running.lost = true;
                }
            }
            events.push(event);
        }
    }

    /// Ends all sequences, because results of a failed device cannot be trusted.
    pub fn clear(&mut self) {
        self.in_flight = 0;
        self.waiting.clear();
        for running in &mut self.rows {
            (running.done, running.lost) = (true, false);
        }
        self.compact();
    }

    /// The running sequences in the order of their rows.
    pub fn rows(&self) -> &[Running] {
        &self.rows
    }

    /// The number of waiting sequences.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The number of free pages.
    pub fn free_pages(&self) -> u32 {
        self.pool.free()
    }
}

#[cfg(test)]
mod tests;
