//! The sampler on a GPU: the tokens of the reference for all logits, batches and clusters.

use unweight_codegen::spec::{LogprobsSpec, Op, SampleSpec, VariantSpec, catalog};
use unweight_model::{
    SampleParams,
    sampling::{self, Adjustments, History, TOP_LOGPROBS_MAX},
};
use unweight_rt::{
    DeviceBuffer, ExecContext, MatrixRef, Stream,
    raw::ops::{
        kv::PAD_POSITION,
        logprobs::{Logprobs, ROW_WORDS},
        sample::{AdjustRow, AdjustedSample, RowAdjustments, Sample, SampleRow, TokenState},
    },
};

use crate::harness::{Random, Weights, context, gpu, guard_is_intact, poison, stream};

fn row(params: &SampleParams) -> SampleRow {
    let SampleParams { temperature, top_k, top_p, min_p, seed, .. } = *params;
    SampleRow { seed, temperature, top_k, top_p, min_p }
}

/// Rows of logits with their sampling parameters.
struct Batch {
    vocab: u32,
    pitch: u32,
    logits: Vec<u16>,
    params: Vec<SampleParams>,
    positions: Vec<u32>,
}

impl Batch {
    fn new(rows: u32, vocab: u32, kind: Weights, seed: u64) -> Self {
        let mut random = Random::new(seed);
        // The gaps between rows must not be read.
        let pitch = vocab.next_multiple_of(8) + 8;
        let logits = kind.iter(seed).take((rows * pitch) as usize).collect();
        let params = (0..rows).map(|_| {
            let params = SampleParams::default().seed(random.bits());
            let hot = params.temperature([0.0, 0.7, 1.0, 2.5][random.below(4) as usize]);
            let top_k = [0, 1, 5, 50, vocab][random.below(5) as usize];
            let top_p = [1.0, 0.95, 0.5, 1e-6][random.below(4) as usize];
            hot.top_k(top_k).top_p(top_p).min_p([0.0, 0.05, 1.0][random.below(3) as usize])
        });
        let params = params.collect();
        let position =
            |random: &mut Random| if random.below(6) == 0 { PAD_POSITION } else { random.below(1 << 20) as u32 };
        let positions = (0..rows).map(|_| position(&mut random)).collect();
        Self { vocab, pitch, logits, params, positions }
    }

    /// Returns the tokens of the reference; rows without a token keep `before`.
    fn expected(&self, before: u32) -> Vec<u32> {
        let rows = self.logits.chunks_exact(self.pitch as usize).zip(&self.params).zip(&self.positions);
        rows.map(|((logits, params), &position)| {
            let logits: Vec<half::bf16> =
                logits[..self.vocab as usize].iter().map(|b| half::bf16::from_bits(*b)).collect();
            if position == PAD_POSITION { before } else { sampling::sample(&logits, params, position) }
        })
        .collect()
    }
}

/// The operands on the device.
struct Operands {
    logits: DeviceBuffer<u16>,
    rows: DeviceBuffer<SampleRow>,
    positions: DeviceBuffer<u32>,
    ids: DeviceBuffer<u32>,
}

impl Operands {
    fn new(stream: &Stream, batch: &Batch) -> Self {
        let rows: Vec<SampleRow> = batch.params.iter().map(row).collect();
        let mut ids = DeviceBuffer::zeroed(stream, rows.len()).unwrap();
        poison(stream, &mut ids);
        Self {
            logits: DeviceBuffer::from_host(stream, &batch.logits).unwrap(),
            rows: DeviceBuffer::from_host(stream, &rows).unwrap(),
            positions: DeviceBuffer::from_host(stream, &batch.positions).unwrap(),
            ids,
        }
    }

    fn launch(&mut self, sample: &Sample, ctx: &mut ExecContext, batch: &Batch) {
        let rows = batch.params.len() as u32;
        let logits = MatrixRef::new(&self.logits, rows, batch.vocab, batch.pitch.into()).unwrap();
        sample.enqueue(ctx, logits, &self.rows, &mut self.positions, &mut self.ids).unwrap();
    }
}

