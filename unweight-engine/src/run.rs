//! Runs a program: the same walk over its steps, eagerly or inside a capture.
//!
//! ```text
//! Program --check--> Checked --Runner--> launches, marks, waits on the streams of a device
//! ```
//! Streams, marks and slots are the runner's, made when a model is loaded; nothing is allocated later. Stream 0 is that
//! of the engine's lane, on which a step begins and ends.

use std::collections::HashMap;

use unweight_codegen::{VariantSpec, spec::DecodeOutput};
use unweight_rt::{
    Device, DeviceBuffer, DeviceError, DeviceMatrix, KernelSet, Lane, LaneSize, MatrixMut, MatrixRef, Refusal, Stream,
    device::{LaunchMode, Mark},
    jit::cache::Progress,
    ops::{
        decode::{Decoder, output_bytes},
        gemm_recon::Matmul,
    },
};

use crate::{
    error::EngineError,
    forward::{Forward, Mlp, Work},
    paths::{
        self, LyingMlp, Setting, Way,
        weights::{Stored, decoder, outputs},
    },
    program::{self, BuildError, Checked, Job, Path, Projection, Step, Violation},
    weights::Weights,
};

/// Room for the decoded weights of one projection: each form lies in the same memory.
struct Slot {
    full: DeviceBuffer<u16>,
    exponents: DeviceBuffer<u8>,
    indices: DeviceBuffer<u8>,
    /// Behind the views: those go first.
    _memory: DeviceBuffer<u16>,
}

impl Slot {
    fn new(stream: &Stream, lying: &paths::Lying) -> Result<Self, DeviceError> {
        let grid = unweight_format::TileGrid::new(lying.n as usize, lying.k as usize);
        let grid = grid.map_err(|_| Refusal::TooLarge { what: "weights", value: lying.n.into(), limit: 1 << 31 })?;
        let memory = DeviceBuffer::<u16>::zeroed(stream, grid.elements())?;
        let (device, address) = (memory.device().clone(), memory.address());
        let bytes = |output| output_bytes(grid, output);
        // SAFETY: exponents and indices are no more bytes than the weights, which `memory` has with the bytes behind
        // them; it lives as long as the views, and only programs write it, in an order that was checked.
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

/// Bytes of the slots that programs of these layers need.
pub(crate) fn slot_bytes(layers: &[LyingMlp], slots: u8) -> u64 {
    let bytes = Projection::ALL.map(|projection| {
        let hard = layers.iter().map(|mlp| &mlp[projection as usize]).find(|lying| lying.is_hard());
        hard.map_or(0, |lying| 2 * u64::from(lying.n) * u64::from(lying.k))
    });
    bytes.iter().sum::<u64>() * u64::from(slots)
}

/// A program with the way of every projection.
pub(crate) struct Bound {
    pub program: Checked,
    ways: Vec<[Way; 3]>,
}

/// Why a setting cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindFailure {
    /// No program.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A program that may not run.
    #[error(transparent)]
    Violation(#[from] Violation),
}

impl BindFailure {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        "pipeline-invalid"
    }
}

impl Bound {
    /// The program of these layers with a setting for steps of `rows` rows.
    pub fn new(layers: &[LyingMlp], setting: &Setting, rows: u32, device: &Device) -> Result<Self, BindFailure> {
        let info = device.info();
        let ways = setting.ways(layers, info.arch, rows, info.sms);
        let mlps: Vec<program::Mlp> = ways.iter().map(|ways| ways.map(|way| way.path)).collect();
        let program = Checked::new(program::build(&mlps, &setting.layout(info.sms))?)?;
        Ok(Self { program, ways })
    }
}

/// What programs run on.
pub(crate) struct Runner {
    /// Of streams 1 and up.
    lanes: Vec<Lane>,
    marks: Vec<Mark>,
    slots: Vec<[Option<Slot>; 3]>,
    matmuls: HashMap<VariantSpec, Matmul>,
    decoders: HashMap<DecodeOutput, Decoder>,
    layers: Vec<LyingMlp>,
}

impl Runner {
    /// Loads the kernels and makes streams and slots. `weights` lie as they are stored.
    ///
    /// # Errors
    /// A kernel cannot be made, or there is no room.
    pub fn new(
        kernels: &KernelSet,
        stream: &Stream,
        weights: &Weights,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Self, DeviceError> {
        let stored: Vec<_> = weights.layers.iter().filter_map(|layer| layer.mlp.stored()).collect();
        let layers = lying(weights);
        let specs = paths::reachable(&layers, kernels.device().info().arch);
        kernels.prepare(&specs, progress)?;
        let mut matmuls = HashMap::new();
        for spec in specs {
            matmuls.insert(spec, Matmul::new(kernels.get(&spec)?)?);
        }
        let mut decoders = HashMap::new();
        let slot_count = program::Layout::default().slots;
        let (mut lanes, mut slots) = (Vec::new(), Vec::new());
        if let Some(bits) = stored.iter().filter_map(|mlp| mlp.code_bits()).max() {
            for output in outputs(!matmuls.is_empty()) {
                decoders.insert(*output, decoder(kernels, *output, bits)?);
            }
            let need = stored.iter().map(|mlp| mlp.lane_size()).fold(LaneSize::default(), LaneSize::max);
            let device = kernels.device();
            lanes.push(Lane::new(&device.stream()?, need.with_cublas())?);
            for _ in 0..slot_count {
                for _ in Projection::ALL {
                    lanes.push(Lane::new(&device.stream()?, LaneSize::default())?);
                }
                let slot = |projection: Projection| {
                    let hard = layers.iter().map(|mlp| &mlp[projection as usize]).find(|lying| lying.is_hard());
                    hard.map(|lying| Slot::new(stream, lying)).transpose()
                };
                let [gate, up, down] = Projection::ALL.map(slot);
                slots.push([gate?, up?, down?]);
            }
        }
        Ok(Self { lanes, marks: Vec::new(), slots, matmuls, decoders, layers })
    }

    /// The layers, as far as the choice of paths cares.
    pub fn layers(&self) -> &[LyingMlp] {
        &self.layers
    }

    /// Bytes of its lanes.
    pub fn lane_bytes(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.size().bytes()).sum()
    }

