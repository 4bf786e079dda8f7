//! A model compressed in parts: any number of parts merges to the bundle of a single run, and parts that do not belong
//! together are refused.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use unweight_format::{
    Digest,
    bundle::{
        Bundle, BundleError, CompressOptions, CompressReport, DecompressOptions, ErrorClass, MergeOptions, Part,
        Profile, Progress, Signer, Silent, VerifyAfter, compress, decompress, merge, verify,
    },
    testing::demo_model,
};

use crate::common::{self, Scratch, chain, narrow, read_tree, safetensors_file, tensor};

/// What a part has instead of a manifest (ADR 0007).
const PART_FILE_NAME: &str = "unweight.part";

/// Four shards, a separate weights file, an index, a configuration, and other files.
fn model(scratch: &Scratch) -> PathBuf {
    let source = scratch.path("model");
    demo_model::write(&source, &narrow(2, 300, 4)).unwrap();
    fs::create_dir(source.join("sub")).unwrap();
    fs::write(source.join("sub/README.md"), "read me").unwrap();
    // A configuration that is copied unchanged.
    let weights = safetensors_file(&[], &[tensor("t", "BF16", &[64, 64], &common::weights(4096, 3))]);
    fs::create_dir(source.join("other")).unwrap();
    fs::write(source.join("other/config.json"), "[]").unwrap();
    fs::write(source.join("other/model.safetensors"), weights).unwrap();
    source
}

/// Makes part `index` of `of` in its own directory.
fn part(scratch: &Scratch, source: &Path, options: &CompressOptions, index: u32, of: u32) -> (PathBuf, CompressReport) {
    let folder = scratch.path(&format!("parts/{index}-of-{of}"));
    let options = options.clone().part(Part::new(index, of)).force(true);
    let report = compress(source, &folder, &options, &Silent).unwrap();
    (folder, report)
}

fn parts(scratch: &Scratch, source: &Path, options: &CompressOptions, of: u32) -> Vec<PathBuf> {
    (1..=of).map(|index| part(scratch, source, options, index, of).0).collect()
}

#[test]
fn merged_parts_equal_a_single_run() {
    let scratch = Scratch::new();
    let source = model(&scratch);
    for (profile, sha256) in [(Profile::Distribution, false), (Profile::Packed, true)] {
        let signer = Signer::new(|bytes| Ok(format!("signed: {}", Digest::of(bytes))));
        let signer = sha256.then_some(signer);
        let options = CompressOptions::new(profile).sha256(sha256);
        let whole = scratch.path(&format!("whole-{profile}"));
        let expected = compress(&source, &whole, &options.clone().sign(signer.clone()), &Silent).unwrap();
        let tree = read_tree(&whole);
        for of in 1..=6 {
            // The order in which parts are made and named does not matter.
            let mut made: Vec<_> = (1..=of).rev().map(|index| part(&scratch, &source, &options, index, of)).collect();
            made.rotate_left(of as usize / 2);
            let sum = |field: fn(&CompressReport) -> u64| made.iter().map(|(_, report)| field(report)).sum::<u64>();
            assert_eq!(sum(|report| report.files), expected.files, "each file is in one part");
            assert_eq!(sum(|report| report.tensors.len() as u64), expected.tensors.len() as u64);
            assert_eq!(sum(|report| report.original_bytes), expected.original_bytes);
            let weights = |report: &CompressReport| report.tensors.iter().map(|t| t.original_bytes).sum::<u64>();
            let empty = made.iter().filter(|(_, report)| weights(report) == 0).count();
            assert_eq!(empty, if of == 6 { 1 } else { 0 }, "a file is never split");
            for (folder, report) in &made {
                let stored: u64 = read_tree(folder).values().map(|file| file.len() as u64).sum();
                assert_eq!(report.stored_bytes, stored);
                assert_eq!(report.verified_tensors, report.tensors.len() as u64);
                assert!(report.part.as_ref().unwrap().ends_with(&format!("/{of}")));
                let has_copies = report.part.as_ref().unwrap().starts_with("1/");
                assert_eq!(report.unmarked_configs.len(), if has_copies { 1 } else { 0 }, "reported once");
            }
            let folders: Vec<PathBuf> = made.into_iter().map(|(folder, _)| folder).collect();
            let out = scratch.path("out");
            let merging = MergeOptions::default().sign(signer.clone()).force(true);
            let report = merge(&folders, &out, &merging, &Silent).unwrap();
            assert!(read_tree(&out) == tree, "{profile}, {of} parts");
            assert!(!scratch.path("out.partial").exists());
            assert_eq!((report.manifest_digest, report.part), (expected.manifest_digest, None));
            assert_eq!((&report.tensors, &report.encodings), (&expected.tensors, &expected.encodings));
            assert_eq!(
                (report.files, report.original_bytes, report.stored_bytes, report.verified_tensors),
                (expected.files, expected.original_bytes, expected.stored_bytes, expected.verified_tensors)
            );
            // Files shared by hard links remain when the parts are removed.
            fs::remove_dir_all(scratch.path("parts")).unwrap();
            assert!(verify(&out, Some(&source), &Silent).unwrap().is_ok());
        }
    }
}

