//! Whole models: compared with the f32 reference, between execution paths, and over thousands of repetitions.

use std::{collections::BTreeMap, fs, path::Path};

use half::bf16;
use unweight::engine::{
    AdmissionError, Engine, EngineError, EngineOptions, Event, Finish, KvCache, NO_TOKEN, Placement, Request,
    SampleParams, SeqId,
    raw::memory::{self, Shared},
};
use unweight_format::{
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    raw::packed::Unpackable,
    testing::demo_model::{self, DemoOptions},
};
use unweight_model::{
    ModelConfig, ModelWeights,
    reference::{self, Reference},
};

use crate::harness::{Random, WHOLE_TILES, error, gpu, rms};

/// One model with whole tiles, and one without: padded columns, and a gate and an up that cannot be merged.
pub(crate) const MODELS: [DemoOptions; 2] = [
    WHOLE_TILES,
    DemoOptions {
        layers: 2,
        hidden: 144,
        intermediate: 200,
        heads: 3,
        kv_heads: 1,
        vocab: 1003,
        experts: 0,
        shards: 1,
        seed: 6,
    },
];

pub(crate) fn bundle(home: &Path, model: &DemoOptions, profile: Profile) -> Bundle {
    let (source, target) = (home.join("model"), home.join(format!("{profile:?}")));
    if !source.exists() {
        demo_model::write(&source, model).expect("a model");
    }
    if !target.exists() {
        let options = CompressOptions::default().profile(profile);
        bundle::compress(&source, &target, &options, &Silent).expect("a bundle");
    }
    Bundle::open(&target).expect("a bundle")
}

pub(crate) fn options() -> EngineOptions {
    EngineOptions::default().max_batch(8).context(512).chunk(128).memory(4 << 30)
}

pub(crate) fn load(bundle: &Bundle, options: EngineOptions) -> Engine {
    Engine::load(gpu(), bundle, options, &|_| {}).expect("an engine")
}

pub(crate) fn tokens(count: usize, vocab: usize, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(vocab as u64) as u32).collect()
}

/// Rounding to bf16 everywhere causes an error of a few parts in a thousand. A wrong row causes an error of its own
/// size.
const BOUND: f64 = 0.02;

#[test]
#[ignore = "needs a GPU"]
fn logits_match_the_reference_on_every_route() {
    for model in &MODELS {
        let home = tempfile::tempdir().unwrap();
        for profile in [Profile::Packed, Profile::Distribution, Profile::Palette, Profile::Compact, Profile::Archive] {
            let bundle = bundle(home.path(), model, profile);
            let config = ModelConfig::of_bundle(&bundle).unwrap();
            let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
            let reference = Reference::new(&config, &weights, reference::bundle_values(&bundle));
            for placement in [Placement::Packed, Placement::Bf16] {
                let mut engine = load(&bundle, options().placement(placement));
                for count in [1, 2, 63, 64, 65, 130, 300] {
                    let text = tokens(count, model.vocab, count as u64);
                    let expected = reference.logits(&text).unwrap();
                    let whole = engine.logits(&text).unwrap();
                    let difference = error(&whole, &expected);
                    assert!(difference < BOUND, "{profile:?} {placement}, {count} tokens: {difference}");
                    assert_eq!(engine.logits(&text).unwrap(), whole, "other bits");
                    if count > 130 {
                        continue;
                    }
                    // Alone, and in a batch with texts of other lengths: other kernels, the same bound.
                    let alone = engine.logits_by_steps(&[&text]).unwrap();
                    let difference = error(&alone[0], &expected);
                    assert!(difference < BOUND, "{profile:?} {placement}, {count} tokens by steps: {difference}");
                    let others = [tokens(9, model.vocab, 1), tokens(70, model.vocab, 2), tokens(1, model.vocab, 3)];
                    let batch = engine.logits_by_steps(&[&others[0], &text, &others[1], &others[2]]).unwrap();
                    let difference = error(&batch[1], &expected);
                    assert!(difference < BOUND, "{profile:?} {placement}, {count} tokens in a batch: {difference}");
                    let again = engine.logits_by_steps(&[&others[2], &others[1], &text, &others[0]]).unwrap();
                    assert_eq!(again[2], batch[1], "another row of the batch gave other bits");
                }
            }
        }
    }
}

