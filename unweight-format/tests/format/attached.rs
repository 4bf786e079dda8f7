//! Attached kernels: they are added and removed together, no other byte changes, and damaged kernels are never
//! returned.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use unweight_format::{
    Digest,
    bundle::{
        ATTACHED_NAME, Attached, AttachedBy, AttachedKernel, Bundle, BundleError, CompressOptions, DecompressOptions,
        ErrorClass, PLAN_BYTES_MAX, Remedy, Silent, VerifyOptions, attach, attach_plan, compress, decompress, detach,
        may_attach, may_attach_plan, verify, verify_with,
    },
};

use crate::common::{Scratch, read_tree, small_model};

fn bundle(scratch: &Scratch) -> PathBuf {
    let (source, bundle) = (scratch.path("model"), scratch.path("bundle"));
    small_model(&source);
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    bundle
}

fn kernel(name: &str, digit: char, binary: &'static [u8]) -> (AttachedKernel, &'static [u8]) {
    let by = AttachedBy { name: "nvrtc".into(), version: "13.0".into(), build: "65be".into() };
    let source = std::iter::repeat_n(digit, 64).collect();
    (AttachedKernel::new(name.into(), "sm_90a".into(), source, by, binary), binary)
}

/// Kernels out of order, one of them twice.
fn kernels() -> Vec<(AttachedKernel, &'static [u8])> {
    vec![
        kernel("uw_b", '1', b"the second"),
        kernel("uw_a", '2', b"the first, for one source"),
        kernel("uw_a", '1', b"the first"),
        kernel("uw_b", '1', b"not this one"),
    ]
}

/// Attaches the plan that `change` makes of the current one.
fn add_plan(dir: &Path, change: impl FnOnce(Option<&str>) -> String) -> Result<u64, BundleError> {
    attach_plan(dir, |old| Ok(change(old)))
}

