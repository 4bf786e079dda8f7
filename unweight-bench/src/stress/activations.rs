//! Activation kernels under load. The shape of the weights sets the number of columns; batches have few and many rows.

use std::{cell::RefCell, sync::Arc};

use unweight_codegen::{
    abi::{AdjustRow, LogprobsArgs, SampleArgs, SampleRow, TokenState},
    kv::PAGE_TOKENS,
    plan::GemmShape,
    spec::{EmbedSource, GateFunction, NormKind, NormSpec, Op, RopeSpec, ScaleForm, ScaleSpec},
};
use unweight_format::testing::Random;
use unweight_model::sampling::{
    Adjustments, History, SampleParams, TOP_LOGPROBS_MAX, adjust, choose, forbid, logprobs,
};
use unweight_rt::{
    DeviceBuffer, DeviceError, MatrixMut, MatrixRef, RowFault,
    raw::{
        device::module::LoadedKernel,
        ops::{
            embed::{Embed, EmbedTable},
            kv::{KvLayer, KvShape},
            norm::Norm,
            rope::{HeadOptions, Rope, RopeTable},
            scale::Scale,
            silu_mul::SiluMul,
        },
    },
};

use super::{Launch, RUNS, Run, Subject, Weights, differs};
use crate::{
    data::{halves, normal_bf16},
    error::BenchError,
    oracle,
};

/// Rows of a batch: one, a few, and more than the device has SMs.
pub(super) const ROWS: [u32; 3] = [1, 7, 300];

const EPS: f32 = 1e-5;

/// Returns the initial contents of outputs that kernels add to.
fn sums_before(count: usize) -> Vec<u16> {
    halves(&normal_bf16(count, 1.0, 23))
}

