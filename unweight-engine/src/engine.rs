//! The engine: a model on a device, with sequences that come and go.

use std::{
    collections::{BTreeSet, VecDeque},
    fmt,
};

use half::bf16;
use unweight_codegen::{VariantSpec, spec::EmbedSource};
use unweight_format::{
    FormId,
    bundle::{Bundle, Profile},
    testing::Weights as Kind,
};
use unweight_model::{ModelConfig, ModelWeights, SampleParams, capacity::Residency};
use unweight_rt::{
    DeviceError, DeviceMatrix, Graph, KernelSet, Lane, LaneSize, LayerBuilder, Linears, LoadOptions, Loader, MatrixMut,
    Refusal, Resident, RowFault, Stream,
    cache::Progress,
    experts::{ExpertTraffic, Fetcher, OffloadedExperts},
    raw::{
        choose::{candidates::has_compact_gemms, cost::gpu_model::Machine},
        device::{Pinned, Transfer},
        ops::{kv::PAD_POSITION, sample::SampleRow},
    },
};

use crate::{
    error::EngineError,
    forward::{Forward, Part, Products, RowState, Work, experts_shape},
    kernels::{Kernels, Variants},
    memory::{self, Memory, NoMemory, Shared},
    options::{BUCKETS, BadOption, EngineOptions, MlpWeights, bucket},
    pages::pages_for,
    paths::{
        self, Choices, Setting,
        oracle::PathSpace,
        weights::{Transcoding, kernels as stored_kernels},
    },
    program::Layout,
    run::{self, Bound, Programs},
    schedule::{Event, Limits, Next, Rejected, Request, Schedule, SeqId},
    weights::{Random, Source, Weights, dense},
};

/// Steps that are launched before the first is read: one runs while the host reads the one before.
const AHEAD: u32 = 2;

/// What loading tells.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum LoadProgress<'a> {
    /// A kernel is ready.
    Kernel(&'a Progress<'a>),
    /// So many layers are on the device.
    Layers {
        /// Layers that are there.
        done: usize,
        /// All of them.
        total: usize,
    },
}

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
    /// Of weights that lie as they are stored.
    programs: Option<Programs>,
    weights: Weights,
    failed: bool,
}

impl Engine {
    /// Brings a bundle's model to the device of `kernels`; compiles what is not in the cache.
    ///
    /// # Errors
    /// A model that is not supported, tensors that are not the model's, too little memory, or what fails on the way.
    pub fn load(
        kernels: &KernelSet,
        bundle: &Bundle,
        options: EngineOptions,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        let config = ModelConfig::of_bundle(bundle)?;
        let names = ModelWeights::of_bundle(&config, bundle)?;
        let compiled = |kernel: &Progress<'_>| progress(&LoadProgress::Kernel(kernel));
        let start = Start::new(kernels, &config, options, Stored::of(&config, &names, bundle), &compiled)?;
        let (mut source, _) = Loader::new(kernels, &start.stream, bundle, start.load_options(), &compiled)?;
        let weights = start.weights(kernels, &mut source, &config, &names, progress)?;
        let lane = source.lane(&start.stream)?;
        // What layers were merged in goes before the cache takes what is left.
        drop(source);
        let model = bundle.manifest().manifest_digest.to_string();
        start.finish(kernels, config, weights, lane, &model, &compiled)
    }

    /// The same with random weights: what a measurement of a geometry needs.
    ///
    /// # Errors
    /// As for [`Engine::load`].
    pub fn random(
        kernels: &KernelSet,
        config: ModelConfig,
        options: EngineOptions,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        Self::random_stored(kernels, config, options, None, progress)
    }

