//! Operations that fail: creating threads, changing modes, renaming. Each test runs the work in a child process, as a
//! user who is subject to limits and modes, or with an injected fault (`FAULTS`).

use std::{
    fs, io,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, geteuid, setrlimit};
use unweight_format::{
    CodeLimit, Digest, EncodingId, FloatMatrix, StoredTensor,
    bundle::{
        BundleError, CompressOptions, CpuEncoder, DecompressOptions, Encoder, EncoderError, ErrorClass, Profile,
        Progress, Silent, VerifyAfter, compress, compress_with, decompress, verify,
    },
    testing::demo_model::{self, DemoOptions},
};

use crate::common::{self, Scratch, chain, read_tree, safetensors_file, small_model, tensor};

const ROOT: &str = "UNWEIGHT_TEST_ROOT";
const WHAT: &str = "UNWEIGHT_TEST_WHAT";
const THREADS: &str = "UNWEIGHT_TEST_THREADS";

/// Only runs as a child process of other tests.
#[test]
fn child() {
    let Ok(root) = std::env::var(ROOT) else { return };
    if let Ok(threads) = std::env::var(THREADS) {
        let limit = threads.parse().ok();
        setrlimit(Resource::Nproc, Rlimit { current: limit, maximum: limit }).unwrap();
    }
    let root = Path::new(&root);
    let (model, bundle, out) = (root.join("model"), root.join("bundle"), root.join("out"));
    let options = CompressOptions::default().verify(VerifyAfter::None);
    let resume = options.clone().resume(true);
    let compress = |options: &CompressOptions| compress(&model, &out, options, &Silent).map(drop);
    let decompress = |options: &DecompressOptions| decompress(&bundle, &out, options, &Silent).map(drop);
    let result = match std::env::var(WHAT).unwrap().as_str() {
        "demo" => demo_model::write(&root.join("demo"), &DemoOptions::default()).map(drop),
        "compress" => compress(&options),
        "resume" => compress(&resume),
        "replace" => compress(&options.force(true)),
        "compress and verify" => compress(&options.verify(VerifyAfter::Full)),
        "compress and verify in no memory" => compress(&options.verify(VerifyAfter::Full).ram_bytes(1u64)),
        "compress and sample" => compress(&options.verify(VerifyAfter::Sample)),
        "verify" => verify(&bundle, None, &Silent).map(drop),
        "decompress" => decompress(&DecompressOptions::default()),
        "resume decompress" => decompress(&DecompressOptions::default().resume(true)),
        // With one byte of memory, a tensor is read only after the previous one is written.
        "compress in no memory" => compress(&options.ram_bytes(1u64)),
        "decompress in no memory" => decompress(&DecompressOptions::default().ram_bytes(1u64)),
        "panic in the encoder" => {
            compress_with(&model, &out, &options.ram_bytes(1u64), &PanickingEncoder, &Silent).map(drop)
        }
        other => panic!("{other}"),
    };
    let message = |error| format!("{}: {}", BundleError::code(&error), chain(&error));
    println!("child says: {}", result.map_or_else(message, |()| "done".into()));
}

struct PanickingEncoder;

impl Encoder for PanickingEncoder {
    fn encode(
        &self,
        _: FloatMatrix<'_>,
        _: EncodingId,
        _: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
        panic!("the encoder")
    }
}

/// The test [`child`] in its own process, and what it prints.
struct Child(Command);

impl Child {
    fn new(root: &Path, what: &str) -> Self {
        Self::of(Command::new(std::env::current_exe().unwrap()), root, what)
    }

    /// Runs the child as a user who is subject to modes and limits, unlike root. That user then owns everything below
    /// `root`.
    fn bound(root: &Path, what: &str) -> Self {
        if !geteuid().is_root() {
            return Self::new(root, what);
        }
        // A unique user, so that no other processes count. The user may not have access to the original program's
        // directory.
        let (user, copy) = (20_000 + std::process::id() % 40_000, root.join("program"));
        if !copy.exists() {
            fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        }
        assert!(Command::new("chown").args(["-hR", &user.to_string()]).arg(root).status().unwrap().success());
        let mut command = Command::new(copy);
        command.uid(user).gid(user).current_dir(root);
        Self::of(command, root, what)
    }

