//! Thousands of launches of every kernel under load: the same input must give the same bits, and the first ones must be
//! right.
//!
//! A race between a kernel and the copy engine shows in a few of a hundred launches, only while many loads are in
//! flight, and in no sanitizer. So: every catalogued variant, on matrices of small and odd size too, at and beside each
//! edge of its batch tile, launched [`StressOptions::launches`] times while another stream keeps memory and shared
//! memory busy. Outputs are poisoned before each launch and compared on the device with those of the first, which are
//! held against double precision (products) or the CPU's bytes (everything else).
//!
//! ```text
//! reset [runs] --> launch run 0, 1, .. (directly, later as one graph) --> compare each with the first      stream 1
//! load, load, load, ...                                                                                   stream 2, from another thread
//! ```

mod activations;
mod attention;
mod experts;
mod rivals;

use std::{
    cell::RefCell,
    ffi::c_void,
    fmt,
    sync::Arc,
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use rayon::prelude::*;
use serde::Serialize;
use unweight_codegen::{
    VariantSpec,
    abi::{DecodeCompactArgs, DecodeHuffmanArgs, RepackArgs},
    family::Instruction,
    plan::{GemmShape, Plan},
    spec::{Arch, DecodeCompactStage, DecodeElement, DecodeOutput, Epilogue, Op, RepackStage, WeightSource, catalog},
};
use unweight_format::{
    CodeLimit, Float, FloatMatrix, Histogram, Matrix, TileGrid,
    raw::{
        PackedTensor, PaletteTensor, TileMetadata, compact, exponents,
        huffman::{self, CodedExponents},
        packed, palette,
    },
    testing::{Random, float_weights},
};

use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceError, DeviceInfo, DeviceMatrix, DevicePacked, ExecContext, Graph, KernelSet,
    MatrixMut, MatrixRef, Stream,
    env::Env,
    raw::{
        device::{module::LoadedKernel, raw::RawKernel},
        jit::{cache::KernelCache, compiler::CompileRequest},
        ops::{
            decode_compact,
            encode_compact::{CompressError, Compressor},
            encode_huffman::GpuEncoder,
            gemm_compact::CompactGemm,
            gemm_packed::PackedGemm,
            gemm_recon::Matmul,
            repack::Packer,
        },
        weight::{DeviceCompact, DeviceHuffman, DevicePalette},
    },
};

use crate::{
    data::{halves, normal_bf16},
    error::BenchError,
    options::options,
};

/// A fault put into the kernels on purpose, to see that the run finds what it is there to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Plant {
    /// A warp refills its slot without a fence, while its own loads may be in flight.
    UnfencedRefill,
}

options! {
    /// What is run.
    StressOptions {
        /// Launches of each variant on each problem.
        launches: u32 = 2000,
        /// Only variants whose name contains one of these; empty: all.
        only: Vec<String> = Vec::new(),
        /// Keep memory and shared memory busy from another stream.
        load: bool = true,
        /// The variants that need no copy engine ([`catalog::asynchronous`]), and nothing else.
        asynchronous: bool = false,
        /// A fault to be found.
        plant: Option<Plant> = None,
    }
}

impl StressOptions {
    /// What is run on an architecture.
    fn variants(&self, arch: Arch) -> Vec<VariantSpec> {
        let all = if self.asynchronous { catalog::asynchronous(arch).collect() } else { catalog::all(arch) };
        let planned = all.into_iter().filter(|spec| Plan::new(spec).is_ok());
        planned.filter(|spec| self.wants(spec.name().as_str())).collect()
    }

    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part.as_str()))
    }
}

/// What a stress run found.
#[derive(Clone, Debug, Serialize)]
pub struct StressReport {
    /// The device.
    pub device: DeviceInfo,
    /// What was asked for.
    pub options: StressOptions,
    /// Launches in all.
    pub launches: u64,
    /// Launches whose output was not that of the first.
    pub differing: u64,
    /// Problems whose first output was wrong.
    pub wrong: u64,
    /// Seconds.
    pub seconds: f64,
    /// A row for each variant and problem.
    pub rows: Vec<StressRow>,
}

/// A variant on a problem.
#[derive(Clone, Debug, Serialize)]
pub struct StressRow {
    /// Name of the variant, or of the encoder.
    pub variant: String,
    /// Batch rows; 0 without a batch.
    pub m: u32,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// Launches.
    pub launches: u32,
    /// Of them, those whose output was not that of the first.
    pub differing: u32,
    /// What is wrong with the first output.
    pub wrong: Option<String>,
}

impl StressReport {
    /// Whether every launch of every variant gave the right bits.
    pub fn is_clean(&self) -> bool {
        self.differing == 0 && self.wrong == 0
    }
}

impl StressRow {
    /// Whether every launch gave the right bits.
    pub fn is_clean(&self) -> bool {
        self.differing == 0 && self.wrong.is_none()
    }
}

impl fmt::Display for StressRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { variant, m, n, k, launches, differing, wrong } = self;
        write!(f, "{variant}  m = {m}, n = {n}, k = {k}: {differing} of {launches} launches differ")?;
        match wrong {
            Some(wrong) => write!(f, "; the first is wrong: {wrong}"),
            None => Ok(()),
        }
    }
}

/// A line for each row that is not clean, and the sums.
impl fmt::Display for StressReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in self.rows.iter().filter(|row| !row.is_clean()) {
            writeln!(f, "{row}")?;
        }
        let variants: std::collections::BTreeSet<&str> = self.rows.iter().map(|row| row.variant.as_str()).collect();
        let (device, problems, launches) = (&self.device.name, self.rows.len(), self.launches);
        writeln!(
            f,
            "{device}: {} variants, {problems} problems, {launches} launches in {:.0} s: {} differ, {} first outputs wrong",
            variants.len(),
            self.seconds,
            self.differing,
            self.wrong
        )
    }
}

