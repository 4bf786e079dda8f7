//! Drafts: guesses of a sequence's next tokens, which a step verifies.

mod cache;
mod model;
mod ngram;
#[cfg(test)]
pub mod simulated;

pub use self::{
    cache::{DraftCache, DraftRequest, Proposal, Round},
    model::{Acceptance, ModelDrafter},
    ngram::NgramDrafter,
};

/// Where a token of a sequence comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    Prompt,
    Answer,
}

/// The source of a sequence's drafts.
#[derive(Debug)]
pub enum Drafter {
    /// What followed the newest tokens earlier.
    Ngram(NgramDrafter),
    /// A draft model.
    Model(ModelDrafter),
}

impl Drafter {
    /// Learns from the tokens that were added to the sequence since the last call.
    pub fn observe(&mut self, tokens: &[u32], kind: TokenKind) {
        match self {
            Self::Ngram(drafter) => drafter.observe(tokens, kind),
            // It learns from verified guesses only.
            Self::Model(_) => {}
        }
    }

    /// The chance that a guess is right if all guesses before it are; `None` without a draft.
    pub fn chance(&self) -> Option<f32> {
        match self {
            Self::Ngram(drafter) => drafter.chance(),
            Self::Model(drafter) => Some(drafter.chance()),
        }
    }
}