    fn of(mut command: Command, root: &Path, what: &str) -> Self {
        command.args(["--exact", "faults::child", "--nocapture", "--test-threads=1"]).env(ROOT, root).env(WHAT, what);
        Self(command)
    }

    fn with(mut self, key: &str, value: &str) -> Self {
        self.0.env(key, value);
        self
    }

    /// What the child prints; empty if it was aborted.
    fn output(mut self) -> String {
        let output = loop {
            match self.0.output() {
                // A process that another test is starting still has the copy open for writing.
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                    thread::sleep(Duration::from_millis(10));
                }
                output => break output.unwrap(),
            }
        };
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(!text.contains("panicked"), "{text}");
        text.split_once("child says: ").map_or("", |(_, message)| message).lines().next().unwrap_or_default().to_owned()
    }

    /// Checks that the child fails, and does not hang.
    fn panics(mut self, what: &str) {
        let mut child = self.0.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if start.elapsed() > Duration::from_secs(60) => {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    panic!("{what}: it hangs");
                }
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        assert_eq!(status.code(), Some(101), "{what}");
    }

    /// Checks that the child aborts at a failpoint.
    fn crashes(self, point: &str) {
        let message = self.with("UNWEIGHT_FAILPOINT", point).output();
        assert_eq!(message, "", "{point}");
    }
}

// ---- threads ----

#[test]
fn no_threads_is_an_error() {
    let scratch = Scratch::new();
    small_model(&scratch.path("model"));
    compress(&scratch.path("model"), &scratch.path("bundle"), &CompressOptions::default(), &Silent).unwrap();
    for what in ["demo", "compress", "verify", "decompress"] {
        let message = Child::bound(scratch.dir(), what).with(THREADS, "1").output();
        assert!(message.starts_with("threads-unavailable: "), "{what}: {message}");
        // With a few threads, which one fails first depends on the number of processors.
        for limit in ["2", "3", "4", "5"] {
            let message = Child::bound(scratch.dir(), what).with(THREADS, limit).output();
            assert!(
                message == "done" || message.starts_with("threads-unavailable: "),
                "{what} with {limit}: {message}"
            );
            for output_name in ["demo", "out"] {
                drop(fs::remove_dir_all(scratch.path(output_name)));
            }
        }
    }
}

#[test]
fn each_missing_thread_is_an_error() {
    let scratch = Scratch::new();
    small_model(&scratch.path("model"));
    // One thread reads, and one writes each of two shards.
    for missing in 1..=3 {
        let message =
            Child::new(scratch.dir(), "compress").with("UNWEIGHT_FAULT", &format!("thread:{missing}")).output();
        assert!(message.starts_with("threads-unavailable: "), "{missing}: {message}");
    }
    let message = Child::new(scratch.dir(), "compress").with("UNWEIGHT_FAULT", "thread:4").output();
    assert_eq!(message, "done");
    fs::rename(scratch.path("out"), scratch.path("bundle")).unwrap();
    for missing in 1..=2 {
        let message =
            Child::new(scratch.dir(), "decompress").with("UNWEIGHT_FAULT", &format!("thread:{missing}")).output();
        assert!(message.starts_with("threads-unavailable: "), "{missing}: {message}");
    }
}

/// Also the verifying thread is reported, and a part of the work that has begun ends.
#[test]
fn a_missing_verifying_thread_is_an_error() {
    let scratch = Scratch::new();
    small_model(&scratch.path("model"));
    for missing in 1..=4 {
        let child = Child::new(scratch.dir(), "compress and verify");
        let message = child.with("UNWEIGHT_FAULT", &format!("thread:{missing}")).output();
        assert!(message.starts_with("threads-unavailable: "), "{missing}: {message}");
    }
    let child = Child::new(scratch.dir(), "compress and verify");
    assert_eq!(child.with("UNWEIGHT_FAULT", "thread:5").output(), "done");
}

