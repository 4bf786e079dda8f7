#![no_main]
//! The staging directory of an interrupted run with arbitrary changes: `--resume` still makes the same bundle.
//!
//! The input is a list of changes of eight bytes: file, operation, position and value. Journal lines and records get
//! correct digests after a change, as after a bug or an edit.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use libfuzzer_sys::fuzz_target;
use unweight_format::{
    Digest,
    bundle::{CompressOptions, Progress, Silent, VerifyAfter, compress},
    testing::demo_model::{self, DemoOptions},
};

type Tree = BTreeMap<PathBuf, Vec<u8>>;

struct State {
    dir: PathBuf,
    options: CompressOptions,
    /// The staging directory that the interrupted run left.
    interrupted: Tree,
    whole: Tree,
}

/// Cancels after a number of bytes, when the first file has its record.
struct CancelAfter(u64, AtomicU64, PathBuf);

impl Progress for CancelAfter {
    fn advance(&self, bytes: u64) {
        self.1.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        let is_reached = self.1.load(Ordering::Relaxed) >= self.0;
        let has_record = || fs::read_dir(&self.2).is_ok_and(|mut records| records.next().is_some());
        // The thread that writes the record depends on no other.
        while is_reached && !has_record() {
            thread::sleep(Duration::from_millis(1));
        }
        is_reached
    }
}

fn read_tree(dir: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("readable") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                tree.insert(path.strip_prefix(dir).expect("below").into(), fs::read(&path).expect("readable"));
            }
        }
    }
    tree
}

static STATE: LazyLock<State> = LazyLock::new(|| {
    let dir = tempfile::tempdir().expect("a directory").keep();
    let model = DemoOptions {
        layers: 2,
        hidden: 64,
        intermediate: 64,
        heads: 2,
        kv_heads: 1,
        vocab: 64,
        shards: 2,
        ..DemoOptions::default()
    };
    demo_model::write(&dir.join("model"), &model).expect("written");
    let header = br#"{"t":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}}"#;
    let first = [&(header.len() as u64).to_le_bytes()[..], header, &[7; 16]].concat();
    fs::write(dir.join("model/a.safetensors"), first).expect("written");
    let files = fs::read_dir(dir.join("model")).expect("readable");
    let total: u64 = files.map(|file| file.expect("there").metadata().expect("there").len()).sum();
    let options = CompressOptions::default().ram_bytes(Some(1)).sha256(true).verify(VerifyAfter::None).resume(true);
    let run = |out: &str, progress: &dyn Progress| compress(&dir.join("model"), &dir.join(out), &options, progress);
    run("whole", &Silent).expect("compressed");
    let whole = read_tree(&dir.join("whole"));
    // The files are written at the same time. The first one is finished after its only tensor.
    let partial = dir.join("out.partial");
    let cancel = CancelAfter(total * 3 / 4, AtomicU64::new(0), partial.join("records"));
    run("out", &cancel).expect_err("the run is cancelled");
    let interrupted = read_tree(&partial);
    let has = |prefix: &str| {
        interrupted.keys().any(|name| name.starts_with(prefix) || name.to_string_lossy().contains(prefix))
    };
    assert!(has("records") && has("journal-") && has("shard-"), "{:?}", interrupted.keys());
    State { dir, options, interrupted, whole }
});

/// Corrects the digests of changed contents.
fn seal(name: &str, bytes: &mut Vec<u8>) {
    let digest = |text: &[u8]| Digest::of(text).to_string().into_bytes();
    if name.starts_with("records/") {
        if let Some(text) = bytes.get(33..) {
            *bytes = [&digest(text), &b"\n"[..], text].concat();
        }
    } else if name.contains("journal-") {
        let lines = bytes.split(|byte| *byte == b'\n').map(|line| match line.get(33..) {
            Some(json) => [&digest(json), &b" "[..], json].concat(),
            None => line.to_vec(),
        });
        *bytes = lines.collect::<Vec<_>>().join(&b'\n');
    }
}

fuzz_target!(|data: &[u8]| {
    let State { dir, options, interrupted, whole } = &*STATE;
    let names: Vec<&PathBuf> = interrupted.keys().filter(|name| !name.ends_with("lock")).collect();
    let mut tree = interrupted.clone();
    for change in data.chunks_exact(8).take(16) {
        let [name_index, operation, a, b, c, d, e, value] = *<&[u8; 8]>::try_from(change).expect("eight bytes");
        let name = names[usize::from(name_index) % names.len()];
        let bytes = tree.get_mut(name).expect("listed");
        let at = u32::from_le_bytes([a, b, c, 0]) as usize % (bytes.len() + 1);
        let length = usize::from(u16::from_le_bytes([d, e]));
        match operation % 8 {
            0 => bytes.truncate(at),
            1 => bytes.extend(std::iter::repeat_n(value, length)),
            2 => drop(bytes.drain(at..(at + length % 64).min(bytes.len()))),
            3 => drop(bytes.splice(at..at, std::iter::repeat_n(value, length % 64))),
            // Duplicate a line, possibly out of order.
            4 => {
                let mut lines: Vec<Vec<u8>> = bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
                let line = lines[at % lines.len()].clone();
                lines.insert(length % (lines.len() + 1), line);
                *bytes = lines.join(&b'\n');
            }
            // Change a digit, to hit numbers and digests.
            5 => {
                let digits: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at].is_ascii_hexdigit()).collect();
                if let Some(digit) = digits.get(at % digits.len().max(1)) {
                    bytes[*digit] = b"0123456789abcdef"[usize::from(value) % 16];
                }
            }
            _ if at < bytes.len() => bytes[at] = value,
            _ => {}
        }
        if operation & 0x80 != 0 {
            seal(&name.to_string_lossy(), bytes);
        }
    }
    let (out, partial) = (dir.join("out"), dir.join("out.partial"));
    for (name, bytes) in &tree {
        let path = partial.join(name);
        fs::create_dir_all(path.parent().expect("below")).expect("made");
        fs::write(path, bytes).expect("written");
    }
    compress(&dir.join("model"), &out, options, &Silent).expect("a resumed run finishes");
    assert!(read_tree(&out) == *whole, "the resumed bundle differs");
    assert!(!partial.exists());
    fs::remove_dir_all(out).expect("removed");
});
