//! `budget`: plans for a given GPU memory.

use std::{collections::BTreeMap, fs};

use serde_json::Value;
use unweight::{
    engine::raw::options::MAX_BATCH,
    format::testing::demo_model::{self, DemoOptions},
};

use crate::harness::{copy, documented, error_code, fails, fixture, json, run, stderr, stdout};

/// `compress` accepts the plan of `budget` and produces the predicted sizes.
#[test]
fn plan_file_gives_the_predicted_sizes() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let ask = ["budget", "model", "--batch", "2", "--context", "128", "--json"];
    let report = json(&run(home.path(), &[&ask[..], &["--memory", "1G", "--plan", "plan.json"]].concat(), 0));
    documented("budget", &report);
    let bytes = |key: &str| report[key].as_u64().unwrap();
    let parts: u64 = ["weight_bytes", "cache_bytes", "working_bytes", "slot_bytes"].map(bytes).iter().sum();
    assert_eq!((bytes("total_bytes"), report["slowdown"].as_f64()), (parts, Some(1.0)));
    let made = json(&run(home.path(), &["compress", "model", "-o", "bundle", "--plan", "plan.json", "--json"], 0));
    let tensors = made["tensors"].as_array().unwrap();
    let stored: u64 = tensors.iter().map(|tensor| tensor["stored_bytes"].as_u64().unwrap()).sum();
    assert!(stored.abs_diff(bytes("weight_bytes")) * 100 < stored, "{stored} for {}", bytes("weight_bytes"));
    // Each tensor has the encoding of its unit; all others are raw.
    let plan: Value = serde_json::from_slice(&fs::read(home.path().join("plan.json")).unwrap()).unwrap();
    let mut encodings: BTreeMap<&str, &str> = BTreeMap::new();
    for rule in plan["rules"].as_array().unwrap() {
        encodings.insert(rule["match"].as_str().unwrap(), rule["encoding"].as_str().unwrap());
    }
    assert!(encodings.values().any(|encoding| *encoding == "packed"));
    for tensor in tensors {
        let expected = encodings.get(tensor["name"].as_str().unwrap()).unwrap_or(&encodings["*"]);
        assert_eq!(tensor["encoding"].as_str().unwrap(), *expected, "{tensor}");
    }
    // The error states the minimum memory, which suffices.
    let few = ["budget", "model", "--batch", "2", "--context", "5", "--memory", "1M"];
    let said = fails(home.path(), &few, 2, "budget-too-small");
    let (least, _) = said.split_once(" bytes; weights").unwrap_or_else(|| panic!("{said}"));
    let least = least.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap();
    run(home.path(), &["budget", "model", "--batch", "2", "--context", "5", "--memory", least], 0);
    let less = (least.parse::<u64>().unwrap() - 1).to_string();
    let less = ["budget", "model", "--batch", "2", "--context", "5", "--memory", &less];
    fails(home.path(), &less, 2, "budget-too-small");
    // The plan's path is checked before any weight is read.
    let nowhere = ["budget", "absent", "--memory", "1G", "--plan", "nowhere/plan.json"];
    let text = fails(home.path(), &nowhere, 2, "path-not-found");
    assert!(text.contains("nowhere"), "{text}");
    // Only a plan file is replaced.
    let text =
        stdout(&run(home.path(), &["budget", "model", "--memory", "1G", "--context", "128", "--arch", "sm_89"], 0));
    let line = text.lines().find(|line| line.starts_with("matmuls of a step at batch 1: ")).expect(&text);
    let words: Vec<&str> = line.split(' ').collect();
    assert!(words[7].parse::<f64>().is_ok() && words[8] == "us,", "{line}");
    assert!(line.contains(" times the fastest plan's; encodings that sm_89 runs, "), "{line}");
    run(home.path(), &["budget", "model", "--memory", "1G", "--context", "128", "--plan", "plan.json"], 0);
    let taken = ["budget", "model", "--memory", "1G", "--plan", "model/config.json"];
    fails(home.path(), &taken, 2, "output-not-replaceable");
    // Errors name options as the user wrote them.
    for option in ["--batch", "--context", "--memory", "--threads"] {
        let text = stderr(&run(home.path(), &["budget", "model", "--max-slowdown", "5%", option, "0"], 2));
        assert!(text.contains(&format!("'{option} <")) && text.contains("'0'"), "{text}");
    }
    for negative in ["-3", "-3%"] {
        let text = stderr(&run(home.path(), &["budget", "model", "--max-slowdown", negative], 2));
        assert!(text.contains(&format!("'{negative}' is not a percentage; write a number")), "{text}");
    }
    // One of the two is required, and both may be given.
    let text = stderr(&run(home.path(), &["budget", "model"], 2));
    assert!(text.contains("<--memory <SIZE>|--max-slowdown <PERCENT>>"), "{text}");
    fails(home.path(), &["budget", "model", "--memory", "1G", "--plan", "/dev/null"], 2, "output-not-replaceable");
    // Encodings that no kernel reads would be packed at load time, so no plan contains them.
    run(home.path(), &["demo", "--dir", "demo", "--size", "16M", "--profile", "packed", "-q"], 0);
    for (arch, compact) in [("sm_90a", true), ("sm_89", false)] {
        let ask = ["budget", "demo/model", "--max-slowdown", "60%", "--batch", "8", "--context", "64", "--arch", arch];
        let report = json(&run(home.path(), &[&ask[..], &["--json"]].concat(), 0));
        let mut groups = report["groups"].as_array().unwrap().iter();
        assert_eq!((groups.any(|group| group["encoding"] == "compact"), &report["arch"]), (compact, &arch.into()));
    }
    fs::remove_file(home.path().join("model/config.json")).unwrap();
    let text = fails(home.path(), &["budget", "model", "--max-slowdown", "5%"], 2, "config-missing");
    assert!(text.contains("model: the model has no config.json\n  help: "), "{text}");
}

