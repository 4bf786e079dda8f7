//! Mutates small bundles, and checks the promises of verify and decompress.
//!
//! ```text
//! cargo run --release -p unweight-format --example mutate_bundles -- [COUNT] [SEED] [DIRECTORY]
//! ```
//! Makes COUNT (100,000) mutants from SEED (1) in DIRECTORY (a temporary one; a file system in memory is fastest). Each
//! mutant has one to four changes: flipped bits, truncated and extended files, swapped and missing files, exchanged
//! values of the manifest and of shard headers. Most of the time the digests are then corrected, as an attacker would.
//! For each:
//! - nothing panics, and the result takes less than ten seconds;
//! - `decompress` restores the source byte for byte or fails. A mutant with corrected digests may be another bundle;
//!   then `verify` finds it sound, too, and `decompress` restores what its digests describe;
//! - `verify` finds a mutant sound exactly if `decompress` restores it;
//! - the bundle is not written to, and nothing appears next to the output.

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use serde_json::Value;
use unweight_format::{
    Digest, Float,
    bundle::{BundleError, CompressOptions, DecompressOptions, Profile, Silent, compress, decompress, verify},
    testing::{
        Random, Weights,
        demo_model::{self, DemoOptions},
        float_weights, sprinkle,
    },
};

type Tree = BTreeMap<String, Vec<u8>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mutate_bundles: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let count: u64 = arguments.next().map_or(Ok(100_000), |text| text.parse())?;
    let seed: u64 = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let (made, home);
    match arguments.next() {
        Some(directory) => home = PathBuf::from(directory),
        None => {
            made = tempfile::tempdir()?;
            home = made.path().to_path_buf();
        }
    }
    let root = home.join("mutants");
    fs::create_dir(&root)?;
    let seeds = bundles(&root)?;
    // Test the mutator itself: sealing an unchanged bundle, or one with other notes, results in a sound one.
    for (bundle, source) in &seeds {
        let mut sealed = bundle.clone();
        seal(&mut sealed, true);
        if !matches!(examine(&root, &sealed, source)?, Outcome::Source) {
            write_tree(&root.join("sealed"), &sealed)?;
            let found = verify(&root.join("sealed"), None, &Silent).map(|report| report.problems);
            return Err(format!("a sealed bundle is rejected: {found:?}").into());
        }
        sealed.insert("sub/notes.txt".into(), b"c\nd\n".to_vec());
        seal(&mut sealed, true);
        if !matches!(examine(&root, &sealed, source)?, Outcome::Another) {
            return Err("a sealed bundle with other notes is rejected".into());
        }
    }
    // Panics are counted, and reported once.
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    let (mut sound, mut unchanged, mut failures, mut slowest) = (0, 0, Vec::new(), Duration::ZERO);
    for number in 0..count {
        let mut random = Random::at(&[seed, number]);
        let (bundle, source) = &seeds[random.below(seeds.len() as u64) as usize];
        let mutant = mutate(bundle, &mut random);
        let mutant_start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| examine(&root, &mutant, source)));
        let elapsed = mutant_start.elapsed();
        slowest = slowest.max(elapsed);
        match outcome {
            Ok(Ok(Outcome::Rejected)) => {}
            Ok(Ok(Outcome::Source)) => unchanged += 1,
            Ok(Ok(Outcome::Another)) => sound += 1,
            Ok(Err(what)) => failures.push(format!("seed {seed}, mutant {number}: {what}")),
            Err(_) => failures.push(format!("seed {seed}, mutant {number}: a panic")),
        }
        if elapsed > Duration::from_secs(10) {
            failures.push(format!("seed {seed}, mutant {number}: {elapsed:?}"));
        }
        if failures.len() > 20 {
            break;
        }
    }
    fs::remove_dir_all(&root)?;
    println!(
        "{count} mutants in {:.0} s: {unchanged} restore the source, {sound} are other valid bundles, {} failures; the slowest took {:.2} s",
        start.elapsed().as_secs_f64(),
        failures.len(),
        slowest.as_secs_f64()
    );
    failures.iter().for_each(|failure| println!("{failure}"));
    if failures.is_empty() { Ok(()) } else { Err("a mutant was not handled".into()) }
}