/// Runs everything that `options` ask for. `progress` hears a line for each family and shape.
///
/// # Errors
/// A kernel cannot be made or launched. A wrong output is no error: the report says it.
pub fn stress(
    kernels: &KernelSet,
    env: &Env,
    options: &StressOptions,
    progress: &dyn Fn(&str),
) -> Result<StressReport, BenchError> {
    let start = Instant::now();
    let stream = kernels.device().stream()?;
    let run = Run {
        kernels,
        cache: KernelCache::open(env),
        threads: env.jit_threads,
        stream: &stream,
        ctx: RefCell::new(ExecContext::new(&stream, ContextSize::default())?),
        options,
    };
    let load = Load::new(&run)?;
    let stop = AtomicBool::new(false);
    let rows = std::thread::scope(|scope| {
        let loading = options.load.then(|| scope.spawn(|| load.keep_busy(&stop)));
        let rows = run.all(progress);
        stop.store(true, Ordering::Relaxed);
        if let Some(loading) = loading {
            loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        rows
    })?;
    Ok(StressReport {
        device: kernels.device().info().clone(),
        options: options.clone(),
        launches: rows.iter().map(|row| u64::from(row.launches)).sum(),
        differing: rows.iter().map(|row| u64::from(row.differing)).sum(),
        wrong: rows.iter().filter(|row| row.wrong.is_some()).count() as u64,
        seconds: start.elapsed().as_secs_f64(),
        rows,
    })
}

/// Launches between two comparisons. More are in flight at once than the device holds.
const RUNS: u32 = 16;
/// Of a problem's launches, those that are not replayed from a graph: one in this many.
const DIRECT: u32 = 4;

/// `[n, k]` of the weights: one tile; few and many columns; k and v projections of small models; odd numbers of tiles,
/// which no block shape divides.
const SHAPES: [(u32, u32); 6] = [(64, 64), (256, 4096), (1024, 4096), (192, 320), (1088, 704), (4096, 1024)];

struct Run<'a> {
    kernels: &'a KernelSet,
    cache: KernelCache,
    threads: usize,
    stream: &'a Stream,
    /// Of that stream.
    ctx: RefCell<ExecContext>,
    options: &'a StressOptions,
}

type Launch<'a> = Box<dyn Fn(u64) -> Result<(), DeviceError> + 'a>;
type Check<'a> = Box<dyn Fn(&[u8]) -> Option<String> + 'a>;

/// Something to be launched over and over.
struct Subject<'a> {
    name: String,
    shape: GemmShape,
    /// `RUNS` outputs of `bytes`, one behind the other.
    outputs: DeviceBuffer<u8>,
    bytes: usize,
    /// What the outputs hold before a launch that adds to them; without it they are poisoned.
    before: Option<DeviceBuffer<u8>>,
    /// Enqueues a launch whose output is at this address.
    launch: Launch<'a>,
    /// What is wrong with an output.
    check: Check<'a>,
}

