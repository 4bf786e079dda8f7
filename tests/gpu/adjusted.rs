//! Adjusted logits and log probabilities of a whole engine: correct tokens, and no effect on other sequences.

use std::{collections::BTreeMap, sync::Arc};

use unweight::engine::{
    Adjustments, Constraint, ConstraintState, Engine, Event, Finish, KvCache, Logprobs, Request, SampleParams, SeqId,
};
use unweight_format::bundle::Profile;
use unweight_model::sampling::{History, adjust, forbid};

use crate::{
    engine::{MODELS, bundle, load, options, requests, run, tokens},
    harness::rms,
};

/// The bound of logits in `engine.rs`.
const BOUND: f64 = 0.02;

/// A token with its log probabilities.
type Told = (u32, Option<Box<Logprobs>>);

/// Runs all requests to their ends. Returns tokens and log probabilities of each.
fn run_with_logprobs(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<Told>> {
    let ids: Vec<SeqId> = requests.iter().map(|request| engine.add(request.clone()).unwrap()).collect();
    let mut told = BTreeMap::<SeqId, Vec<_>>::new();
    while !engine.is_idle() {
        for Event { seq, token, logprobs, .. } in engine.step().unwrap() {
            told.entry(seq).or_default().push((token, logprobs));
        }
    }
    ids.iter().map(|id| told.remove(id).unwrap_or_default()).collect()
}

/// Adjusts two of three requests, each in another way.
fn adjusted(requests: &[Request], vocab: u32) -> Vec<Request> {
    let none = Adjustments::default;
    let change = |(i, request): (usize, &Request)| {
        let likely = i as u32 % vocab;
        let adjustments = match i % 6 {
            0 => none().frequency_penalty(2.0).presence_penalty(1.0),
            1 => none().repetition_penalty(1.8),
            3 => none().bias(vec![(likely, 30.0), (likely / 2 + 1, -100.0)]).frequency_penalty(1.5),
            4 => none().presence_penalty(-2.0).min_new_tokens(5),
            _ => return request.clone(),
        };
        request.clone().adjustments(adjustments)
    };
    requests.iter().enumerate().map(change).collect()
}

/// Rows without adjustments keep their bits. Adjusted rows take the largest adjusted logit, whatever the host has read.
#[test]
#[ignore = "needs a GPU"]
fn adjusted_sequences_are_right_and_leave_others_alone() {
    let home = tempfile::tempdir().unwrap();
    let (model, vocab) = (&MODELS[0], MODELS[0].vocab);
    let bundle = bundle(home.path(), model, Profile::Packed);
    for (graphs, cache) in [(true, KvCache::Bf16), (false, KvCache::Bf16), (true, KvCache::Packed)] {
        // In a pass with a step, the number of its rows affects the rounding of a prompt.
        let mut engine = load(&bundle, options().graphs(graphs).kv_cache(cache).mixed_passes(false));
        let plain = requests(24, vocab, SampleParams::default(), 17);
        let changed = adjusted(&plain, vocab as u32);
        let told = run(&mut engine, &plain);
        let other = run(&mut engine, &changed);
        assert_eq!(run(&mut engine, &changed), other, "the same tokens every time");
        let mut differ = 0;
        for ((request, own), before) in changed.iter().zip(&other).zip(&told) {
            if request.adjustments.is_none() {
                assert_eq!(own, before, "a sequence without adjustments");
                continue;
            }
            differ += usize::from(own != before);
            assert_best(&mut engine, vocab, request, own);
        }
        assert!(differ > 8, "{differ} of 16 adjusted sequences differ");
    }
}

/// Sequences keep their penalties if they are preempted and computed again.
#[test]
#[ignore = "needs a GPU"]
fn preempted_sequences_keep_their_counts() {
    let home = tempfile::tempdir().unwrap();
    let vocab = MODELS[0].vocab;
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    for cache in [KvCache::Bf16, KvCache::Packed] {
        let options = options().kv_cache(cache);
        let whole = *load(&bundle, options.clone()).memory();
        let fixed = whole.total() - u64::from(whole.pages) * whole.token * 64;
        let mut engine = load(&bundle, options.memory(fixed + 9 * whole.token * 64));
        let plain: Vec<Request> =
            (0..8).map(|index| Request::new(tokens(40, vocab, index)).max_new_tokens(200)).collect();
        let changed = adjusted(&plain, vocab as u32);
        let free = engine.free_pages();
        let told = run(&mut engine, &changed);
        assert!(engine.preempted() > 0, "{cache:?}: all fitted");
        assert_eq!(engine.free_pages(), free, "{cache:?}: all pages came back");
        for (request, own) in changed.iter().zip(&told).filter(|(request, _)| !request.adjustments.is_none()) {
            assert_best(&mut engine, vocab, request, own);
        }
    }
}

/// Checks that each token has the largest adjusted logit after the tokens before, up to rounding.
fn assert_best(engine: &mut Engine, vocab: usize, request: &Request, told: &[u32]) {
    assert_eq!(told.len(), request.max_new_tokens as usize);
    let text = [&request.prompt[..], told].concat();
    let logits = engine.logits(&text).unwrap();
    for (nth, &token) in told.iter().enumerate() {
        let row = &logits[(request.prompt.len() - 1 + nth) * vocab..][..vocab];
        let scale = rms(row.iter().map(|logit| logit.to_f32()));
        let history = History { prompt: &request.prompt, answer: &told[..nth], ends: &request.stop };
        let row = adjust(row, &request.adjustments, history);
        let best = row.iter().copied().fold(f32::MIN, f32::max);
        let slack = f64::from(best - row[token as usize]);
        assert!(slack < 4.0 * BOUND * scale, "token {nth} is {slack} below {best}: {request:?}");
    }
}

/// Log probabilities match the logits, in steps and after prompts, and tokens do not change.
#[test]
#[ignore = "needs a GPU"]
fn logprobs_are_those_of_the_logits() {
    let home = tempfile::tempdir().unwrap();
    let vocab = MODELS[0].vocab;
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    let mut engine = load(&bundle, options());
    let plain = adjusted(&requests(20, vocab, SampleParams::default().temperature(0.9), 5), vocab as u32);
    let wanted = |i: usize| [None, Some(0), Some(3), Some(20)][i % 4];
    let asked: Vec<Request> =
        plain.iter().enumerate().map(|(i, request)| request.clone().logprobs(wanted(i))).collect();
    let told = run_with_logprobs(&mut engine, &asked);
    let all_tokens = |told: &[Vec<Told>]| -> Vec<Vec<u32>> {
        told.iter().map(|own| own.iter().map(|(token, _)| *token).collect()).collect()
    };
    assert_eq!(all_tokens(&told), run(&mut engine, &plain), "the same tokens with and without");
    for (i, own) in told.iter().enumerate() {
        let text: Vec<u32> = asked[i].prompt.iter().copied().chain(own.iter().map(|(token, _)| *token)).collect();
        let logits = engine.logits(&text).unwrap();
        for (nth, (token, logprobs)) in own.iter().enumerate() {
            let Some(top) = wanted(i) else {
                assert!(logprobs.is_none());
                continue;
            };
            let logprobs = logprobs.as_ref().expect("log probabilities");
            let row = &logits[(asked[i].prompt.len() - 1 + nth) * vocab..][..vocab];
            let values: Vec<f64> = row.iter().map(|logit| logit.to_f64()).collect();
            let largest = values.iter().copied().fold(f64::MIN, f64::max);
            let log_sum = largest + values.iter().map(|value| (value - largest).exp()).sum::<f64>().ln();
            let slack = 8.0 * BOUND * rms(row.iter().map(|logit| logit.to_f32()));
            let off = |token: u32, value: f32| (values[token as usize] - log_sum - f64::from(value)).abs();
            assert!(off(*token, logprobs.sampled) < slack, "sequence {i}, token {nth}: {logprobs:?}");
            assert_eq!(logprobs.top.len(), top as usize);
            assert!(logprobs.top.iter().all(|(token, value)| off(*token, *value) < slack), "{logprobs:?}");
            assert!(logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
        }
    }
}

/// Allows tokens depending on the token before, and ends after a number of tokens.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub before: u32,
    pub left: u32,
}

impl Rule {
    pub fn allows(before: u32, token: u32) -> bool {
        (token ^ before.wrapping_mul(2_654_435_761)) % 11 < 2
    }
}

impl Constraint for Rule {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(self.clone())
    }
}

