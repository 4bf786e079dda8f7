//! Sources that change, entries planted by other users, disks that fail: no data is lost, and no check is deceived.
//! Each test covers a promise that an attack once broke.

use std::{
    fs,
    os::unix::fs::{FileExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, setrlimit};
use unweight_format::{
    Digest,
    bundle::{
        Bundle, BundleError, CompressOptions, DecompressOptions, ErrorClass, Profile, Progress, Silent, VerifyAfter,
        compare, compress, decompress, plan, verify,
    },
    raw::FAILPOINTS,
    testing::Weights,
};

use crate::common::{self, Scratch, chain, read_tree, safetensors_file, small_model, tensor};

/// Calls a function once, when the named file or its first tensor is started.
struct When<F: Fn() + Sync> {
    tensor: bool,
    name: &'static str,
    done: AtomicBool,
    then: F,
}

impl<F: Fn() + Sync> When<F> {
    fn new(tensor: bool, name: &'static str, then: F) -> Self {
        Self { tensor, name, done: AtomicBool::new(false), then }
    }

    fn run_if_matches(&self, tensor: bool, name: &str) {
        if tensor == self.tensor && name.contains(self.name) && !self.done.swap(true, Ordering::Relaxed) {
            (self.then)();
        }
    }
}

impl<F: Fn() + Sync> Progress for When<F> {
    fn file(&self, name: &str) {
        self.run_if_matches(false, name);
    }

    fn tensor(&self, name: &str) {
        self.run_if_matches(true, name);
    }
}

pub fn reseal(bundle: &Path, change: impl Fn(&mut serde_json::Value)) {
    let path = bundle.join("unweight.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    json["manifest_digest"] = "0".repeat(32).into();
    let text = json.to_string();
    let digest = Digest::of(text.as_bytes()).to_string();
    let key = |digits: &str| format!("\"manifest_digest\":\"{digits}\"");
    fs::write(path, text.replace(&key(&"0".repeat(32)), &key(&digest))).unwrap();
}

// ---- a source that changes ----

#[test]
fn rewriting_the_source_in_place_is_detected() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    small_model(&source);
    let moments: [(bool, &str, &str); 5] = [
        (false, "model-00001", "model-00001-of-00002.safetensors"),
        (true, "layers.0.mlp.gate", "model-00001-of-00002.safetensors"),
        (false, "model-00002", "model-00002-of-00002.safetensors"),
        (false, "tokenizer.json", "tokenizer.json"),
        (false, "index.json", "model.safetensors.index.json"),
    ];
    for (tensor, at, file) in moments {
        let path = source.join(file);
        let before = fs::read(&path).unwrap();
        // Same size and name, other bytes; and the modification time restored, as archivers do.
        let rewrite = || {
            let modified = fs::metadata(&path).unwrap().modified().unwrap();
            let open = fs::File::options().write(true).open(&path).unwrap();
            open.write_all_at(&[before[before.len() - 2] ^ 1], before.len() as u64 - 2).unwrap();
            open.set_modified(modified).unwrap();
        };
        let options = CompressOptions::default().sha256(true).verify(VerifyAfter::None);
        let error = compress(&source, &scratch.path("out"), &options, &When::new(tensor, at, rewrite)).unwrap_err();
        assert!(matches!(&error, BundleError::SourceChanged { path, .. } if path.ends_with(file)), "{at}: {error}");
        assert!(!scratch.path("out").exists());
        fs::write(&path, &before).unwrap();
    }
    compress(&source, &scratch.path("out"), &CompressOptions::default(), &Silent).unwrap();
}

#[test]
fn a_source_truncated_while_it_is_read_is_an_error_with_its_name() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    fs::create_dir(&source).unwrap();
    // Several batches, so that something is left to read.
    let weights = Weights::TRAINED.bytes(8 << 20, 3);
    let tensors: Vec<_> = (0..6).map(|i| tensor(&format!("t{i}"), "BF16", &[2048, 4096], &weights)).collect();
    fs::write(source.join("a.safetensors"), safetensors_file(&[], &tensors)).unwrap();
    let path = source.join("a.safetensors");
    let truncate = || fs::File::options().write(true).open(&path).unwrap().set_len(9 << 20).unwrap();
    let options = CompressOptions::default().ram_bytes(64u64 << 20);
    let error = compress(&source, &scratch.path("out"), &options, &When::new(true, "t0", truncate)).unwrap_err();
    assert!(matches!(&error, BundleError::Read { .. } | BundleError::SourceChanged { .. }), "{}", chain(&error));
    assert!(chain(&error).contains("a.safetensors"), "{}", chain(&error));
    assert_eq!(error.class(), ErrorClass::Failed);
}

