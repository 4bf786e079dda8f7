//! Files: opened once, read by offset, copied with their digests, and listed by relative name.

use std::{
    fs::{self, File},
    io::{self, Seek, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
};

use rustix::process::{Resource, getrlimit};
use sha2::{Digest as _, Sha256};

use super::{
    BundleError, Selection,
    manifest::{CopiedFile, FileEntry},
    names::{CARD_NAME, CARD_SOURCE_NAME, DOWNLOAD_RECORDS, is_weights},
    pipeline::join,
};
use crate::{
    Digest, bits,
    bundle::manifest,
    digest::{Digester, LEAF_BYTES},
    parallel,
};

/// Bytes read or copied at once.
pub(crate) const CHUNK: usize = 4 << 20;

/// Identifies one state of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) bytes: u64,
    /// Device and inode, which change if the file is replaced.
    identity: (u64, u64),
    /// Seconds and nanoseconds. A writer can set the modification time back, but not the change time.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(metadata: &fs::Metadata) -> Self {
        Self {
            bytes: metadata.len(),
            identity: (metadata.dev(), metadata.ino()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Returns how a later stamp differs, if it does.
    fn difference(&self, later: &Self) -> Option<&'static str> {
        if self.identity != later.identity {
            return Some("it was replaced");
        }
        if self.bytes != later.bytes {
            return Some("its size changed");
        }
        (self != later).then_some("it was written to")
    }
}

/// A file open for reading.
///
/// Bytes are copied, never mapped: for a truncated file or a failing disk, that results in an error with an offset
/// instead of a signal.
#[derive(Debug)]
pub struct Input {
    file: File,
    path: PathBuf,
    stamp: Stamp,
}

impl Input {
    /// Opens a regular file. Anything else is refused without blocking.
    ///
    /// # Errors
    /// The file does not exist, cannot be opened, or is not regular.
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        // Opening a FIFO without a writer would block.
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(BundleError::io("open the file", path))?;
        let metadata = file.metadata().map_err(BundleError::io("read the metadata of the file", path))?;
        if !metadata.is_file() {
            return Err(BundleError::Unstorable { path: path.into(), reason: "not a regular file; move it away" });
        }
        Ok(Self { file, path: path.into(), stamp: Stamp::of(&metadata) })
    }

    /// Opens a file that must not have changed since the stamp.
    pub(crate) fn open_same(path: &Path, stamp: &Stamp) -> Result<Self, BundleError> {
        let input = Self::open(path)?;
        match stamp.difference(&input.stamp) {
            None => Ok(input),
            Some(change) => Err(BundleError::SourceChanged { path: path.into(), change }),
        }
    }

    /// The state of the file when it was opened.
    pub(crate) fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// The size of the file in bytes when it was opened.
    pub fn bytes(&self) -> u64 {
        self.stamp.bytes
    }

    /// The open file, positioned at its start.
    pub fn reader(&self) -> &File {
        &self.file
    }

    /// Fills `out` with the bytes from `offset` on.
    ///
    /// # Errors
    /// The file is too short or cannot be read.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BundleError> {
        // Piece by piece, so that the error contains the offset.
        for (i, piece) in out.chunks_mut(CHUNK).enumerate() {
            let offset = offset + (i * CHUNK) as u64;
            self.file.read_exact_at(piece, offset).map_err(|source| BundleError::Read {
                path: self.path.clone(),
                offset,
                source,
            })?;
        }
        Ok(())
    }

    /// Reads `bytes` bytes from `offset`.
    ///
    /// # Errors
    /// The errors of [`Input::read_at`], or the memory cannot be allocated.
    pub fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, BundleError> {
        let mut out = buffer(bytes, &self.path)?;
        self.read_at(offset, &mut out)?;
        Ok(out)
    }

    /// Like [`Input::read_at`], on all threads of the current rayon pool, if there is one: a single thread copies out
    /// of the page cache more slowly than a device accepts the data.
    pub(crate) fn read_at_together(&self, offset: u64, out: &mut [u8]) -> Result<(), BundleError> {
        if out.len() <= CHUNK || rayon::current_thread_index().is_none() {
            return self.read_at(offset, out);
        }
        parallel::try_for_each_chunk(out, CHUNK, |i, piece| self.read_at(offset + (i * CHUNK) as u64, piece))
    }

    /// Like [`Input::read_at_together`], and returns the digest. Each leaf is digested by the thread that has read it,
    /// while it is in that core's caches.
    pub(crate) fn read_digested(&self, offset: u64, out: &mut [u8]) -> Result<Digest, BundleError> {
        if out.len() <= LEAF_BYTES || rayon::current_thread_index().is_none() {
            self.read_at(offset, out)?;
            return Ok(Digest::of_leaves(&out.chunks(LEAF_BYTES).map(Digest::leaf).collect::<Vec<_>>()));
        }
        let leaves = parallel::try_map(out.chunks_mut(LEAF_BYTES).enumerate(), |(i, leaf)| {
            self.read_at(offset + (i * LEAF_BYTES) as u64, leaf)?;
            Ok(Digest::leaf(leaf))
        })?;
        Ok(Digest::of_leaves(&leaves))
    }

    /// Like [`Input::read_at`], on several threads of its own.
    pub(crate) fn read_at_by_threads(&self, offset: u64, out: &mut [u8]) -> Result<(), BundleError> {
        /// Enough to copy out of the page cache faster than other threads process the data.
        const THREADS: usize = 4;
        let threads = out.len().div_ceil(CHUNK).min(THREADS);
        let pieces = Mutex::new(out.chunks_mut(CHUNK).enumerate());
        let read = || -> Result<(), (u64, BundleError)> {
            loop {
                let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((i, piece)) = next else { return Ok(()) };
                let offset = offset + (i * CHUNK) as u64;
                self.read_at(offset, piece).map_err(|error| (offset, error))?;
            }
        };
        let failed = thread::scope(|scope| {
            // Without further threads, this one reads everything.
            let others = (1..threads).map_while(|_| thread::Builder::new().spawn_scoped(scope, read).ok());
            let others: Vec<_> = others.collect();
            let own = read().err();
            own.into_iter().chain(others.into_iter().filter_map(|thread| join(thread).err())).collect::<Vec<_>>()
        });
        // The first error by offset, not by time.
        failed.into_iter().min_by_key(|(offset, _)| *offset).map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Passes `bytes` bytes from `offset` on to `each`, in pieces and in order. Returns their digest.
    ///
    /// # Errors
    /// The errors of [`Input::read_at`] or of `each`.
    pub fn stream(
        &self,
        offset: u64,
        bytes: u64,
        mut each: impl FnMut(&[u8]) -> Result<(), BundleError>,
    ) -> Result<Digest, BundleError> {
        let (mut digester, mut done) = (Digester::default(), 0);
        let mut piece = vec![0; CHUNK.min(usize::try_from(bytes).unwrap_or(CHUNK))];
        while done < bytes {
            let next = &mut piece[..(bytes - done).min(CHUNK as u64) as usize];
            self.read_at(offset + done, next)?;
            digester.update(next);
            each(next)?;
            done += next.len() as u64;
        }
        Ok(digester.finish())
    }

    /// Sets the mode of a file made from this one, as far as the umask allows, and its modification time. Errors are
    /// ignored, because no contents depend on them.
    pub(crate) fn pass_attributes(&self, to: &File) {
        let Ok(metadata) = self.file.metadata() else { return };
        let _ = to.set_permissions(fs::Permissions::from_mode(metadata.mode() & 0o777 & !mask()));
        if let Ok(modified) = metadata.modified() {
            let _ = to.set_times(fs::FileTimes::new().set_modified(modified));
        }
    }

    /// The error for a file whose bytes differ from those read before.
    pub fn changed(&self) -> BundleError {
        BundleError::SourceChanged { path: self.path.clone(), change: "it was written to" }
    }

    /// Checks that the file was not changed or replaced since it was opened.
    ///
    /// # Errors
    /// The file was changed or replaced.
    pub fn check_unchanged(&self) -> Result<(), BundleError> {
        let named = fs::metadata(&self.path).map_err(BundleError::io("read the metadata of the file", &self.path))?;
        let opened = self.file.metadata().map_err(BundleError::io("read the metadata of the file", &self.path))?;
        for now in [opened, named] {
            if let Some(change) = self.stamp.difference(&Stamp::of(&now)) {
                return Err(BundleError::SourceChanged { path: self.path.clone(), change });
            }
        }
        Ok(())
    }
}

