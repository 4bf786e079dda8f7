//! Tests the errors that the `unweight-bench` command reports before it needs a GPU.
#![cfg(feature = "cli")]

use std::process::Command;

use unweight_format::{
    bundle::{self, CompressOptions, Silent},
    testing::demo_model::{self, DemoOptions},
};

/// Runs a command that must exit with 2, and returns its standard error.
fn usage_error(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_unweight-bench")).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
    text
}

#[test]
fn decode_rejects_arguments_that_contradict_each_other() {
    let cases: [(&[&str], &str); 4] = [
        (&["decode"], "--geometry"),
        (&["decode", "--geometry", "llama-9"], "llama-9"),
        (&["decode", "bundle", "--geometry", "llama-3.1-8b"], "cannot be used with"),
        (&["decode", "--geometry", "llama-3.2-1b", "--tune", "--placement", "packed"], "pass --placement stored"),
    ];
    for (arguments, expected) in cases {
        let text = usage_error(arguments);
        assert!(text.contains(expected) && !text.contains("libcuda"), "{arguments:?}: {text}");
    }
}

#[test]
fn decode_parses_a_list_of_batches_apart_from_the_bundle() {
    if unweight_rt::Device::open(0).is_ok() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let [model, dir] = ["model", "bundle"].map(|name| home.path().join(name));
    let tiny = DemoOptions {
        layers: 1,
        hidden: 64,
        intermediate: 64,
        heads: 1,
        kv_heads: 1,
        vocab: 64,
        ..DemoOptions::default()
    };
    demo_model::write(&model, &tiny).unwrap();
    bundle::compress(&model, &dir, &CompressOptions::default(), &Silent).unwrap();
    let text = usage_error(&["decode", "--batch", "1,8", dir.to_str().unwrap()]);
    assert!(text.contains("libcuda"), "{text}");
}

#[test]
fn errors_are_json_with_json() {
    let output = Command::new(env!("CARGO_BIN_EXE_unweight-bench"))
        .args(["decode", "--geometry", "llama-3.2-1b", "--tune", "--json"])
        .output()
        .unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(document["error"]["class"], "failed");
    assert_eq!(document["unweight_version"], env!("CARGO_PKG_VERSION"));
}
