//! The engine: a model on a device and the sequences that it generates.

mod draft_model;
mod load;
mod logits;
pub mod measure;
#[cfg(feature = "pipelines")]
pub mod objective;
pub(crate) mod routing;
mod stepper;

use std::{collections::VecDeque, fmt, mem};

use unweight_format::raw::{compact::Uncompact, packed::Unpackable};
use unweight_model::ModelConfig;
use unweight_rt::{
    DeviceError, Graph, LaunchError, RowFault, Stream,
    experts::ExpertTraffic,
    raw::{
        device::{Pinned, Transfer},
        ops::logprobs::ROW_WORDS,
    },
};

pub use self::load::LoadProgress;
#[cfg(feature = "pipelines")]
pub use self::load::RandomStored;
use self::{
    draft_model::DraftModel,
    stepper::{StepShape, Stepper},
};
use crate::{
    error::EngineError,
    forward::{Forward, RowState},
    memory::Memory,
    options::{EngineOptions, bucket},
    request::{AdmissionError, Event, Request, SeqId},
    sampling::{RowSampling, read_logprobs, token_states},
    schedule::{Chunk, DraftCounts, Next, Running, Schedule},
    weights::Weights,
};

/// The number of steps that are launched before the first is read: one runs while the host reads the one before.
const STEPS_AHEAD_MAX: u32 = 2;

/// A model on a GPU that generates tokens for many sequences by continuous batching.
///
/// Loading allocates all device memory ([`Engine::memory`]); steps allocate none. One step generates one token for
/// every running sequence. Sequences join and leave between steps. Prompts run in chunks, between steps or in one pass
/// with one. The tokens of a sequence depend only on its own request and on the number of rows of its passes: a step is
/// recorded for a batch size, and a chunk adds its tokens. These numbers differ by rounding; the content of other rows
/// changes nothing.
///
/// ```no_run
/// use unweight_engine::{Engine, EngineOptions, Request};
/// use unweight_format::bundle::Bundle;
/// use unweight_rt::{Device, KernelSet, env::Env};
///
/// let kernels = KernelSet::open(&Device::open(0)?, Env::process()?);
/// let bundle = Bundle::open("bundle".as_ref())?;
/// let mut engine = Engine::load(&kernels, &bundle, EngineOptions::default(), &|_| {})?;
/// let sequence = engine.add(Request::new(vec![1, 450, 4996]).max_new_tokens(32))?;
/// while !engine.is_idle() {
///     for event in engine.step()? {
///         assert_eq!(event.seq, sequence);
///         println!("{}", event.token);
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine {
    config: ModelConfig,
    options: EngineOptions,
    memory: Memory,
    schedule: Schedule,
    /// The results of launched steps, the oldest first.
    in_flight: VecDeque<Sampled>,
    /// Events that arrived during a call other than [`Engine::step`].
    pending_events: Vec<Event>,
    spare: Vec<Pinned<u32>>,
    spare_logprobs: Vec<Pinned<u32>>,
    /// Recorded steps by shape. They reference memory of the fields below, so they are declared, and dropped, first.
    graphs: Vec<(StepShape, Graph)>,
    forward: Forward,
    stepper: Stepper,
    weights: Weights,
    draft_model: Option<DraftModel>,
    /// [`Engine::last_free_units`].
    last_free_units: Option<u32>,
    failed: bool,
}

/// The results of a step on their way to the host.
struct Sampled {
    /// The token of each row.
    ids: Transfer<u32>,
    /// For a packed KV cache: which rows lost a page.
    page_losses: Option<Transfer<u32>>,
    /// Log probabilities of each row, if a row requests them.
    logprobs: Option<Transfer<u32>>,
}

/// A chunk of a prompt, and how the first token is sampled if it is the last one.
#[derive(Clone, Copy)]
struct PromptEnd {
    is_last: bool,
    /// The number of tokens of the chunk.
    len: u32,
    /// The position of its last token.
    position: u32,
    row: RowSampling,
}