    /// The same, with MLPs that lie as a bundle of this profile would have them, if
    /// [`EngineOptions::mlp`](crate::EngineOptions::mlp) leaves them so.
    ///
    /// # Errors
    /// As for [`Engine::load`].
    pub fn random_stored(
        kernels: &KernelSet,
        config: ModelConfig,
        options: EngineOptions,
        profile: Option<Profile>,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        let names = ModelWeights::named(&config);
        let compiled = |kernel: &Progress<'_>| progress(&LoadProgress::Kernel(kernel));
        let start = Start::new(kernels, &config, options, Stored::random(&config), &compiled)?;
        let builder = LayerBuilder::new(kernels, &start.stream, start.load_options())?;
        let shapes = config.linears().into_iter().chain([[config.vocab, config.hidden]]);
        let largest = shapes.map(|[n, k]| u64::from(n) * u64::from(k)).max().unwrap_or(0);
        let mut source = Random::new(builder, start.options.linears, largest)?;
        if let Some(profile) = profile {
            source.imitate(&names, profile);
        }
        let weights = start.weights(kernels, &mut source, &config, &names, progress)?;
        let lane = source.builder().lane(&start.stream)?;
        drop(source);
        start.finish(kernels, config, weights, lane, "random", &compiled)
    }

    /// The kernels that a bundle's model runs beside its linears on any of these devices, each once; those are
    /// [`loader::reachable`](unweight_rt::raw::layer::loader::reachable)'s. Where MLPs are to lie as they are stored
    /// ([`EngineOptions::mlp`]) their tensors are read.
    ///
    /// # Errors
    /// A model that is not supported, or tensors that are not the model's, or cannot be read.
    pub fn kernels(
        bundle: &Bundle,
        options: &EngineOptions,
        machines: &[Machine],
    ) -> Result<Vec<VariantSpec>, EngineError> {
        let config = ModelConfig::of_bundle(bundle)?;
        let names = ModelWeights::of_bundle(&config, bundle)?;
        // An embedding that cannot be packed stays BF16, which only its weights tell.
        let sources: &[EmbedSource] = match options.linears {
            Linears::Packed => &[EmbedSource::Bf16, EmbedSource::Packed],
            _ => &[EmbedSource::Bf16],
        };
        let mut all = BTreeSet::new();
        for machine in machines {
            for source in sources {
                all.extend(Variants::of(&config, machine, *source, options)?.all());
            }
        }
        if options.mlp != MlpWeights::Linears {
            let mlps = names.layers.iter().map(|layer| dense(options.mlp, layer)).collect::<Result<Vec<_>, _>>()?;
            let archs: BTreeSet<_> = machines.iter().map(|machine| machine.arch).collect();
            for arch in archs {
                all.extend(stored_kernels(bundle, &config, mlps.iter().copied(), options.mlp, arch)?);
            }
        }
        Ok(all.into_iter().collect())
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What it was made for; of [`EngineOptions::resident`] what was chosen.
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
    /// [`Rejected`]; what runs goes on.
    pub fn add(&mut self, request: Request) -> Result<SeqId, Rejected> {
        self.schedule.add(request)
    }

    /// Ends a sequence; nothing more is told of it. `false`: there is none such, or it has ended.
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

    /// Pages of the KV cache that nobody has.
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
                    let Self { forward, weights, programs, .. } = self;
                    return match forward.prefill(weights, programs.as_mut(), prompt, &running.pages, params) {
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
                        // What the rows before left behind is told before they are forgotten.
                        self.forward.settle(self.programs.as_mut())?;
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
                step(&mut self.forward, self.programs.as_mut(), &self.weights, bucket)
            }
        }
    }

    /// Logits of every token of a text, bf16 `[tokens, vocab]`: of row `i` those of the token that follows the first
    /// `i + 1`. Sequences that run go on.
    ///
    /// # Errors
    /// [`EngineError::Rejected`], or the device's.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<bf16>, EngineError> {
        self.check_alive()?;
        self.schedule.check(&Request::new(tokens.to_vec()).max_new_tokens(0))?;
        // A text that was checked fits 32 bits.
        let pages = self.schedule.lend(&[pages_for(tokens.len() as u32)])?;
        let pages_of = pages.first().map_or(&[][..], Vec::as_slice);
        let read = self.forward.text_logits(&self.weights, self.programs.as_mut(), tokens, pages_of);
        let bits = self.note(read)?;
        self.schedule.give(pages);
        Ok(bits.into_iter().map(bf16::from_bits).collect())
    }

    /// The same of several texts at once, by steps of one token each: slow, and what tests hold against
    /// [`Engine::logits`]. Nothing else may run.
    ///
    /// # Errors
    /// [`Rejected::Busy`] where a sequence runs or there are more texts than rows; else as [`Engine::logits`].
    pub fn logits_by_steps(&mut self, texts: &[&[u32]]) -> Result<Vec<Vec<bf16>>, EngineError> {
        self.check_alive()?;
        if !self.is_idle() || texts.len() as u64 > u64::from(self.options.max_batch) {
            return Err(Rejected::Busy { waiting: self.running().max(texts.len()) }.into());
        }
        for text in texts {
            self.schedule.check(&Request::new(text.to_vec()).max_new_tokens(0))?;
        }
        let counts: Vec<u32> = texts.iter().map(|text| pages_for(text.len() as u32)).collect();
        let pages = self.schedule.lend(&counts)?;
        let read = self.steps_of(texts, &pages);
        let read = self.note(read)?;
        self.schedule.give(pages);
        Ok(read)
    }

    fn steps_of(&mut self, texts: &[&[u32]], pages: &[Vec<u32>]) -> Result<Vec<Vec<bf16>>, DeviceError> {
        let (count, vocab) = (texts.len() as u32, self.config.vocab as usize);
        let mut logits = vec![Vec::new(); texts.len()];
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
        for at in 0..longest {
            let states = texts.iter().zip(pages).map(|(text, pages)| match text.get(at) {
                Some(&id) => RowState { id, position: at as u32, pages, sample: sample_row(&SampleParams::default()) },
                None => RowState { id: 0, position: PAD_POSITION, pages, sample: sample_row(&SampleParams::default()) },
            });
            self.forward.set_rows(&states.collect::<Vec<_>>(), bucket(count))?;
            self.launch(count)?;
            let bits = self.forward.logits(count)?;
            self.forward.settle(self.programs.as_mut())?;
            for ((row, text), logits) in bits.chunks_exact(vocab).zip(texts).zip(&mut logits) {
                if at < text.len() {
                    logits.extend(row.iter().map(|bits| bf16::from_bits(*bits)));
                }
            }
        }
        Ok(logits)
    }

    /// Makes ready what [`Engine::rehearsed_step`] runs, up to `steps` times: `batch` sequences with `context` tokens
    /// each, whose keys and values are random. Nothing else may run.
    ///
    /// # Errors
    /// [`EngineError::Rejected`]: no room for them.
    #[doc(hidden)]
    pub fn rehearse(&mut self, batch: u32, context: u32, steps: u32) -> Result<(), EngineError> {
        self.check_alive()?;
        if !self.is_idle() || batch > self.options.max_batch {
            return Err(Rejected::Busy { waiting: self.running() }.into());
        }
        let tokens = context.saturating_add(steps);
        if tokens > self.memory.context {
            let (prompt, context) = (context as usize, self.memory.context);
            return Err(Rejected::TooLong { prompt, max_new_tokens: steps, context }.into());
        }
        let each = pages_for(tokens);
        let pages = self.schedule.lend(&vec![each; batch as usize])?;
        let filled = self.forward.fill(batch, context, &pages);
        self.schedule.give(pages);
        self.note(filled)
    }

    /// Enqueues one step of the batch that was made ready last.
    #[doc(hidden)]
    pub fn rehearsed_step(&mut self, batch: u32) -> Result<(), EngineError> {
        let launched = self.launch(batch);
        self.note(launched)
    }

    /// Waits for the steps, and says whether one of them left something out.
    #[doc(hidden)]
    pub fn rehearsed(&mut self) -> Result<(), EngineError> {
        let settled = self.forward.lane().synchronize();
        let own = self.programs.as_mut().map_or(Ok(()), |programs| programs.runner.synchronize());
        self.note(settled.and(own))
    }

    /// Records one part of a step of all layers.
    #[doc(hidden)]
    pub fn record_part(&mut self, batch: u32, part: Part) -> Result<Graph, EngineError> {
        self.check_alive()?;
        let rows = bucket(batch);
        let stream = self.forward.stream().clone();
        let recorded = stream.capture(|| self.forward.step(&self.weights, rows, Some(part)));
        self.note(recorded)
    }

    /// The ways of every projection at a batch, best guesses first: of hard layers, then of easy ones. Nothing where
    /// there are no such layers, or weights do not lie as they are stored.
    pub fn path_choices(&self, batch: u32) -> Choices {
        let layers = self.programs.as_ref().map_or(&[][..], |programs| programs.runner.layers());
        let info = self.stream().device().info();
        paths::choices(layers, info.arch, bucket(batch), info.sms)
    }

    /// The best guess at a batch.
    ///
    /// # Errors
    /// [`EngineError::NotStored`].
    pub fn path_guess(&self, batch: u32) -> Result<Setting, EngineError> {
        let layers = self.programs.as_ref().ok_or(EngineError::NotStored)?.runner.layers();
        let info = self.stream().device().info();
        Ok(Setting::guess(layers, info.arch, bucket(batch), info.sms))
    }

    /// Everything that can be chosen of steps of a batch, the best guess first.
    ///
    /// # Errors
    /// [`EngineError::NotStored`].
    pub fn path_space(&self, batch: u32) -> Result<PathSpace, EngineError> {
        let sms = self.stream().device().info().sms;
        Ok(PathSpace::new(&self.path_choices(batch), &self.path_guess(batch)?, sms))
    }

    /// Runs steps of a batch by these ways from now on. Waits for what runs.
    ///
    /// # Errors
    /// [`EngineError::Program`]: the device cannot run them; nothing changes. [`EngineError::NotStored`].
    pub fn set_paths(&mut self, batch: u32, setting: &Setting) -> Result<(), EngineError> {
        self.check_alive()?;
        let rows = bucket(batch);
        let bound = self.bind(rows, setting)?;
        let replaced = self.replace_program(rows, bound);
        self.note(replaced)
    }

    /// Runs steps by this program from now on.
    fn replace_program(&mut self, rows: u32, bound: Bound) -> Result<(), DeviceError> {
        let Self { forward, programs, weights, .. } = self;
        forward.stream().synchronize()?;
        if let Some(programs) = programs.as_mut() {
            programs.replace(rows, bound);
        }
        if self.options.graphs {
            forward.set_rows(&[], rows)?;
            step(forward, programs.as_mut(), weights, rows)?;
            forward.stream().synchronize()?;
        }
        self.record_step(rows)
    }

    /// Records the step anew, if steps are recorded.
    fn record_step(&mut self, rows: u32) -> Result<(), DeviceError> {
        self.graphs.retain(|(of, _)| *of != rows);
        if self.options.graphs {
            let Self { forward, programs, weights, .. } = self;
            let stream = forward.stream().clone();
            let graph = stream.capture(|| step(forward, programs.as_mut(), weights, rows))?;
            self.graphs.push((rows, graph));
        }
        Ok(())
    }

    /// A program of these ways, with all that it needs.
    fn bind(&mut self, rows: u32, setting: &Setting) -> Result<Bound, EngineError> {
        let programs = self.programs.as_mut().ok_or(EngineError::NotStored)?;
        let device = self.forward.stream().device().clone();
        let bound = Bound::new(programs.runner.layers(), setting, rows, &device)?;
        programs.runner.reserve(&bound, &device)?;
        Ok(bound)
    }

    /// Records a step by these ways, which nothing else will run; its rows were set. Runs it once.
    pub(crate) fn record_paths(&mut self, batch: u32, setting: &Setting) -> Result<Graph, EngineError> {
        self.check_alive()?;
        let rows = bucket(batch);
        let bound = self.bind(rows, setting)?;
        let Self { forward, programs, weights, .. } = self;
        let runner = &mut programs.as_mut().ok_or(EngineError::NotStored)?.runner;
        let work = Work::Step { rows };
        let recorded = runner
            .run(&bound, forward, weights, work)
            .and_then(|()| forward.stream().synchronize())
            .and_then(|()| forward.stream().clone().capture(|| runner.run(&bound, forward, weights, work)));
        self.note(recorded)
    }

    /// As [`Engine::rehearse`], for steps that begin anew again and again ([`Engine::rewind`]); the pages are lent.
    pub(crate) fn begin_rehearsal(
        &mut self,
        batch: u32,
        context: u32,
        steps: u32,
    ) -> Result<Vec<Vec<u32>>, EngineError> {
        self.rehearse(batch, context, steps)?;
        let each = pages_for(context.saturating_add(steps));
        Ok(self.schedule.lend(&vec![each; batch as usize])?)
    }

    /// Sets the rows of a rehearsal to their beginning. Waits.
    pub(crate) fn rewind(&mut self, batch: u32, context: u32, pages: &[Vec<u32>]) -> Result<(), EngineError> {
        let sample = sample_row(&SampleParams::default());
        let states = pages.iter().zip(1..).map(|(pages, id)| RowState { id, position: context, pages, sample });
        let set = self.forward.set_rows(&states.collect::<Vec<_>>(), bucket(batch));
        self.note(set)
    }

    /// Logits of the first rows of the last step. Waits.
    pub(crate) fn rehearsed_logits(&mut self, rows: u32) -> Result<Vec<bf16>, EngineError> {
        let bits = self.forward.logits(rows);
        Ok(self.note(bits)?.into_iter().map(bf16::from_bits).collect())
    }

    /// Takes the pages back.
    pub(crate) fn end_rehearsal(&mut self, pages: Vec<Vec<u32>>) {
        self.schedule.give(pages);
    }

    /// The stream that it runs on.
    #[doc(hidden)]
    pub fn stream(&self) -> &Stream {
        self.forward.stream()
    }

    /// Lets cuBLAS find its fastest for every product of steps of `batch` rows, and records them anew.
    #[doc(hidden)]
    pub fn tune_cublas(&mut self, batch: u32) -> Result<(), EngineError> {
        self.check_alive()?;
        let rows = bucket(batch);
        let tuned = self.forward.tune(&self.weights, rows).and_then(|()| self.record_step(rows));
        self.note(tuned)
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
        if let Some(programs) = &self.programs {
            programs.runner.wait();
        }
    }
}

