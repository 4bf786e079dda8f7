//! Damaged and hostile bundles: none passes, none panics, and the message contains the file.

use std::{
    fs,
    path::{Path, PathBuf},
};

use unweight_format::{
    Digest,
    bundle::{
        Bundle, BundleError, CompressOptions, DecompressOptions, ErrorClass, Profile, Silent, compress, decompress,
        verify,
    },
};

use crate::common::{Scratch, chain, read_tree, small_model};

fn bundle(scratch: &Scratch, profile: Profile) -> PathBuf {
    let (source, bundle) = (scratch.path("model"), scratch.path("bundle"));
    small_model(&source);
    fs::create_dir(source.join("sub")).unwrap();
    fs::write(source.join("sub/vocab.txt"), "a b c").unwrap();
    compress(&source, &bundle, &CompressOptions::new(profile), &Silent).unwrap();
    bundle
}

/// The problems that `verify` reports for a bundle that must not pass.
fn faults(bundle: &Path) -> String {
    match verify(bundle, None, &Silent) {
        Ok(report) => {
            assert!(!report.is_ok(), "the damage was not noticed");
            report.problems.iter().map(|p| format!("{}: {}\n", p.file, p.message)).collect()
        }
        Err(error) => {
            assert_eq!(error.class(), ErrorClass::Mismatch, "{}", chain(&error));
            chain(&error)
        }
    }
}

/// Checks that `decompress` refuses and leaves no output.
fn refuses(bundle: &Path, scratch: &Scratch) -> BundleError {
    let out = scratch.path("back");
    let error = decompress(bundle, &out, &DecompressOptions::default(), &Silent).unwrap_err();
    assert!(!out.exists());
    assert_eq!(error.class(), ErrorClass::Mismatch, "{}", chain(&error));
    let partial = scratch.path("back.partial");
    if partial.exists() {
        fs::remove_dir_all(partial).unwrap();
    }
    error
}

#[test]
fn every_flipped_bit_is_detected_and_its_file_named() {
    let scratch = Scratch::new();
    for profile in [Profile::Distribution, Profile::Inference, Profile::Packed] {
        let bundle = bundle(&scratch, profile);
        for (name, bytes) in read_tree(&bundle) {
            // Every byte of the lengths and of the first parts; later bytes at an odd stride.
            let step = (bytes.len() / 60).max(1) | 1;
            let offsets =
                (0..16.min(bytes.len())).chain((16..bytes.len()).step_by(step)).chain(bytes.len().checked_sub(1));
            for at in offsets {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << (at % 8);
                fs::write(bundle.join(&name), &damaged).unwrap();
                let text = faults(&bundle);
                assert!(text.contains(&name), "byte {at} of {name}: {text}");
                if at % 5 == 0 && name.ends_with(".safetensors") {
                    let text = chain(&refuses(&bundle, &scratch));
                    assert!(text.contains(&name), "byte {at} of {name}: {text}");
                }
            }
            fs::write(bundle.join(&name), &bytes).unwrap();
        }
        assert!(verify(&bundle, None, &Silent).unwrap().is_ok());
        fs::remove_dir_all(scratch.path("model")).unwrap();
        fs::remove_dir_all(&bundle).unwrap();
    }
}