/// Small bundles of every profile, with their sources.
fn bundles(root: &Path) -> Result<Vec<(Tree, Tree)>, Box<dyn Error>> {
    let source = root.join("seed-model");
    let tiny = DemoOptions {
        layers: 2,
        hidden: 64,
        intermediate: 64,
        heads: 2,
        kv_heads: 1,
        vocab: 64,
        ..DemoOptions::default()
    };
    demo_model::write(&source, &tiny)?;
    fs::create_dir(source.join("sub"))?;
    fs::write(source.join("sub/notes.txt"), "a\nb\n")?;
    // Special values and odd shapes.
    let mut odd = Weights::TRAINED.bytes(70 * 66, 5);
    sprinkle(&mut odd, 100, Weights::Noise, 6);
    let (half, eight) = (float_weights(Float::F16, 128 * 128, 7), float_weights(Float::E4M3, 144 * 192, 8));
    let header = concat!(
        r#"{"odd":{"dtype":"BF16","shape":[70,66],"data_offsets":[0,9240]},"#,
        r#""half":{"dtype":"F16","shape":[128,128],"data_offsets":[9240,42008]},"#,
        r#""eight":{"dtype":"F8_E4M3","shape":[144,192],"data_offsets":[42008,69656]},"#,
        r#""f":{"dtype":"U8","shape":[3],"data_offsets":[69656,69659]}}"#,
    );
    let length = (header.len() as u64).to_le_bytes();
    let file = [&length[..], header.as_bytes(), &odd, &half, &eight, &[1, 2, 3]].concat();
    fs::write(source.join("odd.safetensors"), file)?;
    let mut made = Vec::new();
    for (i, &profile) in Profile::ALL.iter().enumerate() {
        let bundle = root.join(format!("seed-{i}"));
        compress(&source, &bundle, &CompressOptions::new(profile).sha256(i % 2 == 1), &Silent)?;
        made.push((read_tree(&bundle)?, read_tree(&source)?));
        fs::remove_dir_all(&bundle)?;
    }
    fs::remove_dir_all(&source)?;
    Ok(made)
}

enum Outcome {
    Rejected,
    Source,
    Another,
}

fn examine(root: &Path, mutant: &Tree, source: &Tree) -> Result<Outcome, String> {
    let (bundle, output) = (root.join("bundle"), root.join("output"));
    let io = |error: std::io::Error| error.to_string();
    write_tree(&bundle, mutant).map_err(io)?;
    // Verify reports damage of the bundle's own index and unlisted files; decompress does not read them.
    let unread = |file: &str| file == "stray" || file.ends_with(".safetensors.index.json");
    let (sound, only_unread) = match verify(&bundle, None, &Silent) {
        Ok(report) => (report.is_ok(), report.problems.iter().all(|problem| unread(&problem.file))),
        Err(error) => (check_bundle_error(&error)?, false),
    };
    let rebuilt = match decompress(&bundle, &output, &DecompressOptions::default().threads(1), &Silent) {
        Ok(_) => Some(read_tree(&output).map_err(io)?),
        Err(error) => {
            check_bundle_error(&error)?;
            None
        }
    };
    if output.exists() != rebuilt.is_some() {
        return Err("an output exists after a failed run, or is missing after a successful one".into());
    }
    let after = read_tree(&bundle).map_err(io)?;
    let _ = fs::remove_dir_all(&output);
    let _ = fs::remove_dir_all(root.join("output.partial"));
    fs::remove_dir_all(&bundle).map_err(io)?;
    if after != *mutant {
        return Err("the bundle was modified".into());
    }
    if fs::read_dir(root).map_err(io)?.next().is_some() {
        return Err("files were left next to the output".into());
    }
    match rebuilt {
        None if sound => Err("verify reports no problem, but decompress fails".into()),
        None => Ok(Outcome::Rejected),
        Some(tree) if tree == *source => Ok(Outcome::Source),
        Some(_) if !only_unread => {
            Err("verify reports damage, but decompress writes other files without an error".into())
        }
        Some(_) => Ok(Outcome::Another),
    }
}