/// Enqueues a step: by its program, or the one chain of all linears.
fn step(
    forward: &mut Forward,
    programs: Option<&mut Programs>,
    weights: &Weights,
    rows: u32,
) -> Result<(), DeviceError> {
    match programs {
        Some(programs) => programs.step(forward, weights, rows),
        None => forward.step(weights, rows, None),
    }
}

/// How a row chooses, as the device reads it.
fn sample_row(params: &SampleParams) -> SampleRow {
    let SampleParams { temperature, top_k, top_p, min_p, seed, .. } = *params;
    SampleRow { seed, temperature, top_k, top_p, min_p }
}

/// How the embedding will lie, unless it cannot be packed. A head is padded, an embedding of its own is not.
fn embed_source(config: &ModelConfig, linears: Linears) -> EmbedSource {
    let whole = config.tied || config.vocab.is_multiple_of(64) && config.hidden.is_multiple_of(64);
    if whole && linears == Linears::Packed { EmbedSource::Packed } else { EmbedSource::Bf16 }
}

/// What is known before the weights are there.
struct Start {
    options: EngineOptions,
    stream: Stream,
    /// Bytes that may be used.
    have: u64,
}

/// How much smaller a model is whose compact tensors stay so.
#[derive(Clone, Copy, Debug)]
struct Stored {
    /// Bytes with all that can be packed.
    packed: u64,
    /// Bytes with what is compact as it is; `None` where nothing is.
    compact: Option<u64>,
}

