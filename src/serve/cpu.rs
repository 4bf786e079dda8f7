//! A backend without a GPU, for tests of tiny models: the f32 reference, which recomputes the whole text for each
//! token.
//!
//! It has the engine's scheduler, pages and sampling; only the forward pass differs.

use std::collections::{HashMap, VecDeque};

use half::bf16;
use rayon::prelude::*;
use unweight_engine::{
    AdmissionError, Engine, EngineError, EngineOptions, Event, KvCache, Logprobs, OptionError, Request, SeqId,
    raw::{
        pages::{PAGE_TOKENS, pages_for},
        schedule::{Limits as ScheduleLimits, Next, Proposal, Running, Schedule, Speculation},
    },
};
use unweight_format::{
    Placement,
    bundle::{Bundle, BundleError},
};
use unweight_model::{
    BindError, ConfigError, ModelConfig, ModelWeights,
    reference::{Reference, ReferenceError, bundle_values},
    sampling::{NO_TOKEN, adjust, choose, forbid, logprobs, sample},
};

use super::backend::{Backend, Limits, Load};

/// The maximum number of parameters. Larger models would take minutes per token.
const PARAMETERS_MAX: u64 = 64 << 20;
/// The default context length, tokens.
const CONTEXT_DEFAULT: u32 = 2048;
/// The time of a step of a draft model that the scheduler assumes, whatever its size.
const DRAFT_STEP_TIME: f32 = 0.1;

/// Why a model cannot run on the CPU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// An option is out of range.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The model's configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model's tensors do not match its configuration.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A tensor could not be read.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The model is too large for the CPU.
    #[error("the model has {parameters} parameters, above the limit of {PARAMETERS_MAX} on the CPU; run it on a GPU")]
    TooLarge {
        /// The number of parameters of the model.
        parameters: u64,
    },
    /// A model cannot draft for another.
    #[error(transparent)]
    Draft(#[from] EngineError),
    /// The forward pass failed.
    #[error(transparent)]
    Forward(#[from] ReferenceError),
}

impl CpuError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Option(error) => error.code(),
            Self::Config(error) => error.code(),
            Self::Bind(error) => error.code(),
            Self::Bundle(error) => error.code(),
            Self::TooLarge { .. } => "model-too-large-for-cpu",
            Self::Draft(error) => error.code(),
            Self::Forward(error) => error.code(),
        }
    }
}

/// A tiny model on the CPU, and one that drafts for it.
#[derive(Debug)]
pub struct CpuReference {
    model: Model,
    draft: Option<Model>,
    schedule: Schedule,
    limits: Limits,
}

/// A model with all weights in f32.
#[derive(Debug)]
struct Model {
    config: ModelConfig,
    weights: ModelWeights,
    values: HashMap<String, Vec<f32>>,
}

impl Model {
    fn load(bundle: &Bundle) -> Result<Self, CpuError> {
        let config = ModelConfig::of_bundle(bundle)?;
        let weights = ModelWeights::of_bundle(&config, bundle)?;
        let parameters = config.weight_bytes(Placement::Bf16) / 2;
        if parameters > PARAMETERS_MAX {
            return Err(CpuError::TooLarge { parameters });
        }
        let read = bundle_values(bundle);
        let names = bundle.tensors().map(|tensor| tensor.entry().name.as_str());
        let values = names.map(|name| Ok((name.to_owned(), read(name)?))).collect::<Result<_, BundleError>>()?;
        Ok(Self { config, weights, values })
    }

    /// Returns the logits after the last token of a text.
    fn logits(&self, text: &[u32]) -> Result<Vec<bf16>, ReferenceError> {
        let value = |name: &str| self.values.get(name).cloned().ok_or_else(|| format!("no tensor {name}"));
        let logits = Reference::new(&self.config, &self.weights, value).last_logits(text)?;
        Ok(logits.into_iter().map(bf16::from_f32).collect())
    }