/// Returns `bytes` zero bytes. The error contains the file that they are needed for.
pub(crate) fn buffer(bytes: u64, path: &Path) -> Result<Vec<u8>, BundleError> {
    let error = || BundleError::Memory { path: path.into(), needed_bytes: bytes, memory_bytes: bits::memory_bytes() };
    if bytes > bits::memory_bytes() {
        return Err(error());
    }
    bits::try_zeroed(usize::try_from(bytes).map_err(|_| error())?).ok_or_else(error)
}

/// The umask. It is read from /proc, because the system call would have to set it, for all threads.
fn mask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|digits| u32::from_str_radix(digits.trim(), 8).ok()).unwrap_or(0o022)
}

/// Size and digests of a whole file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) bytes: u64,
    pub(crate) digest: Digest,
    pub(crate) sha256: Option<String>,
}

/// Reads a whole file; `each` receives every chunk in order.
pub(crate) fn read_through(
    path: &Path,
    sha256: bool,
    each: impl FnMut(&[u8]) -> Result<(), BundleError>,
) -> Result<Contents, BundleError> {
    let input = Input::open(path)?;
    let contents = read_input(&input, sha256, each)?;
    input.check_unchanged()?;
    Ok(contents)
}

/// Like [`read_through`], for an open file.
pub(crate) fn read_input(
    input: &Input,
    sha256: bool,
    mut each: impl FnMut(&[u8]) -> Result<(), BundleError>,
) -> Result<Contents, BundleError> {
    let mut sha = sha256.then(Sha256::new);
    let bytes = input.stamp().bytes;
    let digest = input.stream(0, bytes, |chunk| {
        if let Some(sha) = &mut sha {
            sha.update(chunk);
        }
        each(chunk)
    })?;
    Ok(Contents { bytes, digest, sha256: sha.map(hex) })
}