impl ConstraintState for Rule {
    fn allow(&mut self, mask: &mut [u32]) {
        let bits = |word: u32| (0..32).map(|bit| u32::from(Self::allows(self.before, 32 * word + bit)) << bit).sum();
        (0..).zip(mask).for_each(|(word, own)| *own = bits(word));
    }

    fn take(&mut self, token: u32) -> bool {
        (self.before, self.left) = (token, self.left - 1);
        self.left == 0
    }
}

/// Gives every second request a constraint, and some of these adjustments, too.
fn constrained(requests: &[Request], vocab: u32) -> Vec<Request> {
    let change = |(i, request): (usize, Request)| {
        let rule = Rule { before: i as u32, left: request.max_new_tokens };
        if i % 2 == 1 { request.constraint(Some(Arc::new(rule))) } else { request }
    };
    adjusted(requests, vocab).into_iter().enumerate().map(change).collect()
}

fn assert_rule(engine: &mut Engine, vocab: usize, i: usize, request: &Request, told: &[u32]) {
    let text = [&request.prompt[..], told].concat();
    let logits = engine.logits(&text).unwrap();
    let mut state = Rule { before: i as u32, left: told.len() as u32 };
    for (nth, &token) in told.iter().enumerate() {
        assert!(Rule::allows(state.before, token), "request {i}, token {nth}");
        let row = &logits[(request.prompt.len() - 1 + nth) * vocab..][..vocab];
        let scale = rms(row.iter().map(|logit| logit.to_f32()));
        let history = History { prompt: &request.prompt, answer: &told[..nth], ends: &request.stop };
        let mut row = adjust(row, &request.adjustments, history);
        let mut mask = vec![0; vocab.div_ceil(32)];
        state.allow(&mut mask);
        forbid(&mut row, &mask);
        let best = row.iter().copied().fold(f32::MIN, f32::max);
        let slack = f64::from(best - row[token as usize]);
        assert!(slack < 4.0 * BOUND * scale, "request {i}, token {nth} is {slack} below {best}");
        state.take(token);
    }
}