fn reason(result: Result<impl std::fmt::Debug, BundleError>) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.class(), ErrorClass::Mismatch, "{error}");
    assert!(matches!(error, BundleError::Attached { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("unweight.kernels: "), "{text}");
    text
}

#[test]
fn attach_and_detach_change_no_other_byte() {
    let scratch = Scratch::new();
    let dir = bundle(&scratch);
    let before = read_tree(&dir);
    assert!(Bundle::open(&dir).unwrap().attached().unwrap().is_none());
    let bytes = attach(&dir, &kernels(), false).unwrap();

    let mut after = read_tree(&dir);
    assert_eq!(after.remove(ATTACHED_NAME).map(|file| file.len() as u64), Some(bytes));
    assert!(after == before, "a file of the bundle changed");
    let attached = Bundle::open(&dir).unwrap().attached().unwrap().unwrap();
    assert_eq!(attached.bytes(), bytes);
    let names: Vec<_> = attached.kernels().iter().map(|kernel| (kernel.name.as_str(), &kernel.source[..1])).collect();
    assert_eq!(names, [("uw_a", "1"), ("uw_a", "2"), ("uw_b", "1")]);
    let read = |name: &str, digit: &str| {
        let kernel = attached.find(name, &digit.repeat(64))?;
        Some(String::from_utf8(attached.read(kernel).unwrap()).unwrap())
    };
    assert_eq!(read("uw_a", "1").as_deref(), Some("the first"));
    assert_eq!(read("uw_a", "2").as_deref(), Some("the first, for one source"));
    assert_eq!(read("uw_b", "1").as_deref(), Some("the second"));
    assert_eq!(read("uw_b", "2"), None);

    // Verify accepts the attached file, and decompress does not restore it.
    let report = verify(&dir, Some(&scratch.path("model")), &Silent).unwrap();
    assert!(report.is_ok(), "{:?}", report.problems);
    assert_eq!(report.attached_kernels, 3);
    let sizes: usize = read_tree(&dir).values().map(Vec::len).sum();
    assert_eq!(report.stored_bytes, sizes as u64);
    decompress(&dir, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap();
    assert!(read_tree(&scratch.path("back")) == read_tree(&scratch.path("model")));

    assert!(matches!(attach(&dir, &kernels(), false), Err(BundleError::OutputExists { .. })));
    let fewer = attach(&dir, &kernels()[..1], true).unwrap();
    assert!(fewer < bytes);
    assert_eq!(Bundle::open(&dir).unwrap().attached().unwrap().unwrap().kernels().len(), 1);
    assert_eq!(detach(&dir).unwrap().map(|detached| (detached.bytes, detached.had_plan)), Some((fewer, false)));
    assert_eq!(detach(&dir).unwrap(), None);
    assert!(read_tree(&dir) == before);
}

/// A plan is added, replaced, kept when kernels are added, and removed with them; no kernel changes.
#[test]
fn a_plan_is_stored_next_to_kernels() {
    let scratch = Scratch::new();
    let dir = bundle(&scratch);
    let before = read_tree(&dir);
    let attached = || Bundle::open(&dir).unwrap().attached().unwrap().unwrap();
    let plan = || attached().plan().map(str::to_owned);
    add_plan(&dir, |old| format!("a plan \u{fc}{}", old.unwrap_or_default())).unwrap();
    assert_eq!((plan().as_deref(), attached().kernels().len()), (Some("a plan \u{fc}"), 0));
    // There are no kernels yet, so nothing is replaced.
    attach(&dir, &kernels(), false).unwrap();
    assert_eq!((plan().as_deref(), attached().kernels().len()), (Some("a plan \u{fc}"), 3));
    add_plan(&dir, |old| old.unwrap().replace("a plan \u{fc}", "another")).unwrap();
    assert_eq!(plan().as_deref(), Some("another"));
    let kernels_now = attached();
    for (kernel, binary) in kernels().iter().take(3) {
        let found = kernels_now.find(&kernel.name, &kernel.source).unwrap();
        assert_eq!(kernels_now.read(found).unwrap(), *binary);
    }
    assert!(matches!(attach(&dir, &kernels(), false), Err(BundleError::OutputExists { .. })));
    attach(&dir, &kernels()[..1], true).unwrap();
    assert_eq!((plan().as_deref(), attached().kernels().len()), (Some("another"), 1));
    let report = verify(&dir, Some(&scratch.path("model")), &Silent).unwrap();
    assert!(report.is_ok() && report.attached_kernels == 1, "{:?}", report.problems);
    assert!(reason(add_plan(&dir, |_| "x".repeat(PLAN_BYTES_MAX + 1))).contains("above the limit"));
    assert_eq!(plan().as_deref(), Some("another"), "nothing changed");
    // A damaged file is not rewritten as if it were sound.
    let path = dir.join(ATTACHED_NAME);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, &bytes).unwrap();
    reason(add_plan(&dir, |_| "a third".to_owned()));
    reason(may_attach_plan(&dir));
    // With force it could be replaced.
    may_attach(&dir).unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
    // With force it is replaced. The plan is kept, because it is in the index, which is sound. Without an index there
    // is none.
    for cut in [1, 10] {
        fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
        attach(&dir, &kernels(), true).unwrap();
        assert_eq!((plan().as_deref(), attached().kernels().len()), (Some("another"), 3), "{cut}");
        fs::write(&path, &bytes).unwrap();
    }
    fs::write(&path, &bytes[..100]).unwrap();
    attach(&dir, &kernels(), true).unwrap();
    assert_eq!(plan(), None);
    detach(&dir).unwrap();
    assert!(read_tree(&dir) == before);
    // The error comes before anything is compiled.
    fs::create_dir(&path).unwrap();
    assert!(matches!(may_attach(&dir), Err(BundleError::Io { path: at, .. }) if at == path));
}

/// Attaching, detaching and checking for them wait for the process that holds the lock.
#[test]
fn concurrent_attaches_wait_for_each_other() {
    let scratch = Scratch::new();
    let dir = bundle(&scratch);
    let writers: [&(dyn Fn(&Path) + Sync); 5] = [
        &|dir| _ = attach(dir, &kernels(), true).unwrap(),
        &|dir| _ = add_plan(dir, |_| "a plan".to_owned()).unwrap(),
        &|dir| may_attach(dir).unwrap(),
        &|dir| _ = may_attach_plan(dir).unwrap(),
        &|dir| _ = detach(dir).unwrap(),
    ];
    for (at, writer) in writers.iter().enumerate() {
        let locked_dir = File::open(&dir).unwrap();
        locked_dir.lock().unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| writer(&dir));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!waits.is_finished(), "{at}");
            drop(locked_dir);
        });
    }
    // After waiting, they use the state at that time.
    let locked_dir = File::open(&dir).unwrap();
    locked_dir.lock().unwrap();
    std::thread::scope(|scope| {
        let both = [
            scope.spawn(|| attach(&dir, &kernels(), false)),
            scope.spawn(|| add_plan(&dir, |old| format!("{}a plan", old.unwrap_or_default()))),
        ];
        std::thread::sleep(Duration::from_millis(50));
        drop(locked_dir);
        both.into_iter().for_each(|one| _ = one.join().unwrap().unwrap());
    });
    let attached = Bundle::open(&dir).unwrap().attached().unwrap().unwrap();
    assert_eq!((attached.plan(), attached.kernels().len()), (Some("a plan"), 3));
    // A failed change changes nothing.
    let failed: Result<u64, Box<dyn std::error::Error>> = attach_plan(&dir, |_| Err("no".into()));
    assert_eq!(failed.unwrap_err().to_string(), "no");
    assert_eq!(may_attach_plan(&dir).unwrap().as_deref(), Some("a plan"));
    assert!(detach(&dir).unwrap().is_some_and(|detached| detached.had_plan));
}