#[test]
fn a_bundle_truncated_while_it_is_read_is_an_error_with_its_name() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    compress(&source, &out, &CompressOptions::default(), &Silent).unwrap();
    let path = out.join("model-00001-of-00002.safetensors");
    let whole = fs::read(&path).unwrap();
    let truncate = || fs::write(&path, &whole[..whole.len() / 3]).unwrap();
    let error = decompress(&out, &scratch.path("back"), &DecompressOptions::default(), &When::new(true, "", truncate));
    let error = error.unwrap_err();
    assert!(matches!(&error, BundleError::Read { .. }), "{}", chain(&error));
    assert!(chain(&error).contains("model-00001-of-00002.safetensors") && chain(&error).contains("at byte"));
    fs::write(&path, &whole).unwrap();
    let error = verify(&out, None, &When::new(true, "", truncate)).unwrap_err();
    assert!(matches!(&error, BundleError::Read { .. }), "{}", chain(&error));
    fs::write(&path, &whole).unwrap();
    let bundle = Bundle::open(&out).unwrap();
    truncate();
    let handles: Vec<_> = bundle.tensors().filter(|tensor| path.ends_with(tensor.file())).collect();
    let errors: Vec<_> = handles.iter().filter_map(|tensor| tensor.stored().err()).collect();
    assert!(!errors.is_empty() && errors.len() <= handles.len(), "tensors in the truncated part are errors");
    for error in &errors {
        assert!(matches!(error, BundleError::Read { .. }), "{}", chain(error));
        assert!(chain(error).contains("model-00001-of-00002.safetensors"), "{}", chain(error));
    }
}

#[test]
fn compress_verifies_by_default() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    small_model(&source);
    let report = compress(&source, &scratch.path("out"), &CompressOptions::default(), &Silent).unwrap();
    assert_eq!(report.verified_tensors, report.tensors.len() as u64);
}

// ---- verify detects all that decompress detects ----

#[test]
fn a_wrong_sha256_is_found_by_verify_as_by_decompress() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    compress(&source, &out, &CompressOptions::default().sha256(true), &Silent).unwrap();
    assert!(verify(&out, Some(&source), &Silent).unwrap().is_ok());
    reseal(&out, |manifest| {
        let files = manifest["files"].as_array_mut().unwrap();
        let weights = files.iter_mut().find(|file| file["kind"] == "weights").unwrap();
        weights["sha256"] = "0".repeat(64).into();
    });
    let report = verify(&out, None, &Silent).unwrap();
    assert!(report.problems.iter().any(|p| p.code == "bundle-content-mismatch"), "{report:?}");
    let error = decompress(&out, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap_err();
    assert!(matches!(&error, BundleError::Mismatch { what, .. } if what.starts_with("SHA-256")), "{}", chain(&error));
}

/// `docs/format.md` B.4: every stored byte is compared with its digest, even if no weight depends on it.
#[test]
fn decompress_detects_a_flip_in_padding() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    compress(&source, &out, &CompressOptions::default(), &Silent).unwrap();
    // `encoded_exp` ends with zero words that no decoder reads, unless the words happen to fill its 16 bytes.
    let mut found = 0;
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        let path = out.join(shard);
        let whole = fs::read(&path).unwrap();
        let (header, data) = (common::header(&whole), 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()));
        for (_, entry) in header.as_object().unwrap().iter().filter(|(name, _)| name.ends_with(".encoded_exp")) {
            let end = (data + entry["data_offsets"][1].as_u64().unwrap()) as usize;
            if whole[end - 4..end] != [0; 4] {
                continue;
            }
            found += 1;
            let mut damaged = whole.clone();
            damaged[end - 1] = 1;
            fs::write(&path, damaged).unwrap();
            let error = decompress(&out, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap_err();
            assert!(chain(&error).contains("encoded_exp"), "{}", chain(&error));
            assert!(!verify(&out, None, &Silent).unwrap().is_ok());
        }
        fs::write(&path, whole).unwrap();
    }
    assert!(found > 0);
}