/// Each token is the best that its constraint allows after the token before, also when sampled or computed again after
/// a preemption. Sequences without a constraint keep their bits.
#[test]
#[ignore = "needs a GPU"]
fn constrained_sequences_are_right_and_leave_others_alone() {
    let home = tempfile::tempdir().unwrap();
    let vocab = MODELS[0].vocab;
    let bundle = bundle(home.path(), &MODELS[0], Profile::Packed);
    for (graphs, cache) in [(true, KvCache::Bf16), (false, KvCache::Bf16), (true, KvCache::Packed)] {
        // As above.
        let mut engine = load(&bundle, options().graphs(graphs).kv_cache(cache).mixed_passes(false));
        let plain = adjusted(&requests(24, vocab, SampleParams::default(), 17), vocab as u32);
        let held = constrained(&requests(24, vocab, SampleParams::default(), 17), vocab as u32);
        let (before, told) = (run(&mut engine, &plain), run(&mut engine, &held));
        assert_eq!(run(&mut engine, &held), told, "the same tokens every time");
        for (i, (request, own)) in held.iter().zip(&told).enumerate() {
            match request.constraint {
                Some(_) => assert_rule(&mut engine, vocab, i, request, own),
                None => assert_eq!(own, &before[i], "a sequence without a constraint"),
            }
        }
        let warm = constrained(&requests(8, vocab, SampleParams::default().temperature(1.0), 3), vocab as u32);
        for (i, own) in run(&mut engine, &warm).iter().enumerate().filter(|(i, _)| i % 2 == 1) {
            let mut before = i as u32;
            assert!(own.iter().all(|token| Rule::allows(std::mem::replace(&mut before, *token), *token)));
        }
    }
    let whole = *load(&bundle, options()).memory();
    let fixed = whole.total() - u64::from(whole.pages) * whole.token * 64;
    let mut engine = load(&bundle, options().memory(fixed + 9 * whole.token * 64));
    let plain: Vec<Request> = (0..8).map(|index| Request::new(tokens(40, vocab, index)).max_new_tokens(200)).collect();
    let held = constrained(&plain, vocab as u32);
    let told = run(&mut engine, &held);
    assert!(engine.preempted() > 0, "all fitted");
    for (i, (request, own)) in held.iter().zip(&told).enumerate().filter(|(i, _)| i % 2 == 1) {
        assert_rule(&mut engine, vocab, i, request, own);
    }
}

/// A complete constraint ends its sequence with the token that completes it. A constraint that allows no token ends
/// only its own sequence.
#[test]
#[ignore = "needs a GPU"]
fn constraints_end_sequences() {
    #[derive(Debug)]
    struct Nothing;
    impl Constraint for Nothing {
        fn start(&self) -> Box<dyn ConstraintState> {
            Box::new(Self)
        }
    }
    impl ConstraintState for Nothing {
        fn allow(&mut self, _: &mut [u32]) {}
        fn take(&mut self, _: u32) -> bool {
            false
        }
    }
    let home = tempfile::tempdir().unwrap();
    let vocab = MODELS[0].vocab;
    let mut engine = load(&bundle(home.path(), &MODELS[0], Profile::Packed), options());
    let plain = Request::new(tokens(20, vocab, 1)).max_new_tokens(30);
    let complete = plain.clone().constraint(Some(Arc::new(Rule { before: 1, left: 9 })));
    let nothing = plain.clone().constraint(Some(Arc::new(Nothing)));
    let ids = [plain, complete, nothing].map(|request| engine.add(request).unwrap());
    let mut ends = BTreeMap::new();
    let mut counts = BTreeMap::<SeqId, u32>::new();
    while !engine.is_idle() {
        for Event { seq, finish, .. } in engine.step().unwrap() {
            *counts.entry(seq).or_default() += 1;
            finish.into_iter().for_each(|finish| _ = ends.insert(seq, finish));
        }
    }
    let of = |id: &SeqId| (counts[id], ends[id]);
    let expected = [(30, Finish::Length), (9, Finish::Complete), (1, Finish::Constraint)];
    assert_eq!(ids.each_ref().map(of), expected);
}
