//! Drafts by a model: its tokens change no answer, and models that cannot draft are explained.

use std::collections::BTreeMap;

use unweight::engine::{Adjustments, SampleParams};

use super::*;

/// A smaller model with the vocabulary of the tests' model.
fn small() -> DemoOptions {
    DemoOptions { hidden: 32, intermediate: 64, heads: 2, kv_heads: 1, seed: 9, ..tiny() }
}

/// Requests of several lengths, greedy and sampled; some have adjusted logits.
fn requests() -> Vec<Request> {
    let one = |index: u32| {
        let prompt = (0..3 + index * 9).map(|at| 3 + (at * (index + 2)) % 250).collect();
        let temperature = [0.0, 0.7, 1.0][index as usize % 3];
        let penalty = if index % 4 == 3 { 0.5 } else { 0.0 };
        Request::new(prompt)
            .max_new_tokens(30 + index)
            .params(SampleParams::default().temperature(temperature).seed(index.into()))
            .adjustments(Adjustments::default().presence_penalty(penalty))
    };
    (0..8).map(one).collect()
}

/// Runs requests to their ends, or cancels one in three of them after some tokens.
fn run(model: &mut CpuReference, cancels: bool) -> Vec<Vec<u32>> {
    let ids: Vec<SeqId> = requests().into_iter().map(|request| model.add(request).unwrap()).collect();
    let mut told = BTreeMap::<SeqId, Vec<u32>>::new();
    while !model.is_idle() {
        for event in model.step().unwrap() {
            told.entry(event.seq).or_default().push(event.token);
        }
        for (at, id) in ids.iter().enumerate().filter(|(at, _)| cancels && at % 3 == 1) {
            if told.get(id).is_some_and(|tokens| tokens.len() > 5 + at) {
                model.cancel(*id);
            }
        }
    }
    ids.iter().map(|id| told.remove(id).unwrap_or_default()).collect()
}

fn load(draft: Option<&Path>, options: &EngineOptions) -> CpuReference {
    let draft = draft.map(|draft| Bundle::open(draft).unwrap());
    CpuReference::load_with_draft(&Bundle::open(&bundle()).unwrap(), draft.as_ref(), options).unwrap()
}

#[test]
fn draft_models_change_no_token() {
    let small = bundle_of(&small(), &[]);
    for (max_batch, speculate) in [(1, 4), (4, 1), (4, 15)] {
        let options = EngineOptions::default().max_batch(max_batch).context(200);
        let expected = run(&mut load(None, &options), false);
        let options = options.speculate(speculate);
        // Sampled tokens, too, are those of the target if it drafts for itself.
        let mut same = load(Some(&bundle()), &options);
        assert_eq!(run(&mut same, false), expected, "{options:?}");
        let counts = same.load().drafts;
        assert!(counts.accepted == counts.drafted && counts.drafted > 50, "{counts:?}");
        let mut other = load(Some(&small.path().join("tiny")), &options);
        assert_eq!(run(&mut other, false), expected, "{options:?}");
        let counts = other.load().drafts;
        assert!(counts.accepted < counts.drafted, "{counts:?}");
        for (tokens, expected) in run(&mut same, true).iter().zip(&expected) {
            assert_eq!(tokens[..], expected[..tokens.len()]);
        }
        assert!(same.is_idle() && same.load().free_pages == same.limits().pages);
    }
}

/// Beyond the context of the draft model, sequences continue without drafts.
#[test]
fn drafts_end_with_the_context_of_the_draft_model() {
    let config = |home: &Path, positions: &str| {
        let text = fs::read_to_string(home.join("model/config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["max_position_embeddings"] = positions.parse().unwrap();
        config.to_string()
    };
    let short = bundle_of(&tiny(), &[]);
    let short = bundle_of(&tiny(), &[("config.json", &config(short.path(), "40"))]);
    let request = || Request::new(vec![5, 6, 7]).max_new_tokens(100);
    let options = EngineOptions::default().max_batch(1).context(200).speculate(4);
    let mut model = load(Some(&short.path().join("tiny")), &options);
    model.add(request()).unwrap();
    let mut tokens = 0;
    while !model.is_idle() {
        tokens += model.step().unwrap().len();
    }
    let counts = model.load().drafts;
    assert_eq!(tokens, 100);
    assert!(counts.accepted == counts.drafted && (15..37).contains(&counts.drafted), "{counts:?}");
}

#[test]
fn servers_draft_with_a_model() {
    let small = bundle_of(&small(), &[]);
    let small = small.path().join("tiny");
    let same = bundle();
    let start = |arguments: &[&str]| Server::start(&mut command(arguments));
    let plain = start(&[]);
    let body = r#"{"prompt": ["one two", "three"], "max_tokens": 60, "temperature": 0, "ignore_eos": true}"#;
    let answer = |server: &Server| {
        let (status, text) = server.ask("/v1/completions", body);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()["choices"].clone()
    };
    for (draft, is_same) in [(&same, true), (&small, false)] {
        let drafting = start(&["--draft-model", draft.to_str().unwrap()]);
        assert_eq!(answer(&drafting), answer(&plain));
        let of = |what: &str| drafting.metric(&format!("unweight_spec_decode_num_{what}_tokens_total"));
        assert!(of("draft") > 0.0 && (of("accepted") == of("draft")) == is_same, "{is_same}");
    }
}

#[test]
fn models_that_cannot_draft_are_explained() {
    let tokenizer = include_str!("tokenizer.json").replace("<|system|>", "<|sistem|>");
    let cases = [
        (
            bundle_of(&DemoOptions { vocab: 280, ..tiny() }, &[]),
            "draft-vocabulary-differs",
            "280 tokens and the model 264",
        ),
        (bundle_of(&tiny(), &[("tokenizer.json", &tokenizer)]), "draft-vocabulary-differs", "token 258"),
        (bundle_of(&DemoOptions { experts: 4, ..tiny() }, &[]), "draft-not-dense", "4 experts"),
    ];
    let fails = |arguments: &[&str], code: &str, what: &str| {
        let mut command = command(arguments);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&format!("error[{code}]")) && said.contains(what), "{code}: {said}");
    };
    for (home, code, what) in &cases {
        fails(&["--draft-model", home.path().join("tiny").to_str().unwrap()], code, what);
    }
    let (draft, home) = (bundle(), cases[0].0.path().to_str().unwrap());
    let draft = draft.to_str().unwrap();
    fails(&["--draft-model", draft, "--speculate", "0"], "option-out-of-range", "a draft model requires");
    fails(&["--draft-model", home], "not-a-bundle", home);
}