    /// Makes the marks of a program, which a capture may not.
    ///
    /// # Errors
    /// The driver's.
    pub fn reserve(&mut self, bound: &Bound, device: &Device) -> Result<(), DeviceError> {
        while self.marks.len() < bound.program.program().events as usize {
            self.marks.push(Mark::new(device)?);
        }
        Ok(())
    }

    /// Enqueues a program.
    ///
    /// # Errors
    /// A program of another model, or the driver's refusal.
    pub fn run(
        &mut self,
        bound: &Bound,
        forward: &mut Forward,
        weights: &Weights,
        work: Work,
    ) -> Result<(), DeviceError> {
        let program = bound.program.program();
        let have = 1 + self.lanes.len() as u64;
        if u64::from(program.streams) > have {
            return Err(Refusal::Range { at: 0, len: program.streams.into(), have }.into());
        }
        let walked = self.walk(bound, forward, weights, work);
        // What comes behind has no program.
        forward.lane().set_mode(LaunchMode::default());
        walked
    }

    fn walk(&mut self, bound: &Bound, forward: &mut Forward, weights: &Weights, work: Work) -> Result<(), DeviceError> {
        for step in &bound.program.program().steps {
            match *step {
                Step::Record { stream, event } => {
                    self.stream(forward, stream)?.record(mark(&self.marks, event)?)?;
                }
                Step::Wait { stream, event } => self.stream(forward, stream)?.wait(mark(&self.marks, event)?)?,
                Step::Run { stream, job, sms, dependent, .. } => {
                    let mode = LaunchMode { sms: Some(sms), ordinary: !dependent };
                    match stream.checked_sub(1) {
                        None => forward.lane().set_mode(mode),
                        Some(at) => self.lane(at)?.set_mode(mode),
                    }
                    self.job(bound, forward, weights, (stream, job), work)?;
                }
            }
        }
        Ok(())
    }

    fn lane(&mut self, at: u8) -> Result<&mut Lane, Refusal> {
        let have = self.lanes.len() as u64;
        self.lanes.get_mut(usize::from(at)).ok_or(Refusal::Range { at: at.into(), len: 1, have })
    }

    fn stream<'a>(&'a self, forward: &'a Forward, stream: u8) -> Result<&'a Stream, Refusal> {
        let Some(at) = stream.checked_sub(1) else { return Ok(forward.stream()) };
        let lane = self.lanes.get(usize::from(at));
        lane.map(Lane::stream).ok_or(Refusal::Range { at: stream.into(), len: 1, have: self.lanes.len() as u64 })
    }

