//! Launches every kernel thousands of times under load. The same input must give the same bits, and the first output
//! must be correct.
//!
//! A race between a kernel and the copy engine shows in a few of a hundred launches, only while many loads are in
//! flight, and in no sanitizer. So every catalogued variant runs on matrices that include small and odd sizes, at and
//! next to each edge of its batch tile. Each problem is launched [`StressOptions::launches`] times while another stream
//! keeps memory and shared memory busy. Outputs are poisoned before each launch and compared on the device with the
//! first launch's. The first output is checked against double precision (products) or against the CPU's bytes
//! (everything else).
//!
//! ```text
//! reset [runs] --> launch run 0, 1, .. (directly, later as one graph) --> compare each with the first      stream 1
//! load, load, load, ...                                                                                   stream 2, from another thread
//! ```

mod activations;
mod attention;
mod experts;
mod kv;
mod load;
mod products;
mod report;
mod results;
mod rivals;
mod updates;
mod weights;

use std::{
    cell::RefCell,
    ffi::c_void,
    sync::Arc,
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use unweight_codegen::{
    VariantSpec,
    abi::{DecodeCompactArgs, DecodeHuffmanArgs, PackArgs},
    family::Instruction,
    plan::GemmShape,
    spec::{DecodeCompactStage, DecodeElement, DecodeOutput, KvCache, Op, PackStage},
};
use unweight_format::{
    CodeLimit, FloatMatrix, Histogram, Matrix, TileGrid,
    raw::{compact, exponents, huffman, packed, palette},
};
use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceError, DeviceMatrix, ExecContext, Graph, KernelSet, Stream,
    env::Env,
    raw::{
        device::{module::LoadedKernel, raw::RawKernel},
        jit::{cache::KernelCache, compiler::CompileRequest},
        ops::{
            decode_compact,
            encode_compact::{EncodeCompact, EncodeCompactError},
            encode_huffman::GpuEncoder,
            pack::Packer,
        },
        weight::DeviceCompact,
    },
};

use crate::{data::normal_bf16, error::BenchError};
use load::Load;
use products::{batches, supports, takes_bias};
pub use report::{Plant, StressOptions, StressReport, StressRow};
use results::{differs, mismatch};
use weights::{CodedOnDevice, Weights, exponents_by_tile, with_any_bits};

/// Runs everything that `options` select. Calls `progress` with a line for each family and shape.
///
/// # Errors
/// Fails if a kernel cannot be compiled or launched. A wrong output is not an error: the report lists it.
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

/// Launches between two comparisons. This is more than the device runs at once.
const RUNS: u32 = 16;
/// One in this many rounds launches directly instead of replaying the graph.
const DIRECT: u32 = 4;

/// `[n, k]` of the weights: one tile; few and many columns; k and v projections of small models; odd numbers of tiles,
/// which no block shape divides.
const SHAPES: [(u32, u32); 6] = [(64, 64), (256, 4096), (1024, 4096), (192, 320), (1088, 704), (4096, 1024)];

struct Run<'a> {
    kernels: &'a KernelSet,
    cache: KernelCache,
    threads: usize,
    stream: &'a Stream,
    /// The context of `stream`.
    ctx: RefCell<ExecContext>,
    options: &'a StressOptions,
}

type Launch<'a> = Box<dyn Fn(u64) -> Result<(), DeviceError> + 'a>;
type Check<'a> = Box<dyn Fn(&[u8]) -> Option<String> + 'a>;

