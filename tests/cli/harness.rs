//! Helpers of the command line tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
};

use serde_json::Value;
use tempfile::TempDir;
use unweight::format::{
    bundle::{self, BundleError, CompressOptions, Silent},
    testing::demo_model::{self, DemoOptions},
};

/// Returns the command without the environment variables that change its output.
pub fn unweight(arguments: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("unweight"));
    command.args(arguments).env_remove("NO_COLOR").env_remove("UNWEIGHT_JIT");
    // Names that look like repositories are not looked up; tests of the Hub unset this.
    command.env("HF_HUB_OFFLINE", "1");
    command
}

/// Runs in `directory` and expects `status`.
pub fn run(directory: &Path, arguments: &[&str], status: i32) -> Output {
    let output = unweight(arguments).current_dir(directory).output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(status),
        "unweight {arguments:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Runs in `directory`, expects `status` and an error with this code, and returns stderr.
pub fn fails(directory: &Path, arguments: &[&str], status: i32, code: &str) -> String {
    let output = run(directory, arguments, status);
    assert_eq!(error_code(&output), code, "unweight {arguments:?}\n{}", stderr(&output));
    stderr(&output)
}

/// Returns the code of the error on stderr.
pub fn error_code(output: &Output) -> String {
    let text = stderr(output);
    let code = text.lines().find_map(|line| Some(line.strip_prefix("error[")?.split_once("]: ")?.0.to_owned()));
    code.unwrap_or_else(|| panic!("no error code in {text}"))
}

/// Returns the cache of kernels that tests share, also with those of `tests/jit`: its entries depend on nothing but
/// their sources and the compiler.
pub fn shared_cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubins")
}

/// Fails if there is no NVRTC.
pub fn needs_nvrtc() {
    assert!(
        std::env::var_os("UNWEIGHT_NVRTC").is_some(),
        "this test needs NVRTC: run `cargo xtask test`, which fetches it, or set UNWEIGHT_NVRTC"
    );
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stdout(output)))
}

/// Attaches a plan, and replaces an existing one.
pub fn attach_plan(bundle: &Path, plan: &str) {
    bundle::attach_plan(bundle, |_| Ok::<_, BundleError>(plan.to_owned())).unwrap();
}

pub fn tiny() -> DemoOptions {
    DemoOptions {
        layers: 3,
        hidden: 128,
        intermediate: 320,
        heads: 4,
        kv_heads: 2,
        vocab: 512,
        ..DemoOptions::default()
    }
}

/// Returns a directory with a model and its bundle (`model`, `bundle`), made once and never changed.
pub fn fixture() -> &'static Path {
    static HOME: OnceLock<TempDir> = OnceLock::new();
    HOME.get_or_init(|| {
        let home = tempfile::tempdir().unwrap();
        demo_model::write(&home.path().join("model"), &tiny()).unwrap();
        let options = CompressOptions::default();
        bundle::compress(&home.path().join("model"), &home.path().join("bundle"), &options, &Silent).unwrap();
        home
    })
    .path()
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Copies the fixture's bundle to `home/bundle` and flips one bit near the end of its first shard. Returns the shard's
/// name.
pub fn damaged(home: &Path) -> String {
    copy(&fixture().join("bundle"), &home.join("bundle"));
    let shard = shards(&home.join("bundle"))[0].clone();
    let mut bytes = fs::read(&shard).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 4;
    fs::write(&shard, bytes).unwrap();
    shard.file_name().unwrap().to_str().unwrap().to_owned()
}

pub fn shards(directory: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut shards: Vec<_> = files.filter(|file| file.extension().is_some_and(|e| e == "safetensors")).collect();
    shards.sort();
    shards
}

pub fn same(a: &Path, b: &Path) {
    let names = |directory: &Path| -> BTreeSet<_> {
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name()).collect()
    };
    assert_eq!(names(a), names(b));
    for name in names(a) {
        assert!(fs::read(a.join(&name)).unwrap() == fs::read(b.join(&name)).unwrap(), "{name:?} differs");
    }
}

