//! A packed KV cache in the engine: the bits of a BF16 cache, and correct results when pages cannot be packed.

use std::{fs, path::Path};

use unweight::engine::{
    Engine, EngineOptions, Finish, KvCache, NO_TOKEN, Placement, Request, SampleParams,
    raw::memory::{self, Shared},
};
use unweight_format::{
    bundle::{Bundle, Profile},
    testing::demo_model::{self, DemoOptions},
};
use unweight_model::ModelConfig;

use crate::{
    engine::{MODELS, assert_most_likely, bundle, load, options, requests, run, tokens},
    harness::{Random, WHOLE_TILES},
};

/// Heads of 128, as in most models.
const LARGE_HEADS: DemoOptions =
    DemoOptions { layers: 2, hidden: 512, intermediate: 512, heads: 4, kv_heads: 1, seed: 8, ..WHOLE_TILES };

fn load_with_cache(bundle: &Bundle, cache: KvCache, options: EngineOptions) -> Engine {
    let engine = load(bundle, options.kv_cache(cache));
    assert_eq!(engine.memory().kv_cache, cache);
    engine
}

/// Compares logits of prompts by chunks and by steps, and sampled tokens of batches, between both caches.
fn check_same_bits(bundle: &Bundle, vocab: usize, options: &EngineOptions) {
    let [mut bf16, mut packed] =
        [KvCache::Bf16, KvCache::Packed].map(|cache| load_with_cache(bundle, cache, options.clone()));
    for count in [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300, 450] {
        let text = tokens(count, vocab, count as u64);
        let whole = bf16.logits(&text).unwrap();
        assert_eq!(packed.logits(&text).unwrap(), whole, "{count} tokens by chunks");
    }
    let texts = [200, 1, 64, 65, 130].map(|count| tokens(count, vocab, 70 + count as u64));
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    assert_eq!(packed.logits_by_steps(&texts).unwrap(), bf16.logits_by_steps(&texts).unwrap(), "by steps");
    let params = SampleParams::default().temperature(0.9).top_k(50).top_p(0.95);
    for seed in 0..3 {
        let requests = requests(20, vocab, params, 30 + seed);
        let free = (packed.free_pages(), packed.free_units().unwrap());
        assert_eq!(run(&mut packed, &requests), run(&mut bf16, &requests), "sampled, seed {seed}");
        assert_eq!((packed.free_pages(), packed.free_units().unwrap()), free, "pages and units come back");
    }
    assert_eq!(packed.preempted(), 0);
}

#[test]
#[ignore = "needs a GPU"]
fn packed_cache_gives_the_bits_of_a_bf16_cache() {
    for model in MODELS.iter().chain([&LARGE_HEADS]) {
        let home = tempfile::tempdir().unwrap();
        let bundle = bundle(home.path(), model, Profile::Packed);
        for placement in [Placement::Packed, Placement::Bf16] {
            for (max_batch, graphs) in [(8, true), (8, false), (64, true)] {
                let options = options().placement(placement).max_batch(max_batch).graphs(graphs);
                check_same_bits(&bundle, model.vocab, &options);
            }
        }
    }
}

/// Contexts up to 8,192 tokens in chunks of several sizes, and 256 sequences at a time.
#[test]
#[ignore = "needs a GPU"]
fn long_contexts_and_large_batches_give_the_same_bits() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &LARGE_HEADS, Profile::Packed);
    let vocab = LARGE_HEADS.vocab;
    let both = |options: EngineOptions| {
        [KvCache::Bf16, KvCache::Packed].map(|cache| load_with_cache(&bundle, cache, options.clone()))
    };
    for chunk in [64, 1024, 4096] {
        let [mut one, mut other] = both(options().context(8192).chunk(chunk));
        for count in [1023, 1025, 4097, 8192] {
            let text = tokens(count, vocab, count as u64);
            assert_eq!(one.logits(&text).unwrap(), other.logits(&text).unwrap(), "{count} tokens, chunks of {chunk}");
        }
    }
    let [mut one, mut other] = both(options().max_batch(256).context(1024).chunk(1024).memory(8 << 30));
    let params = SampleParams::default().temperature(0.9);
    let mut random = Random::new(17);
    let requests: Vec<_> = (0..320)
        .map(|index| {
            let prompt = tokens(1 + random.below(700) as usize, vocab, index);
            Request::new(prompt).max_new_tokens(1 + random.below(300) as u32).params(params.seed(index))
        })
        .collect();
    assert_eq!(run(&mut one, &requests), run(&mut other, &requests), "256 sequences");
}

