//! The store: cache entries on disk.
//!
//! ```text
//! <root>/                 0700, the user's own
//!   CACHEDIR.TAG          marks the directory as a kernel cache; without it nothing here is read or removed
//!   entries/<directory>/     one complete kernel, immutable (key.rs defines the directory's name)
//!     kernel.cubin        the binary that the driver loads
//!     kernel.cu           the source, for readers
//!     meta.json           sizes and digests of both, the full key, resources, log
//!   building/             entries under construction, and evicted entries before deletion
//!   locks/<directory>.lock   see lock.rs
//!   failed/<directory>/      sources that did not compile, with headers, options and log
//!   tables/uw_<device>.json   measurements of a device of that name, for dispatch
//! ```
//!
//! An entry is built in `building`, flushed and renamed into place, so it is complete or absent. Every read checks the
//! digests. Nothing here returns an error to a caller that requests a kernel: a problem is a [`Lookup::Damaged`] or
//! [`Kept::NotStored`] with a reason, and the kernel is compiled as if there were no cache.

use std::{
    collections::BTreeMap,
    fs::{DirBuilder, File},
    io::{ErrorKind, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Component, Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::key::{Key, SCHEMA, SourceKey, folder_prefix};
use crate::jit::{
    compiler::Compiled,
    cubin::KernelResources,
    failure::CompileFailure,
    miss::Unusable,
    request::{CompileRequest, CompilerId},
};

/// The maximum size of a `meta.json` that the store reads.
const META_LIMIT_BYTES: u64 = 4 << 20;
/// The maximum size of a table of measurements.
const TABLE_LIMIT_BYTES: u64 = 16 << 20;
/// The maximum size of a cubin.
const CUBIN_LIMIT_BYTES: u64 = 256 << 20;
/// A directory in `building` that is older than this and not locked was left by a process that died. The age protects a
/// new directory that is not locked yet.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);
/// The file that marks a directory as a kernel cache. It follows the Cache Directory Tagging Specification, so that
/// backups skip the directory, and has one more line, which never changes.
const TAG: &str = "CACHEDIR.TAG";
const TAG_TEXT: &str = "Signature: 8a477f597d28d172789f06886806bc55\n\
    # unweight kernel cache. Everything in this folder may be removed at any time.\n";
/// The minimum time between updates of an entry's last use: a warm start should not write to every entry.
const USE_RECORD_INTERVAL: Duration = Duration::from_secs(60);

/// A cache directory that is at least readable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    root: PathBuf,
}

/// Size and digest of a file of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// The length in bytes.
    pub bytes: u64,
    /// The SHA-256 digest, 64 hexadecimal digits.
    pub sha256: String,
}

impl FileRecord {
    fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, sha256: sha256(bytes) }
    }
}

/// The contents of an entry's `meta.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelMeta {
    /// The [`SCHEMA`] of the writer.
    pub schema: u32,
    /// The name of the variant.
    pub name: String,
    /// The full source key.
    pub source_key: String,
    /// The compiler and its version.
    pub compiler: CompilerId,
    /// The architecture of the kernel.
    pub arch: String,
    /// The canonical options.
    pub options: Vec<String>,
    /// SHA-256 of each header, by name.
    pub headers: BTreeMap<String, String>,
    /// The record of the file `kernel.cubin`.
    pub cubin: FileRecord,
    /// The record of the file `kernel.cu`.
    pub source: FileRecord,
    /// The resources of the kernel.
    pub resources: KernelResources,
    /// The log of the compiler.
    pub log: String,
    /// The duration of the compilation in microseconds.
    pub compile_us: u64,
}

/// The file `meta.json`: an entry's metadata, and a digest over them that reveals a flipped bit.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MetaFile {
    entry: KernelMeta,
    sha256: String,
}

/// A complete, checked entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The metadata of the entry.
    pub meta: KernelMeta,
    /// The compiled binary.
    pub cubin: Vec<u8>,
}

/// The result of a lookup in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// A complete, checked entry.
    Hit(Box<Entry>),
    /// The store has no such kernel.
    Absent,
    /// The store has an invalid entry, for this reason.
    Damaged(String),
}

/// Whether a new kernel was stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The kernel is in the store.
    Stored,
    /// Another process stored the same kernel first.
    LostRace,
    /// The kernel is not in the store, for this reason; the kernel itself is valid.
    NotStored(String),
}