impl Engine {
    /// The configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The options that the engine was loaded with; [`EngineOptions::placement`] holds the chosen placement.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Hits, misses and copied bytes of experts since the model was loaded; `None` if all experts are on the device
    /// ([`EngineOptions::resident_experts`]). Waits for copies in flight.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device fails, [`EngineError::Failed`] if it failed before.
    pub fn expert_traffic(&mut self) -> Result<Option<ExpertTraffic>, EngineError> {
        self.check_alive()?;
        let traffic = self.forward.expert_traffic();
        self.fail_on_error(traffic)
    }

    /// The counts of [`Engine::expert_traffic`] up to the last step whose result was read. Does not wait.
    #[doc(hidden)]
    pub fn last_expert_traffic(&self) -> Option<ExpertTraffic> {
        self.forward.last_expert_traffic()
    }

    /// The layers whose experts run as BF16, in one product or in both, because they cannot be packed, ascending; and
    /// why those of the first cannot. `None` if there are none.
    #[doc(hidden)]
    pub fn bf16_experts(&self) -> Option<(Vec<u32>, Unpackable)> {
        self.weights.bf16_experts()
    }

    /// The layers with experts that are packed in host memory because they cannot be compact, in one product or in
    /// both, ascending; and why those of the first cannot. `None` if there are none.
    #[doc(hidden)]
    pub fn packed_in_host_memory(&self) -> Option<(Vec<u32>, Uncompact)> {
        self.weights.packed_in_host_memory()
    }

    /// Forgets which experts are on the device and overwrites them, so that an expert that is not fetched shows in the
    /// results. No step may run.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device fails, [`EngineError::Failed`] if it failed before.
    #[doc(hidden)]
    pub fn poison_experts(&mut self, byte: u8) -> Result<(), EngineError> {
        self.check_alive()?;
        let stream = self.forward.stream().clone();
        let poisoned = self.weights.offloaded_mut().try_for_each(|experts| experts.poison(&stream, byte));
        self.fail_on_error(poisoned)
    }

    /// Checks that a model with configuration `draft` can draft for `target` ([`Engine::load_with_draft`]).
    ///
    /// # Errors
    /// [`EngineError::Option`] if [`EngineOptions::speculate`] is 0, [`EngineError::DraftVocabulary`] if their
    /// vocabularies have different sizes, [`EngineError::DraftMixture`] if the draft model is a mixture of experts.
    #[doc(hidden)]
    pub fn check_draft(target: &ModelConfig, draft: &ModelConfig, options: &EngineOptions) -> Result<(), EngineError> {
        draft_model::check(target, draft, options)
    }

    /// Plans drafts as if a step of the draft model took this time, relative to a step of this model, so that tests can
    /// force drafts.
    #[doc(hidden)]
    pub fn assume_draft_time(&mut self, step_time: f32) {
        self.schedule.assume_draft_time(step_time);
    }

    /// The device memory that the engine uses, by purpose.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Queues a request. Its sequence starts in the first [`Engine::step`] that has a free row and enough free pages of
    /// the KV cache for its prompt.
    ///
    /// # Errors
    /// [`AdmissionError`] if the request cannot run; running sequences are not affected.
    pub fn add(&mut self, request: Request) -> Result<SeqId, AdmissionError> {
        self.schedule.add(request)
    }

    /// Ends a sequence; it has no further events. Returns `false` if the id is unknown or the sequence has ended.
    pub fn cancel(&mut self, sequence: SeqId) -> bool {
        self.schedule.cancel(sequence)
    }

    /// Whether no sequence runs or waits.
    pub fn is_idle(&self) -> bool {
        self.schedule.rows().is_empty() && self.schedule.waiting() == 0 && self.pending_events.is_empty()
    }

    /// The number of sequences that have a row in each step.
    pub fn running(&self) -> usize {
        self.schedule.rows().len()
    }

    /// The number of sequences without a row: they wait for one or for pages, or their prompt runs.
    pub fn waiting(&self) -> usize {
        self.schedule.waiting()
    }

    /// The number of pages of the KV cache that no sequence reads, 64 tokens each. Some of them hold prefixes of
    /// earlier prompts until they are needed.
    pub fn free_pages(&self) -> u32 {
        self.schedule.free_pages()
    }