/// A kernel and its arguments, to be launched repeatedly.
struct Subject<'a> {
    name: String,
    shape: GemmShape,
    /// `RUNS` consecutive outputs of `bytes` each.
    outputs: DeviceBuffer<u8>,
    bytes: usize,
    /// Initial contents of outputs that a launch adds to. Without them, outputs are poisoned.
    before: Option<DeviceBuffer<u8>>,
    /// Enqueues a launch that writes its output to this address.
    launch: Launch<'a>,
    /// Describes what is wrong with an output.
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
            let failed = rows[before..].iter().filter(|row| !row.is_clean()).count();
            let (problems, seconds) = (rows.len() - before, start.elapsed().as_secs_f64());
            progress(&format!("{} x {}: {problems} problems, {failed} failed, {seconds:.0} s", shape.0, shape.1));
        }
        rows.extend(self.encoders()?);
        rows.extend(self.compressor()?);
        rows.extend(self.updates()?);
        Ok(rows)
    }

    /// Compiles a kernel of `stress.cu`.
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

    /// Loads the kernels of `specs`, in their order, with the fault planted if one is requested.
    fn loaded(&self, specs: &[VariantSpec]) -> Result<Vec<Arc<LoadedKernel>>, BenchError> {
        let mut requests =
            specs.iter().map(CompileRequest::render).collect::<Result<Vec<_>, _>>().map_err(DeviceError::from)?;
        if let Some(Plant::UnfencedRefill) = self.options.plant {
            let clean = requests.clone();
            // Variants without the copy engine include the header but do not call the function with the fence.
            let uses_copy_engine = specs.iter().map(|spec| !spec.op.instructions().has(Instruction::AsyncCopy));
            for (request, _) in requests.iter_mut().zip(uses_copy_engine).filter(|(_, uses)| *uses) {
                remove_fence(request);
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
                Op::GemmMma(_) | Op::GemmWgmma(_) | Op::GemmRecon(_) | Op::GemmJoin(_) | Op::GemmCompact(_) => {
                    for m in batches(spec) {
                        let shape = GemmShape { m, n: shape.0, k: shape.1 };
                        if !supports(spec, shape, self.kernels.device().info().sms) {
                            continue;
                        }
                        let subject = match spec.op {
                            Op::GemmRecon(_) | Op::GemmJoin(_) => self.recon(kernel, &weights, shape)?,
                            Op::GemmCompact(_) => match &weights.compact {
                                Some(tensor) => self.compact(kernel, (&weights, tensor), shape)?,
                                None => continue,
                            },
                            _ => self.packed(kernel, &weights, shape, false)?,
                        };
                        add(self.subject(subject, compare)?);
                        if takes_bias(spec) {
                            add(self.subject(self.packed(kernel, &weights, shape, true)?, compare)?);
                        }
                    }
                }
                Op::DecodeHuffman(_) => {
                    let subject = self.decode(kernel, &weights)?;
                    add(self.subject(subject, compare)?);
                }
                Op::Pack(_) => {
                    let subject = self.pack(kernel, &weights)?;
                    add(self.subject(subject, compare)?);
                }
                Op::Unpack(_) => {
                    let subject = self.unpack(kernel, &weights)?;
                    add(self.subject(subject, compare)?);
                }
                Op::DecodeCompact(_) => {
                    let subject = self.transcode(kernel, &weights)?;
                    add(self.subject(subject, compare)?);
                }
                Op::Embed(_)
                | Op::Norm(_)
                | Op::Rope(_)
                | Op::Scale(_)
                | Op::SiluMul(_)
                | Op::Sample(_)
                | Op::Logprobs(_) => {
                    for subject in self.activations(kernel, &weights)? {
                        add(self.subject(subject, compare)?);
                    }
                }
                // The shapes of these come from heads, not weights: run them for one shape only.
                Op::KvPack(_) | Op::KvUnpack(_) | Op::Attention(_) if shape != SHAPES[0] => {}
                Op::KvPack(op) => self.kv_pack(kernel, op)?.into_iter().for_each(&mut add),
                Op::KvUnpack(op) => {
                    for subject in self.kv_unpack(kernel, op)? {
                        add(self.subject(subject, compare)?);
                    }
                }
                Op::Attention(op) => {
                    let subjects = match op.cache {
                        KvCache::Bf16 => self.attention(kernel)?,
                        KvCache::Packed => self.packed_attention(kernel, op)?,
                    };
                    for subject in subjects {
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
                // The stages depend on each other: they run together, below.
                Op::EncodeHuffman(_) | Op::EncodeCompact(_) | Op::Update(_) => {}
            }
        }
        if let Some(rivals) = rivals {
            for subject in self.rivals(rivals, &weights)? {
                add(self.subject(subject?, compare)?);
            }
        }
        Ok(())
    }

    /// Resets, launches and compares until the requested number of launches is reached.
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
        let compare_outputs = || -> Result<(), DeviceError> {
            let (mut runs, mut reference) = (base, expected.address());
            let (mut pieces, mut count) = (bytes as u64 / 16, differing.address());
            let mut arguments = [
                (&raw mut runs).cast::<c_void>(),
                (&raw mut reference).cast(),
                (&raw mut pieces).cast(),
                (&raw mut count).cast(),
            ];
            // SAFETY: `RUNS` outputs and the expected one have `bytes` each; the counter is one u32. All of them live
            // through the wait below.
            unsafe { compare.launch(stream, (RUNS, 1024), 0, &mut arguments) }
        };
        compare_outputs()?;
        let rounds = self.options.launches.div_ceil(RUNS).max(2);
        let graph: Graph = stream.capture(|| (0..RUNS).try_for_each(|run| launch(address(run))))?;
        for round in 1..rounds {
            reset(outputs)?;
            if round % DIRECT == 0 {
                (0..RUNS).try_for_each(|run| launch(address(run)))?;
            } else {
                // SAFETY: everything that the launches use lives until the wait below.
                unsafe { graph.launch() }?;
            }
            compare_outputs()?;
        }
        let differing = differing.read(stream, 0, 1)?[0];
        if outputs.padding(stream)?.iter().any(|byte| *byte != GUARD) {
            wrong = Some("the kernel wrote past the end of its output".to_owned());
        }
        let GemmShape { m, n, k } = *shape;
        Ok(StressRow { variant: name.clone(), m, n, k, launches: rounds * RUNS, differing, wrong })
    }

    fn decode<'a>(&'a self, kernel: &'a LoadedKernel, weights: &'a Weights) -> Result<Subject<'a>, BenchError> {
        let Op::DecodeHuffman(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        let limit = CodeLimit::new(spec.code_limit.get())?;
        if spec.element != DecodeElement::Bf16 {
            let (float, (n, k)) = (spec.element.float(), weights.shape);
            let (n, k) = (n as usize, k as usize);
            let bytes = with_any_bits(float, n * k);
            let tensor = exponents::encode(FloatMatrix::new(float, &bytes, n, k)?, limit)?;
            // Only F16 has both sections.
            let fractions = [tensor.fraction_bytes(), tensor.fraction_bits()].concat();
            let sections = CodedOnDevice::upload(self.stream, &fractions, tensor.exponents())?;
            return self.decoder(kernel, sections, tensor.grid(), (bytes.len(), bytes));
        }
        let tensor = huffman::encode(weights.matrix()?, limit)?;
        let (bytes, expected) = match spec.output {
            DecodeOutput::Full => (weights.bytes.len(), weights.bytes.clone()),
            // Indices of verbatim rows are 0, and these shapes have no padding.
            DecodeOutput::Palette => {
                let palette = palette::encode_with(weights.matrix()?, tensor.code())?;
                (palette.palette_index().len(), palette.palette_index().to_vec())
            }
            DecodeOutput::Exponent => (weights.bytes.len() / 2, exponents_by_tile(weights.matrix()?)),
        };
        let sections = CodedOnDevice::upload(self.stream, tensor.sign_mantissa(), tensor.exponents())?;
        self.decoder(kernel, sections, tensor.grid(), (bytes, expected))
    }

    /// Makes a subject of a decoder that must write `expected`, `bytes` long.
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

    /// Makes a subject of one stage of `pack`: checks the tiles after `tiles`, and the lists after `lists`.
    fn pack<'a>(&'a self, kernel: &'a LoadedKernel, weights: &'a Weights) -> Result<Subject<'a>, BenchError> {
        let Op::Pack(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        let stream = self.stream;
        let tensor = &weights.with_escapes;
        let tiles = tensor.host.packed().len() / packed::TILE_BYTES;
        let whole = DeviceBuffer::from_host(stream, &weights.bytes)?;
        // The input of `lists` from `tiles`: the number of records of each row block with a list. `tiles` itself makes
        // this input once.
        let heads = DeviceBuffer::<u32>::zeroed(stream, tiles * 4)?;
        let group_words = DeviceBuffer::<u32>::zeroed(stream, tiles.div_ceil(16))?;
        let inexact = DeviceBuffer::<u64>::zeroed(stream, 1)?;
        let scratch = DeviceBuffer::<u8>::zeroed(stream, tiles * packed::TILE_BYTES)?;
        let (shape, args) = packed_args(weights);
        let args = PackArgs {
            weights: whole.address(),
            packed: scratch.address(),
            escape_heads: heads.address(),
            group_words: group_words.address(),
            inexact: inexact.address(),
            ..args
        };
        let (bytes, expected): (usize, Vec<u8>) = match spec.stage {
            PackStage::Tiles => (tiles * packed::TILE_BYTES, tensor.host.packed().to_vec()),
            PackStage::Lists => {
                // Outputs are compared in pieces of 16 bytes.
                let mut words = tensor.host.escapes().to_vec();
                words.resize(words.len().next_multiple_of(16), 0);
                (words.len(), words)
            }
        };
        if spec.stage == PackStage::Lists {
            let arch = self.kernels.device().info().arch;
            let tiles = self.kernels.get(&VariantSpec::pack(arch, PackStage::Tiles))?;
            // SAFETY: the buffers above have the sizes that the shape requires.
            unsafe { tiles.launch(stream, shape, &args) }?;
        }
        let counted = heads.duplicate(stream)?;
        let heads = RefCell::new(heads);
        let launch = move |output: u64| {
            let _kept = (&whole, &heads, &group_words, &inexact, &scratch, &counted);
            let args = match spec.stage {
                PackStage::Tiles => PackArgs { packed: output, ..args },
                PackStage::Lists => PackArgs { escapes: output, ..args },
            };
            if spec.stage == PackStage::Lists {
                // `lists` replaces numbers of records by indices, so each launch needs the original heads.
                heads.borrow_mut().copy_from(stream, &counted)?;
            }
            // SAFETY: as above.
            unsafe { kernel.launch(stream, shape, &args) }
        };
        // Nothing is written after the last list.
        let before = (spec.stage == PackStage::Lists)
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

    /// Makes a subject of `unpack`, whose output is the weights.
    fn unpack<'a>(&'a self, kernel: &'a LoadedKernel, weights: &'a Weights) -> Result<Subject<'a>, BenchError> {
        let (stream, tensor) = (self.stream, &weights.with_escapes.device);
        let (shape, args) = packed_args(weights);
        let args =
            PackArgs { packed: tensor.packed().address(), escape_heads: tensor.escape_heads().address(), ..args };
        let launch = move |output: u64| {
            // SAFETY: the tensor has the shape's sections, and the output its weights.
            unsafe { kernel.launch(stream, shape, &PackArgs { weights: output, ..args }) }
        };
        let bytes = weights.bytes.len();
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape,
            outputs: DeviceBuffer::zeroed(stream, bytes * RUNS as usize)?,
            bytes,
            before: None,
            launch: Box::new(launch),
            check: Box::new(move |got| differs(got, &weights.bytes)),
        })
    }

    /// Makes a subject of one stage of `decode_compact` with its own buffers, as `pack` does. The weights look trained
    /// and contain zeros.
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
                // Outputs are compared in pieces of 16 bytes.
                let mut words = packed.escapes().to_vec();
                words.resize(words.len().next_multiple_of(16), 0);
                words
            }
        };
        if lists {
            let arch = self.kernels.device().info().arch;
            let first = self.kernels.get(&VariantSpec::decode_compact(arch, DecodeCompactStage::Packed))?;
            // SAFETY: the buffers above have the sizes that the shape requires.
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
                // `lists` replaces numbers of records by indices, so each launch needs the original heads.
                heads.borrow_mut().copy_from(stream, &counted)?;
            }
            // SAFETY: as above.
            unsafe { kernel.launch(stream, shape, &args) }
        };
        let bytes = expected.len();
        // Nothing is written after the last list.
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

    /// Returns the kernel name of a family on this device.
    fn family(&self, family: &str) -> String {
        format!("uw_{}_{family}", self.kernels.device().info().arch.tag())
    }

    /// Runs all stages of `encode_compact` together, with escapes of every kind, and compares on the host.
    fn compressor(&self) -> Result<Vec<StressRow>, BenchError> {
        let variant = format!("{}, all stages", self.family("encode_compact"));
        if !self.options.selects(&variant) {
            return Ok(Vec::new());
        }
        let (compressor, mut packer) = (EncodeCompact::of(self.kernels)?, Packer::new(self.stream, self.kernels)?);
        let mut rows = Vec::new();
        for (n, k) in [(64u32, 64u32), (192, 576), (1024, 4096)] {
            let mut bytes = normal_bf16(n as usize * k as usize, 0.02, 78);
            // Zeros, infinities and values next to the window.
            bytes.chunks_exact_mut(2).step_by(997).for_each(|element| element.fill(0));
            bytes.chunks_exact_mut(2).skip(7).step_by(4099).for_each(|element| element.copy_from_slice(&[0x80, 0x7f]));
            let matrix = Matrix::new(&bytes, n as usize, k as usize)?;
            let host =
                compact::encode(matrix, &Histogram::of(&bytes)).map_err(|why| BenchError::Uncompact { n, k, why })?;
            let weights = DeviceMatrix::upload(self.stream, matrix)?;
            let mut differing = 0;
            for _ in 0..self.options.launches.max(1) {
                let encoded = match compressor.encode(&mut packer, weights.view()) {
                    Ok(encoded) => encoded.download(self.stream)?,
                    Err(EncodeCompactError::Device(error)) => return Err(error.into()),
                    Err(EncodeCompactError::Uncompact(why)) => return Err(BenchError::Uncompact { n, k, why }),
                };
                differing += u32::from(encoded != host);
            }
            let (variant, launches) = (variant.clone(), self.options.launches);
            rows.push(StressRow { variant, m: 0, n, k, launches, differing, wrong: None });
        }
        Ok(rows)
    }

    /// Runs all stages of `encode_huffman` together, to both encodings, and compares on the host.
    fn encoders(&self) -> Result<Vec<StressRow>, BenchError> {
        let name = self.family("encode_huffman");
        if !self.options.selects(&name) {
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

/// Guard bytes after every output.
const GUARD: u8 = 0xa5;

/// Removes the fence from the hand-over of a slot.
fn remove_fence(request: &mut CompileRequest) {
    const FENCE: &str = "    ptx::fence_proxy_async_shared();\n";
    for (name, text) in &mut request.headers {
        if name == "unweight/pipeline/ring.cuh" {
            assert_eq!(text.matches(FENCE).count(), 1, "{name} must contain exactly one fence");
            *text = text.replace(FENCE, "");
        }
    }
}

/// Returns the shape and the common arguments of packing or unpacking the weights.
fn packed_args(weights: &Weights) -> (GemmShape, PackArgs) {
    let tensor = &weights.with_escapes;
    let (n, k) = weights.shape;
    let args = PackArgs {
        escapes: tensor.device.escapes().address(),
        escape_words: tensor.device.escapes().len() as u32,
        base: u32::from(tensor.host.window().base()),
        n,
        k,
        tile_rows: n / 64,
        tile_cols: k / 64,
        ..PackArgs::default()
    };
    (GemmShape { m: 0, n, k }, args)
}

#[cfg(test)]
mod tests {
    use unweight_codegen::spec::{Arch, Epilogue, catalog};

    use super::{weights::with_outliers, *};

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
            assert!(problems.filter(|shape| supports(&spec, *shape, 132)).count() >= 3 * batches.len(), "{spec}");
        }
    }

    #[test]
    fn every_architecture_runs_its_catalogued_variants() {
        for arch in Arch::ALL {
            let variants = StressOptions::default().variants(*arch);
            assert!(variants.len() > 50 && variants.iter().all(|spec| spec.arch == *arch), "{arch:?}");
            assert!(variants.iter().any(|spec| matches!(spec.op, Op::GemmMma(_))), "{arch:?}");
            let asynchronous = StressOptions::default().asynchronous(true).variants(*arch);
            assert!(!asynchronous.is_empty() && asynchronous.iter().all(|spec| spec.arch == *arch), "{arch:?}");
        }
    }

    #[test]
    fn the_fault_is_planted_in_every_kernel_that_refills_slots() {
        for spec in catalog::all(Arch::Sm90a) {
            let clean = CompileRequest::render(&spec).unwrap();
            let mut faulty = clean.clone();
            remove_fence(&mut faulty);
            if matches!(spec.op, Op::GemmMma(_) | Op::GemmCompact(_) | Op::DecodeHuffman(_)) {
                assert_ne!(clean, faulty, "{spec}");
            }
        }
    }

    #[test]
    fn weights_of_every_shape_can_be_packed_and_have_escapes() {
        for (n, k) in SHAPES {
            let bytes = with_outliers(&normal_bf16(n as usize * k as usize, 0.02, 1), k);
            let matrix = Matrix::new(&bytes, n as usize, k as usize).unwrap();
            let tensor = packed::pack(matrix, &Histogram::of(&bytes)).unwrap();
            assert!(tensor.escape_count() > 8 && !tensor.escapes().is_empty(), "[{n}, {k}]");
            // All but the small matrices have a compact encoding; a codebook is too expensive for small ones.
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
