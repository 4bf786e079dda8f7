//! Kernels attached to a bundle: the file `unweight.kernels` (`docs/format.md` B.10).
//!
//! ```text
//! "unweight.kernels", bytes of the index: u64, digest of the index: 32 digits | index: JSON | binaries without gaps
//! ```
//! No weight depends on this file. The manifest does not list it, so a signature stays valid and readers may ignore it.
//! This module treats the keys of kernels as text; the runtime defines them.

use std::{
    cmp::Ordering,
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    BundleError,
    files::{self, Input},
    holder::Holder,
    manifest::{CREATOR, Manifest, Version},
    manifest_file::read_manifest,
    names::{ATTACHED_NAME, PARTIAL_NAME},
};
use crate::Digest;

/// The version of the file that this crate writes, and the newest major version that it reads.
pub const ATTACHED_VERSION: Version = Version { major: 1, minor: 0 };
/// Maximum size of a file, in bytes.
pub const ATTACHED_BYTES_MAX: u64 = 1 << 30;
/// Maximum size of an index, in bytes: about 40,000 kernels.
pub const INDEX_BYTES_MAX: u64 = 16 << 20;
/// Maximum size of a kernel, in bytes.
pub const KERNEL_BYTES_MAX: u64 = 64 << 20;

/// Maximum size of a plan, in bytes: thousands of settings.
pub const PLAN_BYTES_MAX: usize = 1 << 20;

const MAGIC: &[u8; 16] = b"unweight.kernels";
/// Bytes of the magic number, and of the length and digest of the index.
const HEAD_BYTES: usize = 56;

/// An entry of the index of attached kernels: the kernel's keys, and the size and digest of its binary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedKernel {
    /// Symbol: 1 to 160 characters of `A-Z`, `a-z`, `0-9`, `_`.
    pub name: String,
    /// Architecture, such as `sm_90a`.
    pub arch: String,
    /// Digest of the compiler's input, 64 hexadecimal digits.
    pub source: String,
    /// Compiler and version.
    pub compiler: AttachedBy,
    /// Size of the binary.
    pub bytes: u64,
    /// Digest of the binary.
    pub digest: Digest,
}

/// The compiler of an attached kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedBy {
    /// Compiler name.
    pub name: String,
    /// Version of the compiler.
    pub version: String,
    /// Build of the version; may be empty.
    pub build: String,
}

impl AttachedKernel {
    /// The entry of a binary, with its size and digest.
    pub fn new(name: String, arch: String, source: String, compiler: AttachedBy, binary: &[u8]) -> Self {
        Self { name, arch, source, compiler, bytes: binary.len() as u64, digest: Digest::of(binary) }
    }

    fn order(&self, name: &str, source: &str) -> Ordering {
        (self.name.as_str(), self.source.as_str()).cmp(&(name, source))
    }

    /// Returns what is wrong with the entry, if anything.
    fn fault(&self) -> Option<&'static str> {
        let is_word = |text: &str, max_len: usize| {
            (1..=max_len).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        };
        let is_printable = |text: &str| text.len() <= 64 && text.bytes().all(|byte| byte.is_ascii_graphic());
        let AttachedBy { name, version, build } = &self.compiler;
        if !is_word(&self.name, 160) {
            Some("its name is not 1 to 160 characters of A-Z, a-z, 0-9 and _")
        } else if !is_word(&self.arch, 16) {
            Some("its arch is not 1 to 16 characters of A-Z, a-z, 0-9 and _")
        } else if self.source.len() != 64 || !self.source.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        {
            Some("its source is not 64 hexadecimal digits")
        } else if name.is_empty()
            || version.is_empty()
            || ![name, version, build].into_iter().all(|text| is_printable(text))
        {
            Some("its compiler has a name, version or build that is not up to 64 printable characters")
        } else if !(1..=KERNEL_BYTES_MAX).contains(&self.bytes) {
            Some("it has no bytes, or more than 64 MiB")
        } else {
            None
        }
    }
}