#[test]
fn impossible_file_names_are_rejected() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    compress(&source, &out, &CompressOptions::default(), &Silent).unwrap();
    let sound = fs::read(out.join("unweight.json")).unwrap();
    let long = "x".repeat(256);
    for (name, why) in [("tokenizer.json/deeper", "is also the directory"), (&long, "at most 255 bytes")] {
        fs::write(out.join("unweight.json"), &sound).unwrap();
        reseal(&out, |manifest| {
            let files = manifest["files"].as_array_mut().unwrap();
            let mut copy = files.iter().find(|file| file["name"] == "tokenizer.json").unwrap().clone();
            copy["name"] = name.into();
            files.push(copy);
        });
        for error in [
            verify(&out, None, &Silent).unwrap_err(),
            decompress(&out, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap_err(),
        ] {
            assert!(chain(&error).contains(why), "{}", chain(&error));
        }
    }
}

// ---- resuming ----

/// Compresses in a child process that aborts at a failpoint.
pub(crate) fn crash(root: &Path, what: &str, failpoint: &str) -> bool {
    let (what, fault) = match what.strip_suffix(" without a swap") {
        Some(what) => (what, "swap"),
        None => (what, ""),
    };
    let status = child_command(root, what)
        .env("UNWEIGHT_FAILPOINT", failpoint)
        .env("UNWEIGHT_FAULT", fault)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    !status.success()
}

fn child_command(root: &Path, what: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "attacks::child", "--nocapture"])
        .env("UNWEIGHT_TEST_ROOT", root)
        .env("UNWEIGHT_TEST_WHAT", what);
    command
}

/// Only runs as a child process of other tests.
#[test]
fn child() {
    let Ok(root) = std::env::var("UNWEIGHT_TEST_ROOT") else { return };
    let root = Path::new(&root);
    let options = CompressOptions::default().verify(VerifyAfter::None);
    match std::env::var("UNWEIGHT_TEST_WHAT").unwrap().as_str() {
        "compress" => drop(compress(&root.join("model"), &root.join("out"), &options, &Silent).unwrap()),
        "replace" => drop(compress(&root.join("model"), &root.join("out"), &options.force(true), &Silent).unwrap()),
        "resume" => drop(compress(&root.join("model"), &root.join("out"), &options.resume(true), &Silent).unwrap()),
        "decompress" => {
            let options = DecompressOptions::default();
            drop(decompress(&root.join("bundle"), &root.join("out"), &options, &Silent).unwrap());
        }
        limited if limited.ends_with(" in 8 GiB") => {
            let limit = Some(8 << 30);
            setrlimit(Resource::As, Rlimit { current: limit, maximum: limit }).unwrap();
            let result = if limited.starts_with("verify") {
                verify(&root.join("out"), None, &Silent).map(|report| format!("{:?}", report.problems))
            } else {
                let options = DecompressOptions::default();
                decompress(&root.join("out"), &root.join("back"), &options, &Silent).map(|_| "done".into())
            };
            println!("child says: {}", result.unwrap_or_else(|error| format!("{}: {}", error.code(), chain(&error))));
        }
        other => panic!("{other}"),
    }
}

/// Crashes after each tensor of a file that has deferred parts: these are prepared again.
#[test]
fn resume_keeps_every_tensor_finished_before_a_crash() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    fs::create_dir(&source).unwrap();
    let tensors = [
        tensor("bias", "BF16", &[3], &common::weights(3, 3)),
        tensor("odd.mlp.up_proj.weight", "BF16", &[129, 131], &common::weights(129 * 131, 2)),
        tensor("mask", "BOOL", &[5], &[1, 0, 1, 1, 0]),
        tensor("m.weight", "BF16", &[256, 256], &common::weights(256 * 256, 4)),
        tensor("f64", "F64", &[1], &[1; 8]),
        tensor("conv", "BF16", &[33, 7, 3, 3], &common::weights(33 * 7 * 9, 5)),
        tensor("noise", "BF16", &[100, 100], &common::noise(20_000)),
    ];
    fs::write(source.join("model.safetensors"), safetensors_file(&[], &tensors)).unwrap();
    let options = CompressOptions::default();
    compress(&source, &scratch.path("whole"), &options, &Silent).unwrap();
    for after in 1..=tensors.len() {
        assert!(crash(scratch.dir(), "compress", &format!("journalled:{after}")), "{after}");
        let report = compress(&source, &out, &options.clone().resume(true), &Silent).unwrap();
        assert_eq!(report.resumed_tensors, after as u64);
        assert!(read_tree(&out) == read_tree(&scratch.path("whole")), "{after}");
        fs::remove_dir_all(&out).unwrap();
    }
}

