//! Attacks on a packed KV cache in the engine: models whose values are hard to pack, pools of few units, shared
//! prefixes, cancellation at any time, logits of texts in between. A BF16 cache is the reference.

use std::{collections::BTreeMap, fs, path::Path};

use unweight::engine::{
    Engine, EngineOptions, Event, Finish, KvCache, NO_TOKEN, Placement, Request, SampleParams, SeqId,
};
use unweight_format::{
    bundle::{Bundle, Profile},
    testing::demo_model::{self, DemoOptions},
};

use crate::{
    engine::{assert_likely, bundle, load, options, run, tokens},
    harness::{Random, WHOLE_TILES, error, fresh},
};

const LARGE_HEADS: DemoOptions =
    DemoOptions { layers: 2, hidden: 512, intermediate: 512, heads: 4, kv_heads: 1, seed: 8, ..WHOLE_TILES };

/// Makes a model whose values (or keys) have a channel that is `2^doublings` times as large, in these layers and KV
/// heads.
fn model_with_outliers(
    home: &Path,
    model: &DemoOptions,
    projection: &str,
    doublings: u16,
    selects: impl Fn(usize, usize) -> bool,
) -> Bundle {
    let folder = home.join("model");
    demo_model::write(&folder, model).expect("a model");
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let (columns, head_dim) = (model.hidden, model.hidden / model.heads);
    let mut changed = 0;
    for (name, tensor) in header.as_object().unwrap() {
        let Some(layer) =
            name.strip_prefix("model.layers.").filter(|_| name.ends_with(&format!("{projection}.weight")))
        else {
            continue;
        };
        let layer: usize = layer.split('.').next().unwrap().parse().unwrap();
        let first = tensor["data_offsets"][0].as_u64().unwrap() as usize + 8 + header_len;
        for head in (0..model.kv_heads).filter(|head| selects(layer, *head)) {
            for column in 0..columns {
                let at = first + (head * head_dim * columns + column) * 2;
                let bits = u16::from_le_bytes([bytes[at], bytes[at + 1]]);
                let larger = if bits << 1 == 0 { bits } else { bits + (doublings << 7) };
                bytes[at..at + 2].copy_from_slice(&larger.to_le_bytes());
                changed += 1;
            }
        }
    }
    assert!(changed > 0, "no weight of {projection}");
    fs::write(&path, bytes).unwrap();
    bundle(home, model, Profile::Packed)
}

fn engines(bundle: &Bundle, options: &EngineOptions) -> [Engine; 2] {
    [KvCache::Bf16, KvCache::Packed].map(|cache| load(bundle, options.clone().kv_cache(cache)))
}

fn free_units(engine: &mut Engine) -> u32 {
    engine.free_units().unwrap().expect("a packed cache")
}

/// Texts reuse the pages of earlier prompts, whose units must be released first: one unit per page.
#[test]
#[ignore = "needs a GPU"]
fn logits_never_share_a_unit_between_pages() {
    let home = tempfile::tempdir().unwrap();
    let bundle = model_with_outliers(home.path(), &WHOLE_TILES, "v_proj", 12, |layer, head| layer == 0 && head == 0);
    let vocab = WHOLE_TILES.vocab;
    let [mut bf16, mut packed] = engines(&bundle, &options().max_batch(1));
    let (pages, units) = (packed.free_pages(), free_units(&mut packed));
    assert_eq!((pages, units), (7, 12));
    for round in 0..10 {
        // A prefix that stays in the cache: six pages, each with a unit.
        run(&mut packed, &[Request::new(tokens(400, vocab, round)).max_new_tokens(3)]);
        for count in [400, 448, 300] {
            let what = format!("round {round}, {count} tokens");
            let text = tokens(count, vocab, round + count as u64);
            let got = packed.logits(&text).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(got == bf16.logits(&text).unwrap(), "{what}: other bits");
            let texts = [&text[..200]];
            let got = packed.logits_by_steps(&texts).unwrap_or_else(|error| panic!("{what}, by steps: {error}"));
            assert!(got == bf16.logits_by_steps(&texts).unwrap(), "{what}: other bits by steps");
            // At most six pages of the prefix remain.
            let free = free_units(&mut packed);
            assert!((units - 6..=units).contains(&free), "{what}: {free} of {units} units are free");
        }
    }
    // A text that needs all pages evicts every prefix, so afterwards all units are free.
    packed.logits(&tokens(512, vocab, 5)).unwrap();
    assert_eq!((packed.free_pages(), free_units(&mut packed)), (pages, units));
}