/// A bit of any written tensor flips before it is verified, or a bit of a finished shard: the bundle is not published.
#[test]
fn a_flipped_bit_in_a_written_file_is_found_before_the_bundle_is_complete() {
    let scratch = Scratch::new();
    small_model(&scratch.path("model"));
    let tensors = {
        let model = compress(&scratch.path("model"), &scratch.path("whole"), &CompressOptions::default(), &Silent);
        model.unwrap().tensors.len()
    };
    let run = |what: &str, fault: &str| {
        let output = Child::new(scratch.dir(), what).with("UNWEIGHT_FAULT", fault).output();
        let is_complete = scratch.path("out").exists();
        drop(fs::remove_dir_all(scratch.path("out")));
        (output, is_complete)
    };
    for nth in 1..=tensors {
        let (output, is_complete) = run("compress and verify", &format!("flip-written:{nth}"));
        assert!(output.starts_with("bundle-content-mismatch: ") && !is_complete, "tensor {nth}: {output}");
    }
    for nth in 1..=2 {
        for what in ["compress and verify", "compress and sample"] {
            let (output, is_complete) = run(what, &format!("flip-finished:{nth}"));
            assert!(output.starts_with("bundle-content-mismatch: ") && !is_complete, "{what}, shard {nth}: {output}");
        }
    }
    // Without verification nothing is read back.
    assert_eq!(run("compress", "flip-finished:1"), ("done".into(), true));
    // The next run writes what was damaged again.
    let (_, is_complete) = run("compress and verify", "flip-written:1");
    assert!(!is_complete);
    assert_eq!(Child::new(scratch.dir(), "resume").output(), "done");
    assert!(read_tree(&scratch.path("out")) == read_tree(&scratch.path("whole")));
}

/// A tensor is verified while later ones are encoded: a run ends soon after the damage.
#[test]
fn written_tensors_are_verified_before_the_last_one_is_encoded() {
    let scratch = Scratch::new();
    let model = scratch.path("model");
    fs::create_dir(&model).unwrap();
    let count = 200;
    let tensors: Vec<_> = (0..count)
        .map(|i| tensor(&format!("layers.{i:03}.weight"), "BF16", &[64, 64], &common::weights(4096, i)))
        .collect();
    fs::write(model.join("model.safetensors"), safetensors_file(&[], &tensors)).unwrap();
    let child = Child::new(scratch.dir(), "compress and verify in no memory");
    let output = child.with("UNWEIGHT_FAULT", "flip-written:1").output();
    assert!(output.starts_with("bundle-content-mismatch: "), "{output}");
    let left = read_tree(&scratch.path("out.partial"));
    let journal = left.iter().find(|(name, _)| name.starts_with("work/journal-")).unwrap().1;
    // The first line names the source.
    let written = journal.iter().filter(|&&byte| byte == b'\n').count() as u64 - 1;
    assert!(written < count, "all tensors were written");
}

/// The thread that releases memory ends, so no other thread waits for that memory.
#[test]
fn a_panic_ends_all_threads() {
    let scratch = Scratch::new();
    small_model(&scratch.path("model"));
    compress(&scratch.path("model"), &scratch.path("bundle"), &CompressOptions::default(), &Silent).unwrap();
    for what in ["compress in no memory", "decompress in no memory"] {
        Child::new(scratch.dir(), what).with("UNWEIGHT_FAULT", "writer").panics(what);
    }
    let what = "panic in the encoder";
    Child::new(scratch.dir(), what).panics(what);
}

/// Fails for matrices of 64 rows after a while, for those of 192 rows at once.
struct FailingEncoder;

impl Encoder for FailingEncoder {
    fn encode(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
        match matrix.grid().rows() {
            64 => thread::sleep(Duration::from_millis(300)),
            192 => {}
            _ => return CpuEncoder.encode(matrix, encoding, limit),
        }
        Err(EncoderError::Failed("it always fails".into()))
    }
}