impl Store {
    /// Opens the directory, creating it with mode 0700 if necessary.
    ///
    /// Rejects a directory that another user could write to: its files are code that will run.
    pub fn open(root: &Path) -> Result<Self, Unusable> {
        let unusable = |why: String| Unusable { root: root.to_owned(), why };
        if !root.is_dir() {
            if let Some(parent) = root.parent() {
                std::fs::create_dir_all(parent).map_err(|error| unusable(format!("{}: {error}", parent.display())))?;
            }
            match DirBuilder::new().mode(0o700).create(root) {
                Ok(()) => {}
                // Another process was faster.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && root.is_dir() => {}
                Err(error) => return Err(unusable(error.to_string())),
            }
        }
        let user = rustix::process::geteuid().as_raw();
        for directory in ["", "entries"] {
            let path = if directory.is_empty() { root.to_owned() } else { root.join(directory) };
            let metadata = match std::fs::metadata(&path) {
                Ok(metadata) => metadata,
                // Missing directories are created below.
                Err(_) if !directory.is_empty() => continue,
                Err(error) => return Err(unusable(error.to_string())),
            };
            if metadata.uid() != user && metadata.uid() != 0 {
                return Err(unusable(format!(
                    "{} belongs to user {}, not to this user ({user}) or root; set UNWEIGHT_CACHE_DIR to a directory \
                     that you own",
                    path.display(),
                    metadata.uid()
                )));
            }
            if metadata.mode() & 0o022 != 0 {
                return Err(unusable(format!(
                    "other users can write to {} (mode {:04o}), and its kernels are executed; run `chmod go-w` on it",
                    path.display(),
                    metadata.mode() & 0o7777
                )));
            }
        }
        Self::tag(root).map_err(unusable)?;
        for directory in ["entries", "building", "locks"] {
            // A read-only store still provides its entries.
            let _ = DirBuilder::new().mode(0o700).create(root.join(directory));
        }
        Ok(Self { root: root.to_owned() })
    }

    /// Checks that the directory is a kernel cache, or empty: then it becomes one. A wrong `UNWEIGHT_CACHE_DIR` may
    /// name a directory whose `entries` or `failed` belong to another program.
    fn tag(root: &Path) -> Result<(), String> {
        let tag = root.join(TAG);
        let look = || match read_bounded(&tag, 4096) {
            Ok(text) if text == TAG_TEXT.as_bytes() => Some(Ok(())),
            Ok(_) => {
                Some(Err(format!("its {TAG} belongs to another program; set UNWEIGHT_CACHE_DIR to another directory")))
            }
            Err(_) => None,
        };
        if let Some(found) = look() {
            return found;
        }
        if tag.symlink_metadata().is_ok() {
            // Another process may have written it since the first read: this read counts.
            return look().unwrap_or_else(|| Err(format!("its {TAG} cannot be read")));
        }
        let mut entries = std::fs::read_dir(root).map_err(|error| error.to_string())?;
        // Another process may be creating the same directory: so far it has only the tag's temporary file.
        let foreign = entries.find(|entry| {
            entry.as_ref().map_or(true, |entry| !entry.file_name().to_string_lossy().starts_with(".tag-"))
        });
        match foreign {
            // Another process may have written the tag since.
            Some(_) if read_bounded(&tag, 4096).is_ok_and(|text| text == TAG_TEXT.as_bytes()) => Ok(()),
            Some(entry) => {
                let name = entry.map(|entry| entry.file_name().to_string_lossy().into_owned()).unwrap_or_default();
                Err(format!(
                    "it contains '{name}' but no {TAG}, so it is not a kernel cache; set UNWEIGHT_CACHE_DIR to a new \
                     directory"
                ))
            }
            None => {
                let write = || -> std::io::Result<()> {
                    check_limit(TAG_TEXT.len())?;
                    let mut file = tempfile::Builder::new().prefix(".tag-").tempfile_in(root)?;
                    file.write_all(TAG_TEXT.as_bytes())?;
                    // Another process can only have written the same text.
                    file.persist(&tag)?;
                    Ok(())
                };
                // An empty directory that is not writable is a valid store without entries.
                let _ = write();
                Ok(())
            }
        }
    }

    /// Returns the directory of the cache.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the dispatch table of a device with this name.
    pub fn table_path(&self, device: &str) -> PathBuf {
        let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
        self.root.join("tables").join(format!("uw_{}.json", device.chars().map(letter).collect::<String>()))
    }