/// The SHA-256 of a file as 64 hexadecimal digits.
pub(crate) fn sha256(path: &Path) -> Result<String, BundleError> {
    Ok(read_through(path, true, |_| Ok(()))?.sha256.unwrap_or_default())
}

/// The result as 64 hexadecimal digits.
pub(crate) fn hex(sha: Sha256) -> String {
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a file of at most `limit` bytes.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>, BundleError> {
    let input = Input::open(path)?;
    if input.stamp().bytes > limit {
        return Err(BundleError::TooLarge { path: path.into(), limit, got: input.stamp().bytes });
    }
    input.read(0, input.stamp().bytes)
}

/// Writes a file and syncs it to disk.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = create(path)?;
    append(&mut file, bytes)?;
    file.sync_all()
}

/// Appends to a new file.
pub(crate) fn append(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    check_limit(file.stream_position()?, bytes)?;
    file.write_all(bytes)
}

/// Writes at an offset.
pub(crate) fn write_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    check_limit(at, bytes)?;
    file.write_all_at(bytes, at)
}

/// Fails if the process may not write a file of that length: the write would raise SIGXFSZ, whose default action ends
/// the process.
fn check_limit(at: u64, bytes: &[u8]) -> io::Result<()> {
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| at.saturating_add(bytes.len() as u64) > limit) {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(())
}

/// Creates a file; fails if the name exists, even as a link.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    File::options().write(true).create_new(true).open(path)
}

/// Opens a file of an interrupted run and truncates it to `bytes`, to continue it. A link is an error.
pub(crate) fn reopen(path: &Path, bytes: u64) -> io::Result<File> {
    // If the run was complete, the file already has the source's mode, which may forbid writing.
    if path.symlink_metadata()?.is_file() {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    }
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = File::options().read(true).write(true).custom_flags(flags).open(path)?;
    file.set_len(bytes)?;
    Ok(file)
}

/// Syncs a directory's entries to disk.
pub(crate) fn sync_dir(path: &Path) -> Result<(), BundleError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(BundleError::io("sync the directory", path))
}

/// Lists all files below `root` with relative names with `/`, sorted, without the records of a download. Symbolic links
/// are followed.
pub(crate) fn walk(root: &Path) -> Result<Vec<(String, PathBuf)>, BundleError> {
    walk_selected(root, &Selection::default())
}