    /// Drafts `count` tokens with the parameters and the noise of their sequence.
    fn draft(&self, running: &Running, count: u32) -> Result<Proposal, ReferenceError> {
        let history = running.history();
        let mut text = [history.prompt, history.answer].concat();
        let length = text.len();
        for _ in 0..count {
            // A text is never longer than the context.
            let position = text.len().saturating_sub(1) as u32;
            match sample(&self.logits(&text)?, &running.params, position) {
                NO_TOKEN => break,
                token => text.push(token),
            }
        }
        Ok(Proposal::Tokens(text.split_off(length)))
    }
}

/// A token and, if they are requested, its log probabilities.
type Sampled = (u32, Option<Box<Logprobs>>);

impl CpuReference {
    /// Decodes all weights to f32. Uses only the options `max_batch`, `context`, `waiting`, `mixed_passes` and
    /// `speculate`.
    ///
    /// # Errors
    /// [`CpuError`].
    pub fn load(bundle: &Bundle, options: &EngineOptions) -> Result<Self, CpuError> {
        Self::load_with_draft(bundle, None, options)
    }

    /// Like [`CpuReference::load`], with a draft model.
    ///
    /// # Errors
    /// [`CpuError`].
    pub fn load_with_draft(bundle: &Bundle, draft: Option<&Bundle>, options: &EngineOptions) -> Result<Self, CpuError> {
        options.check()?;
        let model = Model::load(bundle)?;
        let draft = draft.map(Model::load).transpose()?;
        let config = &model.config;
        draft.as_ref().map_or(Ok(()), |draft| Engine::check_draft(config, &draft.config, options))?;
        let context = options.context.unwrap_or(CONTEXT_DEFAULT).min(config.max_positions);
        let max_batch = options.max_batch;
        let pages = pages_for(context).saturating_mul(max_batch);
        let (vocab, kv_cache) = (config.vocab, KvCache::Bf16);
        // A chunk holds any prompt.
        let chunk = context.next_multiple_of(PAGE_TOKENS);
        // The limit of the largest model, because rows cost little.
        let speculation = Speculation::of(options, false, u32::MAX);
        let limits = ScheduleLimits {
            max_batch,
            context,
            vocab,
            steps_ahead_max: 1,
            waiting_max: options.waiting,
            kv_cache,
            chunk,
            mixes: options.mixed_passes,
            shares_prefixes: false,
            adjusted_max: max_batch,
            speculation: match &draft {
                Some(draft) => speculation.with_model(draft.config.max_positions.min(context), DRAFT_STEP_TIME),
                None => speculation,
            },
        };
        let schedule = Schedule::new(limits, pages);
        let limits = Limits {
            max_batch,
            context,
            pages,
            kv_cache,
            cache_tokens: u64::from(pages) * u64::from(PAGE_TOKENS),
            // The size on a GPU; this backend has no cache.
            cache_token_bytes: config.kv_bytes_per_token(),
            units: 0,
            vocab,
            eos: config.eos.clone(),
        };
        Ok(Self { model, draft, schedule, limits })
    }

    /// Returns the next token of a sequence after `drafted` tokens of its draft, and the log probabilities. If the
    /// sequence has a constraint, the token is one of `mask`.
    fn next(&self, running: &Running, drafted: usize, mask: &[u32]) -> Result<Sampled, ReferenceError> {
        let history = running.history();
        let draft = running.inputs().skip(1).take(drafted).map(|(token, _)| token);
        let text: Vec<u32> = history.prompt.iter().chain(history.answer).copied().chain(draft).collect();
        let last = self.model.logits(&text)?;
        // A text is never longer than the context.
        let position = text.len().saturating_sub(1) as u32;
        let mut adjusted = adjust(&last, &running.adjustments, history);
        if running.is_constrained() {
            forbid(&mut adjusted, mask);
        }
        let token = choose(&adjusted, &running.params, position);
        Ok((token, running.logprobs.map(|top| Box::new(logprobs(&last, token, top)))))
    }

