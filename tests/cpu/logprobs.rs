//! Log probabilities in the simulator: every bit equals the reference, and planted bugs must be caught.

use crate::harness::{Buffer, CpuKernel, Edit, Run, spec};
use unweight_codegen::{
    VariantSpec,
    abi::LogprobsArgs,
    family::logprobs::TOP_MAX,
    plan::GemmShape,
    spec::{LogprobsSpec, catalog},
};
use unweight_format::testing::Random;
use unweight_model::sampling::{NO_TOKEN, TOP_LOGPROBS_MAX, logprobs};

const NAN: u16 = 0x7fc0;
const INFINITY: u16 = 0x7f80;
const NEGATIVE: u16 = 0x8000;
const PAIRS: usize = 1 + TOP_MAX as usize;
/// Fills the results before the launch.
const UNTOUCHED: u32 = 0xa5a5_a5a5;

/// A row: its logits, its sampled token, and 1 plus the number of most likely tokens, or 0.
#[derive(Clone, Debug)]
struct Row {
    logits: Vec<u16>,
    sampled: u32,
    wanted: u32,
}

impl Row {
    fn expected(&self) -> Vec<u32> {
        let mut words = Vec::new();
        if let Some(top) = self.wanted.checked_sub(1) {
            let reference = logprobs(bytemuck::cast_slice(&self.logits), self.sampled, top);
            let is_nan = self.logits.iter().all(|bits| bits & 0x7fff > INFINITY);
            words.extend([if is_nan { NO_TOKEN } else { self.sampled }, reference.sampled.to_bits()]);
            words.extend(reference.top.iter().flat_map(|(token, value)| [*token, value.to_bits()]));
            let missing = [NO_TOKEN, f32::NAN.to_bits()];
            while words.len() < 2 * (1 + top as usize) {
                words.extend(missing);
            }
        }
        words.resize(2 * PAIRS, UNTOUCHED);
        words
    }
}

fn rows(vocabulary: usize) -> Vec<Row> {
    let mut random = Random::new(vocabulary as u64);
    let spread = |random: &mut Random| match random.below(40) {
        0 => NAN,
        1 => INFINITY | NEGATIVE,
        2 => random.below(2) as u16 * NEGATIVE,
        _ => unweight_bench::oracle::rounded(random.normal() * 3.0),
    };
    let mut all: Vec<Row> = (0..6)
        .map(|wanted| Row {
            logits: (0..vocabulary).map(|_| spread(&mut random)).collect(),
            sampled: random.below(vocabulary as u64) as u32,
            wanted: [0, 1, 2, 6, 21, 21][wanted],
        })
        .collect();
    let of = |bits: &[u16], sampled, wanted| Row {
        logits: bits.iter().copied().cycle().take(vocabulary).collect(),
        sampled,
        wanted,
    };
    let one = unweight_bench::oracle::rounded(1.0);
    all.extend([
        of(&[NAN], NO_TOKEN, 21),
        of(&[one], 0, 21),
        of(&[NAN, one], 0, 21),
        of(&[INFINITY, one], 0, 4),
        of(&[INFINITY | NEGATIVE], 0, 21),
        of(&[NEGATIVE, 0], 0, 5),
    ]);
    all
}

fn check(kernel: &mut CpuKernel, spec: &VariantSpec, rows: &[Row]) -> Result<(), String> {
    let vocabulary = rows[0].logits.len();
    let pitch = vocabulary.next_multiple_of(8) + 8;
    // Values after the end of a row would win.
    let mut logits = vec![INFINITY; rows.len() * pitch - (pitch - vocabulary)];
    for (row, values) in rows.iter().zip(logits.chunks_mut(pitch)) {
        values[..vocabulary].copy_from_slice(&row.logits);
    }
    let wanted: Vec<u32> = rows.iter().map(|row| row.wanted).collect();
    let ids: Vec<u32> = rows.iter().map(|row| row.sampled).collect();
    let logits = Buffer::of(bytemuck::cast_slice(&logits));
    let (wanted, ids) = (Buffer::of(bytemuck::cast_slice(&wanted)), Buffer::of(bytemuck::cast_slice(&ids)));
    let out = Buffer::new(rows.len() * PAIRS * 8);
    let args = LogprobsArgs {
        logits: logits.address(),
        wanted: wanted.address(),
        ids: ids.address(),
        out: out.address(),
        pitch: pitch as u64,
        vocabulary: vocabulary as u32,
        reserved: 0,
    };
    let buffers = [("logits", &logits), ("wanted", &wanted), ("ids", &ids), ("out", &out)];
    let slices = buffers.map(|(name, buffer)| (name, buffer.slice()));
    let run = Run { problem: GemmShape::rows(rows.len() as u32), sms: 2, seed: 5 };
    // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run(spec, run, &args, &slices) }?;
    let words = out.u32s();
    for (at, (row, got)) in rows.iter().zip(words.chunks_exact(2 * PAIRS)).enumerate() {
        let expected = row.expected();
        // All NaNs are equal.
        let same = |(a, b): (&u32, &u32)| a == b || [a, b].iter().all(|w| f32::from_bits(**w).is_nan());
        if !got.iter().zip(&expected).all(same) {
            return Err(format!("row {at} of {vocabulary}: {got:x?} instead of {expected:x?}"));
        }
    }
    Ok(())
}

#[test]
fn logprobs_match_the_reference() {
    assert_eq!(TOP_MAX, TOP_LOGPROBS_MAX);
    let specs: Vec<_> = catalog::of::<LogprobsSpec>().collect();
    assert_eq!(specs.len(), 2);
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in &specs {
        for vocabulary in [1, 2, 20, 63, 1000, 9001] {
            check(&mut kernel, spec, &rows(vocabulary)).unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
        }
    }
}

#[test]
fn planted_bugs_are_caught() {
    let header = "unweight/kernels/logprobs.cuh";
    for (from, to) in [
        ("if (own < bound) best", "if (own <= bound) best"),
        ("? 0.0f : ptx::add(logit, -largest)", "? 0.0f : logit"),
        ("ptx::mul(static_cast<float>(sum), kUnit)", "ptx::mul(static_cast<float>(sum), 2.0f * kUnit)"),
        ("if (wanted == 0) return;", ""),
        ("best_below(best)", "best_below(best - 1)"),
    ] {
        let spec = spec("logprobs_t1024");
        let mut kernel = CpuKernel::of(&spec, &[Edit { header, from, to }]);
        let caught = [63, 1000].into_iter().any(|vocabulary| check(&mut kernel, &spec, &rows(vocabulary)).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