    /// The number of preemptions so far. A sequence is preempted if no page is free, or if a page of a packed KV cache
    /// can be kept neither packed nor in BF16.
    pub fn preempted(&self) -> u64 {
        self.schedule.preempted()
    }

    /// The number of prompt tokens so far whose keys and values were shared from an earlier sequence
    /// ([`EngineOptions::prefix_cache`]).
    pub fn shared_prompt_tokens(&self) -> u64 {
        self.schedule.shared_prompt_tokens()
    }

    /// The numbers of drafted and accepted tokens so far ([`EngineOptions::speculate`]).
    pub fn draft_counts(&self) -> DraftCounts {
        self.schedule.draft_counts()
    }

    /// The number of free BF16 units of a packed KV cache, including those of returned pages; `None` if the cache is
    /// BF16. Waits for the steps in flight.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device fails, [`EngineError::Failed`] if it failed before.
    #[doc(hidden)]
    pub fn free_units(&mut self) -> Result<Option<u32>, EngineError> {
        self.check_alive()?;
        self.release_freed()?;
        let free = self.forward.free_units();
        self.fail_on_error(free)
    }

    /// The number of free BF16 units of a packed KV cache when rows last changed or the engine became idle; `None` if
    /// the cache is BF16. Does not wait.
    pub fn last_free_units(&self) -> Option<u32> {
        self.last_free_units
    }

    /// Runs the engine until tokens arrive and returns them: the first token of a sequence that joins, or one token per
    /// running sequence, or several if drafts are accepted. Returns no events if the engine is idle, or if all
    /// sequences of the step were cancelled.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device fails. All sequences are lost, and every later call returns
    /// [`EngineError::Failed`].
    pub fn step(&mut self) -> Result<Vec<Event>, EngineError> {
        self.check_alive()?;
        if !self.pending_events.is_empty() {
            return Ok(mem::take(&mut self.pending_events));
        }
        let stepped = self.try_step();
        self.fail_on_error(stepped)
    }

    /// Runs the current prefill to its end, if any, so that another text may use its memory. Holds its events.
    fn end_prefill(&mut self) -> Result<(), EngineError> {
        while self.schedule.is_prefilling() {
            let stepped = self.try_step();
            let events = self.fail_on_error(stepped)?;
            self.pending_events.extend(events);
        }
        Ok(())
    }

    /// Enqueues the release of the BF16 units of returned pages, before any of these pages is packed again.
    fn release_freed(&mut self) -> Result<(), EngineError> {
        let released = self.forward.release(&self.schedule.take_freed());
        self.fail_on_error(released)
    }

    fn check_alive(&self) -> Result<(), EngineError> {
        if self.failed { Err(EngineError::Failed) } else { Ok(()) }
    }

    /// Drops all sequences if the device failed, because its results cannot be trusted any more.
    fn fail_on_error<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, EngineError> {
        result.map_err(|error| {
            self.failed = true;
            self.in_flight.clear();
            self.pending_events.clear();
            self.schedule.clear();
            error.into()
        })
    }

    fn try_step(&mut self) -> Result<Vec<Event>, DeviceError> {
        loop {
            let next = self.schedule.next_action();
            self.forward.release(&self.schedule.take_freed())?;
            match next {
                Next::Idle => {
                    self.last_free_units = self.forward.free_units()?;
                    return Ok(Vec::new());
                }
                Next::Prefill => {
                    if let Some(event) = self.run_chunk()? {
                        return Ok(vec![event]);
                    }
                }
                Next::Mixed { changed } => {
                    let events = self.run_mixed(changed)?;
                    if !events.is_empty() {
                        return Ok(events);
                    }
                }
                Next::Draft => self.draft()?,
                Next::Launch { changed } => {
                    if changed {
                        self.set_rows()?;
                    }
                    let count = self.schedule.step_rows();
                    self.launch(count, count as usize > self.schedule.rows().len())?;
                    let events = self.note_step()?;
                    if !events.is_empty() {
                        return Ok(events);
                    }
                }
                Next::Read => {
                    if self.in_flight.is_empty() {
                        return Ok(Vec::new());
                    }
                    let events = self.wait_oldest_step()?;
                    if !events.is_empty() {
                        return Ok(events);
                    }
                }
            }
        }
    }

