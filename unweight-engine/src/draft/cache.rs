//! Which tokens the KV cache of a draft model holds, and what the model must compute to draft.
//!
//! ```text
//! tokens of a sequence    x0 ... x9            x9 is the newest one
//! seen by the model       x0 ... x5            a chunk computes x6 to x8, from the start of their page
//! steps                   x9 -> a, a -> b, b -> c
//! the target accepts a, b and samples d: x10 = a, x11 = b, x12 = d
//! seen by the model       x0 ... x11           the next step takes d
//! ```
//! If the target accepts c as well, the model has not seen c; the first step of the next round then takes c and the
//! token after it. Keys and values of rejected tokens are overwritten before a kernel reads them.

use std::collections::BTreeMap;

use unweight_model::SampleParams;

use crate::{
    pages::{IndexPool, PAGE_TOKENS, pages_for},
    request::SeqId,
};

/// The prompt tokens of a chunk take at least as long as this many.
const CHUNK_TOKENS_MIN: u32 = 128;

/// A sequence that needs a draft.
#[derive(Clone, Copy, Debug)]
pub struct DraftRequest<'a> {
    /// The id of the sequence.
    pub id: SeqId,
    /// Its tokens so far; at least one.
    pub tokens: &'a [u32],
    /// The number of tokens to draft; at least one.
    pub count: u32,
    /// How the sequence is sampled. A draft model that samples with the same parameters and noise is right most often.
    pub params: SampleParams,
}

impl DraftRequest<'_> {
    /// The position of the newest token.
    fn last(&self) -> u32 {
        // The length of a sequence fits in 32 bits.
        (self.tokens.len() as u32).saturating_sub(1)
    }
}

/// The answer of a draft model to a request for a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proposal {
    /// Tokens that may follow.
    Tokens(Vec<u32>),
    /// No tokens yet: the draft model has seen this many tokens of the sequence.
    Behind(u32),
    /// The draft model has no memory for the sequence, or a shorter context.
    Unavailable,
}

/// The work of a draft model between two steps of the target.
#[derive(Debug, Default)]
pub struct Round {
    /// Tokens that chunks must compute first: the index of the request, and the range of its tokens.
    pub chunks: Vec<(usize, u32, u32)>,
    /// The sequences of the steps.
    pub rows: Vec<DraftRow>,
    /// The number of steps.
    pub steps: u32,
}

/// A sequence of the steps of a [`Round`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRow {
    /// The index of the request.
    pub request: usize,
    /// The position of the first token that the first step takes: the newest token, or the one before it, which then
    /// takes a row of its own.
    pub first: u32,
}

/// What the cache holds of a sequence.
#[derive(Debug, Default)]
struct Followed {
    pages: Vec<u32>,
    /// The number of the sequence's tokens whose keys and values are in the cache.
    seen: u32,
    /// Drafted tokens after these, whose keys and values are in the cache, too.
    drafted: Vec<u32>,
}

impl Followed {
    /// Keeps the drafted tokens that the sequence accepted. The newest token is always computed again.
    fn advance(&mut self, request: &DraftRequest<'_>) {
        let new = request.tokens.get(self.seen as usize..).unwrap_or_default();
        let accepted = self.drafted.drain(..).zip(new).take_while(|(drafted, new)| drafted == *new).count();
        self.seen = (self.seen + accepted as u32).min(request.last());
    }
}

/// The KV cache of a draft model. The model may follow some sequences of the target, and lag behind them.
#[derive(Debug)]
pub struct DraftCache {
    context: u32,
    chunk: u32,
    pages: IndexPool,
    followed: BTreeMap<SeqId, Followed>,
}

impl DraftCache {
    /// An empty cache of `pages` pages, for sequences of up to `context` tokens. Between two steps of the target, up to
    /// `chunk` tokens are computed by chunks.
    pub fn new(pages: u32, context: u32, chunk: u32) -> Self {
        Self { context, chunk, pages: IndexPool::new(pages), followed: BTreeMap::new() }
    }

