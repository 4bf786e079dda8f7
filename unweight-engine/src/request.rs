//! A request, the reasons to reject it, and the events of its sequence.

use std::sync::Arc;

use unweight_model::sampling::{Adjustments, Logprobs, SampleParams, TOP_LOGPROBS_MAX};

use crate::constraint::Constraint;

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
    /// Adjustments of logits before a token is sampled.
    pub adjustments: Adjustments,
    /// The number of most likely tokens whose log probabilities are reported with that of each sampled token, up to
    /// [`TOP_LOGPROBS_MAX`](unweight_model::sampling::TOP_LOGPROBS_MAX); `None` reports none.
    pub logprobs: Option<u32>,
    /// The constraint that the answer must match, such as a grammar; `None` allows all tokens.
    pub constraint: Option<Arc<dyn Constraint>>,
}

impl Request {
    /// A request with greedy sampling, up to 256 new tokens and no stop tokens.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            params: SampleParams::default(),
            max_new_tokens: 256,
            stop: Vec::new(),
            adjustments: Adjustments::default(),
            logprobs: None,
            constraint: None,
        }
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

    /// Sets the adjustments of logits.
    #[must_use]
    pub fn adjustments(self, adjustments: Adjustments) -> Self {
        Self { adjustments, ..self }
    }

    /// Sets the number of most likely tokens that are reported with the log probability of each token.
    #[must_use]
    pub fn logprobs(self, logprobs: Option<u32>) -> Self {
        Self { logprobs, ..self }
    }

    /// Sets the constraint that the answer must match.
    #[must_use]
    pub fn constraint(self, constraint: Option<Arc<dyn Constraint>>) -> Self {
        Self { constraint, ..self }
    }

    /// Checks sampling parameters and adjustments for a model with this vocabulary size.
    pub(crate) fn check_sampling(&self, vocab: u32) -> Result<(), AdmissionError> {
        let params = |error: String| AdmissionError::Params(error);
        self.params.check().map_err(|error| params(error.to_string()))?;
        self.adjustments.check().map_err(|error| params(error.to_string()))?;
        self.adjustments.check_bias(vocab).map_err(|error| params(error.to_string()))?;
        match self.logprobs {
            Some(top) if top > TOP_LOGPROBS_MAX => {
                Err(params(format!("logprobs = {top} is not a whole number from 0 to {TOP_LOGPROBS_MAX}")))
            }
            _ => Ok(()),
        }
    }
}

/// The reason why a request is rejected. Running sequences are not affected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    /// The prompt is empty.
    #[error("the prompt has no tokens; pass at least one, such as the model's BOS token")]
    Empty,
    /// The prompt has a token id that the model does not have.
    #[error(
        "token {id} at index {at} of the prompt is not below the vocabulary size {vocab}; use the model's tokenizer"
    )]
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
        "{prompt} prompt tokens and {max_new_tokens} new tokens exceed the context of {context} tokens; lower \
         the number of new tokens, shorten the prompt, or restart with a longer context"
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
    #[error("the request needs {pages} pages of {tokens} tokens, but the KV cache has {total}; give it more memory")]
    NoRoom {
        /// The number of pages that the request needs.
        pages: u32,
        /// The number of tokens per page.
        tokens: u32,
        /// The number of pages of the KV cache.
        total: u32,
    },
    /// The KV cache has too few free pages at present.
    #[error("{pages} pages of {tokens} tokens are needed, but {free} are free; try again when a sequence has ended")]
    NoPages {
        /// The number of pages that the call needs.
        pages: u32,
        /// The number of tokens per page.
        tokens: u32,
        /// The number of free pages.
        free: u32,
    },
    /// A page of the text cannot be packed, and all BF16 units of the packed KV cache are taken.
    #[error("a page of the text cannot be packed, and all {units} BF16 units are in use; load with a BF16 KV cache")]
    NoUnits {
        /// The number of BF16 units of the KV cache.
        units: u32,
    },
    /// The queue is full ([`EngineOptions::waiting`](crate::EngineOptions::waiting)), or the call needs an idle engine
    /// or fewer rows.
    #[error("{waiting} requests are already waiting, which is the limit; try again later")]
    Busy {
        /// The number of waiting sequences. A call that needs an idle engine or fewer rows reports running sequences or
        /// requested rows instead.
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
    /// [`Request::constraint`] allows no further token.
    Complete,
    /// [`Request::constraint`] allows no token, or none whose logit is a number. The token of the event is
    /// [`NO_TOKEN`](crate::NO_TOKEN).
    Constraint,
    /// All logits of the row were NaN. The token of the event is [`NO_TOKEN`](crate::NO_TOKEN), which is not a token of
    /// the model. Other sequences are not affected.
    NotANumber,
    /// A page of the sequence cannot be packed, and the pool of BF16 units is too small for the sequence alone. The
    /// token of the event is right, or [`NO_TOKEN`](crate::NO_TOKEN) if the prompt itself does not fit.
    UnitsFull,
}

impl Finish {
    /// The name in reports: `stop`, `length`, `complete`, `constraint`, `nan` or `kv-cache-units-full`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Complete => "complete",
            Self::Constraint => "constraint",
            Self::NotANumber => "nan",
            Self::UnitsFull => "kv-cache-units-full",
        }
    }
}

/// A new token of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The sequence that the token belongs to.
    pub seq: SeqId,
    /// The token id.
    pub token: u32,
    /// The reason why the sequence ended with this token; `None` if it continues.
    pub finish: Option<Finish>,
    /// Log probabilities, if [`Request::logprobs`] requests them.
    pub logprobs: Option<Box<Logprobs>>,
}