/// Checks that an error is about the bundle, not about this machine.
fn check_bundle_error(error: &BundleError) -> Result<bool, String> {
    match error {
        BundleError::Interrupted { .. } | BundleError::Cancelled | BundleError::Locked { .. } => Err(error.to_string()),
        _ => Ok(false),
    }
}

fn mutate(bundle: &Tree, random: &mut Random) -> Tree {
    let mut tree = bundle.clone();
    for _ in 0..1 + random.below(4) {
        let names: Vec<String> = tree.keys().cloned().collect();
        let Some(name) = names.get(random.below(names.len().max(1) as u64) as usize).cloned() else { break };
        let other = names[random.below(names.len() as u64) as usize].clone();
        match random.below(12) {
            0 | 1 => flip(tree.get_mut(&name), random),
            2 => {
                let bytes = tree.entry(name).or_default();
                bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
            }
            3 => {
                let more = random.below(40) as usize;
                let more = random.bytes(more);
                tree.entry(name).or_default().extend(more);
            }
            4 => drop(tree.remove(&name)),
            5 => {
                let (a, b) = (tree.remove(&name), tree.remove(&other));
                a.map(|bytes| tree.insert(other, bytes));
                b.map(|bytes| tree.insert(name, bytes));
            }
            6 => drop(tree.insert("stray".into(), Vec::new())),
            7 => header(tree.get_mut("odd.safetensors"), random),
            _ => manifest(&mut tree, random),
        }
    }
    if random.below(4) > 0 {
        seal(&mut tree, random.below(3) > 0);
    }
    tree
}

fn flip(bytes: Option<&mut Vec<u8>>, random: &mut Random) {
    if let Some(bytes) = bytes.filter(|bytes| !bytes.is_empty()) {
        let at = random.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << random.below(8);
    }
}

/// Changes a digit in a shard's header. Its length does not change, so the data does not move.
fn header(bytes: Option<&mut Vec<u8>>, random: &mut Random) {
    let Some(bytes) = bytes.filter(|bytes| bytes.len() > 8) else { return };
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let Some(json) = bytes.get_mut(8..8usize.saturating_add(length).min(1 << 20)) else { return };
    let digits: Vec<usize> = (0..json.len()).filter(|&at| json[at].is_ascii_digit()).collect();
    if let Some(&at) = digits.get(random.below(digits.len().max(1) as u64) as usize) {
        json[at] = b'0' + random.below(10) as u8;
    }
}

/// Changes a value of the manifest.
fn manifest(tree: &mut Tree, random: &mut Random) {
    let Some(mut json) = tree.get("unweight.json").and_then(|bytes| serde_json::from_slice::<Value>(bytes).ok()) else {
        return;
    };
    let mut paths = Vec::new();
    leaves(&json, String::new(), &mut paths);
    let [at, from] = [0, 1].map(|_| paths[random.below(paths.len() as u64) as usize].clone());
    let other = json.pointer(&from).cloned().unwrap_or(Value::Null);
    let Some(value) = json.pointer_mut(&at) else { return };
    let kind = random.below(6);
    *value = match (kind, &*value) {
        (0, _) => other,
        (1, _) => Value::Null,
        (2, Value::Number(number)) => (number.as_u64().unwrap_or(0) ^ 1 << random.below(40)).into(),
        (3, Value::Number(number)) => {
            number.as_u64().unwrap_or(0).wrapping_add(random.below(130)).wrapping_sub(64).into()
        }
        (_, Value::Number(_)) => {
            [0, 1, 64, u64::MAX, i64::MAX as u64, 1 << 34, 1 << 62][random.below(7) as usize].into()
        }
        (2, Value::String(text)) => format!("{text}/x").into(),
        (3, Value::String(_)) => {
            ["", ".", "..", "/", "../x", "a\0b", "\u{1b}[2J", "odd.safetensors"][random.below(8) as usize].into()
        }
        (_, Value::String(_)) => {
            let names =
                ["raw", "huffman", "exponents", "palette", "packed", "BF16", "F8_E5M2", "F32", "weights", "copied"];
            names[random.below(10) as usize].into()
        }
        (_, old) => old.clone(),
    };
    tree.insert("unweight.json".into(), json.to_string().into_bytes());
}

