//! What a server asks of the engine, or of something slower in its place.

use std::error::Error;

use unweight_engine::{AdmissionError, DraftCounts, Engine, EngineError, Event, KvCache, Request, SeqId};

/// A generator of tokens: [`Engine`], or a slower implementation of the same rules.
pub trait Backend {
    /// The error that ends all sequences.
    type Error: Error;

    /// Returns the limits that the backend was made with.
    fn limits(&self) -> Limits;

    /// Returns the current load.
    fn load(&self) -> Load;

    /// Takes a request.
    ///
    /// # Errors
    /// [`AdmissionError`]; sequences that run continue.
    fn add(&mut self, request: Request) -> Result<SeqId, AdmissionError>;

    /// Ends a sequence; nothing more is told of it. `false`: there is none such, or it has ended.
    fn cancel(&mut self, sequence: SeqId) -> bool;

    /// Waits for the next tokens.
    ///
    /// # Errors
    /// All sequences are lost, and nothing runs any more.
    fn step(&mut self) -> Result<Vec<Event>, Self::Error>;

    /// Whether nothing is left to be done.
    fn is_idle(&self) -> bool;
}

/// The limits of a [`Backend`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that run at the same time.
    pub max_batch: u32,
    /// Tokens of a sequence, the prompt included.
    pub context: u32,
    /// Pages of the KV cache, hot pages of a packed cache not counted.
    pub pages: u32,
    /// How the KV cache is stored.
    pub kv_cache: KvCache,
    /// Tokens that the KV cache holds, over all sequences.
    pub cache_tokens: u64,
    /// Bytes of the KV cache per token.
    pub cache_token_bytes: u64,
    /// BF16 units of a packed KV cache; 0 otherwise.
    pub units: u32,
    /// The vocabulary size of the model.
    pub vocab: u32,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
}

/// The current load of a [`Backend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Sequences that have a row.
    pub running: usize,
    /// Sequences that wait for one.
    pub waiting: usize,
    /// Free pages of the KV cache.
    pub free_pages: u32,
    /// Free BF16 units of a packed KV cache when its rows changed last; 0 for a BF16 cache.
    pub free_units: u32,
    /// How often a sequence was preempted because the KV cache was full.
    pub preempted: u64,
    /// Prompt tokens whose keys and values an earlier sequence had computed.
    pub shared_prompt_tokens: u64,
    /// Drafted tokens.
    pub drafts: DraftCounts,
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
