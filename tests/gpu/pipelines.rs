//! Pipelines, which multiply stored MLP weights: compared with the f32 reference, every pipeline at the edges of
//! batches, and the same bits for every variant.

use std::path::Path;

use half::bf16;
use rayon::prelude::*;
use unweight::engine::{
    Engine, EngineError, EngineOptions, Placement, Plan, Request,
    raw::{
        objective::{Rounds, StepObjective},
        options::{BUCKETS, LoadedAs, Measured, Pipeline, PipelineVariant, Setting},
        pipelines::{
            LoadedProjection,
            tune::{Journal, Limits, descend},
        },
    },
};
use unweight_bench::{halves, normal_bf16};
use unweight_codegen::spec::{Arch, DecodeOutput, Epilogue};
use unweight_format::{
    CodeLimit, Matrix,
    bundle::{self, Bundle, CompressOptions, Profile, Scope, Silent},
    raw::huffman,
    testing::demo_model::{self, DemoOptions},
};
use unweight_model::{
    ModelConfig, ModelWeights,
    reference::{self, Reference},
};

use unweight_rt::{
    DeviceBuffer, DeviceError, DeviceMatrix, ExecContext, KernelSet, LayerBuilder, Linear, LoadOptions, Merge,
    env::Env,
    raw::{
        choose::graph,
        jit::compiler::CompileRequest,
        layer::loader::reachable,
        ops::{
            decode_huffman::{Decoder, output_bytes},
            gemm_recon::Matmul,
        },
        weight::{DeviceHuffman, DevicePalette},
    },
};

use crate::harness::{Random, WHOLE_TILES, Weights, error, gpu, guard_is_intact, poison, stream, value};
use crate::jit::cache;

/// Six layers, so that hard layers use each slot more than once; whole tiles.
const MODEL: DemoOptions = DemoOptions { layers: 6, seed: 11, ..WHOLE_TILES };

/// As in `engine.rs`: rounding to bf16 everywhere causes an error of a few parts in a thousand.
const BOUND: f64 = 0.02;

fn bundle(home: &Path, profile: Profile) -> Bundle {
    let (source, target) = (home.join("model"), home.join(format!("{profile:?}")));
    if !source.exists() {
        demo_model::write(&source, &MODEL).expect("a model");
    }
    let options = CompressOptions::new(profile).scope(Scope::Mlp);
    bundle::compress(&source, &target, &options, &Silent).expect("a bundle");
    Bundle::open(&target).expect("a bundle")
}

fn options(placement: Placement) -> EngineOptions {
    EngineOptions::default().max_batch(64).context(256).chunk(128).memory(4 << 30).placement(placement)
}

fn load(bundle: &Bundle, options: EngineOptions) -> Engine {
    Engine::load(gpu(), bundle, options, &|_| {}).expect("an engine")
}

/// The list of a bundle's kernels contains every kernel that its engine requests.
#[test]
#[ignore = "needs a GPU"]
fn pipelines_need_only_the_listed_kernels() {
    let home = tempfile::tempdir().unwrap();
    let (env, device) = (Env::process().unwrap(), gpu().device());
    let bundles = [bundle(home.path(), Profile::Inference), bundle(home.path(), Profile::Distribution)];
    for (at, placement) in [(0, Placement::Stored), (1, Placement::Stored), (1, Placement::Alternate)] {
        let bundle = &bundles[at];
        let options = options(placement);
        let chooser = gpu().chooser().clone();
        let mut specs = Engine::kernels(bundle, &options, &[*chooser.gpu_model()]).unwrap();
        // As `kernels attach` attaches them.
        specs.extend(reachable(bundle, LoadOptions::default().placement(placement), chooser));
        let folder = home.path().join(format!("{at}{placement}"));
        let requests = specs.iter().map(CompileRequest::render).collect::<Result<Vec<_>, _>>().unwrap();
        cache(env, &folder).compile_all(&requests, env.jit_threads, &|_| {}).unwrap();
        let mut bare = env.clone();
        bare.nvrtc = Some(home.path().join("nowhere.so"));
        let set = KernelSet::new(device, cache(&bare, &folder), 1);
        let mut engine = Engine::load(&set, bundle, options.clone(), &|_| {}).expect("nothing to compile");
        let text = tokens(70, 3);
        assert_eq!(engine.logits(&text).unwrap(), load(bundle, options).logits(&text).unwrap());
    }
}

fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(MODEL.vocab as u64) as u32).collect()
}

/// Every profile, as stored and with every other coded layer made easy: chunks of a prompt, and steps.
#[test]
#[ignore = "needs a GPU"]
fn logits_match_the_reference_for_every_encoding() {
    let home = tempfile::tempdir().unwrap();
    for profile in [Profile::Inference, Profile::Distribution, Profile::Palette, Profile::Packed, Profile::Compact] {
        let bundle = bundle(home.path(), profile);
        let config = ModelConfig::of_bundle(&bundle).unwrap();
        let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
        let reference = Reference::new(&config, &weights, reference::bundle_values(&bundle));
        for placement in [Placement::Stored, Placement::Alternate] {
            let mut engine = load(&bundle, options(placement));
            for count in [1, 63, 128, 130, 200] {
                let text = tokens(count, count as u64);
                let expected = reference.logits(&text).unwrap();
                let whole = engine.logits(&text).unwrap();
                let difference = error(&whole, &expected);
                assert!(difference < BOUND, "{profile:?} {placement}, {count} tokens: {difference}");
                assert_eq!(engine.logits(&text).unwrap(), whole, "other bits");
                if count < 130 {
                    let steps = engine.logits_by_steps(&[&text]).unwrap();
                    let difference = error(&steps[0], &expected);
                    assert!(difference < BOUND, "{profile:?} {placement}, {count} tokens by steps: {difference}");
                }
            }
        }
    }
}

/// Returns the short texts of one batch.
fn batch(rows: usize) -> Vec<Vec<u32>> {
    (0..rows).map(|row| tokens(2 + row % 3, row as u64)).collect()
}

fn by_steps(engine: &mut Engine, rows: usize) -> Vec<Vec<bf16>> {
    let texts = batch(rows);
    engine.logits_by_steps(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap()
}

/// Every variant of every projection at the edges of the buckets: graphs and single launches give the same bits.
#[test]
#[ignore = "needs a GPU"]
fn every_pipeline_matches_the_reference() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), Profile::Distribution);
    let config = ModelConfig::of_bundle(&bundle).unwrap();
    let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
    let reference = Reference::new(&config, &weights, reference::bundle_values(&bundle));
    let references: Vec<Vec<f32>> = batch(64).iter().map(|text| reference.logits(text).unwrap()).collect();
    let (mut recorded, mut direct) =
        (load(&bundle, options(Placement::Alternate)), load(&bundle, options(Placement::Alternate).graphs(false)));
    let mut run_variants = std::collections::BTreeSet::new();
    for rows in [1, 7, 8, 9, 16, 17, 32, 33, 64] {
        let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= rows as u32).unwrap();
        let settings = all_settings(&mut recorded, bucket);
        for setting in settings {
            run_variants.extend(setting.hard.iter().chain(&setting.easy).map(ToString::to_string));
            let name = format!("{rows} rows, {setting:?}");
            recorded.tune_pipelines().unwrap().set(bucket, &setting).unwrap();
            direct.tune_pipelines().unwrap().set(bucket, &setting).unwrap();
            let logits = by_steps(&mut recorded, rows);
            assert_eq!(by_steps(&mut direct, rows), logits, "{name}: other bits without a graph");
            for (logits, expected) in logits.iter().zip(&references) {
                let difference = error(logits, expected);
                assert!(difference < BOUND, "{name}: {difference}");
            }
        }
    }
    for pipeline in [Pipeline::Palette, Pipeline::FullDecode, Pipeline::Exponents, Pipeline::Transcode] {
        assert!(
            run_variants.iter().any(|name| name.starts_with(pipeline.name())),
            "{pipeline:?} was not run: {run_variants:?}"
        );
    }
}

