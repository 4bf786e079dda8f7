//! The sampler in the simulator: every token equals the reference, at every cluster size and in any batch; planted bugs
//! must be caught.

use crate::harness::{Buffer, CpuKernel, Edit, Run, spec};
use unweight_codegen::{
    VariantSpec,
    abi::{AdjustRow, SampleArgs, SampleRow, TokenState},
    plan::GemmShape,
    spec::{Op, SampleSpec, catalog},
};
use unweight_format::testing::Random;
use unweight_model::sampling::{Adjustments, History, NO_TOKEN, SampleParams, adjust, choose, forbid, sample};

/// The position of a row without a token.
const PAD: u32 = u32::MAX;
/// Fills the fault word and the ids before the launch.
const UNTOUCHED: u32 = 0xa5a5_a5a5;

const NAN: u16 = 0x7fc0;
const INFINITY: u16 = 0x7f80;
const NEGATIVE: u16 = 0x8000;

fn rounded(value: f64) -> u16 {
    unweight_bench::oracle::rounded(value)
}

/// A row of the batch.
#[derive(Clone, Debug)]
struct Row {
    logits: Vec<u16>,
    params: SampleParams,
    position: u32,
}

impl Row {
    /// Returns the row's token, if it has one.
    fn expected(&self) -> Option<u32> {
        (self.position != PAD).then(|| sample(bytemuck::cast_slice(&self.logits), &self.params, self.position))
    }

    fn only_nan(&self) -> bool {
        self.logits.iter().all(|bits| bits & 0x7fff > INFINITY)
    }
}

fn device_row(params: &SampleParams) -> SampleRow {
    let SampleParams { temperature, top_k, top_p, min_p, seed, .. } = *params;
    SampleRow { seed, temperature, top_k, top_p, min_p }
}

/// Runs a batch of rows of equal length and compares.
fn check(kernel: &mut CpuKernel, spec: &VariantSpec, rows: &[Row]) -> Result<(), String> {
    let vocabulary = rows[0].logits.len();
    let pitch = vocabulary.next_multiple_of(8) + 8;
    // Values after the end of a row would win.
    let mut logits = vec![INFINITY; rows.len() * pitch - (pitch - vocabulary)];
    for (row, target) in rows.iter().zip(logits.chunks_mut(pitch)) {
        target[..vocabulary].copy_from_slice(&row.logits);
    }
    let params: Vec<_> = rows.iter().map(|row| device_row(&row.params)).collect();
    let positions: Vec<_> = rows.iter().map(|row| row.position).collect();
    let logits = Buffer::of(bytemuck::cast_slice(&logits));
    let params = Buffer::of(bytemuck::cast_slice(&params));
    let positions = Buffer::of(bytemuck::cast_slice(&positions));
    let (ids, fault) = (Buffer::new(rows.len() * 4), Buffer::zeroed(4));
    let args = SampleArgs {
        logits: logits.address(),
        rows: params.address(),
        positions: positions.address(),
        ids: ids.address(),
        fault: fault.address(),
        adjusts: 0,
        tokens: 0,
        masks: 0,
        pitch: pitch as u64,
        vocabulary: vocabulary as u32,
        token_pitch: 0,
    };
    let buffers = [("logits", &logits), ("rows", &params), ("positions", &positions), ("ids", &ids), ("fault", &fault)];
    let slices = buffers.map(|(name, buffer)| (name, buffer.slice()));
    let run = Run { problem: GemmShape::rows(rows.len() as u32), sms: 2, seed: 11 };
    // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run(spec, run, &args, &slices) }?;

    let (ids, positions) = (ids.u32s(), positions.u32s());
    for (at, row) in rows.iter().enumerate() {
        let (id, after) = match row.expected() {
            Some(id) => (id, row.position + 1),
            None => (UNTOUCHED, PAD),
        };
        if (ids[at], positions[at]) != (id, after) {
            let got = (ids[at], positions[at]);
            return Err(format!(
                "row {at} of {vocabulary}: token and position {got:?} instead of {:?}: {:?}",
                (id, after),
                row.params
            ));
        }
    }
    let reported = rows.iter().rposition(|row| row.position != PAD && row.only_nan()).map_or(0, |row| row as u32 + 1);
    match fault.u32s()[0] {
        fault if fault == reported => Ok(()),
        fault => Err(format!("the fault word is {fault} instead of {reported}")),
    }
}