/// Like [`walk`], for the selected files.
pub(crate) fn walk_selected(root: &Path, selection: &Selection) -> Result<Vec<(String, PathBuf)>, BundleError> {
    if !fs::metadata(root).map_err(BundleError::io("read the metadata of the directory", root))?.is_dir() {
        return Err(BundleError::NotADirectory { path: root.into() });
    }
    let mut found = Vec::new();
    match &selection.only {
        None => walk_into(root, "", selection, &mut Vec::new(), &mut found)?,
        Some(names) => {
            for name in names {
                let path = root.join(name);
                let unstorable = |reason| BundleError::Unstorable { path: path.clone(), reason };
                manifest::check_name(name).map_err(unstorable)?;
                if !fs::metadata(&path).map_err(BundleError::io("read the metadata of the file", &path))?.is_file() {
                    return Err(unstorable("not a regular file; pass one directory, or files"));
                }
                if !selection.skips(name) {
                    found.push((name.clone(), path));
                }
            }
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

fn walk_into(
    dir: &Path,
    prefix: &str,
    selection: &Selection,
    ancestors: &mut Vec<PathBuf>,
    found: &mut Vec<(String, PathBuf)>,
) -> Result<(), BundleError> {
    let real = dir.canonicalize().map_err(BundleError::io("follow the path", dir))?;
    if ancestors.contains(&real) {
        return Err(BundleError::Unstorable { path: dir.into(), reason: "a loop of symbolic links; remove it" });
    }
    ancestors.push(real);
    for entry in fs::read_dir(dir).map_err(BundleError::io("list the directory", dir))? {
        let path = entry.map_err(BundleError::io("list the directory", dir))?.path();
        let unstorable = |reason| BundleError::Unstorable { path: path.clone(), reason };
        let name =
            path.file_name().and_then(|name| name.to_str()).ok_or_else(|| unstorable("its name is not UTF-8"))?;
        let name = format!("{prefix}{name}");
        if selection.skips(&name) || name == DOWNLOAD_RECORDS {
            continue;
        }
        manifest::check_name(&name).map_err(unstorable)?;
        let metadata = fs::metadata(&path).map_err(BundleError::io("read the metadata of the file", &path))?;
        if metadata.is_dir() {
            if is_weights(&name) {
                return Err(unstorable("a directory with the name of a weights file; rename it"));
            }
            walk_into(&path, &format!("{name}/"), selection, ancestors, found)?;
        } else if metadata.is_file() {
            found.push((name, path));
        } else {
            return Err(unstorable("neither a file nor a directory; move it away"));
        }
    }
    ancestors.pop();
    Ok(())
}

/// Returns the name of the bundle's file with the source's bytes of an entry; empty for weights. The source's model
/// card may have made room for the bundle's (`docs/format.md` B.1).
pub(crate) fn original(dir: &Path, entry: &FileEntry) -> String {
    let is_replaced = |file: &CopiedFile| {
        file.name == CARD_NAME && dir.join(CARD_SOURCE_NAME).metadata().is_ok_and(|found| found.len() == file.size)
    };
    match entry {
        FileEntry::Copied(file) if is_replaced(file) => CARD_SOURCE_NAME.to_owned(),
        other => other.original().unwrap_or_default(),
    }
}

/// Checks that the stored files of an entry exist with the sizes in the manifest.
pub(crate) fn check_sizes(dir: &Path, entry: &FileEntry) -> Result<(), BundleError> {
    match entry {
        FileEntry::Copied(file) => check_size(dir, original(dir, entry), file.size),
        _ => entry.stored().into_iter().try_for_each(|(file, expected)| check_size(dir, file, expected)),
    }
}

/// Checks that a file of the bundle exists with the size in the manifest.
pub(crate) fn check_size(dir: &Path, file: String, expected: u64) -> Result<(), BundleError> {
    match dir.join(&file).metadata() {
        Ok(metadata) if !metadata.is_file() || metadata.len() != expected => {
            Err(BundleError::FileSize { file, expected, got: metadata.len() })
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(BundleError::MissingFile { file }),
        Err(source) => Err(BundleError::Io { action: "read the metadata of the file", path: dir.join(file), source }),
    }
}