#[test]
fn truncated_missing_extra_and_swapped_files_are_detected() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch, Profile::Distribution);
    for (name, bytes) in read_tree(&bundle) {
        for keep in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            fs::write(bundle.join(&name), &bytes[..keep]).unwrap();
            assert!(faults(&bundle).contains(&name), "{name} cut to {keep}");
            refuses(&bundle, &scratch);
        }
        fs::write(bundle.join(&name), [&bytes[..], b" "].concat()).unwrap();
        assert!(faults(&bundle).contains(&name), "{name} too long");
        fs::remove_file(bundle.join(&name)).unwrap();
        if name != "unweight.json" {
            assert!(faults(&bundle).contains(&name), "{name} missing");
            assert_eq!(refuses(&bundle, &scratch).code(), "bundle-file-missing", "{name}");
        } else {
            assert!(matches!(Bundle::open(&bundle), Err(BundleError::NotABundle { .. })));
        }
        fs::write(bundle.join(&name), &bytes).unwrap();
    }
    fs::write(bundle.join("sub/stray"), "").unwrap();
    assert!(faults(&bundle).contains("sub/stray: not listed"));
    fs::remove_file(bundle.join("sub/stray")).unwrap();

    let (one, two) = (bundle.join("model-00001-of-00002.safetensors"), bundle.join("model-00002-of-00002.safetensors"));
    fs::rename(&one, bundle.join("x")).unwrap();
    fs::rename(&two, &one).unwrap();
    fs::rename(bundle.join("x"), &two).unwrap();
    let text = faults(&bundle);
    assert!(text.contains("model-00001-of") && text.contains("model-00002-of"), "{text}");
}

/// As `hf download --local-dir` and `git clone` leave them.
#[test]
fn records_of_a_download_belong_to_no_model_and_no_bundle() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch, Profile::Distribution);
    let record = ".cache/huggingface/download/config.json.metadata";
    let put = |dir: &Path, name: &str| {
        fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
        fs::write(dir.join(name), "commit").unwrap();
    };
    let source = scratch.path("model");
    put(&source, record);
    let again = scratch.path("again");
    compress(&source, &again, &CompressOptions::new(Profile::Distribution), &Silent).unwrap();
    assert_eq!(read_tree(&again), read_tree(&bundle));
    assert!(verify(&bundle, Some(&source), &Silent).unwrap().is_ok());

    for name in [record, ".git/HEAD", ".git/objects/pack/a"] {
        put(&bundle, name);
    }
    assert!(verify(&bundle, None, &Silent).unwrap().is_ok());
    fs::write(bundle.join(".cache/stray"), "").unwrap();
    assert!(faults(&bundle).contains(".cache/stray: not listed"));
}

#[test]
fn verify_against_another_source_finds_differences() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch, Profile::Distribution);
    let source = scratch.path("model");
    assert!(verify(&bundle, Some(&source), &Silent).unwrap().is_ok());
    let shard = source.join("model-00002-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 4;
    fs::write(&shard, bytes).unwrap();
    fs::write(source.join("new.txt"), "").unwrap();
    fs::remove_file(source.join("sub/vocab.txt")).unwrap();
    let report = verify(&bundle, Some(&source), &Silent).unwrap();
    let text: String = report.problems.iter().map(|p| format!("{}\n", p.message)).collect();
    assert_eq!(report.problems.len(), 3, "{text}");
    for part in ["tensor 'lm_head.weight'", "new.txt: in the source, but not in the bundle", "sub/vocab.txt"] {
        assert!(text.contains(part), "{text}");
    }
}

