//! Constraints on answers, such as a grammar, which decide the tokens that may follow.

use std::{fmt, ptr};

/// A constraint that an answer must match. The engine queries the tokens that may follow while the device computes the
/// step that samples one of them.
pub trait Constraint: fmt::Debug + Send + Sync {
    /// Returns the state before the first token of an answer.
    fn start(&self) -> Box<dyn ConstraintState>;
}

impl PartialEq for dyn Constraint {
    /// Whether both are the same object.
    fn eq(&self, other: &Self) -> bool {
        ptr::addr_eq(self, other)
    }
}

/// The state of one answer under a [`Constraint`].
pub trait ConstraintState: fmt::Debug + Send + Sync {
    /// Allows tokens: sets bit `t % 32` of word `t / 32` for each token `t` that may follow. All bits are 0 on entry.
    /// If no bit is set, the sequence ends with [`Finish::Constraint`](crate::Finish::Constraint).
    fn allow(&mut self, mask: &mut [u32]);

    /// Advances by the next token of the answer. Returns whether the answer is complete, so that no token may follow.
    fn take(&mut self, token: u32) -> bool;
}

/// Returns the mask of the tokens that a state allows, one bit per token of the vocabulary. Allows none if the sequence
/// has ended (`runs` is false).
pub(crate) fn mask(state: &mut dyn ConstraintState, vocab: u32, runs: bool) -> Vec<u32> {
    let mut mask = vec![0; vocab.div_ceil(32) as usize];
    if runs {
        state.allow(&mut mask);
    }
    mask
}
