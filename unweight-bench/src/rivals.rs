//! Compares Unweight's encodings with other systems' (docs/rivals.md) in interleaved rounds: decoding, and products
//! next to cuBLAS.
//!
//! Outputs are checked before timing: decoded weights bit for bit against the matrix, products against cuBLAS's.

mod layer;

use unweight_codegen::{
    VariantSpec,
    plan::GemmShape,
    spec::{DecodeOutput, Epilogue, GemmCompactSpec, Op, catalog},
};
use unweight_format::{
    CodeLimit, Float, FloatMatrix, Histogram, Matrix,
    raw::{HuffmanTensor, compact, exponents, huffman, packed},
    testing::{Random, float_weights},
};
use unweight_rivals::{
    cuda::{
        dfloat11::{DeviceUnit, UnitDecoder},
        matvans::{DeviceMatvans, MatvansKernels, round},
        tans::{DeviceTans, TansKernels, place, runs_on},
        zipserv::{DeviceZip, FUSED_MAX, ZipKernels},
    },
    dfloat11::{THREADS, Unit},
    matvans::{self, Layout},
    tans, zipserv,
};
use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceError, DeviceMatrix, DevicePacked, ExecContext, KernelSet, MatrixRef,
    raw::{
        choose::{
            candidates::PackedUse,
            graph::{decoder, element_decoder},
            recon::{Source, candidates},
        },
        device::pinned::{Pinned, Source as HostSource},
        ops::{
            decode_compact::CompactDecoder,
            decode_huffman::{Decoder, output_bytes},
            gemm_compact::CompactGemm,
            gemm_packed::{PackedGemm, context_size},
            gemm_recon::Matmul,
            pack::Packer,
        },
        weight::{DeviceCompact, DeviceExponents, DeviceHuffman},
    },
};

use crate::{
    BenchError,
    data::{halves, normal_bf16, relative_error},
    options::options,
    timing::{Contender, Report, Row, Timer, Timing},
};

/// MatVANS's layouts, by their names in the report.
const MATVANS: [(&str, Layout); 3] = [
    ("matvans warp-rows", Layout::Rows),
    ("matvans warp-stripes", Layout::Stripes),
    ("matvans warp-per-row", Layout::Lanes),
];

options! {
    /// Options of [`bench_rivals`](crate::bench_rivals()).
    RivalsOptions {
        /// `[n, k]` of the weights, multiples of 64.
        shapes: Vec<(u32, u32)> = vec![(14336, 4096)],
        /// Batches of the products.
        batches: Vec<u32> = vec![1, 8, 32, 128],
        /// Measure BF16 weights of these shapes: decoding, copies from the host, products.
        weights: bool = true,
        /// Measure decoding of FP8, F16 and F32 weights of these shapes.
        elements: bool = true,
        /// Measure the linears of one Llama-3.1-8B layer at these batches, with one DFloat11 unit.
        layer: bool = true,
        /// Rows and columns of the int8 matrices, a multiple of 128; 0 disables them.
        int8: u32 = 4096,
        /// Entropy of their values, bits.
        int8_entropy: Vec<f64> = vec![4.0, 5.0],
        /// Size of the FP8 vectors, MiB.
        fp8_mib: Vec<u32> = vec![32, 64, 128, 256],
    }
}

/// Measures everything that `options` select. Calls `progress` with a line for each group of contenders.
///
/// # Errors
/// Fails without cuBLAS, without enough memory, if an encoding cannot hold the weights, or if a kernel's output is
/// wrong.
pub fn bench_rivals(
    kernels: &KernelSet,
    options: &RivalsOptions,
    timing: &Timing,
    progress: &dyn Fn(&str),
) -> Result<Report<RivalsOptions>, BenchError> {
    let stream = kernels.device().stream()?;
    let bench = Bench { kernels, timer: Timer { stream: &stream, timing }, progress };
    let mut rows = Vec::new();
    for &(n, k) in &options.shapes {
        if options.weights {
            let bytes = normal_bf16(n as usize * k as usize, 0.02, 1);
            let encodings = bench.encodings(&bytes, (n, k))?;
            rows.extend(bench.decode(&encodings, &bytes)?);
            for &m in &options.batches {
                rows.extend(bench.products(&encodings, m)?);
            }
        }
        if options.elements {
            rows.extend(bench.elements((n, k))?);
        }
    }
    if options.layer {
        rows.extend(bench.layer(&options.batches)?);
    }
    if options.int8 > 0 {
        for &entropy in &options.int8_entropy {
            rows.extend(bench.int8(options.int8, entropy)?);
        }
    }
    if runs_on(kernels.device().info().arch) {
        for &mib in &options.fp8_mib {
            rows.extend(bench.fp8((mib as usize) << 20)?);
        }
    }
    Ok(Report { device: kernels.device().info().clone(), timing: timing.clone(), options: options.clone(), rows })
}

