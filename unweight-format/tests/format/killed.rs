//! Tests that need another process: a kill in the middle of a run, and a full disk.

use std::{
    fs,
    path::Path,
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use unweight_format::{
    bundle::{CompressOptions, Progress, Silent, compress, verify},
    testing::demo_model::{self, DemoOptions},
};

use crate::common::{Scratch, chain, read_tree};

const CHILD: &str = "UNWEIGHT_TEST_CHILD";

fn model(dir: &Path) {
    demo_model::write(dir, &DemoOptions { layers: 2, vocab: 512, shards: 4, ..DemoOptions::default() }).unwrap();
}

/// Writes a marker in the third shard and waits to be killed.
struct WaitInThird<'a> {
    marker: &'a Path,
    shards: AtomicU64,
}

impl Progress for WaitInThird<'_> {
    fn file(&self, name: &str) {
        self.shards.fetch_add(u64::from(name.ends_with(".safetensors")), Ordering::Relaxed);
    }

    fn advance(&self, _: u64) {
        if self.shards.load(Ordering::Relaxed) == 3 {
            fs::write(self.marker, "").unwrap();
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
    let marker = root.join("marker");
    let result = if std::env::var_os("UNWEIGHT_TEST_WAIT").is_some() {
        let progress = WaitInThird { marker: &marker, shards: AtomicU64::new(0) };
        compress(&root.join("model"), &root.join("out"), &options, &progress)
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
    assert!(!report.resumed_files.is_empty());
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
    assert!(scratch.path("marker").exists(), "the child came to its third shard");
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
    let mut sizes: Vec<u64> = (1..=4)
        .map(|i| fs::metadata(source.join(format!("model-{i:05}-of-00004.safetensors"))).unwrap().len() * 7 / 10)
        .collect();
    let first = sizes[0];
    sizes.sort();
    assert!(sizes[3] > first + 4096, "the first shard fits, a later one does not: {sizes:?}");
    let limit_kib = (first + sizes[3]) / 2 / 1024;
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