/// The memory that is predicted before loading equals the engine's own figure, or exceeds it slightly if tensors turn
/// out to have no escapes.
#[test]
#[ignore = "needs a GPU"]
fn planned_memory_equals_reserved_memory() {
    let model = &MODELS[0];
    let home = tempfile::tempdir().unwrap();
    for (profile, placement) in [
        (Profile::Packed, Placement::Packed),
        (Profile::Distribution, Placement::Packed),
        (Profile::Compact, Placement::Packed),
        (Profile::Compact, Placement::Compact),
    ] {
        let bundle = bundle(home.path(), model, profile);
        for max_batch in [1, 8, 256] {
            let options = options().max_batch(max_batch).placement(placement);
            let engine = load(&bundle, options.clone());
            let (config, actual) = (engine.config(), *engine.memory());
            let ctx = memory::context_size(config, &options, gpu().chooser(), |_| placement == Placement::Compact);
            let shared = Shared::planned(config, &options, ctx);
            let planned = memory::plan(config, &options, (actual.weights, shared), 4 << 30).unwrap();
            let what = format!("{profile:?}, {placement}, {max_batch}: {actual}; planned {planned}");
            assert!(
                actual.working <= planned.working && planned.working - actual.working <= actual.working / 10,
                "{what}"
            );
            assert_eq!((actual.slot, actual.cache), (planned.slot, planned.cache), "{what}");
        }
    }
}

/// Both placements of a compact bundle have the same error bound at every batch. Greedy tokens are the most likely ones
/// by the reference's logits, and both placements choose the same tokens unless two logits are equal up to rounding.
#[test]
#[ignore = "needs a GPU"]
fn compact_bundle_gives_the_same_tokens_packed_and_compact() {
    for model in &MODELS {
        let home = tempfile::tempdir().unwrap();
        let bundle = bundle(home.path(), model, Profile::Compact);
        let config = ModelConfig::of_bundle(&bundle).unwrap();
        let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
        let reference = Reference::new(&config, &weights, reference::bundle_values(&bundle));
        // Steps of up to 64 rows: directly from the weights, and through the slot.
        let placements =
            [Placement::Packed, Placement::Compact].map(|placement| options().max_batch(64).placement(placement));
        let mut engines = placements.map(|options| load(&bundle, options));
        let [fast, small] = [0, 1].map(|at: usize| *engines[at].memory());
        // The first model has whole tiles, the second none.
        let whole = model.hidden == 256;
        assert_eq!((fast.slot, small.slot > 0), (0, whole), "{fast}, {small}");
        assert_eq!(small.weights < fast.weights, whole, "{fast}, {small}");
        for count in [1, 65, 200] {
            let text = tokens(count, model.vocab, count as u64);
            let expected = reference.logits(&text).unwrap();
            for engine in &mut engines {
                let placement = engine.options().placement;
                let whole = engine.logits(&text).unwrap();
                assert!(
                    error(&whole, &expected) < BOUND,
                    "{placement:?}, {count} tokens: {}",
                    error(&whole, &expected)
                );
                assert_eq!(engine.logits(&text).unwrap(), whole, "{placement:?}: other bits");
                if count > 100 {
                    continue;
                }
                for rows in [1, 9, 17, 33] {
                    let texts: Vec<&[u32]> = vec![&text; rows];
                    for logits in engine.logits_by_steps(&texts).unwrap() {
                        let difference = error(&logits, &expected);
                        assert!(difference < BOUND, "{placement:?}, {count} tokens by steps of {rows}: {difference}");
                    }
                }
            }
        }
        let requests = requests(20, model.vocab, SampleParams::default(), 12);
        let [fast, small] = engines.each_mut().map(|engine| run(engine, &requests));
        let mut first = 0;
        for (request, (fast, small)) in requests.iter().zip(fast.iter().zip(&small)) {
            for generated in [fast, small] {
                let text: Vec<u32> = request.prompt.iter().chain(generated).copied().collect();
                let expected = reference.logits(&text).unwrap();
                let rows: Vec<&[f32]> = expected.chunks_exact(model.vocab).collect();
                for (index, &token) in generated.iter().enumerate() {
                    let row = rows[request.prompt.len() - 1 + index];
                    let best = row.iter().copied().fold(f32::MIN, f32::max);
                    let slack = f64::from(best - row[token as usize]);
                    assert!(
                        slack < 4.0 * BOUND * rms(row.iter().copied()),
                        "token {index}: its logit is {slack} below the best, {best}"
                    );
                }
            }
            // They differ only where two logits are within that bound, because both were compared with the reference
            // above.
            first += usize::from(fast.first() == small.first());
        }
        assert!(first >= 15, "only {first} of 20 first tokens are the same");
    }
}