impl Stored {
    fn of(config: &ModelConfig, names: &ModelWeights, bundle: &Bundle) -> Self {
        let packed = config.weight_bytes(Residency::Packed);
        let mut saved = 0u64;
        let tied = names.embed == names.lm_head;
        for tensor in bundle.tensors().filter(|tensor| tensor.encoding() == FormId::COMPACT) {
            let name = &tensor.entry().name;
            // What is looked up in is packed.
            if *name == names.embed || tied && *name == names.lm_head {
                continue;
            }
            let elements = tensor.entry().shape.iter().map(|extent| *extent as u64).product::<u64>();
            saved = saved.saturating_add((elements / 2 * 3).saturating_sub(tensor.entry().stored_bytes()));
        }
        let compact = (saved > 0).then(|| packed.saturating_sub(saved));
        Self { packed, compact }
    }

    /// Without experts that lie in host memory; they are packed by either way.
    fn without(self, options: &EngineOptions, config: &ModelConfig) -> Self {
        let offloaded = offloaded_bytes(options, config, Residency::Packed);
        let less = |bytes: u64| bytes.saturating_sub(offloaded);
        Self { packed: less(self.packed), compact: self.compact.map(less) }
    }

    /// Of random weights.
    fn random(config: &ModelConfig) -> Self {
        let of = |residency| config.weight_bytes(residency);
        Self { packed: of(Residency::Packed), compact: Some(of(Residency::Compact)) }
    }
}