    /// The pages of a sequence.
    pub fn pages(&self, id: SeqId) -> &[u32] {
        self.followed.get(&id).map_or(&[], |followed| &followed.pages)
    }

    /// Returns the pages of all sequences but those of `running`.
    pub fn keep(&mut self, running: impl Iterator<Item = SeqId>) {
        let mut gone = std::mem::take(&mut self.followed);
        self.followed = running.filter_map(|id| gone.remove_entry(&id)).collect();
        gone.into_values().for_each(|followed| self.pages.give(followed.pages));
    }

    /// Plans the next round, and takes the pages that it writes. Returns an answer for each request that the round does
    /// not draft for.
    pub fn begin(&mut self, requests: &[DraftRequest<'_>]) -> (Round, Vec<Option<Proposal>>) {
        let fitting = requests.iter().filter(|request| request.last() < self.context);
        let steps = fitting.clone().map(|request| request.count).max().unwrap_or(0);
        let left = fitting.map(|request| self.context - request.last()).min().unwrap_or(0);
        let mut round = Round { steps: steps.min(left), ..Round::default() };
        let mut budget = self.chunk;
        let answers =
            (0..).zip(requests).map(|(index, request)| self.follow(&mut round, &mut budget, (index, request)));
        let answers = answers.collect();
        (round, answers)
    }

    /// Adds what a request needs to a round.
    fn follow(
        &mut self,
        round: &mut Round,
        budget: &mut u32,
        (index, request): (usize, &DraftRequest<'_>),
    ) -> Option<Proposal> {
        let (id, last) = (request.id, request.last());
        let followed = self.followed.entry(id).or_default();
        followed.advance(request);
        let need = pages_for(last.saturating_add(round.steps)).saturating_sub(followed.pages.len() as u32);
        let pages = if last < self.context { self.pages.take(need) } else { None };
        let Some(pages) = pages else {
            self.pages.give(std::mem::take(&mut followed.pages));
            self.followed.remove(&id);
            return Some(Proposal::Unavailable);
        };
        followed.pages.extend(pages);
        if last - followed.seen > 1 {
            let start = followed.seen / PAGE_TOKENS * PAGE_TOKENS;
            let whole_pages = *budget / PAGE_TOKENS * PAGE_TOKENS;
            let end = if last - start <= *budget { last } else { start + whole_pages };
            if end > followed.seen {
                round.chunks.push((index, start, end));
                *budget = budget.saturating_sub((end - start).max(CHUNK_TOKENS_MIN));
                followed.seen = end;
            }
            if followed.seen < last {
                return Some(Proposal::Behind(followed.seen));
            }
        }
        round.rows.push(DraftRow { request: index, first: followed.seen });
        None
    }

    /// Ends a round, in which the model sampled `sampled[i]` for the `i`-th of its rows, a token per step. Returns the
    /// answers to all requests; `answers` are those of [`DraftCache::begin`]. A draft ends before a token that is not
    /// below `vocab`.
    pub fn end(
        &mut self,
        requests: &[DraftRequest<'_>],
        (round, answers): (&Round, Vec<Option<Proposal>>),
        sampled: Vec<Vec<u32>>,
        vocab: u32,
    ) -> Vec<Proposal> {
        let mut answers: Vec<_> = answers.into_iter().map(|answer| answer.unwrap_or(Proposal::Unavailable)).collect();
        for (row, mut tokens) in round.rows.iter().zip(sampled) {
            let (Some(request), Some(answer)) = (requests.get(row.request), answers.get_mut(row.request)) else {
                continue;
            };
            if let Some(followed) = self.followed.get_mut(&request.id) {
                followed.seen = request.last() + 1;
                // No step took the last one.
                followed.drafted = tokens[..tokens.len().saturating_sub(1)].to_vec();
            }
            let known = tokens.iter().take_while(|token| **token < vocab).count();
            tokens.truncate(known.min(request.count as usize));
            *answer = Proposal::Tokens(tokens);
        }
        answers
    }
}

#[cfg(test)]
mod tests;