impl Run<'_> {
    fn all(&self, progress: &dyn Fn(&str)) -> Result<Vec<StressRow>, BenchError> {
        let compare = self.raw("uw_stress_compare", "UW_COMPARE")?;
        let specs = self.options.variants(self.kernels.device().info().arch);
        let kernels = self.loaded(&specs)?;
        let rivals = self.load_rivals()?;
        let mut rows = Vec::new();
        for shape in SHAPES {
            let start = Instant::now();
            let before = rows.len();
            self.shape(shape, (&kernels, rivals.as_ref()), &compare, &mut rows, progress)?;
            let bad = rows[before..].iter().filter(|row| !row.is_clean()).count();
            let (problems, seconds) = (rows.len() - before, start.elapsed().as_secs_f64());
            progress(&format!("{} x {}: {problems} problems, {bad} not clean, {seconds:.0} s", shape.0, shape.1));
        }
        rows.extend(self.encoders()?);
        rows.extend(self.compressor()?);
        Ok(rows)
    }

    /// A kernel of `stress.cu`.
    fn raw(&self, name: &str, define: &str) -> Result<RawKernel, BenchError> {
        let request = CompileRequest {
            name: name.to_owned(),
            source: include_str!("stress.cu").to_owned(),
            headers: Vec::new(),
            options: vec![format!("-D{define}")],
            arch: self.kernels.device().info().arch.compiler_name().to_owned(),
        };
        Ok(RawKernel::load(self.kernels.device(), &self.cache.get(&request).map_err(DeviceError::from)?)?)
    }

    /// The kernels of these variants, in their order, with the fault where one is to be planted.
    fn loaded(&self, specs: &[VariantSpec]) -> Result<Vec<Arc<LoadedKernel>>, BenchError> {
        let mut requests =
            specs.iter().map(CompileRequest::render).collect::<Result<Vec<_>, _>>().map_err(DeviceError::from)?;
        if let Some(Plant::UnfencedRefill) = self.options.plant {
            let clean = requests.clone();
            // Variants without a copy engine have the header, and do not call what it is taken out of.
            let copied = specs.iter().map(|spec| !spec.op.instructions().has(Instruction::AsyncCopy));
            for (request, _) in requests.iter_mut().zip(copied).filter(|(_, copied)| *copied) {
                take_out_the_fence(request);
            }
            if requests == clean {
                return Err(BenchError::NoFence);
            }
        }
        let artifacts = self.cache.compile_all(&requests, self.threads, &|_| {}).map_err(DeviceError::from)?;
        specs
            .iter()
            .zip(&artifacts)
            .map(|(spec, artifact)| Ok(Arc::new(LoadedKernel::load(self.kernels.device(), spec, artifact)?)))
            .collect()
    }

    fn shape(
        &self,
        shape: (u32, u32),
        (kernels, rivals): (&[Arc<LoadedKernel>], Option<&rivals::Rivals>),
        compare: &RawKernel,
        rows: &mut Vec<StressRow>,
        progress: &dyn Fn(&str),
    ) -> Result<(), BenchError> {
        let mut add = |row: StressRow| {
            if !row.is_clean() {
                progress(&row.to_string());
            }
            rows.push(row);
        };
        let weights = Weights::new(self.stream, shape)?;
        for kernel in kernels {
            let spec = kernel.spec();
            match spec.op {
                Op::GemmMma(_) | Op::GemmWgmma(_) | Op::GemmRecon(_) | Op::GemmCompact(_) => {
                    for m in batches(spec) {
                        let shape = GemmShape { m, n: shape.0, k: shape.1 };
                        if !takes(spec, shape, self.kernels.device().info().sms) {
                            continue;
                        }
                        let subject = match spec.op {
                            Op::GemmRecon(_) => self.recon(kernel, &weights, shape)?,
                            Op::GemmCompact(_) => match &weights.compact {
                                Some(tensor) => self.compact(kernel, (&weights, tensor), shape)?,
                                None => continue,
                            },
                            _ => self.packed(kernel, &weights, shape)?,
                        };
                        add(self.subject(subject, compare)?);
                    }
                }
                Op::DecodeHuffman(_) => {
                    let subject = self.decode(kernel, &weights)?;
                    add(self.subject(subject, compare)?);
                }
                Op::Repack(_) => {
                    let subject = self.repack(kernel, &weights)?;
                    add(self.subject(subject, compare)?);
                }
                Op::DecodeCompact(_) => {
                    let subject = self.transcode(kernel, &weights)?;
                    add(self.subject(subject, compare)?);
                }
                Op::Embed(_) | Op::Norm(_) | Op::Rope(_) | Op::SiluMul(_) | Op::Sample(_) => {
                    for subject in self.activations(kernel, &weights)? {
                        add(self.subject(subject, compare)?);
                    }
                }
                Op::GemmGrouped(op) => {
                    for tokens in batches(spec) {
                        let subject = self.grouped(kernel, op, &weights, tokens)?;
                        add(self.subject(subject, compare)?);
                    }
                }
                Op::Route(op) => {
                    for subject in self.route(kernel, op, &weights)? {
                        add(self.subject(subject, compare)?);
                    }
                }
                // One depends on the other: run together, below.
                Op::EncodeHuffman(_) | Op::EncodeCompact(_) => {}
                // Heads say its shapes, not weights: once.
                Op::Attention(_) if shape == SHAPES[0] => {
                    for subject in self.attention(kernel)? {
                        add(self.subject(subject, compare)?);
                    }
                }
                Op::Attention(_) => {}
            }
        }
        if let Some(rivals) = rivals {
            for subject in self.rivals(rivals, &weights)? {
                add(self.subject(subject?, compare)?);
            }
        }
        Ok(())
    }

    /// Resets, launches and compares until enough was launched.
    fn subject(&self, mut subject: Subject<'_>, compare: &RawKernel) -> Result<StressRow, BenchError> {
        let stream = self.stream;
        let Subject { name, shape, outputs, bytes, before, launch, check } = &mut subject;
        let (bytes, base) = (*bytes, outputs.address());
        assert!(bytes.is_multiple_of(16), "{name}: outputs are compared in pieces of 16 bytes");
        let address = |run: u32| base + u64::from(run) * bytes as u64;
        outputs.fill_padding(stream, GUARD)?;
        let reset = |outputs: &mut DeviceBuffer<u8>| match &*before {
            Some(before) => outputs.copy_from(stream, before),
            None => outputs.fill_bytes(stream, 0xff),
        };
        reset(outputs)?;
        (0..RUNS).try_for_each(|run| launch(address(run)))?;
        let first = outputs.read(stream, 0, bytes)?;
        let expected = DeviceBuffer::from_host(stream, &first)?;
        let mut wrong = check(&first);

        let differing = DeviceBuffer::<u32>::zeroed(stream, 1)?;
        let hold = || -> Result<(), DeviceError> {
            let (mut runs, mut want) = (base, expected.address());
            let (mut pieces, mut count) = (bytes as u64 / 16, differing.address());
            let mut arguments = [
                (&raw mut runs).cast::<c_void>(),
                (&raw mut want).cast(),
                (&raw mut pieces).cast(),
                (&raw mut count).cast(),
            ];
            // SAFETY: `RUNS` outputs and the expected one have `bytes` each; the counter is one u32. All of them live
            // through the wait below.
            unsafe { compare.launch(stream, (RUNS, 1024), 0, &mut arguments) }
        };
        hold()?;
        let rounds = self.options.launches.div_ceil(RUNS).max(2);
        let graph: Graph = stream.capture(|| (0..RUNS).try_for_each(|run| launch(address(run))))?;
        for round in 1..rounds {
            reset(outputs)?;
            if round % DIRECT == 0 {
                (0..RUNS).try_for_each(|run| launch(address(run)))?;
            } else {
                // SAFETY: all that the launches name lives through the wait below.
                unsafe { graph.launch() }?;
            }
            hold()?;
        }
        let differing = differing.read(stream, 0, 1)?[0];
        if outputs.padding(stream)?.iter().any(|byte| *byte != GUARD) {
            wrong = Some("it wrote past the end of its output".to_owned());
        }
        let GemmShape { m, n, k } = *shape;
        Ok(StressRow { variant: name.clone(), m, n, k, launches: rounds * RUNS, differing, wrong })
    }

    fn packed<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        shape: GemmShape,
    ) -> Result<Subject<'a>, BenchError> {
        let (escapes, epilogue) = match kernel.spec().op {
            Op::GemmMma(op) => (op.escapes, op.epilogue),
            Op::GemmWgmma(op) => (op.escapes, op.epilogue),
            _ => unreachable!("the caller has matched the family"),
        };
        let (tensor, exact) = if escapes {
            (&weights.with_escapes, &weights.exact)
        } else {
            (&weights.without_escapes, &weights.exact_without_escapes)
        };
        let columns = if epilogue == Epilogue::SiluMul { shape.n / 2 } else { shape.n };
        let matmul = PackedGemm::new(kernel.clone())?;
        self.ctx.borrow_mut().reserve(matmul.context_size(shape.m, &tensor.device))?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, shape.m, shape.k, shape.k.into())?;
            // SAFETY: one of the outputs of `product`, of this size, which lives until the stream was waited for.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, shape.m, columns, columns.into()) }?;
            matmul.enqueue(&mut self.ctx.borrow_mut(), x, &tensor.device, y)
        };
        self.product(kernel, (shape, columns), epilogue, (weights, exact), Box::new(launch))
    }

    fn compact<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        (weights, tensor): (&'a Weights, &'a DeviceCompact),
        shape: GemmShape,
    ) -> Result<Subject<'a>, BenchError> {
        let Op::GemmCompact(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        let columns = if spec.epilogue == Epilogue::SiluMul { shape.n / 2 } else { shape.n };
        let matmul = CompactGemm::new(kernel.clone())?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, shape.m, shape.k, shape.k.into())?;
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, shape.m, columns, columns.into()) }?;
            matmul.enqueue(self.stream, x, tensor, y)
        };
        self.product(kernel, (shape, columns), spec.epilogue, (weights, &weights.exact), Box::new(launch))
    }

    fn recon<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        shape: GemmShape,
    ) -> Result<Subject<'a>, BenchError> {
        let Op::GemmRecon(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        let budget = if let WeightSource::Palette { verbatim } = spec.source { verbatim.get() } else { 64 };
        let (source, exact) = if budget < weights.few_rows.max_verbatim_rows {
            (&weights.no_rows, &weights.exact_without_escapes)
        } else {
            (&weights.few_rows, &weights.exact_few_rows)
        };
        let matmul = Matmul::new(kernel.clone())?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, shape.m, shape.k, shape.k.into())?;
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, shape.m, shape.n, shape.n.into()) }?;
            let ctx = &mut self.ctx.borrow_mut();
            match spec.source {
                WeightSource::Exponent => matmul.exponent(ctx, x, source.huffman.as_exponent(&source.exponents), y),
                WeightSource::Palette { .. } => matmul.palette(ctx, x, source.palette.view(), y),
            }
        };
        self.product(kernel, (shape, shape.n), spec.epilogue, (weights, exact), Box::new(launch))
    }

    fn product<'a>(
        &'a self,
        kernel: &LoadedKernel,
        (shape, columns): (GemmShape, u32),
        epilogue: Epilogue,
        (weights, exact): (&'a Weights, &'a [(f64, f64)]),
        launch: Launch<'a>,
    ) -> Result<Subject<'a>, BenchError> {
        let elements = shape.m as usize * columns as usize;
        let bytes = elements * 2;
        let before = (epilogue == Epilogue::StoreAdd)
            .then(|| DeviceBuffer::from_host(self.stream, &weights.old[..bytes].repeat(RUNS as usize)))
            .transpose()?;
        let check = move |y: &[u8]| mismatch(y, shape, epilogue, exact, &weights.old);
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape,
            outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
            bytes,
            before,
            launch,
            check: Box::new(check),
        })
    }

    fn decode<'a>(&'a self, kernel: &'a LoadedKernel, weights: &'a Weights) -> Result<Subject<'a>, BenchError> {
        let Op::DecodeHuffman(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        let limit = CodeLimit::new(spec.code_limit.get())?;
        if spec.element != DecodeElement::Bf16 {
            let (float, (n, k)) = (spec.element.float(), weights.shape);
            let (n, k) = (n as usize, k as usize);
            let bytes = with_any_bits(float, n * k);
            let tensor = exponents::encode(FloatMatrix::new(float, &bytes, n, k)?, limit)?;
            // Only F16 has both.
            let fractions = [tensor.fraction_bytes(), tensor.fraction_bits()].concat();
            let sections = CodedOnDevice::upload(self.stream, &fractions, tensor.exponents())?;
            return self.decoder(kernel, sections, tensor.grid(), (bytes.len(), bytes));
        }
        let tensor = huffman::encode(weights.matrix()?, limit)?;
        let (bytes, expected) = match spec.output {
            DecodeOutput::Full => (weights.bytes.len(), weights.bytes.clone()),
            // Indices of verbatim rows are 0, and the shapes here have no padding.
            DecodeOutput::Palette => {
                let palette = palette::encode_with(weights.matrix()?, tensor.code())?;
                (palette.palette_index().len(), palette.palette_index().to_vec())
            }
            DecodeOutput::Exponent => (weights.bytes.len() / 2, exponents_by_tile(weights.matrix()?)),
        };
        let sections = CodedOnDevice::upload(self.stream, tensor.sign_mantissa(), tensor.exponents())?;
        self.decoder(kernel, sections, tensor.grid(), (bytes, expected))
    }

    /// A decoder whose output has so many bytes, and these.
    fn decoder<'a>(
        &'a self,
        kernel: &'a LoadedKernel,
        sections: CodedOnDevice,
        grid: TileGrid,
        (bytes, expected): (usize, Vec<u8>),
    ) -> Result<Subject<'a>, BenchError> {
        let fault = DeviceBuffer::<u32>::zeroed(self.stream, 1)?;
        let args = sections.args(grid, fault.address());
        let shape = GemmShape { m: 0, n: args.n, k: args.k };
        let stream = self.stream;
        let launch = move |output: u64| {
            let _kept = (&sections, &fault);
            // SAFETY: as above.
            unsafe { kernel.launch(stream, shape, &DecodeHuffmanArgs { output, ..args }) }
        };
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape,
            outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
            bytes,
            before: None,
            launch: Box::new(launch),
            check: Box::new(move |got| differs(got, &expected)),
        })
    }

    /// Each stage over buffers of its own: of `pack` the tiles are looked at, of `lists` the lists, of `unpack` the
    /// weights.
    fn repack<'a>(&'a self, kernel: &'a LoadedKernel, weights: &'a Weights) -> Result<Subject<'a>, BenchError> {
        let Op::Repack(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        let stream = self.stream;
        let tensor = &weights.with_escapes;
        let (n, k) = weights.shape;
        let tiles = (n / 64) as usize * (k / 64) as usize;
        let whole = DeviceBuffer::from_host(stream, &weights.bytes)?;
        // What pack leaves for lists: of a row block with a list the number of its records. Made once, by pack itself.
        let heads = DeviceBuffer::<u32>::zeroed(stream, tiles * 4)?;
        let group_words = DeviceBuffer::<u32>::zeroed(stream, tiles.div_ceil(16))?;
        let inexact = DeviceBuffer::<u64>::zeroed(stream, 1)?;
        let scratch = DeviceBuffer::<u8>::zeroed(stream, tiles * packed::TILE_BYTES)?;
        let args = RepackArgs {
            weights: whole.address(),
            packed: scratch.address(),
            escape_heads: heads.address(),
            escapes: tensor.device.escapes().address(),
            group_words: group_words.address(),
            inexact: inexact.address(),
            escape_words: tensor.device.escapes().len() as u32,
            base: u32::from(tensor.host.window().base()),
            n,
            k,
            tile_rows: n / 64,
            tile_cols: k / 64,
        };
        let shape = GemmShape { m: 0, n, k };
        let (bytes, expected): (usize, Vec<u8>) = match spec.stage {
            RepackStage::Pack => (tiles * packed::TILE_BYTES, tensor.host.packed().to_vec()),
            RepackStage::Lists => {
                // Compared in pieces of 16 bytes.
                let mut words = tensor.host.escapes().to_vec();
                words.resize(words.len().next_multiple_of(16), 0);
                (words.len(), words)
            }
            RepackStage::Unpack => (weights.bytes.len(), weights.bytes.clone()),
        };
        if spec.stage == RepackStage::Lists {
            let arch = self.kernels.device().info().arch;
            let pack = self.kernels.get(&VariantSpec::repack(arch, RepackStage::Pack))?;
            // SAFETY: the buffers above have the sizes that the shape asks for.
            unsafe { pack.launch(stream, shape, &args) }?;
        }
        let counted = heads.duplicate(stream)?;
        let heads = RefCell::new(heads);
        let launch = move |output: u64| {
            let _kept = (&whole, &heads, &group_words, &inexact, &scratch, &counted);
            let args = match spec.stage {
                RepackStage::Pack => RepackArgs { packed: output, ..args },
                RepackStage::Lists => RepackArgs { escapes: output, ..args },
                RepackStage::Unpack => RepackArgs {
                    weights: output,
                    packed: tensor.device.packed().address(),
                    escape_heads: tensor.device.escape_heads().address(),
                    ..args
                },
            };
            if spec.stage == RepackStage::Lists {
                // `lists` turns numbers of records into indices, so it runs once on each set of heads.
                heads.borrow_mut().copy_from(stream, &counted)?;
            }
            // SAFETY: as above.
            unsafe { kernel.launch(stream, shape, &args) }
        };
        // Behind the last list nothing is written.
        let before = (spec.stage == RepackStage::Lists)
            .then(|| DeviceBuffer::zeroed(stream, bytes * RUNS as usize))
            .transpose()?;
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape,
            outputs: DeviceBuffer::zeroed(stream, bytes * RUNS as usize)?,
            bytes,
            before,
            launch: Box::new(launch),
            check: Box::new(move |got| differs(got, &expected)),
        })
    }

    /// Each stage over buffers of its own, as those of `repack`; trained weights with zeros among them.
    fn transcode<'a>(&'a self, kernel: &'a LoadedKernel, weights: &'a Weights) -> Result<Subject<'a>, BenchError> {
        let Op::DecodeCompact(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        let stream = self.stream;
        let (n, k) = weights.shape;
        let mut bytes = normal_bf16(n as usize * k as usize, 0.02, u64::from(n) << 32 | u64::from(k));
        bytes.chunks_exact_mut(2).step_by(499).for_each(|element| element.fill(0));
        let (matrix, histogram) = (Matrix::new(&bytes, n as usize, k as usize)?, Histogram::of(&bytes));
        let host = compact::encode(matrix, &histogram).map_err(|why| BenchError::Uncompact { n, k, why })?;
        let packed = packed::pack(matrix, &histogram).map_err(|why| BenchError::Unpackable { n, k, why })?;
        let tensor = DeviceCompact::upload(stream, &host)?;
        let tiles = host.grid().tiles();
        let heads = DeviceBuffer::<u32>::zeroed(stream, tiles * 4)?;
        let group_words = DeviceBuffer::<u32>::zeroed(stream, tiles.div_ceil(16))?;
        let inexact = DeviceBuffer::<u64>::zeroed(stream, 1)?;
        let scratch = DeviceBuffer::<u8>::zeroed(stream, tiles * packed::TILE_BYTES)?;
        let args = DecodeCompactArgs {
            packed: scratch.address(),
            escape_heads: heads.address(),
            group_words: group_words.address(),
            inexact: inexact.address(),
            base: u32::from(packed.window().base()),
            escape_words: (packed.escapes().len() / 4) as u32,
            ..decode_compact::args(&tensor)
        };
        let shape = GemmShape { m: 0, n, k };
        let lists = spec.stage == DecodeCompactStage::Lists;
        let expected: Vec<u8> = match spec.stage {
            DecodeCompactStage::Full => bytes,
            DecodeCompactStage::Packed => packed.packed().to_vec(),
            DecodeCompactStage::Lists => {
                // Compared in pieces of 16 bytes.
                let mut words = packed.escapes().to_vec();
                words.resize(words.len().next_multiple_of(16), 0);
                words
            }
        };
        if lists {
            let arch = self.kernels.device().info().arch;
            let first = self.kernels.get(&VariantSpec::decode_compact(arch, DecodeCompactStage::Packed))?;
            // SAFETY: the buffers above have the sizes that the shape asks for.
            unsafe { first.launch(stream, shape, &args) }?;
        }
        let counted = heads.duplicate(stream)?;
        let heads = RefCell::new(heads);
        let launch = move |output: u64| {
            let _kept = (&tensor, &heads, &group_words, &inexact, &scratch, &counted);
            let args = match spec.stage {
                DecodeCompactStage::Full => DecodeCompactArgs { weights: output, ..args },
                DecodeCompactStage::Packed => DecodeCompactArgs { packed: output, ..args },
                DecodeCompactStage::Lists => DecodeCompactArgs { escapes: output, ..args },
            };
            if lists {
                // `lists` turns numbers of records into indices, so it runs once on each set of heads.
                heads.borrow_mut().copy_from(stream, &counted)?;
            }
            // SAFETY: as above.
            unsafe { kernel.launch(stream, shape, &args) }
        };
        let bytes = expected.len();
        // Behind the last list nothing is written.
        let before = lists.then(|| DeviceBuffer::zeroed(stream, bytes * RUNS as usize)).transpose()?;
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape,
            outputs: DeviceBuffer::zeroed(stream, bytes * RUNS as usize)?,
            bytes,
            before,
            launch: Box::new(launch),
            check: Box::new(move |got| differs(got, &expected)),
        })
    }

    /// A family's name on this device.
    fn family(&self, family: &str) -> String {
        format!("uw_{}_{family}", self.kernels.device().info().arch.tag())
    }

    /// All stages of the encoder of the compact form together, with escapes of every kind, compared on the host.
    fn compressor(&self) -> Result<Vec<StressRow>, BenchError> {
        let variant = format!("{}, all stages", self.family("encode_compact"));
        if !self.options.wants(&variant) {
            return Ok(Vec::new());
        }
        let (compressor, mut packer) = (Compressor::of(self.kernels)?, Packer::new(self.stream, self.kernels)?);
        let mut rows = Vec::new();
        for (n, k) in [(64u32, 64u32), (192, 576), (1024, 4096)] {
            let mut bytes = normal_bf16(n as usize * k as usize, 0.02, 78);
            // Zeros, infinities and neighbours of the window.
            bytes.chunks_exact_mut(2).step_by(997).for_each(|element| element.fill(0));
            bytes.chunks_exact_mut(2).skip(7).step_by(4099).for_each(|element| element.copy_from_slice(&[0x80, 0x7f]));
            let matrix = Matrix::new(&bytes, n as usize, k as usize)?;
            let host =
                compact::encode(matrix, &Histogram::of(&bytes)).map_err(|why| BenchError::Uncompact { n, k, why })?;
            let weights = DeviceMatrix::upload(self.stream, matrix)?;
            let mut differing = 0;
            for _ in 0..self.options.launches.max(1) {
                let made = match compressor.encode(&mut packer, weights.view()) {
                    Ok(made) => made.download(self.stream)?,
                    Err(CompressError::Device(error)) => return Err(error.into()),
                    Err(CompressError::Uncompact(why)) => return Err(BenchError::Uncompact { n, k, why }),
                };
                differing += u32::from(made != host);
            }
            let (variant, launches) = (variant.clone(), self.options.launches);
            rows.push(StressRow { variant, m: 0, n, k, launches, differing, wrong: None });
        }
        Ok(rows)
    }

    /// All stages of the encoder together, to both forms, compared on the host.
    fn encoders(&self) -> Result<Vec<StressRow>, BenchError> {
        let name = self.family("encode_huffman");
        if !self.options.wants(&name) {
            return Ok(Vec::new());
        }
        let (n, k) = (320u32, 448u32);
        let bytes = normal_bf16(n as usize * k as usize, 0.02, 77);
        let matrix = Matrix::new(&bytes, n as usize, k as usize)?;
        let encoder = GpuEncoder::new(self.kernels, CodeLimit::DEFAULT)?;
        let huffman = huffman::encode(matrix, CodeLimit::DEFAULT)?;
        let palette = palette::encode(matrix, CodeLimit::DEFAULT)?;
        let mut rows = Vec::new();
        for encoding in ["huffman", "palette"] {
            let mut differing = 0;
            for _ in 0..self.options.launches {
                let same = match encoding {
                    "huffman" => encoder.encode(self.stream, matrix)? == huffman,
                    _ => encoder.encode_palette(self.stream, matrix)? == palette,
                };
                differing += u32::from(!same);
            }
            let variant = format!("{name}, all stages to {encoding}");
            rows.push(StressRow { variant, m: 0, n, k, launches: self.options.launches, differing, wrong: None });
        }
        Ok(rows)
    }
}

