//! Speculative decoding, by n-gram lookup and by a draft model: the bits of steps without drafts, and correct results
//! when pages are few or sequences end.
//!
//! Steps of other sizes differ by rounding. Where bits are compared, a sequence without drafts therefore runs along,
//! and all steps have 2 to 8 rows, so that they run as steps of 8 rows with and without drafts.

use std::{collections::BTreeMap, fs, ops::RangeInclusive, path::Path, sync::Arc};

use unweight::engine::{
    Adjustments, Engine, EngineOptions, Event, KvCache, Logprobs, Placement, Request, SampleParams, SeqId,
};
use unweight_format::{
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    testing::demo_model::DemoOptions,
};

use crate::{
    adjusted::Rule,
    engine::{MODELS, assert_most_likely, bundle, load, options, requests, run, tokens},
    families,
    harness::{Random, gpu},
};

type Told = Vec<(u32, Option<Box<Logprobs>>)>;

/// Runs all requests to their ends while another sequence runs along.
fn run_beside(engine: &mut Engine, requests: &[Request]) -> Vec<Told> {
    let others = Request::new(vec![1]).max_new_tokens(engine.memory().context - 1);
    let other = engine.add(others.adjustments(Adjustments::default().bias(vec![(0, -1.0)]))).unwrap();
    while engine.running() == 0 {
        engine.step().unwrap();
    }
    let (mut told, mut left) = (BTreeMap::<SeqId, Told>::new(), requests.len());
    let mut step = |engine: &mut Engine, told: &mut BTreeMap<SeqId, Told>| {
        for Event { seq, token, finish, logprobs } in engine.step().unwrap() {
            if seq == other {
                assert!(finish.is_none(), "the other sequence must run along, but ends: {finish:?}");
                continue;
            }
            told.entry(seq).or_default().push((token, logprobs));
            left -= usize::from(finish.is_some());
        }
        left
    };
    // The number of waiting prompts affects how a prompt is split, so no other prompt waits.
    let begin = |request: &Request| {
        let id = engine.add(request.clone()).unwrap();
        while !told.contains_key(&id) {
            step(engine, &mut told);
        }
        id
    };
    let ids: Vec<SeqId> = requests.iter().map(begin).collect();
    while step(engine, &mut told) > 0 {}
    assert!(engine.cancel(other));
    while !engine.is_idle() {
        engine.step().unwrap();
    }
    ids.iter().map(|id| told.remove(id).unwrap_or_default()).collect()
}

/// Returns prompts that repeat a few tokens.
fn repeating(count: u64, vocab: usize, new: u32, params: SampleParams) -> Vec<Request> {
    let mut random = Random::new(count);
    let one = |index: u64| {
        let pattern = tokens(2 + random.below(12) as usize, vocab, 500 + index);
        let prompt = pattern.iter().cycle().take(10 + random.below(120) as usize).copied().collect();
        let logprobs = index.is_multiple_of(2).then_some(2);
        Request::new(prompt).max_new_tokens(new).params(params.seed(index)).logprobs(logprobs)
    };
    (0..count).map(one).collect()
}

/// Returns engines without drafts and with up to `speculate` drafted tokens.
fn engines(bundle: &Bundle, options: &EngineOptions, speculate: u32) -> [Engine; 2] {
    [0, speculate].map(|speculate| load(bundle, options.clone().speculate(speculate)))
}