#[test]
fn parts_are_balanced_and_merge_links_files() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    fs::create_dir(&source).unwrap();
    for (name, rows) in [("a", 64), ("b", 640), ("c", 128), ("d", 320), ("e", 256)] {
        let file = safetensors_file(&[], &[tensor(name, "BF16", &[rows, 64], &common::weights(rows * 64, 1))]);
        fs::write(source.join(format!("{name}.safetensors")), file).unwrap();
    }
    let options = CompressOptions::default();
    let made = parts(&scratch, &source, &options, 2);
    let names = |folder: &Path| read_tree(folder).into_keys().collect::<Vec<_>>();
    assert_eq!(names(&made[0]), ["a.safetensors", "b.safetensors", PART_FILE_NAME]);
    assert_eq!(names(&made[1]), ["c.safetensors", "d.safetensors", "e.safetensors", PART_FILE_NAME]);
    // A link is copied, because it may point anywhere.
    fs::rename(made[1].join("d.safetensors"), scratch.path("elsewhere")).unwrap();
    symlink(scratch.path("elsewhere"), made[1].join("d.safetensors")).unwrap();
    let out = scratch.path("out");
    merge(&made, &out, &MergeOptions::default(), &Silent).unwrap();
    let links = |name: &str| out.join(name).symlink_metadata().map(|m| (m.is_file(), m.nlink())).unwrap();
    assert_eq!(["a", "d", "e"].map(|name| links(&format!("{name}.safetensors"))), [(true, 2), (true, 1), (true, 2)]);
    compress(&source, &scratch.path("whole"), &options, &Silent).unwrap();
    assert!(read_tree(&out) == read_tree(&scratch.path("whole")));
}

#[test]
fn single_file_models_have_one_part() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    demo_model::write(&source, &narrow(1, 300, 1)).unwrap();
    let options = CompressOptions::default();
    compress(&source, &scratch.path("whole"), &options, &Silent).unwrap();
    let made: Vec<_> = (1..=3).map(|index| part(&scratch, &source, &options, index, 3)).collect();
    assert_eq!(made.iter().map(|(_, report)| report.tensors.is_empty()).collect::<Vec<_>>(), [false, true, true]);
    let folders: Vec<_> = made.into_iter().map(|(folder, _)| folder).collect();
    assert_eq!(read_tree(&folders[2]).into_keys().collect::<Vec<_>>(), [PART_FILE_NAME]);
    merge(&folders, &scratch.path("out"), &MergeOptions::default(), &Silent).unwrap();
    assert!(read_tree(&scratch.path("out")) == read_tree(&scratch.path("whole")));
}

/// Cancels after a number of bytes.
struct CancelAfter(u64, AtomicU64);

impl Progress for CancelAfter {
    fn advance(&self, bytes: u64) {
        self.1.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.1.load(Ordering::Relaxed) >= self.0
    }
}

