//! Grammars that were compiled or rejected, because most requests repeat the grammar of an earlier one.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{error::TextError, grammar::Answer, prompt::Grammar};

/// The maximum number of kept grammars, and their maximum memory together and each, bytes.
const KEPT_MAX: usize = 64;
const KEPT_BYTES_MAX: u64 = 128 << 20;
const ONE_BYTES_MAX: u64 = KEPT_BYTES_MAX / 4;
/// How long a rejection is kept. It may depend on the load of the machine.
const REJECTED_TIME: Duration = Duration::from_secs(10);

/// The grammars that were used last, the latest at the end.
#[derive(Default)]
pub(super) struct Kept(Mutex<Vec<One>>);

struct One {
    grammar: Grammar,
    result: Result<Arc<Answer>, Rejected>,
    bytes: u64,
}

/// Why a grammar cannot be used, and since when this is known.
struct Rejected {
    why: String,
    since: Instant,
}

impl Kept {
    /// Returns the state before the first token of an answer, or the error of the grammar, if it is kept.
    pub fn get(&self, grammar: &Grammar) -> Option<Result<Arc<Answer>, TextError>> {
        let mut kept = self.valid();
        let at = kept.iter().position(|one| one.grammar == *grammar)?;
        kept[at..].rotate_left(1);
        let rejected = |rejected: &Rejected| TextError::Grammar(rejected.why.clone());
        kept.last().map(|one| one.result.as_ref().map(Arc::clone).map_err(rejected))
    }

    /// Keeps a compiled grammar that takes `bytes` bytes, instead of those that were not used for the longest time.
    pub fn insert(&self, grammar: &Grammar, answer: &Arc<Answer>, bytes: u64) {
        self.push(One { grammar: grammar.clone(), result: Ok(Arc::clone(answer)), bytes });
    }

    /// Keeps the reason why a grammar cannot be used.
    pub fn reject(&self, grammar: &Grammar, why: &str) {
        let rejected = Rejected { why: why.to_owned(), since: Instant::now() };
        self.push(One { grammar: grammar.clone(), result: Err(rejected), bytes: 0 });
    }

    fn push(&self, mut one: One) {
        one.bytes = one.bytes.saturating_add(one.grammar.text().len() as u64);
        if one.bytes > ONE_BYTES_MAX {
            return;
        }
        let mut kept = self.valid();
        kept.retain(|other| other.grammar != one.grammar);
        let is_rejected = one.result.is_err();
        kept.push(one);
        // Rejections replace no compiled grammars.
        let over = |kept: &[One]| {
            let same = kept.iter().filter(|one| one.result.is_err() == is_rejected);
            let (count, bytes) = same.fold((0, 0), |(count, bytes), one| (count + 1, bytes + one.bytes));
            count > KEPT_MAX || bytes > KEPT_BYTES_MAX
        };
        while over(&kept) {
            let oldest = kept.iter().position(|one| one.result.is_err() == is_rejected);
            oldest.map(|oldest| kept.remove(oldest));
        }
    }

    /// Returns the grammars without rejections that are too old.
    fn valid(&self) -> MutexGuard<'_, Vec<One>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|one| one.result.as_ref().map_or_else(|why| why.since.elapsed() < REJECTED_TIME, |_| true));
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::grammar::compiled;

    #[test]
    fn kept_grammars_have_limits() {
        let kept = Kept::default();
        let has = |grammar: &Grammar| kept.0.lock().unwrap().iter().any(|one| one.grammar == *grammar);
        let grammar = |at: usize| Grammar::Regex(format!("a{{{at}}}"));
        let answer = Arc::new(compiled(&grammar(1)));
        for at in 0..KEPT_MAX {
            kept.insert(&grammar(at), &answer, 0);
        }
        assert!(kept.get(&grammar(0)).is_some_and(|one| one.is_ok()), "all have room");
        kept.insert(&grammar(KEPT_MAX), &answer, 0);
        assert!(has(&grammar(0)) && !has(&grammar(1)), "the one that was used last is kept");
        // The kind decides the result, too.
        assert!(!has(&Grammar::Lark("a{0}".into())));
        kept.insert(&grammar(1), &answer, ONE_BYTES_MAX);
        assert!(!has(&grammar(1)), "its text counts, too");
        for at in 0..5 {
            kept.insert(&grammar(at), &answer, ONE_BYTES_MAX - 100);
        }
        assert!(!has(&grammar(0)) && has(&grammar(1)) && has(&grammar(4)));
    }

    #[test]
    fn rejections_are_kept_for_a_limited_time() {
        let kept = Kept::default();
        let grammar = |at: usize| Grammar::Regex(format!("a{{{at}}}"));
        kept.insert(&grammar(0), &Arc::new(compiled(&grammar(1))), 0);
        for at in 1..2 * KEPT_MAX {
            kept.reject(&grammar(at), "slow");
        }
        let why = kept.get(&grammar(KEPT_MAX)).unwrap().unwrap_err().to_string();
        assert!(why.contains("slow"), "{why}");
        assert!(
            kept.get(&grammar(KEPT_MAX - 1)).is_none() && kept.get(&grammar(0)).is_some(),
            "rejections replace each other"
        );
        for one in kept.0.lock().unwrap().iter_mut() {
            let _ = one.result.as_mut().map_err(|why| why.since -= REJECTED_TIME);
        }
        assert!(kept.get(&grammar(KEPT_MAX)).is_none() && kept.get(&grammar(0)).is_some());
    }
}