/// Runs all requests to their ends.
pub(crate) fn run(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<u32>> {
    let ids: Vec<SeqId> = requests.iter().map(|request| engine.add(request.clone()).unwrap()).collect();
    let mut generated = BTreeMap::<SeqId, Vec<u32>>::new();
    while !engine.is_idle() {
        for Event { seq, token, finish, .. } in engine.step().unwrap() {
            let tokens = generated.entry(seq).or_default();
            tokens.push(token);
            assert!(finish != Some(Finish::Stop));
        }
    }
    ids.iter().map(|id| generated.remove(id).unwrap_or_default()).collect()
}

pub(crate) fn requests(count: usize, vocab: usize, params: SampleParams, seed: u64) -> Vec<Request> {
    let mut random = Random::new(seed);
    let one = |index: u64| {
        let prompt = tokens(1 + random.below(150) as usize, vocab, seed * 1000 + index);
        let new = 1 + random.below(60) as u32;
        Request::new(prompt).max_new_tokens(new).params(params.seed(index))
    };
    (0..count as u64).map(one).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn greedy_sampling_selects_the_most_likely_token() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    for graphs in [true, false] {
        let mut engine = load(&bundle, options().graphs(graphs));
        // More requests than rows, and fewer pages than all of them need at once.
        let requests = requests(30, MODELS[0].vocab, SampleParams::default(), 7);
        let free = engine.free_pages();
        let generated = run(&mut engine, &requests);
        assert_eq!(engine.free_pages(), free, "all pages are free again");
        for (request, generated) in requests.iter().zip(&generated) {
            assert_most_likely(&mut engine, MODELS[0].vocab, request, generated);
        }
    }
}

/// Checks that each token of a sequence has the largest logit after the tokens before, up to rounding.
pub(crate) fn assert_most_likely(engine: &mut Engine, vocab: usize, request: &Request, generated: &[u32]) {
    assert_likely(engine, vocab, (request, generated), 4.0 * BOUND);
}

/// Like [`assert_most_likely`], where rounding explains a distance of `slack_max` times the RMS of the logits.
pub(crate) fn assert_likely(
    engine: &mut Engine,
    vocab: usize,
    (request, generated): (&Request, &[u32]),
    slack_max: f64,
) {
    assert_eq!(generated.len(), request.max_new_tokens as usize);
    let text: Vec<u32> = request.prompt.iter().chain(generated).copied().collect();
    let logits = engine.logits(&text).unwrap();
    let rows: Vec<&[bf16]> = logits.chunks_exact(vocab).collect();
    for (index, &token) in generated.iter().enumerate() {
        let row = rows[request.prompt.len() - 1 + index];
        let best = row.iter().map(|logit| logit.to_f32()).fold(f32::MIN, f32::max);
        let slack = best - row[token as usize].to_f32();
        let scale = rms(row.iter().map(|logit| logit.to_f32()));
        assert!(f64::from(slack) < slack_max * scale, "token {index}: its logit is {slack} below the best, {best}");
    }
}

/// A sequence gets tokens while the prompt of another one is processed, and both get the correct tokens.
#[test]
#[ignore = "needs a GPU"]
fn steps_do_not_wait_for_long_prompts() {
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    let cases = [
        (KvCache::Bf16, true, true),
        (KvCache::Packed, true, true),
        (KvCache::Packed, false, true),
        (KvCache::Bf16, true, false),
        (KvCache::Packed, true, false),
    ];
    for (cache, graphs, mixes) in cases {
        let options = options().chunk(64).kv_cache(cache).graphs(graphs).mixed_passes(mixes).prefix_cache(false);
        let mut engine = load(&bundle, options);
        for round in 0..20 {
            let short = Request::new(tokens(20, vocab, round)).max_new_tokens(120);
            let long = Request::new(tokens(450, vocab, 50 + round)).max_new_tokens(40);
            let alone = run(&mut engine, std::slice::from_ref(&long));
            let first = engine.add(short.clone()).unwrap();
            let (mut generated, mut second, mut between) = (BTreeMap::<SeqId, Vec<u32>>::new(), None, 0);
            while !engine.is_idle() {
                for event in engine.step().unwrap() {
                    generated.entry(event.seq).or_default().push(event.token);
                    between += usize::from(second.is_some_and(|second| !generated.contains_key(&second)));
                }
                if second.is_none() && generated[&first].len() == 5 {
                    second = Some(engine.add(long.clone()).unwrap());
                }
            }
            // Eight chunks, with a step between any two, or in the pass of each.
            assert!(between >= 7, "{cache:?}, round {round}: {between} tokens while the prompt ran");
            let second = &generated[&second.unwrap()];
            if !mixes {
                assert_eq!(second[0], alone[0][0], "{cache:?}, round {round}: the prompt has the same bits");
            }
            assert_most_likely(&mut engine, vocab, &short, &generated[&first]);
            assert_most_likely(&mut engine, vocab, &long, second);
        }
    }
}

/// Short prompts pass a long one between its chunks, and all get the correct tokens.
#[test]
#[ignore = "needs a GPU"]
fn short_prompts_pass_a_long_one() {
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    for (cache, mixes) in [KvCache::Bf16, KvCache::Packed].into_iter().flat_map(|cache| [(cache, true), (cache, false)])
    {
        let mut engine = load(&bundle, options().chunk(64).kv_cache(cache).mixed_passes(mixes).prefix_cache(false));
        let free = engine.free_pages();
        for round in 0..20 {
            // Eight chunks; a prompt passes after each of the first six.
            let lens = [450, 1 + round as usize, 33, 64, 20, 63, 5];
            let prompt = |(at, len): (u64, usize)| Request::new(tokens(len, vocab, 10 * round + at)).max_new_tokens(20);
            let requests: Vec<Request> = (0..).zip(lens).map(prompt).collect();
            let alone: Vec<u32> =
                requests.iter().map(|request| run(&mut engine, std::slice::from_ref(request))[0][0]).collect();
            let ids: Vec<SeqId> = requests.iter().map(|request| engine.add(request.clone()).unwrap()).collect();
            let (mut generated, mut started) = (BTreeMap::<SeqId, Vec<u32>>::new(), Vec::new());
            while !engine.is_idle() {
                for event in engine.step().unwrap() {
                    let tokens = generated.entry(event.seq).or_default();
                    tokens.push(event.token);
                    if tokens.len() == 1 {
                        started.push(event.seq);
                    }
                }
            }
            let order = [&ids[1..], &ids[..1]].concat();
            assert_eq!(started, order, "{cache:?}, round {round}: the long prompt is the last");
            for ((request, id), alone) in requests.iter().zip(&ids).zip(alone) {
                if !mixes {
                    assert_eq!(generated[id][0], alone, "{cache:?}, round {round}: the prompt has the same bits");
                }
                assert_most_likely(&mut engine, vocab, request, &generated[id]);
            }
            assert_eq!(engine.free_pages(), free, "{cache:?}: all pages are free again");
        }
    }
}

/// Sequences that share prefixes of their prompts get the same bits as without the prefix cache.
#[test]
#[ignore = "needs a GPU"]
fn shared_prefixes_give_the_same_bits() {
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    for cache in [KvCache::Bf16, KvCache::Packed] {
        let [mut without, mut with] =
            [false, true].map(|shares| load(&bundle, options().chunk(64).kv_cache(cache).prefix_cache(shares)));
        let free = with.free_pages();
        for round in 0..30 {
            // Prefixes of 64 to 384 tokens; their last page is never full.
            let prefix = tokens(64 * (1 + round as usize % 6) + 7, vocab, 100 + round % 3);
            let prompt = [prefix, tokens(1 + round as usize, vocab, round)].concat();
            let params = SampleParams::default().temperature(0.9).seed(round);
            let request = Request::new(prompt).max_new_tokens(70).params(params);
            let request = std::slice::from_ref(&request);
            let (expected, before) = (run(&mut without, request), with.shared_prompt_tokens());
            assert_eq!(run(&mut with, request), expected, "{cache:?}, round {round}");
            assert_eq!(run(&mut with, request), expected, "{cache:?}, round {round}, again");
            assert!(with.shared_prompt_tokens() > before, "{cache:?}, round {round}");
            assert_eq!(with.free_pages(), free);
        }
        assert_eq!(without.shared_prompt_tokens(), 0);
    }
}

/// A cache that holds the prompts of all sequences, but not their answers.
#[test]
#[ignore = "needs a GPU"]
fn sequences_without_pages_are_computed_again() {
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    for cache in [KvCache::Bf16, KvCache::Packed] {
        let options = options().kv_cache(cache);
        let whole = *load(&bundle, options.clone()).memory();
        let fixed = whole.total() - u64::from(whole.pages) * whole.token * 64;
        let mut engine = load(&bundle, options.memory(fixed + 9 * whole.token * 64));
        assert!((8..=10).contains(&engine.free_pages()), "{}", engine.memory());
        let free = engine.free_pages();
        let requests: Vec<Request> =
            (0..8).map(|index| Request::new(tokens(40, vocab, index)).max_new_tokens(200)).collect();
        let generated = run(&mut engine, &requests);
        assert!(engine.preempted() > 0, "{cache:?}: no sequence was preempted");
        assert_eq!(engine.free_pages(), free, "{cache:?}: all pages are free again");
        for (request, generated) in requests.iter().zip(&generated) {
            assert_most_likely(&mut engine, vocab, request, generated);
        }
    }
}

/// Finds races: the same sequences for thousands of steps, while others start and end.
#[test]
#[ignore = "needs a GPU"]
fn the_same_seeds_give_the_same_tokens_every_time() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    for placement in [Placement::Packed, Placement::Bf16] {
        // Prefix cache hits would change which sequences run together.
        let mut engine = load(&bundle, options().placement(placement).prefix_cache(false));
        let params = SampleParams::default().temperature(0.9).top_k(50).top_p(0.95).min_p(0.01);
        let requests = requests(8, MODELS[0].vocab, params, 9);
        let first = run(&mut engine, &requests);
        for round in 0..60 {
            assert_eq!(run(&mut engine, &requests), first, "{placement}, round {round}");
        }
        // 61 rounds of about 60 steps and 8 prompts.
        let text = tokens(200, MODELS[0].vocab, 3);
        let logits = engine.logits(&text).unwrap();
        for round in 0..1000 {
            assert_eq!(engine.logits(&text).unwrap(), logits, "{placement}, round {round}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn rejected_requests_do_not_stop_the_others() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    let mut engine = load(&bundle, options());
    let good = Request::new(tokens(20, MODELS[0].vocab, 1)).max_new_tokens(30);
    let alone = run(&mut engine, std::slice::from_ref(&good));
    let text = tokens(150, MODELS[0].vocab, 4);
    let expected = engine.logits(&text).unwrap();
    let id = engine.add(good.clone()).unwrap();
    let mut generated = Vec::new();
    for step in 0.. {
        let events = engine.step().unwrap();
        generated.extend(events.iter().filter(|event| event.seq == id).map(|event| event.token));
        if engine.is_idle() {
            break;
        }
        let refused = match step % 4 {
            0 => engine.add(Request::new(vec![MODELS[0].vocab as u32])),
            1 => engine.add(Request::new(vec![1; 600])),
            2 => engine.add(Request::new(Vec::new())),
            _ => engine.add(good.clone().params(SampleParams::default().top_p(0.0))),
        };
        assert!(refused.is_err());
        // Run next to other sequences: the same bits as alone, and no effect on others.
        if step % 3 == 0 {
            assert_eq!(engine.logits(&text).unwrap(), expected, "turn {step}");
        }
        let logits = engine.logits(&[MODELS[0].vocab as u32]);
        assert!(matches!(logits, Err(EngineError::AdmissionError(AdmissionError::UnknownToken { .. }))));
    }
    assert_eq!(generated, alone[0], "a sequence that runs alone has the same tokens in both runs");
    let too_little_memory = load_error(&bundle, options().memory(1 << 20));
    assert!(matches!(too_little_memory, EngineError::Memory(_)), "{too_little_memory}");
    let bad_chunk = load_error(&bundle, options().chunk(100));
    assert!(matches!(bad_chunk, EngineError::Option(_)), "{bad_chunk}");
}

fn load_error(bundle: &Bundle, options: EngineOptions) -> EngineError {
    match Engine::load(gpu(), bundle, options, &|_| {}) {
        Ok(_) => panic!("the engine loaded, but must not"),
        Err(error) => error,
    }
}

/// A cache that holds two sequences at a time.
#[test]
#[ignore = "needs a GPU"]
fn sequences_wait_for_pages() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    let whole = *load(&bundle, options()).memory();
    let page = whole.token * 64;
    let memory_of_nine_pages = whole.weights + whole.working + 9 * page;
    let mut engine = load(&bundle, options().memory(memory_of_nine_pages));
    assert!((8..=10).contains(&engine.free_pages()), "{}", engine.memory());
    let (free, mut max_running) = (engine.free_pages(), 0);
    let requests: Vec<Request> =
        (0..9).map(|index| Request::new(tokens(200, MODELS[0].vocab, index)).max_new_tokens(50)).collect();
    for request in &requests {
        engine.add(request.clone()).unwrap();
    }
    let mut count = 0;
    while !engine.is_idle() {
        count += engine.step().unwrap().len();
        max_running = max_running.max(engine.running());
    }
    assert_eq!((count, max_running, engine.free_pages()), (9 * 50, 2, free));
}

/// A model whose logits are all NaN: its sequences end with an error, and the engine continues to run.
#[test]
#[ignore = "needs a GPU"]
fn nan_logits_end_a_sequence_without_stopping_the_engine() {
    let home = tempfile::tempdir().unwrap();
    let source = home.path().join("model");
    demo_model::write(&source, &MODELS[0]).expect("a model");
    // An infinity in the norm before the head makes every logit NaN.
    let file = source.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = 8 + header + json["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    for element in 0..2 {
        bytes[at + 2 * element..at + 2 * element + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    }
    fs::write(&file, bytes).unwrap();
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    let mut engine = load(&bundle, options());
    for params in [SampleParams::default(), SampleParams::default().temperature(1.0).top_p(0.9)] {
        for _ in 0..2 {
            engine.add(Request::new(tokens(20, MODELS[0].vocab, 1)).max_new_tokens(30).params(params)).unwrap();
        }
        let mut ended = 0;
        while !engine.is_idle() {
            for event in engine.step().unwrap() {
                assert_eq!((event.token, event.finish), (NO_TOKEN, Some(Finish::NotANumber)));
                ended += 1;
            }
        }
        assert_eq!(ended, 2);
    }
    assert!(engine.logits(&[1, 2]).unwrap().iter().all(|logit| logit.is_nan()));
}

#[test]
#[ignore = "needs a GPU"]
fn cancelled_sequences_report_no_more_tokens() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    let mut engine = load(&bundle, options());
    let free = engine.free_pages();
    let kept = engine.add(Request::new(tokens(10, 1000, 1)).max_new_tokens(40)).unwrap();
    let cancelled = engine.add(Request::new(tokens(10, 1000, 2)).max_new_tokens(400)).unwrap();
    let mut count = 0;
    while !engine.is_idle() {
        let is_cancelled = count >= 10;
        for event in engine.step().unwrap() {
            assert!(event.seq == kept || !is_cancelled, "an event of a cancelled sequence");
            count += u32::from(event.seq == kept);
        }
        if count == 10 {
            engine.cancel(cancelled);
        }
    }
    assert_eq!((count, engine.free_pages()), (40, free));
}

/// A mixture of experts. If a router's logits are equal up to rounding, the engine may choose another expert than the
/// reference, so only most tokens must meet the bound. The engine's own bits are the same every time, and in every row
/// of a batch.
#[test]
#[ignore = "needs a GPU"]
fn a_mixture_follows_the_reference() {
    let model = DemoOptions { hidden: 256, intermediate: 192, experts: 8, ..MODELS[0] };
    let home = tempfile::tempdir().unwrap();
    for profile in [Profile::Packed, Profile::Distribution, Profile::Compact] {
        let bundle = bundle(home.path(), &model, profile);
        let config = ModelConfig::of_bundle(&bundle).unwrap();
        let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
        assert_eq!(config.mixture.map(|mixture| (mixture.experts, mixture.top_k)), Some((8, 2)));
        let reference = Reference::new(&config, &weights, reference::bundle_values(&bundle));
        for placement in [Placement::Packed, Placement::Bf16] {
            let mut engine = load(&bundle, options().placement(placement));
            let check_error = |got: &[bf16], expected: &[f32], what: &str| {
                let rows = got.chunks_exact(model.vocab).zip(expected.chunks_exact(model.vocab));
                let mut errors: Vec<f64> = rows.map(|(got, expected)| error(got, expected)).collect();
                errors.sort_by(f64::total_cmp);
                let median = errors[errors.len() / 2];
                println!(
                    "{profile:?} {placement}, {what}: median {median:.4}, maximum {:.4}",
                    errors[errors.len() - 1]
                );
                assert!(median < BOUND, "{profile:?} {placement}, {what}: {median}");
            };
            for count in [1, 2, 65, 300] {
                let text = tokens(count, model.vocab, count as u64);
                let expected = reference.logits(&text).unwrap();
                let whole = engine.logits(&text).unwrap();
                check_error(&whole, &expected, &format!("{count} tokens"));
                assert_eq!(engine.logits(&text).unwrap(), whole, "other bits");
                if count > 100 {
                    continue;
                }
                let alone = engine.logits_by_steps(&[&text]).unwrap();
                check_error(&alone[0], &expected, &format!("{count} tokens by steps"));
                let others = [tokens(9, model.vocab, 1), tokens(70, model.vocab, 2), tokens(1, model.vocab, 3)];
                let batch = engine.logits_by_steps(&[&others[0], &text, &others[1], &others[2]]).unwrap();
                let again = engine.logits_by_steps(&[&others[2], &others[1], &text, &others[0]]).unwrap();
                assert_eq!(again[2], batch[1], "another row of the batch gave other bits");
            }
        }
    }
}

/// Sets every 50th weight of a model's experts to zero, which is too many for the packed encoding.
fn zero_experts(model: &Path) {
    for file in fs::read_dir(model).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let mut bytes = fs::read(&file).unwrap();
        let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..header_end]).unwrap();
        for (_, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| name.contains(".experts.")) {
            let offset = |at: usize| header_end + tensor["data_offsets"][at].as_u64().unwrap() as usize;
            bytes[offset(0)..offset(1)].chunks_exact_mut(2).step_by(50).for_each(|weight| weight.fill(0));
        }
        fs::write(&file, bytes).unwrap();
    }
}

