//! A draft model without weights: tests choose its tokens, and it checks the keys that it attends to.

use super::{DraftCache, DraftRequest, Proposal, Round};
use crate::{pages::PAGE_TOKENS, request::SeqId};

/// A draft model with the KV cache of a device.
#[derive(Debug)]
pub struct SimulatedModel {
    pub cache: DraftCache,
    chunk: u32,
    /// Keys by page and token.
    memory: Vec<u64>,
    /// The number of chunks and steps that ran.
    pub chunks: u64,
    pub steps: u64,
}

/// The keys of a token depend on all tokens before it.
pub fn keys(tokens: &[u32]) -> Vec<u64> {
    let mut state = 1u64;
    let mut next = |token: &u32| {
        state = (state ^ (u64::from(*token) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
        state
    };
    tokens.iter().map(&mut next).collect()
}

impl SimulatedModel {
    /// A model whose cache has `pages` pages.
    pub fn new(pages: u32, context: u32, chunk: u32) -> Self {
        let memory = vec![0; (pages * PAGE_TOKENS) as usize];
        Self { cache: DraftCache::new(pages, context, chunk), chunk, memory, chunks: 0, steps: 0 }
    }

    fn index(&self, id: SeqId, position: usize) -> usize {
        let page = self.cache.pages(id)[position / PAGE_TOKENS as usize];
        page as usize * PAGE_TOKENS as usize + position % PAGE_TOKENS as usize
    }

    /// Computes `start..` of a text, which attends to all tokens before.
    fn compute(&mut self, id: SeqId, text: &[u32], start: usize) {
        for (position, key) in keys(text).into_iter().enumerate() {
            let index = self.index(id, position);
            if position < start {
                assert_eq!(self.memory[index], key, "{id:?}: token {position} of {}", text.len());
            } else {
                self.memory[index] = key;
            }
        }
    }

    /// Answers requests like a draft model on a device; `guess` returns the token after a text.
    pub fn draft(
        &mut self,
        running: &[SeqId],
        requests: &[DraftRequest<'_>],
        vocab: u32,
        mut guess: impl FnMut(SeqId, &[u32]) -> u32,
    ) -> Vec<Proposal> {
        self.cache.keep(running.iter().copied());
        let (round, answers) = self.cache.begin(requests);
        let mut computed = 0;
        for &(request, start, end) in &round.chunks {
            assert!(start % PAGE_TOKENS == 0 && start < end, "{round:?}");
            let DraftRequest { id, tokens, .. } = requests[request];
            self.compute(id, &tokens[..end as usize], start as usize);
            (computed, self.chunks) = (computed + end - start, self.chunks + 1);
        }
        assert!(computed <= self.chunk, "{round:?}");
        let Round { rows, steps, .. } = &round;
        let mut sampled = Vec::new();
        for row in rows {
            let DraftRequest { id, tokens, .. } = requests[row.request];
            assert!((1..=2).contains(&(tokens.len() - row.first as usize)), "{row:?} of {} tokens", tokens.len());
            let (mut text, mut start) = (tokens.to_vec(), row.first as usize);
            for _ in 0..*steps {
                self.compute(id, &text, start);
                start = text.len();
                text.push(guess(id, &text));
            }
            sampled.push(text.split_off(tokens.len()));
        }
        self.steps += u64::from(if rows.is_empty() { 0 } else { *steps });
        self.cache.end(requests, (&round, answers), sampled, vocab)
    }
}