/// Changes the manifest and its digest, so that the change itself is checked.
fn reseal(bundle: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = bundle.join("unweight.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    manifest["manifest_digest"] = "0".repeat(32).into();
    let text = serde_json::to_string(&manifest).unwrap();
    let digest = Digest::of(text.as_bytes()).to_string();
    let text = text
        .replace(&format!("\"manifest_digest\":\"{}\"", "0".repeat(32)), &format!("\"manifest_digest\":\"{digest}\""));
    fs::write(path, text).unwrap();
}

#[test]
fn hostile_manifests_are_rejected() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch, Profile::Distribution);
    let sound = fs::read(bundle.join("unweight.json")).unwrap();
    reseal(&bundle, |_| {});
    assert!(verify(&bundle, None, &Silent).unwrap().is_ok(), "sealing again alone changes nothing");
    type Change = fn(&mut serde_json::Value);
    /// The first shard.
    fn shard(manifest: &mut serde_json::Value) -> &mut serde_json::Value {
        manifest["files"].as_array_mut().unwrap().iter_mut().find(|f| f["kind"] == "weights").unwrap()
    }
    fn coded(manifest: &mut serde_json::Value) -> &mut serde_json::Value {
        let tensors = shard(manifest)["tensors"].as_array_mut().unwrap();
        tensors.iter_mut().find(|t| t["encoding"] == "huffman").unwrap()
    }
    fn config(manifest: &mut serde_json::Value) -> &mut serde_json::Value {
        manifest["files"].as_array_mut().unwrap().iter_mut().find(|f| f["kind"] == "config").unwrap()
    }
    let cases: &[(&str, Change)] = &[
        ("relative", |m| m["files"][0]["name"] = "../config.json".into()),
        ("relative", |m| m["files"][0]["name"] = "/etc/passwd".into()),
        ("relative", |m| m["files"][0]["name"] = "a//b".into()),
        ("control character", |m| m["files"][0]["name"] = "a\nb".into()),
        ("listed twice", |m| m["files"][0]["name"] = "unweight.json".into()),
        ("listed twice", |m| m["files"][1] = m["files"][0].clone()),
        ("has no stored_size", |m| _ = config(m).as_object_mut().unwrap().remove("stored_size")),
        ("has no stored_digest", |m| _ = config(m).as_object_mut().unwrap().remove("stored_digest")),
        ("listed twice", |m| {
            let source = serde_json::json!({"kind": "copied", "name": "config.json.source", "size": 1, "digest": "0".repeat(32)});
            m["files"].as_array_mut().unwrap().push(source);
        }),
        ("unknown kind 'other'", |m| config(m)["kind"] = "other".into()),
        ("expected 7 bytes", |m| config(m)["stored_size"] = 7.into()),
        ("expected 7 bytes", |m| config(m)["size"] = 7.into()),
        ("its size is", |m| shard(m)["size"] = u64::MAX.into()),
        ("shard_size", |m| shard(m)["shard_size"] = u64::MAX.into()),
        ("shard_size", |m| shard(m)["shard_header_bytes"] = u64::MAX.into()),
        ("its size is", |m| shard(m)["header_bytes"] = 0.into()),
        ("overflows", |m| coded(m)["shape"] = serde_json::json!([u64::MAX, u64::MAX])),
        ("not a matrix", |m| coded(m)["rows"] = 0.into()),
        ("not a matrix", |m| coded(m)["rows"] = u64::MAX.into()),
        ("does not have the elements", |m| coded(m)["rows"] = 1.into()),
        ("the shape needs", |m| coded(m)["sections"][0]["bytes"] = 17.into()),
        ("larger than the tensor", |m| coded(m)["sections"][5]["bytes"] = (1u64 << 60).into()),
        ("sections are not", |m| {
            coded(m)["sections"].as_array_mut().unwrap().swap(0, 1);
        }),
        ("sections are not", |m| coded(m)["encoding"] = "palette".into()),
        ("has rows", |m| coded(m)["encoding"] = "raw".into()),
        ("unknown section", |m| coded(m)["sections"][0]["name"] = "x".into()),
        ("cannot be huffman", |m| {
            coded(m)["dtype"] = "F16".into();
        }),
        ("reserved or listed twice", |m| coded(m)["name"] = "a.unweight.palette".into()),
        ("digest does not match its parts", |m| coded(m)["digest"] = "0".repeat(32).into()),
        ("digest", |m| coded(m)["digest"] = "xyz".into()),
        ("code limit 99", |m| m["options"]["code_limit"] = 99.into()),
        ("format is 'other'", |m| m["format"] = "other".into()),
        ("expected", |m| coded(m)["name"] = "renamed".into()),
    ];
    for (expected, change) in cases {
        fs::write(bundle.join("unweight.json"), &sound).unwrap();
        reseal(&bundle, change);
        let text = faults(&bundle);
        assert!(text.contains(expected), "{expected:?}: {text}");
        refuses(&bundle, &scratch);
        assert!(Bundle::open(&bundle).is_err(), "{expected}");
    }
    // Contents are checked when they are used. Only verify uses the bundle's own `config.json`.
    fs::write(bundle.join("unweight.json"), &sound).unwrap();
    reseal(&bundle, |m| config(m)["stored_digest"] = "0".repeat(32).into());
    let text = faults(&bundle);
    assert!(text.contains("config.json: contents"), "{text}");
    fs::write(bundle.join("unweight.json"), &sound).unwrap();
    reseal(&bundle, |m| config(m)["digest"] = "0".repeat(32).into());
    let text = faults(&bundle);
    assert!(text.contains("config.json.source: contents"), "{text}");
    assert!(chain(&refuses(&bundle, &scratch)).contains("config.json.source: contents"));
    let error = Bundle::open(&bundle).unwrap().copied("config.json", 1 << 20).unwrap_err();
    assert!(matches!(&error, BundleError::Mismatch { file, .. } if file == "config.json.source"), "{error}");
    fs::write(bundle.join("unweight.json"), &sound).unwrap();
    reseal(&bundle, |m| m["version"]["major"] = 2.into());
    let error = Bundle::open(&bundle).unwrap_err();
    assert!(matches!(&error, BundleError::NewerVersion { version, .. } if version.major == 2), "{error}");
    assert_eq!(error.class(), ErrorClass::Failed);
    let forced = CompressOptions::default().force(true);
    let error = compress(&scratch.path("model"), &bundle, &forced, &Silent).unwrap_err();
    assert!(matches!(&error, BundleError::OtherOutput { age: "a newer", .. }), "{error}");
    fs::write(bundle.join("unweight.json"), &sound).unwrap();
    reseal(&bundle, |m| {
        m["version"]["minor"] = 7.into();
        m["something_new"] = "x".into();
    });
    assert!(Bundle::open(&bundle).is_ok(), "a newer minor version is read");
    reseal(&bundle, |m| coded(m)["encoding"] = "newer".into());
    let error = Bundle::open(&bundle).unwrap_err();
    assert!(matches!(&error, BundleError::NewerVersion { version, .. } if version.minor == 7), "{error}");
}