/// Unused prefixes hold all units: a text that fits alone gets them, as a sequence does.
#[test]
#[ignore = "needs a GPU"]
fn logits_evict_prefixes_that_hold_all_units() {
    let home = tempfile::tempdir().unwrap();
    let bundle = model_with_outliers(home.path(), &WHOLE_TILES, "v_proj", 12, |layer, head| layer == 0 && head == 0);
    let vocab = WHOLE_TILES.vocab;
    let [mut bf16, mut packed] = engines(&bundle, &options().max_batch(4));
    for seed in 0..2 {
        run(&mut packed, &[Request::new(tokens(400, vocab, seed)).max_new_tokens(3)]);
    }
    assert_eq!(free_units(&mut packed), 0);
    let text = tokens(130, vocab, 7);
    assert!(packed.logits(&text).unwrap() == bf16.logits(&text).unwrap(), "other bits");
}

/// The finish reasons of sequences, by id.
#[derive(Default)]
struct Outcomes {
    tokens: BTreeMap<SeqId, Vec<u32>>,
    finish: BTreeMap<SeqId, Finish>,
}

impl Outcomes {
    fn record(&mut self, events: Vec<Event>) {
        for Event { seq, token, finish, .. } in events {
            assert!(!self.finish.contains_key(&seq), "{seq:?} has an event after its end");
            if token != NO_TOKEN {
                self.tokens.entry(seq).or_default().push(token);
            }
            self.finish.extend(finish.map(|finish| (seq, finish)));
        }
    }
}

/// Returns the largest distance to the largest logit that rounding explains, relative to the RMS of the logits.
/// Outliers make rounding larger, in some texts more than in others: it is measured as the largest difference between
/// logits by steps and by a prompt.
fn rounding(engine: &mut Engine, vocab: usize) -> f64 {
    let mut relative = 0.0_f64;
    for seed in 0..8 {
        let text = tokens(150, vocab, seed);
        let (by_steps, by_prompt) = (engine.logits_by_steps(&[&text[..]]).unwrap(), engine.logits(&text).unwrap());
        let by_prompt: Vec<f32> = by_prompt.iter().map(|logit| logit.to_f32()).collect();
        relative = relative.max(error(&by_steps[0], &by_prompt));
    }
    // A wrong row differs by about 2.
    assert!(relative < 0.15, "rounding of {relative} hides wrong rows");
    eprintln!("rounding: {relative}");
    // The difference of two logits, each with an error of up to five times its RMS.
    (10.0 * relative).max(0.08)
}