/// Several units are encoded at a time: the error is that of the first tensor in the file, and nothing waits for the
/// units after it.
#[test]
fn the_first_failed_tensor_of_the_file_is_reported() {
    let scratch = Scratch::new();
    let model = scratch.path("model");
    fs::create_dir(&model).unwrap();
    let rows = [64, 128, 192, 256, 320, 384, 448, 512];
    let tensors = rows.map(|rows| {
        tensor(&format!("model.layers.0.r{rows}.weight"), "BF16", &[rows, 64], &common::weights(rows * 64, rows as u64))
    });
    fs::write(model.join("model.safetensors"), safetensors_file(&[], &tensors)).unwrap();
    // The first two tensors are one unit, and two units fit.
    let options = CompressOptions::default().threads(4).ram_bytes(96u64 << 10);
    let result = compress_with(&model, &scratch.path("out"), &options, &FailingEncoder, &Silent);
    match result {
        Err(BundleError::Encoder { tensor, .. }) => assert_eq!(tensor, "model.layers.0.r64.weight"),
        other => panic!("{other:?}"),
    }
}

/// The report states where the time went.
#[test]
fn stages_cover_every_tensor() {
    let scratch = Scratch::new();
    small_model(&scratch.path("model"));
    let report =
        compress(&scratch.path("model"), &scratch.path("bundle"), &CompressOptions::default(), &Silent).unwrap();
    let bytes: u64 = report.tensors.iter().map(|tensor| tensor.original_bytes).sum();
    let of = |name: &str| report.stages.iter().find(|stage| stage.stage == name).map(|stage| stage.bytes);
    for stage in ["read", "encode", "verify"] {
        assert_eq!(of(stage), Some(bytes), "{stage}");
    }
    assert!(of("write").unwrap() < bytes && of("sync").unwrap() > of("write").unwrap(), "{:?}", report.stages);
}

// ---- modes ----

/// The file that a crash leaves just before it gets its name already has the source's mode.
#[test]
fn resume_works_with_a_read_only_source() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    for name in read_tree(&source).keys() {
        fs::set_permissions(source.join(name), fs::Permissions::from_mode(0o444)).unwrap();
    }
    for (first, second) in [("compress", "resume"), ("decompress", "resume decompress")] {
        let mode =
            |name: &str| fs::metadata(scratch.path("out.partial").join(name)).unwrap().permissions().mode() & 0o777;
        // Find the first shard; other files pass the failpoint before it.
        let modes = (1..10).find_map(|time| {
            Child::bound(scratch.dir(), first).crashes(&format!("before-accept:{time}"));
            let left = read_tree(&scratch.path("out.partial"));
            let shards = left.keys().filter(|name| name.starts_with("work/shard-"));
            Some(shards.map(|name| mode(name)).collect::<Vec<_>>()).filter(|modes| !modes.is_empty())
        });
        // Another shard may still be written.
        assert!(modes.unwrap().contains(&0o444));
        assert_eq!(Child::bound(scratch.dir(), second).output(), "done");
        let mode = fs::metadata(out.join("model-00001-of-00002.safetensors")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o444);
        if first == "compress" {
            fs::rename(&out, scratch.path("bundle")).unwrap();
        }
    }
    assert!(read_tree(&out) == read_tree(&source));
}

/// The replaced output is removed, even if it is read-only.
#[test]
fn force_replaces_an_output_with_a_read_only_folder() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    fs::create_dir_all(source.join("sub/deep")).unwrap();
    fs::write(source.join("sub/deep/vocab.txt"), "a b c").unwrap();
    let lock = || {
        for folder in ["sub/deep", "sub"] {
            fs::set_permissions(out.join(folder), fs::Permissions::from_mode(0o555)).unwrap();
        }
    };
    compress(&source, &out, &CompressOptions::new(Profile::Palette), &Silent).unwrap();
    lock();
    assert_eq!(Child::bound(scratch.dir(), "replace").output(), "done");
    assert!(!scratch.path("out.partial").exists());
    // The same when a crash leaves it to the next run.
    lock();
    Child::bound(scratch.dir(), "replace").crashes("published");
    fs::rename(&out, scratch.path("first")).unwrap();
    assert_eq!(Child::bound(scratch.dir(), "resume").output(), "done");
    assert!(!scratch.path("out.partial").exists());
    assert!(read_tree(&out) == read_tree(&scratch.path("first")));
}

// ---- renames ----