fn leaves(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                leaves(value, format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), found);
            }
        }
        Value::Array(items) => {
            found.push(at.clone());
            items.iter().enumerate().for_each(|(i, item)| leaves(item, format!("{at}/{i}"), found));
        }
        _ => found.push(at),
    }
}

/// Corrects digests: of the manifest and, if `parts`, of shard headers, sections, raw tensors and copied files, as the
/// manifest places them.
fn seal(tree: &mut Tree, parts: bool) {
    let Some(mut json) = tree.get("unweight.json").and_then(|bytes| serde_json::from_slice::<Value>(bytes).ok()) else {
        return;
    };
    for file in json.get_mut("files").and_then(Value::as_array_mut).into_iter().flatten().filter(|_| parts) {
        let Some(bytes) = file["name"].as_str().and_then(|name| tree.get(name)) else { continue };
        match file["kind"].as_str() {
            Some("copied") => {
                file["digest"] = Digest::of(bytes).to_string().into();
                // This example does not compute SHA-256, which is optional in a manifest.
                file.as_object_mut().map(|file| file.remove("sha256"));
            }
            Some("weights") => {
                let head = file["shard_header_bytes"].as_u64().unwrap_or(0) as usize;
                let Some(head) = bytes.get(..head).filter(|head| head.len() > 8) else { continue };
                file["shard_header_digest"] = Digest::of(head).to_string().into();
                let Ok(header) = serde_json::from_slice::<Value>(&head[8..]) else { continue };
                let part = |name: &str| {
                    let offset =
                        |i: usize| Some(head.len().wrapping_add(header[name]["data_offsets"][i].as_u64()? as usize));
                    bytes.get(offset(0)?..offset(1)?).map(|part| Digest::of(part).to_string())
                };
                for tensor in file.get_mut("tensors").and_then(Value::as_array_mut).into_iter().flatten() {
                    let name = tensor["name"].as_str().unwrap_or_default().to_string();
                    let sections = tensor.get_mut("sections").and_then(Value::as_array_mut);
                    for section in sections.into_iter().flatten() {
                        let section_name = format!("{name}.unweight.{}", section["name"].as_str().unwrap_or_default());
                        if let Some(digest) = part(&section_name) {
                            section["digest"] = digest.into();
                        }
                    }
                    if let Some(digest) = part(&name) {
                        tensor["digest"] = digest.into();
                    }
                }
                let digests = file["tensors"].as_array().into_iter().flatten();
                let text: String = std::iter::once(&file["header_digest"])
                    .chain(digests.map(|tensor| &tensor["digest"]))
                    .filter_map(Value::as_str)
                    .collect();
                file["digest"] = Digest::of(text.as_bytes()).to_string().into();
            }
            _ => {}
        }
    }
    json["manifest_digest"] = "0".repeat(32).into();
    let text = json.to_string();
    let digest = Digest::of(text.as_bytes()).to_string();
    let key = |digits: &str| format!("\"manifest_digest\":\"{digits}\"");
    tree.insert("unweight.json".into(), text.replace(&key(&"0".repeat(32)), &key(&digest)).into_bytes());
}

fn read_tree(root: &Path) -> std::io::Result<Tree> {
    fn walk(dir: &Path, prefix: &str, found: &mut Tree) -> std::io::Result<()> {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                walk(&entry.path(), &format!("{name}/"), found)?;
            } else {
                found.insert(name, fs::read(entry.path())?);
            }
        }
        Ok(())
    }
    let mut found = Tree::new();
    walk(root, "", &mut found)?;
    Ok(found)
}

fn write_tree(root: &Path, tree: &Tree) -> std::io::Result<()> {
    for (name, bytes) in tree {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        fs::write(path, bytes)?;
    }
    fs::create_dir_all(root)
}