/// Threads that extend a plan at the same time wait for each other, and no change is lost.
#[test]
fn concurrent_plans_are_merged() {
    let scratch = Scratch::new();
    let dir = bundle(&scratch);
    let before = read_tree(&dir);
    may_attach_plan(&dir).unwrap();
    assert!(read_tree(&dir) == before, "asking leaves nothing");
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let dir = &dir;
            scope.spawn(move || {
                for line in 0..5 {
                    add_plan(dir, |old| format!("{}{writer}.{line}\n", old.unwrap_or_default())).unwrap();
                    let plan = may_attach_plan(dir).unwrap().unwrap();
                    assert!(plan.contains(&format!("{writer}.{line}\n")));
                }
            });
        }
    });
    let attached = Bundle::open(&dir).unwrap().attached().unwrap().unwrap();
    let mut lines: Vec<&str> = attached.plan().unwrap().lines().collect();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), 20, "{lines:?}");
    assert!(matches!(may_attach_plan(&scratch.path("model")), Err(BundleError::NotABundle { .. })));
}

#[test]
fn every_flipped_bit_and_truncation_is_detected() {
    let scratch = Scratch::new();
    let dir = bundle(&scratch);
    attach(&dir, &kernels(), false).unwrap();
    let path = dir.join(ATTACHED_NAME);
    let good = fs::read(&path).unwrap();
    let sound = |attached: Option<Attached>| -> Result<(), BundleError> {
        let attached = attached.expect("the file is there");
        attached.kernels().iter().try_for_each(|kernel| attached.read(kernel).map(drop))
    };
    for at in 0..good.len() {
        for bit in [0x01, 0x80] {
            let mut bytes = good.clone();
            bytes[at] ^= bit;
            fs::write(&path, bytes).unwrap();
            reason(Attached::open(&path).and_then(sound));
        }
        fs::write(&path, &good[..at]).unwrap();
        reason(Attached::open(&path));
    }
    fs::write(&path, [&good[..], b"x"].concat()).unwrap();
    reason(Attached::open(&path));

    // `verify` reports the kernel by name and offset; nothing else is affected.
    let mut bytes = good.clone();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let report = verify(&dir, None, &Silent).unwrap();
    let offset = good.len() - "the second".len();
    assert_eq!(report.problems.len(), 1, "{:?}", report.problems);
    assert_eq!(report.problems[0].file, ATTACHED_NAME);
    assert!(report.problems[0].message.contains(&format!("kernel uw_b at byte {offset}: ")), "{:?}", report.problems);
    let quick = VerifyOptions::default().quick(true);
    assert!(verify_with(&dir, &quick, &Silent).unwrap().is_ok(), "only its index is looked at");
    fs::write(&path, &good[..40]).unwrap();
    assert_eq!(verify_with(&dir, &quick, &Silent).unwrap().problems[0].file, ATTACHED_NAME);
    decompress(&dir, &scratch.path("back"), &DecompressOptions::default(), &Silent).unwrap();
    assert!(read_tree(&scratch.path("back")) == read_tree(&scratch.path("model")));
    assert_eq!(detach(&dir).unwrap().map(|detached| detached.bytes), Some(40));
}

