//! Measures products from packed weights next to cuBLAS: by shape and batch, and for all linears of a layer in one
//! graph.

use std::collections::HashSet;

use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    plan::{GemmShape, Plan},
    spec::{Epilogue, GemmCompactSpec, GemmMmaSpec, Op, SmemCopy, catalog},
};
use unweight_format::{
    Histogram, Matrix,
    raw::{compact as compact_encoding, packed},
};

use unweight_rt::{
    ContextSize, DeviceError, DeviceMatrix, DevicePacked, ExecContext, KernelSet, MatrixMut, MatrixRef, Stream,
    raw::{
        choose::{
            candidates::{PackedUse, Registered, is_pdl},
            policy::PackedChooser,
            table::{MeasuredRow, MeasuredTable},
        },
        ops::{
            gemm_compact::CompactGemm,
            gemm_packed::{PackedGemm, context_size},
        },
        weight::DeviceCompact,
    },
};

use crate::{
    BenchError,
    data::{halves, normal_bf16, relative_error},
    options::options,
    timing::{Contender, Report, Row, Timer, Timing},
};

/// `[n, k]` of the linears of one Llama-3.1-8B layer, with q, k, v and gate, up merged as inference servers merge them.
pub const LLAMA_8B_LAYER: [(u32, u32); 4] = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)];

options! {
    /// Options of [`bench_matmul`](crate::bench_matmul()).
    MatmulOptions {
        /// `[n, k]` of the weights, multiples of 64.
        shapes: Vec<(u32, u32)> = vec![
                (14336, 4096),
                (28672, 4096),
                (4096, 14336),
                (4096, 4096),
                (6144, 4096),
                (1024, 4096),
                (128256, 4096),
                (28672, 8192),
                (8192, 28672),
                (8192, 8192),
                (10240, 8192),
            ],
        /// Batches of each shape.
        batches: Vec<u32> = vec![1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096],
        /// Share of 64-element row segments with an element outside the window. Normal weights already have 0.005, so
        /// this is the minimum.
        escapes: f64 = 0.005,
        /// Measure ordinary launches.
        ordinary: bool = true,
        /// Measure programmatic dependent launches.
        pdl: bool = true,
        /// Also measure this many variants that the cost model ranks fastest, next to the one that dispatch selects.
        candidates: usize = 0,
        /// Also measure the linears of a whole layer in one graph.
        layer: bool = true,
        /// A measured table for dispatch, instead of the shipped and cached tables.
        table: Option<MeasuredTable> = None,
        /// Also measure products from the compact encoding, at the batches that they support.
        compact: bool = false,
        /// For each variant of the packed product, also measure its counterpart without the copy engine.
        asynchronous: bool = false,
        /// Variants to time at every problem that their batch tile fits, catalogued or not, next to those registered
        /// with the kernels. Variants of `gemm_compact` need [`MatmulOptions::compact`].
        variants: Vec<VariantSpec> = Vec::new(),
    }
}

impl MatmulOptions {
    fn launches(&self) -> impl Iterator<Item = bool> {
        [(self.ordinary, false), (self.pdl, true)].into_iter().filter_map(|(enabled, pdl)| enabled.then_some(pdl))
    }
}

/// Measures everything that `options` select. Calls `progress` with a line for each group of contenders.
///
/// # Errors
/// Fails without cuBLAS, without enough memory, if a shape cannot be packed, or if a kernel's output is wrong.
pub fn bench_matmul(
    kernels: &KernelSet,
    options: &MatmulOptions,
    timing: &Timing,
    progress: &dyn Fn(&str),
) -> Result<Report<MatmulOptions>, BenchError> {
    let stream = kernels.device().stream()?;
    let info = kernels.device().info();
    let dispatch = match &options.table {
        Some(table) => kernels.chooser().clone().without_table().with_table(&info.name, table.clone()),
        None => kernels.chooser().clone(),
    };
    let bench = Bench {
        kernels,
        dispatch: &dispatch,
        timer: Timer { stream: &stream, timing },
        options,
        weights: Weights::new(options),
    };
    let mut rows = Vec::new();
    for &shape in &options.shapes {
        rows.extend(bench.shape(shape, progress)?);
    }
    if options.layer {
        rows.extend(bench.layer(&LLAMA_8B_LAYER, progress)?);
    }
    Ok(Report { device: kernels.device().info().clone(), timing: timing.clone(), options: options.clone(), rows })
}

