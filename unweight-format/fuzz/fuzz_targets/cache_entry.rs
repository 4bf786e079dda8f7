#![no_main]
//! Arbitrary entries of the kernel cache are inspected, listed, verified and evicted, but never trusted, and never
//! block other entries.

use std::{fs, path::PathBuf, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use unweight_rt::raw::jit::cache::Store;

static ROOT: LazyLock<PathBuf> = LazyLock::new(|| tempfile::tempdir().expect("a directory").keep().join("cache"));

fuzz_target!(|data: &[u8]| {
    let store = Store::open(&ROOT).expect("a new directory");
    let Some((length, data)) = data.split_first_chunk::<2>() else { return };
    let (meta, cubin) = data.split_at(usize::from(u16::from_le_bytes(*length)).min(data.len()));
    let folder = ROOT.join("entries").join("uw_sm90a_fuzzed.0123456789abcdef0123456789abcdef.nvrtc-13.0");
    fs::create_dir_all(&folder).expect("made");
    for (name, bytes) in [("meta.json", meta), ("kernel.cubin", cubin), ("kernel.cu", cubin)] {
        fs::write(folder.join(name), bytes).expect("written");
    }
    _ = store.ls().expect("readable");
    let verified = store.verify(true).expect("readable");
    assert_eq!(verified.good, 0, "an entry with a random digest is accepted");
    assert!(!folder.exists(), "the damaged entry was not evicted");
});
