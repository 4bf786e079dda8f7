//! `--base`: bundles of differences from a base model.

use std::{fs, path::Path};

use unweight::format::testing::Weights;

use crate::harness::{fails, json, matrix, run, same, stdout};

/// Writes a model of one BF16 matrix. Every `step`-th element differs from the base's by its lowest bit.
fn model(folder: &Path, step: usize) {
    fs::create_dir(folder).unwrap();
    let mut weights = Weights::TRAINED.bytes(256 * 256, 1);
    for at in (0..weights.len()).step_by(2 * step) {
        weights[at] ^= 1;
    }
    matrix(&folder.join("model.safetensors"), "x.mlp.up_proj.weight", [256, 256], &weights);
}

#[test]
fn a_fine_tune_is_stored_as_differences_and_restored() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    model(&at("base"), usize::MAX / 4);
    model(&at("tuned"), 16);
    run(home.path(), &["compress", "tuned", "-o", "whole"], 0);
    let whole = json(&run(home.path(), &["inspect", "whole", "--json"], 0));
    let summary = stdout(&run(home.path(), &["compress", "tuned", "-o", "delta", "--base", "base"], 0));
    assert!(summary.ends_with("\n1 tensor stored as differences from base\n"), "{summary}");
    let delta = json(&run(home.path(), &["inspect", "delta", "--json"], 0));
    let bytes = |report: &serde_json::Value| report["stored_bytes"].as_u64().unwrap();
    assert!(bytes(&delta) < bytes(&whole) / 2, "{} and {}", bytes(&delta), bytes(&whole));
    // The base is found next to the bundle, or named.
    run(home.path(), &["verify", "delta"], 0);
    run(home.path(), &["verify", "delta", "--base", "base", "--against", "tuned"], 0);
    run(home.path(), &["decompress", "delta", "-o", "restored", "--base", "base"], 0);
    same(&at("tuned"), &at("restored"));
    let tensor = ["extract", "delta", "--tensor", "x.mlp.up_proj.weight", "-o", "-"];
    let stored = fs::read(at("tuned/model.safetensors")).unwrap();
    assert!(stored.ends_with(&run(home.path(), &tensor, 0).stdout));
    // A bundle is a base as well as its source.
    run(home.path(), &["compress", "base", "-o", "packed", "--profile", "packed"], 0);
    run(home.path(), &["decompress", "delta", "-o", "again", "--base", "packed"], 0);
    same(&at("tuned"), &at("again"));
}

#[test]
fn other_bases_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    model(&at("base"), usize::MAX / 4);
    model(&at("tuned"), 16);
    model(&at("other"), 3);
    run(home.path(), &["compress", "tuned", "-o", "delta", "--base", "base"], 0);
    fails(home.path(), &["decompress", "delta", "-o", "x", "--base", "other"], 2, "base-wrong");
    fails(home.path(), &["verify", "delta", "--base", "other"], 2, "base-wrong");
    fs::rename(at("base"), at("elsewhere")).unwrap();
    let text = fails(home.path(), &["decompress", "delta", "-o", "x"], 2, "base-needed");
    assert!(text.contains("--base"), "{text}");
    run(home.path(), &["decompress", "delta", "-o", "x", "--base", "elsewhere"], 0);
    same(&at("tuned"), &at("x"));
    // A bundle with a base is not a base.
    fails(home.path(), &["compress", "other", "-o", "chain", "--base", "delta"], 2, "base-has-base");
    assert!(!at("chain").exists());
}