/// Makes a model whose tokens attend to at most `window` tokens.
fn model_with_window(home: &Path, model: &DemoOptions, window: u32) -> Bundle {
    let folder = home.join("model");
    demo_model::write(&folder, model).expect("a model");
    let path = folder.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["model_type"] = "mistral".into();
    config["architectures"] = serde_json::json!(["MistralForCausalLM"]);
    config["sliding_window"] = window.into();
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    bundle(home, model, Profile::Packed)
}

#[test]
#[ignore = "needs a GPU"]
fn windows_begin_inside_packed_pages() {
    for window in [1, 40, 64, 100, 129] {
        let home = tempfile::tempdir().unwrap();
        let bundle = model_with_window(home.path(), &LARGE_HEADS, window);
        check_same_bits(&bundle, LARGE_HEADS.vocab, &options());
    }
}

/// Makes a model with such a large channel of values that no page of values can be packed.
fn model_with_unpackable_pages(home: &Path, model: &DemoOptions) -> Bundle {
    let folder = home.join("model");
    demo_model::write(&folder, model).expect("a model");
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    for (name, tensor) in header.as_object().unwrap() {
        if !name.ends_with("v_proj.weight") {
            continue;
        }
        let at = tensor["data_offsets"][0].as_u64().unwrap() as usize + 8 + header_len;
        // The first row of each head, 4,096 times as large.
        let (rows, columns) = (model.kv_heads, model.hidden);
        let head_dim = model.hidden / model.heads;
        for row in 0..rows {
            for column in 0..columns {
                let at = at + (row * head_dim * columns + column) * 2;
                let bits = u16::from_le_bytes([bytes[at], bytes[at + 1]]);
                let larger = if bits << 1 == 0 { bits } else { bits + (12 << 7) };
                bytes[at..at + 2].copy_from_slice(&larger.to_le_bytes());
            }
        }
    }
    fs::write(&path, bytes).unwrap();
    bundle(home, model, Profile::Packed)
}