#[derive(Serialize)]
struct IndexOut<'a> {
    version: Version,
    creator: &'a str,
    kernels: Vec<&'a AttachedKernel>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a str>,
}

#[derive(Deserialize)]
struct Index {
    kernels: Vec<AttachedKernel>,
    #[serde(default)]
    plan: Option<String>,
}

/// The kernels of a bundle, open for reading.
///
/// Opening checks sizes, the digest of the index and every entry. A kernel is read, and compared with its digest, on
/// request. The digests detect accidents, not forgery: a kernel is code, and runs with the privileges of the process
/// that loads it.
#[derive(Debug)]
pub struct Attached {
    input: Input,
    kernels: Vec<AttachedKernel>,
    plan: Option<String>,
    /// The offset of the first binary in the file.
    start: u64,
}

impl Attached {
    /// Opens a file of attached kernels; `None` if it does not exist.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, exceeds a limit, or has a newer major version.
    pub fn open(path: &Path) -> Result<Option<Self>, BundleError> {
        let Some((input, Index { kernels, plan }, start)) = read_index(path)? else { return Ok(None) };
        // At most 64 MiB each, and few enough for an index: the sum is far below 2^64.
        let end = start + kernels.iter().map(|kernel| kernel.bytes).sum::<u64>();
        if end != input.bytes() {
            return Err(fault(format!("its kernels end at byte {end}, but the file ends at {}", input.bytes())));
        }
        Ok(Some(Self { input, kernels, plan, start }))
    }

    /// The kernels, sorted by name and source.
    pub fn kernels(&self) -> &[AttachedKernel] {
        &self.kernels
    }

    /// The text of the attached tuned plan. It is data, not code; its reader checks it.
    pub fn plan(&self) -> Option<&str> {
        self.plan.as_deref()
    }

    /// The size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.input.bytes()
    }

    /// The kernel with this name that was compiled from this source.
    pub fn find(&self, name: &str, source: &str) -> Option<&AttachedKernel> {
        let at = self.kernels.binary_search_by(|kernel| kernel.order(name, source)).ok()?;
        self.kernels.get(at)
    }

    /// Reads the binary of one of [`Attached::kernels`] and compares it with its digest.
    ///
    /// # Errors
    /// The binary cannot be read or is damaged, or the kernel is not one of these.
    pub fn read(&self, kernel: &AttachedKernel) -> Result<Vec<u8>, BundleError> {
        let (name, source) = (&kernel.name, &kernel.source);
        let Ok(at) = self.kernels.binary_search_by(|kernel| kernel.order(name, source)) else {
            return Err(fault(format!("has no kernel {name} of source {source}")));
        };
        let offset = self.start + self.kernels[..at].iter().map(|kernel| kernel.bytes).sum::<u64>();
        let entry = &self.kernels[at];
        let bytes = self.input.read(offset, entry.bytes)?;
        let digest = Digest::of(&bytes);
        if digest != entry.digest {
            return Err(fault(format!("kernel {name} at byte {offset}: expected {}, got {digest}", entry.digest)));
        }
        Ok(bytes)
    }

    /// Returns the contents of a file with these kernels. Of equal names and sources the first is kept.
    ///
    /// # Errors
    /// An entry is invalid or does not match its binary, or a limit is exceeded.
    pub fn encode(kernels: &[(AttachedKernel, &[u8])]) -> Result<Vec<u8>, BundleError> {
        Self::encode_with(kernels, None)
    }

    /// Like [`Attached::encode`], with a plan.
    ///
    /// # Errors
    /// The errors of [`Attached::encode`], or the plan exceeds [`PLAN_BYTES_MAX`].
    pub(crate) fn encode_with(kernels: &[(AttachedKernel, &[u8])], plan: Option<&str>) -> Result<Vec<u8>, BundleError> {
        check_plan(plan)?;
        let mut sorted: Vec<&(AttachedKernel, &[u8])> = kernels.iter().collect();
        sorted.sort_by(|(a, _), (b, _)| a.order(&b.name, &b.source));
        sorted.dedup_by(|(b, _), (a, _)| a.order(&b.name, &b.source) == Ordering::Equal);
        for (kernel, binary) in &sorted {
            let is_consistent = kernel.bytes == binary.len() as u64 && kernel.digest == Digest::of(binary);
            let reason = kernel.fault().or((!is_consistent).then_some("its size or digest does not match its bytes"));
            if let Some(reason) = reason {
                return Err(fault(format!("kernel '{}': {reason}", kernel.name.escape_default())));
            }
        }
        let index = IndexOut {
            version: ATTACHED_VERSION,
            creator: CREATOR,
            kernels: sorted.iter().map(|(kernel, _)| kernel).collect(),
            plan,
        };
        let index = serde_json::to_vec(&index).map_err(|error| fault(error.to_string()))?;
        let bytes = HEAD_BYTES + index.len() + sorted.iter().map(|(_, binary)| binary.len()).sum::<usize>();
        if index.len() as u64 > INDEX_BYTES_MAX || bytes as u64 > ATTACHED_BYTES_MAX {
            return Err(fault(format!("{} kernels of {bytes} bytes exceed the limits of the format", sorted.len())));
        }
        let mut out = Vec::with_capacity(bytes);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(index.len() as u64).to_le_bytes());
        out.extend_from_slice(Digest::of(&index).to_string().as_bytes());
        out.extend_from_slice(&index);
        sorted.iter().for_each(|(_, binary)| out.extend_from_slice(binary));
        Ok(out)
    }
}

