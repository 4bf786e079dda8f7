//! How long kernels take, beside cuBLAS in the same run.
//!
//! What makes a number mean something here:
//! - **Weights come from memory.** Each launch of a graph walks through copies of the weights, at least [`BenchOptions::min_copies`] of them and
//!   [`BenchOptions::rotate_bytes`] in all, so the second-level cache (50-60 MB) never holds the next one.
//! - **Contenders take turns.** A round launches every contender's graph once; above batch 256 the card is power-limited, and whoever ran
//!   first and cool would look better.
//! - **The device never waits for the host.** All of a round is enqueued behind a launch that is not measured.
//! - **What was measured was right.** Outputs are filled with NaN, computed, and held against cuBLAS before the clock starts.
//!
//! A graph node costs about 0.9 us on an H200, for every contender alike; it is part of the times.

use std::fmt;

use serde::Serialize;
use unweight_codegen::{
    VariantSpec,
    plan::Problem,
    spec::{Arch, DecodeOutput, EncodeStage, Epilogue},
};
use unweight_format::{CodeLimit, Grid, HuffmanTensor, Matrix, encode};

use crate::{
    cublas::Cublas,
    decoder::{Decoder, output_bytes},
    device::{DeviceBuffer, DeviceError, DeviceInfo, Graph, Stream},
    dispatch::{Kernels, Source, candidates, decoder},
    encoder::{EncodeBuffers, GpuEncoder, HUFFMAN_STAGES, PALETTE_STAGES},
    matmul::Matmul,
    tensor::{DeviceHuffman, DeviceMatrix},
};

/// What is measured, and how often.
#[derive(Clone, Debug, Serialize)]
pub struct BenchOptions {
    /// `[n, k]` of the weights.
    pub shapes: Vec<(u32, u32)>,
    /// Batches of the matmuls.
    pub batches: Vec<u32>,
    /// Measure the preprocess family.
    pub decode: bool,
    /// Measure the encoder.
    pub encode: bool,
    /// Measure the matmuls.
    pub matmul: bool,
    /// Every variant of Table 5 that fits the shape, rather than the heuristic's first choice.
    pub all_variants: bool,
    /// Rounds that count.
    pub rounds: usize,
    /// Rounds before them that do not.
    pub warmup_rounds: usize,
    /// Least copies of the weights.
    pub min_copies: usize,
    /// Least bytes of all copies together.
    pub rotate_bytes: usize,
    /// Bytes per second, in units of 10^9, that the byte floor assumes: what a plain read reaches, not the data sheet.
    pub floor_gb_per_s: f64,
    /// Code limit of the weights.
    pub code_limit: u32,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            shapes: vec![(14336, 4096), (4096, 14336), (4096, 4096)],
            batches: vec![1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
            decode: true,
            encode: true,
            matmul: true,
            all_variants: false,
            rounds: 60,
            warmup_rounds: 10,
            min_copies: 5,
            rotate_bytes: 440_000_000,
            floor_gb_per_s: 4100.0,
            code_limit: CodeLimit::DEFAULT.bits(),
        }
    }
}

/// What was measured, on what.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The device.
    pub device: DeviceInfo,
    /// How it was measured.
    pub options: BenchOptions,
    /// One row per contender and problem.
    pub rows: Vec<Row>,
}

/// One contender on one problem.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `decode`, `encode` or `matmul`.
    pub family: &'static str,
    /// Name of the variant, `cublas`, or the stages of the encoder.
    pub contender: String,
    /// Batch rows; 0 without a batch.
    pub m: u32,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// Copies of the weights.
    pub copies: usize,
    /// Median over the rounds, us.
    pub median_us: f64,
    /// 10th percentile, us.
    pub p10_us: f64,
    /// 90th percentile, us.
    pub p90_us: f64,
    /// Bytes that must be read or written.
    pub bytes: u64,
    /// The time that these take at [`BenchOptions::floor_gb_per_s`], us.
    pub floor_us: f64,
    /// `floor_us / median_us`: 1 is as fast as the memory.
    pub floor_fraction: f64,
    /// cuBLAS's median over this one, in the same rounds: above 1 is faster than cuBLAS.
    pub speedup_over_cublas: Option<f64>,
    /// `|y - y_cublas| / |y_cublas|` of the outputs.
    pub error_to_cublas: Option<f64>,
}