/// Returns settings with each variant of hard and easy layers, with one and two streams that multiply, and with few and
/// many SMs that decode.
fn all_settings(engine: &mut Engine, bucket: u32) -> Vec<Setting> {
    let choices = engine.tune_pipelines().unwrap().choices(bucket).unwrap();
    let longest = choices.iter().flatten().map(Vec::len).max().unwrap_or(0);
    let [hard, easy] = &choices;
    // Without such layers, the variant does not matter.
    let nth = |variants: &[Vec<PipelineVariant>; 3], at: usize| {
        variants
            .each_ref()
            .map(|variants| variants.get(at % variants.len().max(1)).copied().unwrap_or("raw".parse().unwrap()))
    };
    let at = |at| Setting {
        hard: nth(hard, at),
        easy: nth(easy, at),
        decode_sms: [3, 22, 64][at % 3],
        consumers: 1 + (at % 2) as u8,
    };
    (0..longest).map(at).collect()
}

/// Finds races: the same step, thousands of times.
#[test]
#[ignore = "needs a GPU"]
fn repeated_replays_give_the_same_bits() {
    let home = tempfile::tempdir().unwrap();
    for profile in [Profile::Inference, Profile::Distribution] {
        let bundle = bundle(home.path(), profile);
        let mut engine = load(&bundle, options(Placement::Stored));
        for rows in [1, 8, 64] {
            let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= rows as u32).unwrap();
            for setting in all_settings(&mut engine, bucket).into_iter().step_by(4) {
                engine.tune_pipelines().unwrap().set(bucket, &setting).unwrap();
                let first = by_steps(&mut engine, rows);
                // Four steps each.
                for round in 0..400 {
                    assert_eq!(by_steps(&mut engine, rows), first, "{profile:?}, {rows} rows, round {round}");
                }
            }
        }
        let requests: Vec<Request> = (0..8).map(|index| Request::new(tokens(40, index)).max_new_tokens(60)).collect();
        let mut first = None;
        for round in 0..20 {
            let mut generated = Vec::new();
            for request in &requests {
                engine.add(request.clone()).unwrap();
            }
            while !engine.is_idle() {
                generated.extend(engine.step().unwrap().into_iter().map(|event| event.token));
            }
            assert_eq!(first.get_or_insert_with(|| generated.clone()), &generated, "{profile:?}, round {round}");
        }
    }
}

/// Settings that a device cannot run, and plans that were measured for another device.
#[test]
#[ignore = "needs a GPU"]
fn settings_that_cannot_run_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), Profile::Distribution);
    let mut engine = load(&bundle, options(Placement::Stored));
    let before = by_steps(&mut engine, 1);
    let good = all_settings(&mut engine, 1).remove(0);
    let sms = gpu().device().info().sms;
    for setting in [Setting { decode_sms: sms, ..good.clone() }, Setting { consumers: 3, ..good.clone() }] {
        let error = engine.tune_pipelines().unwrap().set(1, &setting).unwrap_err();
        assert!(matches!(error, EngineError::Setting(_)), "{error}");
    }
    assert_eq!(by_steps(&mut engine, 1), before, "a refused setting must not change the bits");
    let mut packed = load(&bundle, options(Placement::Packed));
    assert!(packed.tune_pipelines().is_err());
    // A plan with another key is not used.
    let mut plan = Plan::default();
    let bad = Setting { decode_sms: sms, ..good };
    let info = gpu().device().info();
    plan.insert(Measured::new(("another", Placement::Stored), 1, info, bad, (1.0, 0.0)));
    let mut engine = load(&bundle, options(Placement::Stored).plan(plan));
    assert_eq!(by_steps(&mut engine, 1), before);
}