/// Sends random requests, cancellations and texts until the engine is idle. With `each_fits`, no sequence needs more
/// units than there are. Every reported token must be a most likely one by a BF16 cache, texts have the same bits in
/// every round, and no page or unit is missing at the end.
fn attack(bf16: &mut Engine, packed: &mut Engine, model: &DemoOptions, (rounds, seed): (u32, u64), each_fits: bool) {
    let (vocab, random) = (model.vocab, &mut Random::new(seed));
    let slack_max = rounding(bf16, vocab);
    let prefixes: Vec<Vec<u32>> = (0..3).map(|index| tokens(400, vocab, seed + index)).collect();
    for round in 0..rounds {
        let what = format!("seed {seed}, round {round}");
        let mut outcomes = Outcomes::default();
        let (mut submitted, mut cancelled) = (BTreeMap::new(), Vec::new());
        while submitted.len() < 20 || !packed.is_idle() {
            if submitted.len() < 20 && random.below(3) == 0 {
                let suffix = 1 + random.below(150) as usize;
                let mut prompt = prefixes[random.below(3) as usize][..random.below(300) as usize].to_vec();
                prompt.extend(tokens(suffix, vocab, random.below(1 << 30)));
                let new = 1 + random.below(100).min(511 - prompt.len() as u64) as u32;
                let request = Request::new(prompt).max_new_tokens(new);
                submitted.insert(packed.add(request.clone()).unwrap(), request);
            }
            if random.below(12) == 0 && !submitted.is_empty() {
                let ids: Vec<SeqId> = submitted.keys().copied().collect();
                let id = ids[random.below(ids.len() as u64) as usize];
                if packed.cancel(id) {
                    cancelled.push(id);
                }
            }
            if random.below(60) == 0 {
                let text = tokens(1 + random.below(200) as usize, vocab, random.below(1 << 30));
                // Others may hold the pages or the units.
                if let Ok(got) = packed.logits(&text) {
                    assert!(got == bf16.logits(&text).unwrap(), "{what}: other bits of a text");
                }
            }
            outcomes.record(packed.step().unwrap());
        }
        for (id, request) in &submitted {
            let got = outcomes.tokens.remove(id).unwrap_or_default();
            let whole = got.len() == request.max_new_tokens as usize;
            match outcomes.finish.get(id) {
                Some(Finish::Length) => assert!(whole, "{what}"),
                Some(Finish::UnitsFull) => {
                    assert!(!each_fits, "{what}: {id:?} ended with a full cache, although it fits")
                }
                None => assert!(cancelled.contains(id), "{what}: {id:?} never ended"),
                other => panic!("{what}: {other:?}"),
            }
            if !got.is_empty() && random.below(4) == 0 {
                let request = request.clone().max_new_tokens(got.len() as u32);
                eprintln!("{what}");
                assert_likely(bf16, vocab, (&request, &got), slack_max);
            }
        }
    }
}

/// Without a prefix cache, every unit and page is free after every round.
#[test]
#[ignore = "needs a GPU"]
fn no_unit_is_lost_in_any_round() {
    // With keys as large, rounding would choose tokens.
    for one in [true, false] {
        let home = tempfile::tempdir().unwrap();
        let selects = |layer: usize, head: usize| !one || layer == 1 && head == 1;
        let bundle = model_with_outliers(home.path(), &WHOLE_TILES, "v_proj", 12, selects);
        for (chunk, graphs) in [(64, true), (128, true), (64, false)] {
            let options = options().chunk(chunk).graphs(graphs).prefix_cache(false);
            let [mut bf16, mut packed] = engines(&bundle, &options);
            let before = (packed.free_pages(), free_units(&mut packed));
            for _ in 0..4 {
                attack(&mut bf16, &mut packed, &WHOLE_TILES, (1, fresh()), one);
                assert_eq!((packed.free_pages(), free_units(&mut packed)), before, "chunks of {chunk}");
            }
            assert!(packed.preempted() > 0, "no sequence was preempted, so units were not scarce");
        }
    }
}

/// With prefixes that stay and hold units, in pools of few pages.
#[test]
#[ignore = "needs a GPU"]
fn prefixes_that_hold_units_change_no_bit() {
    let mut shared_tokens = 0;
    for one in [true, false] {
        let home = tempfile::tempdir().unwrap();
        let selects = |layer: usize, head: usize| !one || layer == 1 && head == 1;
        let bundle = model_with_outliers(home.path(), &WHOLE_TILES, "v_proj", 12, selects);
        for (max_batch, chunk) in [(2, 64), (8, 64), (8, 128)] {
            let [mut bf16, mut packed] = engines(&bundle, &options().max_batch(max_batch).chunk(chunk));
            let before = (packed.free_pages(), free_units(&mut packed));
            attack(&mut bf16, &mut packed, &WHOLE_TILES, (4, fresh()), one);
            shared_tokens += packed.shared_prompt_tokens();
            // Alone, after all of this: the same bits.
            for count in [63, 64, 129, 150] {
                let text = tokens(count, WHOLE_TILES.vocab, count as u64);
                // Prefixes may hold the units.
                if let Ok(got) = packed.logits(&text) {
                    assert!(got == bf16.logits(&text).unwrap(), "{count} tokens");
                }
            }
            assert!(packed.free_pages() == before.0 && free_units(&mut packed) <= before.1);
        }
    }
    // Where units are scarce, prefixes may be evicted before they are shared.
    assert!(shared_tokens > 0, "no prompt shared a prefix");
}