/// Crashes at every failpoint, in a fresh run, one that replaces and one that decompresses. The output is absent, the
/// old one or the new one, never partial. A later run results in the same bytes, whether it resumes or not.
#[test]
fn a_crash_at_any_point_leaves_all_or_nothing() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    let bundle = scratch.path("bundle");
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    let (new, old, files) = (read_tree(&bundle), scratch.path("old"), read_tree(&source));
    compress(&source, &old, &CompressOptions::new(Profile::Palette), &Silent).unwrap();
    let old = read_tree(&old);
    let write = |tree: &std::collections::BTreeMap<String, Vec<u8>>| {
        fs::create_dir(&out).unwrap();
        tree.iter().for_each(|(name, bytes)| fs::write(out.join(name), bytes).unwrap());
    };
    let mut reached = std::collections::BTreeSet::new();
    for what in ["compress", "replace", "replace without a swap", "decompress"] {
        for point in FAILPOINTS.iter().flat_map(|point| [(point, 1), (point, 3)]) {
            if what.starts_with("replace") {
                write(&old);
            }
            let crashed = crash(scratch.dir(), what, &format!("{}:{}", point.0, point.1));
            if crashed {
                reached.insert(*point.0);
            }
            let expected = if what == "decompress" { &files } else { &new };
            match (what, out.exists()) {
                // Without an exchange of names there is a moment without an output: the old one is set aside.
                ("replace without a swap", false) => {
                    assert_eq!(*point.0, "set-aside");
                    assert!(read_tree(&scratch.path("out.partial/replaced")) == old);
                }
                ("replace" | "replace without a swap", exists) => {
                    assert!(exists, "{point:?}");
                    let got = read_tree(&out);
                    assert!(got == old || got == *expected, "{point:?}: neither the old nor the new output");
                }
                (_, true) => assert!(read_tree(&out) == *expected, "{what} {point:?}: a part of an output"),
                (_, false) => assert!(crashed, "{what} {point:?}"),
            }
            // Alternate between runs that resume and runs that start over.
            let resume = point.1 == 1;
            let done = if what == "decompress" {
                let options = DecompressOptions::default().resume(resume).force(true);
                decompress(&bundle, &out, &options, &Silent).map(|_| ())
            } else {
                let options = CompressOptions::default().resume(resume).force(true);
                compress(&source, &out, &options, &Silent).map(|_| ())
            };
            done.unwrap_or_else(|error| panic!("{what} {point:?}: {}", chain(&error)));
            assert!(read_tree(&out) == *expected, "{what} {point:?}");
            assert!(!scratch.path("out.partial").exists(), "{what} {point:?}");
            fs::remove_dir_all(&out).unwrap();
        }
    }
    assert!(FAILPOINTS.iter().all(|point| reached.contains(point)), "{reached:?}");
    assert!(read_tree(&source) == files);
}

#[test]
fn resume_rejects_shards_of_a_similar_model() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    assert!(crash(scratch.dir(), "compress", "synced"));
    // Equal header, size and time, as of two models unpacked from reproducible archives.
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        let path = source.join(shard);
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        fs::write(&path, bytes).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    }
    let report = compress(&source, &out, &CompressOptions::default().resume(true), &Silent).unwrap();
    assert_eq!(report.resumed_files, [""; 0]);
    assert!(verify(&out, Some(&source), &Silent).unwrap().is_ok());
}