    /// Returns the stored dispatch table of a device; `None` if there is none.
    pub fn table(&self, device: &str) -> std::io::Result<Option<Vec<u8>>> {
        let path = self.table_path(device);
        match read_bounded(&path, TABLE_LIMIT_BYTES) {
            Ok(text) => Ok(Some(text)),
            Err(_) if std::fs::symlink_metadata(&path).is_err_and(|error| error.kind() == ErrorKind::NotFound) => {
                Ok(None)
            }
            Err(why) => Err(std::io::Error::other(why)),
        }
    }

    /// Stores a dispatch table atomically, replacing an existing one.
    pub fn keep_table(&self, device: &str, text: &[u8]) -> std::io::Result<PathBuf> {
        let (path, tables) = (self.table_path(device), self.root.join("tables"));
        match DirBuilder::new().mode(0o700).create(&tables) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        check_limit(text.len())?;
        let mut file = tempfile::Builder::new().prefix("uw_").tempfile_in(&tables)?;
        file.write_all(text)?;
        file.as_file().sync_all()?;
        file.persist(&path)?;
        Ok(path)
    }

    /// Returns the directory of complete entries.
    pub(crate) fn entries(&self) -> PathBuf {
        self.root.join("entries")
    }

    pub(crate) fn building(&self) -> PathBuf {
        self.root.join("building")
    }

    pub(crate) fn lock_path(&self, directory: &str) -> PathBuf {
        self.root.join("locks").join(format!("{directory}.lock"))
    }

    /// Looks up an entry, checks it and records its use.
    pub fn get(&self, key: &Key) -> Lookup {
        self.get_directory(&key.directory(), |meta| {
            if meta.name == key.name && meta.source_key == key.source.to_string() && meta.compiler == key.compiler {
                Ok(())
            } else {
                Err("meta.json belongs to another kernel".to_owned())
            }
        })
    }