/// Checks that the keys of an output and of its table in docs/reference/json.md are the same.
pub fn documented(command: &str, output: &Value) {
    // A heading may include an option.
    assert_eq!(output["command"], command.split(" --").next().unwrap());
    assert_eq!(output["unweight_version"], env!("CARGO_PKG_VERSION"));
    let mut found = BTreeSet::new();
    keys(output, "", &mut found);
    let expected = table(command);
    for key in found.iter().filter(|key| !["command", "unweight_version"].contains(&key.as_str())) {
        // An empty list has no keys below it.
        let list = format!("{key}[]");
        let known = |key: &str| expected.contains_key(key) || expected.keys().any(|known| known.starts_with(&list));
        // The properties of a GPU depend on the machine.
        assert!(known(key) || key.starts_with("devices[]."), "json.md, {command}: `{key}` is not documented");
    }
    for (key, optional) in expected {
        assert!(
            found.contains(&key) || optional || is_deeply_empty(output, &key),
            "json.md, {command}: `{key}` is not printed"
        );
    }
}

/// Returns whether a list on the path to `key` is empty.
pub fn is_deeply_empty(output: &Value, key: &str) -> bool {
    let mut at = output;
    for part in key.split('.') {
        let list = part.strip_suffix("[]");
        at = &at[list.unwrap_or(part)];
        if list.is_some() {
            match at.as_array().and_then(|items| items.first()) {
                Some(first) => at = first,
                None => return true,
            }
        }
    }
    false
}

/// Collects the paths of leaves, for lists over all their elements.
pub fn keys(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                keys(value, &if at.is_empty() { key.clone() } else { format!("{at}.{key}") }, found);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().for_each(|item| keys(item, &format!("{at}[]"), found));
        }
        _ => {
            found.insert(at.to_owned());
        }
    }
}

/// Returns the keys of a heading's table and whether they are optional. Follows references to other headings.
pub fn table(heading: &str) -> BTreeMap<String, bool> {
    let text = include_str!("../../docs/reference/json.md");
    let (_, rest) = text.split_once(&format!("\n### {heading}\n")).unwrap_or_else(|| panic!("no heading {heading}"));
    let section: Vec<&str> = rest.lines().take_while(|line| !line.starts_with('#')).collect();
    let same = section.iter().find_map(|line| line.strip_prefix("Keys as of [")?.split_once(']'));
    let mut found = same.map_or_else(BTreeMap::new, |(other, _)| table(other));
    // A key below an optional or null key may be absent, too.
    let mut absent: Vec<String> = Vec::new();
    for line in section.iter().filter(|line| line.starts_with("| `")) {
        let mut cells = line.split(" | ").map(|cell| cell.trim_matches(['|', ' ']));
        let (key, kind) = (cells.next().unwrap().trim_matches('`'), cells.next().unwrap());
        let null = kind.contains('?');
        let missing = kind.contains("optional") || absent.iter().any(|above| key.starts_with(above));
        let optional = missing || null;
        if optional {
            absent.push(format!("{key}."));
        }
        if null {
            found.insert(key.to_owned(), true);
        }
        match kind.split_once("](#").and_then(|(_, rest)| rest.split_once(')')) {
            Some((other, _)) => found.extend(table(other).into_iter().map(|(inner, own)| {
                let key = format!("{key}.{inner}");
                (key, own || optional)
            })),
            // The rows of its own keys follow.
            None if kind.starts_with("object") => {}
            // A scalar without a value is printed as null.
            None => _ = found.insert(key.to_owned(), missing),
        }
    }
    found
}

/// Writes a safetensors file with one BF16 matrix of 64 x 64 trained weights.
pub fn one_matrix(path: &Path, name: &str) {
    matrix(path, name, [64, 64], &unweight::format::testing::Weights::TRAINED.bytes(4096, 1));
}

/// Writes a safetensors file with this BF16 matrix.
pub fn matrix(path: &Path, name: &str, shape: [usize; 2], weights: &[u8]) {
    let entry = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [0, weights.len()] });
    let header = serde_json::json!({ name: entry }).to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], header.as_bytes(), weights].concat()).unwrap();
}