/// Experts that cannot be packed run as BF16, on the device or fetched, and the engine says which and why.
#[test]
#[ignore = "needs a GPU"]
fn experts_that_cannot_be_packed_follow_the_reference() {
    let model = DemoOptions { hidden: 256, intermediate: 192, experts: 8, ..MODELS[0] };
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &model).unwrap();
    zero_experts(&home.path().join("model"));
    for profile in [Profile::Packed, Profile::Distribution, Profile::Compact] {
        let bundle = bundle(home.path(), &model, profile);
        let config = ModelConfig::of_bundle(&bundle).unwrap();
        let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
        let reference = Reference::new(&config, &weights, reference::bundle_values(&bundle));
        let mut engine = load(&bundle, options());
        let experts = engine.bf16_experts().expect("the experts cannot be packed");
        assert_eq!(experts.0, (0..model.layers as u32).collect::<Vec<_>>());
        assert!(matches!(experts.1, Unpackable::Escapes { .. }), "{}", experts.1);
        assert_eq!(load(&bundle, options().placement(Placement::Bf16)).bf16_experts(), None, "BF16 was requested");
        let mut fetching = load(&bundle, options().resident_experts(3));
        assert_eq!(fetching.bf16_experts(), Some(experts));
        fetching.poison_experts(0xa5).unwrap();
        for count in [1, 65, 300] {
            let text = tokens(count, model.vocab, count as u64);
            let (expected, whole) = (reference.logits(&text).unwrap(), engine.logits(&text).unwrap());
            let rows = whole.chunks_exact(model.vocab).zip(expected.chunks_exact(model.vocab));
            let mut errors: Vec<f64> = rows.map(|(got, expected)| error(got, expected)).collect();
            errors.sort_by(f64::total_cmp);
            let median = errors[errors.len() / 2];
            assert!(median < BOUND, "{profile:?}, {count} tokens: {median}");
            assert!(
                fetching.logits(&text).unwrap() == whole,
                "{profile:?}, {count} tokens: fetched experts, other bits"
            );
            let by_steps = engine.logits_by_steps(&[&text[..count.min(65)]]).unwrap();
            for again in 0..20 {
                let same = engine.logits_by_steps(&[&text[..count.min(65)]]).unwrap() == by_steps;
                assert!(same, "{profile:?}, {count} tokens, time {again}: other bits");
            }
        }
        let traffic = fetching.expert_traffic().unwrap().expect("experts were fetched");
        assert_eq!(traffic.bytes, (traffic.misses + traffic.prefetched) * config.expert_bytes(Placement::Bf16));
    }
}