/// Behind every output.
const GUARD: u8 = 0xa5;

/// Batches at and beside the edges of a variant's batch tile, and one in its third tile.
fn batches(spec: &VariantSpec) -> Vec<u32> {
    let tile = match spec.op {
        Op::GemmMma(op) => op.batch_tile.get(),
        Op::GemmWgmma(op) => op.batch_tile.get(),
        Op::GemmCompact(op) => op.batch_tile.get(),
        Op::GemmGrouped(op) => op.batch_tile.get(),
        // Slots of 64, 128 or 256 rows, as the batch asks.
        _ => return vec![1, 63, 64, 65, 129, 257],
    };
    let mut batches = vec![1, tile - 1, tile, tile + 1, 2 * tile + tile / 2 + 1];
    batches.retain(|m| *m <= ROWS);
    batches
}

/// Whether a variant can compute a problem at all.
fn takes(spec: &VariantSpec, shape: GemmShape, sms: u32) -> bool {
    let divides = match spec.op {
        Op::GemmRecon(op) => shape.n.is_multiple_of(64 * op.n_tiles.get()),
        _ => true,
    };
    divides && Plan::new(spec).is_ok_and(|plan| plan.launch.grid.blocks(shape, sms).is_some_and(|blocks| blocks > 0))
}

/// The largest batch.
const ROWS: u32 = 656;