/// Without an exchange of names, the old output is set aside and never removed before the new one exists.
#[test]
fn without_atomic_swap_the_old_output_is_kept_until_replaced() {
    let scratch = Scratch::new();
    let (source, out, aside) = (scratch.path("model"), scratch.path("out"), scratch.path("out.partial/replaced"));
    small_model(&source);
    let output_name = |name: &str, options: &CompressOptions| {
        compress(&source, &scratch.path(name), options, &Silent).unwrap();
        read_tree(&scratch.path(name))
    };
    let old = output_name("old", &CompressOptions::new(Profile::Palette));
    let new = output_name("new", &CompressOptions::default());
    let begin = || {
        drop(fs::remove_dir_all(&out));
        fs::create_dir(&out).unwrap();
        old.iter().for_each(|(name, bytes)| fs::write(out.join(name), bytes).unwrap());
    };
    let replace = |faults: &str| Child::new(scratch.dir(), "replace").with("UNWEIGHT_FAULT", faults);
    let whole = || {
        assert!(read_tree(&out) == new);
        assert!(!scratch.path("out.partial").exists());
    };
    begin();
    assert_eq!(replace("swap").output(), "done");
    whole();
    // A crash between the two renames, and after them.
    begin();
    replace("swap").crashes("set-aside");
    assert!(!out.exists() && read_tree(&aside) == old);
    assert_eq!(replace("swap").output(), "done");
    whole();
    begin();
    replace("swap").crashes("published");
    assert!(read_tree(&out) == new && read_tree(&aside) == old);
    assert_eq!(replace("swap").output(), "done");
    whole();
    // The second rename fails: the old output gets its name back.
    begin();
    let message = replace("swap,publish").output();
    assert!(message.contains("cannot rename the finished output to its final name"), "{message}");
    assert!(read_tree(&out) == old && !aside.exists());
    assert_eq!(replace("swap").output(), "done");
    whole();
    // No rename works any more: the message contains the path of the old output.
    begin();
    let message = replace("swap,publish,back").output();
    assert!(message.starts_with("output-not-renamed: ") && message.contains(&aside.display().to_string()), "{message}");
    assert!(!out.exists() && read_tree(&aside) == old);
    assert_eq!(replace("swap").output(), "done");
    whole();
}

#[test]
fn resume_works_where_a_folder_became_a_file() {
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    fs::create_dir_all(source.join("sub")).unwrap();
    let weights = safetensors_file(&[], &[tensor("t", "BF16", &[64, 64], &common::weights(4096, 1))]);
    fs::write(source.join("sub/a.safetensors"), &weights).unwrap();
    Child::new(scratch.dir(), "compress").crashes("synced");
    assert!(scratch.path("out.partial/tree/sub/a.safetensors").exists());
    fs::remove_dir_all(source.join("sub")).unwrap();
    fs::write(source.join("sub"), "a file").unwrap();
    fs::write(source.join("b.safetensors"), &weights).unwrap();
    assert_eq!(Child::new(scratch.dir(), "resume").output(), "done");
    assert!(verify(&out, Some(&source), &Silent).unwrap().is_ok());
}

// ---- replacing ----