/// Returns the tokens of several requests that join one after the other, and the logits of a text by every execution
/// path.
fn generate_all(engine: &mut Engine, vocab: usize) -> (BTreeMap<SeqId, Vec<u32>>, Vec<Vec<bf16>>) {
    let mut generated = BTreeMap::new();
    for (index, (prompt, more)) in [(1, 200), (70, 90), (200, 40), (3, 200), (9, 10), (64, 60)].into_iter().enumerate()
    {
        let params = SampleParams::default().temperature(0.7).seed(index as u64);
        let request = Request::new(tokens(prompt, vocab, index as u64)).max_new_tokens(more).params(params);
        engine.add(request).unwrap();
        for _ in 0..5 {
            for Event { seq, token, .. } in engine.step().unwrap() {
                generated.entry(seq).or_insert_with(Vec::new).push(token);
            }
        }
    }
    while !engine.is_idle() {
        for Event { seq, token, .. } in engine.step().unwrap() {
            generated.entry(seq).or_insert_with(Vec::new).push(token);
        }
    }
    let texts: Vec<Vec<u32>> = (0..8).map(|row| tokens(4 + 5 * row, vocab, 90 + row as u64)).collect();
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    // A prompt of several chunks, with more experts than slots; one row, and eight.
    let mut logits = vec![engine.logits(&tokens(300, vocab, 5)).unwrap()];
    logits.extend(engine.logits_by_steps(&texts[3..4]).unwrap());
    logits.extend(engine.logits_by_steps(&texts).unwrap());
    (generated, logits)
}