    /// Copies the rows of the next step to the device. No step is in flight.
    fn set_rows(&mut self) -> Result<(), DeviceError> {
        let (rows, count) = (self.schedule.rows(), self.schedule.step_rows());
        if count as usize == rows.len() {
            // This does not wait.
            self.last_free_units = self.forward.free_units()?;
        }
        // Errors of the earlier rows are reported before their state is overwritten.
        wait_for_steps(&mut self.forward, &mut self.stepper)?;
        let states: Vec<_> = rows.iter().flat_map(states).collect();
        self.forward.set_rows(&states, bucket(count))
    }

    /// Records the launched step, and enqueues what its rows request in addition and the copy of its results. Returns
    /// the events of earlier steps that had to be read first.
    fn note_step(&mut self) -> Result<Vec<Event>, DeviceError> {
        self.schedule.note_step_launched();
        let events = self.constrain()?;
        self.forward.enqueue_sampling_extras()?;
        let sampled = self.read_later()?;
        self.in_flight.push_back(sampled);
        Ok(events)
    }

    /// Lets the draft model draft, and waits for its tokens.
    fn draft(&mut self) -> Result<(), DeviceError> {
        let Self { schedule, draft_model, .. } = self;
        let running = schedule.rows().iter().map(|row| row.id);
        let requests: Vec<_> = schedule.draft_requests().iter().map(|(row, count)| row.draft_request(*count)).collect();
        let proposals = draft_model.as_mut().map(|draft_model| draft_model.draft(running, &requests)).transpose()?;
        schedule.set_drafts(proposals.unwrap_or_default());
        Ok(())
    }

    /// Waits for the results of the oldest step in flight, records them and returns their events.
    fn wait_oldest_step(&mut self) -> Result<Vec<Event>, DeviceError> {
        let Some(Sampled { ids, page_losses, logprobs }) = self.in_flight.pop_front() else { return Ok(Vec::new()) };
        let (ids, page_losses) = (ids.wait()?, page_losses.map(Transfer::wait).transpose()?);
        let logprobs = logprobs.map(Transfer::wait).transpose()?;
        let mut events = Vec::new();
        let rows = self.schedule.step_rows() as usize;
        let owners = logprobs.as_ref().map_or_else(Vec::new, |_| owners(&self.schedule));
        let flags = page_losses.as_ref().map_or(&[][..], |losses| &losses[..rows]);
        self.schedule.record_step(&ids[..rows], flags, &mut events);
        self.spare.extend(page_losses.into_iter().chain([ids]));
        if let Some(words) = logprobs {
            note_logprobs(&owners, &words, &mut events);
            self.spare_logprobs.push(words);
        }
        Ok(events)
    }

    /// Waits for the results of all steps in flight, records them and adds their events to `events`.
    fn wait_all_steps(&mut self, events: &mut Vec<Event>) -> Result<(), DeviceError> {
        while !self.in_flight.is_empty() {
            events.extend(self.wait_oldest_step()?);
        }
        Ok(())
    }

    /// Sets the masks of the last launched step while it runs. First reads the tokens of all earlier steps, which the
    /// masks depend on, and returns their events. Does nothing if no row has a constraint.
    fn constrain(&mut self) -> Result<Vec<Event>, DeviceError> {
        let mut events = Vec::new();
        if self.schedule.rows().iter().any(Running::is_constrained) {
            self.wait_all_steps(&mut events)?;
            let masks = self.schedule.masks();
            let (stream, sampling) = self.forward.sampling();
            sampling.set_masks(stream, &masks)?;
        }
        Ok(events)
    }

    /// Enqueues the next chunk of a prompt. After the last one, samples the sequence's first token and waits for it.
    fn run_chunk(&mut self) -> Result<Option<Event>, DeviceError> {
        let Some(chunk) = self.begin_chunk()? else { return Ok(None) };
        let Self { schedule, forward, weights, stepper, .. } = self;
        let Some(Chunk { tokens, start, .. }) = schedule.next_chunk() else { return Ok(None) };
        stepper.enqueue_chunk(forward, weights, tokens, start)?;
        schedule.note_chunk_launched();
        if !chunk.is_last {
            return Ok(None);
        }
        self.enqueue_first_token(chunk, 0)?;
        self.finish_prefill(chunk)
    }