#[test]
fn tampered_resume_record_is_ignored() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    compress(&source, &scratch.path("whole"), &CompressOptions::default(), &Silent).unwrap();
    let whole = read_tree(&scratch.path("whole"));
    assert!(crash(scratch.dir(), "compress", "synced"));
    let partial = read_tree(&scratch.path("out.partial"));
    let records: Vec<&String> = partial.keys().filter(|name| name.starts_with("records/")).collect();
    assert_eq!(records.len(), 2);
    let text = &partial[records[0]];
    let json: serde_json::Value = serde_json::from_slice(&text[33..]).unwrap();
    let mut changed = Vec::new();
    // Each value of the record replaced by another of its kind, with a new digest, as after a bug or an edit.
    values(&json, &mut Vec::new(), &mut changed);
    assert!(changed.len() > 100);
    // Flipped bits, as from a faulty disk.
    let flips = (0..text.len()).step_by(97).map(|at| {
        let mut flipped = text.clone();
        flipped[at] ^= 4;
        flipped
    });
    let sealed = changed.iter().step_by(17).map(|json| {
        let json = json.to_string();
        [Digest::of(json.as_bytes()).to_string().as_bytes(), b"\n", json.as_bytes()].concat()
    });
    for (i, record) in flips.chain(sealed).enumerate() {
        for (name, bytes) in &partial {
            let path = scratch.path("out.partial").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, if name == records[0] { &record } else { bytes }).unwrap();
        }
        fs::set_permissions(scratch.path("out.partial"), fs::Permissions::from_mode(0o700)).unwrap();
        let options = CompressOptions::default().resume(true).verify(VerifyAfter::None);
        compress(&source, &out, &options, &Silent).unwrap_or_else(|error| panic!("{i}: {}", chain(&error)));
        // The only field that nothing else determines is the reason, which the record's digest covers.
        let same = read_tree(&out) == whole;
        assert!(same || verify(&out, Some(&source), &Silent).unwrap().is_ok(), "{i}");
        fs::remove_dir_all(&out).unwrap();
    }
}

/// Returns copies of a document, each with one value changed.
fn values(whole: &serde_json::Value, path: &mut Vec<String>, found: &mut Vec<serde_json::Value>) {
    let at = path.iter().fold(whole, |at, key| key.parse::<usize>().map_or(&at[key], |i| &at[i]));
    let changes: Vec<serde_json::Value> = match at {
        serde_json::Value::Object(fields) => {
            for key in fields.keys().cloned().collect::<Vec<_>>() {
                path.push(key);
                values(whole, path, found);
                path.pop();
            }
            return;
        }
        serde_json::Value::Array(items) => {
            for i in 0..items.len() {
                path.push(i.to_string());
                values(whole, path, found);
                path.pop();
            }
            return;
        }
        serde_json::Value::Number(number) => vec![(number.as_u64().unwrap_or(0) + 1).into(), u64::MAX.into()],
        serde_json::Value::String(text) => vec![format!("{text}x").into(), "../x".into()],
        _ => vec!["x".into()],
    };
    for change in changes {
        let mut copy = whole.clone();
        let value = path.iter().fold(&mut copy, |at, key| match key.parse::<usize>() {
            Ok(i) => &mut at[i],
            Err(_) => &mut at[key.as_str()],
        });
        *value = change;
        found.push(copy);
    }
}

// ---- other users ----