#[test]
#[ignore = "needs a GPU"]
fn drafts_change_no_bit() {
    let large_heads = DemoOptions { hidden: 512, intermediate: 512, heads: 4, kv_heads: 1, ..MODELS[0] };
    let mut accepted = 0;
    for (model, profile, placement) in [
        (&MODELS[0], Profile::Packed, Placement::Packed),
        (&MODELS[0], Profile::Packed, Placement::Bf16),
        (&MODELS[0], Profile::Compact, Placement::Compact),
        (&MODELS[0], Profile::Distribution, Placement::Stored),
        (&MODELS[1], Profile::Packed, Placement::Packed),
        (&large_heads, Profile::Packed, Placement::Packed),
    ] {
        let home = tempfile::tempdir().unwrap();
        let bundle = bundle(home.path(), model, profile);
        for (cache, graphs) in [(KvCache::Bf16, true), (KvCache::Packed, true), (KvCache::Bf16, false)] {
            // In a pass with a step, the number of its rows affects the rounding of a prompt.
            let options =
                options().context(2048).placement(placement).kv_cache(cache).graphs(graphs).mixed_passes(false);
            for (max_batch, speculate) in [(2, 3), (4, 1)] {
                // Prefixes that stay in the cache would hold units.
                let options = options.clone().max_batch(max_batch).prefix_cache(cache == KvCache::Bf16);
                let [mut plain, mut drafting] = engines(&bundle, &options, speculate);
                let free = (drafting.free_pages(), drafting.free_units().unwrap());
                for params in [SampleParams::default(), SampleParams::default().temperature(0.3).top_k(40)] {
                    let requests = repeating(6, model.vocab, 150, params);
                    let expected = run_beside(&mut plain, &requests);
                    let what = format!("{profile:?} {placement} {cache:?} graphs {graphs}, up to {speculate} drafted");
                    assert!(run_beside(&mut drafting, &requests) == expected, "{what}: {params:?}");
                }
                assert_eq!((drafting.free_pages(), drafting.free_units().unwrap()), free);
                let counts = drafting.draft_counts();
                println!("{placement} {cache:?}: {} of {} accepted", counts.accepted, counts.drafted);
                assert!(counts.drafted > 0 && plain.draft_counts().drafted == 0);
                accepted += counts.accepted;
            }
        }
    }
    assert!(accepted > 100, "{accepted}: too few to show anything");
}

#[test]
#[ignore = "needs a GPU"]
fn drafts_change_no_bit_of_any_family() {
    let fixtures = Path::new(families::FIXTURES);
    let home = tempfile::tempdir().unwrap();
    let mut accepted = 0;
    for (model, context, _) in families::MODELS {
        let source = home.path().join(model);
        fs::create_dir(&source).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(fixtures.join(model).join(file), source.join(file)).unwrap();
        }
        let target = home.path().join(format!("{model}-packed"));
        bundle::compress(&source, &target, &CompressOptions::default(), &Silent).unwrap();
        let bundle = Bundle::open(&target).unwrap();
        // Two sequences, with space for both to grow.
        let options = EngineOptions::default().max_batch(4).context(context).memory(1 << 30);
        let head_dim = load(&bundle, options.clone()).config().head_dim;
        let caches = if head_dim <= 128 { &[KvCache::Bf16, KvCache::Packed][..] } else { &[KvCache::Bf16] };
        for &cache in caches {
            let [mut plain, mut drafting] = engines(&bundle, &options.clone().kv_cache(cache), 3);
            let vocab = plain.config().vocab as usize;
            let new = context.min(200) / 2;
            for request in repeating(4, vocab, new, SampleParams::default()) {
                let mut request = [request];
                request[0].prompt.truncate(context as usize / 3);
                let expected = run_beside(&mut plain, &request);
                assert!(run_beside(&mut drafting, &request) == expected, "{model}, {cache:?}");
            }
            accepted += drafting.draft_counts().accepted;
        }
    }
    assert!(accepted > 0, "no draft was right");
}

/// A step that verifies drafts of some sequences, and has constrained ones, computes the bits of a step without drafts.
#[test]
#[ignore = "needs a GPU"]
fn drafts_and_constraints_share_steps() {
    const NEW: u32 = 150;
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    for (cache, graphs) in [(KvCache::Bf16, true), (KvCache::Packed, true), (KvCache::Bf16, false)] {
        // As above.
        let options = options().context(2048).max_batch(4).kv_cache(cache).graphs(graphs).mixed_passes(false);
        let [mut plain, mut drafting] = engines(&bundle, &options, 1);
        for round in 0..6 {
            let mut requests = repeating(6, vocab, NEW, SampleParams::default()).split_off(3 * (round % 2));
            requests.truncate(3);
            let (constrained, before) = (round % 3, round as u32);
            let request = &mut requests[constrained];
            *request = request.clone().constraint(Some(Arc::new(Rule { before, left: NEW })));
            let answers = run_beside(&mut drafting, &requests);
            assert!(answers == run_beside(&mut plain, &requests), "{cache:?}, graphs {graphs}, round {round}");
            let mut before = before;
            assert_eq!(answers[constrained].len(), NEW as usize);
            for (token, _) in &answers[constrained] {
                assert!(Rule::allows(std::mem::replace(&mut before, *token), *token), "{cache:?}, round {round}");
            }
        }
        let counts = drafting.draft_counts();
        assert!(counts.accepted > 0, "{cache:?}: {counts:?}");
    }
}