/// Measures everything that `options` asks for. `progress` hears a line for each group of contenders.
///
/// # Errors
/// No cuBLAS, not enough memory, a kernel that cannot be made, or one whose output is wrong.
pub fn bench_kernels(
    kernels: &Kernels,
    options: &BenchOptions,
    progress: &dyn Fn(&str),
) -> Result<Report, DeviceError> {
    let limit = CodeLimit::new(options.code_limit)?;
    let stream = kernels.device().stream()?;
    let bench = Bench { kernels, stream: &stream, options, limit, arch: kernels.device().info().arch };
    let elements = options.shapes.iter().map(|&(n, k)| n as usize * k as usize).max().unwrap_or(0);
    progress(&format!("{elements} weights from N(0, 0.02^2)"));
    let weights = normal_bf16(elements, 0.02, 1);
    let mut rows = Vec::new();
    for &(n, k) in &options.shapes {
        let bytes = &weights[..n as usize * k as usize * 2];
        let matrix = Matrix::new(bytes, n as usize, k as usize)?;
        let tensor = encode::huffman(matrix, limit)?;
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
        if options.matmul {
            rows.extend(bench.matmul(&tensor, progress)?);
        }
    }
    Ok(Report { device: kernels.device().info().clone(), options: options.clone(), rows })
}

struct Bench<'a> {
    kernels: &'a Kernels,
    stream: &'a Stream,
    options: &'a BenchOptions,
    limit: CodeLimit,
    arch: Arch,
}

/// A graph with what it is called and moves.
struct Contender {
    name: String,
    graph: Graph,
    /// Launches of the kernel in the graph.
    launches: usize,
    bytes: u64,
    error: Option<f64>,
}

