//! `compress`: options, profiles, warnings.

use std::{collections::BTreeMap, fs};

use unweight::format::testing::demo_model::{self, DemoOptions};

use crate::harness::{copy, documented, fails, fixture, json, one_matrix, run, same, shards, stderr, stdout, tiny};

#[test]
fn options_select_encodings() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let encodings = |arguments: &[&str]| {
        let mut all = vec!["plan", "model", "--json"];
        all.extend(arguments);
        let report = json(&run(home.path(), &all, 0));
        let mut found = BTreeMap::new();
        for tensor in report["tensors"].as_array().unwrap() {
            *found.entry(tensor["encoding"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        }
        found
    };
    let all = encodings(&[]);
    assert!(all["huffman"] > 0 && !all.contains_key("palette"));
    assert!(encodings(&["--scope", "mlp"])["huffman"] < all["huffman"]);
    assert_eq!(encodings(&["--exclude", "*"]).keys().collect::<Vec<_>>(), ["raw"]);
    assert!(encodings(&["--include", "*gate_proj*"])["huffman"] < all["huffman"]);
    assert_eq!(encodings(&["--profile", "palette"])["palette"], all["huffman"]);
    let resident = encodings(&["--profile", "packed"]);
    assert!(resident["packed"] > 0 && !resident.contains_key("huffman") && !resident.contains_key("palette"));
    let inference = encodings(&["--profile", "inference"]);
    assert!(inference["huffman"] > 0 && inference["palette"] > 0);
    fs::write(home.path().join("rules.json"), r#"{"rules": [{"match": "*", "encoding": "raw"}]}"#).unwrap();
    assert_eq!(encodings(&["--plan", "rules.json"]).keys().collect::<Vec<_>>(), ["raw"]);
}

/// Every table states why a tensor is not packed, and the bundle round-trips.
#[test]
fn packed_profile_reports_tensors_that_do_not_fit() {
    let home = tempfile::tempdir().unwrap();
    demo_model::write(&home.path().join("model"), &DemoOptions { intermediate: 330, ..tiny() }).unwrap();
    let arguments = ["compress", "model", "-o", "bundle", "--profile", "packed", "--verify", "full"];
    assert!(stdout(&run(home.path(), &arguments, 0)).contains("packed"));
    for arguments in [&["plan", "model", "--profile", "packed"][..], &["inspect", "bundle"]] {
        let table = stdout(&run(home.path(), arguments, 0));
        let line = |name: &str| table.lines().find(|line| line.contains(name)).unwrap().to_owned();
        let gate = line("model.layers.1.mlp.gate_proj.weight");
        assert!(
            gate.contains("palette") && gate.contains("not packed: rows or columns are not a multiple of 64"),
            "{gate}"
        );
        let q = line("model.layers.1.self_attn.q_proj.weight");
        assert!(q.contains("packed") && !q.contains("not packed"), "{q}");
    }
    let csv = stdout(&run(home.path(), &["inspect", "bundle", "--tensor", "*.1.mlp.gate*", "--csv"], 0));
    assert!(csv.contains(",palette,not packed: rows or columns are not a multiple of 64,"), "{csv}");
    run(home.path(), &["inspect", "bundle", "--plot", "ratio", "--svg", "plot.svg"], 0);
    assert!(fs::read_to_string(home.path().join("plot.svg")).unwrap().contains("packed"));
    run(home.path(), &["verify", "bundle", "--against", "model"], 0);
    run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&home.path().join("model"), &home.path().join("restored"));
}

#[test]
fn bytes_do_not_depend_on_threads_or_memory() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["compress", "model", "-o", "one", "--threads", "1", "--ram", "1M"], 0);
    run(home.path(), &["compress", "model", "-o", "four", "--threads", "4"], 0);
    same(&home.path().join("one"), &home.path().join("four"));
}

#[test]
fn warns_when_nothing_is_compressed() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("i16")).unwrap();
    one_matrix(&home.path().join("i16/a.safetensors"), "model.layers.0.mlp.up_proj.weight");
    let path = home.path().join("i16/a.safetensors");
    let bytes = fs::read(&path).unwrap();
    let at = bytes.windows(6).position(|window| window == b"\"BF16\"").unwrap();
    // The dtype is one byte shorter; a space replaces it.
    let header = [&bytes[..at], b"\"I16\" ", &bytes[at + 6..]].concat();
    copy(&fixture().join("model"), &home.path().join("model"));
    fs::write(&path, header).unwrap();
    let cases: [(&[&str], &str); 4] = [
        (&["compress", "i16", "-o", "a"], "BF16, F16, F32 and FP8 are compressed"),
        (&["plan", "i16"], "BF16, F16, F32 and FP8 are compressed"),
        (&["compress", "model", "-o", "b", "--include", "nothing"], "matches --include"),
        (&["compress", "model", "-o", "c", "--exclude", "*"], "--exclude matches"),
    ];
    for (arguments, help) in cases {
        let output = run(home.path(), arguments, 0);
        let text = stderr(&output);
        let verb = if arguments[0] == "plan" { "would be" } else { "was" };
        assert!(text.contains(&format!("warning: nothing {verb} compressed: ")), "{arguments:?}: {text}");
        let next = text.lines().find_map(|line| line.strip_prefix("  help: "));
        assert!(next.is_some_and(|next| next.contains(help)), "{arguments:?}: {text}");
    }
    let report = json(&run(home.path(), &["compress", "i16", "-o", "d", "--json"], 0));
    assert_eq!(report["coded_tensors"], 0);
    assert!(report["saved_bytes"].as_i64().unwrap() < 0);
    let output = run(home.path(), &["compress", "model", "-o", "e", "--json"], 0);
    assert!(json(&output)["coded_tensors"].as_u64().unwrap() > 0 && !stderr(&output).contains("warning"));
    assert!(json(&output)["saved_bytes"].as_i64().unwrap() > 0);
}