struct Bench<'a> {
    kernels: &'a KernelSet,
    timer: Timer<'a>,
    progress: &'a dyn Fn(&str),
}

/// Several copies of one weight in all encodings.
struct Encodings {
    n: u32,
    k: u32,
    tensor: HuffmanTensor<Vec<u8>>,
    whole: Vec<DeviceMatrix>,
    huffman: Vec<DeviceHuffman>,
    packed: Vec<DevicePacked>,
    compact: Vec<DeviceCompact>,
    units: Vec<DeviceUnit>,
    zips: Vec<DeviceZip>,
    zip: ZipKernels,
}

impl Encodings {
    fn problem(&self, m: u32) -> GemmShape {
        GemmShape { m, n: self.n, k: self.k }
    }
}

impl Bench<'_> {
    fn report_bits(&self, what: &str, bytes: u64, elements: usize) {
        (self.progress)(&format!("{what}: {:.3} bits per weight", bytes as f64 * 8.0 / elements as f64));
    }

    fn encodings(&self, bytes: &[u8], (n, k): (u32, u32)) -> Result<Encodings, BenchError> {
        let stream = self.timer.stream;
        let (rows, cols, elements) = (n as usize, k as usize, bytes.len() / 2);
        let (matrix, counts) = (Matrix::new(bytes, rows, cols)?, Histogram::of(bytes));
        let tensor = huffman::encode(matrix, CodeLimit::DEFAULT)?;
        let pack = packed::pack(matrix, &counts).map_err(|why| BenchError::Unpackable { n, k, why })?;
        let dense = compact::encode(matrix, &counts).map_err(|why| BenchError::Uncompact { n, k, why })?;
        let unit = Unit::encode(bytes, THREADS).map_err(not_storable("DFloat11", (n, k)))?;
        let zip = zipserv::encode(bytes, rows, cols).map_err(not_storable("ZipServ", (n, k)))?;
        // Enough copies of the smallest encoding for the rotation.
        let copies = self.timer.copies(elements * 4 / 3);
        let to_error = upload_error((n, k));
        let whole = DeviceMatrix::upload(stream, matrix)?;
        let encodings = Encodings {
            n,
            k,
            whole: self.timer.each(copies, |_| whole.duplicate(stream))?,
            huffman: (0..copies).map(|_| DeviceHuffman::upload(stream, &tensor)).collect::<Result<_, _>>()?,
            packed: self.timer.each(copies, |_| DevicePacked::upload(stream, &pack))?,
            compact: self.timer.each(copies, |_| DeviceCompact::upload(stream, &dense))?,
            units: (0..copies)
                .map(|_| DeviceUnit::upload(stream, &unit))
                .collect::<Result<_, _>>()
                .map_err(&to_error)?,
            zips: (0..copies).map(|_| DeviceZip::upload(stream, &zip)).collect::<Result<_, _>>().map_err(to_error)?,
            zip: ZipKernels::of(stream, self.kernels, n)?,
            tensor,
        };
        self.report_bits("unweight huffman", encodings.tensor.coded_bytes(), elements);
        self.report_bits("unweight packed", encodings.packed[0].bytes(), elements);
        self.report_bits("unweight compact", encodings.compact[0].bytes(), elements);
        self.report_bits("dfloat11", encodings.units[0].bytes(), elements);
        self.report_bits("zipserv", encodings.zips[0].bytes(), elements);
        Ok(encodings)
    }

    fn decoder(&self, tensor: &HuffmanTensor<Vec<u8>>, output: DecodeOutput) -> Result<Decoder, BenchError> {
        let (arch, bits) = (self.kernels.device().info().arch, tensor.code().max_length());
        let spec = decoder(arch, output, bits).ok_or(BenchError::CodeBits { bits })?;
        Ok(Decoder::new(self.kernels.get(&spec)?)?)
    }

    /// Measures decoding to BF16 from every encoding.
    fn decode(&self, encodings: &Encodings, bytes: &[u8]) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let (copies, problem) = (encodings.whole.len(), encodings.problem(0));
        let (full, packer, decoder, dfloat11) = (
            self.decoder(&encodings.tensor, DecodeOutput::Full)?,
            Packer::new(stream, self.kernels)?,
            CompactDecoder::of(self.kernels)?,
            UnitDecoder::of(stream, self.kernels)?,
        );
        let mut ctx = ExecContext::new(stream, ContextSize::default())?;
        let mut out = self.timer.each(copies, |_| DeviceMatrix::zeroed(stream, encodings.n, encodings.k))?;
        let mut flat = self.timer.each(copies, |_| DeviceBuffer::<u16>::zeroed(stream, bytes.len() / 2))?;
        let expected = halves(bytes);
        let (mut contenders, written) = (Vec::new(), bytes.len() as u64);
        for (name, read) in [
            ("unweight huffman", encodings.tensor.coded_bytes()),
            ("unweight packed", encodings.packed[0].bytes()),
            ("unweight compact", encodings.compact[0].bytes()),
            ("zipserv", encodings.zips[0].bytes()),
        ] {
            let mut run = |copy: usize| -> Result<(), DeviceError> {
                let to = &mut out[copy];
                match name {
                    "unweight huffman" => full.full(&mut ctx, &encodings.huffman[copy], to.view_mut()),
                    "unweight packed" => packer.unpack(&encodings.packed[copy], to.view_mut()),
                    "unweight compact" => decoder.full(stream, &encodings.compact[copy], to.view_mut()),
                    _ => encodings.zip.decompress(stream, &encodings.zips[copy], to),
                }
            };
            (0..copies).try_for_each(&mut run)?;
            let (graph, launches) = self.timer.record(problem, copies, run)?;
            // Outputs are filled before each contender, so a correct output comes from this contender.
            for to in &mut out {
                if to.to_host(stream)? != expected {
                    return Err(BenchError::WrongBits { kernel: name });
                }
                to.fill_bytes(stream, 0xff)?;
            }
            contenders.push(contender(name, (graph, launches), read + written, None));
        }
        let mut run = |copy: usize| dfloat11.decode(stream, &encodings.units[copy], &mut flat[copy]);
        (0..copies).try_for_each(&mut run)?;
        let recorded = self.timer.record(problem, copies, run)?;
        for to in &flat {
            if to.to_host(stream)? != expected {
                return Err(BenchError::WrongBits { kernel: "dfloat11" });
            }
        }
        contenders.push(contender("dfloat11", recorded, encodings.units[0].bytes() + written, None));
        // The usual alternative to compression if memory is short: weights stay in host memory. One copy takes long
        // enough to hide the gap between two graphs.
        let mut pinned = Pinned::zeroed(self.kernels.device(), expected.len())?;
        pinned.copy_from_slice(&expected);
        let host_source = HostSource::new(stream, pinned);
        flat[0].fill_bytes(stream, 0xff)?;
        let fetch = || host_source.copy(0, expected.len(), &flat[0], 0);
        fetch()?;
        stream.synchronize()?;
        let recorded = (stream.capture(fetch)?, 1);
        if flat[0].to_host(stream)? != expected {
            return Err(BenchError::WrongBits { kernel: "copy from the host" });
        }
        contenders.push(contender("copy from the host", recorded, written, None));
        // The driver's copy reads and writes the bytes of the weights. Kernels can be faster.
        let mut run = |copy: usize| out[copy].view_mut().copy_from(stream, encodings.whole[copy].view());
        (0..copies).try_for_each(&mut run)?;
        let recorded = self.timer.record(problem, copies, run)?;
        contenders.push(contender("copy of bf16", recorded, 2 * written, None));
        let rows = self.timer.measure("rivals_decode", contenders, copies, problem, self.progress);
        // The graphs use these.
        drop((ctx, packer, out, flat, dfloat11, host_source));
        rows
    }

    /// Measures decoding to FP8, F16 and F32 from exponents.
    fn elements(&self, (n, k): (u32, u32)) -> Result<Vec<Row>, BenchError> {
        let (stream, problem) = (self.timer.stream, GemmShape { m: 0, n, k });
        let (rows, cols) = (n as usize, k as usize);
        // Enough copies of the smallest output for the rotation.
        let copies = self.timer.copies(rows * cols);
        let mut ctx = ExecContext::new(stream, ContextSize::default())?;
        let (mut contenders, mut kept) = (Vec::new(), Vec::new());
        for (name, float) in [
            ("unweight e4m3", Float::E4M3),
            ("unweight e5m2", Float::E5M2),
            ("unweight f16", Float::F16),
            ("unweight f32", Float::F32),
        ] {
            let bytes = float_weights(float, rows * cols, 7);
            let tensor = exponents::encode(FloatMatrix::new(float, &bytes, rows, cols)?, CodeLimit::DEFAULT)?;
            self.report_bits(name, tensor.coded_bytes(), rows * cols);
            let (arch, bits) = (self.kernels.device().info().arch, tensor.exponents().code().max_length());
            let spec = element_decoder(arch, float, bits).ok_or(BenchError::CodeBits { bits })?;
            let decoder = Decoder::new(self.kernels.get(&spec)?)?;
            let sources = self.timer.each(copies, |_| DeviceExponents::upload(stream, &tensor))?;
            let mut out = self.timer.each(copies, |_| DeviceBuffer::<u8>::zeroed(stream, bytes.len()))?;
            for to in &mut out {
                to.fill_bytes(stream, 0xff)?;
            }
            let mut run = |copy: usize| decoder.elements(&mut ctx, &sources[copy], &mut out[copy]);
            (0..copies).try_for_each(&mut run)?;
            let recorded = self.timer.record(problem, copies, run)?;
            ctx.synchronize()?;
            for to in &out {
                if to.to_host(stream)? != bytes {
                    return Err(BenchError::WrongBits { kernel: name });
                }
            }
            contenders.push(contender(name, recorded, tensor.coded_bytes() + bytes.len() as u64, None));
            kept.push((decoder, sources, out));
        }
        let rows = self.timer.measure("rivals_elements", contenders, copies, problem, self.progress);
        // The graphs use these.
        drop((ctx, kept));
        rows
    }

    /// Measures products from every encoding that has a kernel, next to cuBLAS.
    fn products(&self, encodings: &Encodings, m: u32) -> Result<Vec<Row>, BenchError> {
        let (stream, info) = (self.timer.stream, self.kernels.device().info());
        let (copies, problem) = (encodings.whole.len(), encodings.problem(m));
        let mut ctx = ExecContext::new(stream, ContextSize::default().with_cublas())?;
        let x = halves(&normal_bf16(m as usize * encodings.k as usize, 1.0, 2 + u64::from(m)));
        let x = DeviceMatrix::from_host(stream, m, encodings.k, &x)?;
        let mut y = DeviceMatrix::zeroed(stream, m, encodings.n)?;
        let io = (x.bytes() + y.bytes()) as u64;
        let cublas = ctx.cublas()?;
        let mut run = |copy: usize| cublas.matmul(x.view(), encodings.whole[copy].view(), y.view_mut(), false);
        (0..copies).try_for_each(&mut run)?;
        let recorded = self.timer.record(problem, copies, run)?;
        let expected = y.to_host(stream)?;
        let mut contenders = vec![Contender::cublas(recorded, io + encodings.whole[0].bytes() as u64)];

        let packed_use =
            PackedUse { escapes: encodings.packed[0].has_escapes(), pdl: false, epilogue: Epilogue::Store };
        let spec = self.kernels.chooser().choose(problem, packed_use).ok_or(BenchError::NoVariant(problem))?;
        ctx.reserve(context_size(&spec, problem, info.sms)?)?;
        let packed = PackedGemm::new(self.kernels.get(&spec)?)?;
        let compact = self.compact(m)?;
        let recon = |source| -> Result<Option<Matmul>, BenchError> {
            let specs = candidates(info.arch, source, problem, info.sms, Epilogue::Store);
            Ok(specs.first().map(|spec| Matmul::new(self.kernels.get(spec)?)).transpose()?)
        };
        let exponent_product = recon(Source::Exponent)?;
        let palette_product = recon(Source::Palette { max_verbatim_rows: encodings.tensor.max_verbatim_rows() })?;
        let (to_exponents, to_palette) = (
            self.decoder(&encodings.tensor, DecodeOutput::Exponent)?,
            self.decoder(&encodings.tensor, DecodeOutput::Palette)?,
        );
        let grid = encodings.tensor.grid();
        // All weights share one buffer of exponents, as in models; palettes are stored.
        let mut exponents = DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Exponent))?;
        let palettes = self.timer.each(copies, |copy| {
            let mut bytes = DeviceBuffer::zeroed(stream, output_bytes(grid, DecodeOutput::Palette))?;
            to_palette.palette(&mut ctx, &encodings.huffman[copy], &mut bytes)?;
            Ok(bytes)
        })?;
        ctx.synchronize()?;
        let mut scratch = DeviceMatrix::zeroed(stream, encodings.n, encodings.k)?;
        let unit_decoder = UnitDecoder::of(stream, self.kernels)?;
        let mut flat = DeviceBuffer::<u16>::zeroed(stream, encodings.n as usize * encodings.k as usize)?;
        let palette_bytes = encodings.huffman[0].as_palette(&palettes[0]).bytes() as u64;
        let exponent_bytes = encodings.tensor.coded_bytes();
        for (name, has_kernel, weights) in [
            ("unweight huffman", exponent_product.is_some(), exponent_bytes),
            ("unweight palette", palette_product.is_some(), palette_bytes),
            ("unweight packed", true, encodings.packed[0].bytes()),
            ("unweight compact", compact.is_some(), encodings.compact[0].bytes()),
            ("zipserv", m <= FUSED_MAX, encodings.zips[0].bytes()),
            ("zipserv by cublas", true, encodings.zips[0].bytes() + 2 * encodings.whole[0].bytes() as u64),
            ("dfloat11 by cublas", true, encodings.units[0].bytes() + 2 * encodings.whole[0].bytes() as u64),
        ] {
            if !has_kernel {
                continue;
            }
            let mut run = |copy: usize, y: &mut DeviceMatrix| -> Result<(), DeviceError> {
                let source: &DeviceHuffman = &encodings.huffman[copy];
                match (name, &exponent_product, &palette_product, &compact) {
                    ("unweight huffman", Some(product), ..) => {
                        to_exponents.exponent(&mut ctx, source, &mut exponents)?;
                        product.exponent(&mut ctx, x.view(), source.as_exponent(&exponents), y.view_mut())
                    }
                    ("unweight palette", _, Some(product), _) => {
                        product.palette(&mut ctx, x.view(), source.as_palette(&palettes[copy]), y.view_mut())
                    }
                    ("unweight compact", _, _, Some(product)) => {
                        product.enqueue(stream, x.view(), &encodings.compact[copy], y.view_mut())
                    }
                    ("zipserv", ..) => encodings.zip.gemm(stream, &x, &encodings.zips[copy], y),
                    ("zipserv by cublas", ..) => {
                        encodings.zip.decompress(stream, &encodings.zips[copy], &mut scratch)?;
                        ctx.cublas()?.matmul(x.view(), scratch.view(), y.view_mut(), false)
                    }
                    ("dfloat11 by cublas", ..) => {
                        unit_decoder.decode(stream, &encodings.units[copy], &mut flat)?;
                        let weights = MatrixRef::new(&flat, encodings.n, encodings.k, encodings.k.into())?;
                        ctx.cublas()?.matmul(x.view(), weights, y.view_mut(), false)
                    }
                    _ => packed.enqueue(&mut ctx, x.view(), &encodings.packed[copy], y.view_mut()),
                }
            };
            y.fill_bytes(stream, 0xff)?;
            run(copies - 1, &mut y)?;
            let error = relative_error(&y.to_host(stream)?, &expected);
            BenchError::check_product(name, problem, error)?;
            let recorded = self.timer.record(problem, copies, |copy| run(copy, &mut y))?;
            contenders.push(contender(name, recorded, io + weights, Some(error)));
        }
        let rows = self.timer.measure("rivals_product", contenders, copies, problem, self.progress);
        // The graphs use these.
        drop((ctx, x, y, exponents, palettes, scratch, unit_decoder, flat));
        rows
    }

    /// Measures a chain of products of int8 matrices and a vector, as MatVANS's benchmark does, from coded and from
    /// plain values. The output of each product is the next one's vector.
    fn int8(&self, extent: u32, entropy: f64) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let (d, problem) = (extent as usize, GemmShape { m: 1, n: extent, k: extent });
        let sigma = entropy.exp2() / (2.0 * std::f64::consts::PI * std::f64::consts::E).sqrt();
        let integers = |count: usize, sigma: f64, seed: u64| -> Vec<i8> {
            let value = |bits: u16| f32::from_bits(u32::from(bits) << 16).round().clamp(-127.0, 127.0) as i8;
            halves(&normal_bf16(count, sigma, seed)).into_iter().map(value).collect()
        };
        let (values, first) = (integers(d * d, sigma, 3), integers(d, 30.0, 4));
        let scale = (1.0 / (sigma * f64::from(extent).sqrt())) as f32;
        let copies = self.timer.copies(d * d / 2).max(10);
        let mut expected = first.clone();
        for _ in 0..copies {
            let product = |row: &[i8]| row.iter().zip(&expected).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
            expected = values.chunks_exact(d).map(|row| round(product(row), scale)).collect();
        }
        let kernels = MatvansKernels::of(stream, self.kernels)?;
        let dense = self.timer.each(copies, |_| DeviceBuffer::from_host(stream, &values))?;
        let mut coded = Vec::new();
        for (name, layout) in MATVANS {
            let matrix = matvans::encode(&values, d, d, layout).map_err(not_storable("MatVANS", (extent, extent)))?;
            self.report_bits(&format!("{name} at {entropy} bits"), matrix.bytes(), d * d);
            coded.push((name, self.timer.each(copies, |_| DeviceMatvans::upload(stream, &matrix))?));
        }
        let mut vectors = self.timer.each(copies + 1, |_| DeviceBuffer::<i8>::zeroed(stream, d))?;
        vectors[0].write(stream, 0, &first)?;
        let mut contenders = Vec::new();
        for name in MATVANS.map(|(name, _)| name).into_iter().chain(["int8 dp4a"]) {
            let matrices = coded.iter().find(|(coded_name, _)| *coded_name == name).map(|(_, matrices)| matrices);
            let bytes = matrices.map_or((d * d) as u64, |matrices| matrices[0].bytes()) + 2 * d as u64;
            let mut run = |copy: usize| {
                let Ok([x, y]) = vectors.get_disjoint_mut([copy, copy + 1]) else { return Ok(()) };
                match matrices {
                    Some(matrices) => kernels.multiply(stream, &matrices[copy], x, scale, y),
                    None => kernels.multiply_dense(stream, &dense[copy], x, scale, y),
                }
            };
            (0..copies).try_for_each(&mut run)?;
            let recorded = self.timer.record(problem, copies, run)?;
            if vectors[copies].to_host(stream)? != expected {
                return Err(BenchError::WrongBits { kernel: name });
            }
            for vector in &mut vectors[1..] {
                vector.fill_bytes(stream, 0xff)?;
            }
            contenders.push(contender(&format!("{name} at {entropy} bits"), recorded, bytes, None));
        }
        let rows = self.timer.measure("rivals_int8", contenders, copies, problem, self.progress);
        // The graphs use these.
        drop((kernels, dense, coded, vectors));
        rows
    }

    /// Measures sums of FP8 vectors, coded in streams of several lengths and plain. `n` is the vectors' size in bytes.
    fn fp8(&self, bytes: usize) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let problem = GemmShape { m: 0, n: u32::try_from(bytes).unwrap_or(u32::MAX), k: 1 };
        let vector = |seed: u64| -> Vec<u8> {
            // Maps 16 random bits to an exponent.
            let (mut table, mut cumulative) = (Vec::with_capacity(1 << 16), 0.0);
            for (exponent, share) in tans::QWEN3_14B.iter().enumerate() {
                cumulative += share;
                let end = ((cumulative * 65536.0) as usize).min(1 << 16);
                table.resize(end.max(table.len()), exponent as u8);
            }
            table.resize(1 << 16, 13);
            let mut random = Random::new(seed);
            let byte = |bits: u64| bits as u8 & 0x87 | table[(bits >> 16 & 0xffff) as usize] << 3;
            (0..bytes).map(|_| byte(random.bits())).collect()
        };
        let (a, b) = (vector(5), vector(6));
        let kernels = TansKernels::of(stream, self.kernels)?;
        let (plain_a, plain_b) = (DeviceBuffer::from_host(stream, &a)?, DeviceBuffer::from_host(stream, &b)?);
        let mut out = DeviceBuffer::<u8>::zeroed(stream, bytes)?;
        let mut run = |_| kernels.add_plain(stream, &plain_a, &plain_b, &mut out);
        run(0)?;
        let recorded = self.timer.record(problem, 1, run)?;
        let expected = out.to_host(stream)?;
        let mut contenders = vec![contender("fp8 as it is", recorded, 3 * bytes as u64, None)];
        let mut coded = Vec::new();
        for (name, per_stream) in [("tans 128", 128), ("tans 256", 256), ("tans 512", 512), ("tans 1024", 1024)] {
            let code = |bytes: &[u8]| -> Result<DeviceTans, BenchError> {
                let shape = (problem.n, 1);
                let vector = tans::encode(bytes, per_stream, &tans::QWEN3_14B).map_err(not_storable("tANS", shape))?;
                DeviceTans::upload(stream, &vector).map_err(upload_error(shape))
            };
            let (a, b) = (code(&a)?, code(&b)?);
            self.report_bits(name, a.bytes(), bytes);
            out.fill_bytes(stream, 0xff)?;
            let mut run = |_| kernels.add(stream, &a, &b, &mut out);
            run(0)?;
            let recorded = self.timer.record(problem, 1, run)?;
            let got = out.to_host(stream)?;
            let streams = bytes / per_stream;
            if (0..bytes).any(|i| got[place(i, per_stream, streams)] != expected[i]) {
                return Err(BenchError::WrongBits { kernel: name });
            }
            contenders.push(contender(name, recorded, a.bytes() + b.bytes() + bytes as u64, None));
            coded.push((a, b));
        }
        let rows = self.timer.measure("rivals_fp8", contenders, 1, problem, self.progress);
        // The graphs use these.
        drop((kernels, plain_a, plain_b, out, coded));
        rows
    }

    /// Returns the first compact product whose batch tile holds `m`.
    fn compact(&self, m: u32) -> Result<Option<CompactGemm>, BenchError> {
        let of = |spec: &VariantSpec| match spec.op {
            Op::GemmCompact(op) => Some(op),
            _ => None,
        };
        let spec = catalog::on::<GemmCompactSpec>(self.kernels.device().info().arch)
            .filter_map(|spec| Some((spec, of(&spec)?)))
            .filter(|(_, op)| op.epilogue == Epilogue::Store && !op.pdl && op.batch_tile.get() >= m)
            .min_by_key(|(_, op)| op.batch_tile);
        Ok(spec.map(|(spec, _)| CompactGemm::new(self.kernels.get(&spec)?)).transpose()?)
    }
}

fn contender(name: &str, (graph, launches): (unweight_rt::Graph, usize), bytes: u64, error: Option<f64>) -> Contender {
    Contender { name: name.to_owned(), graph, launches, bytes, error, dispatched: false }
}

/// Returns the error for a format that cannot hold weights of this shape.
pub(crate) fn not_storable<E: std::fmt::Display>(system: &'static str, (n, k): (u32, u32)) -> impl Fn(E) -> BenchError {
    move |why| BenchError::Unheld { system, n, k, why: why.to_string() }
}

/// Converts an error of uploading weights of this shape to a rival's format.
pub(crate) fn upload_error(shape: (u32, u32)) -> impl Fn(unweight_rivals::cuda::Error) -> BenchError {
    move |error| match error {
        unweight_rivals::cuda::Error::Device(error) => BenchError::Device(error),
        other => not_storable("a rival", shape)(other),
    }
}