impl Bench<'_> {
    fn decode(
        &self,
        tensor: &HuffmanTensor<Vec<u8>>,
        original: &[u8],
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Row>, DeviceError> {
        let (grid, stream) = (tensor.grid(), self.stream);
        let specs =
            DecodeOutput::ALL.iter().map(|&output| self.decoder_spec(output, tensor)).collect::<Result<Vec<_>, _>>()?;
        self.kernels.prepare(&specs, &|_| {})?;
        let coded = DeviceHuffman::upload(stream, tensor)?.coded_exponent_bytes();
        // The palette transcoder moves least.
        let copies = self.copies(coded + output_bytes(grid, DecodeOutput::Palette));
        let sources = (0..copies).map(|_| DeviceHuffman::upload(stream, tensor)).collect::<Result<Vec<_>, _>>()?;
        let mut full: Vec<DeviceMatrix> =
            self.each(copies, |_| DeviceMatrix::zeroed(stream, grid.rows() as u32, grid.cols() as u32))?;
        let mut exponents =
            self.each(copies, |_| DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Exponent)))?;
        let mut indices =
            self.each(copies, |_| DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Palette)))?;
        let mut contenders = Vec::new();
        let mut decoders = Vec::new();
        for (spec, &output) in specs.iter().zip(DecodeOutput::ALL) {
            let mut decoder = Decoder::new(stream, self.kernels.get(spec)?)?;
            let mut run = |copy: usize| match output {
                DecodeOutput::Full => decoder.full(stream, &sources[copy], &mut full[copy]),
                DecodeOutput::Exponent => decoder.exponent(stream, &sources[copy], &mut exponents[copy]),
                DecodeOutput::Palette => decoder.palette(stream, &sources[copy], &mut indices[copy]),
            };
            (0..copies).try_for_each(&mut run)?;
            let (graph, launches) = self.record(copies, run)?;
            decoder.check(stream)?;
            decoders.push(decoder);
            let sign_mantissa = if output == DecodeOutput::Full { grid.elements() } else { 0 };
            let bytes = (coded + sign_mantissa + output_bytes(grid, output)) as u64;
            contenders.push(Contender { name: spec.to_string(), graph, launches, bytes, error: None });
        }
        if full[0].data().to_host(stream)? != halves(original) {
            return Err(DeviceError::Shape("decode_full does not give the weights back; run the gpu tests".to_owned()));
        }
        let rows = self.measure("decode", contenders, copies, 0, grid, progress);
        // Graphs name the decoders' fault words and the buffers: they live until here.
        drop((decoders, sources, full, exponents, indices));
        rows
    }

    fn encode(
        &self,
        matrix: Matrix<'_>,
        tensor: &HuffmanTensor<Vec<u8>>,
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Row>, DeviceError> {
        let (grid, stream) = (matrix.grid(), self.stream);
        let encoder = GpuEncoder::new(self.kernels, self.limit)?;
        let copies = self.copies(grid.elements() * 3);
        let mut buffers = self.each(copies, |_| {
            let mut buffers = EncodeBuffers::new(stream, grid)?;
            buffers.set_weights(stream, matrix)?;
            Ok(buffers)
        })?;
        // Stages depend on those before, so each is measured as the end of a sequence; differences are the stages.
        let huffman = (1..=HUFFMAN_STAGES.len()).map(|end| &HUFFMAN_STAGES[..end]);
        let sequences: Vec<&[EncodeStage]> = huffman.chain([&PALETTE_STAGES[..]]).collect();
        let coded = tensor.coded_bytes() - grid.elements() as u64;
        let mut contenders = Vec::new();
        for stages in sequences {
            (0..copies).try_for_each(|copy| encoder.enqueue(stream, &mut buffers[copy], stages))?;
            stream.synchronize()?;
            let (graph, launches) = self.record(copies, |copy| encoder.enqueue(stream, &mut buffers[copy], stages))?;
            let name = stages.iter().map(|stage| stage.tag()).collect::<Vec<_>>().join("+");
            // One reading of the weights and one writing of the sections, which no encoder can do without.
            let sections = match stages.last() {
                Some(EncodeStage::Write) => coded,
                Some(EncodeStage::Palette) => output_bytes(grid, DecodeOutput::Palette) as u64,
                _ => 0,
            };
            let bytes = grid.elements() as u64 * 3 + sections;
            contenders.push(Contender { name, graph, launches, bytes, error: None });
        }
        encoder.enqueue(stream, &mut buffers[0], &HUFFMAN_STAGES)?;
        if buffers[0].huffman(stream)?.encoded_exp() != tensor.encoded_exp() {
            return Err(DeviceError::Shape(
                "the GPU encoder's bits differ from the CPU's; run the gpu tests".to_owned(),
            ));
        }
        let rows = self.measure("encode", contenders, copies, 0, grid, progress);
        drop(buffers);
        rows
    }

    fn matmul(&self, tensor: &HuffmanTensor<Vec<u8>>, progress: &dyn Fn(&str)) -> Result<Vec<Row>, DeviceError> {
        let (grid, stream) = (tensor.grid(), self.stream);
        let (n, k) = (grid.rows() as u32, grid.cols() as u32);
        let copies = self.copies(grid.elements() * 3 / 2);
        let sources = self.each(copies, |_| DeviceHuffman::upload(stream, tensor))?;
        let decode = |output| -> Result<Decoder, DeviceError> {
            Decoder::new(stream, self.kernels.get(&self.decoder_spec(output, tensor)?)?)
        };
        let (mut full, mut exponent, mut palette) =
            (decode(DecodeOutput::Full)?, decode(DecodeOutput::Exponent)?, decode(DecodeOutput::Palette)?);
        let whole = self.each(copies, |copy| {
            let mut whole = DeviceMatrix::zeroed(stream, n, k)?;
            full.full(stream, &sources[copy], &mut whole)?;
            Ok(whole)
        })?;
        let exponents = self.each(copies, |copy| {
            let mut bytes = DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Exponent))?;
            exponent.exponent(stream, &sources[copy], &mut bytes)?;
            Ok(bytes)
        })?;
        let indices = self.each(copies, |copy| {
            let mut bytes = DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Palette))?;
            palette.palette(stream, &sources[copy], &mut bytes)?;
            Ok(bytes)
        })?;
        for decoder in [&mut full, &mut exponent, &mut palette] {
            decoder.check(stream)?;
        }
        let mut cublas = Cublas::new(stream)?;
        let mut rows = Vec::new();
        for &m in &self.options.batches {
            let x = halves(&normal_bf16(m as usize * k as usize, 1.0, 2 + u64::from(m)));
            let x = DeviceMatrix::from_host(stream, m, k, &x)?;
            let mut y = DeviceMatrix::zeroed(stream, m, n)?;
            let io = x.data().bytes() as u64 + y.data().bytes() as u64;

            (0..copies).try_for_each(|copy| cublas.matmul(&x, &whole[copy], &mut y, false))?;
            let expected = y.data().to_host(stream)?;
            let (graph, launches) = self.record(copies, |copy| cublas.matmul(&x, &whole[copy], &mut y, false))?;
            let bytes = io + whole[0].data().bytes() as u64;
            let mut contenders = vec![Contender { name: "cublas".to_owned(), graph, launches, bytes, error: None }];
            let specs = self.matmul_specs(tensor.max_verbatim_rows(), Problem { m, n, k });
            self.kernels.prepare(&specs, &|_| {})?;
            for spec in specs {
                let matmul = Matmul::new(self.kernels.get(&spec)?)?;
                let is_exponent = spec.to_string().contains("_matmul_exponent_");
                let weights = if is_exponent {
                    sources[0].as_exponent(&exponents[0]).bytes()
                } else {
                    sources[0].as_palette(&indices[0]).bytes()
                };
                let run = |copy: usize, y: &mut DeviceMatrix| {
                    let source: &DeviceHuffman = &sources[copy];
                    if is_exponent {
                        matmul.exponent(stream, &x, source.as_exponent(&exponents[copy]), y)
                    } else {
                        matmul.palette(stream, &x, source.as_palette(&indices[copy]), y)
                    }
                };
                y.data_mut().fill_bytes(stream, 0xff)?;
                run(copies - 1, &mut y)?;
                let error = relative_error(&y.data().to_host(stream)?, &expected);
                if error.is_nan() || error > 1e-2 {
                    let what = format!("differs from cuBLAS by {error:.2e} at m = {m}, n = {n}, k = {k}");
                    return Err(DeviceError::Launch { name: spec.to_string(), what });
                }
                let (graph, launches) = self.record(copies, |copy| run(copy, &mut y))?;
                let bytes = io + weights as u64;
                contenders.push(Contender { name: spec.to_string(), graph, launches, bytes, error: Some(error) });
            }
            rows.extend(self.measure("matmul", contenders, copies, m, grid, progress)?);
        }
        Ok(rows)
    }

    fn matmul_specs(&self, max_verbatim_rows: u32, problem: Problem) -> Vec<VariantSpec> {
        let sources = [Source::Exponent, Source::Palette { max_verbatim_rows }];
        let of_source = |source| candidates(self.arch, source, problem, Epilogue::Store);
        let count = if self.options.all_variants { usize::MAX } else { 1 };
        sources.into_iter().flat_map(|source| of_source(source).into_iter().take(count)).collect()
    }

    fn decoder_spec<B: AsRef<[u8]>>(
        &self,
        output: DecodeOutput,
        tensor: &HuffmanTensor<B>,
    ) -> Result<VariantSpec, DeviceError> {
        let bits = tensor.code().max_length();
        decoder(self.arch, output, bits)
            .ok_or_else(|| DeviceError::Shape(format!("no decoder takes codes of {bits} bits")))
    }

    /// Copies for a kernel that moves `bytes` of weights.
    fn copies(&self, bytes: usize) -> usize {
        self.options.rotate_bytes.div_ceil(bytes.max(1)).clamp(self.options.min_copies.max(1), 128)
    }

    fn each<T>(&self, copies: usize, make: impl FnMut(usize) -> Result<T, DeviceError>) -> Result<Vec<T>, DeviceError> {
        (0..copies).map(make).collect()
    }

    /// A graph that runs over all copies, several times if they are few, and how many launches it has.
    fn record(
        &self,
        copies: usize,
        mut run: impl FnMut(usize) -> Result<(), DeviceError>,
    ) -> Result<(Graph, usize), DeviceError> {
        /// So many that the gap between two graphs does not show.
        const LAUNCHES_MIN: usize = 20;
        let passes = LAUNCHES_MIN.div_ceil(copies);
        self.stream.synchronize()?;
        let graph = self.stream.capture(|| (0..passes * copies).try_for_each(|i| run(i % copies)))?;
        Ok((graph, passes * copies))
    }

    fn measure(
        &self,
        family: &'static str,
        contenders: Vec<Contender>,
        copies: usize,
        m: u32,
        grid: Grid,
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Row>, DeviceError> {
        let rounds = self.options.rounds.max(1);
        let mut times: Vec<Vec<f64>> = vec![Vec::with_capacity(rounds); contenders.len()];
        let launch = |contender: &Contender| {
            // SAFETY: the callers keep every buffer of their graphs alive until they have their rows.
            unsafe { contender.graph.launch() }
        };
        for round in 0..rounds + self.options.warmup_rounds {
            // Something to be busy with while the host enqueues the round.
            contenders.last().map_or(Ok(()), launch)?;
            let mut events = Vec::with_capacity(contenders.len());
            for contender in &contenders {
                let start = self.stream.event()?;
                launch(contender)?;
                events.push((start, self.stream.event()?));
            }
            self.stream.synchronize()?;
            if round >= self.options.warmup_rounds {
                for ((times, (start, end)), contender) in times.iter_mut().zip(&events).zip(&contenders) {
                    times.push(start.elapsed_us(end)? / contender.launches as f64);
                }
            }
        }
        let mut rows: Vec<Row> = contenders
            .into_iter()
            .zip(times)
            .map(|(contender, mut times)| {
                times.sort_by(f64::total_cmp);
                let at = |q: f64| times[((times.len() - 1) as f64 * q).round() as usize];
                let (median_us, floor_us) = (at(0.5), contender.bytes as f64 / (self.options.floor_gb_per_s * 1e3));
                Row {
                    family,
                    contender: contender.name,
                    m,
                    n: grid.rows() as u32,
                    k: grid.cols() as u32,
                    copies,
                    median_us,
                    p10_us: at(0.1),
                    p90_us: at(0.9),
                    bytes: contender.bytes,
                    floor_us,
                    floor_fraction: floor_us / median_us,
                    speedup_over_cublas: None,
                    error_to_cublas: contender.error,
                }
            })
            .collect();
        if let Some(cublas) = rows.iter().find(|row| row.contender == "cublas").map(|row| row.median_us) {
            rows.iter_mut().for_each(|row| row.speedup_over_cublas = Some(cublas / row.median_us));
        }
        for row in &rows {
            progress(&row.to_string());
        }
        Ok(rows)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { contender, m, n, k, median_us, p10_us, p90_us, floor_us, floor_fraction, .. } = self;
        write!(f, "{n}x{k} m={m} {contender}: {median_us:.1} us ({p10_us:.1}..{p90_us:.1})")?;
        write!(f, ", floor {floor_us:.1} us ({:.0} %)", floor_fraction * 100.0)?;
        match self.speedup_over_cublas {
            Some(speedup) => write!(f, ", {speedup:.2}x cuBLAS"),
            None => Ok(()),
        }
    }
}

