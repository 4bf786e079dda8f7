//! Models and bundles named `org/name`: in the local Hugging Face cache, or fetched from the Hub.

use std::{
    collections::HashMap,
    env,
    fs::{self, File},
    io::Read,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use unweight::format::bundle::manifest::{self, FileEntry, Manifest};

use super::{
    failure::{Failure, Result},
    output::Console,
};

/// Maximum size of a safetensors index, bytes.
const INDEX_MAX: u64 = 100_000_000;
/// Maximum size of a manifest, bytes.
const MANIFEST_MAX: u64 = 128 << 20;
/// How deep a repository's directories are searched for weights.
const DEPTH_MAX: usize = 8;

/// What a command does with a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Reads the weights of a model.
    Model,
    /// Reads a bundle.
    Bundle,
}

/// Returns the directory of a bundle: the path, or the snapshot of a repository.
pub fn bundle(path: &Path, console: Console) -> Result<PathBuf> {
    let is_name = || path.to_str().and_then(hub_name).is_some_and(|(id, _)| id.contains('/'));
    if path.exists() || !is_name() { Ok(path.to_owned()) } else { locate(path, Wanted::Bundle, console) }
}

/// What the cache has of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cached {
    /// All files that index or manifest name, and of a model `config.json` and a tokenizer.
    Complete,
    /// All weights of a model, but no `config.json` or no tokenizer: perhaps other files are missing, too.
    Weights,
    /// Less.
    Part,
}

/// Returns the snapshot of a repository: from the cache if it is complete there, else from the Hub.
pub fn locate(name: &Path, wanted: Wanted, console: Console) -> Result<PathBuf> {
    let not_found = || {
        let message = format!("{}: no such file or directory", name.display());
        Failure::new("source-not-found", message, "give the directory of a model, or a name that `hf cache ls` lists")
    };
    let Some((id, revision)) = name.to_str().and_then(hub_name) else { return Err(not_found()) };
    let Some(cache) = hub_cache(|variable| env::var_os(variable)) else { return Err(not_found()) };
    let cached = snapshot(&cache, id, revision);
    let state = cached.as_deref().map_or(Cached::Part, |snapshot| state(snapshot, wanted));
    if state == Cached::Complete {
        return cached;
    }
    // A name without an organization is more often a mistyped path.
    let fetched = if id.contains('/') { fetch(&cache, (id, revision), wanted, console) } else { None };
    match fetched {
        // The weights are there, and the repository may have no more.
        Some(Err(failure)) if state == Cached::Weights && failure.report().code.starts_with("hub-") => {
            console.note(format_args!("note: {failure}"));
        }
        Some(Err(failure)) if failure.report().code == "hub-unreachable" => {
            let help = format!(
                "there is no local path {}: check the path and the network, or set HF_ENDPOINT to a mirror",
                name.display()
            );
            return Err(failure.with_help(help));
        }
        Some(fetched) => return fetched,
        None => {}
    }
    if state == Cached::Weights {
        console.note(format_args!("note: the cached snapshot of {id} lacks config.json or the tokenizer"));
    }
    cached
}

/// Fetches a repository. Returns `None` if connections are forbidden.
#[cfg(feature = "hub")]
fn fetch(cache: &Path, (id, revision): (&str, &str), wanted: Wanted, console: Console) -> Option<Result<PathBuf>> {
    use super::{output, progress::Bar};
    use crate::hub::{self, Repository, Use};

    if hub::is_offline() {
        return None;
    }
    let fetch = || {
        let bar = Bar::new(console, "fetching")?;
        let client = client()?;
        let repository = Repository { id: id.to_owned(), revision: revision.to_owned() };
        let usage = match wanted {
            Wanted::Model => Use::Model,
            Wanted::Bundle => Use::Bundle,
        };
        let listing = repository.list(&client, usage)?;
        let bytes = listing.files.iter().map(|file| file.size).sum();
        console.note(format_args!(
            "{id}: {}, {} of commit {} from {}",
            output::count(listing.files.len(), "file"),
            output::bytes(bytes),
            listing.commit,
            client.host(),
        ));
        if !listing.skipped.is_empty() && console.verbose > 0 {
            console.note(format_args!("not fetched: {}", listing.skipped.join(", ")));
        }
        let fetched = hub::fetch(&client, cache, &repository, &listing, &bar)?;
        bar.finish();
        console.note(format_args!("fetched {} to {}", output::bytes(fetched.bytes), fetched.snapshot.display()));
        Ok(fetched.snapshot)
    };
    Some(fetch())
}

/// Returns a client with the settings of the environment; signals end its pauses.
#[cfg(feature = "hub")]
pub fn client() -> Result<crate::hub::Client> {
    use crate::hub::{Client, Settings};
    let cancelled = super::progress::cancel_flag()?;
    Ok(Client::new(&Settings::of_process()?, move || cancelled.load(std::sync::atomic::Ordering::Relaxed))?)
}

