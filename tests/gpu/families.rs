//! Model families: logits of the tiny models of `unweight-model/tests/fixtures` compared with those that transformers
//! computed in f32, and kernels that only some families need.

use std::{fs, path::Path};

use unweight::engine::{Engine, EngineOptions, Placement};
use unweight_bench::{halves, normal_bf16, oracle};
use unweight_codegen::spec::{Arch, NormKind, NormSpec, NormThreads, ScaleForm, ScaleSpec, VariantSpec};
use unweight_format::{
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    safetensors::{Header, SOURCE_HEADER_MAX},
};
use unweight_rt::{
    DeviceBuffer, MatrixMut, MatrixRef,
    raw::ops::{norm::Norm, scale::Scale},
};

use crate::{
    engine::load,
    harness::{context, error, gpu, stream},
};

const EPS: f32 = 1e-5;

fn random(count: usize, seed: u64) -> Vec<u16> {
    halves(&normal_bf16(count, 1.0, seed))
}

#[test]
#[ignore = "needs a GPU"]
fn norms_of_every_kind_apart_added_and_in_place() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    let kinds = NormKind::ALL.iter().flat_map(|&kind| [(kind, false), (kind, true)]);
    let all = kinds.flat_map(|kind| NormThreads::ALL.into_iter().map(move |threads| (kind, threads)));
    for ((kind, add), threads) in all {
        let spec = VariantSpec::norm(Arch::Sm90a, NormSpec { threads, kind, add, pdl: true });
        let norm = Norm::new(kernels.get(&spec).unwrap()).unwrap();
        let gamma = |d: usize| NormSpec { threads, kind, add, pdl: true }.gamma_elements(d as u32) as usize;
        for (m, d) in [(1usize, 4096usize), (3, 72), (40, 5120), (2, 16384)] {
            let (x, gamma, before) = (random(m * d, d as u64), random(gamma(d), 1), random(m * d, 2));
            let of =
                |(row, x): (usize, &[u16])| oracle::norm_of(kind, x, &gamma, EPS, add.then(|| &before[row * d..][..d]));
            let spans: Vec<_> = x.chunks_exact(d).enumerate().flat_map(of).collect();
            let on_device = |values: &[u16]| DeviceBuffer::from_host(&stream, values).unwrap();
            let (source, gamma, mut y) = (on_device(&x), on_device(&gamma), on_device(&before));
            let (rows, cols) = (m as u32, d as u32);
            let view = MatrixRef::new(&source, rows, cols, d as u64).unwrap();
            let output = MatrixMut::new(&mut y, rows, cols, d as u64).unwrap();
            norm.enqueue(&mut ctx, view, &gamma, EPS, None, output).unwrap();
            ctx.synchronize().unwrap();
            let apart = y.to_host(&stream).unwrap();
            assert_eq!(oracle::outside(&apart, &spans), None, "{spec} [{m}, {d}]");
            if add {
                continue;
            }
            let mut own = on_device(&x);
            let output = MatrixMut::new(&mut own, rows, cols, d as u64).unwrap();
            norm.enqueue_in_place(&mut ctx, output, &gamma, EPS).unwrap();
            ctx.synchronize().unwrap();
            assert!(own.to_host(&stream).unwrap() == apart, "{spec} [{m}, {d}] in place");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn factors_are_rounded_once() {
    const FACTOR: f32 = 0.22;
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    for (form, pdl) in ScaleForm::ALL.iter().flat_map(|&form| [(form, false), (form, true)]) {
        let spec = VariantSpec::scale(Arch::Sm90a, ScaleSpec { form, pdl });
        let scale = Scale::new(kernels.get(&spec).unwrap()).unwrap();
        for (m, n) in [(1u32, 8u32), (7, 1032), (300, 4096)] {
            let (x, before) = (random((m * n) as usize, 3), random((m * n) as usize, 4));
            let of = |(x, before): (&u16, &u16)| {
                if form == ScaleForm::Cap {
                    return oracle::capped(*x, FACTOR);
                }
                let before = if form == ScaleForm::Add { oracle::value(*before) } else { 0.0 };
                oracle::Span::about(f64::from((f64::from(FACTOR) * oracle::value(*x) + before) as f32), 0.0)
            };
            let expected: Vec<_> = x.iter().zip(&before).map(of).collect();
            let mut source = DeviceBuffer::from_host(&stream, &x).unwrap();
            let mut y = DeviceBuffer::from_host(&stream, &before).unwrap();
            let view = MatrixRef::new(&source, m, n, n.into()).unwrap();
            scale.enqueue(&mut ctx, view, FACTOR, MatrixMut::new(&mut y, m, n, n.into()).unwrap()).unwrap();
            ctx.synchronize().unwrap();
            let apart = y.to_host(&stream).unwrap();
            assert_eq!(oracle::outside(&apart, &expected), None, "{spec} [{m}, {n}]");
            let in_place_view = MatrixMut::new(&mut source, m, n, n.into()).unwrap();
            let in_place = scale.enqueue_in_place(&mut ctx, in_place_view, FACTOR);
            assert_eq!(in_place.is_ok(), form != ScaleForm::Add, "{spec} in place");
            ctx.synchronize().unwrap();
            let in_place_view = source.to_host(&stream).unwrap();
            assert!(in_place_view == if form == ScaleForm::Add { x } else { apart }, "{spec} [{m}, {n}] in place");
            // A bias of every row.
            let row = random(n as usize, 5);
            let bias = DeviceBuffer::from_host(&stream, &row).unwrap();
            let mut y = DeviceBuffer::from_host(&stream, &before).unwrap();
            let added = scale.enqueue_row(&mut ctx, &bias, FACTOR, MatrixMut::new(&mut y, m, n, n.into()).unwrap());
            assert_eq!(added.is_ok(), form == ScaleForm::Add, "{spec} of one row");
            ctx.synchronize().unwrap();
            let of = |(at, before): (usize, &u16)| {
                let product = f64::from(FACTOR) * oracle::value(row[at % n as usize]);
                let sum = if form == ScaleForm::Add { product } else { 0.0 } + oracle::value(*before);
                oracle::Span::about(f64::from(sum as f32), 0.0)
            };
            let expected: Vec<_> = before.iter().enumerate().map(of).collect();
            assert_eq!(oracle::outside(&y.to_host(&stream).unwrap(), &expected), None, "{spec} [{m}, {n}] of one row");
        }
    }
}

/// A tiny model, the longest context with its LongRoPE factors, and the relative RMS error of transformers' BF16
/// forward pass compared with its f32 forward pass.
pub(crate) const MODELS: [(&str, u32, f64); 15] = [
    ("llama", 64, 0.0210),
    ("mistral", 64, 0.0199),
    ("qwen2", 64, 0.0173),
    ("linear", 64, 0.0153),
    ("phi3", 64, 0.0344),
    ("phi3-short", 32, 0.0189),
    ("smollm3", 64, 0.0185),
    ("granite", 64, 0.0103),
    ("olmo2", 64, 0.0085),
    ("glm4", 64, 0.0203),
    ("cohere", 64, 0.0092),
    ("gemma2", 64, 0.0058),
    ("gemma3", 64, 0.0040),
    ("llama-bias", 64, 0.0113),
    ("olmo2-bias", 64, 0.0052),
];

/// Relative to the repository's root, where cargo runs the tests, or to a pack (`cargo xtask gpu-pack`).
pub(crate) const FIXTURES: &str = "unweight-model/tests/fixtures";

/// Returns the tensor of a file.
fn tensor(file: &[u8], name: &str) -> Vec<[u8; 4]> {
    let header = Header::parse(file, file.len() as u64, SOURCE_HEADER_MAX).unwrap();
    let tensor = header.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    let begin = tensor.offset as usize;
    file[begin..begin + tensor.bytes as usize].as_chunks().0.to_vec()
}

/// Every family whose heads the engine supports, from every profile, by prompts and by steps.
#[test]
#[ignore = "needs a GPU"]
fn tiny_models_match_transformers() {
    let fixtures = Path::new(FIXTURES);
    let home = tempfile::tempdir().unwrap();
    for (model, context, bf16_error) in MODELS {
        let expected = fs::read(fixtures.join(model).join("expected.safetensors")).unwrap();
        let text: Vec<u32> = tensor(&expected, "tokens").into_iter().map(u32::from_le_bytes).collect();
        let expected_logits: Vec<f32> = tensor(&expected, "logits").into_iter().map(f32::from_le_bytes).collect();
        let source = home.path().join(model);
        fs::create_dir(&source).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(fixtures.join(model).join(file), source.join(file)).unwrap();
        }
        for profile in [Profile::Packed, Profile::Compact, Profile::Distribution, Profile::Inference, Profile::Palette]
        {
            let target = home.path().join(format!("{model}-{profile:?}"));
            bundle::compress(&source, &target, &CompressOptions::new(profile), &Silent).unwrap();
            let bundle = Bundle::open(&target).unwrap();
            for placement in [Placement::Packed, Placement::Bf16] {
                let options = EngineOptions::default().max_batch(8).context(context).memory(1 << 30);
                let mut engine = load(&bundle, options.placement(placement));
                let what = format!("{model}, {profile:?}, {placement}");
                let difference = error(&engine.logits(&text).unwrap(), &expected_logits);
                println!("{what}: {:.2} times the error of transformers in BF16", difference / bf16_error);
                assert!(difference < 2.0 * bf16_error, "{what}: {difference}");
                let steps = engine.logits_by_steps(&[&text[..5], &text]).unwrap();
                let difference = error(&steps[1], &expected_logits);
                assert!(difference < 2.0 * bf16_error, "{what} by steps: {difference}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn pipelines_of_families_without_are_refused() {
    let fixtures = Path::new(FIXTURES);
    let home = tempfile::tempdir().unwrap();
    for (model, runs) in
        [("smollm3", true), ("phi3", false), ("granite", false), ("olmo2", false), ("cohere", false), ("gemma3", false)]
    {
        let source = home.path().join(model);
        fs::create_dir(&source).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(fixtures.join(model).join(file), source.join(file)).unwrap();
        }
        let target = home.path().join(format!("{model}-bundle"));
        bundle::compress(&source, &target, &CompressOptions::new(Profile::Inference), &Silent).unwrap();
        let options = EngineOptions::default().max_batch(8).context(64).memory(1 << 30).placement(Placement::Stored);
        let loaded = Engine::load(gpu(), &Bundle::open(&target).unwrap(), options, &|_| {});
        match loaded {
            Ok(_) => assert!(runs, "{model}"),
            Err(error) => assert!(!runs && error.code() == "family-without-pipelines", "{model}: {error}"),
        }
    }
}