/// Outliers of many sizes, so that a share of the units from none to all has escapes or is BF16. If no sequence is
/// preempted, 256 sequences have the same tokens with either cache.
#[test]
#[ignore = "needs a GPU"]
fn outliers_of_any_size_give_the_same_tokens() {
    let mut compared = 0;
    for (model, projection) in [(LARGE_HEADS, "v_proj"), (LARGE_HEADS, "k_proj"), (WHOLE_TILES, "v_proj")] {
        for doublings in [3, 5, 6, 7, 8] {
            let home = tempfile::tempdir().unwrap();
            let bundle = model_with_outliers(home.path(), &model, projection, doublings, |_, _| true);
            let options = options().max_batch(256).context(1024).chunk(512).memory(8 << 30).prefix_cache(false);
            let [mut bf16, mut packed] = engines(&bundle, &options);
            let units = free_units(&mut packed);
            let random = &mut Random::new(u64::from(doublings));
            let params = SampleParams::default().temperature(0.9);
            let requests: Vec<Request> = (0..280)
                .map(|index| {
                    let prompt = tokens(1 + random.below(500) as usize, model.vocab, index);
                    Request::new(prompt).max_new_tokens(1 + random.below(150) as u32).params(params.seed(index))
                })
                .collect();
            // Sequences that a cache without units ends have fewer tokens, each of which is correct.
            let generated = run(&mut packed, &requests);
            assert_eq!(free_units(&mut packed), units);
            if packed.preempted() == 0
                && generated.iter().zip(&requests).all(|(t, r)| t.len() == r.max_new_tokens as usize)
            {
                compared += 1;
                assert!(generated == run(&mut bf16, &requests), "{projection} x2^{doublings}: other tokens");
            }
            // One sequence at a time always fits.
            for (request, seed) in requests.iter().zip(0..12) {
                let one = std::slice::from_ref(request);
                let [generated, whole] = [&mut packed, &mut bf16].map(|engine| run(engine, one).remove(0));
                let correct: Vec<u32> = generated.iter().copied().filter(|token| *token != NO_TOKEN).collect();
                assert!(whole.starts_with(&correct), "{projection} x2^{doublings}, request {seed}");
            }
        }
    }
    assert!(compared >= 2, "only {compared} runs had no preemption");
}

/// Contexts around the ends of the only pages, including an empty context.
#[test]
#[ignore = "needs a GPU"]
fn tiny_contexts_have_no_packed_page() {
    let home = tempfile::tempdir().unwrap();
    let bundle = bundle(home.path(), &WHOLE_TILES, Profile::Packed);
    for context in [1, 2, 63, 64, 65, 128, 129] {
        let options = options().context(context).chunk(64).placement(Placement::Packed);
        let [mut bf16, mut packed] = engines(&bundle, &options);
        for count in [1, context / 2, context].into_iter().filter(|count| *count > 0) {
            let text = tokens(count as usize, WHOLE_TILES.vocab, u64::from(context));
            assert!(packed.logits(&text).unwrap() == bf16.logits(&text).unwrap(), "{count} of {context} tokens");
            let request = Request::new(text).max_new_tokens(context - count);
            let generated = [&mut packed, &mut bf16].map(|engine| run(engine, std::slice::from_ref(&request)));
            assert!(generated[0] == generated[1], "{count} of {context} tokens");
        }
    }
}