/// A file with a given index under the correct digest.
fn with_index(index: &str, binaries: &[u8]) -> Vec<u8> {
    let digest = Digest::of(index.as_bytes()).to_string();
    [b"unweight.kernels", &(index.len() as u64).to_le_bytes()[..], digest.as_bytes(), index.as_bytes(), binaries]
        .concat()
}

#[test]
fn hostile_index_is_rejected() {
    let scratch = Scratch::new();
    let path = scratch.path("kernels");
    let (source, digest) = ("1".repeat(64), Digest::of(b"abc"));
    let entry = |name: &str, source: &str, bytes: &str| {
        format!(
            r#"{{"name":"{name}","arch":"sm_90a","source":"{source}","compiler":{{"name":"nvrtc","version":"13.0","build":""}},"bytes":{bytes},"digest":"{digest}"}}"#
        )
    };
    let index = |major: u32, entries: &[String]| {
        format!(r#"{{"version":{{"major":{major},"minor":7}},"later":1,"kernels":[{}]}}"#, entries.join(","))
    };
    let open = |index: &str, binaries: &[u8]| {
        fs::write(&path, with_index(index, binaries)).unwrap();
        Attached::open(&path)
    };
    // The template is valid: it has a newer minor version and an unknown field.
    let good = open(&index(1, &[entry("uw_a", &source, "3")]), b"abc").unwrap().unwrap();
    assert_eq!(good.read(&good.kernels()[0]).unwrap(), b"abc");

    let one = |name: &str, source: &str, bytes: &str| reason(open(&index(1, &[entry(name, source, bytes)]), b"abc"));
    assert!(one("../uw_a", &source, "3").contains("its name"));
    assert!(one("", &source, "3").contains("its name"));
    assert!(one(&"x".repeat(161), &source, "3").contains("its name"));
    assert!(one("uw_a", &"A".repeat(64), "3").contains("its source"));
    assert!(one("uw_a", "1", "3").contains("its source"));
    // Sizes that would be read or summed if they were trusted.
    assert!(one("uw_a", &source, "0").contains("no bytes, or more"));
    assert!(one("uw_a", &source, "67108865").contains("no bytes, or more"));
    assert!(one("uw_a", &source, "18446744073709551615").contains("no bytes, or more"));
    assert!(one("uw_a", &source, "4").contains("its kernels end at byte"));
    assert!(one("uw_a", &source, "-3").contains("its index at line"));
    let twice = [entry("uw_a", &source, "3"), entry("uw_a", &source, "3")];
    assert!(reason(open(&index(1, &twice), b"abcabc")).contains("listed twice"));
    let unsorted = [entry("uw_b", &source, "3"), entry("uw_a", &source, "3")];
    assert!(reason(open(&index(1, &unsorted), b"abcabc")).contains("out of order"));
    assert!(reason(open(&index(2, &[]), b"")).contains("newer than this program's 1.0"));
    for text in ["", "{}", "[]", r#"{"version":{"major":1,"minor":0}}"#] {
        reason(open(text, b""));
    }
    // A binary that does not match its entry.
    let other = open(&index(1, &[entry("uw_a", &source, "3")]), b"abd").unwrap().unwrap();
    assert!(reason(other.read(&other.kernels()[0])).contains("expected"));

    // An index of a terabyte in a file of that size is refused by its size, without reading it.
    let sparse = File::create(&path).unwrap();
    sparse.set_len(1 << 40).unwrap();
    assert!(reason(Attached::open(&path)).contains("above the limit"));
    let mut head = with_index("", b"");
    head[16..24].copy_from_slice(&(512u64 << 20).to_le_bytes());
    fs::write(&path, head).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(1 << 29).unwrap();
    assert!(reason(Attached::open(&path)).contains("exceeds the file or the limit"));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(reason(Attached::open(&path)).contains("not a regular file"));
}

#[test]
fn writer_and_reader_reject_the_same_index() {
    let (mut entry, binary) = kernel("uw_a", '1', b"abc");
    entry.bytes = 2;
    assert!(reason(Attached::encode(&[(entry, binary)])).contains("its size or digest"));
    let (mut entry, binary) = kernel("uw_a", '1', b"abc");
    entry.compiler.version = "13\n".into();
    assert!(reason(Attached::encode(&[(entry, binary)])).contains("its compiler"));
    let (mut entry, binary) = kernel("uw_a", '1', b"abc");
    entry.arch = "sm 90".into();
    assert!(reason(Attached::encode(&[(entry, binary)])).contains("its arch"));
}

#[test]
fn a_full_disk_while_attaching_leaves_nothing_to_resume() {
    let full = |path: &str| {
        let source = std::io::ErrorKind::StorageFull.into();
        BundleError::DiskFull { path: path.into(), needed_bytes: 2, free_bytes: 1, source }.remedy()
    };
    assert_eq!(full("b/unweight.kernels"), Some(Remedy::FreeAndRepeat));
    assert_eq!(full("b/model.safetensors"), Some(Remedy::FreeAndResume));
}

#[test]
fn an_interrupted_attach_blocks_nothing() {
    let scratch = Scratch::new();
    let dir = bundle(&scratch);
    let (partial, outside) = (dir.join("unweight.kernels.partial"), scratch.path("outside"));
    fs::write(&outside, "mine").unwrap();
    let plants: [fn(&Path, &Path); 2] =
        [|partial, _| fs::write(partial, "half").unwrap(), |partial, outside| symlink(outside, partial).unwrap()];
    for plant in plants {
        plant(&partial, &outside);
        assert!(Bundle::open(&dir).unwrap().attached().unwrap().is_none());
        if !partial.is_symlink() {
            // The problem is identified, and it is the only one.
            let problems = verify(&dir, None, &Silent).unwrap().problems;
            assert!(problems.len() == 1 && problems[0].is_extra, "{problems:?}");
            assert_eq!(problems[0].code, "attach-unfinished", "{problems:?}");
        }
        attach(&dir, &kernels(), false).unwrap();
        assert!(verify(&dir, None, &Silent).unwrap().is_ok());
        plant(&partial, &outside);
        detach(&dir).unwrap();
        assert!(verify(&dir, None, &Silent).unwrap().is_ok());
    }
    assert_eq!(fs::read_to_string(&outside).unwrap(), "mine");
    assert!(matches!(attach(&scratch.path("model"), &kernels(), false), Err(BundleError::NotABundle { .. })));
}

#[test]
fn attached_file_name_is_reserved() {
    let scratch = Scratch::new();
    let dir = bundle(&scratch);
    attach(&dir, &kernels(), false).unwrap();
    // Kernels are disposable: a bundle with kernels can be replaced, and the new one has none.
    compress(&scratch.path("model"), &dir, &CompressOptions::default().force(true), &Silent).unwrap();
    assert!(!dir.join(ATTACHED_NAME).exists());
    fs::write(scratch.path("model").join(ATTACHED_NAME), "mine").unwrap();
    let error = compress(&scratch.path("model"), &scratch.path("other"), &CompressOptions::default(), &Silent);
    assert!(matches!(error, Err(BundleError::ReservedFile { .. })), "{error:?}");
    // The source may contain a file with the temporary name of an attachment, which must not be removed.
    fs::remove_file(scratch.path("model").join(ATTACHED_NAME)).unwrap();
    let own = scratch.path("model").join("unweight.kernels.partial");
    fs::write(&own, "mine").unwrap();
    let other = scratch.path("other");
    compress(&scratch.path("model"), &other, &CompressOptions::default(), &Silent).unwrap();
    let refused = [attach(&other, &kernels(), true), add_plan(&other, |_| String::new())];
    assert!(refused.iter().all(|refused| matches!(refused, Err(BundleError::NameTaken { .. }))), "{refused:?}");
    let error = detach(&other).unwrap_err();
    assert!(matches!(&error, BundleError::NameTaken { path } if path.ends_with("unweight.kernels.partial")), "{error}");
    assert!(verify(&other, Some(&scratch.path("model")), &Silent).unwrap().is_ok());
}
