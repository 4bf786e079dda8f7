//! The sampler, run on the CPU prelude: every token is that of the reference, at every cluster size, in any batch; and
//! planted bugs must be caught.

use crate::harness::{Buffer, CpuKernel, Edit, Run, spec};
use unweight_codegen::{
    VariantSpec,
    abi::{SampleArgs, SampleRow},
    plan::GemmShape,
    spec::{SampleSpec, catalog},
};
use unweight_format::testing::Random;
use unweight_model::sampling::{SampleParams, sample};

/// Of a row without a token.
const PAD: u32 = u32::MAX;
/// Of the fault word and the ids before they are written.
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
    /// Its token, or none.
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

/// Runs a batch, whose rows have one length, and compares.
fn check(kernel: &mut CpuKernel, spec: &VariantSpec, rows: &[Row]) -> Result<(), String> {
    let vocabulary = rows[0].logits.len();
    let pitch = vocabulary.next_multiple_of(8) + 8;
    // What lies behind a row would win.
    let mut logits = vec![INFINITY; rows.len() * pitch - (pitch - vocabulary)];
    for (row, own) in rows.iter().zip(logits.chunks_mut(pitch)) {
        own[..vocabulary].copy_from_slice(&row.logits);
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
        pitch: pitch as u64,
        vocabulary: vocabulary as u32,
        reserved: 0,
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
                "row {at} of {vocabulary}: token and position {got:?}, not {:?}: {:?}",
                (id, after),
                row.params
            ));
        }
    }
    let reported = rows.iter().rposition(|row| row.position != PAD && row.only_nan()).map_or(0, |row| row as u32 + 1);
    match fault.u32s()[0] {
        fault if fault == reported => Ok(()),
        fault => Err(format!("the fault word is {fault}, not {reported}")),
    }
}

/// Logits with ties, some NaN and infinities, in the spread of models.
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

/// Every combination of filters, and greedy.
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

/// Rows at the edges of keys, counts and weights.
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
        // Many more of one key than a counter of 32 bits has units of 2^-31.
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

#[test]
fn tokens_match_the_reference() {
    let specs: Vec<_> = catalog::of::<SampleSpec>().collect();
    assert_eq!(specs.len(), 8);
    let mut kernel = CpuKernel::all(&specs, &[]);
    for (i, spec) in specs.iter().enumerate() {
        let name = spec.name();
        let (single, dependent) = (name.as_str().contains("_c1"), name.as_str().ends_with("_pdl"));
        for vocabulary in [1, 2, 63, 257, 1000, 5003] {
            // On this machine a dependent launch is one like another, and large clusters are many threads: each sees
            // other rows.
            if dependent && vocabulary != 63 {
                continue;
            }
            for rows in [batch(vocabulary), edges(vocabulary)] {
                let some = rows.iter().skip(i / 2 % 4).step_by(if single { 1 } else { 4 });
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
        let edit = Edit { header, from, to };
        if edit.is_left_out() {
            continue;
        }
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = [1000, 63].into_iter().any(|vocabulary| {
            [batch, edges].into_iter().any(|rows| check(&mut kernel, &spec, &rows(vocabulary)).is_err())
        });
        assert!(caught, "planting `{to}` for `{from}` went unnoticed");
    }
}
