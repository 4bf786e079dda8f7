//! Model cards.

use std::fs;

use crate::harness::{copy, damaged, documented, fails, fixture, json, run, same, stderr, stdout};

#[test]
fn a_card_states_what_the_bundle_has() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let source_card = "---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- chat\n---\n# Theirs\n";
    fs::write(home.path().join("model/README.md"), source_card).unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle", "--profile", "packed"], 0);
    let arguments = ["card", "bundle", "--base-model", "org/tiny", "--repository", "me/tiny", "--against", "model"];
    let report = json(&run(home.path(), &[&arguments[..], &["--json"]].concat(), 0));
    documented("card", &report);
    assert_eq!((&report["license"], &report["base_model"]), (&"apache-2.0".into(), &"org/tiny".into()));
    let card = fs::read_to_string(home.path().join("bundle/README.md")).unwrap();
    let front = card.split("---\n").nth(1).unwrap();
    assert_eq!(
        front,
        "base_model: org/tiny\nbase_model_relation: quantized\nlibrary_name: unweight\nlicense: apache-2.0\n\
         language:\n- en\ntags:\n- unweight\n- lossless\n- compression\n"
    );
    let inspected = json(&run(home.path(), &["inspect", "bundle", "--json"], 0));
    let digest = inspected["manifest_digest"].as_str().unwrap();
    let stored: u64 =
        inspected["tensors"].as_array().unwrap().iter().map(|t| t["stored_bytes"].as_u64().unwrap()).sum();
    if cfg!(feature = "gpu") {
        assert_eq!(report["weight_bytes"], stored);
    }
    let tensors = format!("decoded all {} tensors", inspected["tensors"].as_array().unwrap().len());
    for part in [digest, &tensors, "all files with the source", "unweight generate me/tiny", "`packed`"] {
        assert!(card.contains(part), "{part}: {card}");
    }
    assert!(!card.contains("| 0.") && card.contains("| all files | 1."), "sizes without a fitting unit: {card}");
    // The source's card keeps its bytes; the bundle stays sound and restores it.
    assert_eq!(fs::read_to_string(home.path().join("bundle/README.md.source")).unwrap(), source_card);
    run(home.path(), &["verify", "bundle", "--against", "model"], 0);
    run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&home.path().join("model"), &home.path().join("restored"));
    assert_eq!(stdout(&run(home.path(), &["extract", "bundle", "--file", "README.md", "-o", "-"], 0)), source_card);
    // Writing it again changes nothing; a flipped bit of the source's card is found.
    run(home.path(), &arguments, 0);
    assert_eq!(fs::read_to_string(home.path().join("bundle/README.md")).unwrap(), card);
    fs::write(home.path().join("bundle/README.md.source"), source_card.replace("apache", "apachf")).unwrap();
    fails(home.path(), &["verify", "bundle"], 1, "bundle-damaged");
}

/// The report is a record of `unweight-bench decode`, with the digest of this bundle.
#[test]
fn a_card_has_the_speeds_of_a_report() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("bundle"), &home.path().join("bundle"));
    let record = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/records/2026-11-26/decode-llama-3.1-8b.json");
    // The record has random weights.
    fails(home.path(), &["card", "bundle", "--speed", record], 2, "speed-report-invalid");
    let digest = json(&run(home.path(), &["inspect", "bundle", "--json"], 0))["manifest_digest"].clone();
    let mut report: serde_json::Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    report["manifest_digest"] = digest;
    fs::write(home.path().join("speed.json"), report.to_string()).unwrap();
    let card = stdout(&run(home.path(), &["card", "bundle", "-o", "-", "--speed", "speed.json"], 0));
    let section = card.split("## Speed\n\n").nth(1).unwrap_or_else(|| panic!("{card}"));
    let expected = "Tokens per second, decoding with 1024 tokens of context on NVIDIA H200, Unweight 0.1.0.\n\n\
                    | sequences | packed | bf16 |\n|---:|---:|---:|\n| 1 | 325 | 231 |\n";
    assert!(section.starts_with(expected), "{section}");
    assert_eq!(section.lines().take_while(|line| !line.starts_with('#')).filter(|l| l.starts_with("| ")).count(), 8);
    for text in ["", "{}", "{\"command\": \"decode\"}", &fs::read_to_string(record).unwrap().replace("decode", "x")] {
        fs::write(home.path().join("speed.json"), text).unwrap();
        fails(home.path(), &["card", "bundle", "--speed", "speed.json"], 2, "speed-report-invalid");
    }
    fails(home.path(), &["card", "bundle", "--speed", "absent.json"], 2, "path-not-found");
    assert!(!home.path().join("bundle/README.md").exists());
}

#[test]
fn cards_go_elsewhere_and_replace_only_cards() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("bundle"), &home.path().join("bundle"));
    let output = run(home.path(), &["card", "bundle", "-o", "-"], 0);
    assert!(stdout(&output).starts_with("---\nlibrary_name: unweight\n") && stdout(&output).contains("# bundle\n"));
    same(&fixture().join("bundle"), &home.path().join("bundle"));
    let output = run(home.path(), &["card", "bundle"], 0);
    assert!(stderr(&output).contains("--base-model"), "{}", stderr(&output));
    // The fixture has no README.md of its own: the card is not an extra file.
    run(home.path(), &["verify", "bundle"], 0);
    fs::write(home.path().join("bundle/README.md"), "mine").unwrap();
    fails(home.path(), &["card", "bundle"], 2, "output-exists");
    run(home.path(), &["card", "bundle", "--force"], 0);
    fails(home.path(), &["card", "bundle", "--base-model", "a\nb: c"], 2, "usage");
    let home = tempfile::tempdir().unwrap();
    let shard = damaged(home.path());
    let message = fails(home.path(), &["card", "bundle"], 1, "bundle-damaged");
    assert!(message.contains(&shard) && !home.path().join("bundle/README.md").exists(), "{message}");
}