/// Opens the file, and reads its index and the offset of the first kernel. `None` if there is no file.
fn read_index(path: &Path) -> Result<Option<(Input, Index, u64)>, BundleError> {
    match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound && path.symlink_metadata().is_err() => {
            return Ok(None);
        }
        Ok(metadata) if !metadata.is_file() => return Err(fault("not a regular file")),
        _ => {}
    }
    let input = Input::open(path)?;
    if input.bytes() > ATTACHED_BYTES_MAX {
        return Err(fault(format!("{} bytes, above the limit of {ATTACHED_BYTES_MAX}", input.bytes())));
    }
    if input.bytes() < HEAD_BYTES as u64 {
        return Err(fault(format!("truncated at byte {}", input.bytes())));
    }
    let mut head = [0; HEAD_BYTES];
    input.read_at(0, &mut head)?;
    let (magic, rest) = head.split_at(MAGIC.len());
    let (length, digits) = rest.split_at(8);
    if magic != MAGIC {
        return Err(fault("does not begin with the magic bytes of attached kernels"));
    }
    let mut length_bytes = [0; 8];
    length_bytes.copy_from_slice(length);
    let length = u64::from_le_bytes(length_bytes);
    if length > INDEX_BYTES_MAX || length > input.bytes() - HEAD_BYTES as u64 {
        return Err(fault(format!("an index of {length} bytes exceeds the file or the limit of {INDEX_BYTES_MAX}")));
    }
    let text = input.read(HEAD_BYTES as u64, length)?;
    if Digest::of(&text).to_string().as_bytes() != digits {
        return Err(fault(format!("its index at byte {HEAD_BYTES} does not match its digest")));
    }
    Ok(Some((input, index(&text)?, HEAD_BYTES as u64 + length)))
}

/// Parses and checks an index.
fn index(text: &[u8]) -> Result<Index, BundleError> {
    let index_error = |error: serde_json::Error| {
        fault(format!("its index at line {}, column {}: {error}", error.line(), error.column()))
    };
    // Parse the version first: a newer index may have fields of another type.
    #[derive(Deserialize)]
    struct Head {
        version: Version,
    }
    let Head { version } = serde_json::from_slice(text).map_err(index_error)?;
    if version.major > ATTACHED_VERSION.major {
        return Err(fault(format!("version {version} is newer than this program's {ATTACHED_VERSION}")));
    }
    let index: Index = serde_json::from_slice(text).map_err(index_error)?;
    check_plan(index.plan.as_deref())?;
    let kernels = &index.kernels;
    for kernel in kernels {
        if let Some(reason) = kernel.fault() {
            return Err(fault(format!("kernel '{}': {reason}", kernel.name.escape_default())));
        }
    }
    for pair in kernels.windows(2) {
        if pair[0].order(&pair[1].name, &pair[1].source) != Ordering::Less {
            return Err(fault(format!("kernel '{}' is listed twice, or out of order", pair[1].name)));
        }
    }
    Ok(index)
}