/// Names, sizes and headers do not identify a model: decompress replaces only files that it restores byte for byte.
#[test]
fn decompress_replaces_only_files_of_the_bundle() {
    let scratch = Scratch::new();
    let (source, bundle, back) = (scratch.path("model"), scratch.path("bundle"), scratch.path("back"));
    small_model(&source);
    fs::create_dir(source.join("sub")).unwrap();
    fs::write(source.join("sub/vocab.txt"), "a b c").unwrap();
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    let forced = DecompressOptions::default().force(true);
    let decompress_again = || decompress(&bundle, &back, &forced, &Silent).map(drop);
    let assert_rejected = |what: &str, named: &str| {
        let before = read_tree(&back);
        let error = decompress_again().unwrap_err();
        assert!(matches!(&error, BundleError::NotReplaceable { file, .. } if file == named), "{what}: {error}");
        assert!(read_tree(&back) == before && !scratch.path("back.partial").exists(), "{what}");
    };
    decompress(&bundle, &back, &DecompressOptions::default(), &Silent).unwrap();
    decompress_again().unwrap();
    // Another fine-tune with the same names, sizes, headers and times.
    for name in ["model-00002-of-00002.safetensors", "tokenizer.json"] {
        let path = back.join(name);
        let (whole, time) = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
        let mut other = whole.clone();
        let at = other.len() - 5;
        other[at] ^= 1;
        fs::write(&path, other).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        assert_rejected("another model", name);
        fs::write(&path, whole).unwrap();
    }
    fs::create_dir(back.join("mine")).unwrap();
    assert_rejected("an empty directory of the user", "mine");
    fs::remove_dir(back.join("mine")).unwrap();
    // A link to an identical file is not the same.
    fs::remove_file(back.join("tokenizer.json")).unwrap();
    std::os::unix::fs::symlink(source.join("tokenizer.json"), back.join("tokenizer.json")).unwrap();
    assert_rejected("a link", "tokenizer.json");
    fs::remove_file(back.join("tokenizer.json")).unwrap();
    fs::remove_dir_all(back.join("sub")).unwrap();
    decompress_again().unwrap();
    assert!(read_tree(&back) == read_tree(&source), "what was missing is there");

    fs::remove_dir_all(&back).unwrap();
    fs::create_dir(&back).unwrap();
    fs::write(back.join("config.json"), "{\"mine\": true}").unwrap();
    assert_rejected("a directory with a configuration of the user", "config.json");
    fs::remove_file(back.join("config.json")).unwrap();
    decompress_again().unwrap();
}

/// Directories count as contents: `--force` must not take the result of `mkdir -p work/{a,b}` for an empty directory.
#[test]
fn folder_of_empty_folders_is_not_empty() {
    let scratch = Scratch::new();
    let (source, bundle, out) = (scratch.path("model"), scratch.path("bundle"), scratch.path("out"));
    small_model(&source);
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    fs::create_dir_all(out.join("a/b")).unwrap();
    let error = compress(&source, &out, &CompressOptions::default().force(true), &Silent).unwrap_err();
    assert!(matches!(&error, BundleError::NotReplaceable { file, .. } if file == "a/b"), "{error}");
    let error = decompress(&bundle, &out, &DecompressOptions::default().force(true), &Silent).unwrap_err();
    assert!(matches!(&error, BundleError::NotReplaceable { file, .. } if file == "a/b"), "{error}");
    assert!(out.join("a/b").exists());
    fs::remove_dir_all(out.join("a")).unwrap();
    compress(&source, &out, &CompressOptions::default().force(true), &Silent).unwrap();
}

/// An output that changes while the new one is made is not the one that was compared, and is kept.
#[test]
fn force_keeps_an_output_that_changes_meanwhile() {
    struct ChangeOutput<'a>(&'a Path);
    impl Progress for ChangeOutput<'_> {
        fn tensor(&self, _: &str) {
            fs::write(self.0, "mine now").unwrap();
        }
    }
    let scratch = Scratch::new();
    let (source, bundle, back) = (scratch.path("model"), scratch.path("bundle"), scratch.path("back"));
    small_model(&source);
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    decompress(&bundle, &back, &DecompressOptions::default(), &Silent).unwrap();
    let file = back.join("tokenizer.json");
    let error =
        decompress(&bundle, &back, &DecompressOptions::default().force(true), &ChangeOutput(&file)).unwrap_err();
    assert!(matches!(&error, BundleError::NotReplaceable { .. }), "{error}");
    assert_eq!(fs::read(&file).unwrap(), b"mine now");
}

// ---- stopping ----

/// Requests to stop after a number of bytes, and counts the bytes that follow.
struct StopAfter {
    bytes: u64,
    done: AtomicU64,
}

impl StopAfter {
    fn new(bytes: u64) -> Self {
        Self { bytes, done: AtomicU64::new(0) }
    }

    fn late_bytes(&self) -> u64 {
        self.done.load(Ordering::Relaxed).saturating_sub(self.bytes)
    }
}

impl Progress for StopAfter {
    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.done.load(Ordering::Relaxed) >= self.bytes
    }
}