impl Report<MatmulOptions> {
    /// Returns the fastest measured variant of each problem as a table for dispatch. Only shipped and registered
    /// variants are eligible, because a table may name no others.
    pub fn table(&self, registered: &Registered) -> MeasuredTable {
        let mut rows: Vec<(f64, MeasuredRow)> = Vec::new();
        for row in self.rows.iter().filter(|row| row.family == FAMILY) {
            let Ok(variant) = row.contender.parse::<VariantSpec>() else { continue };
            // Skip variants without the copy engine that were only measured for comparison, on an architecture that
            // ships others.
            if is_async(&variant) && !catalog::on::<GemmMmaSpec>(variant.arch).any(|shipped| is_async(&shipped)) {
                continue;
            }
            let Some(pdl) = is_pdl(&variant).filter(|_| registered.offers(&variant)) else { continue };
            let measured = MeasuredRow { n: row.n, k: row.k, m: row.m, pdl, variant };
            let same = |(_, other): &&mut (f64, MeasuredRow)| {
                (other.n, other.k, other.m, other.pdl) == (row.n, row.k, row.m, pdl)
            };
            match rows.iter_mut().find(same) {
                Some(best) if best.0 > row.median_us => *best = (row.median_us, measured),
                Some(_) => {}
                None => rows.push((row.median_us, measured)),
            }
        }
        MeasuredTable { device: self.device.name.clone(), rows: rows.into_iter().map(|(_, row)| row).collect() }
    }
}

const FAMILY: &str = "gemm_packed";

fn is_async(spec: &VariantSpec) -> bool {
    matches!(spec.op, Op::GemmMma(op) if op.copy == SmemCopy::Async)
}

/// Normal weights; one buffer serves every shape, because only the addresses of weights matter, not that they differ.
struct Weights {
    bytes: Vec<u8>,
}

impl Weights {
    const ELEMENTS: usize = 1 << 25;

    fn new(options: &MatmulOptions) -> Self {
        /// Share of row segments with an escape in N(0, 0.02^2): 76 elements per million are outside the best window.
        const NATURAL_ESCAPES: f64 = 0.0049;
        let mut bytes = normal_bf16(Self::ELEMENTS, 0.02, 1);
        let additional = (options.escapes - NATURAL_ESCAPES).max(0.0) / 64.0;
        if additional > 0.0 {
            // Every `1 / additional`-th element, displaced by its own bits, becomes 2^24 times smaller.
            let stride = (1.0 / additional) as usize;
            for at in (0..Self::ELEMENTS - stride).step_by(stride) {
                let at = at + usize::from(bytes[2 * at]) * stride / 256;
                let value = u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]);
                let smaller = value.saturating_sub(24 << 7) & 0x7fff | value & 0x8000;
                bytes[2 * at..2 * at + 2].copy_from_slice(&smaller.to_le_bytes());
            }
        }
        Self { bytes }
    }

    /// Returns `[n, k]` weights by repeating the buffer.
    fn matrix(&self, n: u32, k: u32) -> Vec<u8> {
        let bytes = n as usize * k as usize * 2;
        self.bytes.iter().copied().cycle().take(bytes).collect()
    }
}

/// Returns the elements of a product to compare: all, or for a large product its first and last elements.
fn sample(stream: &Stream, y: &DeviceMatrix) -> Result<Vec<u16>, DeviceError> {
    const END: usize = 1 << 21;
    let len = y.data().len();
    if len <= 2 * END {
        return y.to_host(stream);
    }
    let mut ends = y.data().read(stream, 0, END)?;
    ends.extend(y.data().read(stream, len - END, END)?);
    Ok(ends)
}

/// Runs a product with weight `i`.
type Run<'a> = dyn FnMut(usize, MatrixRef<'_>, MatrixMut<'_>) -> Result<(), DeviceError> + 'a;

struct Bench<'a> {
    kernels: &'a KernelSet,
    dispatch: &'a PackedChooser,
    timer: Timer<'a>,
    options: &'a MatmulOptions,
    weights: Weights,
}

/// Several copies of a weight in each encoding.
struct Copies {
    whole: Vec<DeviceMatrix>,
    packed: Vec<DevicePacked>,
    /// Empty unless requested.
    compact: Vec<DeviceCompact>,
    escapes: bool,
}