/// Up to 64 rows of up to 8 sequences use other kernels, so tokens are checked against logits of prompts.
#[test]
#[ignore = "needs a GPU"]
fn drafts_of_large_batches_are_most_likely() {
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    for cache in [KvCache::Bf16, KvCache::Packed] {
        for (max_batch, speculate) in [(1, 15), (3, 7), (8, 7), (40, 2)] {
            let options = options().max_batch(max_batch).kv_cache(cache).prefix_cache(false);
            let mut engine = load(&bundle, options.speculate(speculate));
            let (free, units) = (engine.free_pages(), engine.free_units().unwrap());
            let requests = repeating(u64::from(max_batch) + 4, vocab, 200, SampleParams::default());
            let told = run(&mut engine, &requests);
            for (request, told) in requests.iter().zip(&told) {
                assert_most_likely(&mut engine, vocab, request, told);
            }
            assert_eq!(run(&mut engine, &requests), told, "{cache:?}, {max_batch}: again");
            assert_eq!((engine.free_pages(), engine.free_units().unwrap()), (free, units));
            assert!(engine.draft_counts().drafted > 0);
        }
    }
}

/// At this temperature, tokens depend only on seed and position, and the prompt contains most of them. Nearly all
/// drafts are accepted, and no token changes.
#[test]
#[ignore = "needs a GPU"]
fn sampled_drafts_are_accepted() {
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    let params = SampleParams::default().temperature(100.0).seed(9);
    let request = |prompt: Vec<u32>| [Request::new(prompt).max_new_tokens(240).params(params)];
    for cache in [KvCache::Bf16, KvCache::Packed] {
        let options = options().kv_cache(cache).max_batch(1);
        let expected = run(&mut load(&bundle, options.clone()), &request(tokens(240, vocab, 4))).remove(0);
        let mut prompt = expected.clone();
        prompt.iter_mut().step_by(20).for_each(|token| *token = 3);
        for speculate in [1, 4, 7, 15] {
            let mut engine = load(&bundle, options.clone().speculate(speculate));
            let told = run(&mut engine, &request(prompt.clone())).remove(0);
            // A token may differ if the noise is equal up to rounding.
            let others = told.iter().zip(&expected).filter(|(told, expected)| told != expected).count();
            assert!(told.len() == 240 && others <= 2, "{cache:?}, {speculate}: {others} other tokens");
            let counts = engine.draft_counts();
            println!("{cache:?}, up to {speculate}: {} of {} accepted", counts.accepted, counts.drafted);
            assert!(counts.accepted > 80 && counts.accepted < 240);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn drafting_sequences_are_preempted_shared_and_cancelled() {
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    for cache in [KvCache::Bf16, KvCache::Packed] {
        let options = options().chunk(64).kv_cache(cache).speculate(4);
        let whole = *load(&bundle, options.clone()).memory();
        let fixed = whole.total() - u64::from(whole.pages) * whole.token * 64;
        let mut engine = load(&bundle, options.memory(fixed + 14 * whole.token * 64));
        let free = engine.free_pages();
        // Pairs with the same prefix.
        let mut requests = repeating(8, vocab, 200, SampleParams::default());
        for (index, request) in requests.iter_mut().enumerate() {
            request.prompt = [tokens(70, vocab, index as u64 / 2), std::mem::take(&mut request.prompt)].concat();
        }
        let told = run(&mut engine, &requests);
        assert!(engine.preempted() > 0 && engine.shared_prompt_tokens() > 0, "{cache:?}");
        for (request, told) in requests.iter().zip(&told) {
            assert_most_likely(&mut engine, vocab, request, told);
        }
        let mut random = Random::new(3);
        for round in 0..30 {
            let ids: Vec<SeqId> = requests.iter().map(|request| engine.add(request.clone()).unwrap()).collect();
            let (mut seen, mut gone) = (0, Vec::new());
            while !engine.is_idle() {
                for event in engine.step().unwrap() {
                    assert!(!gone.contains(&event.seq), "{cache:?}, round {round}: a token of a cancelled sequence");
                    seen += 1;
                }
                let id = ids[random.below(8) as usize];
                if seen > 10 && random.below(6) == 0 && engine.cancel(id) {
                    gone.push(id);
                }
            }
            assert_eq!(engine.free_pages(), free);
        }
        assert!(engine.draft_counts().accepted > 0);
    }
}

/// Returns an engine with a draft model that is as fast as one of a fiftieth of the target's size.
fn load_with_draft(bundle: &Bundle, draft: &Bundle, options: EngineOptions) -> Engine {
    let mut engine = Engine::load_with_draft(gpu(), bundle, draft, options, &|_| {}).expect("an engine");
    engine.assume_draft_time(0.02);
    engine
}

/// Returns bundles of a model and of a smaller one with the same vocabulary.
fn target_and_draft(home: &Path) -> [Bundle; 2] {
    let small = DemoOptions { layers: 1, hidden: 256, intermediate: 384, heads: 4, kv_heads: 2, seed: 99, ..MODELS[0] };
    [&MODELS[0], &small].map(|model| {
        let home = home.join(model.seed.to_string());
        fs::create_dir_all(&home).unwrap();
        bundle(&home, model, Profile::Packed)
    })
}

/// Returns options with as little memory as leaves the target a KV cache of `pages` pages.
fn with_pages(target: &Bundle, draft: &Bundle, options: EngineOptions, pages: RangeInclusive<u32>) -> EngineOptions {
    let (mut too_small, mut too_large) = (0, 4u64 << 30);
    loop {
        assert!(too_large - too_small > 1, "no memory leaves {pages:?} pages");
        let memory = too_small + (too_large - too_small) / 2;
        let small = options.clone().memory(memory);
        match Engine::load_with_draft(gpu(), target, draft, small.clone().graphs(false), &|_| {}) {
            Ok(engine) if pages.contains(&engine.memory().pages) => return small,
            Ok(engine) if engine.memory().pages > *pages.end() => too_large = memory,
            _ => too_small = memory,
        }
    }
}

/// A draft model changes no bit, whether it is right or not. A model that drafts for itself is right but for rounding:
/// its own steps have one row.
#[test]
#[ignore = "needs a GPU"]
fn draft_models_change_no_bit() {
    let home = tempfile::tempdir().unwrap();
    let [target, small] = target_and_draft(home.path());
    for (cache, graphs) in [(KvCache::Bf16, true), (KvCache::Packed, true), (KvCache::Bf16, false)] {
        for (max_batch, speculate) in [(2, 3), (4, 1)] {
            // As above.
            let options =
                options().context(1024).max_batch(max_batch).kv_cache(cache).graphs(graphs).mixed_passes(false);
            let mut plain = load(&target, options.clone());
            let drafting = options.clone().speculate(speculate);
            let mut engines = [&target, &small].map(|draft| load_with_draft(&target, draft, drafting.clone()));
            for params in [SampleParams::default(), SampleParams::default().temperature(0.7).top_k(40)] {
                let requests = requests(6, MODELS[0].vocab, params, 31);
                let expected = run_beside(&mut plain, &requests);
                for engine in &mut engines {
                    let memory = *engine.memory();
                    assert!(memory.draft > 0 && memory.total() <= 4 << 30, "{memory}");
                    let what = format!("{cache:?}, graphs {graphs}, {max_batch}, {speculate}, {params:?}");
                    assert!(run_beside(engine, &requests) == expected, "{what}");
                    assert_eq!(engine.free_pages(), memory.pages, "{what}");
                }
            }
            let [same, other] = engines.map(|engine| engine.draft_counts());
            println!("{cache:?}, graphs {graphs}, up to {speculate}: itself {same:?}, another {other:?}");
            assert!(same.drafted > 100 && same.accepted * 10 >= same.drafted * 9, "{same:?}");
            assert!(other.drafted > 0 && other.accepted < other.drafted, "{other:?}");
        }
    }
}

/// In batches of 1 and 4, tokens are the most likely ones, whatever drafts; a model that drafts for itself is right.
/// Sequences that are cancelled or preempted affect no other.
#[test]
#[ignore = "needs a GPU"]
fn draft_models_follow_sequences_that_come_and_go() {
    let home = tempfile::tempdir().unwrap();
    let [target, small] = target_and_draft(home.path());
    let vocab = MODELS[0].vocab;
    for (draft, is_same) in [(&target, true), (&small, false)] {
        for max_batch in [1, 4] {
            let whole = options().max_batch(max_batch).chunk(64).speculate(4);
            let mut engine = load_with_draft(&target, draft, whole.clone());
            // Sequences of several pages, so that a small cache has too few.
            let all = requests(10, vocab, SampleParams::default(), 5).into_iter();
            let all: Vec<Request> = all.map(|request| request.max_new_tokens(180)).collect();
            let told = run(&mut engine, &all);
            for (request, told) in all.iter().zip(&told) {
                assert_most_likely(&mut engine, vocab, request, told);
            }
            let counts = engine.draft_counts();
            println!("batch {max_batch}, itself {is_same}: {counts:?}");
            assert!(counts.drafted > 20, "{counts:?}");
            assert!(!is_same || counts.accepted * 10 >= counts.drafted * 9, "{counts:?}");
            // Fewer pages than the sequences need.
            let mut engine = load_with_draft(&target, draft, with_pages(&target, draft, whole, 8..=12));
            let (free, mut random) = (engine.free_pages(), Random::new(max_batch.into()));
            for _ in 0..10 {
                let ids: Vec<SeqId> = all.iter().map(|request| engine.add(request.clone()).unwrap()).collect();
                let mut told = BTreeMap::<SeqId, Vec<u32>>::new();
                let mut gone = Vec::new();
                while !engine.is_idle() {
                    for event in engine.step().unwrap() {
                        assert!(!gone.contains(&event.seq), "a token of a cancelled sequence");
                        told.entry(event.seq).or_default().push(event.token);
                    }
                    let id = ids[random.below(10) as usize];
                    if random.below(40) == 0 && engine.cancel(id) {
                        gone.push(id);
                    }
                }
                assert_eq!(engine.free_pages(), free);
                for (id, request) in ids.iter().zip(&all).filter(|(id, _)| !gone.contains(id)) {
                    assert_most_likely(&mut engine, vocab, request, &told[id]);
                }
            }
            assert!(max_batch == 1 || engine.preempted() > 0);
        }
    }
}

/// Beyond the context of the draft model, and with a KV cache that holds little, sequences continue without drafts.
#[test]
#[ignore = "needs a GPU"]
fn drafts_end_with_the_memory_of_the_draft_model() {
    let home = tempfile::tempdir().unwrap();
    let [target, _] = target_and_draft(home.path());
    let source = home.path().join(MODELS[0].seed.to_string()).join("model");
    let mut config = fs::read_to_string(source.join("config.json")).unwrap();
    let positions = config.find("max_position_embeddings").expect("a limit");
    let end = positions + config[positions..].find([',', '}']).expect("an end");
    config.replace_range(positions..end, "max_position_embeddings\": 100");
    fs::write(source.join("config.json"), config).unwrap();
    let short = home.path().join("short");
    bundle::compress(&source, &short, &CompressOptions::default(), &Silent).unwrap();
    let short = Bundle::open(&short).unwrap();
    let request = [Request::new(tokens(20, MODELS[0].vocab, 3)).max_new_tokens(400)];
    let mut engine = load_with_draft(&target, &short, options().max_batch(1).speculate(4));
    let told = run(&mut engine, &request).remove(0);
    assert_most_likely(&mut engine, MODELS[0].vocab, &request[0], &told);
    let counts = engine.draft_counts();
    assert!((40..=120).contains(&counts.drafted), "{counts:?}");
    let other = DemoOptions { vocab: 600, seed: 98, ..MODELS[0] };
    let home = home.path().join("other");
    fs::create_dir_all(&home).unwrap();
    let other = bundle(&home, &other, Profile::Packed);
    let refused = Engine::load_with_draft(gpu(), &target, &other, options().speculate(4), &|_| {});
    assert_eq!(refused.err().map(|error| error.code()), Some("draft-vocabulary-differs"));
    let refused = Engine::load_with_draft(gpu(), &target, &target, options().speculate(4).memory(1 << 20), &|_| {});
    let refused = refused.err().map(|error| (error.code(), error.to_string()));
    assert!(refused.is_some_and(|(code, text)| code == "engine-memory-insufficient" && text.contains("draft model")));
}
