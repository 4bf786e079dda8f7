//! The engine: a model on a device, and the sequences that run on it.

mod load;
mod logits;
pub mod measure;
#[cfg(feature = "pipelines")]
pub mod objective;
mod stepper;

use std::{collections::VecDeque, fmt};

use unweight_model::{ModelConfig, SampleParams};
use unweight_rt::{
    DeviceError, Graph, LaunchError, RowFault, Stream,
    experts::ExpertTraffic,
    raw::{
        device::{Pinned, Transfer},
        ops::sample::SampleRow,
    },
};

pub use self::load::LoadProgress;
#[cfg(feature = "pipelines")]
pub use self::load::RandomStored;
use self::stepper::Stepper;
use crate::{
    error::EngineError,
    forward::{Forward, RowState},
    memory::Memory,
    options::{EngineOptions, bucket},
    schedule::{AdmissionError, Event, Next, Request, Schedule, SeqId},
    weights::Weights,
};

/// Steps that are launched before the first is read: one runs while the host reads the one before.
const AHEAD: u32 = 2;

/// A model on a device.
///
/// What it allocates it allocates when it is loaded ([`Engine::memory`]). One step makes one token for every sequence
/// that has a row; sequences join and leave between steps. A sequence's tokens follow from its own request: greedy ones
/// are the same whoever runs beside it up to rounding, which differs between the sizes that steps are recorded for.
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
    /// Tokens of steps that were launched, the oldest first.
    in_flight: VecDeque<Transfer<u32>>,
    spare: Vec<Pinned<u32>>,
    /// By bucket. Before what they name, so that they go first.
    graphs: Vec<(u32, Graph)>,
    forward: Forward,
    stepper: Stepper,
    weights: Weights,
    failed: bool,
}

impl Engine {
    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What it was made for; of [`EngineOptions::placement`] the one that was chosen.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// What fetching experts has cost since the model was loaded, where the device has not all of them
    /// ([`EngineOptions::resident_experts`]). Waits for copies that are under way.
    ///
    /// # Errors
    /// The device's.
    pub fn expert_traffic(&mut self) -> Result<Option<ExpertTraffic>, EngineError> {
        self.check_alive()?;
        let traffic = self.forward.expert_traffic();
        self.note(traffic)
    }

    /// Forgets which experts are on the device, and overwrites them: what is not fetched shows. Nothing may run.
    ///
    /// # Errors
    /// The device's.
    #[doc(hidden)]
    pub fn poison_experts(&mut self, byte: u8) -> Result<(), EngineError> {
        self.check_alive()?;
        let stream = self.forward.stream().clone();
        let poisoned = self.weights.offloaded_mut().try_for_each(|experts| experts.poison(&stream, byte));
        self.note(poisoned)
    }

    /// What it has on the device.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Takes a request. It runs from the next [`Engine::step`] that has a row and pages for it.
    ///
    /// # Errors
    /// [`AdmissionError`]; what runs goes on.
    pub fn add(&mut self, request: Request) -> Result<SeqId, AdmissionError> {
        self.schedule.add(request)
    }

    /// Ends a sequence without further events. `false` if it is unknown or has ended.
    pub fn cancel(&mut self, sequence: SeqId) -> bool {
        self.schedule.cancel(sequence)
    }

    /// Whether nothing is left to be done.
    pub fn is_idle(&self) -> bool {
        self.schedule.rows().is_empty() && self.schedule.waiting() == 0
    }

    /// Sequences that have a row.
    pub fn running(&self) -> usize {
        self.schedule.rows().len()
    }

    /// Sequences that wait for one.
    pub fn waiting(&self) -> usize {
        self.schedule.waiting()
    }

    /// Free pages of the KV cache.
    pub fn free_pages(&self) -> u32 {
        self.schedule.free_pages()
    }

    /// Waits for the next tokens: the first of a sequence that joins, or one of each that has a row. Nothing if nothing
    /// is left to be done; and of a step whose sequences were all cancelled meanwhile.
    ///
    /// # Errors
    /// The device's. All sequences are lost, and the engine runs nothing more.
    pub fn step(&mut self) -> Result<Vec<Event>, EngineError> {
        self.check_alive()?;
        let stepped = self.try_step();
        self.note(stepped)
    }

    fn check_alive(&self) -> Result<(), EngineError> {
        if self.failed { Err(EngineError::Failed) } else { Ok(()) }
    }

    /// After a failure of the device nothing can be trusted.
    fn note<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, EngineError> {
        result.map_err(|error| {
            self.failed = true;
            self.in_flight.clear();
            self.schedule.clear();
            error.into()
        })
    }