/// Weights of one shape in every form, inputs, and products in double precision.
struct Weights {
    shape: (u32, u32),
    bytes: Vec<u8>,
    x: DeviceBuffer<u16>,
    /// bf16 that outputs hold before they are added to.
    old: Vec<u8>,
    with_escapes: PackedOnDevice,
    without_escapes: PackedOnDevice,
    /// None of a matrix that is too small for a book, or has too many escapes by chance.
    compact: Option<DeviceCompact>,
    few_rows: ReconOnDevice,
    no_rows: ReconOnDevice,
    /// For each element of Y the product, and the sum of the magnitudes that went into it.
    exact: Vec<(f64, f64)>,
    exact_without_escapes: Vec<(f64, f64)>,
    exact_few_rows: Vec<(f64, f64)>,
}

struct PackedOnDevice {
    host: PackedTensor<Vec<u8>>,
    device: DevicePacked,
}

impl PackedOnDevice {
    fn new(stream: &Stream, bytes: &[u8], (n, k): (u32, u32)) -> Result<Self, BenchError> {
        let matrix = Matrix::new(bytes, n as usize, k as usize)?;
        let host = packed::pack(matrix, &Histogram::of(bytes)).map_err(|why| BenchError::Unpackable { n, k, why })?;
        Ok(Self { device: DevicePacked::upload(stream, &host)?, host })
    }
}

