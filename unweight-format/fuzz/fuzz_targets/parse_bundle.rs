#![no_main]
//! Arbitrary headers, manifests and shards.

use std::{fs, path::PathBuf, sync::LazyLock};

use libfuzzer_sys::fuzz_target;
use unweight_format::{
    Digest,
    bundle::Bundle,
    safetensors::{Header, SOURCE_HEADER_MAX},
};

static DIR: LazyLock<PathBuf> = LazyLock::new(|| tempfile::tempdir().expect("a directory").keep());

/// Inserts the correct digest, as an attacker would.
fn seal(manifest: &mut [u8]) {
    const KEY: &[u8] = b"\"manifest_digest\":\"";
    let Some(at) = manifest.windows(KEY.len()).rposition(|window| window == KEY) else { return };
    let at = at + KEY.len();
    if let Some(digits) = manifest.get_mut(at..at + 32) {
        digits.fill(b'0');
        let digest = Digest::of(manifest).to_string();
        manifest[at..at + 32].copy_from_slice(digest.as_bytes());
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&mode, data)) = data.split_first() else { return };
    if mode == 0 {
        _ = Header::parse(data, data.len() as u64, SOURCE_HEADER_MAX);
        return;
    }
    let Some((length, data)) = data.split_first_chunk::<4>() else { return };
    let (manifest, shard) = data.split_at((u32::from_le_bytes(*length) as usize).min(data.len()));
    let mut manifest = manifest.to_vec();
    seal(&mut manifest);
    fs::write(DIR.join("unweight.json"), manifest).expect("written");
    // Creates a new file instead of overwriting the old one.
    _ = fs::remove_file(DIR.join("t.safetensors"));
    fs::write(DIR.join("t.safetensors"), shard).expect("written");
    // Also with itself as base, and without one.
    for bundle in [Bundle::open(&DIR), Bundle::open_with_base(&DIR, Some(&DIR)), Bundle::open_without_base(&DIR)] {
        for tensor in bundle.iter().flat_map(Bundle::tensors) {
            _ = tensor.stored();
            _ = tensor.decode();
        }
    }
});