/// Runs again while the output is locked. A process that another test starts has this process's descriptors, including
/// locks, from `fork` to `exec`.
fn when_unlocked<T>(mut run: impl FnMut() -> Result<T, BundleError>) -> Result<T, BundleError> {
    for _ in 0..100 {
        match run() {
            Err(BundleError::Locked { .. }) => thread::sleep(Duration::from_millis(50)),
            done => return done,
        }
    }
    run()
}

/// Cancelling must work inside a file, because a file may have a hundred gigabytes.
#[test]
fn cancel_stops_inside_a_file() {
    let scratch = Scratch::new();
    let (source, bundle, out) = (scratch.path("model"), scratch.path("bundle"), scratch.path("out"));
    fs::create_dir(&source).unwrap();
    let elements = 24 << 20;
    let weights = [tensor("t", "BF16", &[elements / 2048, 2048], &common::weights(elements, 1))];
    fs::write(source.join("a.safetensors"), safetensors_file(&[], &weights)).unwrap();
    let bytes = fs::metadata(source.join("a.safetensors")).unwrap().len();
    let piece = 4 << 20;
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    let stopped = |what: &str, progress: &StopAfter, error: BundleError| {
        assert_eq!(error.class(), ErrorClass::Interrupted, "{what}: {}", chain(&error));
        assert!(progress.late_bytes() <= piece, "{what}: {} bytes more", progress.late_bytes());
    };
    // While comparing the source, after the bundle itself.
    let progress = StopAfter::new(bytes + 2 * piece);
    stopped("verify", &progress, verify(&bundle, Some(&source), &progress).unwrap_err());
    // While comparing finished files, before anything is made.
    Child::new(scratch.dir(), "decompress").crashes("synced");
    let progress = StopAfter::new(2 * piece);
    let options = DecompressOptions::default().resume(true);
    let error = when_unlocked(|| decompress(&bundle, &out, &options, &progress)).unwrap_err();
    stopped("decompress", &progress, error);
    let report = when_unlocked(|| decompress(&bundle, &out, &options, &Silent)).unwrap();
    assert!(report.files[0].resumed, "it was kept");
    fs::remove_dir_all(&out).unwrap();
    Child::new(scratch.dir(), "compress").crashes("synced");
    let progress = StopAfter::new(2 * piece);
    let options = CompressOptions::default().resume(true);
    let error = when_unlocked(|| compress(&source, &out, &options, &progress)).unwrap_err();
    stopped("compress", &progress, error);
    let report = when_unlocked(|| compress(&source, &out, &options, &Silent)).unwrap();
    assert_eq!(report.resumed_files, ["a.safetensors"]);
}

/// A run that resumes also announces the bytes that it compares, and completes the total of both.
#[test]
fn progress_of_a_resumed_run_ends_at_the_announced_total() {
    #[derive(Default)]
    struct Sums([AtomicU64; 2]);
    impl Progress for Sums {
        fn start(&self, total_bytes: u64) {
            self.0[0].fetch_add(total_bytes, Ordering::Relaxed);
        }

        fn advance(&self, bytes: u64) {
            self.0[1].fetch_add(bytes, Ordering::Relaxed);
        }
    }
    let scratch = Scratch::new();
    let (source, out) = (scratch.path("model"), scratch.path("out"));
    small_model(&source);
    let whole: u64 = read_tree(&source).values().map(|bytes| bytes.len() as u64).sum();
    let check = |what: &str, sums: Sums| {
        let [announced, done] = sums.0.map(AtomicU64::into_inner);
        assert!(announced > whole, "{what}: what is compared is announced, too");
        assert_eq!(announced, done, "{what}");
    };
    Child::new(scratch.dir(), "compress").crashes("synced");
    let sums = Sums::default();
    let options = CompressOptions::default().resume(true).verify(VerifyAfter::None);
    compress(&source, &out, &options, &sums).unwrap();
    check("compress", sums);
    fs::rename(&out, scratch.path("bundle")).unwrap();
    Child::new(scratch.dir(), "decompress").crashes("synced");
    let sums = Sums::default();
    decompress(&scratch.path("bundle"), &out, &DecompressOptions::default().resume(true), &sums).unwrap();
    check("decompress", sums);
}