fn check_plan(plan: Option<&str>) -> Result<(), BundleError> {
    match plan.map_or(0, str::len) {
        bytes if bytes > PLAN_BYTES_MAX => {
            Err(fault(format!("a plan of {bytes} bytes, above the limit of {PLAN_BYTES_MAX}")))
        }
        _ => Ok(()),
    }
}

fn fault(reason: impl Into<String>) -> BundleError {
    BundleError::Attached { reason: reason.into() }
}

/// Whether the source contained a file or directory of this name, which then is not ours.
fn is_listed(manifest: &Manifest, name: &str) -> bool {
    let is_inside = |file: &str| file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    manifest.files.iter().flat_map(|file| file.stored()).any(|(file, _)| is_inside(&file))
}

/// The kernels attached to the bundle in `dir`, if any.
pub(crate) fn of_bundle(dir: &Path, manifest: &Manifest) -> Result<Option<Attached>, BundleError> {
    if is_listed(manifest, ATTACHED_NAME) { Ok(None) } else { Attached::open(&dir.join(ATTACHED_NAME)) }
}

/// Attaches kernels to a bundle, all or none, and returns the size of the file. No other byte of the bundle changes. An
/// attached plan is kept, even in a damaged file, as long as its index is valid.
///
/// # Errors
/// `dir` is not a bundle, it already has kernels and `force` is not set, the file cannot be written, or another process
/// holds the lock for half a minute.
pub fn attach(dir: &Path, kernels: &[(AttachedKernel, &[u8])], force: bool) -> Result<u64, BundleError> {
    // Check the kernels before taking the lock.
    Attached::encode(kernels)?;
    let path = dir.join(ATTACHED_NAME);
    let lock = lock(dir)?;
    let plan = match Attached::open(&path) {
        Ok(None) => None,
        Ok(Some(old)) if force || old.kernels.is_empty() => old.plan,
        Err(_) if force => read_index(&path).ok().flatten().and_then(|(_, index, _)| index.plan),
        _ => return Err(BundleError::OutputExists { path }),
    };
    write_attached(dir, &Attached::encode_with(kernels, plan.as_deref())?, &lock)
}

/// Attaches a tuned plan to a bundle and returns the size of the file. `change` receives the attached plan and returns
/// the new one. A lock is held meanwhile, so that processes that extend a plan concurrently lose nothing. Kernels are
/// kept.
///
/// # Errors
/// The error of `change`; `dir` is not a bundle, its attached file is damaged, the file cannot be written, or another
/// process holds the lock for half a minute.
pub fn attach_plan<E: From<BundleError>>(
    dir: &Path,
    change: impl FnOnce(Option<&str>) -> Result<String, E>,
) -> Result<u64, E> {
    let lock = lock(dir)?;
    let (binaries, old) = all_attached(dir)?;
    let kernels: Vec<_> = binaries.iter().map(|(kernel, binary)| (kernel.clone(), binary.as_slice())).collect();
    let plan = change(old.as_deref())?;
    Ok(write_attached(dir, &Attached::encode_with(&kernels, Some(&plan))?, &lock)?)
}

/// Checks that [`attach`] could write now, before kernels are compiled for minutes.
///
/// # Errors
/// `dir` is not a bundle, it is not writable, or another process holds the lock for half a minute.
pub fn may_attach(dir: &Path) -> Result<(), BundleError> {
    check_writable(dir, &lock(dir)?)
}

