//! Runs a step graph: walks over its steps, either eagerly or in a stream capture.
//!
//! ```text
//! StepGraph --check--> Checked --Runner--> launches, marks, waits on the streams of a device
//! ```
//! The runner creates streams, marks and slots when a model is loaded, and allocates nothing later. Stream 0 is the
//! stream of the engine's context, on which a step begins and ends.

use std::collections::HashMap;

use unweight_codegen::{VariantSpec, spec::DecodeOutput};
use unweight_rt::{
    ContextSize, Device, DeviceBuffer, DeviceError, DeviceMatrix, ExecContext, KernelSet, LaunchError, MatrixMut,
    MatrixRef, Stream,
    cache::Progress,
    raw::{
        device::{LaunchMode, Mark},
        ops::{
            decode_huffman::{Decoder, output_bytes},
            gemm_recon::Matmul,
        },
    },
};

use super::{
    LoadedMlp, epilogue, reachable,
    step_graph::{self, BuildError, CheckedGraph, Job, Place, Step, Violation},
    weights::{decoder, outputs},
};
use crate::{
    error::EngineError,
    forward::{ChunkPlace, Forward, Ids, Mlp, Only, StepPhase},
    options::{Pipeline, PipelineVariant, Projection, Setting},
    weights::{ProjectionWeights, Weights},
};

/// Memory for the decoded weights of one projection, which all encodings share.
struct Slot {
    full: DeviceBuffer<u16>,
    exponents: DeviceBuffer<u8>,
    indices: DeviceBuffer<u8>,
    /// Declared after the views, so that it is dropped last.
    _memory: DeviceBuffer<u16>,
}

impl Slot {
    fn new(stream: &Stream, loaded: &super::LoadedProjection) -> Result<Self, DeviceError> {
        let grid = unweight_format::TileGrid::new(loaded.n as usize, loaded.k as usize);
        let grid =
            grid.map_err(|_| LaunchError::TooLarge { what: "weights", value: loaded.n.into(), limit: 1 << 31 })?;
        let memory = DeviceBuffer::<u16>::zeroed(stream, grid.elements())?;
        let (device, address) = (memory.device().clone(), memory.address());
        let bytes = |output| output_bytes(grid, output);
        // SAFETY: exponents and indices take at most the bytes of the weights, which `memory` has, followed by its
        // padding. It lives as long as the views, and only step graphs write it, in an order that was checked.
        let (full, exponents, indices) = unsafe {
            (
                DeviceBuffer::borrow(&device, address, grid.elements())?,
                DeviceBuffer::borrow(&device, address, bytes(DecodeOutput::Exponent))?,
                DeviceBuffer::borrow(&device, address, bytes(DecodeOutput::Palette))?,
            )
        };
        Ok(Self { full, exponents, indices, _memory: memory })
    }
}

/// Bytes of the slots that step graphs of these layers need.
fn slot_bytes(layers: &[LoadedMlp], slots: u8) -> u64 {
    let bytes = Projection::ALL.map(|projection| {
        let decoded = layers.iter().map(|mlp| &mlp[projection as usize]).find(|loaded| loaded.is_hard());
        decoded.map_or(0, |loaded| 2 * u64::from(loaded.n) * u64::from(loaded.k))
    });
    bytes.iter().sum::<u64>() * u64::from(slots)
}

/// A step graph with the variant of every projection.
pub(crate) struct BoundGraph {
    pub graph: CheckedGraph,
    variants: Vec<[PipelineVariant; 3]>,
}

/// The reason why a setting cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// No step graph can be built for the setting.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The step graph fails its check.
    #[error(transparent)]
    Violation(#[from] Violation),
}

impl From<GraphError> for EngineError {
    fn from(error: GraphError) -> Self {
        Self::Setting(Box::new(error))
    }
}