#[test]
#[ignore = "needs a GPU"]
fn sequences_without_units_are_computed_again() {
    let home = tempfile::tempdir().unwrap();
    let bundle = model_with_unpackable_pages(home.path(), &WHOLE_TILES);
    // Prefixes that stay in the cache would hold units.
    let mut packed = load_with_cache(&bundle, KvCache::Packed, options().prefix_cache(false));
    let units = packed.free_units().unwrap().unwrap();
    // Two full pages of a sequence need all units: values of three layers and two heads.
    assert_eq!((units, packed.memory().units), (12, 12));
    let request = |seed: u64| Request::new(tokens(70 + seed as usize * 5, WHOLE_TILES.vocab, seed)).max_new_tokens(60);
    let requests: Vec<Request> = (0..6).map(request).collect();
    let generated = run(&mut packed, &requests);
    assert!(packed.preempted() > 0, "sequences had to wait for units");
    assert_eq!(packed.free_units().unwrap(), Some(units), "all units came back");
    let mut bf16 = load_with_cache(&bundle, KvCache::Bf16, options());
    for (request, generated) in requests.iter().zip(&generated) {
        assert!(!generated.contains(&NO_TOKEN));
        // A lost page would change the logits by their own size.
        assert_most_likely(&mut bf16, WHOLE_TILES.vocab, request, generated);
    }
    // Units that prefixes hold are given to the sequence that needs them, so every sequence ends.
    let mut shares = load_with_cache(&bundle, KvCache::Packed, options());
    for (request, generated) in requests.iter().zip(run(&mut shares, &requests)) {
        assert_most_likely(&mut bf16, WHOLE_TILES.vocab, request, &generated);
    }
    // Alone, no unit is lost, and BF16 units give the bits of a BF16 cache.
    for request in &requests {
        let one = std::slice::from_ref(request);
        assert_eq!(run(&mut packed, one), run(&mut bf16, one));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_sequence_that_needs_more_units_than_exist_ends_with_correct_tokens() {
    let home = tempfile::tempdir().unwrap();
    let bundle = model_with_unpackable_pages(home.path(), &WHOLE_TILES);
    let [mut bf16, mut packed] =
        [KvCache::Bf16, KvCache::Packed].map(|cache| load_with_cache(&bundle, cache, options()));
    let request = Request::new(tokens(100, WHOLE_TILES.vocab, 1)).max_new_tokens(200);
    let whole = run(&mut bf16, std::slice::from_ref(&request)).remove(0);
    let id = packed.add(request).unwrap();
    let (mut generated, mut end) = (Vec::new(), None);
    while !packed.is_idle() {
        for event in packed.step().unwrap() {
            assert!(event.seq == id && end.is_none());
            generated.push(event.token);
            end = event.finish;
        }
    }
    // The third page is full with token 191, whose successor is the last token.
    assert_eq!((generated.len(), end), (192 - 100 + 1, Some(Finish::UnitsFull)));
    assert_eq!(generated, whole[..generated.len()]);
    // A prompt that does not fit ends without a token, and a text without logits.
    let id = packed.add(Request::new(tokens(300, WHOLE_TILES.vocab, 2)).max_new_tokens(5)).unwrap();
    let events = packed.step().unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].seq, events[0].token, events[0].finish), (id, NO_TOKEN, Some(Finish::UnitsFull)));
    assert!(packed.logits(&tokens(300, WHOLE_TILES.vocab, 2)).is_err());
    // A sequence that fits runs as before.
    let fits = Request::new(tokens(50, WHOLE_TILES.vocab, 3)).max_new_tokens(60);
    assert_eq!(run(&mut packed, std::slice::from_ref(&fits)), run(&mut bf16, std::slice::from_ref(&fits)));
}

/// The same sequences for thousands of steps, through pages that fill and are freed.
#[test]
#[ignore = "needs a GPU"]
fn packed_cache_gives_the_same_tokens_every_time() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &LARGE_HEADS, Profile::Packed);
    // Prefix cache hits would change which sequences run together.
    let mut engine = load_with_cache(&bundle, KvCache::Packed, options().prefix_cache(false));
    let requests = requests(8, LARGE_HEADS.vocab, SampleParams::default().temperature(0.9), 9);
    let first = run(&mut engine, &requests);
    for round in 0..60 {
        assert_eq!(run(&mut engine, &requests), first, "round {round}");
    }
}

/// The engine allocates no more than planned.
#[test]
#[ignore = "needs a GPU"]
fn packed_cache_is_planned_to_the_byte() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &WHOLE_TILES, Profile::Packed);
    let config = ModelConfig::of_bundle(&bundle).unwrap();
    for max_batch in [1, 64] {
        let options = options().max_batch(max_batch).placement(Placement::Packed).kv_cache(KvCache::Packed);
        let engine = load(&bundle, options.clone());
        let had = *engine.memory();
        let shared = Shared { bytes: 0, expansion_bytes: 0 };
        let planned = memory::plan(&config, &options, (had.weights, shared), 4 << 30).unwrap();
        assert_eq!((planned.pages, planned.hot_pages, planned.units), (had.pages, had.hot_pages, had.units));
        assert!(had.total() <= 4 << 30, "{had}");
    }
}
