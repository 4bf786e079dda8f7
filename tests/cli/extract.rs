//! `extract`: the original bytes of a tensor or file.

use std::fs;

use crate::harness::{damaged, fails, fixture, json, one_matrix, run, stderr};

#[test]
fn writes_the_original_bytes_of_a_tensor() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("model")).unwrap();
    one_matrix(&home.path().join("model/a.safetensors"), "x.mlp.up_proj.weight");
    one_matrix(&home.path().join("model/b.safetensors"), "x.mlp.up_proj.weight");
    run(home.path(), &["compress", "model", "-o", "bundle"], 0);
    run(home.path(), &["verify", "bundle", "--ram", "1M", "--threads", "1"], 0);
    let weights = unweight::format::testing::Weights::TRAINED.bytes(4096, 1);
    let extract = ["extract", "bundle", "--tensor", "x.mlp.up_proj.weight", "-o"];
    // Two files contain the tensor, so the user must choose one.
    let text = fails(home.path(), &[&extract[..], &["x.bin"]].concat(), 2, "tensor-ambiguous");
    assert!(text.contains("a.safetensors, b.safetensors"), "{text}");
    run(home.path(), &[&extract[..], &["x.bin", "--file", "b.safetensors"]].concat(), 0);
    assert!(fs::read(home.path().join("x.bin")).unwrap() == weights);
    fails(home.path(), &[&extract[..], &["x.bin", "--file", "b.safetensors"]].concat(), 2, "output-exists");
    let output = run(home.path(), &[&extract[..], &["-", "--file", "a.safetensors"]].concat(), 0);
    assert!(output.stdout == weights);
}

#[test]
fn writes_the_original_bytes_of_a_file() {
    let home = tempfile::tempdir().unwrap();
    let model = fixture().join("model");
    let arguments = ["compress", model.to_str().unwrap(), "-o", "bundle", "--sha256"];
    run(home.path(), &arguments, 0);
    for entry in fs::read_dir(&model).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let original = fs::read(model.join(&name)).unwrap();
        let output = run(home.path(), &["extract", "bundle", "--file", &name, "-o", "-", "--ram", "1M"], 0);
        assert!(output.stdout == original, "{name}");
        let report = json(&run(home.path(), &["extract", "bundle", "--file", &name, "-o", &name, "--json"], 0));
        assert!(fs::read(home.path().join(&name)).unwrap() == original, "{name}");
        assert_eq!((&report["bytes"], &report["file"]), (&original.len().into(), &name.as_str().into()));
        assert!(report["sha256"].is_string());
        // An existing file is kept.
        fails(home.path(), &["extract", "bundle", "--file", &name, "-o", &name], 2, "output-exists");
    }
    let text = fails(home.path(), &["extract", "bundle", "--file", "nothing.json", "-o", "x"], 2, "file-not-found");
    assert!(text.contains("'nothing.json'"), "{text}");
    assert!(stderr(&run(home.path(), &["extract", "bundle", "-o", "x"], 2)).contains("--tensor"));
    let text = fails(home.path(), &["extract", "bundle", "--file", "config.json", "-o", "no/F"], 2, "path-not-found");
    assert!(text.contains("no: no such directory") && !text.contains(".unweight-"), "{text}");
    let text = fails(home.path(), &["extract", "bundle", "--tensor", "no", "-o", "x"], 2, "tensor-not-found");
    assert!(text.contains("unweight inspect"), "{text}");
    // A damaged shard leaves no output file.
    let home = tempfile::tempdir().unwrap();
    let shard = damaged(home.path());
    fails(home.path(), &["extract", "bundle", "--file", &shard, "-o", "x"], 1, "bundle-content-mismatch");
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1, "only the bundle");
}