    /// Looks up an entry of this source by any compiler: the newest undamaged version.
    pub fn get_any(&self, name: &str, source: &SourceKey) -> Lookup {
        let prefix = folder_prefix(name, source);
        let mut directories: Vec<String> = std::fs::read_dir(self.entries())
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|directory| directory.starts_with(&prefix))
            .collect();
        directories.sort_by_key(|directory| {
            let version: Vec<u64> = directory[prefix.len()..]
                .split(|character: char| !character.is_ascii_digit())
                .filter_map(|digits| digits.parse().ok())
                .take(2)
                .collect();
            std::cmp::Reverse((version, directory.clone()))
        });
        let mut result = Lookup::Absent;
        for directory in directories {
            match self.get_directory(&directory, |meta| {
                if meta.source_key == source.to_string() {
                    Ok(())
                } else {
                    Err("meta.json belongs to another kernel".to_owned())
                }
            }) {
                hit @ Lookup::Hit(_) => return hit,
                other => result = other,
            }
        }
        result
    }

    fn get_directory(&self, directory: &str, check: impl Fn(&KernelMeta) -> Result<(), String>) -> Lookup {
        let path = self.entries().join(directory);
        // Not `exists()`: a dangling link or a file in the entry's place must be detected, so that it is evicted.
        match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Lookup::Absent,
            _ => {}
        }
        let read = || -> Result<Entry, String> {
            let meta = read_meta(&path)?;
            check(&meta)?;
            let cubin = read_file(&path, "kernel.cubin", &meta.cubin)?;
            Ok(Entry { meta, cubin })
        };
        match read() {
            Ok(entry) => {
                record_use(&path.join("meta.json"));
                Lookup::Hit(Box::new(entry))
            }
            // It may have been pruned between the two reads.
            Err(_) if !path.exists() && std::fs::symlink_metadata(&path).is_err() => Lookup::Absent,
            Err(why) => Lookup::Damaged(why),
        }
    }

    /// Stores a kernel: builds the entry in `building`, flushes it and renames it into place.
    pub fn put(&self, key: &Key, request: &CompileRequest, compiled: &Compiled, compile_us: u64) -> Kept {
        let meta = KernelMeta {
            schema: SCHEMA,
            name: key.name.clone(),
            source_key: key.source.to_string(),
            compiler: key.compiler.clone(),
            arch: request.arch.clone(),
            options: request.canonical_options(),
            headers: request.headers.iter().map(|(name, text)| (name.clone(), sha256(text.as_bytes()))).collect(),
            cubin: FileRecord::of(&compiled.cubin),
            source: FileRecord::of(request.source.as_bytes()),
            resources: compiled.resources.clone(),
            log: compiled.log.clone(),
            compile_us,
        };
        let directory = key.directory();
        let path = self.entries().join(&directory);
        let result = (|| -> Result<Kept, String> {
            let describe = |what: &str| {
                let what = what.to_owned();
                move |error: std::io::Error| format!("{what}: {error}")
            };
            let site = tempfile::Builder::new()
                .prefix(&format!("{directory}."))
                .tempdir_in(self.building())
                .map_err(describe("cannot create a directory"))?;
            // Held until the end, so that `sweep` sees that a process is at work. The lock belongs to the directory,
            // not to its name.
            let handle = File::open(site.path()).map_err(describe("cannot open a new directory"))?;
            handle.try_lock().map_err(|error| format!("cannot lock a new directory: {error}"))?;
            write_file(&site.path().join("kernel.cubin"), &compiled.cubin)
                .map_err(describe("cannot write kernel.cubin"))?;
            write_file(&site.path().join("kernel.cu"), request.source.as_bytes())
                .map_err(describe("cannot write kernel.cu"))?;
            write_file(&site.path().join("meta.json"), &meta_bytes(&meta))
                .map_err(describe("cannot write meta.json"))?;
            handle.sync_all().map_err(describe("cannot flush a new directory"))?;
            match std::fs::rename(site.path(), &path) {
                Ok(()) => {
                    // The directory has moved, so there is nothing to delete under the temporary name.
                    let _ = site.keep();
                    // Without this flush, a power failure may lose the entry, but not damage it. So a failure is
                    // ignored.
                    let _ = File::open(self.entries()).and_then(|entries| entries.sync_all());
                    Ok(Kept::Stored)
                }
                Err(error) => match self.get(key) {
                    Lookup::Hit(_) => Ok(Kept::LostRace),
                    Lookup::Damaged(why) => Err(format!("a damaged entry of the same name cannot be removed: {why}")),
                    Lookup::Absent => Err(format!("cannot rename the new entry: {error}")),
                },
            }
        })();
        result.unwrap_or_else(Kept::NotStored)
    }

    /// Removes an entry. Returns whether it is gone.
    ///
    /// Renames it first, so that no reader sees a partial entry.
    pub(crate) fn evict(&self, directory: &str) -> bool {
        let path = self.entries().join(directory);
        let Ok(site) = tempfile::Builder::new().prefix("evicted.").tempdir_in(self.building()) else {
            return false;
        };
        // Anything that cannot be deleted stays in `building` and is swept later.
        std::fs::rename(&path, site.path().join("entry")).is_ok()
    }

    /// Keeps a source that did not compile for its author. Returns the directory if it could be written.
    pub(crate) fn keep_failure(
        &self,
        key: &Key,
        request: &CompileRequest,
        failure: &CompileFailure,
    ) -> Option<PathBuf> {
        let directory = self.root.join("failed").join(key.directory());
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(directory.join("include"))?;
            write_limited(directory.join("kernel.cu"), &request.source)?;
            write_limited(directory.join("log.txt"), failure.log())?;
            write_limited(directory.join("options.txt"), request.canonical_options().join("\n") + "\n")?;
            for (name, text) in &request.headers {
                let relative = Path::new(name);
                // A header's name comes from a source; it must not escape the directory.
                if relative.components().all(|component| matches!(component, Component::Normal(_))) {
                    let path = directory.join("include").join(relative);
                    if let Some(parent) = path.parent() {
                        std::fs::create_dir_all(parent)?;
                    }
                    write_limited(path, text)?;
                }
            }
            Ok(())
        };
        write().is_ok().then_some(directory)
    }

    /// Checks an entry in full, including its source text. Returns its metadata if it is valid.
    pub(crate) fn check(&self, directory: &str) -> Result<KernelMeta, String> {
        let path = self.entries().join(directory);
        let meta = read_meta(&path)?;
        read_file(&path, "kernel.cubin", &meta.cubin)?;
        read_file(&path, "kernel.cu", &meta.source)?;
        let prefix = format!("{}.{}.", meta.name, meta.source_key.get(..32).unwrap_or("?"));
        if !directory.starts_with(&prefix) {
            return Err("meta.json belongs to another kernel".to_owned());
        }
        Ok(meta)
    }

    /// Returns the metadata only, for a listing.
    pub(crate) fn describe(&self, directory: &str) -> Result<KernelMeta, String> {
        read_meta(&self.entries().join(directory))
    }

    /// Removes directories in `building` that no process works on. Returns their number.
    pub(crate) fn sweep(&self, older_than: Duration) -> usize {
        let mut removed = 0;
        for entry in std::fs::read_dir(self.building()).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if !is_ours(&name.to_string_lossy()) && !name.to_string_lossy().starts_with("evicted.") {
                continue;
            }
            let age =
                entry.metadata().and_then(|metadata| metadata.modified()).ok().and_then(|time| time.elapsed().ok());
            let abandoned = age.is_some_and(|age| age >= older_than)
                && File::open(&path).is_ok_and(|handle| handle.try_lock().is_ok());
            if abandoned && remove(&path).is_ok() {
                removed += 1;
            }
        }
        removed
    }

    /// Runs [`Store::sweep`] with an age that is safe while other processes work.
    pub(crate) fn sweep_abandoned(&self) -> usize {
        self.sweep(ABANDONED_AFTER)
    }
}