impl BoundGraph {
    /// Builds the step graph of these layers with a setting for steps of `rows` rows.
    pub fn new(layers: &[LoadedMlp], setting: &Setting, rows: u32, device: &Device) -> Result<Self, GraphError> {
        let info = device.info();
        let variants = setting.variants(layers, info.arch, rows, info.sms);
        let mlps: Vec<step_graph::Mlp> =
            variants.iter().map(|variants| variants.map(|variant| variant.pipeline)).collect();
        let graph = CheckedGraph::new(step_graph::build(&mlps, &setting.layout(info.sms))?)?;
        Ok(Self { graph, variants })
    }
}

/// The resources that step graphs run on.
struct Runner {
    /// The contexts of streams 1 and up.
    contexts: Vec<ExecContext>,
    marks: Vec<Mark>,
    slots: Vec<[Option<Slot>; 3]>,
    matmuls: HashMap<VariantSpec, Matmul>,
    decoders: HashMap<DecodeOutput, Decoder>,
    layers: Vec<LoadedMlp>,
}

impl Runner {
    /// Loads the kernels and creates streams and slots. `weights` must have been loaded in their stored encodings.
    ///
    /// # Errors
    /// [`DeviceError`] if a kernel cannot be loaded or an allocation fails.
    pub fn new(
        kernels: &KernelSet,
        stream: &Stream,
        weights: &Weights,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Self, DeviceError> {
        let stored: Vec<_> = weights.layers.iter().filter_map(|layer| layer.mlp.stored()).collect();
        let layers = loaded_mlps(weights);
        let specs = reachable(&layers, kernels.device().info().arch);
        kernels.prepare(&specs, progress)?;
        let mut matmuls = HashMap::new();
        for spec in specs {
            matmuls.insert(spec, Matmul::new(kernels.get(&spec)?)?);
        }
        let mut decoders = HashMap::new();
        let slot_count = step_graph::Layout::default().slots;
        let (mut contexts, mut slots) = (Vec::new(), Vec::new());
        if let Some(bits) = stored.iter().filter_map(|mlp| mlp.code_bits()).max() {
            for output in outputs(!matmuls.is_empty()) {
                decoders.insert(*output, decoder(kernels, *output, bits)?);
            }
            let size = stored.iter().map(|mlp| mlp.context_size()).fold(ContextSize::default(), ContextSize::max);
            let device = kernels.device();
            contexts.push(ExecContext::new(&device.stream()?, size.with_cublas())?);
            for _ in 0..slot_count {
                for _ in Projection::ALL {
                    contexts.push(ExecContext::new(&device.stream()?, ContextSize::default())?);
                }
                let slot = |projection: Projection| {
                    let decoded = layers.iter().map(|mlp| &mlp[projection as usize]).find(|loaded| loaded.is_hard());
                    decoded.map(|loaded| Slot::new(stream, loaded)).transpose()
                };
                let [gate, up, down] = Projection::ALL.map(slot);
                slots.push([gate?, up?, down?]);
            }
        }
        Ok(Self { contexts, marks: Vec::new(), slots, matmuls, decoders, layers })
    }

    /// The properties of the layers that the choice of pipelines depends on.
    pub fn layers(&self) -> &[LoadedMlp] {
        &self.layers
    }

    /// Bytes of the runner's contexts.
    pub fn context_bytes(&self) -> u64 {
        self.contexts.iter().map(|ctx| ctx.size().bytes()).sum()
    }

    /// Creates the marks of a step graph, which a capture must not do.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn reserve(&mut self, bound: &BoundGraph, device: &Device) -> Result<(), DeviceError> {
        while self.marks.len() < bound.graph.graph().events as usize {
            self.marks.push(Mark::new(device)?);
        }
        Ok(())
    }

    /// Enqueues a step graph.
    ///
    /// # Errors
    /// [`DeviceError`] if the step graph belongs to another model, or if the driver fails.
    pub fn run(
        &mut self,
        bound: &BoundGraph,
        forward: &mut Forward,
        weights: &Weights,
        work: Work,
    ) -> Result<(), DeviceError> {
        let graph = bound.graph.graph();
        let have = 1 + self.contexts.len() as u64;
        if u64::from(graph.streams) > have {
            return Err(LaunchError::Range { at: 0, len: graph.streams.into(), have }.into());
        }
        let walked = self.walk(bound, forward, weights, work);
        // Later launches belong to no step graph.
        forward.context().set_mode(LaunchMode::default());
        walked
    }