fn compact_on_device(stream: &Stream, bytes: &[u8], (n, k): (u32, u32)) -> Result<Option<DeviceCompact>, BenchError> {
    let host = compact::encode(Matrix::new(bytes, n as usize, k as usize)?, &Histogram::of(bytes)).ok();
    Ok(host.map(|host| DeviceCompact::upload(stream, &host)).transpose()?)
}

/// A palette tensor, and its exponents.
struct ReconOnDevice {
    max_verbatim_rows: u32,
    palette: DevicePalette,
    huffman: DeviceHuffman,
    exponents: DeviceBuffer<u8>,
}

impl ReconOnDevice {
    fn new(stream: &Stream, bytes: &[u8], (n, k): (u32, u32)) -> Result<Self, BenchError> {
        let matrix = Matrix::new(bytes, n as usize, k as usize)?;
        let palette: PaletteTensor<Vec<u8>> = palette::encode(matrix, CodeLimit::DEFAULT)?;
        Ok(Self {
            max_verbatim_rows: palette.max_verbatim_rows(),
            palette: DevicePalette::upload(stream, &palette)?,
            huffman: DeviceHuffman::upload(stream, &huffman::encode(matrix, CodeLimit::DEFAULT)?)?,
            exponents: DeviceBuffer::from_host(stream, &exponents_by_tile(matrix))?,
        })
    }
}

/// Weights of a type, of which one in 700 has any bits.
fn with_any_bits(float: Float, elements: usize) -> Vec<u8> {
    let seed = elements as u64;
    let (mut bytes, mut random) = (float_weights(float, elements, seed), Random::new(seed ^ 0x77));
    for element in bytes.chunks_exact_mut(float.bytes()) {
        if random.below(700) == 0 {
            element.copy_from_slice(&(random.bits() as u32).to_le_bytes()[..float.bytes()]);
        }
    }
    bytes
}

struct CodedOnDevice {
    sign_mantissa: DeviceBuffer<u8>,
    encoded_exp: DeviceBuffer<u32>,
    row_lengths: DeviceBuffer<u8>,
    tile_metadata: DeviceBuffer<TileMetadata>,
    verbatim: DeviceBuffer<u8>,
    palette: DeviceBuffer<u8>,
    code_lengths: DeviceBuffer<u8>,
}

impl CodedOnDevice {
    fn upload(stream: &Stream, sign_mantissa: &[u8], tensor: &CodedExponents<Vec<u8>>) -> Result<Self, BenchError> {
        Ok(Self {
            sign_mantissa: DeviceBuffer::from_host(stream, sign_mantissa)?,
            encoded_exp: DeviceBuffer::from_host(stream, &pods::<u32>(tensor.encoded_exp()))?,
            row_lengths: DeviceBuffer::from_host(stream, tensor.row_lengths())?,
            tile_metadata: DeviceBuffer::from_host(stream, &pods::<TileMetadata>(tensor.tile_metadata()))?,
            verbatim: DeviceBuffer::from_host(stream, tensor.verbatim_exponents())?,
            palette: DeviceBuffer::from_host(stream, &tensor.code().palette().stored())?,
            code_lengths: DeviceBuffer::from_host(stream, &tensor.code().lengths())?,
        })
    }