    fn advance(&mut self) -> Result<Vec<Event>, ReferenceError> {
        let mut events = Vec::new();
        match self.schedule.next_action() {
            Next::Prefill => {
                let first = self.run_chunk()?;
                events.extend(self.finish_prefill(first));
            }
            Next::Mixed { .. } => {
                let first = self.run_chunk()?;
                self.run_step(&mut events)?;
                events.extend(self.finish_prefill(first));
            }
            Next::Draft => {
                let Self { schedule, draft, .. } = self;
                let draft = draft.as_ref();
                let requests = schedule.draft_requests();
                let answer = |(row, count): &(&Running, u32)| match draft {
                    Some(draft) => draft.draft(row, *count),
                    None => Ok(Proposal::Unavailable),
                };
                let proposals = requests.par_iter().map(answer).collect::<Result<Vec<_>, _>>()?;
                schedule.set_drafts(proposals);
            }
            Next::Launch { .. } => self.run_step(&mut events)?,
            Next::Idle | Next::Read => {}
        }
        Ok(events)
    }

    /// Records the next chunk of a prompt. Returns the first token of its sequence if it is the last one.
    fn run_chunk(&mut self) -> Result<Option<Sampled>, ReferenceError> {
        self.schedule.begin_prefill();
        let is_last = self.schedule.next_chunk().is_some_and(|chunk| chunk.is_last);
        let mask = if is_last { self.schedule.prefill_mask() } else { Vec::new() };
        let Some(chunk) = self.schedule.next_chunk() else { return Ok(None) };
        let first = if is_last { Some(self.next(chunk.running, 0, &mask)?) } else { None };
        self.schedule.note_chunk_launched();
        Ok(first)
    }

    /// Gives the sequence whose first token was sampled a row.
    fn finish_prefill(&mut self, first: Option<Sampled>) -> Option<Event> {
        let (token, logprobs) = first?;
        self.schedule.finish_prefill(token).map(|event| Event { logprobs, ..event })
    }

    /// Runs a step of all rows.
    fn run_step(&mut self, events: &mut Vec<Event>) -> Result<(), ReferenceError> {
        let masks = self.schedule.masks();
        let mut masks = masks.chunks(self.model.config.vocab.div_ceil(32) as usize);
        let mut mask = |row: &Running| if row.is_constrained() { masks.next() } else { None };
        let rows = self.schedule.rows().iter().flat_map(|row| {
            let mask = mask(row).unwrap_or_default();
            (0..row.step_rows() as usize).map(move |at| (row, at, mask))
        });
        let rows: Vec<_> = rows.collect();
        let next = |(row, at, mask): &(&Running, usize, &[u32])| self.next(row, *at, mask);
        let sampled = rows.par_iter().map(next).collect::<Result<Vec<_>, _>>()?;
        let ids: Vec<SeqId> = rows.iter().map(|(row, ..)| row.id).collect();
        let tokens: Vec<u32> = sampled.iter().map(|(token, _)| *token).collect();
        self.schedule.note_step_launched();
        self.schedule.record_step(&tokens, &[], events);
        let mut logprobs: HashMap<SeqId, VecDeque<Option<Box<Logprobs>>>> = HashMap::new();
        for (id, (_, logprobs_of_row)) in ids.into_iter().zip(sampled) {
            logprobs.entry(id).or_default().push_back(logprobs_of_row);
        }
        for event in events {
            event.logprobs = logprobs.get_mut(&event.seq).and_then(VecDeque::pop_front).flatten();
        }
        Ok(())
    }
}

impl Backend for CpuReference {
    type Error = CpuError;

    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn load(&self) -> Load {
        let Self { schedule, .. } = self;
        Load {
            running: schedule.rows().len(),
            waiting: schedule.waiting(),
            free_pages: schedule.free_pages(),
            free_units: 0,
            preempted: schedule.preempted(),
            shared_prompt_tokens: schedule.shared_prompt_tokens(),
            drafts: schedule.draft_counts(),
            experts: None,
        }
    }

    fn add(&mut self, request: Request) -> Result<SeqId, AdmissionError> {
        self.schedule.add(request)
    }

    fn cancel(&mut self, sequence: SeqId) -> bool {
        self.schedule.cancel(sequence)
    }

    fn step(&mut self) -> Result<Vec<Event>, CpuError> {
        let advanced = self.advance();
        if advanced.is_err() {
            self.schedule.clear();
        }
        Ok(advanced?)
    }

    fn is_idle(&self) -> bool {
        self.schedule.rows().is_empty() && self.schedule.waiting() == 0
    }
}