#[test]
fn links_planted_in_the_partial_folder_are_not_followed() {
    let scratch = Scratch::new();
    let (source, out, partial) = (scratch.path("model"), scratch.path("out"), scratch.path("out.partial"));
    small_model(&source);
    let precious = scratch.path("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("thesis"), "years").unwrap();
    let assert_rejected = |what: &str| {
        for resume in [false, true] {
            let start = Instant::now();
            let options = CompressOptions::default().resume(resume);
            let error = compress(&source, &out, &options, &Silent).unwrap_err();
            assert!(matches!(error, BundleError::ForeignPartial { .. }), "{what}: {}", chain(&error));
            assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        }
        assert_eq!(fs::read(precious.join("thesis")).unwrap(), b"years", "{what}");
        assert_eq!(read_tree(&precious).len(), 1, "{what}");
        assert!(!out.exists());
        fs::remove_dir_all(&partial).or_else(|_| fs::remove_file(&partial)).unwrap();
    };
    let folder = || {
        fs::create_dir(&partial).unwrap();
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(partial.join("lock"), "").unwrap();
    };
    for name in ["tree", "work", "records"] {
        folder();
        symlink(&precious, partial.join(name)).unwrap();
        assert_rejected(name);
    }
    folder();
    fs::create_dir(partial.join("tree")).unwrap();
    symlink(precious.join("thesis"), partial.join("tree/config.json")).unwrap();
    assert_rejected("a file below tree");
    symlink(&precious, &partial).unwrap();
    assert_rejected("the directory itself");
    fs::create_dir(&partial).unwrap();
    symlink(precious.join("thesis"), partial.join("lock")).unwrap();
    assert_rejected("the lock");
    fs::create_dir(&partial).unwrap();
    symlink("nowhere", partial.join("lock")).unwrap();
    assert_rejected("a lock that leads nowhere");
    fs::create_dir(&partial).unwrap();
    assert!(Command::new("mkfifo").arg(partial.join("lock")).status().unwrap().success());
    assert_rejected("a FIFO as lock");
    folder();
    fs::set_permissions(&partial, fs::Permissions::from_mode(0o777)).unwrap();
    assert_rejected("a directory that other users may write to");
    // A directory of another user; only root can make one.
    folder();
    let made = Command::new("chown").arg("1234").arg(&partial).stderr(Stdio::null()).status().unwrap().success();
    if made {
        assert_rejected("a directory of another user");
    } else {
        fs::remove_dir_all(&partial).unwrap();
    }
    compress(&source, &out, &CompressOptions::default(), &Silent).unwrap();
}

#[test]
fn a_fifo_is_never_waited_for() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    compress(&source, &out, &CompressOptions::default(), &Silent).unwrap();
    for name in ["unweight.json", "model-00001-of-00002.safetensors", "tokenizer.json"] {
        let path = out.join(name);
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let start = Instant::now();
        assert!(verify(&out, None, &Silent).map_or(true, |report| !report.is_ok()), "{name}");
        assert!(decompress(&out, &scratch.path("back"), &DecompressOptions::default(), &Silent).is_err(), "{name}");
        assert!(Bundle::open(&out).is_err(), "{name}");
        assert!(start.elapsed() < Duration::from_secs(20), "{name}");
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
    }
    // A pipe cannot name another bundle, and weights do not need `config.json`.
    let _ = fs::remove_file(out.join("config.json"));
    assert!(Command::new("mkfifo").arg(out.join("config.json")).status().unwrap().success());
    assert!(Bundle::open_weights(&out).is_ok());
    assert!(Command::new("mkfifo").arg(source.join("pipe")).status().unwrap().success());
    assert!(plan(&source, &CompressOptions::default()).is_err());
}

// ---- bounds ----

fn one_tensor(scratch: &Scratch, dtype: &str, shape: &[usize], bytes: &[u8]) -> PathBuf {
    let source = scratch.path("one");
    fs::create_dir_all(&source).unwrap();
    fs::write(source.join("a.safetensors"), safetensors_file(&[], &[tensor("t", dtype, shape, bytes)])).unwrap();
    source
}