/// Checks that [`attach_plan`] could write now, before minutes of measurements. Returns the attached plan.
///
/// # Errors
/// The errors of [`attach_plan`].
pub fn may_attach_plan(dir: &Path) -> Result<Option<String>, BundleError> {
    let lock = lock(dir)?;
    let (_, plan) = all_attached(dir)?;
    check_writable(dir, &lock)?;
    Ok(plan)
}

/// Checks that [`write_attached`] could create its file.
fn check_writable(dir: &Path, _lock: &File) -> Result<(), BundleError> {
    let path = dir.join(ATTACHED_NAME);
    if path.is_dir() {
        return Err(BundleError::Io { action: "write the file", path, source: io::ErrorKind::IsADirectory.into() });
    }
    let partial = dir.join(PARTIAL_NAME);
    remove(&partial)?;
    File::create_new(&partial).map_err(BundleError::io("write the file", &partial))?;
    remove(&partial).map(|_| ())
}

/// How long to wait for another process that attaches or detaches, so that compiled kernels and measurements are not
/// lost.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// The attached kernels, each compared with its digest, and the plan.
#[expect(clippy::type_complexity, reason = "kernels with their bytes, and the plan")]
fn all_attached(dir: &Path) -> Result<(Vec<(AttachedKernel, Vec<u8>)>, Option<String>), BundleError> {
    let Some(old) = Attached::open(&dir.join(ATTACHED_NAME))? else { return Ok((Vec::new(), None)) };
    let read = |kernel: &AttachedKernel| Ok((kernel.clone(), old.read(kernel)?));
    Ok((old.kernels.iter().map(read).collect::<Result<_, BundleError>>()?, old.plan))
}

/// Replaces the file atomically. Returns its size.
fn write_attached(dir: &Path, bytes: &[u8], _lock: &File) -> Result<u64, BundleError> {
    let path = dir.join(ATTACHED_NAME);
    let partial = dir.join(PARTIAL_NAME);
    // A file from a killed run: a running process would hold the lock.
    remove(&partial)?;
    let written = files::write_durably(&partial, bytes).and_then(|()| fs::rename(&partial, &path));
    if let Err(source) = written {
        let _ = fs::remove_file(&partial);
        return Err(match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let stat = rustix::fs::statvfs(dir).ok();
                let free_bytes = stat.map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
                BundleError::DiskFull { path, needed_bytes: bytes.len() as u64, free_bytes, source }
            }
            _ => BundleError::Io { action: "write the file", path, source },
        });
    }
    files::sync_dir(dir)?;
    Ok(bytes.len() as u64)
}

/// The file of attached kernels that [`detach`] removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Detached {
    /// Bytes of the file.
    pub bytes: u64,
    /// Whether the file contained a plan.
    pub had_plan: bool,
}

/// Removes the kernels of a bundle, valid or not, its plan, and the remains of an interrupted [`attach`]. `None` if
/// there was nothing.
///
/// # Errors
/// `dir` is not a bundle, the file cannot be removed, or another process holds the lock for half a minute.
pub fn detach(dir: &Path) -> Result<Option<Detached>, BundleError> {
    let path = dir.join(ATTACHED_NAME);
    let _lock = lock(dir)?;
    remove(&dir.join(PARTIAL_NAME))?;
    let had_plan = read_index(&path).is_ok_and(|read| read.is_some_and(|(_, index, _)| index.plan.is_some()));
    let bytes = remove(&path)?;
    files::sync_dir(dir)?;
    Ok(bytes.map(|bytes| Detached { bytes, had_plan }))
}

/// Locks the bundle against attaching by other processes, until the result is dropped. The system releases the lock
/// when the process ends.
fn lock(dir: &Path) -> Result<File, BundleError> {
    lock_within(dir, LOCK_TIMEOUT)
}

