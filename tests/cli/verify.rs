//! `verify` finds and names damage.

use std::fs;

use unweight::format::testing::demo_model::{self, DemoOptions};

use crate::harness::{copy, damaged, error_code, fails, fixture, json, run, stderr, stdout, tiny};

#[test]
fn names_the_damaged_file() {
    let home = tempfile::tempdir().unwrap();
    let shard = damaged(home.path());
    let output = run(home.path(), &["verify", "bundle"], 1);
    assert!(stdout(&output).contains(&shard) && stdout(&output).contains(": expected digest "), "{}", stdout(&output));
    assert!(stderr(&output).starts_with("error[bundle-damaged]: bundle: 1 problem\n  help: "), "{}", stderr(&output));
    // With --json the only output is the report.
    let report = json(&run(home.path(), &["verify", "bundle", "--json"], 1));
    assert_eq!(report["problems"][0]["file"], shard);
    assert_eq!(report["problems"][0]["code"], "bundle-content-mismatch");
    // A damaged bundle is not decompressed, and leaves no output.
    fails(home.path(), &["decompress", "bundle", "-o", "restored"], 1, "bundle-content-mismatch");
    assert!(!home.path().join("restored").exists());
    // Verification against another source.
    let other = tempfile::tempdir().unwrap();
    demo_model::write(&other.path().join("model"), &DemoOptions { seed: 9, ..tiny() }).unwrap();
    let bundle = fixture().join("bundle");
    let against = ["verify", bundle.to_str().unwrap(), "--against", "model"];
    let output = run(other.path(), &against, 1);
    assert_eq!(error_code(&output), "source-differs");
    assert!(stdout(&output).contains(": sound; the source differs: "), "{}", stdout(&output));
    for word in ["damaged", "truncated", "fetch"] {
        assert!(!stdout(&output).contains(word) && !stderr(&output).contains(word), "{word}: {}", stdout(&output));
    }
    let report = json(&run(other.path(), &[&against[..], &["--json"]].concat(), 1));
    assert!(report["problems"].as_array().unwrap().iter().all(|problem| problem["in_source"] == true), "{report}");
    let text = fails(other.path(), &["verify", bundle.to_str().unwrap(), "--against", "-"], 2, "usage");
    assert!(text.contains("--against takes no archive\n  help: unpack it, and give the directory\n"), "{text}");
}

/// `--quick` checks only headers, so it does not find damaged weights.
#[test]
fn quick_reads_no_weights() {
    let home = tempfile::tempdir().unwrap();
    let shard = damaged(home.path());
    let report = json(&run(home.path(), &["verify", "bundle", "--quick", "--json"], 0));
    assert_eq!((&report["quick"], &report["tensors"]), (&true.into(), &0.into()));
    let all = json(&run(home.path(), &["verify", "bundle", "--json"], 1));
    assert_eq!(all["quick"], false);
    assert!(report["stored_bytes"].as_u64().unwrap() * 10 < all["stored_bytes"].as_u64().unwrap());
    assert!(stdout(&run(home.path(), &["verify", "bundle", "--quick"], 0)).contains("weights were not read"));
    // It reads headers and checks the presence and size of every file.
    let path = home.path().join("bundle").join(&shard);
    let sound = fs::read(&path).unwrap();
    let mut bytes = sound.clone();
    bytes[20] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let quick = |more: &[&str]| {
        let arguments = [&["verify", "bundle", "--quick", "--json"], more].concat();
        let report = json(&run(home.path(), &arguments, 1));
        let problem = &report["problems"][0];
        ["code", "file"].map(|key| problem[key].as_str().unwrap().to_owned())
    };
    assert_eq!(quick(&[]), ["bundle-content-mismatch", &shard]);
    fs::write(&path, &sound[..sound.len() - 1]).unwrap();
    assert_eq!(quick(&[]), ["bundle-file-size-mismatch", &shard]);
    fs::write(&path, &sound).unwrap();
    fs::write(home.path().join("bundle/stray"), "").unwrap();
    assert_eq!(quick(&[]), ["bundle-file-unlisted", "stray"]);
    fs::remove_file(home.path().join("bundle/stray")).unwrap();
    // Against a source it compares names and sizes.
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["verify", "bundle", "--quick", "--against", "model"], 0);
    let config = home.path().join("model/config.json");
    fs::write(&config, [fs::read(&config).unwrap(), b" ".to_vec()].concat()).unwrap();
    assert_eq!(quick(&["--against", "model"])[1], "config.json");
}