/// Returns logits with ties, some NaN and infinities, with the spread of models.
fn logits(random: &mut Random, count: usize) -> Vec<u16> {
    let spread = [1.0, 4.0][random.below(2) as usize];
    (0..count)
        .map(|_| match random.below(64) {
            0 => NAN | (random.below(2) as u16 * NEGATIVE),
            1 => INFINITY | NEGATIVE,
            2 => random.below(2) as u16 * NEGATIVE,
            3..8 => rounded(2.0 * spread),
            _ => rounded(random.normal() * spread),
        })
        .collect()
}

/// Returns every combination of filters, and greedy.
fn params() -> Vec<SampleParams> {
    let mut all = vec![SampleParams::default()];
    for (i, temperature) in [1.0, 0.3].into_iter().enumerate() {
        let warm = SampleParams::default().temperature(temperature).seed(0x1234_5678_9abc_def0 << i);
        for top_k in [0, 1 + 7 * i as u32] {
            for top_p in [1.0, 0.7] {
                all.extend([0.0, 0.1].map(|min_p| warm.top_k(top_k).top_p(top_p).min_p(min_p)));
            }
        }
    }
    all
}

fn batch(vocabulary: usize) -> Vec<Row> {
    let mut random = Random::new(vocabulary as u64);
    let mut rows: Vec<_> = params()
        .into_iter()
        .enumerate()
        .map(|(i, params)| Row { logits: logits(&mut random, vocabulary), params, position: (i * i) as u32 })
        .collect();
    rows[5].position = PAD;
    rows
}

/// Returns rows at the edges of keys, counts and weights.
fn edges(vocabulary: usize) -> Vec<Row> {
    let warm = SampleParams::default().temperature(0.7).seed(3);
    let row = |logits: Vec<u16>, params| Row { logits, params, position: 9 };
    let of = |bits: &[u16]| bits.iter().copied().cycle().take(vocabulary).collect::<Vec<_>>();
    let flat = of(&[rounded(1.0)]);
    let falling: Vec<_> = (0..vocabulary).map(|i| rounded(-(i as f64) / 16.0)).collect();
    let mut last = falling.clone();
    last[vocabulary - 1] = INFINITY;
    vec![
        row(of(&[NAN]), warm),
        row(of(&[NAN, INFINITY | NEGATIVE]), warm.top_k(3)),
        row(of(&[0, NEGATIVE]), warm.top_k(1).top_p(0.5)),
        row(of(&[NEGATIVE, 0]), SampleParams::default()),
        // More equal keys than a 32-bit counter in units of 2^-31 can sum.
        row(flat.clone(), warm.top_p(0.999)),
        row(flat, warm.top_k(2).min_p(1.0)),
        row(falling.clone(), warm.top_k(17)),
        row(falling.clone(), warm.top_k(u32::MAX)),
        row(falling.clone(), warm.temperature(3.0).top_k(200).top_p(0.5)),
        row(falling.clone(), warm.temperature(8.0).top_p(1e-6)),
        row(falling.clone(), warm.temperature(8.0).top_p(0.9)),
        row(falling, warm.temperature(8.0).min_p(0.3)),
        row(last, warm.temperature(100.0)),
    ]
}

fn specs(adjusted: bool) -> Vec<VariantSpec> {
    catalog::of::<SampleSpec>().filter(|spec| matches!(spec.op, Op::Sample(op) if op.adjusted == adjusted)).collect()
}

/// Returns the step between the rows of a run, each of which takes up to seconds in the simulator: every one of `step`
/// rows with `UNWEIGHT_TEST_ALL`, otherwise a fourth of those.
fn thinned(step: usize) -> usize {
    if std::env::var_os("UNWEIGHT_TEST_ALL").is_some() { step } else { 4 * step }
}

#[test]
fn tokens_match_the_reference() {
    let specs = specs(false);
    assert_eq!(specs.len(), 8);
    let mut kernel = CpuKernel::all(&specs, &[]);
    for (i, spec) in specs.iter().enumerate() {
        let name = spec.name();
        let (single, dependent) = (name.as_str().contains("_c1"), name.as_str().ends_with("_pdl"));
        for vocabulary in [1, 2, 63, 257, 1000, 5003] {
            // In the simulator, dependent launches behave alike and large clusters need many threads, so each variant
            // gets other rows.
            if dependent && vocabulary != 63 {
                continue;
            }
            let step = if single { 1 } else { 4 };
            for (rows, step) in [(batch(vocabulary), thinned(step)), (edges(vocabulary), step)] {
                let some = rows.iter().skip(i / 2 % 4).step_by(step);
                let rows = some.cloned().collect::<Vec<_>>();
                check(&mut kernel, spec, &rows).unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
            }
        }
    }
}