/// Returns the repository of a name with an organization, to upload to.
#[cfg(feature = "hub")]
pub fn repository(name: &str) -> Result<crate::hub::Repository> {
    if crate::hub::is_offline() {
        let help = "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE";
        return Err(Failure::new("hub-setting-invalid", "HF_HUB_OFFLINE forbids connections", help));
    }
    match hub_name(name).filter(|(id, _)| id.contains('/')) {
        Some((id, revision)) => Ok(crate::hub::Repository { id: id.to_owned(), revision: revision.to_owned() }),
        None => Err(Failure::new("usage", format!("'{name}' is not a repository"), "give org/name or org/name@branch")),
    }
}

#[cfg(not(feature = "hub"))]
fn fetch(_: &Path, _: (&str, &str), _: Wanted, _: Console) -> Option<Result<PathBuf>> {
    None
}

/// Parses a name of the Hub and its revision: `name` or `org/name`, each with an optional `@revision`.
fn hub_name(text: &str) -> Option<(&str, &str)> {
    let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
    let plain = |part: &str| {
        let mut bytes = part.bytes();
        bytes.next().is_some_and(|first| first.is_ascii_alphanumeric() || first == b'_')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'))
            && !part.contains("--")
            && !part.contains("..")
    };
    let good = id.split('/').count() <= 2 && id.split('/').all(plain) && is_revision(revision);
    good.then_some((id, revision))
}

/// Whether git allows this name of a branch or tag. Those such as refs/pr/1 have directories.
fn is_revision(text: &str) -> bool {
    let part = |part: &str| !part.is_empty() && !part.starts_with(['.', '-']) && !part.ends_with('.');
    let refused = |c: char| c.is_whitespace() || c.is_control() || "~^:?*[\\".contains(c);
    text.split('/').all(part) && !text.contains("..") && !text.contains("@{") && !text.contains(refused)
}

/// Returns the cache directory of the `huggingface_hub` library.
fn hub_cache(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || set("HF_HOME").or_else(|| Some(set("XDG_CACHE_HOME")?.join("huggingface")));
    let home = || home().or_else(|| Some(set("HOME")?.join(".cache/huggingface")));
    set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE")).or_else(|| Some(home()?.join("hub")))
}

/// Opens a regular file, without waiting for anything else.
fn open(path: &Path) -> Option<File> {
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(nonblock).open(path).ok()?;
    file.metadata().ok()?.is_file().then_some(file)
}