    fn job(
        &mut self,
        bound: &Bound,
        forward: &mut Forward,
        weights: &Weights,
        (stream, job): (u8, Job),
        work: Work,
    ) -> Result<(), DeviceError> {
        match job {
            Job::Decode { layer, projection, output, slot } => {
                let Stored::Huffman(tensor) = self.stored(weights, layer, projection)? else {
                    return Err(other_weights("huffman"));
                };
                let decoder = self.decoders.get(&output).ok_or(other_weights("huffman"))?;
                let lane = stream.checked_sub(1).and_then(|at| self.lanes.get_mut(usize::from(at)));
                let slots = self.slots.get_mut(usize::from(slot));
                let slot = slots.and_then(|slots| slots[projection as usize].as_mut());
                let (Some(lane), Some(slot)) = (lane, slot) else {
                    return Err(Refusal::Range { at: stream.into(), len: 1, have: 0 }.into());
                };
                match output {
                    DecodeOutput::Full => {
                        let (n, k) = (tensor.grid().rows() as u32, tensor.grid().cols() as u32);
                        decoder.full(lane, tensor, MatrixMut::new(&mut slot.full, n, k, k.into())?)
                    }
                    DecodeOutput::Exponent => decoder.exponent(lane, tensor, &mut slot.exponents),
                    DecodeOutput::Palette => decoder.palette(lane, tensor, &mut slot.indices),
                }
            }
            Job::Linear { layer, projection, slot, .. } => {
                let stored = self.stored(weights, layer, projection)?;
                let lying = &self.layers[layer as usize][projection as usize];
                let way = bound.ways[layer as usize][projection as usize];
                let arch = forward.stream().device().info().arch;
                let matmul = lying.variant(arch, way, paths::epilogue(projection));
                let matmul = matmul.and_then(|spec| self.matmuls.get(&spec));
                let slot = slot.and_then(|slot| self.slots.get(usize::from(slot))?[projection as usize].as_ref());
                let Mlp { lane, normed, gate, up, active, hidden, .. } = forward.mlp(work.rows())?;
                let lane = match stream.checked_sub(1) {
                    None => lane,
                    Some(at) => {
                        let have = self.lanes.len() as u64;
                        let lane = self.lanes.get_mut(usize::from(at));
                        lane.ok_or(Refusal::Range { at: stream.into(), len: 1, have })?
                    }
                };
                let (x, y) = match projection {
                    Projection::Gate => (normed, gate),
                    Projection::Up => (normed, up),
                    Projection::Down => (active.as_ref(), hidden),
                };
                multiply(lane, (way.path, stored), (matmul, slot), x, y, projection)
            }
            job => forward.job(weights, &job, work),
        }
    }

    fn stored<'a>(&self, weights: &'a Weights, layer: u32, projection: Projection) -> Result<&'a Stored, DeviceError> {
        let have = self.layers.len() as u64;
        let mlp = weights.layers.get(layer as usize).and_then(|layer| layer.mlp.stored());
        let mlp = mlp.ok_or(Refusal::Range { at: layer.into(), len: 1, have })?;
        Ok(&mlp.parts[projection as usize])
    }

    /// Waits for the runner's own streams, and says whether one of them left something out.
    ///
    /// # Errors
    /// As for [`Lane::synchronize`].
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        let all: Vec<_> = self.lanes.iter_mut().map(Lane::synchronize).collect();
        all.into_iter().collect()
    }

    /// Waits for the runner's own streams.
    pub fn wait(&self) {
        // An error was told before, or is of no use any more.
        self.lanes.iter().for_each(|lane| _ = lane.stream().synchronize());
    }
}

/// The programs of an engine: one for each batch that steps are recorded for, and one for chunks of a prompt.
pub(crate) struct Programs {
    pub runner: Runner,
    steps: Vec<(u32, Bound)>,
    chunk: Bound,
}