    fn args(&self, grid: TileGrid, fault: u64) -> DecodeHuffmanArgs {
        DecodeHuffmanArgs {
            sign_mantissa: self.sign_mantissa.address(),
            encoded_exp: self.encoded_exp.address(),
            row_lengths: self.row_lengths.address(),
            tile_metadata: self.tile_metadata.address(),
            verbatim_exponents: self.verbatim.address(),
            palette: self.palette.address(),
            code_lengths: self.code_lengths.address(),
            fault,
            encoded_words: self.encoded_exp.len() as u64,
            verbatim_rows: self.verbatim.len() as u32 / 64,
            n: grid.rows() as u32,
            k: grid.cols() as u32,
            tile_rows: grid.tile_rows() as u32,
            tile_cols: grid.tile_cols() as u32,
            ..DecodeHuffmanArgs::default()
        }
    }
}

impl Weights {
    fn new(stream: &Stream, (n, k): (u32, u32)) -> Result<Self, BenchError> {
        let elements = n as usize * k as usize;
        let seed = u64::from(n) << 32 | u64::from(k);
        let few_rows = normal_bf16(elements, 0.02, seed);
        let bytes = with_outsiders(&few_rows, k);
        let mut inside = halves(&few_rows);
        for element in &mut inside {
            let exponent = (*element >> 7 & 0xff).clamp(108, 123);
            *element = *element & 0x807f | exponent << 7;
        }
        let without: Vec<u8> = inside.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let x = normal_bf16(ROWS as usize * k as usize, 1.0, seed ^ 0x55);
        let old = normal_bf16(ROWS as usize * n as usize, 1.0, seed ^ 0xaa);
        Ok(Self {
            shape: (n, k),
            exact: products(&x, &bytes, (n, k)),
            exact_without_escapes: products(&x, &without, (n, k)),
            exact_few_rows: products(&x, &few_rows, (n, k)),
            with_escapes: PackedOnDevice::new(stream, &bytes, (n, k))?,
            without_escapes: PackedOnDevice::new(stream, &without, (n, k))?,
            compact: compact_on_device(stream, &bytes, (n, k))?,
            few_rows: ReconOnDevice::new(stream, &few_rows, (n, k))?,
            no_rows: ReconOnDevice::new(stream, &without, (n, k))?,
            x: DeviceBuffer::from_host(stream, &halves(&x))?,
            old,
            bytes,
        })
    }

    fn matrix(&self) -> Result<Matrix<'_>, BenchError> {
        Ok(Matrix::new(&self.bytes, self.shape.0 as usize, self.shape.1 as usize)?)
    }
}

/// The same weights with every 499th element far outside of any window: zeros, subnormals, large ones. Row 5 begins
/// with a run of them, longer than a warp in all but the smallest matrices.
fn with_outsiders(weights: &[u8], k: u32) -> Vec<u8> {
    let (mut bytes, elements) = (weights.to_vec(), weights.len() / 2);
    for (at, element) in bytes.chunks_exact_mut(2).enumerate() {
        let dense = at / k as usize == 5 && at % (k as usize) < (elements / 1000).min(40);
        if dense || at % 499 == 7 {
            let bits = u16::from_le_bytes([element[0], element[1]]);
            let exponent = [0u16, 90, 100, 130][(bits & 3) as usize];
            let mantissa = if bits & 4 == 0 { 0x7f } else { 0 };
            element.copy_from_slice(&((bits & (0x8000 | mantissa)) | exponent << 7).to_le_bytes());
        }
    }
    bytes
}

/// The values in a section of any alignment.
fn pods<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

fn products(x: &[u8], w: &[u8], (n, k): (u32, u32)) -> Vec<(f64, f64)> {
    let values = |bytes: &[u8]| halves(bytes).into_iter().map(value).collect::<Vec<f64>>();
    let (x, w, n, k) = (values(x), values(w), n as usize, k as usize);
    (0..ROWS as usize * n)
        .into_par_iter()
        .map(|at| {
            let terms = x[at / n * k..][..k].iter().zip(&w[at % n * k..][..k]).map(|(x, w)| x * w);
            terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
        })
        .collect()
}

/// The exponents, u8 `[tiles, 64, 64]`, of a matrix of whole tiles.
fn exponents_by_tile(matrix: Matrix<'_>) -> Vec<u8> {
    let (grid, bytes) = (matrix.grid(), matrix.bytes());
    let (rows, cols) = (grid.rows(), grid.cols());
    let mut exponents = Vec::with_capacity(rows * cols);
    for tile in 0..grid.tiles() {
        let (row, col) = (tile / grid.tile_cols() * 64, tile % grid.tile_cols() * 64);
        for at in (row..row + 64).flat_map(|row| (col..col + 64).map(move |col| row * cols + col)) {
            exponents.push((u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]) >> 7) as u8);
        }
    }
    exponents
}