    fn try_step(&mut self) -> Result<Vec<Event>, DeviceError> {
        loop {
            match self.schedule.due() {
                Next::Idle => return Ok(Vec::new()),
                Next::Prefill => {
                    let Some(prefill) = self.schedule.begin() else { return Ok(Vec::new()) };
                    let running = prefill.running();
                    let (prompt, params) = (&prefill.prompt, &running.params);
                    let Self { forward, weights, stepper, .. } = self;
                    return match run_prompt(forward, weights, stepper, (prompt, &running.pages), params) {
                        Ok(token) => Ok(vec![self.schedule.begun(prefill, token)]),
                        Err(error) => {
                            self.schedule.failed(prefill);
                            Err(error)
                        }
                    };
                }
                Next::Launch { changed } => {
                    let rows = self.schedule.rows();
                    // At most `max_batch`.
                    let count = rows.len() as u32;
                    if changed {
                        // Errors of the earlier rows are reported before their state is overwritten.
                        settle(&mut self.forward, &mut self.stepper)?;
                        let states: Vec<_> = rows
                            .iter()
                            .map(|row| RowState {
                                id: row.last,
                                position: row.position,
                                pages: &row.pages,
                                sample: sample_row(&row.params),
                            })
                            .collect();
                        self.forward.set_rows(&states, bucket(count))?;
                    }
                    self.launch(count)?;
                    let pinned = match self.spare.pop() {
                        Some(pinned) => pinned,
                        None => Pinned::zeroed(self.forward.stream().device(), self.forward.ids().len())?,
                    };
                    let ids = self.forward.ids().read_later(self.forward.stream(), 0, pinned)?;
                    self.in_flight.push_back(ids);
                    self.schedule.launched();
                }
                Next::Read => {
                    let Some(ids) = self.in_flight.pop_front() else { return Ok(Vec::new()) };
                    let ids = ids.wait()?;
                    let mut events = Vec::new();
                    let rows = self.schedule.rows().len();
                    self.schedule.read(&ids[..rows], &mut events);
                    self.spare.push(ids);
                    if !events.is_empty() {
                        return Ok(events);
                    }
                }
            }
        }
    }

    /// Launches a step of the first `rows` rows.
    fn launch(&mut self, rows: u32) -> Result<(), DeviceError> {
        let bucket = bucket(rows);
        match self.graphs.iter().find(|(of, _)| *of == bucket) {
            // SAFETY: what it names lies in `forward` and `weights`, which live as long as the graph; all of it runs on
            // one stream.
            Some((_, graph)) => unsafe { graph.launch() },
            None => {
                // A step may read positions before the kernel in front of it has ended: that must not be the sampler of
                // the step before.
                self.forward.stream().synchronize()?;
                self.stepper.step(&mut self.forward, &self.weights, bucket)
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
        // What runs names what goes away now. An error was told before, or is of no use any more.
        let _ = self.forward.stream().synchronize();
        self.stepper.wait();
    }
}

/// The sampling parameters of a row, as the device reads them.
fn sample_row(params: &SampleParams) -> SampleRow {
    let SampleParams { temperature, top_k, top_p, min_p, seed, .. } = *params;
    SampleRow { seed, temperature, top_k, top_p, min_p }
}

/// Waits. A row of NaN is not a failure of the device: its token is [`NO_TOKEN`](crate::NO_TOKEN), whose embedding is
/// zeros.
fn settle(forward: &mut Forward, stepper: &mut Stepper) -> Result<(), DeviceError> {
    stepper.synchronize()?;
    match forward.context().synchronize() {
        Err(DeviceError::Row { what: RowFault::Logits | RowFault::Token, .. }) => Ok(()),
        settled => settled,
    }
}

/// Runs a prompt on these pages and chooses the token behind it. Waits.
fn run_prompt(
    forward: &mut Forward,
    weights: &Weights,
    stepper: &mut Stepper,
    (prompt, pages): (&[u32], &[u32]),
    params: &SampleParams,
) -> Result<u32, DeviceError> {
    let (mut start, mut rows) = (0, 0);
    forward.set_pages(pages)?;
    for chunk in prompt.chunks(forward.chunk_rows() as usize) {
        stepper.chunk(forward, weights, chunk, start)?;
        rows = chunk.len() as u32;
        start += rows;
    }
    forward.chunk_logits(weights, rows.saturating_sub(1), rows.min(1))?;
    forward.choose(start.saturating_sub(1), sample_row(params))?;
    settle(forward, stepper)?;
    let token = forward.ids().read(forward.stream(), 0, 1)?;
    token.first().copied().ok_or_else(|| LaunchError::Range { at: 0, len: 1, have: 0 }.into())
}
