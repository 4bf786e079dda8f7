//! Certificates.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use serde_json::Value;
use sha2::Digest;

use crate::harness::{copy, documented, fails, fixture, json, one_matrix, run, shards, stderr, stdout, unweight};

/// The field with the certificate's own digest.
const OWN: &str = "\"certificate_sha256\": \"";

/// Changes a certificate, and makes its digest anew.
fn forge(from: &Path, to: &Path, change: impl Fn(&str) -> String) {
    let text = change(&fs::read_to_string(from).unwrap());
    let (before, after) = text.split_once(OWN).unwrap();
    let with = |digest: &str| format!("{before}{OWN}{digest}{}", &after[64..]);
    fs::write(to, with(&sha256(with(&"0".repeat(64)).as_bytes()))).unwrap();
}

fn sha256(bytes: &[u8]) -> String {
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_certificate_has_the_digests_of_every_file_and_tensor() {
    let (home, fixture) = (tempfile::tempdir().unwrap(), fixture());
    let [model, bundle] = ["model", "bundle"].map(|name| fixture.join(name).to_str().unwrap().to_owned());
    let report = json(&run(home.path(), &["prove", &model, &bundle, "--prompts", "2", "--json"], 0));
    documented("prove", &report);
    let text = fs::read(home.path().join("certificate.json")).unwrap();
    let certificate: Value = serde_json::from_slice(&text).unwrap();
    for file in certificate["source_files"].as_array().unwrap() {
        let bytes = fs::read(fixture.join("model").join(file["name"].as_str().unwrap())).unwrap();
        assert_eq!((&file["sha256"], &file["bytes"]), (&sha256(&bytes).into(), &bytes.len().into()));
    }
    assert_eq!(certificate["source_files"].as_array().unwrap().len(), fs::read_dir(&model).unwrap().count());
    for file in certificate["bundle_files"].as_array().unwrap() {
        let bytes = fs::read(fixture.join("bundle").join(file["name"].as_str().unwrap())).unwrap();
        assert_eq!(file["sha256"], sha256(&bytes));
    }
    assert_eq!(certificate["bundle_files"].as_array().unwrap().len(), fs::read_dir(&bundle).unwrap().count());
    let tensors = certificate["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), report["tensors"].as_u64().unwrap() as usize);
    for tensor in tensors {
        let bytes = run(home.path(), &["extract", &bundle, "--tensor", tensor["name"].as_str().unwrap(), "-o", "-"], 0);
        assert_eq!(tensor["sha256"], sha256(&bytes.stdout), "{tensor}");
    }
    let has_logits = cfg!(feature = "gpu");
    if has_logits {
        let logits = &certificate["logits"];
        assert_eq!((&logits["device"], logits["prompts"].as_array().unwrap().len()), (&"cpu-reference".into(), 2));
        assert_ne!(logits["prompts"][0]["sha256"], logits["prompts"][1]["sha256"]);
    }
    // The same again, byte for byte; then the checks.
    run(home.path(), &["prove", &model, &bundle, "--prompts", "2", "-o", "again.json"], 0);
    assert!(fs::read(home.path().join("again.json")).unwrap() == text);
    fs::write(home.path().join("again.json"), "mine").unwrap();
    let again = ["prove", &model, &bundle, "--device", "none", "-o", "again.json"];
    fails(home.path(), &again, 2, "output-exists");
    assert_eq!(fs::read(home.path().join("again.json")).unwrap(), b"mine");
    run(home.path(), &[&again[..], &["--force"]].concat(), 0);
    run(home.path(), &["prove", "--check", "again.json"], 0);
    run(home.path(), &["prove", "--check", "certificate.json"], 0);
    let report = json(&run(home.path(), &["prove", "--check", "certificate.json", &bundle, "--json"], 0));
    assert_eq!((&report["logits_compared"], &report["source_compared"]), (&has_logits.into(), &false.into()));
    let report = json(&run(home.path(), &["prove", "--check", "certificate.json", &model, &bundle, "--json"], 0));
    assert_eq!((&report["bundle_compared"], &report["source_compared"]), (&true.into(), &true.into()));
    fs::create_dir(home.path().join("one")).unwrap();
    one_matrix(&home.path().join("one/model.safetensors"), "x.mlp.up_proj.weight");
    run(home.path(), &["compress", "one", "-o", "coded"], 0);
    let summary = stdout(&run(home.path(), &["prove", "one", "coded", "--device", "none", "-o", "one.json"], 0));
    assert!(summary.starts_with("one.json: 1 file, 1 tensor, not signed: "), "{summary}");
    for arguments in [&["prove"][..], &["prove", &model], &["prove", &model, &bundle, "--check", "c", "--sign", "k"]] {
        fails_with_usage(home.path(), arguments);
    }
}

fn fails_with_usage(home: &Path, arguments: &[&str]) {
    let report = json(&run(home, &[arguments, &["--json"]].concat(), 2));
    assert_eq!(report["error"]["code"], "usage", "{arguments:?}");
}

#[test]
fn a_changed_bit_is_refused() {
    let home = tempfile::tempdir().unwrap();
    for name in ["model", "bundle"] {
        copy(&fixture().join(name), &home.path().join(name));
    }
    run(home.path(), &["prove", "model", "bundle", "--device", "none"], 0);
    let flip = |file: &Path, at: usize| {
        let mut bytes = fs::read(file).unwrap();
        let at = at.min(bytes.len() - 1);
        bytes[at] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    let check = &["prove", "--check", "certificate.json", "model", "bundle"];
    let certificate = home.path().join("certificate.json");
    let length = fs::metadata(&certificate).unwrap().len() as usize;
    for at in (0..length).step_by(length / 7) {
        flip(&certificate, at);
        fails(home.path(), check, 1, "certificate-invalid");
        flip(&certificate, at);
    }
    run(home.path(), check, 0);
    // The source: weights, header, a small file, another file.
    let shard = shards(&home.path().join("model"))[0].clone();
    let length = fs::metadata(&shard).unwrap().len() as usize;
    for (file, at) in [(shard.clone(), length - 1), (shard.clone(), 20), (home.path().join("model/config.json"), 3)] {
        flip(&file, at);
        fails(home.path(), check, 1, "source-differs");
        fails(home.path(), &["prove", "model", "bundle", "-o", "new.json"], 1, "source-differs");
        assert!(!home.path().join("new.json").exists());
        flip(&file, at);
    }
    fs::write(home.path().join("model/more.txt"), "x").unwrap();
    fails(home.path(), &["prove", "model", "bundle", "-o", "new.json"], 1, "source-differs");
    fs::remove_file(home.path().join("model/more.txt")).unwrap();
    // The bundle.
    let shard = shards(&home.path().join("bundle"))[0].clone();
    let length = fs::metadata(&shard).unwrap().len() as usize;
    flip(&shard, length - 100);
    let message = fails(home.path(), &["prove", "--check", "certificate.json", "bundle"], 1, "bundle-content-mismatch");
    assert!(message.contains(shard.file_name().unwrap().to_str().unwrap()), "{message}");
    flip(&shard, length - 100);
    // Another bundle of the same model.
    run(home.path(), &["compress", "model", "-o", "other", "--profile", "packed"], 0);
    let text = fails(home.path(), &["prove", "--check", "certificate.json", "other"], 1, "certificate-mismatch");
    assert!(
        text.contains(": the bundle's manifest digest is ") && text.contains(", but the certificate is for "),
        "{text}"
    );
    // A certificate whose digest was made anew, with one changed digit of a tensor.
    forge(&certificate, &certificate, |text| {
        let at = text.rfind("\"sha256\": \"").unwrap() + "\"sha256\": \"".len();
        let digit = if &text[at..=at] == "0" { "1" } else { "0" };
        format!("{}{digit}{}", &text[..at], &text[at + 1..])
    });
    run(home.path(), &["prove", "--check", "certificate.json"], 0);
    fails(home.path(), &["prove", "--check", "certificate.json", "bundle"], 1, "certificate-mismatch");
}

#[test]
fn signatures_prove_who_compared() {
    let (home, fixture) = (tempfile::tempdir().unwrap(), fixture());
    let [model, bundle] = ["model", "bundle"].map(|name| fixture.join(name).to_str().unwrap().to_owned());
    for name in ["mine", "theirs"] {
        let keys = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
        fs::write(home.path().join(format!("{name}.key")), keys.sk.to_box(None).unwrap().to_string()).unwrap();
        fs::write(home.path().join(format!("{name}.pub")), keys.pk.to_box().unwrap().into_string()).unwrap();
    }
    run(home.path(), &["prove", &model, &bundle, "--device", "none", "--sign", "mine.key"], 0);
    let check = |key: &str, status: i32| {
        run(home.path(), &["prove", "--check", "certificate.json", "--key", key, "--json"], status)
    };
    assert_eq!(json(&check("mine.pub", 0))["signed"], true);
    // Without a key, the signature proves nothing.
    let output = run(home.path(), &["prove", "--check", "certificate.json"], 0);
    assert!(stdout(&output).contains(", signature not checked: "), "{}", stdout(&output));
    assert!(stderr(&output).contains("certificate.json.minisig was not checked"), "{}", stderr(&output));
    let output = run(home.path(), &["prove", "--check", "certificate.json", "--key", "mine.pub"], 0);
    assert!(stdout(&output).contains(", signed: ") && stderr(&output).is_empty(), "{}", stderr(&output));
    let public = fs::read_to_string(home.path().join("mine.pub")).unwrap();
    check(public.lines().nth(1).unwrap(), 0);
    assert_eq!(json(&check("theirs.pub", 1))["error"]["code"], "signature-invalid");
    assert_eq!(json(&check("mine.key", 2))["error"]["code"], "public-key-invalid");
    let certificate = home.path().join("certificate.json");
    let text = fs::read_to_string(&certificate).unwrap();
    fs::write(&certificate, text.replacen(' ', "  ", 1)).unwrap();
    assert_eq!(json(&check("mine.pub", 1))["error"]["code"], "signature-invalid");
    fs::write(&certificate, text).unwrap();
    fs::remove_file(home.path().join("certificate.json.minisig")).unwrap();
    assert_eq!(json(&check("mine.pub", 2))["error"]["code"], "path-not-found");
}

#[test]
fn a_forged_certificate_shows_no_more_than_was_compared() {
    let (home, fixture) = (tempfile::tempdir().unwrap(), fixture());
    let [model, bundle] = ["model", "bundle"].map(|name| fixture.join(name).to_str().unwrap().to_owned());
    run(home.path(), &["prove", &model, &bundle, "--prompts", "1", "-o", "good.json"], 0);
    let (good, forged) = (home.path().join("good.json"), home.path().join("forged.json"));
    fn check<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
        [&["prove", "--check", "forged.json"], arguments].concat()
    }
    // The fields of another version are not judged.
    forge(&good, &forged, |text| text.replace("\"version\": 1,", "\"version\": 2,\n  \"seed\": 7,"));
    let message = fails(home.path(), &check(&[]), 1, "certificate-invalid");
    assert!(message.contains("version 2") && message.contains("update unweight"), "{message}");
    // The last tensor is left out.
    forge(&good, &forged, |text| {
        let end = text.find("\n  ],\n  \"logits\"").unwrap();
        let last = text[..end].rfind(",\n    {").unwrap();
        format!("{}{}", &text[..last], &text[end..])
    });
    let message = fails(home.path(), &check(&[&bundle]), 1, "certificate-mismatch");
    assert!(message.contains("the list of tensors differs") && !message.contains("tensor '"), "{message}");
    if !cfg!(feature = "gpu") {
        return;
    }
    let logits = |device: &str, prompts: &str| {
        let prompts = prompts.to_owned();
        let device = device.to_owned();
        forge(&good, &forged, move |text| {
            let (before, rest) = text.split_once("\"logits\": {").unwrap();
            let (_, after) = rest.split_once(OWN).unwrap();
            let logits = format!("\"device\": \"{device}\", \"placement\": null, \"dtype\": \"f32\"");
            format!("{before}\"logits\": {{{logits}, \"prompts\": [{prompts}]}},\n  {OWN}{after}")
        });
    };
    let prompt = |tokens: usize| {
        let tokens = vec!["1"; tokens].join(",");
        format!("{{\"tokens\": [{tokens}], \"sha256\": \"{}\"}}", "0".repeat(64))
    };
    let start = Instant::now();
    for prompts in [String::new(), prompt(0), prompt(17), prompt(100_000), vec![prompt(1); 1025].join(",")] {
        logits("cpu-reference", &prompts);
        fails(home.path(), &check(&[]), 1, "certificate-invalid");
        fails(home.path(), &check(&[&bundle]), 1, "certificate-invalid");
    }
    assert!(start.elapsed() < Duration::from_secs(30));
    logits("cpu-reference", &prompt(1));
    fails(home.path(), &check(&[&bundle]), 1, "certificate-mismatch");
    // Invented logits of a GPU are neither compared nor shown.
    logits("NVIDIA H200", &prompt(1));
    for arguments in [vec![], vec![bundle.as_str()]] {
        let output = run(home.path(), &check(&arguments), 0);
        let text = stdout(&output);
        assert!(!text.contains("logits") && text.contains("signature not checked"), "{text}");
        assert!(arguments.is_empty() || stderr(&output).contains("were not computed again"), "{}", stderr(&output));
    }
    let report = json(&run(home.path(), &[&check(&[&bundle])[..], &["--json"]].concat(), 0));
    assert_eq!(report["logits_compared"], false);
}

#[test]
fn a_certificate_outlives_the_card_of_its_bundle() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    fs::write(home.path().join("model/README.md"), "# Theirs\n").unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle"], 0);
    run(home.path(), &["prove", "model", "bundle", "--device", "none"], 0);
    run(home.path(), &["card", "bundle", "--base-model", "org/tiny"], 0);
    let check = ["prove", "--check", "certificate.json", "model", "bundle"];
    run(home.path(), &check, 0);
    run(home.path(), &["prove", "model", "bundle", "--device", "none", "-o", "again.json"], 0);
    let read = |name: &str| fs::read(home.path().join(name)).unwrap();
    assert!(read("again.json") == read("certificate.json"));
    fs::write(home.path().join("bundle/README.md.source"), "# Thairs\n").unwrap();
    fails(home.path(), &check, 1, "source-differs");
}

#[cfg(feature = "gpu")]
#[test]
fn a_signal_ends_the_computation_of_logits() {
    let (home, fixture) = (tempfile::tempdir().unwrap(), fixture());
    let [model, bundle] = ["model", "bundle"].map(|name| fixture.join(name).to_str().unwrap().to_owned());
    let mut command = unweight(&["prove", &model, &bundle, "--prompts", "1024"]);
    let mut child = command.current_dir(home.path()).stderr(std::process::Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert!(child.try_wait().unwrap().is_none(), "the logits of 1024 prompts take less than 2 seconds");
    let start = Instant::now();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert!(!home.path().join("certificate.json").exists());
}