/// Errors print sizes with units, and an option without a unit is rejected.
#[test]
fn memory_needs_a_unit() {
    let text = fails(fixture(), &["budget", "model", "--memory", "1M"], 2, "budget-too-small");
    assert!(text.contains("--memory is 1.00 MiB") && text.contains("KV cache"), "{text}");
    let text = stderr(&run(fixture(), &["budget", "model", "--memory", "24"], 2));
    assert!(text.contains("24 bytes, too little for a model"), "{text}");
    let text = stderr(&run(fixture(), &["budget", "model"], 2));
    assert!(text.contains("<--memory <SIZE>|--max-slowdown <PERCENT>>"), "{text}");
}

#[test]
fn kv_cache_is_planned() {
    let model = fixture().join("model");
    let ask = |more: &[&str]| {
        let memory = ["budget", model.to_str().unwrap(), "--memory", "1G", "--batch", "2", "--context", "512"];
        run(std::path::Path::new("."), &[&memory[..], more].concat(), 0)
    };
    let report = |more: &[&str]| json(&ask(&[more, &["--json"]].concat()));
    let (auto, bf16, packed) = (report(&[]), report(&["--kv-cache", "bf16"]), report(&["--kv-cache", "packed"]));
    assert_eq!((&auto, &bf16["kv_cache"]), (&bf16, &"bf16".into()), "memory for the fastest plan by either");
    documented("budget", &packed);
    assert_eq!((&packed["kv_cache"], &packed["cache_tokens"]), (&"packed".into(), &bf16["cache_tokens"]));
    let bytes = |report: &Value| report["cache_token_bytes"].as_u64().unwrap();
    assert!(bytes(&packed) < bytes(&bf16) && bytes(&bf16) * 512 * 2 == bf16["cache_bytes"].as_u64().unwrap());
    // The output states the options to run with.
    let (bf16, packed) = (stdout(&ask(&["--kv-cache", "bf16"])), stdout(&ask(&["--kv-cache", "packed"])));
    assert!(bf16.contains("BF16 KV cache ") && !bf16.contains("--kv-cache"), "{bf16}");
    assert!(
        packed.contains("packed KV cache ")
            && packed.contains("--kv-cache packed --max-batch 2 --context 512 --memory "),
        "{packed}"
    );
    let wrong = ["budget", "model", "--memory", "1G", "--kv-cache", "int8"];
    assert!(stderr(&run(std::path::Path::new("."), &wrong, 2)).contains("auto, packed, bf16"));
}

/// Printed commands run when pasted, whatever the names of model and plan.
#[test]
fn printed_commands_run() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("my model"));
    let ask = ["budget", "my model", "--memory", "1G", "--batch", "2", "--context", "128", "--kv-cache", "packed"];
    let text = stdout(&run(home.path(), &[&ask[..], &["--plan", "it's.json"]].concat(), 0));
    let (_, commands) = text.split_once(":\n  unweight").unwrap_or_else(|| panic!("{text}"));
    let commands = format!("unweight{commands}");
    let mut commands = commands.lines().map(str::trim);
    let program = std::path::Path::new(assert_cmd::cargo::cargo_bin!("unweight")).parent().unwrap();
    let mut paste = |more: &str| {
        let command = commands.next().unwrap_or_else(|| panic!("{text}")).to_owned() + more;
        let mut shell = std::process::Command::new("/bin/sh");
        shell.args(["-c", &command]).current_dir(home.path()).env("PATH", program).output().unwrap()
    };
    assert!(paste("").status.success() && home.path().join("bundle").is_dir(), "{text}");
    // A port in use stops the command after it has parsed its options.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let served = paste(&format!(" --port {}", taken.local_addr().unwrap().port()));
    assert_eq!((served.status.code(), error_code(&served).as_str()), (Some(2), "address-unavailable"), "{text}");
    assert!(text.contains("--kv-cache packed --max-batch 2 --context 128 --memory "), "{text}");
    // Without a plan file, the output says how to get one.
    assert!(stdout(&run(home.path(), &ask, 0)).contains("repeat the command with --plan plan.json"));
}

