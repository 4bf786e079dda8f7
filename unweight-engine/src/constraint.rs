//! What an answer must match, such as a grammar: which tokens may follow each other.

use std::{fmt, ptr};

/// What an answer must match. The engine asks it for the tokens that may follow, while the device computes the step
/// that samples one of them.
pub trait Constraint: fmt::Debug + Send + Sync {
    /// The state before the first token of an answer.
    fn start(&self) -> Box<dyn ConstraintState>;
}

impl PartialEq for dyn Constraint {
    /// Whether they are the same object.
    fn eq(&self, other: &Self) -> bool {
        ptr::addr_eq(self, other)
    }
}

/// The state of one answer under a [`Constraint`].
pub trait ConstraintState: fmt::Debug + Send + Sync {
    /// Allows tokens: sets bit `t % 32` of word `t / 32` for each token `t` that may follow. All bits are 0 before. If
    /// none is set, the sequence ends with [`Finish::Constraint`](crate::Finish::Constraint).
    fn allow(&mut self, mask: &mut [u32]);

    /// Takes the next token of the answer. Returns whether the answer is complete, so that no token may follow.
    fn take(&mut self, token: u32) -> bool;
}

/// The mask of a state over the tokens of a vocabulary; one that allows none if the sequence has ended.
pub(crate) fn mask(state: &mut dyn ConstraintState, vocab: u32, runs: bool) -> Vec<u32> {
    let mut mask = vec![0; vocab.div_ceil(32) as usize];
    if runs {
        state.allow(&mut mask);
    }
    mask
}