/// Returns whether the store creates such names in its directories: all begin with the name of a kernel.
pub(super) fn is_ours(name: &str) -> bool {
    name.starts_with("uw_")
}

/// Removes a file, or a directory with its contents.
pub(crate) fn remove(path: &Path) -> std::io::Result<()> {
    if std::fs::symlink_metadata(path)?.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }
}

/// Returns the SHA-256 digest as 64 hexadecimal digits.
fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn meta_bytes(meta: &KernelMeta) -> Vec<u8> {
    // Serialising plain structs into memory cannot fail.
    let body = serde_json::to_vec(meta).unwrap_or_default();
    let file = MetaFile { entry: meta.clone(), sha256: sha256(&body) };
    let mut bytes = serde_json::to_vec_pretty(&file).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

fn read_meta(directory: &Path) -> Result<KernelMeta, String> {
    let bytes =
        read_bounded(&directory.join("meta.json"), META_LIMIT_BYTES).map_err(|why| format!("meta.json: {why}"))?;
    let file: MetaFile = serde_json::from_slice(&bytes).map_err(|error| format!("meta.json: {error}"))?;
    let body = serde_json::to_vec(&file.entry).map_err(|error| format!("meta.json: {error}"))?;
    if sha256(&body) != file.sha256 {
        return Err("meta.json: its digest does not match its content".to_owned());
    }
    if file.entry.schema != SCHEMA {
        return Err(format!("meta.json: schema {}, expected {SCHEMA}", file.entry.schema));
    }
    Ok(file.entry)
}

fn read_file(directory: &Path, name: &str, record: &FileRecord) -> Result<Vec<u8>, String> {
    let bytes = read_bounded(&directory.join(name), CUBIN_LIMIT_BYTES).map_err(|why| format!("{name}: {why}"))?;
    let found = FileRecord::of(&bytes);
    if found.bytes != record.bytes {
        return Err(format!("{name}: {} bytes, expected {}", found.bytes, record.bytes));
    }
    if found.sha256 != record.sha256 {
        return Err(format!("{name}: SHA-256 {}, expected {}", found.sha256, record.sha256));
    }
    Ok(bytes)
}

fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, String> {
    let describe = |error: std::io::Error| error.to_string();
    // A FIFO would block, a device would never end, and a link leads to data that the store did not write.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(describe)?;
    let metadata = file.metadata().map_err(describe)?;
    if !metadata.is_file() {
        return Err("not a file".to_owned());
    }
    if metadata.len() > limit {
        return Err(format!("{} bytes, limit {limit}", metadata.len()));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
    file.take(limit).read_to_end(&mut bytes).map_err(describe)?;
    Ok(bytes)
}

/// Fails if the process must not write a file of this size. The write would raise SIGXFSZ, which terminates a program
/// that does not handle it.
fn check_limit(bytes: usize) -> std::io::Result<()> {
    match rustix::process::getrlimit(rustix::process::Resource::Fsize).current {
        Some(limit) if bytes as u64 > limit => Err(rustix::io::Errno::FBIG.into()),
        _ => Ok(()),
    }
}

/// Writes a file for human readers, replacing an existing one.
fn write_limited(path: impl AsRef<Path>, text: impl AsRef<[u8]>) -> std::io::Result<()> {
    check_limit(text.as_ref().len())?;
    std::fs::write(path, text)
}

fn write_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    check_limit(bytes.len())?;
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Records the time of use as the modification time of `meta.json`. Access times are disabled on most machines.
fn record_use(meta: &Path) {
    let update = || -> std::io::Result<()> {
        let now = SystemTime::now();
        let recorded = std::fs::metadata(meta)?.modified()?;
        if now.duration_since(recorded).is_ok_and(|age| age >= USE_RECORD_INTERVAL) {
            File::options().append(true).open(meta)?.set_modified(now)?;
        }
        Ok(())
    };
    // A read-only store cannot record uses, and works without them.
    let _ = update();
}