impl Bench<'_> {
    fn copies(&self, (n, k): (u32, u32), compact: bool, progress: &dyn Fn(&str)) -> Result<Copies, BenchError> {
        let stream = self.timer.stream;
        let bytes = self.weights.matrix(n, k);
        let tensor = {
            let matrix = Matrix::new(&bytes, n as usize, k as usize)?;
            packed::pack(matrix, &Histogram::of(&bytes)).map_err(|why| BenchError::Unpackable { n, k, why })?
        };
        progress(&format!(
            "{n} x {k}: {:.3} bits per weight",
            tensor.stored_bytes() as f64 * 16.0 / bytes.len() as f64
        ));
        let count = self.timer.copies(bytes.len() * 3 / 4);
        let first = DevicePacked::upload(stream, &tensor)?;
        let escapes = first.has_escapes();
        let whole = DeviceMatrix::from_host(stream, n, k, &halves(&bytes))?;
        let compact = if compact {
            let tensor = compact_encoding::encode(Matrix::new(&bytes, n as usize, k as usize)?, &Histogram::of(&bytes))
                .map_err(|why| BenchError::Uncompact { n, k, why })?;
            let bits = tensor.stored_bytes() as f64 * 16.0 / bytes.len() as f64;
            progress(&format!("{n} x {k}: {bits:.3} bits per weight, compact"));
            self.timer.each(count, |_| DeviceCompact::upload(stream, &tensor))?
        } else {
            Vec::new()
        };
        Ok(Copies {
            compact,
            whole: self.timer.each(count, |_| whole.duplicate(stream))?,
            packed: self.timer.each(count, |_| first.duplicate(stream))?,
            escapes,
        })
    }

    /// Returns the requested kinds of launch that the device supports.
    fn launches(&self) -> Vec<bool> {
        let dependent = self.kernels.device().info().arch.has(Instruction::DependentLaunch);
        let mut launches: Vec<bool> = self.options.launches().map(|pdl| pdl && dependent).collect();
        launches.dedup();
        launches
    }

    fn packed_use(&self, escapes: bool, pdl: bool) -> PackedUse {
        PackedUse { escapes, pdl, epilogue: Epilogue::Store }
    }

    /// Returns the variants to time for a problem: dispatch's choice first, then the cost model's, then named and
    /// registered ones.
    fn variants(&self, problem: GemmShape, packed_use: PackedUse) -> Vec<(VariantSpec, bool)> {
        let choice = self.dispatch.choose(problem, packed_use);
        let fastest = self.dispatch.candidates(problem, packed_use).into_iter().map(|(spec, _)| spec);
        let mut specs: Vec<VariantSpec> = choice.into_iter().chain(fastest.take(self.options.candidates)).collect();
        if self.options.asynchronous {
            specs.extend(specs.clone().into_iter().filter_map(catalog::copied_by_threads));
        }
        // Only the shape of a named or registered variant counts: both kinds of launch time it.
        let named = self.options.variants.iter().chain(self.dispatch.registered().variants());
        specs.extend(named.filter_map(|spec| packed_use.of(*spec)).filter(|spec| Plan::new(spec).is_ok()));
        let mut unique = HashSet::new();
        specs.retain(|spec| unique.insert(*spec));
        specs.into_iter().map(|spec| (spec, Some(spec) == choice)).collect()
    }

    /// Returns the compact products for a batch, each with whether dispatch selects it. All have the smallest batch
    /// tile that holds the batch.
    fn compact_variants(&self, problem: GemmShape) -> Vec<(VariantSpec, bool)> {
        let (launches, m) = (self.launches(), problem.m);
        let choices: Vec<VariantSpec> = launches
            .iter()
            .filter_map(|&pdl| {
                let found = self.dispatch.compact_candidates(problem, self.packed_use(true, pdl));
                found.first().map(|(spec, _)| *spec)
            })
            .collect();
        let of = |spec: &VariantSpec| match spec.op {
            Op::GemmCompact(op) => Some(op),
            _ => None,
        };
        let fitting: Vec<(VariantSpec, GemmCompactSpec)> = launches
            .iter()
            .flat_map(|&pdl| self.dispatch.every_compact_candidate(self.packed_use(true, pdl)))
            .filter_map(|spec| Some((spec, of(&spec)?)))
            .filter(|(_, op)| op.batch_tile.get() >= m)
            .collect();
        let smallest = fitting.iter().map(|(_, op)| op.batch_tile).min();
        let mut specs: Vec<VariantSpec> =
            fitting.into_iter().filter(|(_, op)| Some(op.batch_tile) == smallest).map(|(spec, _)| spec).collect();
        let named =
            self.options.variants.iter().filter(|spec| of(spec).is_some_and(|op| Some(op.batch_tile) == smallest));
        specs.extend(named.filter(|spec| !specs.contains(spec)).copied().collect::<Vec<_>>());
        specs.into_iter().map(|spec| (spec, choices.contains(&spec))).collect()
    }

    fn shape(&self, (n, k): (u32, u32), progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let copies = self.copies((n, k), self.options.compact, progress)?;
        let count = copies.whole.len();
        let mut ctx = ExecContext::new(stream, ContextSize::default().with_cublas())?;
        let mut rows = Vec::new();
        for &m in &self.options.batches {
            let problem = GemmShape { m, n, k };
            let x = halves(&normal_bf16(m as usize * k as usize, 1.0, 2 + u64::from(m)));
            let x = DeviceMatrix::from_host(stream, m, k, &x)?;
            let mut y = DeviceMatrix::zeroed(stream, m, n)?;
            let io = (x.bytes() + y.bytes()) as u64;

            let cublas = ctx.cublas()?;
            let mut run = |copy: usize| cublas.matmul(x.view(), copies.whole[copy].view(), y.view_mut(), false);
            (0..count).try_for_each(&mut run)?;
            let graph = self.timer.record(problem, count, run)?;
            let expected = sample(stream, &y)?;
            let mut contenders = vec![Contender::cublas(graph, io + copies.whole[0].bytes() as u64)];
            // Each variant with whether dispatch selects it, which is the first of each kind of launch.
            let specs: Vec<(VariantSpec, bool)> = self
                .launches()
                .into_iter()
                .flat_map(|pdl| self.variants(problem, self.packed_use(copies.escapes, pdl)))
                .collect();
            self.kernels.prepare(&specs.iter().map(|(spec, _)| *spec).collect::<Vec<_>>(), &|_| {})?;
            self.reserve(&mut ctx, specs.iter().map(|(spec, _)| (*spec, problem)))?;
            for (spec, dispatched) in specs {
                let matmul = PackedGemm::new(self.kernels.get(&spec)?)?;
                y.fill_bytes(stream, 0xff)?;
                matmul.enqueue(&mut ctx, x.view(), &copies.packed[count - 1], y.view_mut())?;
                let error = relative_error(&sample(stream, &y)?, &expected);
                BenchError::check_product(&spec.to_string(), problem, error)?;
                let (graph, launches) = self.timer.record(problem, count, |copy| {
                    matmul.enqueue(&mut ctx, x.view(), &copies.packed[copy], y.view_mut())
                })?;
                let bytes = io + copies.packed[0].bytes();
                let (name, error) = (spec.to_string(), Some(error));
                contenders.push(Contender { name, graph, launches, bytes, error, dispatched });
            }
            let compact = if copies.compact.is_empty() { Vec::new() } else { self.compact_variants(problem) };
            for (spec, dispatched) in compact {
                let matmul = CompactGemm::new(self.kernels.get(&spec)?)?;
                y.fill_bytes(stream, 0xff)?;
                matmul.enqueue(stream, x.view(), &copies.compact[count - 1], y.view_mut())?;
                let error = relative_error(&sample(stream, &y)?, &expected);
                BenchError::check_product(&spec.to_string(), problem, error)?;
                let (graph, launches) = self.timer.record(problem, count, |copy| {
                    matmul.enqueue(stream, x.view(), &copies.compact[copy], y.view_mut())
                })?;
                let bytes = io + copies.compact[0].bytes();
                let (name, error) = (spec.to_string(), Some(error));
                contenders.push(Contender { name, graph, launches, bytes, error, dispatched });
            }
            rows.extend(self.timer.measure(FAMILY, contenders, count, problem, progress)?);
        }
        Ok(rows)
    }

    /// Reserves space on an execution context for the largest of these launches.
    fn reserve(
        &self,
        ctx: &mut ExecContext,
        launches: impl IntoIterator<Item = (VariantSpec, GemmShape)>,
    ) -> Result<(), BenchError> {
        let sms = self.kernels.device().info().sms;
        for (spec, problem) in launches {
            ctx.reserve(context_size(&spec, problem, sms)?)?;
        }
        Ok(())
    }

    /// Measures the linears of a layer in sequence, several layers per graph; times are per layer. If the output of a
    /// linear has the shape of the next one's input, it *is* that input. Where a model has attention or an activation
    /// in between, the next input is another buffer. Contenders called `silu_mul` also compute the activation of gate
    /// and up. cuBLAS needs another kernel for that, which is not counted here.
    fn layer(&self, shapes: &[(u32, u32)], progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let weights = shapes.iter().map(|&shape| self.copies(shape, false, progress)).collect::<Result<Vec<_>, _>>()?;
        let layers = weights.iter().map(|copies| copies.whole.len()).min().unwrap_or(0);
        let mut ctx = ExecContext::new(stream, ContextSize::default().with_cublas())?;
        let mut rows = Vec::new();
        for &m in &self.options.batches {
            let problem = GemmShape { m, n: 0, k: 0 };
            // `buffers[i]` is the input of weight i: the output of the weight before, if the shapes allow.
            let mut buffers = self.timer.each(shapes.len(), |i| {
                let k = shapes[i].1;
                let x = halves(&normal_bf16(m as usize * k as usize, 1.0, u64::from(k)));
                DeviceMatrix::from_host(stream, m, k, &x)
            })?;
            let mut separate = self.timer.each(shapes.len(), |i| DeviceMatrix::zeroed(stream, m, shapes[i].0))?;
            let io: usize = buffers.iter().chain(&separate).map(DeviceMatrix::bytes).sum();
            // With `gated`, the product of gate and up has half as many columns, so its output can be an input, too.
            let gate_and_up = |i: usize| shapes[(i + 1) % shapes.len()].1 * 2 == shapes[i].0;
            let mut pass = |gated: bool, run: &mut Run<'_>| {
                for (i, (n, _)) in shapes.iter().enumerate() {
                    let next = (i + 1) % shapes.len();
                    match buffers.get_disjoint_mut([i, next]) {
                        Ok([x, y]) if y.cols() == *n || gated && gate_and_up(i) => run(i, x.view(), y.view_mut())?,
                        _ => run(i, buffers[i].view(), separate[i].view_mut())?,
                    }
                }
                Ok(())
            };
            let whole = |i: usize| weights[i].whole[0].bytes();
            let mut contenders = Vec::new();
            let cublas = ctx.cublas()?;
            let graph = self.timer.record(problem, layers, |layer| {
                pass(false, &mut |i, x, y| cublas.matmul(x, weights[i].whole[layer].view(), y, false))
            })?;
            let bytes = io + (0..shapes.len()).map(whole).sum::<usize>();
            contenders.push(Contender::cublas(graph, bytes as u64));
            let kinds = self.launches();
            let gated = kinds.iter().map(|pdl| (*pdl, true));
            let kinds_and_gating: Vec<(bool, bool)> = kinds.iter().map(|pdl| (*pdl, false)).chain(gated).collect();
            for (pdl, gated) in kinds_and_gating {
                let specs = (0..shapes.len())
                    .map(|i| {
                        let problem = GemmShape { m, n: shapes[i].0, k: shapes[i].1 };
                        let epilogue = if gated && gate_and_up(i) { Epilogue::SiluMul } else { Epilogue::Store };
                        let packed_use = PackedUse { epilogue, ..self.packed_use(weights[i].escapes, pdl) };
                        self.dispatch
                            .choose(problem, packed_use)
                            .map(|spec| (spec, problem))
                            .ok_or(BenchError::NoVariant(problem))
                    })
                    .collect::<Result<Vec<_>, _>>()?;
                self.kernels.prepare(&specs.iter().map(|(spec, _)| *spec).collect::<Vec<_>>(), &|_| {})?;
                self.reserve(&mut ctx, specs.iter().copied())?;
                let matmuls = specs.iter().map(|(spec, _)| PackedGemm::new(self.kernels.get(spec)?)).collect::<Result<
                    Vec<_>,
                    _,
                >>(
                )?;
                let (graph, launches) = self.timer.record(problem, layers, |layer| {
                    pass(gated, &mut |i, x, y| matmuls[i].enqueue(&mut ctx, x, &weights[i].packed[layer], y))
                })?;
                let bytes = io as u64 + weights.iter().map(|copies| copies.packed[0].bytes()).sum::<u64>();
                let name =
                    format!("unweight{}{}", if pdl { " pdl" } else { "" }, if gated { ", silu_mul" } else { "" });
                contenders.push(Contender { name, graph, launches, bytes, error: None, dispatched: !gated });
            }
            rows.extend(self.timer.measure("layer", contenders, layers, problem, progress)?);
        }
        Ok(rows)
    }
}