#[test]
fn empty_shapes_do_not_overflow() {
    let scratch = Scratch::new();
    let source = one_tensor(&scratch, "BF16", &[1 << 40, 1 << 40, 0], &[]);
    let out = scratch.path("out");
    assert_eq!(plan(&source, &CompressOptions::default()).unwrap().tensors[0].elements, 0);
    compress(&source, &out, &CompressOptions::default(), &Silent).unwrap();
    assert!(verify(&out, Some(&source), &Silent).unwrap().is_ok());
    decompress(&out, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap();
    assert!(read_tree(&source) == read_tree(&scratch.path("back")));
}

#[test]
fn sizes_that_overflow_are_rejected() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    compress(&source, &out, &CompressOptions::default(), &Silent).unwrap();
    reseal(&out, |manifest| {
        for file in manifest["files"].as_array_mut().unwrap().iter_mut().filter(|file| file["kind"] == "copied") {
            file["size"] = (i64::MAX as u64).into();
        }
    });
    for error in [
        verify(&out, None, &Silent).unwrap_err(),
        decompress(&out, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap_err(),
        Bundle::open(&out).unwrap_err(),
    ] {
        assert!(chain(&error).contains("sum to more than 2^63"), "{}", chain(&error));
        assert_eq!(error.class(), ErrorClass::Mismatch);
    }
    // Sparse files of that size, where the file system supports the sizes: in memory.
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
    small_model(&dir.path().join("model"));
    let huge = |name: &str| {
        let file = fs::File::create(dir.path().join("model").join(name)).unwrap();
        file.set_len((1 << 63) - 4096).is_ok()
    };
    if !["a.bin", "b.bin", "c.bin"].into_iter().all(huge) {
        return;
    }
    let (source, options) = (dir.path().join("model"), CompressOptions::default());
    for error in [
        plan(&source, &options).unwrap_err(),
        compare(&source, std::slice::from_ref(&options)).unwrap_err(),
        compress(&source, &scratch.path("huge"), &options, &Silent).unwrap_err(),
    ] {
        assert!(chain(&error).contains("b.bin: the sizes up to this file sum to more than 2^63"), "{}", chain(&error));
    }
}

/// The writer refuses what a reader would refuse, before writing it.
#[test]
fn reader_and_writer_have_the_same_limits() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("one"), scratch.path("out"));
    let options = CompressOptions::default();
    for (dtype, bytes, rank) in [("BF16", 8192, 64), ("BF16", 8192, 65), ("BF16", 8192, 300), ("F32", 16384, 65)] {
        let shape = [vec![1; rank - 2], vec![64, 64]].concat();
        one_tensor(&scratch, dtype, &shape, &vec![0; bytes]);
        let planned = plan(&source, &options);
        let made = compress(&source, &out, &options, &Silent);
        if rank <= 64 {
            planned.unwrap();
            made.unwrap();
            assert!(verify(&out, Some(&source), &Silent).unwrap().is_ok());
            fs::remove_dir_all(&out).unwrap();
            continue;
        }
        for error in [planned.unwrap_err(), made.unwrap_err()] {
            assert!(
                matches!(&error, BundleError::Rank { tensor, got, limit: 64, .. } if tensor == "t" && *got == rank),
                "{}",
                chain(&error)
            );
            assert!(chain(&error).contains("a.safetensors"), "{}", chain(&error));
        }
        assert!(!out.exists());
    }
}