/// The tuner improves a deliberately bad start with steps of the engine. The result runs, and the journal is complete.
#[test]
#[ignore = "needs a GPU"]
fn tuning_improves_a_bad_start() {
    let home = tempfile::tempdir().unwrap();
    let (source, target) = (home.path().join("model"), home.path().join("bundle"));
    let model = DemoOptions { hidden: 1024, intermediate: 4096, heads: 8, ..MODEL };
    demo_model::write(&source, &model).unwrap();
    let options = CompressOptions::new(Profile::Distribution).scope(Scope::Mlp);
    bundle::compress(&source, &target, &options, &Silent).unwrap();
    let bundle = Bundle::open(&target).unwrap();
    let options = EngineOptions::default().max_batch(8).context(128).chunk(128).memory(8 << 30);
    let mut engine = load(&bundle, options.placement(Placement::Stored).graphs(false));
    let before = by_steps(&mut engine, 8);
    let space = engine.tune_pipelines().unwrap().space(8).unwrap();
    // One SM per decoder.
    let bad =
        space.point(&Setting { decode_sms: 3, consumers: 1, ..engine.tune_pipelines().unwrap().guess(8).unwrap() });
    let path = home.path().join("journal");
    let mut measured = Vec::new();
    let mut best = None;
    for _ in 0..2 {
        let mut journal = Journal::open(&path, "key", space.space(), &bad).unwrap();
        let never = || false;
        let mut objective = StepObjective::new(&mut engine, &space, (8, 64), Rounds::default(), &bad, &never).unwrap();
        let tuned =
            descend(space.space(), &bad, &mut objective, &mut journal, &Limits::default(), &mut |_| {}).unwrap();
        assert!(tuned.gain > 0.05 && tuned.rejected == 0, "{tuned:?}");
        measured.push(tuned.measured);
        assert_eq!(best.get_or_insert_with(|| tuned.best.clone()), &tuned.best);
    }
    assert!(measured[0] > 10 && measured[1] == 0, "{measured:?}");
    engine.tune_pipelines().unwrap().set(8, &space.setting(&best.unwrap())).unwrap();
    for (after, before) in by_steps(&mut engine, 8).iter().zip(&before) {
        let before: Vec<f32> = before.iter().map(|logit| logit.to_f32()).collect();
        assert!(error(after, &before) < BOUND);
    }
}

/// Rows on both sides of every bucket's edge.
const EDGES: [u32; 20] = [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 256, 257, 512, 513, 1023, 1024];

/// A projection in every encoding that a pipeline reads.
struct Encodings {
    shape: [u32; 2],
    verbatim_rows: u32,
    adds: bool,
    whole: DeviceMatrix,
    huffman: DeviceHuffman,
    palette: DevicePalette,
    linear: Linear,
    /// The output of a pipeline's decoder.
    slot: (DeviceMatrix, DeviceBuffer<u8>, DeviceBuffer<u8>),
    weights: Vec<u16>,
}

impl Encodings {
    fn new(builder: &mut LayerBuilder<'_>, [n, k]: [u32; 2], adds: bool, seed: u64) -> Self {
        let stream = builder.stream().clone();
        let mut bytes = Weights::TRAINED.bytes(n as usize * k as usize, seed);
        // More exponents than a palette holds.
        for row in (0..n as usize).step_by(37) {
            bytes[row * k as usize * 2 + 1] = 0x3f;
        }
        let tensor = huffman::encode(Matrix::new(&bytes, n as usize, k as usize).unwrap(), CodeLimit::DEFAULT).unwrap();
        let weights = halves(&bytes);
        let whole = DeviceMatrix::from_host(&stream, n, k, &weights).unwrap();
        let linear = builder.layer("projection", &[whole.view()], Merge::Rows).unwrap();
        assert!(linear.is_packed() && tensor.max_verbatim_rows() > 0);
        let buffer = |output| DeviceBuffer::zeroed(&stream, output_bytes(tensor.grid(), output)).unwrap();
        Self {
            shape: [n, k],
            verbatim_rows: tensor.max_verbatim_rows(),
            adds,
            huffman: DeviceHuffman::upload(&stream, &tensor).unwrap(),
            palette: DevicePalette::upload(&stream, &huffman::transcode(&tensor).unwrap()).unwrap(),
            linear,
            slot: (
                DeviceMatrix::zeroed(&stream, n, k).unwrap(),
                buffer(DecodeOutput::Exponent),
                buffer(DecodeOutput::Palette),
            ),
            whole,
            weights,
        }
    }