/// Reads a small file of one line. Returns `None` for anything else.
fn read_line(path: &Path) -> Option<String> {
    let mut text = String::new();
    open(path)?.take(4096).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

/// Returns the snapshot of a model in the cache.
fn snapshot(cache: &Path, id: &str, revision: &str) -> Result<PathBuf> {
    let model = cache.join(format!("models--{}", id.replace('/', "--")));
    if !model.is_dir() {
        let message = format!("{id}: no such file or directory, and no such model in the Hugging Face cache");
        let step = match (cfg!(feature = "hub"), id.contains('/')) {
            (true, true) => format!("run `hf download {id}`, unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"),
            (false, true) => format!("run `hf download {id}`, install with --features hub"),
            (_, false) => "check the path, pass ORG/NAME to fetch a model".to_owned(),
        };
        let help = format!("looked for {}; {step}, or set HF_HUB_CACHE to the directory of the cache", model.display());
        return Err(Failure::new("source-not-found", message, help));
    }
    let reference = model.join("refs").join(revision);
    // A ref is a file with one line; a commit is itself the name of a snapshot.
    let commit = read_line(&reference).unwrap_or_else(|| revision.to_owned());
    let plain = commit.bytes().all(|byte| byte.is_ascii_alphanumeric()) && !commit.is_empty();
    let snapshot = model.join("snapshots").join(&commit);
    if plain && snapshot.is_dir() {
        return Ok(snapshot);
    }
    let mut snapshots: Vec<String> = names(&model.join("snapshots")).collect();
    snapshots.sort();
    let message = format!("{id}: revision '{revision}' is not in the Hugging Face cache");
    let snapshots = if snapshots.is_empty() {
        "the cache has no snapshot of this model".to_owned()
    } else {
        format!("cached snapshots: {}", snapshots.join(", "))
    };
    let help = format!("looked for {} and in {}; {snapshots}", reference.display(), model.join("snapshots").display());
    Err(Failure::new("hub-revision-not-found", message, help))
}

/// Returns what a snapshot has of the files that a command reads.
fn state(snapshot: &Path, wanted: Wanted) -> Cached {
    let blobs = snapshot.ancestors().nth(2).map(|model| model.join("blobs"));
    let interrupted =
        |blobs: PathBuf| names(&blobs).any(|name| Path::new(&name).extension().is_some_and(|e| e == "incomplete"));
    let has_all = |names: Option<Vec<String>>| names.is_none_or(|all| all.iter().all(|n| snapshot.join(n).is_file()));
    let has_data = match wanted {
        _ if blobs.is_some_and(interrupted) => false,
        Wanted::Bundle => open(&snapshot.join(manifest::FILE_NAME)).is_some_and(|file| has_all(stored(file))),
        Wanted::Model => match open(&snapshot.join("model.safetensors.index.json")) {
            None => has_weights(snapshot, DEPTH_MAX) && has_all_parts(snapshot),
            Some(index) => has_all(shards(index)),
        },
    };
    match (has_data, wanted) {
        (false, _) => Cached::Part,
        (true, Wanted::Model) if !snapshot.join("config.json").is_file() || !has_tokenizer(snapshot) => Cached::Weights,
        (true, _) => Cached::Complete,
    }
}

/// Returns the files of a bundle; `None` if its manifest is invalid, which the command itself reports.
fn stored(manifest: File) -> Option<Vec<String>> {
    let mut bytes = Vec::new();
    manifest.take(MANIFEST_MAX).read_to_end(&mut bytes).ok()?;
    let manifest = Manifest::parse(&bytes, Path::new(manifest::FILE_NAME)).ok()?;
    Some(manifest.files.iter().flat_map(FileEntry::stored).map(|(name, _)| name).collect())
}

fn has_weights(folder: &Path, depth: usize) -> bool {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let mut folders = Vec::new();
    for path in paths {
        if is_weights(&path) && path.is_file() {
            return true;
        }
        if path.is_dir() {
            folders.push(path);
        }
    }
    depth > 0 && folders.iter().any(|folder| has_weights(folder, depth - 1))
}

/// Returns the names in a directory; none if it cannot be read.
fn names(folder: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

fn has_tokenizer(snapshot: &Path) -> bool {
    names(snapshot).any(|name| ["tokenizer.", "vocab."].iter().any(|start| name.starts_with(start)))
}

/// Returns whether a directory has all files of each series `NAME-00001-of-00002.safetensors`.
fn has_all_parts(folder: &Path) -> bool {
    let mut found: HashMap<(String, usize), usize> = HashMap::new();
    for name in names(folder) {
        let Some((first, total)) = name.strip_suffix(".safetensors").and_then(|stem| stem.rsplit_once("-of-")) else {
            continue;
        };
        if let (Some((series, _)), Ok(total)) = (first.rsplit_once('-'), total.parse()) {
            *found.entry((series.to_owned(), total)).or_default() += 1;
        }
    }
    found.iter().all(|((_, total), parts)| parts >= total)
}

/// Returns the files that an index names; `None` if it is invalid, which the command itself reports.
fn shards(index: File) -> Option<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let index: Index = serde_json::from_reader(std::io::BufReader::new(index.take(INDEX_MAX))).ok()?;
    let mut shards: Vec<_> = index.weight_map.into_values().collect();
    shards.sort();
    shards.dedup();
    Some(shards)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub() {
        assert_eq!(hub_name("gpt2"), Some(("gpt2", "main")));
        assert_eq!(hub_name("meta-llama/Llama-3.1-8B@refs/pr/1"), Some(("meta-llama/Llama-3.1-8B", "refs/pr/1")));
        assert_eq!(hub_name("org/name@v1.0+x"), Some(("org/name", "v1.0+x")));
        assert_eq!(hub_name("org/name@a--b@2/ü"), Some(("org/name", "a--b@2/ü")));
        for name in ["x@a b", "x@/a", "x@a/", "x@a\\b", "x@a:b", "x@.git", "x@-a", "x@a..b", "x@a.", "x@a\nb"] {
            assert_eq!(hub_name(name), None, "{name}");
        }
        for name in ["a/b/c", "../x", "a/..", "/etc", "a b", "x@", "", "a--b", "x@../y", ".hidden", "x/"] {
            assert_eq!(hub_name(name), None, "{name}");
        }
    }

    #[test]
    fn hub_cache_location_follows_environment() {
        let with = |set: &[(&str, &str)]| {
            hub_cache(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
        };
        assert_eq!(with(&[("HOME", "/h")]), Some("/h/.cache/huggingface/hub".into()));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Some("/x/huggingface/hub".into()));
        assert_eq!(with(&[("HOME", "/h"), ("HF_HOME", "/f"), ("XDG_CACHE_HOME", "/x")]), Some("/f/hub".into()));
        assert_eq!(with(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), Some("/c".into()));
        assert_eq!(with(&[("HF_HOME", ""), ("HOME", "/h")]), Some("/h/.cache/huggingface/hub".into()));
        assert_eq!(with(&[]), None);
    }
}