#[test]
fn hostile_manifests_of_packed_tensors_are_rejected() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch, Profile::Packed);
    let sound = fs::read(bundle.join("unweight.json")).unwrap();
    type Change = fn(&mut serde_json::Value);
    fn packed(manifest: &mut serde_json::Value) -> &mut serde_json::Value {
        let files = manifest["files"].as_array_mut().unwrap();
        let tensors = files.iter_mut().filter_map(|f| f.get_mut("tensors")).flat_map(|t| t.as_array_mut().unwrap());
        tensors.into_iter().find(|t| t["encoding"] == "packed").unwrap()
    }
    let cases: &[(&str, Change)] = &[
        ("cannot be packed: rows or columns are not a multiple of 64", |m| {
            let tensor = packed(m);
            let elements = tensor["rows"].as_u64().unwrap() * tensor["cols"].as_u64().unwrap();
            tensor["rows"] = 32.into();
            tensor["cols"] = (elements / 32).into();
        }),
        ("the shape needs 16", |m| packed(m)["sections"][0]["bytes"] = 1.into()),
        ("the shape needs", |m| packed(m)["sections"][3]["bytes"] = 6143.into()),
        ("12 bytes stored, but the shape needs 16", |m| packed(m)["sections"][2]["bytes"] = 12.into()),
        ("3 bytes stored, but the shape needs 16", |m| packed(m)["sections"][2]["bytes"] = 3.into()),
        ("larger than the tensor", |m| packed(m)["sections"][2]["bytes"] = (1u64 << 60).into()),
        ("sections are not", |m| packed(m)["encoding"] = "palette".into()),
        ("cannot be packed", |m| packed(m)["dtype"] = "F16".into()),
    ];
    for (expected, change) in cases {
        fs::write(bundle.join("unweight.json"), &sound).unwrap();
        reseal(&bundle, change);
        let text = faults(&bundle);
        assert!(text.contains(expected), "{expected:?}: {text}");
        refuses(&bundle, &scratch);
    }
}
