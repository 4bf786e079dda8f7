//! Tests that need another process: a kill in the middle of a run, and a full disk.

use std::{fs, path::Path, process::Command, thread, time::Duration};

use unweight_format::{
    bundle::{CompressOptions, Progress, Silent, compress, verify},
    testing::demo_model::{self, DemoOptions},
};

use crate::common::{Scratch, chain, read_tree};

const CHILD: &str = "UNWEIGHT_TEST_CHILD";

/// More than are written at the same time.
const SHARDS: usize = 8;

fn model(dir: &Path) {
    demo_model::write(dir, &DemoOptions { layers: 2, vocab: 512, shards: SHARDS, ..DemoOptions::default() }).unwrap();
}

/// Writes a marker when the first shard is finished, while others are not, and waits to be killed.
struct WaitAfterFirst<'a> {
    root: &'a Path,
}

impl Progress for WaitAfterFirst<'_> {
    fn advance(&self, _: u64) {
        if fs::read_dir(self.root.join("out.partial/records")).is_ok_and(|mut records| records.next().is_some()) {
            fs::write(self.root.join("marker"), "").unwrap();
            thread::sleep(Duration::from_secs(600));
        }
    }
}

/// Only runs as a child process of the tests below.
#[test]
fn child() {
    let Ok(root) = std::env::var(CHILD) else { return };
    let root = Path::new(&root);
    let options = CompressOptions::default();
    let result = if std::env::var_os("UNWEIGHT_TEST_WAIT").is_some() {
        compress(&root.join("model"), &root.join("out"), &options.ram_bytes(1u64 << 20), &WaitAfterFirst { root })
    } else {
        compress(&root.join("model"), &root.join("out"), &options, &Silent)
    };
    println!(
        "child says: {}",
        result.map_or_else(
            |error| format!("{}: {} {:?}", error.code(), chain(&error), error.remedy()),
            |_| "done".into()
        )
    );
}

fn resume_and_compare(scratch: &Scratch) {
    let (source, out, whole) = (scratch.path("model"), scratch.path("out"), scratch.path("whole"));
    assert!(!out.exists(), "nothing half written under the final name");
    let resume = CompressOptions::default().resume(true);
    let report = compress(&source, &out, &resume, &Silent).unwrap();
    assert!(!report.resumed_files.is_empty() || report.resumed_tensors > 0);
    compress(&source, &whole, &CompressOptions::default(), &Silent).unwrap();
    assert!(read_tree(&out) == read_tree(&whole));
    assert!(verify(&out, Some(&source), &Silent).unwrap().is_ok());
    assert!(!scratch.path("out.partial").exists());
}

#[test]
fn killed_run_resumes_to_the_same_bytes() {
    let scratch = Scratch::new();
    model(&scratch.path("model"));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::child", "--nocapture"])
        .env(CHILD, scratch.dir())
        .env("UNWEIGHT_TEST_WAIT", "1")
        .spawn()
        .unwrap();
    for _ in 0..600 {
        if scratch.path("marker").exists() || child.try_wait().unwrap().is_some() {
            break;
        }
        thread::sleep(Duration::from_millis(100));
    }
    assert!(scratch.path("marker").exists(), "the child finished a shard");
    child.kill().unwrap();
    child.wait().unwrap();
    resume_and_compare(&scratch);
}

#[test]
fn file_size_limit_is_reported_and_finished_files_are_kept() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    model(&source);
    // No file may exceed the second largest: the largest does not fit, the files before it do.
    let size =
        |i| fs::metadata(source.join(format!("model-{i:05}-of-{SHARDS:05}.safetensors"))).unwrap().len() * 7 / 10;
    let mut sizes: Vec<u64> = (1..=SHARDS).map(size).collect();
    let first = sizes[0];
    sizes.sort();
    let largest = sizes[SHARDS - 1];
    assert!(largest > first + 4096, "the first shard fits, a later one does not: {sizes:?}");
    let limit_kib = (first + largest) / 2 / 1024;
    // The child must not be killed by the signal of a write above the limit.
    let script = format!("ulimit -f {limit_kib}; exec \"$0\" --exact killed::child --nocapture");
    let output = Command::new("bash")
        .args(["-c", &script])
        .arg(std::env::current_exe().unwrap())
        .env(CHILD, scratch.dir())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    for part in ["child says: file-size-limit: ", "file too large", "shard"] {
        assert!(text.contains(part), "{text} {}", String::from_utf8_lossy(&output.stderr));
    }
    resume_and_compare(&scratch);
}