#[test]
fn interrupted_parts_resume() {
    let scratch = Scratch::new();
    let source = model(&scratch);
    let options = CompressOptions::default().ram_bytes(Some(1 << 18));
    compress(&source, &scratch.path("whole"), &options, &Silent).unwrap();
    let second = part(&scratch, &source, &options, 2, 2).0;
    let first = scratch.path("parts/first");
    let first_of = |of| options.clone().part(Part::new(1, of));
    let bytes: u64 = fs::read_dir(&source).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    let stop = CancelAfter(bytes * 2 / 5, AtomicU64::new(0));
    let error = compress(&source, &first, &first_of(2), &stop).unwrap_err();
    assert!(matches!(error, BundleError::Interrupted { .. }), "{error}");
    assert!(!first.exists());
    let report = compress(&source, &first, &first_of(2).resume(true), &Silent).unwrap();
    assert!(!report.resumed_files.is_empty() || report.resumed_tensors > 0);
    let out = scratch.path("out");
    // The merge is stopped, too: no output appears, and it can be repeated.
    let folders = [first.clone(), second];
    let error = merge(&folders, &out, &MergeOptions::default(), &CancelAfter(1, AtomicU64::new(0))).unwrap_err();
    assert!(matches!(error, BundleError::Cancelled) && !out.exists(), "{error}");
    merge(&folders, &out, &MergeOptions::default(), &Silent).unwrap();
    assert!(read_tree(&out) == read_tree(&scratch.path("whole")));
    // Force replaces a part by another, but nothing else.
    let error = compress(&source, &first, &first_of(2), &Silent).unwrap_err();
    assert!(matches!(error, BundleError::OutputExists { .. }), "{error}");
    fs::write(first.join("precious"), "x").unwrap();
    let error = compress(&source, &first, &first_of(3).force(true), &Silent).unwrap_err();
    assert!(matches!(error, BundleError::NotReplaceable { .. }), "{error}");
    fs::remove_file(first.join("precious")).unwrap();
    compress(&source, &first, &first_of(3).force(true), &Silent).unwrap();
}

#[test]
fn mismatched_parts_are_rejected_by_name() {
    let scratch = Scratch::new();
    let source = model(&scratch);
    let options = CompressOptions::default().verify(VerifyAfter::None);
    let made = parts(&scratch, &source, &options, 3);
    let out = scratch.path("out");
    let assert_rejected = |folders: &[&Path], expected: &[&str]| {
        let folders: Vec<PathBuf> = folders.iter().map(|folder| folder.to_path_buf()).collect();
        let error = merge(&folders, &out, &MergeOptions::default(), &Silent).unwrap_err();
        let text = chain(&error);
        assert!(expected.iter().all(|part| text.contains(part)), "{text:?} misses one of {expected:?}");
        assert!(!out.exists() && !scratch.path("out.partial").exists(), "no files are left");
        error
    };
    let [a, b, c] = [&made[0], &made[1], &made[2]].map(PathBuf::as_path);
    assert_rejected(&[], &["no parts"]);
    assert_rejected(&[a, c], &["part 2/3 is missing"]);
    let error = assert_rejected(&[a, b, b, c], &["2-of-3", "part 2/3", "once"]);
    assert_eq!(error.class(), ErrorClass::Failed);
    assert_rejected(&[a, b, c, &source], &["model", "no unweight.part"]);
    compress(&source, &scratch.path("whole"), &options, &Silent).unwrap();
    assert_rejected(&[a, &scratch.path("whole"), c], &["whole", "no unweight.part"]);
    assert_rejected(&[a, b, &scratch.path("nothing")], &["nothing", "open the part"]);

    let other = Scratch::new();
    let second = |options: &CompressOptions, source: &Path, of| part(&other, source, options, 2, of).0;
    let palette = CompressOptions::new(Profile::Palette);
    for (what, folder) in [
        ("made with other options", second(&palette, &source, 3)),
        ("made with other options", second(&options.clone().sha256(true), &source, 3)),
        ("made with other options", second(&options.clone().exclude(vec!["*.1.*".into()]), &source, 3)),
        ("made with another number of parts", second(&options, &source, 4)),
    ] {
        assert_rejected(&[a, &folder, c], &[folder.to_str().unwrap(), what, "1-of-3"]);
    }
    // The path of a plan does not matter.
    let rules = r#"{"rules": [{"match": "*.0.mlp.*", "encoding": "palette"}]}"#;
    let plans = ["here.json", "there.json"].map(|name| other.path(name));
    plans.iter().for_each(|plan| fs::write(plan, rules).unwrap());
    let planned = plans.map(|plan| options.clone().plan_file(Some(plan)));
    let folders: Vec<_> = (1..=3).map(|i| part(&other, &source, &planned[i as usize % 2], i, 3).0).collect();
    merge(&folders, &other.path("planned"), &MergeOptions::default(), &Silent).unwrap();

    // Other sources: one more file, another text, another header. A file that only one part reads cannot reveal a
    // difference.
    let changed = |change: &dyn Fn(&Path)| {
        let copy = other.path("copy");
        _ = fs::remove_dir_all(&copy);
        for (name, bytes) in read_tree(&source) {
            fs::create_dir_all(copy.join(&name).parent().unwrap()).unwrap();
            fs::write(copy.join(name), bytes).unwrap();
        }
        change(&copy);
        second(&options, &copy, 3)
    };
    let padded = |(name, bytes): &(String, Vec<u8>)| name.ends_with(".safetensors") && padding(bytes).is_some();
    let (shard, _) = read_tree(&source).into_iter().find(padded).unwrap();
    let changes: [&dyn Fn(&Path); 4] = [
        &|copy| fs::write(copy.join("more"), "x").unwrap(),
        &|copy| fs::write(copy.join("sub/README.md"), "read it").unwrap(),
        &|copy| fs::remove_file(copy.join("sub/README.md")).unwrap(),
        &|copy| {
            let mut bytes = fs::read(copy.join(&shard)).unwrap();
            let at = padding(&bytes).unwrap();
            bytes[at] = b'\n';
            fs::write(copy.join(&shard), bytes).unwrap();
        },
    ];
    for change in changes {
        let folder = changed(change);
        assert_rejected(&[a, &folder, c], &[folder.to_str().unwrap(), "made with another source"]);
    }

    // Signatures need SHA-256, because other digests can be forged.
    let signing = MergeOptions::default().sign(Signer::new(|_| Ok(String::new())));
    let error = merge(&made, &out, &signing, &Silent).unwrap_err();
    assert!(matches!(error, BundleError::UnsignableParts { .. }), "{error}");
}