/// The first element that neither one rounding nor fp32 accumulation explains: the tensor cores cut off what they add,
/// so the error grows with k.
fn mismatch(
    y: &[u8],
    GemmShape { n, k, .. }: GemmShape,
    epilogue: Epilogue,
    exact: &[(f64, f64)],
    old: &[u8],
) -> Option<String> {
    let (n, share) = (n as usize, 1e-6 + 1e-9 * f64::from(k));
    let columns = if epilogue == Epilogue::SiluMul { n / 2 } else { n };
    let old = |at: usize| value(u16::from_le_bytes([old[2 * at], old[2 * at + 1]]));
    halves(y).iter().enumerate().find_map(|(at, got)| {
        let (row, column) = (at / columns, at % columns);
        let (sum, slack) = match epilogue {
            Epilogue::Store => (exact[at].0, exact[at].1 * share),
            Epilogue::StoreAdd => (exact[at].0 + old(at), (exact[at].1 + old(at).abs()) * share),
            // Rows of the gate and of the up in turn. The slope of silu is at most 1.1.
            Epilogue::SiluMul => {
                let turn = Epilogue::GATE_ROWS as usize;
                let gate_at = row * n + column / turn * 2 * turn + column % turn;
                let ((gate, gate_size), (up, up_size)) = (exact[gate_at], exact[gate_at + turn]);
                let sum = gate / (1.0 + (-gate).exp()) * up;
                (sum, (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * share + sum.abs() * 1e-5)
            }
        };
        let error = (value(*got) - sum).abs();
        (error.is_nan() || error > sum.abs() / 256.0 + slack)
            .then(|| format!("row {row}, column {column}: {} instead of {sum}", value(*got)))
    })
}

fn differs(got: &[u8], expected: &[u8]) -> Option<String> {
    let at = expected.iter().zip(got).position(|(want, got)| want != got)?;
    Some(format!("byte {at} is {:#04x}, the CPU's {:#04x}", got[at], expected[at]))
}

/// Work on another stream.
struct Load {
    kernel: RawKernel,
    stream: Stream,
    memory: DeviceBuffer<u8>,
    blocks: u32,
}

impl Load {
    /// More than the second-level cache holds.
    const BYTES: usize = 256 << 20;
    /// What even the largest block leaves on a multiprocessor, for the block's own loads to queue behind.
    const SHARED_BYTES: u32 = 1024;
    const ROUNDS: u32 = 128;

    fn new(run: &Run<'_>) -> Result<Self, BenchError> {
        let stream = run.kernels.device().stream()?;
        Ok(Self {
            kernel: run.raw("uw_stress_load", "UW_LOAD")?,
            memory: DeviceBuffer::zeroed(&stream, Self::BYTES)?,
            blocks: run.kernels.device().info().sms,
            stream,
        })
    }

    /// Until told to stop: streams of device memory and queues at shared memory in turn, then as long a pause. Some
    /// races show under load, others without.
    fn keep_busy(&self, stop: &AtomicBool) -> Result<(), BenchError> {
        while !stop.load(Ordering::Relaxed) {
            for i in 0..32u32 {
                let shared = if i % 2 == 0 { 0 } else { Self::SHARED_BYTES };
                let (mut memory, mut pieces) = (self.memory.address(), Self::BYTES as u64 / 16);
                let (mut rounds, mut shared_words) = (Self::ROUNDS, shared / 4);
                let mut arguments = [
                    (&raw mut memory).cast::<c_void>(),
                    (&raw mut pieces).cast(),
                    (&raw mut rounds).cast(),
                    (&raw mut shared_words).cast(),
                ];
                // SAFETY: the kernel stays within `pieces` of memory and `shared_words` of shared memory; the memory
                // lives through the wait below.
                unsafe { self.kernel.launch(&self.stream, (self.blocks, 256), shared, &mut arguments) }?;
            }
            let start = Instant::now();
            self.stream.synchronize()?;
            std::thread::sleep(start.elapsed());
        }
        Ok(())
    }
}

/// Takes the fence out of the hand-over of a slot.
fn take_out_the_fence(request: &mut CompileRequest) {
    const FENCE: &str = "    ptx::fence_proxy_async_shared();\n";
    for (name, text) in &mut request.headers {
        if name == "unweight/pipeline/ring.cuh" {
            assert_eq!(text.matches(FENCE).count(), 1, "the header has one hand-over");
            *text = text.replace(FENCE, "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_runs_at_the_edges_of_its_batch_tile() {
        for spec in catalog::all(Arch::Sm90a) {
            let tile = match spec.op {
                Op::GemmMma(op) => op.batch_tile.get(),
                Op::GemmWgmma(op) => op.batch_tile.get(),
                Op::GemmCompact(op) => op.batch_tile.get(),
                _ => continue,
            };
            let batches = batches(&spec);
            assert!([1, tile - 1, tile, tile + 1].iter().all(|m| batches.contains(m)), "{spec}: {batches:?}");
            let problems = SHAPES.iter().flat_map(|&(n, k)| batches.iter().map(move |&m| GemmShape { m, n, k }));
            assert!(problems.filter(|shape| takes(&spec, *shape, 132)).count() >= 3 * batches.len(), "{spec}");
        }
    }

    #[test]
    fn every_device_runs_what_ships_for_it() {
        for arch in Arch::ALL {
            let run = StressOptions::default().variants(*arch);
            assert!(run.len() > 50 && run.iter().all(|spec| spec.arch == *arch), "{arch:?}");
            assert!(run.iter().any(|spec| matches!(spec.op, Op::GemmMma(_))), "{arch:?}");
            let copied = StressOptions::default().asynchronous(true).variants(*arch);
            assert!(!copied.is_empty() && copied.iter().all(|spec| spec.arch == *arch), "{arch:?}");
        }
    }

    #[test]
    fn the_fault_is_planted_in_every_kernel_that_hands_slots_over() {
        for spec in catalog::all(Arch::Sm90a) {
            let clean = CompileRequest::render(&spec).unwrap();
            let mut faulty = clean.clone();
            take_out_the_fence(&mut faulty);
            if matches!(spec.op, Op::GemmMma(_) | Op::GemmCompact(_) | Op::DecodeHuffman(_)) {
                assert_ne!(clean, faulty, "{spec}");
            }
        }
    }

    #[test]
    fn weights_of_every_shape_can_be_packed_and_have_escapes() {
        for (n, k) in SHAPES {
            let bytes = with_outsiders(&normal_bf16(n as usize * k as usize, 0.02, 1), k);
            let matrix = Matrix::new(&bytes, n as usize, k as usize).unwrap();
            let tensor = packed::pack(matrix, &Histogram::of(&bytes)).unwrap();
            assert!(tensor.escape_count() > 8 && !tensor.escapes().is_empty(), "[{n}, {k}]");
            // Compact: all but the small ones, whose book is too dear.
            let tensor = compact::encode(matrix, &Histogram::of(&bytes));
            let escapes = tensor.map_or(0, |tensor| tensor.escape_count());
            assert!(escapes > 8 || n * k < 1 << 18, "[{n}, {k}]: {escapes}");
        }
    }

    #[test]
    fn a_wrong_element_is_named() {
        let shape = GemmShape { m: 1, n: 64, k: 64 };
        let exact = vec![(1.0, 4.0); 64];
        let mut y: Vec<u8> = [0x80, 0x3f].repeat(64);
        assert_eq!(mismatch(&y, shape, Epilogue::Store, &exact, &[]), None);
        y[2 * 9] = 0x83;
        let wrong = mismatch(&y, shape, Epilogue::Store, &exact, &[]).unwrap();
        assert!(wrong.starts_with("row 0, column 9"), "{wrong}");
        y[2 * 9..][..2].copy_from_slice(&[0xff, 0xff]);
        assert!(mismatch(&y, shape, Epilogue::Store, &exact, &[]).unwrap().contains("NaN"));
    }
}