    fn epilogue(&self) -> Epilogue {
        if self.adds { Epilogue::StoreAdd } else { Epilogue::Store }
    }

    /// Returns the properties that determine the choice of a variant.
    fn loaded(&self, loaded_as: LoadedAs) -> LoadedProjection {
        let [n, k] = self.shape;
        let packed = loaded_as == LoadedAs::Linear;
        LoadedProjection { loaded_as, packed, n, k, verbatim_rows: self.verbatim_rows }
    }

    /// Decodes, if the pipeline does, and multiplies.
    fn enqueue(
        &mut self,
        variant: PipelineVariant,
        matmul: Option<&Matmul>,
        ctx: &mut ExecContext,
        x: &DeviceMatrix,
        y: &mut DeviceMatrix,
    ) -> Result<(), DeviceError> {
        let (epilogue, adds, bits) = (self.epilogue(), self.adds, self.huffman.code_bits());
        let (whole, exponents, indices) = (&mut self.slot.0, &mut self.slot.1, &mut self.slot.2);
        let decoder = |output| Decoder::new(gpu().get(&graph::decoder(Arch::Sm90a, output, bits).unwrap())?);
        let (x, y) = (x.view(), y.view_mut());
        match variant.pipeline {
            Pipeline::Raw => ctx.cublas()?.matmul(x, self.whole.view(), y, adds),
            Pipeline::Packed => self.linear.enqueue(ctx, x, y, epilogue),
            Pipeline::Palette => matmul.unwrap().palette(ctx, x, self.palette.view(), y),
            Pipeline::FullDecode => {
                decoder(DecodeOutput::Full)?.full(ctx, &self.huffman, whole.view_mut())?;
                ctx.cublas()?.matmul(x, whole.view(), y, adds)
            }
            Pipeline::Exponents => {
                decoder(DecodeOutput::Exponent)?.exponent(ctx, &self.huffman, exponents)?;
                matmul.unwrap().exponent(ctx, x, self.huffman.as_exponent(exponents), y)
            }
            Pipeline::Transcode => {
                decoder(DecodeOutput::Palette)?.palette(ctx, &self.huffman, indices)?;
                matmul.unwrap().palette(ctx, x, self.huffman.as_palette(indices), y)
            }
        }
    }

    /// Returns `X * W^T` in double precision, with the sum of the magnitudes of each element's terms.
    fn reference(&self, x: &[u16]) -> Vec<(f64, f64)> {
        let (n, k) = (self.shape[0] as usize, self.shape[1] as usize);
        let values = |bits: &[u16]| bits.iter().map(|bits| value(*bits)).collect::<Vec<f64>>();
        let (x, w) = (values(x), values(&self.weights));
        let element = |at: usize| {
            let terms = x[at / n * k..][..k].iter().zip(&w[at % n * k..][..k]).map(|(x, w)| x * w);
            terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
        };
        (0..x.len() / k * n).into_par_iter().map(element).collect()
    }
}

