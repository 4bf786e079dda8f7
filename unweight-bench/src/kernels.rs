//! Measures the report's kernel families (decoders, encoder, reconstructive matmuls), the conversions of the packed and
//! compact encodings, and the packed KV cache.

mod kv_cache;

use unweight_codegen::{
    VariantSpec,
    abi::DecodeCompactArgs,
    family::DECODED_EXPONENTS,
    plan::GemmShape,
    spec::{Arch, DecodeCompactStage, DecodeOutput, EncodeHuffmanStage, Epilogue},
};
use unweight_format::{
    CodeLimit, Histogram, Matrix, TileGrid,
    raw::{HuffmanTensor, compact, huffman, packed},
};

use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceMatrix, ExecContext, KernelSet,
    raw::{
        choose::{
            graph::decoder,
            recon::{Source, candidates},
        },
        ops::{
            decode_compact::{self, CompactDecoder},
            decode_huffman::{Decoder, output_bytes},
            encode_huffman::{EncodeBuffers, GpuEncoder, HUFFMAN_STAGES, PALETTE_STAGES},
            gemm_recon::Matmul,
            pack::{PackError, Packer},
        },
        weight::{DeviceCompact, DeviceHuffman},
    },
};

use crate::{
    BenchError,
    data::{halves, normal_bf16, relative_error},
    options::options,
    timing::{Contender, Report, Row, Timer, Timing},
};

options! {
    /// Options of [`bench_kernels`](crate::bench_kernels()).
    BenchOptions {
        /// `[n, k]` of the weights.
        shapes: Vec<(u32, u32)> = vec![(14336, 4096), (4096, 14336), (4096, 4096)],
        /// Batches of the matmuls.
        batches: Vec<u32> = vec![1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
        /// Measure the family `decode_huffman`.
        decode: bool = true,
        /// Measure the Huffman encoder.
        encode: bool = true,
        /// Measure the conversions of the packed and the compact encoding.
        packed: bool = true,
        /// Measure the matmuls.
        matmul: bool = true,
        /// Measure attention over packed KV pages, and the packing of pages.
        kv_cache: bool = true,
        /// Measure every variant of attention, and of the report's Table 5 every one that fits the shape, instead of
        /// the one that dispatch selects.
        all_variants: bool = false,
        /// Maximum code length of the weights, bits.
        code_limit: u32 = CodeLimit::DEFAULT.bits(),
    }
}

impl BenchOptions {
    /// Returns options with every family disabled, so that a caller enables the ones to measure.
    #[must_use]
    pub fn nothing() -> Self {
        Self { decode: false, encode: false, packed: false, matmul: false, kv_cache: false, ..Self::default() }
    }
}

/// Measures everything that `options` select. Calls `progress` with a line for each group of contenders.
///
/// # Errors
/// Fails without cuBLAS, without enough memory, if a kernel cannot be compiled, or if a kernel's output is wrong.
pub fn bench_kernels(
    kernels: &KernelSet,
    options: &BenchOptions,
    timing: &Timing,
    progress: &dyn Fn(&str),
) -> Result<Report<BenchOptions>, BenchError> {
    let limit = CodeLimit::new(options.code_limit)?;
    let stream = kernels.device().stream()?;
    let timer = Timer { stream: &stream, timing };
    let bench = Bench { kernels, timer, options, limit, arch: kernels.device().info().arch };
    let mut rows = Vec::new();
    if options.kv_cache {
        rows.extend(
            kv_cache::KvBench { kernels, timer: &bench.timer, all_variants: options.all_variants }.measure(progress)?,
        );
    }
    let report = |rows| Report {
        device: kernels.device().info().clone(),
        timing: timing.clone(),
        options: options.clone(),
        rows,
    };
    if !(options.decode || options.encode || options.packed || options.matmul) {
        return Ok(report(rows));
    }
    let elements = options.shapes.iter().map(|&(n, k)| n as usize * k as usize).max().unwrap_or(0);
    progress(&format!("{elements} weights from N(0, 0.02^2)"));
    let weights = normal_bf16(elements, 0.02, 1);
    for &(n, k) in &options.shapes {
        let bytes = &weights[..n as usize * k as usize * 2];
        let matrix = Matrix::new(bytes, n as usize, k as usize)?;
        let tensor = huffman::encode(matrix, limit)?;
        progress(&format!(
            "{n} x {k}: {:.2} bits per weight",
            tensor.coded_bytes() as f64 * 8.0 / (bytes.len() / 2) as f64
        ));
        if options.decode {
            rows.extend(bench.decode(&tensor, bytes, progress)?);
        }
        if options.encode {
            rows.extend(bench.encode(matrix, &tensor, progress)?);
        }
        if options.packed && packed::packable_shape(matrix.grid()).is_ok() {
            rows.extend(bench.packed(matrix, progress)?);
            rows.extend(bench.compact(matrix, progress)?);
        }
        if options.matmul {
            rows.extend(bench.matmul(&tensor, progress)?);
        }
    }
    Ok(report(rows))
}

struct Bench<'a> {
    kernels: &'a KernelSet,
    timer: Timer<'a>,
    options: &'a BenchOptions,
    limit: CodeLimit,
    arch: Arch,
}