/// A manifest that readers would refuse is detected by the names alone or when it is made, never after the bundle has
/// its name.
#[test]
fn oversized_manifest_is_not_published() {
    let scratch = Scratch::new();
    // Long names, which the source's headers hold already; then long extents, each of which may also be a single digit.
    let long = format!("0{}", format!(",{}", u64::MAX >> 1).repeat(63));
    for (files, count, name_bytes, shape) in [(7, 20, 1_000_000, "0"), (6, 18_000, 1, long.as_str())] {
        let (source, out) = (scratch.path("many"), scratch.path("out"));
        fs::create_dir(&source).unwrap();
        let prefix = "n".repeat(name_bytes);
        let entries: String = (0..count)
            .map(|i| format!(r#","{prefix}{i}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"#))
            .collect();
        let header = format!("{{{}}}", &entries[1..]);
        let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        (0..files).for_each(|i| fs::write(source.join(format!("{i}.safetensors")), &file).unwrap());
        let error = compress(&source, &out, &CompressOptions::default(), &Silent).unwrap_err();
        assert!(matches!(error, BundleError::ManifestTooLarge { limit: 134_217_728, .. }), "{}", chain(&error));
        assert!(!out.exists());
        // Detected by the names, before anything is written.
        assert_eq!(scratch.path("out.partial").exists(), name_bytes == 1);
        fs::remove_dir_all(source).unwrap();
    }
}

/// A sparse shard of terabytes is an error; it does not kill the process.
#[test]
fn a_sparse_shard_is_refused_before_it_is_held_in_memory() {
    let scratch = Scratch::new();
    // Sixteen exponents in a 2^34-element matrix would be 2^34 bytes of sign_mantissa.
    let (rows, cols) = (1u64 << 17, 1u64 << 17);
    let (source, out) =
        (one_tensor(&scratch, "BF16", &[128, 128], &Weights::TRAINED.bytes(1 << 14, 1)), scratch.path("out"));
    compress(&source, &out, &CompressOptions::new(Profile::Palette), &Silent).unwrap();
    let path = out.join("a.safetensors");
    let whole = fs::read(&path).unwrap();
    let mut header = common::header(&whole);
    let tiles = rows / 64 * (cols / 64);
    let sizes = [
        ("palette", 16),
        ("tile_metadata", tiles * 16),
        ("verbatim_exponents", 0),
        ("palette_index", tiles * 2048),
        ("sign_mantissa", rows * cols),
    ];
    let shapes = [vec![16], vec![tiles, 4], vec![0, 64], vec![tiles, 64, 32], vec![rows, cols]];
    let mut at = 0u64;
    let mut entries = Vec::new();
    for ((name, bytes), shape) in sizes.iter().zip(&shapes) {
        let entry = &mut header[format!("t.unweight.{name}")];
        entry["data_offsets"] = serde_json::json!([at, at + bytes]);
        entry["shape"] = serde_json::json!(shape);
        at += bytes;
        entries.push(serde_json::json!({ "name": name, "bytes": bytes, "digest": "0".repeat(32) }));
    }
    let source_header = header["unweight.source_header"]["shape"][0].as_u64().unwrap();
    // Everything that is checked before the weights is valid.
    let from = header["unweight.source_header"]["data_offsets"][0].as_u64().unwrap() as usize;
    let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let sound_header = &whole[data + from..data + from + source_header as usize];
    header["unweight.source_header"]["data_offsets"] = serde_json::json!([at, at + source_header]);
    let json = header.to_string();
    let mut shard = (json.len() as u64).to_le_bytes().to_vec();
    shard.extend(json.as_bytes());
    let total = shard.len() as u64 + at + source_header;
    fs::write(&path, &shard).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(total).unwrap();
    FileExt::write_all_at(&file, sound_header, total - source_header).unwrap();
    reseal(&out, |manifest| {
        let file = &mut manifest["files"][0];
        let tensor = &mut file["tensors"][0];
        tensor["shape"] = serde_json::json!([rows, cols]);
        (tensor["rows"], tensor["cols"]) = (rows.into(), cols.into());
        tensor["sections"] = entries.clone().into();
        file["size"] = (source_header + rows * cols * 2).into();
        file["shard_size"] = total.into();
        file["shard_header_bytes"] = (shard.len() as u64).into();
        file["shard_header_digest"] = Digest::of(&shard).to_string().into();
    });
    // The tensor of 32 GiB, in a process limited to 8 GiB, is refused without killing the process.
    for what in ["verify in 8 GiB", "decompress in 8 GiB"] {
        let output = child_command(scratch.dir(), what).output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        // Too small a disk is reported first.
        let no_room = what.starts_with("decompress") && text.contains("disk-full: ");
        let no_memory = text.contains("memory-insufficient: ") && text.contains("a.safetensors: 34359738368 bytes");
        assert!(no_memory || no_room, "{text}");
    }
    // A tensor above the format's limit.
    reseal(&out, |manifest| {
        let tensor = &mut manifest["files"][0]["tensors"][0];
        tensor["shape"] = serde_json::json!([rows * 4, cols]);
        tensor["rows"] = (rows * 4).into();
    });
    assert!(chain(&verify(&out, None, &Silent).unwrap_err()).contains("only a raw tensor may"));
}

#[test]
fn a_manifest_beyond_its_limits_is_refused() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    compress(&source, &out, &CompressOptions::default(), &Silent).unwrap();
    let path = out.join("unweight.json");
    reseal(&out, |manifest| {
        let files = manifest["files"].as_array_mut().unwrap();
        let weights = files.iter_mut().find(|file| file["kind"] == "weights").unwrap();
        weights["tensors"][0]["shape"] = vec![1; 65].into();
    });
    let error = Bundle::open(&out).unwrap_err();
    assert!(chain(&error).contains("at most 64 extents"), "{}", chain(&error));
    fs::File::options().write(true).open(&path).unwrap().set_len((128 << 20) + 1).unwrap();
    let error = Bundle::open(&out).unwrap_err();
    assert!(matches!(error, BundleError::TooLarge { limit: 134_217_728, .. }), "{}", chain(&error));
}