/// The first of the spaces that end the header of a weights file, if there are two.
fn padding(file: &[u8]) -> Option<usize> {
    let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (file[end - 2..end] == *b"  ").then_some(end - 2)
}

/// Changes a part's description, with a correct digest.
fn reseal(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = folder.join(PART_FILE_NAME);
    let mut part: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()[33..]).unwrap();
    change(&mut part);
    let json = serde_json::to_vec(&part).unwrap();
    fs::write(path, [Digest::of(&json).to_string().as_bytes(), b"\n", &json].concat()).unwrap();
}

#[test]
fn damaged_and_hostile_parts_are_rejected() {
    let scratch = Scratch::new();
    let source = model(&scratch);
    let made = parts(&scratch, &source, &CompressOptions::default(), 2);
    let sound: Vec<BTreeMap<String, Vec<u8>>> = made.iter().map(|folder| read_tree(folder)).collect();
    let shard = sound[1].keys().find(|name| name.ends_with(".safetensors")).unwrap().clone();
    let out = scratch.path("out");
    let restore = || {
        for (folder, tree) in made.iter().zip(&sound) {
            _ = fs::remove_dir_all(folder);
            for (name, bytes) in tree {
                fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
                fs::write(folder.join(name), bytes).unwrap();
            }
        }
        _ = fs::remove_dir_all(scratch.path("out.partial"));
    };
    let assert_rejected = |what: &str, expected: &[&str], change: &dyn Fn(&Path, &Path)| {
        restore();
        change(&made[0], &made[1]);
        let error = merge(&made, &out, &MergeOptions::default(), &Silent).unwrap_err();
        let text = chain(&error);
        assert!(expected.iter().all(|part| text.contains(part)), "{what}: {text:?} misses one of {expected:?}");
        assert_eq!(error.class(), ErrorClass::Mismatch, "{what}: {text}");
        assert!(!out.exists(), "{what}");
    };
    let flip = |path: PathBuf, at: fn(usize) -> usize| {
        let mut bytes = fs::read(&path).unwrap();
        let at = at(bytes.len());
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let by_name = [made[1].to_str().unwrap(), shard.as_str()];
    assert_rejected("missing", &by_name, &|_, second| fs::remove_file(second.join(&shard)).unwrap());
    assert_rejected("truncated", &by_name, &|_, second| {
        let bytes = &sound[1][&shard];
        fs::write(second.join(&shard), &bytes[..bytes.len() - 1]).unwrap();
    });
    assert_rejected("header", &by_name, &|_, second| flip(second.join(&shard), |_| 20));
    assert_rejected("section", &[&shard], &|_, second| flip(second.join(&shard), |bytes| bytes - 5));
    let copied = ["config.json.source", "tokenizer.json", "sub/README.md", "model.safetensors.index.json.source"];
    for name in copied {
        assert_rejected(name, &[made[0].to_str().unwrap(), name], &|first, _| {
            flip(first.join(name), |bytes| bytes / 2)
        });
    }
    for at in [|_| 3, |bytes| bytes / 2, |bytes| bytes - 1] {
        assert_rejected("part", &[made[1].to_str().unwrap(), PART_FILE_NAME], &|_, second| {
            flip(second.join(PART_FILE_NAME), at)
        });
    }
    assert_rejected("empty", &[PART_FILE_NAME, "truncated"], &|_, second| {
        fs::write(second.join(PART_FILE_NAME), "").unwrap()
    });
    type Change = fn(&mut serde_json::Value);
    let cases: [(&str, Change); 9] = [
        ("its format is 'other'", |part| part["format"] = "other".into()),
        ("part 3/2 does not exist", |part| part["part"]["index"] = 3.into()),
        ("part 0/0 does not exist", |part| part["part"] = serde_json::json!({ "index": 0, "of": 0 })),
        ("relative", |part| part["files"][0]["name"] = "../x.safetensors".into()),
        ("listed twice", |part| part["files"][1] = part["files"][0].clone()),
        ("does not match the source", |part| part["files"][0]["name"] = "other.safetensors".into()),
        ("no part contains the file", |part| _ = part["files"].as_array_mut().unwrap().remove(0)),
        ("its size is", |part| part["files"][0]["size"] = 7.into()),
        ("missing field `source`", |part| _ = part.as_object_mut().unwrap().remove("source")),
    ];
    for (expected, change) in cases {
        assert_rejected(expected, &[PART_FILE_NAME, expected], &|_, second| reseal(second, change));
    }
    // Two parts contain the same file.
    assert_rejected("twice", &[PART_FILE_NAME, "does not match the source"], &|first, second| {
        let name = shard.clone();
        fs::copy(second.join(&name), first.join(&name)).unwrap();
        let json = fs::read(second.join(PART_FILE_NAME)).unwrap();
        let theirs: serde_json::Value = serde_json::from_slice(&json[33..]).unwrap();
        let entry =
            theirs["files"].as_array().unwrap().iter().find(|file| file["name"] == name.as_str()).unwrap().clone();
        reseal(first, |part| part["files"].as_array_mut().unwrap().push(entry));
    });
    // All parts were made by a future program.
    restore();
    made.iter().for_each(|folder| reseal(folder, |part| part["creator"] = "unweight 99.0.0".into()));
    let error = merge(&made, &out, &MergeOptions::default(), &Silent).unwrap_err();
    assert!(matches!(&error, BundleError::PartCreator { creator, .. } if creator == "unweight 99.0.0"), "{error}");
    restore();
    reseal(&made[1], |part| part["version"]["minor"] = 7.into());
    let error = merge(&made, &out, &MergeOptions::default(), &Silent).unwrap_err();
    assert!(error.to_string().contains("another program or version"), "{error}");
    restore();
    merge(&made, &out, &MergeOptions::default(), &Silent).unwrap();
}

#[test]
fn parts_are_not_bundles() {
    let scratch = Scratch::new();
    let source = model(&scratch);
    let folder = part(&scratch, &source, &CompressOptions::default(), 1, 2).0;
    let errors = [
        Bundle::open(&folder).map(|_| ()).unwrap_err(),
        Bundle::open_weights(&folder).map(|_| ()).unwrap_err(),
        verify(&folder, None, &Silent).map(|_| ()).unwrap_err(),
        decompress(&folder, &scratch.path("back"), &DecompressOptions::default(), &Silent).map(|_| ()).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(&error, BundleError::NotMerged { part, .. } if part.to_string() == "1/2"), "{error}");
        assert!(error.to_string().contains("merge all parts"), "{error}");
    }
    // A model must not contain a file of this name.
    fs::write(source.join(PART_FILE_NAME), "x").unwrap();
    let options = CompressOptions::default().part(Part::new(1, 2));
    let error = compress(&source, &scratch.path("b"), &options, &Silent).unwrap_err();
    assert!(matches!(&error, BundleError::ReservedFile { path } if path.ends_with(PART_FILE_NAME)), "{error}");
    assert!(!scratch.path("b.partial").exists());
}