    fn walk(
        &mut self,
        bound: &BoundGraph,
        forward: &mut Forward,
        weights: &Weights,
        work: Work,
    ) -> Result<(), DeviceError> {
        for step in &bound.graph.graph().steps {
            match *step {
                Step::Record { stream, event } => {
                    self.stream(forward, stream)?.record(mark(&self.marks, event)?)?;
                }
                Step::Wait { stream, event } => self.stream(forward, stream)?.wait(mark(&self.marks, event)?)?,
                Step::Run { stream, job, sms, dependent, .. } => {
                    let mode = LaunchMode { sms: Some(sms), serialized: !dependent };
                    match stream.checked_sub(1) {
                        None => forward.context().set_mode(mode),
                        Some(at) => self.context(at)?.set_mode(mode),
                    }
                    self.job(bound, forward, weights, (stream, job), work)?;
                }
            }
        }
        Ok(())
    }

    fn context(&mut self, at: u8) -> Result<&mut ExecContext, LaunchError> {
        let have = self.contexts.len() as u64;
        self.contexts.get_mut(usize::from(at)).ok_or(LaunchError::Range { at: at.into(), len: 1, have })
    }

    fn stream<'a>(&'a self, forward: &'a Forward, stream: u8) -> Result<&'a Stream, LaunchError> {
        let Some(at) = stream.checked_sub(1) else { return Ok(forward.stream()) };
        let ctx = self.contexts.get(usize::from(at));
        ctx.map(ExecContext::stream).ok_or(LaunchError::Range {
            at: stream.into(),
            len: 1,
            have: self.contexts.len() as u64,
        })
    }

    fn job(
        &mut self,
        bound: &BoundGraph,
        forward: &mut Forward,
        weights: &Weights,
        (stream, job): (u8, Job),
        work: Work,
    ) -> Result<(), DeviceError> {
        match job {
            Job::Decode { layer, projection, output, slot } => {
                let ProjectionWeights::Huffman(tensor) = self.stored(weights, layer, projection)? else {
                    return Err(wrong_weights("huffman"));
                };
                let decoder = self.decoders.get(&output).ok_or(wrong_weights("huffman"))?;
                let ctx = stream.checked_sub(1).and_then(|at| self.contexts.get_mut(usize::from(at)));
                let slots = self.slots.get_mut(usize::from(slot));
                let slot = slots.and_then(|slots| slots[projection as usize].as_mut());
                let (Some(ctx), Some(slot)) = (ctx, slot) else {
                    return Err(LaunchError::Range { at: stream.into(), len: 1, have: 0 }.into());
                };
                match output {
                    DecodeOutput::Full => {
                        let (n, k) = (tensor.grid().rows() as u32, tensor.grid().cols() as u32);
                        decoder.full(ctx, tensor, MatrixMut::new(&mut slot.full, n, k, k.into())?)
                    }
                    DecodeOutput::Exponent => decoder.exponent(ctx, tensor, &mut slot.exponents),
                    DecodeOutput::Palette => decoder.palette(ctx, tensor, &mut slot.indices),
                }
            }
            Job::Linear { layer, projection, slot, .. } => {
                let stored = self.stored(weights, layer, projection)?;
                let loaded = &self.layers[layer as usize][projection as usize];
                let variant = bound.variants[layer as usize][projection as usize];
                let arch = forward.stream().device().info().arch;
                let matmul = loaded.kernel(arch, variant, epilogue(projection));
                let matmul = matmul.and_then(|spec| self.matmuls.get(&spec));
                let slot = slot.and_then(|slot| self.slots.get(usize::from(slot))?[projection as usize].as_ref());
                let Mlp { ctx, normed, gate, up, active, hidden, .. } = forward.mlp(work.rows())?;
                let ctx = match stream.checked_sub(1) {
                    None => ctx,
                    Some(at) => {
                        let have = self.contexts.len() as u64;
                        let ctx = self.contexts.get_mut(usize::from(at));
                        ctx.ok_or(LaunchError::Range { at: stream.into(), len: 1, have })?
                    }
                };
                let (x, y) = match projection {
                    Projection::Gate => (normed, gate),
                    Projection::Up => (normed, up),
                    Projection::Down => (active.as_ref(), hidden),
                };
                multiply(ctx, (variant.pipeline, stored), (matmul, slot), x, y, projection)
            }
            job => chain_job(forward, weights, &job, work),
        }
    }