fn lock_within(dir: &Path, timeout: Duration) -> Result<File, BundleError> {
    let deadline = Instant::now() + timeout;
    let identity = |metadata: io::Result<fs::Metadata>| metadata.ok().map(|metadata| (metadata.dev(), metadata.ino()));
    loop {
        let manifest = read_manifest(dir)?;
        // Attaching replaces these files, so they must not be files of the model.
        if let Some(reserved_name) = [ATTACHED_NAME, PARTIAL_NAME].into_iter().find(|name| is_listed(&manifest, name)) {
            return Err(BundleError::NameTaken { path: dir.join(reserved_name) });
        }
        let lock = File::open(dir).map_err(BundleError::io("open the directory", dir))?;
        // Not every file system supports locks; creating an existing file fails in any case.
        while let Err(TryLockError::WouldBlock) = lock.try_lock() {
            if Instant::now() >= deadline {
                return Err(BundleError::Locked { path: dir.into(), by: Holder::of(&lock) });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Otherwise another bundle has replaced this one.
        if identity(lock.metadata()) == identity(dir.metadata()) {
            return Ok(lock);
        }
    }
}

/// Removes a file or a link; returns its size if it existed.
fn remove(path: &Path) -> Result<Option<u64>, BundleError> {
    let bytes = match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(BundleError::io("read the metadata of the file", path))?.len(),
    };
    fs::remove_file(path).map_err(BundleError::io("remove the file", path))?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        process::{Command, Stdio},
    };

    use super::*;
    use crate::{
        bundle::{CompressOptions, Silent, compress},
        testing::demo_model::{self, DemoOptions},
    };

    /// Returns a function that creates the bundle, replacing an existing one.
    fn make(home: &Path) -> impl Fn(&Path) {
        let model = home.join("model");
        let options = DemoOptions { layers: 1, hidden: 64, intermediate: 64, vocab: 64, ..DemoOptions::default() };
        demo_model::write(&model, &options).unwrap();
        move |dir| _ = compress(&model, dir, &CompressOptions::default().force(true), &Silent).unwrap()
    }

    /// A lock that is not released names its holder; a killed process releases its lock.
    #[test]
    fn lock_waits_and_names_its_holder() {
        const HOLD: &str = "UNWEIGHT_TEST_HOLD";
        if let Some(dir) = env::var_os(HOLD) {
            let _lock = lock_within(dir.as_ref(), Duration::ZERO).unwrap();
            eprintln!("held");
            std::thread::sleep(Duration::from_secs(600));
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("bundle");
        make(home.path())(&dir);
        let name = "bundle::attached::tests::lock_waits_and_names_its_holder";
        let mut other = Command::new(env::current_exe().unwrap());
        let other = other.args(["--exact", name, "--nocapture"]).env(HOLD, &dir);
        let mut other = other.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        io::Read::read_exact(other.stderr.as_mut().unwrap(), &mut [0; 5]).unwrap();
        let patience = Duration::from_millis(300);
        let begun = Instant::now();
        let error = lock_within(&dir, patience).unwrap_err();
        assert!(begun.elapsed() >= patience && matches!(error, BundleError::Locked { .. }), "{error}");
        // Where the system does not identify the holder, the error says "another process".
        let (text, process) = (error.to_string(), format!("process {} (", other.id()));
        assert!(text.contains("another process is") || text.contains(&process), "{text}");
        other.kill().unwrap();
        other.wait().unwrap();
        lock_within(&dir, Duration::ZERO).unwrap();
    }

    /// A process that waited for a bundle's lock locks the bundle that has replaced it.
    #[test]
    fn a_replaced_bundle_is_locked_again() {
        let home = tempfile::tempdir().unwrap();
        let (make, dir) = (make(home.path()), home.path().join("bundle"));
        make(&dir);
        let held = lock_within(&dir, Duration::ZERO).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| lock_within(&dir, LOCK_TIMEOUT).unwrap());
            std::thread::sleep(Duration::from_millis(100));
            make(&dir);
            drop(held);
            let lock = waits.join().unwrap();
            assert_eq!(lock.metadata().unwrap().ino(), dir.metadata().unwrap().ino());
        });
    }
}