    /// Runs a step and the next chunk of a prompt in one pass. After the last chunk, samples the sequence's first token
    /// and waits for both. No earlier step is in flight.
    fn run_mixed(&mut self, changed: bool) -> Result<Vec<Event>, DeviceError> {
        if changed {
            self.set_rows()?;
        }
        let rows = self.schedule.step_rows();
        let Some(chunk) = self.begin_chunk()? else {
            self.launch(rows, false)?;
            return self.note_step();
        };
        let Self { schedule, forward, weights, .. } = self;
        let Some(Chunk { tokens, start, .. }) = schedule.next_chunk() else { return Ok(Vec::new()) };
        // As for a step without a graph ([`Engine::launch`]).
        forward.stream().synchronize()?;
        forward.enqueue_mixed(weights, rows, tokens, start)?;
        schedule.note_chunk_launched();
        let mut events = self.note_step()?;
        if chunk.is_last {
            self.enqueue_first_token(chunk, rows)?;
            // Before the sequence has a row: the step was launched without it.
            self.wait_all_steps(&mut events)?;
            events.extend(self.finish_prefill(chunk)?);
        }
        Ok(events)
    }

    /// Prepares the next chunk of a prompt. Returns `None` if no sequence can start.
    fn begin_chunk(&mut self) -> Result<Option<PromptEnd>, DeviceError> {
        let Self { config, schedule, forward, .. } = self;
        // Setting the pages of another prompt clears the flag.
        if schedule.passes() && forward.prompt_is_lost()? {
            self.pending_events.extend(schedule.abort_prefill());
            return Ok(None);
        }
        schedule.begin_prefill();
        forward.release(&schedule.take_freed())?;
        let Some(Chunk { running, tokens, start, sets_pages, is_last }) = schedule.next_chunk() else {
            return Ok(None);
        };
        if sets_pages {
            forward.set_pages(&running.pages, Some(running.hot))?;
        }
        if let (true, Some(slot)) = (is_last, running.state_slot) {
            // No step is in flight, and no other sequence uses the state slot.
            let states = token_states(running, config.vocab);
            let (stream, sampling) = forward.sampling();
            sampling.set_state_slot(stream, slot, &states)?;
        }
        // `tokens` has at most a chunk.
        let len = tokens.len() as u32;
        Ok(Some(PromptEnd { is_last, len, position: (start + len).saturating_sub(1), row: RowSampling::of(running) }))
    }

    /// Enqueues the sampling of a sequence's first token after its last chunk, which came after `first` other rows.
    fn enqueue_first_token(&mut self, chunk: PromptEnd, first: u32) -> Result<(), DeviceError> {
        let Self { schedule, forward, weights, .. } = self;
        forward.enqueue_logits(weights, (first + chunk.len).saturating_sub(1), chunk.len.min(1))?;
        let mask = schedule.prefill_mask();
        let (stream, sampling) = forward.sampling();
        sampling.set_masks(stream, &mask)?;
        forward.enqueue_first_token(chunk.position, chunk.row)
    }

    /// Waits for the first token of the sequence whose last chunk was enqueued, and gives it a row.
    fn finish_prefill(&mut self, chunk: PromptEnd) -> Result<Option<Event>, DeviceError> {
        let Self { schedule, forward, stepper, .. } = self;
        wait_for_steps(forward, stepper)?;
        if forward.prompt_is_lost()? {
            return Ok(schedule.abort_prefill());
        }
        let token = forward.ids().read(forward.stream(), 0, 1)?;
        let token = token.first().copied().ok_or(LaunchError::Range { at: 0, len: 1, have: 0 })?;
        let logprobs = match forward.sampling() {
            (stream, sampling) if chunk.row.logprobs > 0 => {
                sampling.logprobs().map(|words| words.read(stream, 0, ROW_WORDS)).transpose()?
            }
            _ => None,
        };
        let event = schedule.finish_prefill(token);
        Ok(event.map(|event| {
            let logprobs = logprobs.map(|words| Box::new(read_logprobs(&words, chunk.row.logprobs - 1)));
            Event { logprobs, ..event }
        }))
    }

