//! Compiled grammars that are kept, because most requests repeat the schema of an earlier one.

use std::sync::{Arc, Mutex, PoisonError};

use super::{grammar::Answer, prompt::Grammar};

/// The maximum number of kept grammars, and their maximum memory together and each, bytes.
const KEPT_MAX: usize = 64;
const KEPT_BYTES_MAX: u64 = 128 << 20;
const ONE_BYTES_MAX: u64 = KEPT_BYTES_MAX / 4;

/// The grammars that were used last, the latest at the end.
#[derive(Default)]
pub(super) struct Kept(Mutex<Vec<One>>);

struct One {
    grammar: Grammar,
    answer: Arc<Answer>,
    bytes: u64,
}

impl Kept {
    /// Whether a grammar is kept.
    pub fn has(&self, grammar: &Grammar) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|one| one.grammar == *grammar)
    }

    /// Returns the state before the first token of an answer, if the grammar is kept. States share nothing, so that
    /// their masks are computed at the same time.
    pub fn get(&self, grammar: &Grammar) -> Option<Answer> {
        let answer = {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let at = kept.iter().position(|one| one.grammar == *grammar)?;
            let one = kept.remove(at);
            let answer = Arc::clone(&one.answer);
            kept.push(one);
            answer
        };
        Some(answer.separate())
    }

    /// Keeps a compiled grammar that takes `bytes` bytes, instead of those that were not used for the longest time.
    pub fn insert(&self, grammar: &Grammar, answer: &Answer, bytes: u64) {
        let bytes = bytes.saturating_add(grammar.text().len() as u64);
        if bytes > ONE_BYTES_MAX {
            return;
        }
        let answer = Arc::new(answer.separate());
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|one| one.grammar != *grammar);
        kept.push(One { grammar: grammar.clone(), answer, bytes });
        while kept.len() > KEPT_MAX || kept.iter().map(|one| one.bytes).sum::<u64>() > KEPT_BYTES_MAX {
            kept.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::grammar::compiled;

    #[test]
    fn kept_grammars_have_limits() {
        let kept = Kept::default();
        let grammar = |at: usize| Grammar::Regex(format!("a{{{at}}}"));
        let answer = compiled(&grammar(1));
        for at in 0..KEPT_MAX {
            kept.insert(&grammar(at), &answer, 0);
        }
        assert!(kept.get(&grammar(0)).is_some(), "all have room");
        kept.insert(&grammar(KEPT_MAX), &answer, 0);
        assert!(kept.has(&grammar(0)) && !kept.has(&grammar(1)), "the one that was used last is kept");
        // The kind decides the result, too.
        assert!(!kept.has(&Grammar::Lark("a{0}".into())));
        kept.insert(&grammar(1), &answer, ONE_BYTES_MAX);
        assert!(!kept.has(&grammar(1)), "its text counts, too");
        for at in 0..5 {
            kept.insert(&grammar(at), &answer, ONE_BYTES_MAX - 100);
        }
        assert!(!kept.has(&grammar(0)) && kept.has(&grammar(1)) && kept.has(&grammar(4)));
    }
}