impl Bench<'_> {
    fn decode(
        &self,
        tensor: &HuffmanTensor<Vec<u8>>,
        original: &[u8],
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Row>, BenchError> {
        let (grid, stream) = (tensor.grid(), self.timer.stream);
        let specs =
            DecodeOutput::ALL.iter().map(|&output| self.decoder_spec(output, tensor)).collect::<Result<Vec<_>, _>>()?;
        self.kernels.prepare(&specs, &|_| {})?;
        let coded = DeviceHuffman::upload(stream, tensor)?.coded_exponent_bytes();
        // The palette decoder moves the fewest bytes.
        let copies = self.timer.copies(coded + output_bytes(grid, DecodeOutput::Palette));
        let sources = (0..copies).map(|_| DeviceHuffman::upload(stream, tensor)).collect::<Result<Vec<_>, _>>()?;
        let mut full: Vec<DeviceMatrix> =
            self.timer.each(copies, |_| DeviceMatrix::zeroed(stream, grid.rows() as u32, grid.cols() as u32))?;
        let mut exponents =
            self.timer.each(copies, |_| DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Exponent)))?;
        let mut indices =
            self.timer.each(copies, |_| DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Palette)))?;
        let mut contenders = Vec::new();
        let mut ctx = ExecContext::new(stream, ContextSize::default())?;
        for (spec, &output) in specs.iter().zip(DecodeOutput::ALL) {
            let decoder = Decoder::new(self.kernels.get(spec)?)?;
            let mut run = |copy: usize| match output {
                DecodeOutput::Full => decoder.full(&mut ctx, &sources[copy], full[copy].view_mut()),
                DecodeOutput::Exponent => decoder.exponent(&mut ctx, &sources[copy], &mut exponents[copy]),
                DecodeOutput::Palette => decoder.palette(&mut ctx, &sources[copy], &mut indices[copy]),
            };
            (0..copies).try_for_each(&mut run)?;
            let (graph, launches) = self.timer.record(problem(0, grid), copies, run)?;
            ctx.synchronize()?;
            let sign_mantissa = if output == DecodeOutput::Full { grid.elements() } else { 0 };
            let bytes = (coded + sign_mantissa + output_bytes(grid, output)) as u64;
            contenders.push(Contender {
                name: spec.to_string(),
                graph,
                launches,
                bytes,
                error: None,
                dispatched: false,
            });
        }
        if full[0].to_host(stream)? != halves(original) {
            return Err(BenchError::WrongBits { kernel: "decode_full" });
        }
        let rows = self.timer.measure("decode", contenders, copies, problem(0, grid), progress);
        // The graphs use the context's fault word and the buffers, so both must live until here.
        drop((ctx, sources, full, exponents, indices));
        rows
    }

    fn encode(
        &self,
        matrix: Matrix<'_>,
        tensor: &HuffmanTensor<Vec<u8>>,
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Row>, BenchError> {
        let (grid, stream) = (matrix.grid(), self.timer.stream);
        let encoder = GpuEncoder::new(self.kernels, self.limit)?;
        let copies = self.timer.copies(grid.elements() * 3);
        let mut buffers = self.timer.each(copies, |_| {
            let mut buffers = EncodeBuffers::new(stream, grid)?;
            buffers.set_weights(matrix)?;
            Ok(buffers)
        })?;
        // A stage needs the stages before it, so each is measured as the end of a sequence. Differences of sequences
        // are stages.
        let huffman = (1..=HUFFMAN_STAGES.len()).map(|end| &HUFFMAN_STAGES[..end]);
        let sequences: Vec<&[EncodeHuffmanStage]> = huffman.chain([&PALETTE_STAGES[..]]).collect();
        let enqueue = |buffers: &mut EncodeBuffers, stages: &[EncodeHuffmanStage]| {
            stages.iter().try_for_each(|stage| {
                // SAFETY: every sequence is a prefix of one of the two pipelines, so it begins with `stats` and skips
                // no stage. It runs as a whole: on one stream, and graphs record whole sequences. The weights do not
                // change.
                unsafe { encoder.enqueue_stage(buffers, *stage) }
            })
        };
        let coded = tensor.coded_bytes() - grid.elements() as u64;
        let mut contenders = Vec::new();
        for stages in sequences {
            (0..copies).try_for_each(|copy| enqueue(&mut buffers[copy], stages))?;
            stream.synchronize()?;
            let (graph, launches) =
                self.timer.record(problem(0, grid), copies, |copy| enqueue(&mut buffers[copy], stages))?;
            let name = stages.iter().map(|stage| stage.tag()).collect::<Vec<_>>().join("+");
            // The minimum traffic of an encoder: read the weights once, write the sections once.
            let sections = match stages.last() {
                Some(EncodeHuffmanStage::Write) => coded,
                Some(EncodeHuffmanStage::Palette) => output_bytes(grid, DecodeOutput::Palette) as u64,
                _ => 0,
            };
            let bytes = grid.elements() as u64 * 3 + sections;
            contenders.push(Contender { name, graph, launches, bytes, error: None, dispatched: false });
        }
        encoder.enqueue_huffman(&mut buffers[0])?;
        if buffers[0].huffman()?.encoded_exp() != tensor.encoded_exp() {
            return Err(BenchError::WrongBits { kernel: "the encoder" });
        }
        let rows = self.timer.measure("encode", contenders, copies, problem(0, grid), progress);
        drop(buffers);
        rows
    }

    fn packed(&self, matrix: Matrix<'_>, progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let (grid, stream) = (matrix.grid(), self.timer.stream);
        let copies = self.timer.copies(grid.elements() * 2);
        let weights = self.timer.each(copies, |_| DeviceMatrix::upload(stream, matrix))?;
        let mut whole =
            self.timer.each(copies, |_| DeviceMatrix::zeroed(stream, grid.rows() as u32, grid.cols() as u32))?;
        let mut packer = Packer::new(stream, self.kernels)?;
        let mut tensors = Vec::new();
        for weights in &weights {
            match packer.pack(weights.view()) {
                Ok(tensor) => tensors.push(tensor),
                Err(PackError::Device(error)) => return Err(error.into()),
                Err(why) => {
                    progress(&format!("skipped the packed encoding: {why}"));
                    return Ok(Vec::new());
                }
            }
        }
        (0..copies).try_for_each(|copy| packer.unpack(&tensors[copy], whole[copy].view_mut()))?;
        if whole[copies - 1].to_host(stream)? != halves(matrix.bytes()) {
            return Err(BenchError::WrongBits { kernel: "unpack" });
        }
        let (raw, stored) = (weights[0].bytes() as u64, tensors[0].bytes());
        let mut contenders = Vec::new();
        // A stage needs the stages before it, as in encoding. `lists` reads only the row blocks with a list again.
        for (steps, name, bytes) in
            [(1, "stats", raw), (2, "stats+pack", 2 * raw + stored), (3, "stats+pack+lists", 2 * raw + stored)]
        {
            let (graph, launches) = self.timer.record(problem(0, grid), copies, |copy| {
                packer.again(weights[copy].view(), &mut tensors[copy], steps)
            })?;
            let name = name.to_owned();
            contenders.push(Contender { name, graph, launches, bytes, error: None, dispatched: false });
        }
        let (graph, launches) = self
            .timer
            .record(problem(0, grid), copies, |copy| packer.unpack(&tensors[copy], whole[copy].view_mut()))?;
        let name = "unpack".to_owned();
        contenders.push(Contender { name, graph, launches, bytes: raw + stored, error: None, dispatched: false });
        let rows = self.timer.measure("packed", contenders, copies, problem(0, grid), progress);
        drop((packer, tensors, weights, whole));
        rows
    }

    /// Measures the conversions of the compact encoding next to those of the packed encoding.
    fn compact(&self, matrix: Matrix<'_>, progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let (grid, stream) = (matrix.grid(), self.timer.stream);
        let host = match compact::encode(matrix, &Histogram::of(matrix.bytes())) {
            Ok(host) => host,
            Err(why) => {
                progress(&format!("skipped the compact encoding: {why}"));
                return Ok(Vec::new());
            }
        };
        let copies = self.timer.copies(grid.elements() * 2);
        let tensors = self.timer.each(copies, |_| DeviceCompact::upload(stream, &host))?;
        let mut whole =
            self.timer.each(copies, |_| DeviceMatrix::zeroed(stream, grid.rows() as u32, grid.cols() as u32))?;
        let decoder = CompactDecoder::of(self.kernels)?;
        (0..copies).try_for_each(|copy| decoder.full(stream, &tensors[copy], whole[copy].view_mut()))?;
        if whole[copies - 1].to_host(stream)? != halves(matrix.bytes()) {
            return Err(BenchError::WrongBits { kernel: "transcode_full" });
        }
        let raw = whole[0].bytes() as u64;
        let mut contenders = Vec::new();
        let (graph, launches) = self
            .timer
            .record(problem(0, grid), copies, |copy| decoder.full(stream, &tensors[copy], whole[copy].view_mut()))?;
        let (name, bytes) = ("full".to_owned(), raw + tensors[0].bytes());
        contenders.push(Contender { name, graph, launches, bytes, error: None, dispatched: false });
        let kernel = self.kernels.get(&VariantSpec::decode_compact(self.arch, DecodeCompactStage::Packed))?;
        let containers =
            self.timer.each(copies, |_| DeviceBuffer::<u8>::zeroed(stream, grid.tiles() * packed::TILE_BYTES))?;
        let heads = DeviceBuffer::<u32>::zeroed(stream, grid.tiles() * packed::ROW_BLOCKS)?;
        let group_words = DeviceBuffer::<u32>::zeroed(stream, grid.tiles().div_ceil(16))?;
        let inexact = DeviceBuffer::<u64>::zeroed(stream, 1)?;
        let base = packed::Window::best(&Histogram::of(matrix.bytes())).0.base().into();
        let (graph, launches) = self.timer.record(problem(0, grid), copies, |copy| {
            let args = DecodeCompactArgs {
                packed: containers[copy].address(),
                escape_heads: heads.address(),
                group_words: group_words.address(),
                inexact: inexact.address(),
                base,
                ..decode_compact::args(&tensors[copy])
            };
            // SAFETY: the buffers have the sizes that the grid requires; sums that are never read may grow.
            unsafe { kernel.launch(stream, problem(0, grid), &args) }
        })?;
        let (name, bytes) = ("packed".to_owned(), (containers[0].bytes() + heads.bytes()) as u64 + tensors[0].bytes());
        contenders.push(Contender { name, graph, launches, bytes, error: None, dispatched: false });
        let rows = self.timer.measure("compact", contenders, copies, problem(0, grid), progress);
        drop((decoder, kernel, tensors, whole, containers, heads, group_words, inexact));
        rows
    }

    fn matmul(&self, tensor: &HuffmanTensor<Vec<u8>>, progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let (grid, stream) = (tensor.grid(), self.timer.stream);
        let (n, k) = (grid.rows() as u32, grid.cols() as u32);
        let copies = self.timer.copies(grid.elements() * 3 / 2);
        let sources = self.timer.each(copies, |_| DeviceHuffman::upload(stream, tensor))?;
        let decode = |output| -> Result<Decoder, BenchError> {
            Ok(Decoder::new(self.kernels.get(&self.decoder_spec(output, tensor)?)?)?)
        };
        let (full, exponent, palette) =
            (decode(DecodeOutput::Full)?, decode(DecodeOutput::Exponent)?, decode(DecodeOutput::Palette)?);
        let mut ctx = ExecContext::new(stream, ContextSize::default().with_cublas())?;
        let whole = self.timer.each(copies, |copy| {
            let mut whole = DeviceMatrix::zeroed(stream, n, k)?;
            full.full(&mut ctx, &sources[copy], whole.view_mut())?;
            Ok(whole)
        })?;
        let exponents = self.timer.each(copies, |copy| {
            let mut bytes = DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Exponent))?;
            exponent.exponent(&mut ctx, &sources[copy], &mut bytes)?;
            Ok(bytes)
        })?;
        let indices = self.timer.each(copies, |copy| {
            let mut bytes = DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Palette))?;
            palette.palette(&mut ctx, &sources[copy], &mut bytes)?;
            Ok(bytes)
        })?;
        ctx.synchronize()?;
        let mut rows = Vec::new();
        for &m in &self.options.batches {
            let x = halves(&normal_bf16(m as usize * k as usize, 1.0, 2 + u64::from(m)));
            let x = DeviceMatrix::from_host(stream, m, k, &x)?;
            let mut y = DeviceMatrix::zeroed(stream, m, n)?;
            let io = x.bytes() as u64 + y.bytes() as u64;

            let cublas = ctx.cublas()?;
            let mut run = |copy: usize| cublas.matmul(x.view(), whole[copy].view(), y.view_mut(), false);
            (0..copies).try_for_each(&mut run)?;
            let graph = self.timer.record(problem(m, grid), copies, run)?;
            let expected = y.to_host(stream)?;
            let mut contenders = vec![Contender::cublas(graph, io + whole[0].bytes() as u64)];
            let specs = self.matmul_specs(tensor.max_verbatim_rows(), GemmShape { m, n, k });
            self.kernels.prepare(&specs, &|_| {})?;
            for (index, spec) in specs.into_iter().enumerate() {
                let matmul = Matmul::new(self.kernels.get(&spec)?)?;
                let is_exponent = spec.op.edges().iter().all(|edge| edge.from == DECODED_EXPONENTS);
                let weights = if is_exponent {
                    sources[0].as_exponent(&exponents[0]).bytes()
                } else {
                    sources[0].as_palette(&indices[0]).bytes()
                };
                let mut run = |copy: usize, y: &mut DeviceMatrix| {
                    let source: &DeviceHuffman = &sources[copy];
                    if is_exponent {
                        matmul.exponent(&mut ctx, x.view(), source.as_exponent(&exponents[copy]), y.view_mut())
                    } else {
                        matmul.palette(&mut ctx, x.view(), source.as_palette(&indices[copy]), y.view_mut())
                    }
                };
                y.fill_bytes(stream, 0xff)?;
                run(copies - 1, &mut y)?;
                let error = relative_error(&y.to_host(stream)?, &expected);
                BenchError::check_product(&spec.to_string(), GemmShape { m, n, k }, error)?;
                let (graph, launches) = self.timer.record(problem(m, grid), copies, |copy| run(copy, &mut y))?;
                let bytes = io + weights as u64;
                let dispatched = index == 0;
                contenders.push(Contender {
                    name: spec.to_string(),
                    graph,
                    launches,
                    bytes,
                    error: Some(error),
                    dispatched,
                });
            }
            rows.extend(self.timer.measure("matmul", contenders, copies, problem(m, grid), progress)?);
        }
        Ok(rows)
    }

    fn matmul_specs(&self, max_verbatim_rows: u32, problem: GemmShape) -> Vec<VariantSpec> {
        let sources = [Source::Exponent, Source::Palette { max_verbatim_rows }];
        let of_source =
            |source| candidates(self.arch, source, problem, self.kernels.device().info().sms, Epilogue::Store);
        let count = if self.options.all_variants { usize::MAX } else { 1 };
        sources.into_iter().flat_map(|source| of_source(source).into_iter().take(count)).collect()
    }

    fn decoder_spec<B: AsRef<[u8]>>(
        &self,
        output: DecodeOutput,
        tensor: &HuffmanTensor<B>,
    ) -> Result<VariantSpec, BenchError> {
        let bits = tensor.code().max_length();
        decoder(self.arch, output, bits).ok_or(BenchError::CodeBits { bits })
    }
}

/// Returns the shape of a product; a grid's dimensions fit in 32 bits.
fn problem(m: u32, grid: TileGrid) -> GemmShape {
    GemmShape { m, n: grid.rows() as u32, k: grid.cols() as u32 }
}
