//! Drafts by n-gram lookup.
//!
//! The drafter searches the earlier tokens of a sequence, prompt and answer, for its newest tokens. What followed their
//! last occurrence is the draft; the longest n-gram decides. The drafter also learns from every token of the answer how
//! often such a guess is right, whether the guess was verified or not.

use std::{collections::HashMap, ops::RangeInclusive};

use unweight_model::sampling::NO_TOKEN;

use super::TokenKind;

/// Lengths of the n-grams that are looked up.
const LENGTHS: RangeInclusive<usize> = LENGTH_MIN..=LENGTH_MAX;
const LENGTH_MIN: usize = 2;
const LENGTH_MAX: usize = 4;

/// The initial estimate of the share of right guesses: enough to try a few.
const INITIAL_CHANCE: f32 = 0.25;
/// The number of guesses over which the share is averaged.
const AVERAGED_GUESSES: f32 = 8.0;

/// An earlier occurrence of the newest tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Match {
    /// The number of tokens of the n-gram.
    length: usize,
    /// The index of the token after the earlier occurrence.
    next: usize,
}

/// The drafter of one sequence. It holds three entries of 20 bytes per token.
#[derive(Debug)]
pub struct NgramDrafter {
    /// The end of the last occurrence of each n-gram; shorter n-grams are padded with [`NO_TOKEN`].
    ends: HashMap<[u32; LENGTH_MAX], u32>,
    /// The number of tokens observed so far.
    observed: usize,
    latest_match: Option<Match>,
    /// The share of right guesses, by length of the n-gram.
    chances: [f32; LENGTH_MAX - LENGTH_MIN + 1],
}

impl NgramDrafter {
    /// A drafter of a sequence without tokens.
    pub fn new() -> Self {
        let chances = [INITIAL_CHANCE; LENGTH_MAX - LENGTH_MIN + 1];
        Self { ends: HashMap::new(), observed: 0, latest_match: None, chances }
    }

    /// Learns from the tokens that were added to the sequence since the last call. Tokens of an answer update the
    /// shares of right guesses; tokens of a prompt do not.
    pub fn observe(&mut self, tokens: &[u32], kind: TokenKind) {
        for end in self.observed + 1..=tokens.len() {
            if let Some(Match { length, next }) = self.latest_match.take().filter(|_| kind == TokenKind::Answer) {
                let chance = &mut self.chances[length - LENGTH_MIN];
                *chance += (f32::from(u8::from(tokens[next] == tokens[end - 1])) - *chance) / AVERAGED_GUESSES;
            }
            for length in LENGTHS.take_while(|length| *length <= end) {
                let mut ngram = [NO_TOKEN; LENGTH_MAX];
                ngram[..length].copy_from_slice(&tokens[end - length..end]);
                // The length of a sequence fits in 32 bits.
                if let Some(before) = self.ends.insert(ngram, end as u32) {
                    self.latest_match = Some(Match { length, next: before as usize });
                }
            }
        }
        self.observed = tokens.len();
    }

    /// The chance that the first token of the draft is right; `None` without a draft.
    pub fn chance(&self) -> Option<f32> {
        self.latest_match.map(|latest_match| self.chances[latest_match.length - LENGTH_MIN])
    }

    /// Returns `count` tokens that may follow `tokens`, which must all have been observed; empty without a draft. If
    /// fewer than `count` tokens followed the earlier occurrence, they are repeated.
    pub fn draft(&self, tokens: &[u32], count: usize) -> Vec<u32> {
        let Some(Match { next, .. }) = self.latest_match else { return Vec::new() };
        let period = &tokens[next..];
        period.iter().cycle().take(count).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use unweight_format::testing::Random;

    use super::*;

    /// The definition: the longest n-gram at the end that occurred before, and what followed its last occurrence.
    fn oracle(tokens: &[u32]) -> Option<Match> {
        LENGTHS.rev().find_map(|length| {
            let ngram = tokens.get(tokens.len().checked_sub(length)?..)?;
            let ends = (length..tokens.len()).rev();
            let before = ends.into_iter().find(|end| tokens[end - length..*end] == *ngram);
            before.map(|next| Match { length, next })
        })
    }

    #[test]
    fn drafts_are_what_followed_the_longest_ngram() {
        let (mut found, mut longest) = (0, 0);
        for seed in 0..60 {
            let mut random = Random::new(seed);
            let (kinds, mut tokens) = (2 + random.below(12), Vec::new());
            let mut drafter = NgramDrafter::new();
            for _ in 0..150 {
                // Several tokens at once, like those of a prompt or an accepted draft.
                (0..1 + random.below(3)).for_each(|_| tokens.push(random.below(kinds) as u32));
                drafter.observe(&tokens, if random.below(2) == 0 { TokenKind::Answer } else { TokenKind::Prompt });
                let expected = oracle(&tokens);
                assert_eq!(drafter.latest_match, expected, "{tokens:?}");
                let draft = drafter.draft(&tokens, 5);
                let Some(Match { length, next }) = expected else {
                    assert!(draft.is_empty() && drafter.chance().is_none());
                    continue;
                };
                (found, longest) = (found + 1, longest + usize::from(length == LENGTH_MAX));
                let all = [&tokens[..], &draft].concat();
                assert!((0..5).all(|at| draft[at] == all[next + at]), "{tokens:?} {draft:?}");
            }
        }
        assert!(found > 5000 && longest > 1000, "{found} {longest}: too few cases");
    }

    #[test]
    fn chances_follow_the_answer_alone() {
        let mut drafter = NgramDrafter::new();
        let mut tokens = vec![1, 2, 3, 1, 2, 3, 1, 2];
        drafter.observe(&tokens, TokenKind::Prompt);
        assert_eq!((drafter.chance(), drafter.draft(&tokens, 4)), (Some(INITIAL_CHANCE), vec![3, 1, 2, 3]));
        for _ in 0..40 {
            let next = drafter.draft(&tokens, 1);
            tokens.extend(next);
            drafter.observe(&tokens, TokenKind::Answer);
        }
        assert!(drafter.chance().is_some_and(|chance| chance > 0.98), "{drafter:?}");
        // Pairs that are followed by something else each time.
        let (mut other, mut tokens) = (NgramDrafter::new(), Vec::new());
        for at in 0..40 {
            tokens.extend([1, 2, 10 + at]);
            other.observe(&tokens[..tokens.len() - 1], TokenKind::Answer);
            other.observe(&tokens, TokenKind::Answer);
        }
        tokens.extend([1, 2]);
        other.observe(&tokens, TokenKind::Answer);
        assert!(other.chance().is_some_and(|chance| chance < 0.01), "{other:?}");
    }
}