#[test]
fn tokens_do_not_depend_on_the_batch() {
    let rows = batch(1000);
    let specs = ["sample_t1024_c1", "sample_t1024_c2_pdl"].map(spec);
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in &specs {
        for row in rows.iter().step_by(3) {
            check(&mut kernel, spec, std::slice::from_ref(row)).unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
        }
    }
}

#[test]
fn planted_bugs_are_caught() {
    let header = "unweight/kernels/sample.cuh";
    for (from, to) in [
        ("if (magnitude > 0x7f80) return kNanKey;", ""),
        ("if (magnitude == 0) return kZeroKey;", ""),
        ("u32(~token)", "token"),
        ("p = ptx::fma(p, z, 1.0f);", "p = ptx::fma(p, z, 0.0f);"),
    ] {
        let spec = spec("sample_t1024_c2");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = [1000, 63].into_iter().any(|vocabulary| {
            [batch, edges].into_iter().any(|rows| check(&mut kernel, &spec, &rows(vocabulary)).is_err())
        });
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

/// A row with adjustments, a mask, or neither; without adjustments it is unchanged.
#[derive(Clone, Debug)]
struct AdjustedRow {
    row: Row,
    adjustments: Adjustments,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    ends: Vec<u32>,
    mask: Option<Vec<u32>>,
}

impl AdjustedRow {
    fn has_slot(&self) -> bool {
        !self.adjustments.is_none() || self.mask.is_some()
    }

    fn history(&self) -> History<'_> {
        History { prompt: &self.prompt, answer: &self.answer, ends: &self.ends }
    }

    /// Returns the row's next token; `None` if the row is unchanged.
    fn next(&self) -> Option<u32> {
        let mut logits = adjust(bytemuck::cast_slice(&self.row.logits), &self.adjustments, self.history());
        self.mask.iter().for_each(|mask| forbid(&mut logits, mask));
        let is_live = self.row.position != PAD && self.has_slot();
        is_live.then(|| choose(&logits, &self.row.params, self.row.position))
    }

    fn states(&self) -> Vec<TokenState> {
        let mut states = vec![TokenState::default(); self.row.logits.len()];
        self.adjustments.bias.iter().for_each(|(token, bias)| states[*token as usize].bias = *bias);
        self.prompt.iter().for_each(|token| states[*token as usize].marks |= TokenState::IN_PROMPT);
        self.ends.iter().for_each(|token| states[*token as usize].marks |= TokenState::ENDS);
        self.answer.iter().for_each(|token| states[*token as usize].marks += 1);
        states
    }

    /// Returns the row's device state for slot `slot`, whose mask has the same number. Positions are those after an
    /// ordinary sampler.
    fn device(&self, slot: u32) -> AdjustRow {
        let Adjustments { repetition_penalty, frequency_penalty, presence_penalty, min_new_tokens, .. } =
            self.adjustments;
        if !self.has_slot() {
            return AdjustRow::NONE;
        }
        AdjustRow {
            slot,
            repetition: repetition_penalty,
            frequency: frequency_penalty,
            presence: presence_penalty,
            // A position may be less than the length of the answer: then there is nothing to wait for.
            end_from: (self.row.position.wrapping_add(1) + min_new_tokens).saturating_sub(self.answer.len() as u32),
            mask: if self.mask.is_some() { 1 + slot } else { 0 },
        }
    }
}

/// Runs several steps of a batch with constant logits and compares. Only the device's counts change the logits.
fn check_adjusted(kernel: &mut CpuKernel, spec: &VariantSpec, mut rows: Vec<AdjustedRow>) -> Result<(), String> {
    let vocabulary = rows[0].row.logits.len();
    let (pitch, token_pitch) = (vocabulary.next_multiple_of(8) + 8, vocabulary.next_multiple_of(2) + 2);
    let mut logits = vec![INFINITY; rows.len() * pitch - (pitch - vocabulary)];
    let count = rows.len();
    let mut states = vec![TokenState { bias: 1e9, marks: 7 }; count * token_pitch];
    for (at, row) in rows.iter().enumerate() {
        logits[at * pitch..][..vocabulary].copy_from_slice(&row.row.logits);
        // Slots are in another order than rows.
        states[(count - 1 - at) * token_pitch..][..vocabulary].copy_from_slice(&row.states());
    }
    let params: Vec<_> = rows.iter().map(|row| device_row(&row.row.params)).collect();
    let adjusts: Vec<_> = rows.iter().zip((0..count as u32).rev()).map(|(row, slot)| row.device(slot)).collect();
    let logits = Buffer::of(bytemuck::cast_slice(&logits));
    let (params, adjusts) = (Buffer::of(bytemuck::cast_slice(&params)), Buffer::of(bytemuck::cast_slice(&adjusts)));
    let states = Buffer::of(bytemuck::cast_slice(&states));
    // Only rows with a mask read their mask: this mask forbids all tokens.
    let none = vec![0; vocabulary.div_ceil(32)];
    let masks: Vec<u32> = rows.iter().rev().flat_map(|row| row.mask.as_ref().unwrap_or(&none)).copied().collect();
    let masks = Buffer::of(bytemuck::cast_slice(&masks));
    for step in 0..4 {
        let position = |row: &AdjustedRow| if row.row.position == PAD { PAD } else { row.row.position + 1 };
        let positions: Vec<_> = rows.iter().map(position).collect();
        let positions = Buffer::of(bytemuck::cast_slice(&positions));
        let (ids, fault) = (Buffer::new(count * 4), Buffer::zeroed(4));
        let args = SampleArgs {
            logits: logits.address(),
            rows: params.address(),
            positions: positions.address(),
            ids: ids.address(),
            fault: fault.address(),
            adjusts: adjusts.address(),
            tokens: states.address(),
            masks: masks.address(),
            pitch: pitch as u64,
            vocabulary: vocabulary as u32,
            token_pitch: token_pitch as u32,
        };
        let buffers = [
            ("logits", &logits),
            ("rows", &params),
            ("positions", &positions),
            ("ids", &ids),
            ("fault", &fault),
            ("adjusts", &adjusts),
            ("tokens", &states),
            ("masks", &masks),
        ];
        let slices = buffers.map(|(name, buffer)| (name, buffer.slice()));
        let run = Run { problem: GemmShape::rows(count as u32), sms: 2, seed: 11 + step };
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(spec, run, &args, &slices) }?;
        let ids = ids.u32s();
        for (at, row) in rows.iter_mut().enumerate() {
            let next = row.next();
            if ids[at] != next.unwrap_or(UNTOUCHED) {
                let what = (&row.adjustments, &row.row.params, &row.answer);
                return Err(format!("step {step}, row {at} of {vocabulary}: {} for {next:?}: {what:?}", ids[at]));
            }
            row.answer.extend(next.filter(|token| *token != NO_TOKEN));
            // An engine ends a sequence without a token; this test tries again.
            if row.row.position != PAD && next != Some(NO_TOKEN) {
                row.row.position += 1;
            }
        }
        // The counts, and no writes between or after the slots.
        let words = states.u32s();
        for (at, row) in rows.iter().enumerate() {
            let slot = &words[(count - 1 - at) * token_pitch * 2..][..token_pitch * 2];
            let mut expected: Vec<u32> =
                row.states().iter().flat_map(|state| [state.bias.to_bits(), state.marks]).collect();
            expected.resize(token_pitch * 2, 0);
            for pair in expected[vocabulary * 2..].chunks_exact_mut(2) {
                pair.copy_from_slice(&[1e9f32.to_bits(), 7]);
            }
            if slot != expected {
                return Err(format!("step {step}, row {at} of {vocabulary}: the counts are wrong"));
            }
        }
    }
    Ok(())
}

