//! The choice of tokens on a GPU: the tokens of the reference, whatever the logits, the batch and the cluster.

use unweight_codegen::spec::{SampleSpec, VariantSpec, catalog};
use unweight_model::{SampleParams, sampling};
use unweight_rt::{
    DeviceBuffer, ExecContext, MatrixRef, Stream,
    raw::ops::{
        kv::PAD_POSITION,
        sample::{Sample, SampleRow},
    },
};

use crate::harness::{Random, Weights, context, gpu, guard_is_whole, poison, stream};

fn row(params: &SampleParams) -> SampleRow {
    let SampleParams { temperature, top_k, top_p, min_p, seed, .. } = *params;
    SampleRow { seed, temperature, top_k, top_p, min_p }
}

/// Rows of logits with how each is to be chosen from.
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
        // What lies between the rows must not be looked at.
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

    /// The tokens of the reference; of rows without one what was there.
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

fn sampler(spec: &VariantSpec) -> Sample {
    Sample::new(gpu().get(spec).unwrap()).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_chooses_as_the_reference() {
    let kernels = gpu();
    let stream = stream(kernels);
    let kinds = [Weights::Gaussian { sigma: 2.0 }, Weights::Noise, Weights::FewExponents, Weights::Zeros];
    for (number, spec) in catalog::of::<SampleSpec>().enumerate() {
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
                guard_is_whole(&stream, &operands.ids, &what);
                // Rows of NaN alone are reported, and nothing else is.
                let all_nan = kind == Weights::Noise && vocab < 3;
                assert!(ctx.synchronize().is_ok() || all_nan, "{what}");
            }
        }
    }
}

/// Beside a stream that keeps the memory busy.
#[test]
#[ignore = "needs a GPU"]
fn repeated_sampling_gives_the_same_tokens() {
    let kernels = gpu();
    let (stream, other) = (stream(kernels), stream(kernels));
    let noise = DeviceBuffer::<u16>::zeroed(&other, 64 << 20).unwrap();
    let mut target = DeviceBuffer::<u16>::zeroed(&other, 64 << 20).unwrap();
    for spec in catalog::of::<SampleSpec>() {
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