    fn stored<'a>(
        &self,
        weights: &'a Weights,
        layer: u32,
        projection: Projection,
    ) -> Result<&'a ProjectionWeights, DeviceError> {
        let have = self.layers.len() as u64;
        let mlp = weights.layers.get(layer as usize).and_then(|layer| layer.mlp.stored());
        let mlp = mlp.ok_or(LaunchError::Range { at: layer.into(), len: 1, have })?;
        Ok(&mlp.projections[projection as usize])
    }

    /// Waits for the runner's own streams, and reports rows that a kernel skipped.
    ///
    /// # Errors
    /// As for [`ExecContext::synchronize`].
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        let all: Vec<_> = self.contexts.iter_mut().map(ExecContext::synchronize).collect();
        all.into_iter().collect()
    }

    /// Waits for the runner's own streams.
    pub fn wait(&self) {
        // Errors were reported before, or no longer matter.
        self.contexts.iter().for_each(|ctx| _ = ctx.stream().synchronize());
    }
}

/// Enqueues a job of the chain of linear layers: everything but decoders and products of stored weights.
///
/// # Errors
/// [`DeviceError`] if the driver fails, or if the model does not have the layer.
fn chain_job(forward: &mut Forward, weights: &Weights, job: &Job, work: Work) -> Result<(), DeviceError> {
    let rows = work.rows();
    let of = |layer: u32| {
        let have = weights.layers.len() as u64;
        weights.layers.get(layer as usize).ok_or(LaunchError::Range { at: layer.into(), len: 1, have })
    };
    match (*job, work) {
        (Job::Embed, Work::Step { .. }) => forward.enqueue_embed(weights, 0..rows, Ids::Step),
        (Job::Embed, Work::Chunk { .. }) => forward.enqueue_embed(weights, 0..rows, Ids::Prompt),
        (Job::Norm(Some((layer, Place::Attention))), _) => forward.enqueue_input_norm(&of(layer)?.input_norm, rows),
        (Job::Norm(Some((layer, Place::Mlp))), _) => forward.enqueue_input_norm(&of(layer)?.post_norm, rows),
        (Job::Qkv { layer }, _) => forward.enqueue_qkv(of(layer)?, rows),
        (Job::Attention { layer }, Work::Step { .. }) => forward.enqueue_attention(of(layer)?, layer as usize, rows),
        (Job::Attention { layer }, Work::Chunk { start, .. }) => {
            let chunk = ChunkPlace { first: 0, len: rows, start };
            forward.enqueue_rope_and_store(of(layer)?, layer as usize, chunk)?;
            forward.enqueue_chunk_attention(layer as usize, chunk)
        }
        (Job::Output { layer }, _) => {
            forward.enqueue_after_attention((of(layer)?, None), rows, Only(&[StepPhase::Output]))
        }
        (Job::GateUp { layer }, _) if of(layer)?.mlp.gate_up().is_none() => {
            Err(LaunchError::Source { takes: "a merged gate and up", got: "weights of another pipeline" }.into())
        }
        (Job::GateUp { layer }, _) => {
            forward.enqueue_after_attention((of(layer)?, None), rows, Only(&[StepPhase::GateUp, StepPhase::Activation]))
        }
        (Job::Activate { .. }, _) => {
            let Mlp { ctx, silu_mul, gate, up, active, .. } = forward.mlp(rows)?;
            silu_mul.enqueue_pair(ctx, gate.as_ref(), up.as_ref(), active)
        }
        // The logits of a prompt chunk are computed separately, when they are needed.
        (Job::Norm(None) | Job::Head | Job::Sample, Work::Chunk { .. }) => Ok(()),
        (Job::Norm(None), Work::Step { .. }) => forward.enqueue_head(weights, 0, rows, Only(&[StepPhase::Norm])),
        (Job::Head, Work::Step { .. }) => forward.enqueue_head(weights, 0, rows, Only(&[StepPhase::Head])),
        (Job::Sample, Work::Step { .. }) => forward.enqueue_sample(rows),
        (Job::Linear { .. } | Job::Decode { .. }, _) => Ok(()),
    }
}