fn adjusted_batch(vocabulary: usize) -> Vec<AdjustedRow> {
    let mut random = Random::new(77 + vocabulary as u64);
    let none = Adjustments::default;
    let all = none().repetition_penalty(1.3).frequency_penalty(0.7).presence_penalty(-0.4).min_new_tokens(3);
    let row = |(i, row): (usize, Row)| {
        let mut token = || random.below(vocabulary as u64) as u32;
        let prompt: Vec<u32> = (0..i % 4 * 5).map(|_| token()).collect();
        let answer = if i % 3 == 0 { Vec::new() } else { vec![token(), token(), prompt.first().copied().unwrap_or(0)] };
        let ends = vec![token(), token()];
        let bias: std::collections::BTreeMap<u32, f32> =
            (0..8).map(|nth| (token(), [100.0, -100.0, 3.7, -0.013][nth % 4])).collect();
        let bias: Vec<(u32, f32)> = bias.into_iter().collect();
        let adjustments = match i % 6 {
            0 => none().bias(bias),
            1 => none().repetition_penalty(0.01),
            2 => none().frequency_penalty(2.0).presence_penalty(0.3),
            3 => all.clone().bias(bias),
            4 => none().min_new_tokens(answer.len() as u32 + 2),
            _ => none(),
        };
        // Rows with and without adjustments, for many tokens, few or none.
        let mask = (i % 4 == 1).then(|| {
            let bits = |word: usize| match i / 4 % 4 {
                0 => 0x5a5a_0ff1_u32.rotate_left(word as u32),
                1 => u32::from(word == 0) << (i % 32) | 1 << 31,
                2 => 0,
                _ => !(1 << (word % 32)),
            };
            (0..vocabulary.div_ceil(32)).map(bits).collect()
        });
        AdjustedRow { row, adjustments, prompt, answer, ends, mask }
    };
    batch(vocabulary).into_iter().chain(edges(vocabulary)).enumerate().map(row).collect()
}