/// With what becomes of experts: as many as there are need no room but their own, and a step that waits for the host
/// cannot be recorded.
fn offloading(options: EngineOptions, config: &ModelConfig) -> Result<EngineOptions, EngineError> {
    let Some(resident) = options.resident_experts else { return Ok(options) };
    let mixture = config.mixture.ok_or(EngineError::NoExperts(resident))?;
    if resident >= mixture.experts {
        return Ok(EngineOptions { resident_experts: None, ..options });
    }
    let all = u64::from(mixture.experts) * u64::from(config.layers);
    memory::check_host(all.saturating_mul(config.expert_bytes(Residency::Packed)))?;
    Ok(options.graphs(false))
}

/// Bytes of experts that the device has no room for.
fn offloaded_bytes(options: &EngineOptions, config: &ModelConfig, residency: Residency) -> u64 {
    let (Some(resident), Some(mixture)) = (options.resident_experts, config.mixture) else { return 0 };
    let others = u64::from(mixture.experts.saturating_sub(resident)) * u64::from(config.layers);
    others.saturating_mul(config.expert_bytes(residency))
}

impl Start {
    fn new(
        kernels: &KernelSet,
        config: &ModelConfig,
        options: EngineOptions,
        stored: Stored,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        options.check()?;
        if let Some(context) = options.context.filter(|context| *context > config.max_positions) {
            let range = "at most the model's max_position_embeddings";
            return Err(BadOption { name: "context", value: context.into(), range }.into());
        }
        let device = kernels.device();
        let (free, _) = device.memory()?;
        let have = options.memory.unwrap_or(memory::usual_share(free as u64)).min(free as u64);
        let arch = device.info().arch;
        let options = offloading(options, config)?;
        let stored = stored.without(&options, config);
        // The report's pipelines have their own ways with what is stored.
        let kept = has_compact_gemms(arch) && options.mlp == MlpWeights::Linears;
        let options = options.settled(config, (stored.packed, stored.compact), kept, have);
        let weights = match (options.linears, options.resident, stored.compact) {
            (Linears::Bf16, ..) => {
                config.weight_bytes(Residency::Bf16).saturating_sub(offloaded_bytes(&options, config, Residency::Bf16))
            }
            (Linears::Packed, Some(Resident::Small), Some(compact)) => compact,
            (Linears::Packed, ..) => stored.packed,
        };
        // Before minutes are spent on weights that leave no room. What is stored may be less.
        let least = if options.mlp == MlpWeights::Linears { weights } else { 0 };
        memory::plan(config, &options, (least, Shared::default()), have)?;
        let source = embed_source(config, options.linears);
        let variants = Variants::of(config, &device.info().into(), source, &options)?;
        kernels.prepare(&variants.all(), progress)?;
        Ok(Self { stream: device.stream()?, options, have })
    }