impl Programs {
    /// Makes all of them: of `set` where it has a setting for a batch that this device can run, else of best guesses. A
    /// plan may be anybody's, and costs nothing but time.
    ///
    /// # Errors
    /// What fails on the way.
    pub fn new(
        kernels: &KernelSet,
        stream: &Stream,
        weights: &Weights,
        (batches, chunk): (&[u32], u32),
        set: &dyn Fn(u32) -> Option<Setting>,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        let mut runner = Runner::new(kernels, stream, weights, progress)?;
        let device = kernels.device();
        let guess = |m| Setting::guess(runner.layers(), device.info().arch, m, device.info().sms);
        let mut steps = Vec::new();
        for &rows in batches {
            let of_set = set(rows).and_then(|setting| Bound::new(runner.layers(), &setting, rows, device).ok());
            let bound = of_set.map_or_else(|| Bound::new(runner.layers(), &guess(rows), rows, device), Ok)?;
            steps.push((rows, bound));
        }
        let chunk = Bound::new(runner.layers(), &guess(chunk), chunk, device)?;
        for bound in steps.iter().map(|(_, bound)| bound).chain([&chunk]) {
            runner.reserve(bound, device)?;
        }
        Ok(Self { runner, steps, chunk })
    }

    /// Enqueues a step of `rows` rows.
    ///
    /// # Errors
    /// There is no program for so many rows, or the driver's refusal.
    pub fn step(&mut self, forward: &mut Forward, weights: &Weights, rows: u32) -> Result<(), DeviceError> {
        let largest = self.steps.last().map_or(0, |(rows, _)| *rows);
        let bound = self.steps.iter().find(|(of, _)| *of == rows).map(|(_, bound)| bound);
        let bound = bound.ok_or(Refusal::Batch { m: rows, max_batch: largest })?;
        self.runner.run(bound, forward, weights, Work::Step { rows })
    }

    /// Enqueues the next tokens of a prompt, from position `start` on.
    ///
    /// # Errors
    /// As for [`Forward::chunk`].
    pub fn chunk(
        &mut self,
        forward: &mut Forward,
        weights: &Weights,
        ids: &[u32],
        start: u32,
    ) -> Result<(), DeviceError> {
        let rows = forward.set_prompt(ids)?;
        self.runner.run(&self.chunk, forward, weights, Work::Chunk { rows, start })
    }

    /// Runs steps of a batch by another program from now on.
    pub fn replace(&mut self, rows: u32, bound: Bound) {
        match self.steps.iter_mut().find(|(of, _)| *of == rows) {
            Some((_, own)) => *own = bound,
            None => self.steps.push((rows, bound)),
        }
    }
}

/// The layers of a model whose weights lie as they are stored.
pub(crate) fn lying(weights: &Weights) -> Vec<LyingMlp> {
    weights.layers.iter().filter_map(|layer| Some(layer.mlp.stored()?.lying())).collect()
}

fn mark(marks: &[Mark], event: u32) -> Result<&Mark, Refusal> {
    marks.get(event as usize).ok_or(Refusal::Range { at: event.into(), len: 1, have: marks.len() as u64 })
}

/// A program that was built for other weights.
fn other_weights(takes: &'static str) -> DeviceError {
    Refusal::Source { takes, got: "weights of another path" }.into()
}

/// Enqueues a product by a path.
fn multiply(
    lane: &mut Lane,
    (path, weights): (Path, &Stored),
    (matmul, slot): (Option<&Matmul>, Option<&Slot>),
    x: MatrixRef<'_>,
    y: MatrixMut<'_>,
    projection: Projection,
) -> Result<(), DeviceError> {
    let epilogue = paths::epilogue(projection);
    let add = projection == Projection::Down;
    match (path, weights, matmul, slot) {
        (Path::Raw, Stored::Raw(matrix), ..) => lane.cublas()?.matmul(x, DeviceMatrix::view(matrix), y, add),
        (Path::Raw | Path::Packed, Stored::Linear(linear), ..) => linear.enqueue(lane, x, y, epilogue),
        (Path::Palette, Stored::Palette(tensor), Some(matmul), _) => matmul.palette(lane, x, tensor.view(), y),
        (Path::FullDecode, Stored::Huffman(tensor), _, Some(slot)) => {
            let (n, k) = (tensor.grid().rows() as u32, tensor.grid().cols() as u32);
            lane.cublas()?.matmul(x, MatrixRef::new(&slot.full, n, k, k.into())?, y, add)
        }
        (Path::Exponents, Stored::Huffman(tensor), Some(matmul), Some(slot)) => {
            matmul.exponent(lane, x, tensor.as_exponent(&slot.exponents), y)
        }
        (Path::Transcode, Stored::Huffman(tensor), Some(matmul), Some(slot)) => {
            matmul.palette(lane, x, tensor.as_palette(&slot.indices), y)
        }
        _ => Err(other_weights(path.name())),
    }
}