#[test]
fn skip_leaves_out_files() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    copy(&fixture().join("model"), &model);
    fs::create_dir_all(model.join(".git/objects")).unwrap();
    for name in [".git/objects/a", ".git/objects/b"] {
        fs::write(model.join(name), vec![7; 600 << 10]).unwrap();
    }
    fs::write(model.join("pytorch_model.bin"), vec![7; 2 << 20]).unwrap();
    // A bundle cannot contain this link; excluded, it is not even looked at.
    std::os::unix::fs::symlink("nowhere", model.join(".git/dangling")).unwrap();
    let text = fails(home.path(), &["compress", "model", "-o", "bundle"], 2, "path-not-found");
    assert!(text.contains("dangling"), "{text}");
    fs::remove_file(model.join(".git/dangling")).unwrap();
    for arguments in [&["plan", "model"][..], &["compress", "model", "-o", "all"]] {
        let text = stderr(&run(home.path(), arguments, 0));
        assert!(text.contains("pytorch_model.bin (2.00 MiB), .git (1.17 MiB)"), "{text}");
        assert!(text.contains("--skip '*.bin'"), "{text}");
    }
    let report = json(&run(home.path(), &["plan", "model", "--json", "--skip", "*.bin"], 0));
    assert_eq!(report["large_copies"], serde_json::json!([{ "name": ".git", "bytes": 2 * (600 << 10) }]));
    std::os::unix::fs::symlink("nowhere", model.join(".git/dangling")).unwrap();
    let output = run(home.path(), &["compress", "model", "-o", "less", "--skip", "*.bin", "--skip", ".git"], 0);
    assert_eq!(stderr(&output), "");
    run(home.path(), &["decompress", "less", "-o", "restored"], 0);
    same(&fixture().join("model"), &home.path().join("restored"));
    let against = ["verify", "less", "--against", "model"];
    run(home.path(), &[&against[..], &["--skip", "*.bin", "--skip", ".git"]].concat(), 0);
    let report = json(&run(home.path(), &[&against[..], &["--skip", ".git", "--json"]].concat(), 1));
    let problem = &report["problems"][0];
    assert_eq!(
        (&problem["file"], &problem["code"]),
        (&"pytorch_model.bin".into(), &"source-file-not-in-bundle".into())
    );
    // Weights next to other files are never left out by default.
    run(home.path(), &["compress", "model", "-o", "weights", "--skip", "*"], 0);
    assert_eq!(shards(&home.path().join("weights")).len(), 2);
    assert!(!home.path().join("weights/config.json").exists());
}

/// A model whose configuration names its weights file cannot be marked as a bundle.
#[test]
fn reports_configs_that_it_does_not_mark() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["compress", "model", "-o", "marked"], 0);
    let own = fs::read_to_string(home.path().join("marked/config.json")).unwrap();
    assert!(own.contains("\"transformers_weights\": \"unweight.json\""), "{own}");
    let config = home.path().join("model/config.json");
    let own = "{\"transformers_weights\": \"model.safetensors\",";
    let text = fs::read_to_string(&config).unwrap().replacen('{', own, 1);
    fs::write(&config, text).unwrap();
    for arguments in [&["plan", "model"][..], &["compress", "model", "-o", "bundle"]] {
        let text = stderr(&run(home.path(), arguments, 0));
        assert!(
            text.contains("config.json is copied unchanged (it already has the key transformers_weights)"),
            "{text}"
        );
    }
    let report = json(&run(home.path(), &["plan", "model", "--json"], 0));
    assert_eq!(report["unmarked_configs"][0]["name"], "config.json");
    documented("plan", &report);
    assert!(fs::read(&config).unwrap() == fs::read(home.path().join("bundle/config.json")).unwrap());
}

#[test]
fn says_that_a_source_is_a_bundle() {
    for command in [&["compress", "bundle", "-o", "out"][..], &["plan", "bundle"]] {
        let text = fails(fixture(), command, 2, "source-is-bundle");
        assert!(text.contains("unweight decompress"), "{text}");
    }
}

#[test]
fn force_does_not_replace_links_or_files() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    fs::create_dir(home.path().join("empty")).unwrap();
    std::os::unix::fs::symlink("empty", home.path().join("link")).unwrap();
    fs::write(home.path().join("file"), "").unwrap();
    for (output, why) in [("link", "link: a symbolic link"), ("file", "file: a file")] {
        let text = fails(home.path(), &["compress", "model", "-o", output, "--force"], 2, "file-not-storable");
        assert!(text.contains(why), "{text}");
    }
}