/// Gate, up and down with every variant of every pipeline at every edge of the buckets, against float64: single
/// launches and graphs give the same bits.
#[test]
#[ignore = "needs a GPU"]
fn every_projection_pipeline_matches_float64() {
    let stream = stream(gpu());
    let sms = gpu().device().info().sms;
    let mut builder = LayerBuilder::new(gpu(), &stream, LoadOptions::default()).unwrap();
    let mut run_variants = std::collections::BTreeSet::new();
    let max_rows = EDGES[EDGES.len() - 1];
    for (name, shape, adds) in [("gate", [512, 256], false), ("up", [512, 256], false), ("down", [256, 512], true)] {
        let mut encodings = Encodings::new(&mut builder, shape, adds, 7 + run_variants.len() as u64);
        let mut ctx = ExecContext::new(&stream, encodings.linear.context_size().with_cublas()).unwrap();
        let [n, k] = shape;
        let x = halves(&normal_bf16((max_rows * k) as usize, 1.0, 8 + run_variants.len() as u64));
        let before = halves(&normal_bf16((max_rows * n) as usize, 1.0, 9));
        // Rows are independent: every batch consists of the first rows of the largest.
        let exact = encodings.reference(&x);
        for m in EDGES {
            let count = (m * n) as usize;
            let x = DeviceMatrix::from_host(&stream, m, k, &x[..(m * k) as usize]).unwrap();
            let mut y = DeviceMatrix::zeroed(&stream, m, n).unwrap();
            let start = |y: &mut DeviceMatrix| {
                poison(&stream, y);
                if adds {
                    y.write(&stream, 0, &before[..count]).unwrap();
                }
            };
            let all = [LoadedAs::Bf16, LoadedAs::Palette, LoadedAs::Huffman, LoadedAs::Linear];
            for loaded in all.map(|loaded_as| encodings.loaded(loaded_as)) {
                for variant in loaded.variants(Arch::Sm90a, m, sms) {
                    let what = format!("{name}, {m} rows, {variant}");
                    let spec = loaded.kernel(Arch::Sm90a, variant, encodings.epilogue());
                    let matmul = spec.map(|spec| Matmul::new(gpu().get(&spec).unwrap()).unwrap());
                    // The pipeline must not read the previous contents of a slot.
                    poison(&stream, &mut encodings.slot.0);
                    poison(&stream, &mut encodings.slot.1);
                    poison(&stream, &mut encodings.slot.2);
                    start(&mut y);
                    encodings.enqueue(variant, matmul.as_ref(), &mut ctx, &x, &mut y).unwrap();
                    ctx.synchronize().unwrap();
                    let direct = y.to_host(&stream).unwrap();
                    guard_is_intact(&stream, &y, &what);
                    // In fp32; cuBLAS may round the sums of parts of k to bf16.
                    let sums = match variant.pipeline {
                        Pipeline::Raw | Pipeline::FullDecode => 2f64.powi(-8),
                        _ => f64::from(k) * 2f64.powi(-23),
                    };
                    let difference = |at: usize| {
                        let (sum, magnitude) = exact[at];
                        let want = sum + if adds { value(before[at]) } else { 0.0 };
                        (value(direct[at]) - want, want, magnitude)
                    };
                    let wrong = (0..count).into_par_iter().find_first(|&at| {
                        let (error, want, magnitude) = difference(at);
                        // The rounding of the result (2^-9), and of the sum.
                        error.is_nan() || error.abs() > want.abs() * 2f64.powi(-8) + magnitude * sums
                    });
                    if let Some(at) = wrong {
                        let (row, column) = (at / n as usize, at % n as usize);
                        panic!("{what}: y[{row}, {column}] = {}, want {:?}", value(direct[at]), exact[at]);
                    }
                    let square = |(error, want): (f64, f64), at| {
                        let (difference, reference, _) = difference(at);
                        (error + difference * difference, want + reference * reference)
                    };
                    let (error, size) = (0..count).fold((0.0, 0.0), square);
                    let relative = (error / size).sqrt();
                    assert!(relative < 5e-3, "{what}: relative error {relative:.2e}");
                    start(&mut y);
                    poison(&stream, &mut encodings.slot.0);
                    poison(&stream, &mut encodings.slot.1);
                    poison(&stream, &mut encodings.slot.2);
                    let graph =
                        stream.capture(|| encodings.enqueue(variant, matmul.as_ref(), &mut ctx, &x, &mut y)).unwrap();
                    // SAFETY: everything that the graph uses is alive.
                    unsafe { graph.launch() }.unwrap();
                    assert!(y.to_host(&stream).unwrap() == direct, "{what}: a captured launch has other bits");
                    run_variants.insert(variant.to_string());
                }
            }
        }
    }
    for pipeline in Pipeline::ALL {
        assert!(
            run_variants.iter().any(|variant| variant.starts_with(pipeline.name())),
            "{pipeline:?} was not run: {run_variants:?}"
        );
    }
    assert!(run_variants.contains("exponents/n1p6s2") && run_variants.contains("palette/n1p6s4"), "{run_variants:?}");
}