type MakeEngine<'a> = &'a dyn Fn(EngineOptions) -> Engine;

/// Experts that are fetched on demand: tokens and logits equal those of the engine with all experts on the device, bit
/// for bit, for any number of slots.
#[test]
#[ignore = "needs a GPU"]
fn offloaded_experts_give_the_same_tokens() {
    let home = tempfile::tempdir().unwrap();
    let mixtral = DemoOptions { hidden: 256, intermediate: 192, experts: 8, ..MODELS[0] };
    let bundle = bundle(home.path(), &mixtral, Profile::Packed);
    let qwen3 = r#"{"model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 4096, "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 128,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1000000.0}"#;
    let qwen3 = ModelConfig::parse(qwen3, None).unwrap();
    let of_bundle = |options: EngineOptions| load(&bundle, options);
    let of_config =
        |options: EngineOptions| Engine::random(gpu(), qwen3.clone(), None, options, &|_| {}).expect("an engine");
    let models: [(&str, u32, MakeEngine<'_>); 2] = [("mixtral", 8, &of_bundle), ("qwen3-moe", 32, &of_config)];
    for (name, experts, make) in models {
        let mut whole = make(options());
        assert_eq!((whole.expert_traffic().unwrap(), whole.memory().host), (None, 0));
        let expected = generate_all(&mut whole, 1024);
        assert!(
            expected.0.len() == 6 && expected.0.values().map(Vec::len).sum::<usize>() == 600,
            "{name}: ended early"
        );
        assert!(expected.1.iter().flatten().all(|logit| logit.is_finite()), "{name}");
        for resident in [1, 2, 3, experts / 2, experts - 1] {
            let mut engine = make(options().resident_experts(resident));
            assert!(!engine.options().graphs && engine.memory().host > 0, "{name}: {}", engine.memory());
            assert!(engine.memory().weights < whole.memory().weights, "{name}: {}", engine.memory());
            engine.poison_experts(0xa5).unwrap();
            let generated = generate_all(&mut engine, 1024);
            assert!(generated.0 == expected.0, "{name}, {resident} of {experts} experts: other tokens");
            assert!(generated.1 == expected.1, "{name}, {resident} of {experts} experts: other logits");
            let traffic = engine.expert_traffic().unwrap().expect("experts were fetched");
            println!("{name}, {resident} of {experts}: {traffic}");
            let copied = traffic.misses + traffic.prefetched;
            // Of the bundle's matrices, one is not smaller as compact. Experts have about the same size.
            let (host, compact) = (engine.memory().host, engine.memory().host_compact);
            assert!(compact > host / 2 && compact <= host, "{name}: {}", engine.memory());
            let is_all = compact == host && engine.packed_in_host_memory().is_none();
            assert!(name == "mixtral" || is_all, "{name}: {}", engine.memory());
            let each = host / u64::from(experts * engine.config().layers);
            let parts = if is_all { 20 } else { 10 };
            let about = copied * each / parts * (parts - 1)..copied * each / parts * (parts + 1);
            assert!(about.contains(&traffic.bytes), "{each}: {traffic}");
            assert!(each < engine.config().expert_bytes(Placement::Packed), "{name}: {each}");
            assert!(traffic.misses > 0 && traffic.hits > 0 && traffic.stalls > 0, "{traffic}");
            assert!(traffic.prefetched > 0 && traffic.prefetch_hits <= traffic.prefetched, "{traffic}");
            assert_eq!(engine.last_expert_traffic(), Some(traffic));
            // Repeat with all slots overwritten.
            engine.poison_experts(0x5a).unwrap();
            assert!(
                generate_all(&mut engine, 1024).1 == expected.1,
                "{name}, {resident}: other logits the second time"
            );
        }
        // Experts that stay packed in host memory.
        let mut packed_options = options().resident_experts(3);
        packed_options.compact_experts = false;
        let mut engine = make(packed_options);
        assert_eq!((engine.memory().host_compact, engine.packed_in_host_memory()), (0, None));
        assert!(generate_all(&mut engine, 1024) == expected, "{name}: packed experts, other tokens or logits");
        let traffic = engine.expert_traffic().unwrap().expect("experts were fetched");
        let copied = traffic.misses + traffic.prefetched;
        assert_eq!(traffic.bytes, copied * engine.config().expert_bytes(Placement::Packed));
        // With slots for all experts, nothing is fetched.
        let mut all = make(options().resident_experts(experts));
        assert_eq!((all.expert_traffic().unwrap(), all.memory().weights), (None, whole.memory().weights));
    }
    let other = tempfile::tempdir().unwrap();
    let dense = self::bundle(other.path(), &MODELS[0], Profile::Packed);
    let refused = Engine::load(gpu(), &dense, options().resident_experts(2), &|_| {});
    assert!(matches!(refused, Err(EngineError::NoExperts(2))), "{refused:?}");
}
