//! Certificates.

use std::fs;

use serde_json::Value;
use sha2::Digest;

use crate::harness::{copy, documented, fails, fixture, json, run, shards};

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
    for arguments in [&["prove"][..], &["prove", &model], &["prove", &model, &bundle, "--check", "c", "--sign", "k"]] {
        fails_with_usage(home.path(), arguments);
    }
}

fn fails_with_usage(home: &std::path::Path, arguments: &[&str]) {
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
    let flip = |file: &std::path::Path, at: usize| {
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
    fails(home.path(), &["prove", "--check", "certificate.json", "other"], 1, "certificate-mismatch");
    // A certificate whose digest was made anew, with one changed digit of a tensor.
    let text = fs::read_to_string(&certificate).unwrap();
    let own = "\"certificate_sha256\": \"";
    let (before, after) = text.split_once(own).unwrap();
    let at = before.rfind("\"sha256\": \"").unwrap() + "\"sha256\": \"".len();
    let digit = if &before[at..=at] == "0" { "1" } else { "0" };
    let forged = format!("{}{digit}{}{own}{}{}", &before[..at], &before[at + 1..], "0".repeat(64), &after[64..]);
    let forged =
        forged.replacen(&format!("{own}{}", "0".repeat(64)), &format!("{own}{}", sha256(forged.as_bytes())), 1);
    fs::write(&certificate, forged).unwrap();
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