/// A Markdown table.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceInfo { name, sms, driver, .. } = &self.device;
        let BenchOptions { rounds, floor_gb_per_s, .. } = &self.options;
        writeln!(f, "{name}, {sms} SMs, CUDA {driver}; median of {rounds} rounds, floor at {floor_gb_per_s} GB/s\n")?;
        writeln!(f, "| shape | m | contender | median us | p10 | p90 | of the floor | over cuBLAS | copies |")?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|")?;
        for row in &self.rows {
            let speedup = row.speedup_over_cublas.map_or_else(String::new, |speedup| format!("{speedup:.2}"));
            writeln!(
                f,
                "| {}x{} | {} | {} | {:.1} | {:.1} | {:.1} | {:.0} % | {speedup} | {} |",
                row.n,
                row.k,
                row.m,
                row.contender,
                row.median_us,
                row.p10_us,
                row.p90_us,
                row.floor_fraction * 100.0,
                row.copies
            )?;
        }
        Ok(())
    }
}

/// Little-endian bytes as 16-bit values.
pub fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

/// `|a - b| / |b|` over bf16 bit patterns, in double precision; NaN where `a` has a NaN.
pub fn relative_error(a: &[u16], b: &[u16]) -> f64 {
    let value = |bits: &u16| f64::from(f32::from_bits(u32::from(*bits) << 16));
    let (difference, norm) = a.iter().zip(b).fold((0.0, 0.0), |(difference, norm), (a, b)| {
        let (a, b) = (value(a), value(b));
        (difference + (a - b) * (a - b), norm + b * b)
    });
    if norm == 0.0 { f64::sqrt(difference) } else { f64::sqrt(difference / norm) }
}

