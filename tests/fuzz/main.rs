//! Runs the bodies of the fuzz targets (`unweight-format/fuzz`) on their seeds and on changed golden files, without
//! libFuzzer: compiles every target and finds gross errors. Each target asserts what must hold.

use std::{
    fs,
    path::{Path, PathBuf},
};

use unweight_format::testing::Random;

/// What targets import from `libfuzzer_sys`: the body becomes a function.
macro_rules! fuzz_target {
    (|$data:ident: &[u8]| $body:block) => {
        pub fn run($data: &[u8]) {
            $body
        }
    };
}
pub(crate) use fuzz_target;

extern crate self as libfuzzer_sys;

/// Declares the targets. An attribute of theirs only applies to programs, and the macro above needs no import.
macro_rules! targets {
    ($($name:ident = $path:literal),+) => {
        $(
            #[allow(unused_attributes, unused_imports)]
            #[path = $path]
            mod $name;
        )+
        const NAMES: &[&str] = &[$(stringify!($name)),+];
    };
}
targets! {
    cache_entry = "../../unweight-format/fuzz/fuzz_targets/cache_entry.rs",
    decode_arbitrary = "../../unweight-format/fuzz/fuzz_targets/decode_arbitrary.rs",
    journal = "../../unweight-format/fuzz/fuzz_targets/journal.rs",
    kv_page = "../../unweight-format/fuzz/fuzz_targets/kv_page.rs",
    parse_bundle = "../../unweight-format/fuzz/fuzz_targets/parse_bundle.rs",
    plan_file = "../../unweight-format/fuzz/fuzz_targets/plan_file.rs",
    resume_record = "../../unweight-format/fuzz/fuzz_targets/resume_record.rs",
    round_trip = "../../unweight-format/fuzz/fuzz_targets/round_trip.rs"
}

fn format_crate() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("unweight-format")
}

/// Files of a directory in the order of their names.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let seeds: Vec<Vec<u8>> =
        files(&format_crate().join("fuzz/seeds").join(target)).iter().map(|path| fs::read(path).unwrap()).collect();
    assert!(!seeds.is_empty(), "{target}");
    seeds
}

/// The golden bundles of one shard, as inputs of `parse_bundle`: mode, length of the manifest, manifest, shard.
fn golden_bundles() -> Vec<Vec<u8>> {
    let mut inputs = Vec::new();
    for model in files(&format_crate().join("tests/golden/valid")) {
        let bundle = model.join("bundle");
        let Ok(shard) = fs::read(bundle.join("model.safetensors")) else { continue };
        // The target's shard has another name.
        let manifest = fs::read_to_string(bundle.join("unweight.json")).unwrap();
        let manifest = manifest.replace("model.safetensors", "t.safetensors").into_bytes();
        inputs.push([&[1], &(manifest.len() as u32).to_le_bytes()[..], &manifest, &shard].concat());
    }
    inputs
}

/// Weights of the golden models, as inputs of `round_trip`: columns, code limit, weights.
fn golden_weights() -> Vec<Vec<u8>> {
    let models = files(&format_crate().join("tests/golden/valid"));
    let weights = models.iter().filter_map(|model| fs::read(model.join("source/model.safetensors")).ok());
    weights.map(|bytes| [&[63, 1], &bytes[bytes.len().saturating_sub(20_000)..]].concat()).collect()
}

/// Changes bytes, removes or repeats some, or replaces some by those of another input.
fn change(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    let mut below = |limit: usize| random.below(limit.max(1) as u64) as usize;
    for _ in 0..=below(4) {
        let at = below(bytes.len());
        let end = (at + 1 + below(16)).min(bytes.len());
        match below(8) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let repeated = bytes[at..end].to_vec();
                bytes.splice(at..at, repeated);
            }
            3 => {
                let from = below(other.len());
                let piece = other[from..(from + 32).min(other.len())].to_vec();
                bytes.splice(at..end, piece);
            }
            4 if at < end => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][below(5)],
            _ if at < end => bytes[at] ^= 1 << below(8),
            _ => {}
        }
    }
    bytes
}

/// Runs a target on its inputs and on changes of them.
fn exercise(target: fn(&[u8]), inputs: &[Vec<u8>], changed: usize) {
    inputs.iter().for_each(|input| target(input));
    let mut random = Random::new(0x9e37_79b9_7f4a_7c15);
    for _ in 0..changed {
        let [one, other] = [(); 2].map(|()| &inputs[random.below(inputs.len() as u64) as usize]);
        target(&change(&mut random, one, other));
    }
}

#[test]
fn all_targets_are_run_here() {
    let mut found: Vec<String> = files(&format_crate().join("fuzz/fuzz_targets"))
        .iter()
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    assert_eq!(found, NAMES);
    let manifest = fs::read_to_string(format_crate().join("fuzz/Cargo.toml")).unwrap();
    for name in NAMES {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}");
    }
}

#[test]
fn cache_entries() {
    exercise(cache_entry::run, &seeds("cache_entry"), 300);
}

#[test]
fn stored_sections() {
    exercise(decode_arbitrary::run, &seeds("decode_arbitrary"), 1000);
}

#[test]
fn journals() {
    exercise(journal::run, &seeds("journal"), 30);
}

#[test]
fn kv_pages() {
    exercise(kv_page::run, &seeds("kv_page"), 300);
}

#[test]
fn bundles() {
    exercise(parse_bundle::run, &[seeds("parse_bundle"), golden_bundles()].concat(), 3000);
}

#[test]
fn plan_files() {
    exercise(plan_file::run, &seeds("plan_file"), 3000);
}

#[test]
fn resume_records() {
    exercise(resume_record::run, &seeds("resume_record"), 3000);
}

#[test]
fn weights() {
    exercise(round_trip::run, &[seeds("round_trip"), golden_weights()].concat(), 100);
}