/// The work that a step graph runs for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The newest tokens of `rows` rows.
    Step { rows: u32 },
    /// The next tokens of one sequence, from `start` on.
    Chunk { rows: u32, start: u32 },
}

impl Work {
    /// The number of rows of the activations.
    pub fn rows(self) -> u32 {
        match self {
            Self::Step { rows } | Self::Chunk { rows, .. } => rows,
        }
    }
}

/// The step graphs of an engine: one per batch size that steps are recorded for, and one for prompt chunks.
pub(crate) struct Pipelines {
    runner: Runner,
    steps: Vec<(u32, BoundGraph)>,
    chunk: BoundGraph,
}

impl Pipelines {
    /// Builds all step graphs: from the setting that `set` returns for a batch if this device can run it, else from the
    /// best guess. A plan from another machine is harmless: it costs only time.
    ///
    /// # Errors
    /// [`EngineError`] if a step graph cannot be built, or if a kernel, an allocation or the driver fails.
    pub fn new(
        kernels: &KernelSet,
        stream: &Stream,
        weights: &Weights,
        (batches, chunk): (&[u32], u32),
        setting_of: &dyn Fn(u32) -> Option<Setting>,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        let mut runner = Runner::new(kernels, stream, weights, progress)?;
        let device = kernels.device();
        let guess = |m| Setting::guess(runner.layers(), device.info().arch, m, device.info().sms);
        let mut steps = Vec::new();
        for &rows in batches {
            let tuned =
                setting_of(rows).and_then(|setting| BoundGraph::new(runner.layers(), &setting, rows, device).ok());
            let bound = tuned.map_or_else(|| BoundGraph::new(runner.layers(), &guess(rows), rows, device), Ok)?;
            steps.push((rows, bound));
        }
        let chunk = BoundGraph::new(runner.layers(), &guess(chunk), chunk, device)?;
        for bound in steps.iter().map(|(_, bound)| bound).chain([&chunk]) {
            runner.reserve(bound, device)?;
        }
        Ok(Self { runner, steps, chunk })
    }

    /// Enqueues a step of `rows` rows.
    ///
    /// # Errors
    /// [`DeviceError`] if there is no step graph for `rows` rows, or if the driver fails.
    pub fn enqueue_step(&mut self, forward: &mut Forward, weights: &Weights, rows: u32) -> Result<(), DeviceError> {
        let largest = self.steps.last().map_or(0, |(rows, _)| *rows);
        let bound = self.steps.iter().find(|(of, _)| *of == rows).map(|(_, bound)| bound);
        let bound = bound.ok_or(LaunchError::Batch { m: rows, max_batch: largest })?;
        self.runner.run(bound, forward, weights, Work::Step { rows })
    }

    /// Enqueues the next tokens of a prompt, from position `start` on.
    ///
    /// # Errors
    /// As for [`Forward::enqueue_chunk`].
    pub fn enqueue_chunk(
        &mut self,
        forward: &mut Forward,
        weights: &Weights,
        ids: &[u32],
        start: u32,
    ) -> Result<(), DeviceError> {
        let rows = forward.set_prompt(ids)?;
        self.runner.run(&self.chunk, forward, weights, Work::Chunk { rows, start })
    }

    /// The properties of the layers that the choice of pipelines depends on.
    pub fn layers(&self) -> &[LoadedMlp] {
        self.runner.layers()
    }

    /// Bytes of the slots of the graphs, and of the contexts of the runner's streams.
    pub fn bytes(&self) -> u64 {
        slot_bytes(self.runner.layers(), step_graph::Layout::default().slots) + self.runner.context_bytes()
    }