/// `count` bf16 elements from N(0, sigma^2), as bytes; the same for the same seed.
///
/// Box-Muller over splitmix64, rounded to nearest even.
pub fn normal_bf16(count: usize, sigma: f64, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut uniform = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        // 24 bits, never 0.
        (((z ^ z >> 31) >> 40) as f32 + 0.5) / (1u64 << 24) as f32
    };
    let bf16 = |x: f32| {
        let bits = x.to_bits();
        ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
    };
    let mut bytes = Vec::with_capacity(count * 2 + 2);
    while bytes.len() < count * 2 {
        let radius = sigma as f32 * (-2.0 * uniform().ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * uniform()).sin_cos();
        bytes.extend(bf16(radius * cos).to_le_bytes());
        bytes.extend(bf16(radius * sin).to_le_bytes());
    }
    bytes.truncate(count * 2);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_normal_and_deterministic() {
        let bytes = normal_bf16(40_001, 0.02, 1);
        assert_eq!(bytes.len(), 80_002);
        assert_eq!(bytes, normal_bf16(40_001, 0.02, 1));
        assert_ne!(bytes, normal_bf16(40_001, 0.02, 2));
        let values: Vec<f64> = bytes
            .chunks_exact(2)
            .map(|b| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)))
            .collect();
        let count = values.len() as f64;
        let (mean, square) = (values.iter().sum::<f64>() / count, values.iter().map(|x| x * x).sum::<f64>() / count);
        assert!(mean.abs() < 5e-4 && (square.sqrt() - 0.02).abs() < 5e-4, "{mean} {square}");
    }

    #[test]
    fn errors_are_relative_and_a_nan_shows() {
        let one = 0x3f80;
        assert_eq!(relative_error(&[one, one], &[one, one]), 0.0);
        assert_eq!(relative_error(&[0x4000, one], &[one, 0]), f64::sqrt(2.0));
        assert!(relative_error(&[0xffff], &[one]).is_nan());
    }

    #[test]
    fn a_report_is_json_and_a_table() {
        let device = DeviceInfo {
            ordinal: 0,
            name: "H".to_owned(),
            arch: Arch::Sm90a,
            sms: 132,
            l2_bytes: 1,
            smem_bytes_per_block: 1,
            memory_bytes: 1,
            driver: "13.0".to_owned(),
        };
        let row = Row {
            family: "matmul",
            contender: "cublas".to_owned(),
            m: 1,
            n: 64,
            k: 64,
            copies: 5,
            median_us: 10.0,
            p10_us: 9.0,
            p90_us: 11.0,
            bytes: 41_000,
            floor_us: 0.01,
            floor_fraction: 0.001,
            speedup_over_cublas: Some(1.0),
            error_to_cublas: None,
        };
        let report = Report { device, options: BenchOptions::default(), rows: vec![row] };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["rows"][0]["median_us"], 10.0);
        assert_eq!(json["device"]["arch"], "sm_90a");
        assert!(report.to_string().contains("| 64x64 | 1 | cublas | 10.0 | 9.0 | 11.0 | 0 % | 1.00 | 5 |"));
    }
}
