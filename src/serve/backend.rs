//! The interface between the server and an engine, and its implementation for [`Engine`].

use std::error::Error;

use unweight_engine::{
    AdmissionError, DraftCounts, Engine, EngineError, Event, ExpertTraffic, KvCache, Request, SeqId,
};

/// A generator of tokens: [`Engine`], or a slower implementation of the same rules.
pub trait Backend {
    /// The error of a failed step, which ends all sequences.
    type Error: Error;

    /// Returns the fixed limits of the backend.
    fn limits(&self) -> Limits;

    /// Returns the current load.
    fn load(&self) -> Load;

    /// Adds a request.
    ///
    /// # Errors
    /// [`AdmissionError`]; running sequences continue.
    fn add(&mut self, request: Request) -> Result<SeqId, AdmissionError>;

    /// Ends a sequence; it produces no further events. Returns false if it does not exist or has ended.
    fn cancel(&mut self, sequence: SeqId) -> bool;

    /// Runs a step and returns its tokens.
    ///
    /// # Errors
    /// The backend failed: all sequences are lost.
    fn step(&mut self) -> Result<Vec<Event>, Self::Error>;

    /// Whether no sequence runs or waits.
    fn is_idle(&self) -> bool;
}

/// The limits of a [`Backend`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum concurrent sequences.
    pub max_batch: u32,
    /// Maximum tokens of a sequence, prompt included.
    pub context: u32,
    /// Pages of the KV cache, without the hot pages of a packed cache.
    pub pages: u32,
    /// The encoding of the KV cache.
    pub kv_cache: KvCache,
    /// Tokens that the KV cache holds, over all sequences.
    pub cache_tokens: u64,
    /// Bytes of the KV cache per token.
    pub cache_token_bytes: u64,
    /// BF16 units of a packed KV cache; 0 otherwise.
    pub units: u32,
    /// The vocabulary size of the model.
    pub vocab: u32,
    /// End-of-sequence tokens.
    pub eos: Vec<u32>,
}

/// The current load of a [`Backend`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Sequences that have a row.
    pub running: usize,
    /// Sequences that wait for one.
    pub waiting: usize,
    /// Free pages of the KV cache.
    pub free_pages: u32,
    /// Free BF16 units of a packed KV cache at the last change of its rows; 0 for a BF16 cache.
    pub free_units: u32,
    /// How often a sequence was preempted because the KV cache was full.
    pub preempted: u64,
    /// Prompt tokens whose keys and values came from an earlier sequence.
    pub shared_prompt_tokens: u64,
    /// Counts of drafted and accepted tokens.
    pub drafts: DraftCounts,
    /// Experts fetched from host memory; `None` if the device holds all.
    pub experts: Option<ExpertTraffic>,
}

impl Backend for Engine {
    type Error = EngineError;

    fn limits(&self) -> Limits {
        let memory = self.memory();
        Limits {
            max_batch: self.options().max_batch,
            context: memory.context,
            pages: memory.pages,
            kv_cache: memory.kv_cache,
            cache_tokens: memory.tokens(),
            cache_token_bytes: memory.token,
            units: memory.units,
            vocab: self.config().vocab,
            eos: self.config().eos.clone(),
        }
    }

    fn load(&self) -> Load {
        Load {
            running: self.running(),
            waiting: self.waiting(),
            free_pages: self.free_pages(),
            free_units: self.last_free_units().unwrap_or(0),
            preempted: self.preempted(),
            shared_prompt_tokens: self.shared_prompt_tokens(),
            drafts: self.draft_counts(),
            experts: self.last_expert_traffic(),
        }
    }

    fn add(&mut self, request: Request) -> Result<SeqId, AdmissionError> {
        self.add(request)
    }

    fn cancel(&mut self, sequence: SeqId) -> bool {
        self.cancel(sequence)
    }

    fn step(&mut self) -> Result<Vec<Event>, EngineError> {
        self.step()
    }

    fn is_idle(&self) -> bool {
        self.is_idle()
    }
}