    fn load_options(&self) -> LoadOptions {
        memory::load_options(&self.options)
    }

    fn weights(
        &self,
        kernels: &KernelSet,
        source: &mut impl Source,
        config: &ModelConfig,
        names: &ModelWeights,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Weights, EngineError> {
        let total = names.layers.len();
        let told = |done| progress(&LoadProgress::Layers { done, total });
        let mut transcoding = match self.options.mlp {
            MlpWeights::Linears => None,
            _ => Some(Transcoding::new(kernels, &self.stream)?),
        };
        let stored = transcoding.as_mut().map(|transcoding| (transcoding, self.options.mlp));
        Weights::load(source, config, names, stored, self.options.resident_experts, &told)
    }

    fn finish(
        self,
        kernels: &KernelSet,
        config: ModelConfig,
        weights: Weights,
        mut lane: Lane,
        model: &str,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Engine, EngineError> {
        let Self { options, stream, have } = self;
        let products = if options.mlp != MlpWeights::Linears {
            Products::Stored
        } else if weights.layers.iter().all(|layer| layer.mlp.gate_up().is_some_and(|(_, gated)| gated)) {
            Products::Activated
        } else {
            Products::Beside
        };
        let buckets: Vec<u32> = BUCKETS.into_iter().filter(|rows| *rows <= bucket(options.max_batch)).collect();
        if let Some(mixture) = config.mixture {
            let experts = weights.layers.iter().filter_map(|layer| layer.mlp.mixture());
            let rows = memory::rows(&options);
            let size = experts.map(|(_, experts)| experts.lane_size(rows, mixture.top_k));
            lane.reserve(size.fold(LaneSize::default(), LaneSize::max))?;
        }
        if products == Products::Stored {
            lane.reserve(LaneSize::default().with_cublas())?;
        }
        let slot = lane.size().slot_bytes;
        let mut shared = lane.size().bytes() + products.bytes(config.intermediate, memory::rows(&options));
        let mut programs = None;
        if products == Products::Stored {
            let layers = run::lying(&weights);
            shared += run::slot_bytes(&layers, Layout::default().slots);
            let device = kernels.device().info();
            let subject = |batch| paths::plan::key(model, options.mlp, batch, device);
            let set = |batch| options.plan.setting(batch, &subject(batch)).cloned();
            let own = Programs::new(kernels, &stream, &weights, (&buckets, memory::rows(&options)), &set, progress)?;
            shared += own.runner.lane_bytes();
            programs = Some(own);
        }
        if let (Some(_), Some(shape), Some(mixture)) =
            (options.resident_experts, experts_shape(&config), config.mixture)
        {
            shared += Fetcher::bytes(shape, memory::rows(&options), mixture.top_k);
        }
        let shared = Shared { bytes: shared, slot };
        let memory: Result<Memory, NoMemory> = memory::plan(&config, &options, (weights.bytes(), shared), have);
        let memory = Memory { host: weights.offloaded().map(OffloadedExperts::host_bytes).sum(), ..memory? };
        let source = if weights.embed_is_packed() { EmbedSource::Packed } else { EmbedSource::Bf16 };
        let variants = Variants::of(&config, &kernels.device().info().into(), source, &options)?;
        let own = Kernels::load(kernels, &variants)?;
        // Counted with the activations.
        lane.reserve(own.lane_size(config.kv_heads)?)?;
        let mut forward = Forward::new(lane, own, &config, &options, &memory, products)?;
        let mut graphs = Vec::new();
        if options.graphs {
            for rows in buckets {
                // A launch loads what a driver loads lazily, which a capture may not.
                forward.set_rows(&[], rows)?;
                step(&mut forward, programs.as_mut(), &weights, rows)?;
                stream.synchronize()?;
                let recorded = stream.capture(|| step(&mut forward, programs.as_mut(), &weights, rows));
                graphs.push((rows, recorded?));
            }
        }
        let limits = Limits {
            max_batch: options.max_batch,
            context: memory.context,
            vocab: config.vocab,
            ahead: AHEAD,
            waiting: options.waiting,
        };
        let schedule = Schedule::new(limits, memory.pages);
        let (in_flight, spare) = (VecDeque::new(), Vec::new());
        let failed = false;
        Ok(Engine { config, options, memory, schedule, in_flight, spare, graphs, forward, programs, weights, failed })
    }
}

impl Forward {
    /// Waits. Rows of NaN are no failure of the device: whoever has one is told by its token, which is none, and what
    /// is looked up for that is zeros.
    fn settle(&mut self, programs: Option<&mut Programs>) -> Result<(), DeviceError> {
        programs.map_or(Ok(()), |programs| programs.runner.synchronize())?;
        match self.lane().synchronize() {
            Err(DeviceError::Row { what: RowFault::Logits | RowFault::Token, .. }) => Ok(()),
            settled => settled,
        }
    }

    /// Enqueues the next tokens of a prompt: by a program, or the one chain of all linears.
    fn next(
        &mut self,
        weights: &Weights,
        programs: Option<&mut Programs>,
        ids: &[u32],
        start: u32,
    ) -> Result<(), DeviceError> {
        match programs {
            Some(programs) => programs.chunk(self, weights, ids, start),
            None => self.chunk(weights, ids, start),
        }
    }

    /// Runs a prompt and chooses the token behind it. Waits.
    fn prefill(
        &mut self,
        weights: &Weights,
        mut programs: Option<&mut Programs>,
        prompt: &[u32],
        pages: &[u32],
        params: &SampleParams,
    ) -> Result<u32, DeviceError> {
        let (mut start, mut rows) = (0, 0);
        self.set_pages(pages)?;
        for chunk in prompt.chunks(self.chunk_rows() as usize) {
            self.next(weights, programs.as_deref_mut(), chunk, start)?;
            rows = chunk.len() as u32;
            start += rows;
        }
        self.chunk_logits(weights, rows.saturating_sub(1), rows.min(1))?;
        self.choose(start.saturating_sub(1), sample_row(params))?;
        self.settle(programs)?;
        let token = self.ids().read(self.stream(), 0, 1)?;
        token.first().copied().ok_or_else(|| Refusal::Range { at: 0, len: 1, have: 0 }.into())
    }

    /// Logits of every token of a text, bf16 bits `[tokens, vocab]`. Waits.
    fn text_logits(
        &mut self,
        weights: &Weights,
        mut programs: Option<&mut Programs>,
        tokens: &[u32],
        pages: &[u32],
    ) -> Result<Vec<u16>, DeviceError> {
        let (mut start, mut all) = (0, Vec::new());
        self.set_pages(pages)?;
        for chunk in tokens.chunks(self.chunk_rows() as usize) {
            self.next(weights, programs.as_deref_mut(), chunk, start)?;
            let rows = chunk.len() as u32;
            let mut first = 0;
            while first < rows {
                let some = (rows - first).min(self.logit_rows());
                self.chunk_logits(weights, first, some)?;
                all.extend(self.logits(some)?);
                first += some;
            }
            start += rows;
        }
        self.settle(programs)?;
        Ok(all)
    }

    /// Random keys and values everywhere, and `batch` rows with a token behind `context` others.
    fn fill(&mut self, batch: u32, context: u32, pages: &[Vec<u32>]) -> Result<(), DeviceError> {
        const DRAWN: u32 = 1 << 20;
        let stream = self.stream().clone();
        let drawn: Vec<u16> = Kind::Gaussian { sigma: 1.0 }.iter(2).take(DRAWN as usize).collect();
        let drawn = DeviceMatrix::from_host(&stream, 1, DRAWN, &drawn)?;
        let (cache, _) = self.cache();
        // What is left behind the last whole row is less than one page of one layer of any model worth measuring.
        let rows = u32::try_from(cache.len() / DRAWN as usize).unwrap_or(u32::MAX);
        let mut all = MatrixMut::new(cache, rows, DRAWN, DRAWN.into())?;
        for row in 0..rows {
            all.part(row..row + 1, 0..DRAWN)?.copy_from(&stream, drawn.view())?;
        }
        stream.synchronize()?;
        let sample = sample_row(&SampleParams::default());
        let states = pages.iter().zip(1..).map(|(pages, id)| RowState { id, position: context, pages, sample });
        self.set_rows(&states.collect::<Vec<_>>(), bucket(batch))
    }
}