    /// Enqueues the copy of the last launched step's results to the host.
    fn read_later(&mut self) -> Result<Sampled, DeviceError> {
        let stream = self.forward.stream().clone();
        let len = self.forward.ids().len();
        let Self { spare, spare_logprobs, forward, .. } = self;
        let mut pinned = || spare.pop().map_or_else(|| Pinned::zeroed(stream.device(), len), Ok);
        let ids = forward.ids().read_later(&stream, 0, pinned()?)?;
        let page_losses = match forward.packed_cache() {
            Some(cache) => Some(cache.page_losses().read_later(&stream, 0, pinned()?)?),
            None => None,
        };
        let logprobs = match forward.sampling().1.logprobs() {
            Some(words) => {
                let pinned = spare_logprobs.pop().map_or_else(|| Pinned::zeroed(stream.device(), words.len()), Ok);
                Some(words.read_later(&stream, 0, pinned?)?)
            }
            None => None,
        };
        Ok(Sampled { ids, page_losses, logprobs })
    }

    /// Launches a step of the first `rows` rows. If it verifies drafts, several rows may be tokens of one sequence.
    fn launch(&mut self, rows: u32, verifies: bool) -> Result<(), DeviceError> {
        let shape = StepShape { rows: bucket(rows), verifies };
        match self.graphs.iter().find(|(of, _)| *of == shape) {
            // SAFETY: the graph references memory of `forward` and `weights`, which live as long as it does; all work
            // runs on one stream.
            Some((_, graph)) => unsafe { graph.launch() },
            None => {
                // The kernels of a step may read positions before the preceding kernel on the stream has ended, and the
                // sampler of the previous step writes these. A graph starts after all earlier work; single launches do
                // not, so they wait.
                self.forward.stream().synchronize()?;
                self.stepper.enqueue_step(&mut self.forward, &self.weights, shape)
            }
        }
    }

    /// The stream that steps run on.
    #[doc(hidden)]
    pub fn stream(&self) -> &Stream {
        self.forward.stream()
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({}, {}, {} running)", self.config.family, self.memory, self.running())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Running kernels reference memory that is freed now. Errors were reported before, or no longer matter.
        let _ = self.forward.stream().synchronize();
        self.stepper.wait();
    }
}

/// Returns the rows of a sequence in the next step.
fn states(row: &Running) -> impl Iterator<Item = RowState<'_>> {
    let (pages, hot, sampling) = (&row.pages[..], row.hot, RowSampling::of(row));
    row.inputs().map(move |(id, position)| RowState { id, position, pages, hot, sampling })
}

/// Returns the sequence and [`Request::logprobs`] of each row of the steps in flight.
fn owners(schedule: &Schedule) -> Vec<(SeqId, Option<u32>)> {
    let rows = schedule.rows().iter();
    rows.flat_map(|row| std::iter::repeat_n((row.id, row.logprobs), row.step_rows() as usize)).collect()
}

/// Adds log probabilities to events, which are in the order of the rows of their step. A row whose token was dropped
/// has no event.
fn note_logprobs(owners: &[(SeqId, Option<u32>)], words: &[u32], events: &mut [Event]) {
    let mut events = events.iter_mut().peekable();
    for ((owner, top), words) in owners.iter().zip(words.chunks_exact(ROW_WORDS)) {
        let Some(event) = events.next_if(|event| event.seq == *owner) else { continue };
        event.logprobs = top.map(|top| Box::new(read_logprobs(words, top)));
    }
}

/// Waits for the device. A row of NaN is not a device failure: its token is [`NO_TOKEN`](crate::NO_TOKEN), whose
/// embedding is zeros.
fn wait_for_steps(forward: &mut Forward, stepper: &mut Stepper) -> Result<(), DeviceError> {
    stepper.synchronize()?;
    match forward.context().synchronize() {
        Err(DeviceError::Row { what: RowFault::Logits | RowFault::Token, .. }) => Ok(()),
        settled => settled,
    }
}
