//! Arguments of `generate` and `bench decode`. tests/gpu tests the rest.

use std::{fs, path::Path};

use crate::harness::{fails, fixture, json, run, shards, stderr};

#[test]
fn rejects_bad_arguments_before_loading() {
    let bundle = fixture().join("bundle");
    let bundle = bundle.to_str().unwrap();
    let home = tempfile::tempdir().unwrap();
    let notes = home.path().join("notes.txt");
    fs::write(&notes, "dear diary").unwrap();
    let notes = notes.to_str().unwrap();
    let folder = home.path().to_str().unwrap();
    let shard = shards(Path::new(bundle))[0].to_str().unwrap().to_owned();
    let before = fs::read(&shard).unwrap();
    let cases: [(&[&str], &str, &[&str]); 22] = [
        (&["--tokens", "-5"], "usage", &["'-5'"]),
        (&["--tokens", "1.5"], "usage", &["'1.5'", "1,450,4996"]),
        (&["--tokens", ""], "usage", &["1,450,4996"]),
        (&["--tokens", "1,512"], "token-out-of-vocabulary", &["token 512 at index 1", "512"]),
        (&["--tokens", "1", "-n", "64", "--context", "64"], "context-exceeded", &["64"]),
        (&["--tokens", "1", "-n", "4000000000"], "context-exceeded", &["4000000000"]),
        (&["--tokens", "1", "--chunk", "100"], "option-out-of-range", &["chunk = 100", "64"]),
        (&["--tokens", "1", "--dump-logits", notes], "output-not-replaceable", &["--dump-logits"]),
        (&["--tokens", "1", "--dump-logits", &shard], "output-not-replaceable", &[&shard]),
        (&[], "no-prompt", &["--tokens"]),
        (&["--chat", "--prompt", "<5>"], "no-chat-template", &[]),
        (&["--tokens", "1,99999999999"], "usage", &["99999999999", "1,450,4996"]),
        (&["--tokens", "1", "--top-p", "2"], "sampling-option-out-of-range", &["top_p = 2"]),
        (&["--tokens", "1", "--temperature", "-1"], "sampling-option-out-of-range", &["temperature = -1"]),
        (&["--tokens", "1", "--by-steps"], "usage", &["--dump-logits"]),
        (&["--tokens", "1", "--resident-experts", "2"], "model-without-experts", &["resident_experts = 2"]),
        (&["--tokens", "1", "--resident-experts", "0"], "usage", &["--resident-experts", "0"]),
        (&["--tokens", "1", "--prompt", "hello"], "usage", &[]),
        (&["--tokens", "1", "--kv-cache", "fp8"], "usage", &["'fp8'", "auto, packed, bf16"]),
        (&["--tokens", "1", "--kv-cache"], "usage", &["--kv-cache", "auto, packed, bf16"]),
        (&["--tokens", "1", "--draft-model", bundle, "--speculate", "0"], "option-out-of-range", &["1 to 15"]),
        (&["--tokens", "1", "--draft-model", folder], "not-a-bundle", &[folder]),
    ];
    for (arguments, code, expected) in cases {
        let output = run(Path::new("."), &[&["generate", bundle, "--json"], arguments].concat(), 2);
        assert_eq!(json(&output)["error"]["code"], code, "{arguments:?}");
        let text = stderr(&output);
        for part in expected {
            assert!(text.contains(part), "{arguments:?}: no {part:?} in\n{text}");
        }
    }
    assert_eq!(fs::read_to_string(notes).unwrap(), "dear diary");
    assert!(fs::read(&shard).unwrap() == before);
    if unweight_rt::Device::open(0).is_err() {
        let logits = home.path().join("logits.safetensors");
        let header = br#"{"logits.0":{"dtype":"BF16","shape":[0,512],"data_offsets":[0,0]}}"#;
        fs::write(&logits, [&(header.len() as u64).to_le_bytes()[..], header].concat()).unwrap();
        let (context, file) = (["--context", "2"], logits.to_str().unwrap());
        // A file of logits may be replaced, and `--dump-logits` makes no tokens that need context.
        let cache = ["--kv-cache", "packed"];
        for more in [
            &[][..],
            &cache[..],
            &["--kv-cache=bf16"],
            &["--kv-cache=auto"],
            &["--draft-model", bundle],
            &[&context[..], &["--dump-logits", file]].concat(),
        ] {
            fails(Path::new("."), &[&["generate", bundle, "--tokens", "1,2"], more].concat(), 2, "library-missing");
        }
    }
}