/// Penalties apply to the token of the step before, which only the device knows.
#[test]
fn adjusted_tokens_match_the_reference() {
    let specs = specs(true);
    assert_eq!(specs.len(), 8);
    let mut kernel = CpuKernel::all(&specs, &[]);
    for (i, spec) in specs.iter().enumerate() {
        let single = spec.name().as_str().contains("_c1");
        for vocabulary in [1, 2, 63, 257, 1000, 5003] {
            if spec.name().as_str().ends_with("_pdl") && vocabulary != 63 {
                continue;
            }
            let rows = adjusted_batch(vocabulary);
            let step = thinned(if single && vocabulary < 1000 { 1 } else { 5 });
            let some = rows.into_iter().skip(i / 2 % 4).step_by(step);
            let wrong = check_adjusted(&mut kernel, spec, some.collect());
            wrong.unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
        }
    }
}

/// With neutral adjustments, the tokens equal those of the ordinary sampler.
#[test]
fn neutral_adjustments_change_nothing() {
    let spec = spec("sample_t1024_c2_adjusted");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let rows = batch(1000).into_iter().map(|row| AdjustedRow {
        row,
        // A bias of 0 has no effect.
        adjustments: Adjustments::default().bias(vec![(5, 0.0)]),
        prompt: vec![1, 2],
        answer: vec![3],
        ends: vec![4],
        mask: None,
    });
    let rows: Vec<_> = rows.collect();
    assert!(rows.iter().all(|row| row.next() == row.row.expected()));
    check_adjusted(&mut kernel, &spec, rows).unwrap();
}

#[test]
fn planted_bugs_of_adjustments_are_caught() {
    let header = "unweight/kernels/sample.cuh";
    for (from, to) in [
        ("value > 0.0f ? ptx::div(value, repetition)", "value > 0.0f ? ptx::mul(value, repetition)"),
        ("ptx::ld_global(&states[id].marks) + 1", "ptx::ld_global(&states[id].marks)"),
        ("if (marks & kEnds && ends_early) return kNan;", ""),
        ("return bits & 0x80000000 ? ~bits : bits | 0x80000000;", "return bits | 0x80000000;"),
        ("key < floor || key >> shift != found", "key < floor"),
        ("if (slot == kNoSlot) return;", ""),
        ("if (!(bits >> i & 1)) words[i] = kNan;", ""),
        (
            "if (first + i >= args.vocabulary || !(bits >> i & 1)) continue;",
            "if (first + i >= args.vocabulary) continue;",
        ),
        ("mask + first / 32) >> first % 32", "mask + first / 32)"),
        ("const u32 id = choose(position - 1);", "const u32 id = choose(position);"),
    ] {
        let spec = spec("sample_t1024_c1_adjusted");
        let mut kernel = CpuKernel::of(&spec, &[Edit { header, from, to }]);
        let rows = |vocabulary| adjusted_batch(vocabulary);
        let caught =
            [63, 1000, 2].into_iter().any(|vocabulary| check_adjusted(&mut kernel, &spec, rows(vocabulary)).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