impl Run<'_> {
    /// Returns the subjects of an activation kernel; none for a kernel of another family.
    pub(super) fn activations<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
    ) -> Result<Vec<Subject<'a>>, BenchError> {
        ROWS.into_iter()
            .map(|m| match kernel.spec().op {
                Op::Norm(spec) => self.norm(kernel, weights, m, spec),
                Op::Scale(spec) => self.scale(kernel, weights, m, spec),
                Op::Embed(spec) => self.embed(kernel, weights, m, spec.source),
                Op::Rope(spec) => self.rope(kernel, weights, m, spec),
                Op::Sample(spec) => self.sample(kernel, weights, m, spec.adjusted),
                Op::SiluMul(spec) => self.silu_mul(kernel, weights, m, spec.gate),
                _ => self.logprobs(kernel, weights, m),
            })
            .collect()
    }

    fn norm<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
        spec: NormSpec,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, d) = (self.stream, weights.shape.1);
        let gamma: Vec<u16> = halves(&weights.old)[..spec.gamma_elements(d) as usize].to_vec();
        let x = weights.x.read(stream, 0, (m * d) as usize)?;
        let added = if spec.add { sums_before((m * d) as usize) } else { Vec::new() };
        let of = |(row, x): (usize, &[u16])| {
            let before = spec.add.then(|| &added[row * d as usize..][..d as usize]);
            oracle::norm_of(spec.kind, x, &gamma, EPS, before)
        };
        let spans: Vec<_> = x.chunks_exact(d as usize).enumerate().flat_map(of).collect();
        let (norm, gamma) = (Norm::new(kernel.clone())?, DeviceBuffer::from_host(stream, &gamma)?);
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, m, d, d.into())?;
            // SAFETY: the address is one of the subject's outputs, which has this size and lives until the stream is
            // synchronized.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, m, d, d.into()) }?;
            norm.enqueue(&mut self.ctx.borrow_mut(), x, &gamma, EPS, None, y)
        };
        let subject = self.rows(kernel, (m, d), Box::new(launch), move |y| oracle::outside(&halves(y), &spans))?;
        self.starting_from(subject, &added)
    }

    fn scale<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
        spec: ScaleSpec,
    ) -> Result<Subject<'a>, BenchError> {
        const FACTOR: f32 = 0.22;
        let (stream, d) = (self.stream, weights.shape.1);
        let x = weights.x.read(stream, 0, (m * d) as usize)?;
        let adds = spec.form == ScaleForm::Add;
        let added = if adds { sums_before((m * d) as usize) } else { Vec::new() };
        let of = |(at, x): (usize, &u16)| {
            if spec.form == ScaleForm::Cap {
                return oracle::capped(*x, FACTOR);
            }
            let before = if adds { oracle::value(added[at]) } else { 0.0 };
            // Round to fp32 first, as the kernel does.
            oracle::Span::about(f64::from((f64::from(FACTOR) * oracle::value(*x) + before) as f32), 0.0)
        };
        let spans: Vec<_> = x.iter().enumerate().map(of).collect();
        let scale = Scale::new(kernel.clone())?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, m, d, d.into())?;
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, m, d, d.into()) }?;
            scale.enqueue(&mut self.ctx.borrow_mut(), x, FACTOR, y)
        };
        let subject = self.rows(kernel, (m, d), Box::new(launch), move |y| oracle::outside(&halves(y), &spans))?;
        self.starting_from(subject, &added)
    }

    /// Makes each output of the subject start with these elements before a launch. With no elements, the subject is
    /// unchanged.
    fn starting_from<'a>(&self, subject: Subject<'a>, elements: &[u16]) -> Result<Subject<'a>, BenchError> {
        if elements.is_empty() {
            return Ok(subject);
        }
        let before: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        let before = DeviceBuffer::from_host(self.stream, &before.repeat(RUNS as usize))?;
        Ok(Subject { before: Some(before), ..subject })
    }

    fn silu_mul<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
        function: GateFunction,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, k) = (self.stream, weights.shape.1);
        let columns = k / 2;
        let x = weights.x.read(stream, 0, (m * k) as usize)?;
        let activated = |row: &[u16]| {
            let (gate, up) = row.split_at(columns as usize);
            gate.iter().zip(up).map(|(gate, up)| oracle::gated(function, *gate, *up)).collect::<Vec<_>>()
        };
        let spans: Vec<_> = x.chunks_exact(k as usize).flat_map(activated).collect();
        let silu_mul = SiluMul::new(kernel.clone())?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, m, k, k.into())?;
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, m, columns, columns.into()) }?;
            silu_mul.enqueue(&mut self.ctx.borrow_mut(), x, y)
        };
        self.rows(kernel, (m, columns), Box::new(launch), move |y| oracle::outside(&halves(y), &spans))
    }

    fn embed<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
        source: EmbedSource,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, (n, d)) = (self.stream, weights.shape);
        let mut random = Random::new(u64::from(n) + u64::from(m));
        let ids: Vec<u32> = (0..m).map(|_| random.below(n.into()) as u32).collect();
        let row = |id: &u32| weights.bytes[*id as usize * d as usize * 2..][..d as usize * 2].to_vec();
        let expected: Vec<u8> = ids.iter().flat_map(row).collect();
        let bf16 = match source {
            EmbedSource::Bf16 => DeviceBuffer::from_host(stream, &halves(&weights.bytes))?,
            EmbedSource::Packed => DeviceBuffer::zeroed(stream, 0)?,
        };
        let (embed, ids) = (Embed::new(kernel.clone())?, DeviceBuffer::from_host(stream, &ids)?);
        let launch = move |y: u64| {
            let table = match source {
                EmbedSource::Bf16 => EmbedTable::Bf16(MatrixRef::new(&bf16, n, d, d.into())?),
                EmbedSource::Packed => EmbedTable::Packed { weights: &weights.with_escapes.device, vocabulary: n },
            };
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, m, d, d.into()) }?;
            embed.enqueue(&mut self.ctx.borrow_mut(), &ids, table, y)
        };
        self.rows(kernel, (m, d), Box::new(launch), move |y| differs(y, &expected))
    }

    /// Makes a subject that samples tokens from rows of X, each row with other parameters.
    fn sample<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
        adjusted: bool,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, vocabulary) = (self.stream, weights.shape.1);
        // Outputs are compared in pieces of 16 bytes.
        let m = m.next_multiple_of(4);
        let logits = weights.x.read(stream, 0, (m * vocabulary) as usize)?;
        let params: Vec<_> = (0..m)
            .map(|row| {
                SampleParams::default()
                    .temperature((row % 4) as f32 * 0.5)
                    .top_k(row % 3 * 20)
                    .top_p(1.0 - (row % 5) as f32 * 0.1)
                    .min_p((row % 7) as f32 * 0.01)
                    .seed(u64::from(row) << 30)
            })
            .collect();
        // Every row has the same adjustments in its own slot, and odd rows have the same mask.
        let penalties = Adjustments::default().repetition_penalty(1.25).frequency_penalty(0.5).presence_penalty(-0.25);
        let penalties = if adjusted { penalties.bias(vec![(1, 2.5)]) } else { Adjustments::default() };
        let history = History { prompt: &[0, 3], answer: &[3, 5, 5], ends: &[] };
        let mask: Vec<u32> = (0..vocabulary.div_ceil(32)).map(|word| 0x9bd1_37f5_u32.rotate_left(word)).collect();
        let expect = |(row, logits): (usize, &[u16])| {
            let mut logits = adjust(bytemuck::cast_slice(logits), &penalties, history);
            if adjusted && row % 2 == 1 {
                forbid(&mut logits, &mask);
            }
            choose(&logits, &params[row], row as u32)
        };
        let expected: Vec<u32> = logits.chunks_exact(vocabulary as usize).enumerate().map(expect).collect();
        let mut states = vec![TokenState::default(); vocabulary as usize];
        states[1].bias = 2.5;
        for (token, marks) in [(0, TokenState::IN_PROMPT), (3, TokenState::IN_PROMPT | 1), (5, 2)] {
            states[token].marks = marks;
        }
        let states = DeviceBuffer::from_host(stream, &states.repeat(m as usize))?;
        let counted = RefCell::new(states.duplicate(stream)?);
        let adjusts = (0..m).map(|slot| AdjustRow {
            slot,
            repetition: penalties.repetition_penalty,
            frequency: penalties.frequency_penalty,
            presence: penalties.presence_penalty,
            mask: slot % 2,
            ..AdjustRow::NONE
        });
        let adjusts = DeviceBuffer::from_host(stream, &adjusts.collect::<Vec<_>>())?;
        let masks = DeviceBuffer::from_host(stream, &mask)?;
        let expected: Vec<u8> = expected.into_iter().flat_map(u32::to_le_bytes).collect();
        let device_row = |params: &SampleParams| {
            let SampleParams { temperature, top_k, top_p, min_p, seed, .. } = *params;
            SampleRow { seed, temperature, top_k, top_p, min_p }
        };
        let rows = DeviceBuffer::from_host(stream, &params.iter().map(device_row).collect::<Vec<_>>())?;
        let first: Vec<u32> = (0..m).map(|row| row + u32::from(adjusted)).collect();
        let first = DeviceBuffer::from_host(stream, &first)?;
        let positions = RefCell::new(first.duplicate(stream)?);
        let kernel_of_launch = kernel.clone();
        let launch = move |ids: u64| {
            let mut positions = positions.borrow_mut();
            // A launch increments these.
            positions.copy_from(stream, &first)?;
            let mut counted = counted.borrow_mut();
            counted.copy_from(stream, &states)?;
            let args = SampleArgs {
                logits: weights.x.address(),
                rows: rows.address(),
                positions: positions.address(),
                ids,
                fault: self.ctx.borrow().row_fault_address(RowFault::Logits),
                adjusts: adjusts.address(),
                tokens: counted.address(),
                masks: masks.address(),
                pitch: vocabulary.into(),
                vocabulary,
                token_pitch: vocabulary,
            };
            // SAFETY: as above; `ids` holds m u32, X and the other buffers hold m rows, and they live as long as the
            // subject.
            unsafe { kernel_of_launch.launch(stream, GemmShape::rows(m), &args) }
        };
        // An id is as long as two bf16 columns.
        self.rows(kernel, (m, 2), Box::new(launch), move |y| differs(y, &expected))
    }

    /// Makes a subject of the log probabilities of the first token and the most likely tokens of rows of X.
    fn logprobs<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, vocabulary) = (self.stream, weights.shape.1);
        // Outputs are compared in pieces of 16 bytes.
        let m = m.next_multiple_of(2);
        let logits = weights.x.read(stream, 0, (m * vocabulary) as usize)?;
        let row = |logits: &[u16]| {
            let expected_logprobs = logprobs(bytemuck::cast_slice(logits), 0, TOP_LOGPROBS_MAX);
            let mut pairs = vec![(0, expected_logprobs.sampled)];
            pairs.extend(expected_logprobs.top);
            pairs.resize(1 + TOP_LOGPROBS_MAX as usize, (u32::MAX, f32::NAN));
            pairs.into_iter().flat_map(|(token, value)| [token, value.to_bits()]).flat_map(u32::to_le_bytes)
        };
        let expected: Vec<u8> = logits.chunks_exact(vocabulary as usize).flat_map(row).collect();
        let wanted = DeviceBuffer::from_host(stream, &vec![1 + TOP_LOGPROBS_MAX; m as usize])?;
        let ids = DeviceBuffer::<u32>::zeroed(stream, m as usize)?;
        let kernel_of_launch = kernel.clone();
        let launch = move |out: u64| {
            let args = LogprobsArgs {
                logits: weights.x.address(),
                wanted: wanted.address(),
                ids: ids.address(),
                out,
                pitch: vocabulary.into(),
                vocabulary,
                reserved: 0,
            };
            // SAFETY: as above; `out` holds m rows of results, X and the other buffers hold m rows, and they live as
            // long as the subject.
            unsafe { kernel_of_launch.launch(stream, GemmShape::rows(m), &args) }
        };
        // A pair is as long as four bf16 columns.
        self.rows(kernel, (m, 4 * (1 + TOP_LOGPROBS_MAX)), Box::new(launch), move |y| differs(y, &expected))
    }

    /// Makes a subject whose output is the Q heads. All launches write the same K and V to the pages.
    fn rope<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
        spec: RopeSpec,
    ) -> Result<Subject<'a>, BenchError> {
        const START: u32 = 61;
        let (head_dim, adjacent) = (spec.head_dim.get(), spec.adjacent);
        let kind = if spec.plus_one { NormKind::RmsPlusOne } else { NormKind::Rms };
        let (stream, heads, kv_heads) = (self.stream, 3u32, 1u32);
        let columns = (heads + 2 * kv_heads) * head_dim;
        let normal = |count: u32, seed: u64| halves(&normal_bf16(count as usize, 1.0, seed));
        let qkv = normal(m * columns, u64::from(m) << 32 | u64::from(weights.shape.0));
        let (bias, gamma) = (normal(columns, 1), normal(head_dim, 2));
        let (half, positions) = (head_dim as usize / 2, START + m);
        let angle =
            |at: usize, of: fn(f64) -> f64| oracle::rounded(of((at / half) as f64 * 0.9f64.powi((at % half) as i32)));
        let table = |of| (0..positions as usize * half).map(|at| angle(at, of)).collect::<Vec<u16>>();
        let (cosines, sines) = (table(f64::cos), table(f64::sin));
        let mut spans = Vec::new();
        for (row, x) in qkv.chunks_exact(columns as usize).enumerate() {
            let at = (START as usize + row) * half;
            let angles = (&cosines[at..][..half], &sines[at..][..half]);
            for (head, x) in x.chunks_exact(head_dim as usize).enumerate() {
                let bias = &bias[head * head_dim as usize..][..head_dim as usize];
                let spans_of = || oracle::head(x, Some(bias), Some((kind, &gamma, EPS)), Some(angles), adjacent);
                spans.push((head < heads as usize).then(spans_of));
            }
        }
        let pages = positions.div_ceil(PAGE_TOKENS);
        let shape = KvShape::new(pages, kv_heads, head_dim).map_err(DeviceError::from)?;
        let cache = RefCell::new(DeviceBuffer::zeroed(stream, shape.layer_elements() as usize)?);
        let pages = DeviceBuffer::from_host(stream, &(0..pages).rev().collect::<Vec<_>>())?;
        let on_device = |elements: &[u16]| DeviceBuffer::from_host(stream, elements);
        let (bias, gamma) = (on_device(&bias)?, on_device(&gamma)?);
        let laid = |table: &Vec<u16>| if adjacent { oracle::adjacent_table(table, half) } else { table.clone() };
        let (cosines, sines) = (on_device(&laid(&cosines))?, on_device(&laid(&sines))?);
        let rope = Rope::new(kernel.clone())?;
        let launch = move |output: u64| {
            let table = RopeTable::new(&cosines, &sines, head_dim)?;
            let options = HeadOptions::new(heads, table).bias(Some(&bias)).norms(Some(&gamma), Some(&gamma), EPS);
            let mut cache = cache.borrow_mut();
            let kv = KvLayer::new(&mut cache, shape, 0)?;
            // SAFETY: as above.
            let qkv = unsafe { MatrixMut::from_raw(self.kernels.device(), output, m, columns, columns.into()) }?;
            rope.enqueue(&mut self.ctx.borrow_mut(), qkv, &options, kv, &pages, START)
        };
        let elements = qkv.clone();
        let check = move |got: &[u8]| {
            let got = halves(got);
            let heads = got.chunks_exact(head_dim as usize).zip(qkv.chunks_exact(head_dim as usize)).zip(&spans);
            heads.enumerate().find_map(|(head, ((got, before), spans))| match spans {
                Some(spans) => oracle::outside(got, spans).map(|wrong| format!("head {head}, {wrong}")),
                None => (got != before).then(|| format!("head {head} of K or V was changed")),
            })
        };
        let subject = self.rows(kernel, (m, columns), Box::new(launch), check)?;
        self.starting_from(subject, &elements)
    }

    /// Makes a subject whose output is bf16 `[m, columns]`.
    pub(super) fn rows<'a>(
        &'a self,
        kernel: &LoadedKernel,
        (m, columns): (u32, u32),
        launch: Launch<'a>,
        check: impl Fn(&[u8]) -> Option<String> + 'a,
    ) -> Result<Subject<'a>, BenchError> {
        let bytes = m as usize * columns as usize * 2;
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape: GemmShape { m, n: columns, k: 0 },
            outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
            bytes,
            before: None,
            launch,
            check: Box::new(check),
        })
    }
}