/// Returns the variants that sample from unmodified or from adjusted logits.
fn specs(adjusted: bool) -> impl Iterator<Item = VariantSpec> {
    catalog::of::<SampleSpec>().filter(move |spec| matches!(spec.op, Op::Sample(op) if op.adjusted == adjusted))
}

fn sampler(spec: &VariantSpec) -> Sample {
    Sample::new(gpu().get(spec).unwrap()).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_chooses_as_the_reference() {
    let kernels = gpu();
    let stream = stream(kernels);
    let kinds = [Weights::Gaussian { sigma: 2.0 }, Weights::Noise, Weights::FewExponents, Weights::Zeros];
    for (number, spec) in specs(false).enumerate() {
        let sample = sampler(&spec);
        let mut ctx = context(&stream);
        for vocab in [1, 2, 63, 64, 65, 257, 1003, 8191, 32_000, 128_256] {
            for (kind, rows) in kinds.into_iter().zip([5, 3, 9, 1]) {
                let batch = Batch::new(rows, vocab, kind, u64::from(vocab) * 100 + number as u64);
                let mut operands = Operands::new(&stream, &batch);
                operands.launch(&sample, &mut ctx, &batch);
                let what = format!("{}, {rows} rows of {vocab}, {kind:?}", spec.name());
                assert_eq!(operands.ids.to_host(&stream).unwrap(), batch.expected(u32::MAX), "{what}");
                let next = batch.positions.iter().map(|p| if *p == PAD_POSITION { *p } else { p + 1 });
                assert_eq!(operands.positions.to_host(&stream).unwrap(), next.collect::<Vec<_>>(), "{what}");
                guard_is_intact(&stream, &operands.ids, &what);
                // Rows that consist of NaN are reported, and no others.
                let all_nan = kind == Weights::Noise && vocab < 3;
                assert!(ctx.synchronize().is_ok() || all_nan, "{what}");
            }
        }
    }
}

/// Next to a stream that keeps memory busy.
#[test]
#[ignore = "needs a GPU"]
fn repeated_sampling_gives_the_same_tokens() {
    let kernels = gpu();
    let (stream, other) = (stream(kernels), stream(kernels));
    let noise = DeviceBuffer::<u16>::zeroed(&other, 64 << 20).unwrap();
    let mut target = DeviceBuffer::<u16>::zeroed(&other, 64 << 20).unwrap();
    for spec in specs(false) {
        let sample = sampler(&spec);
        let mut ctx = context(&stream);
        for (rows, vocab) in [(1, 128_256), (16, 32_000), (64, 1003)] {
            let batch = Batch::new(rows, vocab, Weights::Gaussian { sigma: 2.0 }, 7);
            let mut operands = Operands::new(&stream, &batch);
            operands.launch(&sample, &mut ctx, &batch);
            let first = operands.ids.to_host(&stream).unwrap();
            for round in 0..1000 {
                if round % 8 == 0 {
                    target.copy_from(&other, &noise).unwrap();
                }
                operands.positions.write(&stream, 0, &batch.positions).unwrap();
                operands.launch(&sample, &mut ctx, &batch);
                assert_eq!(operands.ids.to_host(&stream).unwrap(), first, "{}, round {round}", spec.name());
            }
        }
        other.synchronize().unwrap();
    }
}

/// The adjustments of a row, and its tokens so far.
struct Adjusted {
    adjustments: Adjustments,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    ends: Vec<u32>,
    mask: Option<Vec<u32>>,
}

impl Adjusted {
    fn new(random: &mut Random, vocab: u32) -> Self {
        let mut some = |count: u64| -> Vec<u32> { (0..count).map(|_| random.below(vocab.into()) as u32).collect() };
        let (prompt, answer, ends, biased) = (some(40), some(9), some(3), some(30));
        let bias: std::collections::BTreeMap<u32, f32> =
            biased.into_iter().zip([100.0, -100.0, 0.37, -2.0].into_iter().cycle()).collect();
        let adjustments = Adjustments::default()
            .repetition_penalty(1.0 + random.below(100) as f32 / 50.0)
            .frequency_penalty(random.below(5) as f32 - 2.0)
            .presence_penalty(random.below(40) as f32 / 10.0 - 2.0)
            .min_new_tokens(8 + random.below(5) as u32);
        let adjustments = if random.below(2) == 0 { adjustments.bias(bias.into_iter().collect()) } else { adjustments };
        let words = 0..vocab.div_ceil(32);
        let mask = (random.below(2) == 0).then(|| words.map(|_| random.below(1 << 32) as u32).collect());
        Self { adjustments, prompt, answer, ends, mask }
    }

    fn states(&self, pitch: u32) -> Vec<TokenState> {
        let mut states = vec![TokenState::default(); pitch as usize];
        self.adjustments.bias.iter().for_each(|(token, bias)| states[*token as usize].bias = *bias);
        self.prompt.iter().for_each(|token| states[*token as usize].marks |= TokenState::IN_PROMPT);
        self.ends.iter().for_each(|token| states[*token as usize].marks |= TokenState::ENDS);
        self.answer.iter().for_each(|token| states[*token as usize].marks += 1);
        states
    }

    fn row(&self, slot: u32, position: u32) -> AdjustRow {
        AdjustRow {
            slot,
            repetition: self.adjustments.repetition_penalty,
            frequency: self.adjustments.frequency_penalty,
            presence: self.adjustments.presence_penalty,
            end_from: (position.wrapping_add(1) + self.adjustments.min_new_tokens)
                .saturating_sub(self.answer.len() as u32),
            mask: self.mask.as_ref().map_or(0, |_| 1 + slot),
        }
    }
}

/// After an ordinary sampler, over several steps with constant logits: only the device's counts change the logits.
#[test]
#[ignore = "needs a GPU"]
fn adjusted_rows_choose_as_the_reference_and_others_stay() {
    let kernels = gpu();
    let stream = stream(kernels);
    for (number, (spec, plain)) in specs(true).zip(specs(false)).enumerate() {
        let (adjusted_sample, sample) = (AdjustedSample::new(kernels.get(&spec).unwrap()).unwrap(), sampler(&plain));
        let mut ctx = context(&stream);
        for vocab in [1, 65, 1003, 32_000, 128_256] {
            let mut batch = Batch::new(9, vocab, Weights::Gaussian { sigma: 2.0 }, u64::from(vocab) + number as u64);
            let mut random = Random::new(number as u64 + 5);
            let mut adjusted_rows: Vec<Adjusted> = (0..9).map(|_| Adjusted::new(&mut random, vocab)).collect();
            // Every third row has no adjustments; slots are in another order than rows.
            let has = |row: usize| row % 3 != 2;
            let pitch = vocab.next_multiple_of(2) + 6;
            let states: Vec<TokenState> = adjusted_rows.iter().rev().flat_map(|row| row.states(pitch)).collect();
            let rows: Vec<AdjustRow> = adjusted_rows
                .iter()
                .enumerate()
                .map(
                    |(row, adjusted)| {
                        if has(row) { adjusted.row(8 - row as u32, batch.positions[row]) } else { AdjustRow::NONE }
                    },
                )
                .collect();
            let rows = DeviceBuffer::from_host(&stream, &rows).unwrap();
            let none = vec![0; vocab.div_ceil(32) as usize];
            let masks: Vec<u32> = adjusted_rows
                .iter()
                .rev()
                .flat_map(|adjusted| adjusted.mask.as_ref().unwrap_or(&none))
                .copied()
                .collect();
            let masks = DeviceBuffer::from_host(&stream, &masks).unwrap();
            let mut tokens = DeviceBuffer::from_host(&stream, &states).unwrap();
            let mut operands = Operands::new(&stream, &batch);
            for step in 0..4 {
                let ordinary = batch.expected(u32::MAX);
                operands.launch(&sample, &mut ctx, &batch);
                let logits = MatrixRef::new(&operands.logits, 9, vocab, batch.pitch.into()).unwrap();
                let adjustments =
                    RowAdjustments { rows: &rows, tokens: &mut tokens, token_pitch: pitch, masks: &masks };
                adjusted_sample
                    .enqueue(&mut ctx, logits, &operands.rows, adjustments, &operands.positions, &mut operands.ids)
                    .unwrap();
                let ids = operands.ids.to_host(&stream).unwrap();
                for (row, adjusted) in adjusted_rows.iter_mut().enumerate() {
                    let what = format!("{}, step {step}, row {row} of {vocab}", spec.name());
                    if !has(row) || batch.positions[row] == PAD_POSITION {
                        assert_eq!(ids[row], ordinary[row], "{what}");
                        continue;
                    }
                    let logits = &batch.logits[row * batch.pitch as usize..][..vocab as usize];
                    let history = History { prompt: &adjusted.prompt, answer: &adjusted.answer, ends: &adjusted.ends };
                    let mut logits = sampling::adjust(bytemuck::cast_slice(logits), &adjusted.adjustments, history);
                    adjusted.mask.iter().for_each(|mask| sampling::forbid(&mut logits, mask));
                    let expected = sampling::choose(&logits, &batch.params[row], batch.positions[row]);
                    assert_eq!(ids[row], expected, "{what}: {:?}", adjusted.adjustments);
                    adjusted.answer.push(expected);
                }
                batch.positions.iter_mut().filter(|at| **at != PAD_POSITION).for_each(|at| *at += 1);
                if adjusted_rows.iter().any(|adjusted| adjusted.answer.last() == Some(&sampling::NO_TOKEN)) {
                    // A row without a token is not counted; an engine ends its sequence.
                    break;
                }
            }
            assert!(ctx.synchronize().is_ok() || vocab == 1);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn logprobs_equal_the_reference() {
    let kernels = gpu();
    let stream = stream(kernels);
    for spec in catalog::of::<LogprobsSpec>() {
        let logprobs = Logprobs::new(kernels.get(&spec).unwrap()).unwrap();
        let mut ctx = context(&stream);
        for vocab in [1, 20, 65, 1003, 32_000, 128_256] {
            for kind in [Weights::Gaussian { sigma: 2.0 }, Weights::Noise, Weights::Zeros] {
                let batch = Batch::new(7, vocab, kind, u64::from(vocab));
                let requested: Vec<u32> = (0..7).map(|row| [21, 0, 1, 6, 21, 2, 21][row]).collect();
                let ids: Vec<u32> = (0..7).map(|row| row * 31 % vocab).collect();
                let logits = DeviceBuffer::from_host(&stream, &batch.logits).unwrap();
                let view = MatrixRef::new(&logits, 7, vocab, batch.pitch.into()).unwrap();
                let [wanted_there, ids_there] =
                    [&requested, &ids].map(|values| DeviceBuffer::from_host(&stream, values).unwrap());
                let mut out = DeviceBuffer::<u32>::zeroed(&stream, 7 * ROW_WORDS).unwrap();
                poison(&stream, &mut out);
                logprobs.enqueue(&mut ctx, view, &wanted_there, &ids_there, &mut out).unwrap();
                let words = out.to_host(&stream).unwrap();
                for (row, words) in words.chunks_exact(ROW_WORDS).enumerate() {
                    let what = format!("{}, row {row} of {vocab}, {kind:?}", spec.name());
                    let Some(top) = requested[row].checked_sub(1) else {
                        assert!(words.iter().all(|word| *word == words[0]), "{what}");
                        continue;
                    };
                    let logits = &batch.logits[row * batch.pitch as usize..][..vocab as usize];
                    let expected_logprobs =
                        sampling::logprobs(bytemuck::cast_slice(logits), ids[row], top.min(TOP_LOGPROBS_MAX));
                    let got = words[1];
                    assert!(
                        got == expected_logprobs.sampled.to_bits()
                            || expected_logprobs.sampled.is_nan() && f32::from_bits(got).is_nan(),
                        "{what}"
                    );
                    let top: Vec<u32> =
                        expected_logprobs.top.iter().flat_map(|(token, value)| [*token, value.to_bits()]).collect();
                    assert_eq!(&words[2..2 + top.len()], top, "{what}");
                }
                guard_is_intact(&stream, &out, "log probabilities");
            }
        }
    }
}
