//! `plan`: plan files and `--compare`.

use std::fs;

use serde_json::Value;

use crate::harness::{copy, fails, fixture, json, run, stdout};

/// The documented example behaves as documented.
#[test]
fn follows_the_documented_plan_file() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let page = include_str!("../../docs/reference/plan-files.md");
    let (_, example) = page.split_once("```json\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    fs::write(home.path().join("rules.json"), example).unwrap();
    let report = json(&run(home.path(), &["plan", "model", "--plan", "rules.json", "--exclude", "*", "--json"], 0));
    let encoding = |name: &str| {
        let tensors = report["tensors"].as_array().unwrap();
        tensors.iter().find(|tensor| tensor["name"] == name).unwrap()["encoding"].as_str().unwrap().to_owned()
    };
    assert_eq!(encoding("model.layers.0.mlp.up_proj.weight"), "raw");
    assert_eq!(encoding("model.layers.1.mlp.up_proj.weight"), "huffman");
    assert_eq!(encoding("model.layers.1.self_attn.q_proj.weight"), "palette");
    assert_eq!(encoding("model.norm.weight"), "raw");
    // Documented errors are errors.
    let more = example.replacen("\"match\"", "\"note\": 1, \"match\"", 1);
    let other = example.replacen("model.layers.0.*", "model.layers.99.*", 1);
    for (text, why) in [(more, "note"), (other, "'model.layers.99.*'")] {
        fs::write(home.path().join("rules.json"), text).unwrap();
        let message = fails(home.path(), &["plan", "model", "--plan", "rules.json"], 2, "plan-file-invalid");
        assert!(message.contains(why), "{message}");
    }
    for other in ["/dev/null", "model"] {
        let message = fails(home.path(), &["plan", "model", "--plan", other], 2, "plan-file-invalid");
        assert!(message.contains("not a regular file") && message.contains("help: a plan file is {"), "{message}");
    }
}

/// Small models are mostly metadata, so manifest, headers and index are predicted as well.
#[test]
fn predicts_the_size_of_small_bundles() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    for profile in ["distribution", "palette", "packed", "compact", "archive"] {
        let plan = json(&run(home.path(), &["plan", "model", "--json", "--profile", profile], 0));
        let made = ["compress", "model", "-o", profile, "--json", "--profile", profile];
        let made = json(&run(home.path(), &made, 0));
        let [plan, made] = [plan, made].map(|report| report["stored_bytes"].as_f64().unwrap());
        assert!((plan / made - 1.0).abs() < 0.02, "{profile}: {plan} bytes predicted, {made} made");
    }
}

#[test]
fn compare_agrees_with_each_plan() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let report = json(&run(home.path(), &["plan", "model", "--compare", "--json"], 0));
    let rows = report["rows"].as_array().unwrap();
    // Two profiles with ten limits each, and four without Huffman codes.
    assert_eq!(rows.len(), 24);
    for (profile, limit) in
        [("distribution", 6), ("distribution", 15), ("inference", 7), ("palette", 7), ("compact", 7), ("archive", 7)]
    {
        let plan = ["plan", "model", "--json", "--profile", profile, "--code-limit", &limit.to_string()];
        let plan = json(&run(home.path(), &plan, 0));
        let of_profile = |row: &&Value| row["profile"] == profile;
        let own = |row: &&Value| row["code_limit"] == limit || row["code_limit"].is_null();
        let row = rows.iter().filter(of_profile).find(own).unwrap();
        assert_eq!(row["stored_bytes"], plan["stored_bytes"], "{profile} {limit}");
        let sum =
            |key: &str| row["roles"].as_array().unwrap().iter().map(|role| role[key].as_u64().unwrap()).sum::<u64>();
        let tensors = plan["tensors"].as_array().unwrap();
        assert_eq!(sum("tensors"), tensors.len() as u64);
        assert_eq!(sum("stored_bytes"), tensors.iter().map(|t| t["stored_bytes"].as_u64().unwrap()).sum::<u64>());
    }
    let table = stdout(&run(home.path(), &["plan", "model", "--compare", "--scope", "mlp"], 0));
    let rows: Vec<&str> = table.lines().skip(2).collect();
    assert!(rows.windows(2).all(|pair| pair[0] != pair[1]), "{table}");
    let sizes = |row: &str| row.split_whitespace().skip(3).collect::<Vec<_>>().join(" ");
    for pair in rows.windows(2).filter(|pair| pair[0].split(' ').next() == pair[1].split(' ').next()) {
        assert_ne!(sizes(pair[0]), sizes(pair[1]), "rows of equal sizes are one: {table}");
    }
    assert!(table.contains("(source)") && table.contains("attention") && !table.contains(" all  "), "{table}");
    run(home.path(), &["plan", "model", "--compare", "--profile", "palette"], 2);
    fails(home.path(), &["plan", "nowhere", "--compare"], 2, "source-not-found");
}