#[test]
fn commands_have_one_limit_of_sequences() {
    for (command, option) in [("budget", "--batch"), ("generate", "--max-batch"), ("serve", "--max-batch")] {
        let help = stdout(&run(fixture(), &[command, "--help"], 0));
        assert!(help.contains(&format!("1 to {MAX_BATCH}")), "{help}");
        let above = (MAX_BATCH + 1).to_string();
        let refused = stderr(&run(fixture(), &[command, "model", option, &above], 2));
        assert!(refused.contains(&format!("'{option} <N>'")) && refused.contains(&above), "{refused}");
    }
}

/// A model of two small layers.
fn small() -> DemoOptions {
    DemoOptions {
        layers: 2,
        hidden: 256,
        intermediate: 256,
        heads: 4,
        kv_heads: 2,
        vocab: 512,
        ..DemoOptions::default()
    }
}

/// Experts that cannot be packed are planned as BF16, per layer and product.
#[test]
fn plans_experts_that_cannot_be_packed_as_bf16() {
    let home = tempfile::tempdir().unwrap();
    let options = DemoOptions { experts: 3, shards: 1, ..small() };
    demo_model::write(&home.path().join("model"), &options).unwrap();
    let weights = home.path().join("model/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..header_end]).unwrap();
    let offsets = &header["model.layers.1.block_sparse_moe.experts.2.w3.weight"]["data_offsets"];
    let [from, to] = [0, 1].map(|at| header_end + offsets[at].as_u64().unwrap() as usize);
    bytes[from..to].chunks_exact_mut(2).step_by(50).for_each(|weight| weight.fill(0));
    fs::write(&weights, bytes).unwrap();
    let report = json(&run(home.path(), &["budget", "model", "--memory", "1G", "--context", "128", "--json"], 0));
    let groups = report["groups"].as_array().unwrap();
    let layers = |unit: &str, encoding: &str| {
        let group = groups.iter().find(|group| group["unit"] == unit && group["encoding"] == encoding);
        group.map(|group| group["layers"].clone())
    };
    assert_eq!(layers("gate_up", "raw"), Some(vec![1].into()), "{groups:?}");
    assert_eq!(layers("gate_up", "packed"), Some(vec![0].into()), "{groups:?}");
    assert_eq!(layers("down", "packed"), Some(vec![0, 1].into()), "{groups:?}");
}

/// A model that an engine would not load has no plan. Shared weights count once, and experts are packed.
#[test]
fn rejects_models_that_no_engine_loads() {
    let home = tempfile::tempdir().unwrap();
    let write = |name: &str, options: DemoOptions| demo_model::write(&home.path().join(name), &options).unwrap();
    write("mixture", DemoOptions { experts: 3, shards: 1, ..small() });
    let ask = |model: &'static str| ["budget", model, "--memory", "1G", "--context", "128", "--json"];
    run(home.path(), &ask("mixture"), 0);
    // A mixture's MLPs have only one placement.
    run(home.path(), &["compress", "mixture", "-o", "experts", "--profile", "inference", "--quiet"], 0);
    for command in
        [&["tune", "experts"][..], &["kernels", "attach", "experts", "--arch", "sm_90a", "--placement", "stored"]]
    {
        fails(home.path(), command, 2, "experts-without-pipelines");
    }
    // Renumber an expert, so that one is missing.
    let weights = home.path().join("mixture/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let (old, new) = (b"1.block_sparse_moe.experts.2.w1", b"1.block_sparse_moe.experts.7.w1");
    let at = bytes.windows(old.len()).position(|window| window == old).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new);
    fs::write(&weights, bytes).unwrap();
    let refused = fails(home.path(), &ask("mixture"), 2, "model-tensor-missing");
    assert!(refused.contains("'model.layers.1.block_sparse_moe.experts.2.w1.weight'"), "{refused}");
    // The same weights again, in a file that is not loaded.
    write("model", DemoOptions { shards: 1, ..small() });
    let once = json(&run(home.path(), &ask("model"), 0));
    let weights = home.path().join("model/model.safetensors");
    fs::copy(&weights, home.path().join("model/consolidated.safetensors")).unwrap();
    let twice = json(&run(home.path(), &ask("model"), 0));
    assert_eq!((&once["weight_bytes"], &once["groups"]), (&twice["weight_bytes"], &twice["groups"]));
    // The default context does not exceed the model's limit.
    let config = home.path().join("model/config.json");
    let mut text: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    text["max_position_embeddings"] = 512.into();
    fs::write(&config, text.to_string()).unwrap();
    let output = run(home.path(), &["budget", "model", "--memory", "1G", "--json"], 0);
    assert_eq!(json(&output)["context"], 512);
    assert!(stderr(&output).contains("a context of 512"), "{}", stderr(&output));
    let longer = ["budget", "model", "--memory", "1G", "--context", "513"];
    fails(home.path(), &longer, 2, "context-above-model-limit");
}