    /// Builds the graph of a setting for steps of `rows` rows, with the events that it needs.
    ///
    /// # Errors
    /// [`EngineError`] if the graph cannot be built, or if the driver fails.
    pub fn bind(&mut self, setting: &Setting, rows: u32, device: &Device) -> Result<BoundGraph, EngineError> {
        let bound = BoundGraph::new(self.runner.layers(), setting, rows, device)?;
        self.runner.reserve(&bound, device)?;
        Ok(bound)
    }

    /// Enqueues a graph that does not belong to the engine.
    ///
    /// # Errors
    /// As for [`Pipelines::enqueue_step`].
    pub fn run(
        &mut self,
        bound: &BoundGraph,
        forward: &mut Forward,
        weights: &Weights,
        work: Work,
    ) -> Result<(), DeviceError> {
        self.runner.run(bound, forward, weights, work)
    }

    /// Waits for the runner's own streams, and reports rows that a kernel skipped.
    ///
    /// # Errors
    /// As for [`ExecContext::synchronize`].
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.runner.synchronize()
    }

    /// Waits for the runner's own streams, and ignores what they report.
    pub fn wait(&self) {
        self.runner.wait();
    }

    /// Replaces the step graph of steps of `rows` rows.
    pub fn replace(&mut self, rows: u32, bound: BoundGraph) {
        match self.steps.iter_mut().find(|(of, _)| *of == rows) {
            Some((_, existing)) => *existing = bound,
            None => self.steps.push((rows, bound)),
        }
    }
}

/// The MLPs of a model that were loaded in their stored encodings.
fn loaded_mlps(weights: &Weights) -> Vec<LoadedMlp> {
    weights.layers.iter().filter_map(|layer| Some(layer.mlp.stored()?.loaded())).collect()
}

fn mark(marks: &[Mark], event: u32) -> Result<&Mark, LaunchError> {
    marks.get(event as usize).ok_or(LaunchError::Range { at: event.into(), len: 1, have: marks.len() as u64 })
}

/// The error of a step graph that was built for other weights.
fn wrong_weights(expected: &'static str) -> DeviceError {
    LaunchError::Source { takes: expected, got: "weights of another pipeline" }.into()
}

/// Enqueues a product with a pipeline.
fn multiply(
    ctx: &mut ExecContext,
    (pipeline, weights): (Pipeline, &ProjectionWeights),
    (matmul, slot): (Option<&Matmul>, Option<&Slot>),
    x: MatrixRef<'_>,
    y: MatrixMut<'_>,
    projection: Projection,
) -> Result<(), DeviceError> {
    let epilogue = epilogue(projection);
    let add = projection == Projection::Down;
    match (pipeline, weights, matmul, slot) {
        (Pipeline::Raw, ProjectionWeights::Raw(matrix), ..) => {
            ctx.cublas()?.matmul(x, DeviceMatrix::view(matrix), y, add)
        }
        (Pipeline::Raw | Pipeline::Packed, ProjectionWeights::Linear(linear), ..) => {
            linear.enqueue(ctx, x, y, epilogue)
        }
        (Pipeline::Palette, ProjectionWeights::Palette(tensor), Some(matmul), _) => {
            matmul.palette(ctx, x, tensor.view(), y)
        }
        (Pipeline::FullDecode, ProjectionWeights::Huffman(tensor), _, Some(slot)) => {
            let (n, k) = (tensor.grid().rows() as u32, tensor.grid().cols() as u32);
            ctx.cublas()?.matmul(x, MatrixRef::new(&slot.full, n, k, k.into())?, y, add)
        }
        (Pipeline::Exponents, ProjectionWeights::Huffman(tensor), Some(matmul), Some(slot)) => {
            matmul.exponent(ctx, x, tensor.as_exponent(&slot.exponents), y)
        }
        (Pipeline::Transcode, ProjectionWeights::Huffman(tensor), Some(matmul), Some(slot)) => {
            matmul.palette(ctx, x, tensor.as_palette(&slot.indices), y)
        }
        _ => Err(wrong_weights(pipeline.name())),
    }
}
