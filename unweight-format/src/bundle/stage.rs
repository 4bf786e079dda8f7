//! The staging directory, in which an output is written until it is complete. The protocol is
//! `docs/adr/0007-staging-protocol.md`.
//!
//! ```text
//! <output>.partial/lock      locked while a process works here
//!                  work/     files being written; a later run resumes weights
//!                  tree/     finished files; becomes <output> in one rename
//!                  records/  descriptions of finished shards, for a later run
//! ```
//! Only this user may write to the directory, and it must not contain links: planted entries could make a run write or
//! delete elsewhere.

use std::{
    collections::{HashMap, HashSet},
    ffi::{OsStr, OsString},
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};

use super::{
    BundleError,
    files::{self, Input, Stamp},
    holder::Holder,
    manifest::{self, FileEntry},
    names::{ATTACHED_NAME, PARTIAL_NAME},
    part_file::{self, PartFile},
    progress::Progress,
};
use crate::{
    Digest,
    failpoint::{failpoint, fault},
};

/// The existing directories that may be replaced. An empty directory may always be replaced.
#[derive(Debug)]
pub(crate) enum Replaceable {
    /// A bundle or a part of one whose manifest is complete and lists every file.
    Bundle,
    /// A directory that contains only these files, unchanged since they were compared. Their contents are all written
    /// again.
    Files(HashMap<String, Stamp>),
}

#[derive(Debug)]
pub(crate) struct Stage {
    output: PathBuf,
    partial: PathBuf,
    /// Which output may be replaced, if any.
    replaceable: Option<Replaceable>,
    /// Bytes still to be written, as far as known; for the error message when the disk is full.
    remaining_bytes: AtomicU64,
    /// Whether the files of an interrupted run were removed.
    discarded: bool,
    _lock: Lock,
}

/// The staging directory of an output; `None` if the path has no file name.
pub(crate) fn partial_of(output: &Path) -> Option<PathBuf> {
    let mut name = OsString::from(output.file_name()?);
    name.push(PARTIAL);
    Some(output.with_file_name(name))
}

/// The output of a staging directory, by its name.
pub(crate) fn output_of(partial: &Path) -> Option<PathBuf> {
    let name = partial.file_name()?.as_bytes().strip_suffix(PARTIAL.as_bytes())?;
    (!name.is_empty()).then(|| partial.with_file_name(OsStr::from_bytes(name)))
}

const PARTIAL: &str = ".partial";

/// Removes the staging directory of a failed run that cannot be resumed.
///
/// # Errors
/// Another process works there, the directory is not that of an interrupted run, or removing fails.
pub fn discard_partial(output: &Path) -> Result<(), BundleError> {
    let output = std::path::absolute(output).map_err(BundleError::io("resolve the path", output))?;
    let Some(partial) = partial_of(&output).filter(|partial| partial.symlink_metadata().is_ok()) else {
        return Ok(());
    };
    let _lock = lock(&partial)?;
    check_owner(&partial)?;
    for name in ["records", "tree", "work"] {
        remove(&partial.join(name))?;
    }
    let lock = partial.join("lock");
    fs::remove_file(&lock).map_err(BundleError::io("remove the file", &lock))?;
    fs::remove_dir(&partial).map_err(BundleError::io("remove the directory", &partial))
}

/// Whether a run works there or was interrupted before its output got its name. A completed run removes `work`.
pub(crate) fn is_begun(partial: &Path) -> bool {
    partial.join("lock").is_file() && partial.join("work").is_dir()
}

impl Stage {
    /// Fails if `output` exists or overlaps one of `inputs`. Does not write.
    pub(crate) fn check(
        inputs: &[PathBuf],
        output: &Path,
        replaceable: Option<&Replaceable>,
    ) -> Result<(), BundleError> {
        let output = std::path::absolute(output).map_err(BundleError::io("resolve the path", output))?;
        check_overlap(inputs, &output)?;
        check_output(&output, replaceable)
    }

    /// Prepares to make `output` from `inputs`. Does not write before it has checked that the output is allowed.
    pub(crate) fn open(
        inputs: &[PathBuf],
        output: &Path,
        replaceable: Option<Replaceable>,
        resume: bool,
    ) -> Result<Self, BundleError> {
        let output = std::path::absolute(output).map_err(BundleError::io("resolve the path", output))?;
        let (Some(parent), Some(partial)) = (output.parent(), partial_of(&output)) else {
            return Err(BundleError::Unstorable { path: output, reason: "not a valid name for an output" });
        };
        check_overlap(inputs, &output)?;
        check_output(&output, replaceable.as_ref())?;
        fs::create_dir_all(parent).map_err(BundleError::io("create the directory", parent))?;
        // Check again: now that the parent exists, links in the path are resolved.
        check_overlap(inputs, &output)?;
        let lock = lock(&partial)?;
        failpoint("locked");
        check_owner(&partial)?;
        // The process that held the lock may have finished this output.
        check_output(&output, replaceable.as_ref())?;
        let mut stage =
            Self { output, partial, replaceable, remaining_bytes: AtomicU64::new(0), discarded: false, _lock: lock };
        if !resume {
            stage.discarded = [stage.records(), stage.work()].iter().any(|dir| has_entries(dir));
            // Records first: a finished shard without a record is not taken over.
            remove(&stage.records())?;
            failpoint("records-removed");
            remove(&stage.tree())?;
            remove(&stage.work())?;
        }
        failpoint("cleared");
        for dir in [stage.tree(), stage.work(), stage.records()] {
            fs::create_dir_all(&dir).map_err(BundleError::io("create the directory", &dir))?;
        }
        failpoint("prepared");
        Ok(stage)
    }

    /// Reports that the files of an interrupted run were removed, if there were any.
    pub(crate) fn report_discarded(&self, progress: &dyn Progress) {
        if self.discarded {
            progress.starts_over("an interrupted run is discarded; with the resume option it would have continued");
        }
    }

    pub(crate) fn tree(&self) -> PathBuf {
        self.partial.join("tree")
    }

    pub(crate) fn work(&self) -> PathBuf {
        self.partial.join("work")
    }

    fn records(&self) -> PathBuf {
        self.partial.join("records")
    }

    /// The path of a finished shard's record.
    pub(crate) fn record(&self, name: &str) -> PathBuf {
        self.records().join(format!("{}.json", Digest::of(name.as_bytes())))
    }

    /// The path of weights being written. A later run continues after their sound part.
    pub(crate) fn growing(&self, name: &str) -> PathBuf {
        self.work().join(format!("shard-{}", Digest::of(name.as_bytes())))
    }

    /// The path of the journal of weights being written.
    pub(crate) fn journal(&self, name: &str) -> PathBuf {
        self.work().join(format!("journal-{}", Digest::of(name.as_bytes())))
    }

    /// Records that a shard is finished.
    pub(crate) fn put_record(&self, name: &str, bytes: &[u8]) -> Result<(), BundleError> {
        // Several shards may be finished at the same time.
        let (work, record) = (self.work().join(format!("record-{}", Digest::of(name.as_bytes()))), self.record(name));
        files::write_durably(&work, bytes).map_err(self.write_error(&work))?;
        failpoint("before-record");
        fs::rename(&work, &record).map_err(self.write_error(&record))?;
        failpoint("recorded");
        files::sync_dir(&self.records())
    }

    /// Fails if the run was requested to stop.
    pub(crate) fn check_cancelled(&self, progress: &dyn Progress) -> Result<(), BundleError> {
        match progress.cancelled() {
            true => Err(BundleError::Interrupted { partial: self.partial.clone() }),
            false => Ok(()),
        }
    }

    /// Free bytes for this user on the output's disk; `None` if unknown.
    pub(crate) fn free_bytes(&self) -> Option<u64> {
        let stat = rustix::fs::statvfs(&self.partial).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Fails early if `bytes` do not fit on the disk; otherwise stores them as still to be written.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<(), BundleError> {
        self.remaining_bytes.store(bytes, Ordering::Relaxed);
        match self.free_bytes() {
            Some(free_bytes) if free_bytes < bytes => {
                self.remove_if_empty();
                Err(BundleError::NoRoom { path: self.partial.clone(), needed_bytes: bytes, free_bytes })
            }
            _ => Ok(()),
        }
    }

    /// Removes the staging directory if nothing was written to it. On failure it is left for the next run.
    fn remove_if_empty(&self) {
        let empty = [self.records(), self.tree(), self.work()].iter().all(|dir| fs::remove_dir(dir).is_ok());
        if empty && fs::remove_file(self.partial.join("lock")).is_ok() {
            let _ = fs::remove_dir(&self.partial);
        }
    }

    pub(crate) fn count_written(&self, bytes: u64) {
        // The value only appears in a message.
        let left = self.remaining_bytes.load(Ordering::Relaxed);
        self.remaining_bytes.store(left.saturating_sub(bytes), Ordering::Relaxed);
    }

    /// Returns the error for a failed write.
    pub(crate) fn write_error(&self, path: &Path) -> impl FnOnce(io::Error) -> BundleError {
        let (path, needed_bytes, free_bytes) =
            (path.to_path_buf(), self.remaining_bytes.load(Ordering::Relaxed), self.free_bytes().unwrap_or(0));
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                BundleError::DiskFull { path, needed_bytes, free_bytes, source }
            }
            _ => BundleError::Io { action: "write the file", path, source },
        }
    }

    /// Moves a finished file from `work` to its name in `tree`.
    pub(crate) fn accept(&self, work: &Path, name: &str) -> Result<(), BundleError> {
        let target = self.tree().join(name);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(self.write_error(parent))?;
        }
        failpoint("before-accept");
        fs::rename(work, &target).map_err(self.write_error(&target))?;
        failpoint("accepted");
        target.parent().map_or(Ok(()), files::sync_dir)
    }

    /// Writes a small file to `tree`.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) -> Result<(), BundleError> {
        let work = self.work().join("file");
        files::write_durably(&work, bytes).map_err(self.write_error(&work))?;
        self.count_written(bytes.len() as u64);
        self.accept(&work, name)
    }

    /// Copies a file to `tree` if `check` accepts its contents.
    pub(crate) fn copy(
        &self,
        from: &Input,
        name: &str,
        sha256: bool,
        mut advance: impl FnMut(u64) -> Result<(), BundleError>,
        check: impl FnOnce(&files::Contents) -> Result<(), BundleError>,
    ) -> Result<files::Contents, BundleError> {
        let work = self.work().join("file");
        let mut file = files::create(&work).map_err(self.write_error(&work))?;
        let contents = files::read_input(from, sha256, |chunk| {
            files::append(&mut file, chunk).map_err(self.write_error(&work))?;
            self.count_written(chunk.len() as u64);
            advance(chunk.len() as u64)
        })?;
        from.check_unchanged()?;
        check(&contents)?;
        from.pass_attributes(&file);
        file.sync_all().map_err(self.write_error(&work))?;
        self.accept(&work, name)?;
        Ok(contents)
    }

    /// Moves a finished file of another directory to `tree`: by a hard link if the file system supports it, else by a
    /// copy.
    pub(crate) fn link(
        &self,
        from: &Path,
        name: &str,
        mut advance: impl FnMut(u64) -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        let metadata = from.symlink_metadata().map_err(BundleError::io("read the metadata of the file", from))?;
        let work = self.work().join("file");
        // The staging directory may only contain this user's regular files.
        let is_own_file = metadata.is_file() && metadata.uid() == rustix::process::geteuid().as_raw();
        if is_own_file && fs::hard_link(from, &work).is_ok() {
            advance(metadata.len())?;
            return self.accept(&work, name);
        }
        self.copy(&Input::open(from)?, name, false, advance, |_| Ok(())).map(|_| ())
    }

    /// Removes files of `tree` that are not in `names`, and files of `work` that are not of `growing`: files of an
    /// interrupted run that this run does not use.
    pub(crate) fn keep_only(&self, names: &HashSet<String>, growing: &HashSet<String>) -> Result<(), BundleError> {
        allow_changes(&self.tree())?;
        let kept: HashSet<PathBuf> = growing.iter().flat_map(|name| [self.growing(name), self.journal(name)]).collect();
        for (_, path) in files::walk(&self.work())?.into_iter().filter(|(_, path)| !kept.contains(path)) {
            fs::remove_file(&path).map_err(BundleError::io("remove the file", &path))?;
        }
        for (name, path) in files::walk(&self.tree())? {
            if !names.contains(&name) {
                fs::remove_file(&path).map_err(BundleError::io("remove the file", &path))?;
            }
        }
        // This run may have a file where there was a directory.
        remove_empty_dirs(&self.tree())?;
        failpoint("kept");
        Ok(())
    }

    /// Renames the complete tree to the output.
    pub(crate) fn publish(self) -> Result<(), BundleError> {
        let tree = self.tree();
        remove_empty_dirs(&tree)?;
        sync_dirs(&tree)?;
        failpoint("synced");
        // Protect an output that was created since the start as well.
        check_output(&self.output, self.replaceable.as_ref())?;
        let old = self.partial.join("replaced");
        if self.replaceable.is_some() && self.output.symlink_metadata().is_ok() {
            self.replace(&tree, &old)?;
        } else {
            match renameat_with(CWD, &tree, CWD, &self.output, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => return Err(BundleError::OutputExists { path: self.output }),
                // Not every file system supports the flag.
                Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&tree, &self.output),
                other => other.map_err(io::Error::from),
            }
            .map_err(BundleError::io(PUBLISH, &self.output))?;
        }
        failpoint("published");
        if let Some(parent) = self.output.parent() {
            files::sync_dir(parent)?;
        }
        // Records first: work without a record is never taken for finished.
        for dir in [self.records(), tree, old, self.work()] {
            remove(&dir)?;
        }
        failpoint("tidied");
        let lock = self.partial.join("lock");
        fs::remove_file(&lock).map_err(BundleError::io("remove the file", &lock))?;
        failpoint("unlocked");
        fs::remove_dir(&self.partial).map_err(BundleError::io("remove the directory", &self.partial))
    }

    /// Renames the tree to the old output's name. The old output is moved to the tree's place or to `old`.
    fn replace(&self, tree: &Path, old: &Path) -> Result<(), BundleError> {
        // Atomic where the system can exchange two names.
        let swapped = match fault("swap") {
            false => renameat_with(CWD, tree, CWD, &self.output, RenameFlags::EXCHANGE),
            true => Err(Errno::INVAL),
        };
        if swapped.is_ok() {
            return Ok(());
        }
        // An output exists, so the one that an earlier run set aside has been replaced.
        remove(old)?;
        fs::rename(&self.output, old).map_err(BundleError::io(PUBLISH, &self.output))?;
        failpoint("set-aside");
        let rename = |name, from: &Path, to: &Path| match fault(name) {
            false => fs::rename(from, to),
            true => Err(Errno::IO.into()),
        };
        let Err(source) = rename("publish", tree, &self.output) else { return Ok(()) };
        match rename("back", old, &self.output) {
            Ok(()) => Err(BundleError::Io { action: PUBLISH, path: self.output.clone(), source }),
            Err(_) => Err(BundleError::SetAside { output: self.output.clone(), old: old.into(), source }),
        }
    }
}

const PUBLISH: &str = "rename the finished output to its final name";

/// Whether a directory exists and has entries.
fn has_entries(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some())
}

fn check_output(output: &Path, replaceable: Option<&Replaceable>) -> Result<(), BundleError> {
    let metadata = match output.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(BundleError::io("read the metadata of the output", output))?,
    };
    let Some(replaceable) = replaceable else { return Err(BundleError::OutputExists { path: output.into() }) };
    if metadata.is_symlink() {
        let reason = "a symbolic link, which is not replaced; pass the directory that it points to";
        return Err(BundleError::Unstorable { path: output.into(), reason });
    }
    if !metadata.is_dir() {
        let reason = "a file, but only a directory can be replaced; choose another name";
        return Err(BundleError::Unstorable { path: output.into(), reason });
    }
    let mut other_version = None;
    let replaceable_files: HashMap<String, Option<Stamp>> = match replaceable {
        Replaceable::Files(files) => files.iter().map(|(name, stamp)| (name.clone(), Some(*stamp))).collect(),
        Replaceable::Bundle => {
            let path = output.join(manifest::FILE_NAME);
            let manifest = files::read_small(&path, manifest::BYTES_MAX)
                .and_then(|bytes| manifest::Manifest::parse(&bytes, &path))
                .map(|manifest| manifest.files);
            other_version = match &manifest {
                Err(BundleError::OldVersion { version, .. }) => Some((*version, "a development")),
                Err(BundleError::NewerVersion { version, .. }) => Some((*version, "a newer")),
                _ => None,
            };
            let part = PartFile::read(output).ok().flatten();
            // Without a complete manifest no files are known, so only an empty directory may be replaced.
            let mut stored: Vec<String> = match (manifest, part) {
                (Ok(files), _) => files.iter().flat_map(FileEntry::stored).map(|(name, _)| name).collect(),
                (_, Some(part)) => {
                    part.stored().into_iter().map(|(name, _)| name).chain([part_file::FILE_NAME.into()]).collect()
                }
                _ => Vec::new(),
            };
            if !stored.is_empty() {
                let own_files = [manifest::FILE_NAME, manifest::SIGNATURE_NAME];
                // Compiled kernels can be compiled again.
                stored.extend(own_files.into_iter().chain([ATTACHED_NAME, PARTIAL_NAME]).map(str::to_owned));
            }
            stored.into_iter().map(|name| (name, None)).collect()
        }
    };
    let folders: HashSet<&str> =
        replaceable_files.keys().flat_map(|name| name.match_indices('/').map(|(slash, _)| &name[..slash])).collect();
    let is_replaceable = |name: &str, metadata: &fs::Metadata| match replaceable_files.get(name) {
        _ if metadata.is_dir() => folders.contains(name),
        Some(stamp) => stamp.is_none_or(|stamp| stamp == Stamp::of(metadata)),
        None => false,
    };
    match (entries(output, "")?.into_iter().find(|(name, metadata)| !is_replaceable(name, metadata)), other_version) {
        (None, _) => Ok(()),
        (_, Some((version, age))) => Err(BundleError::OtherOutput { path: output.into(), version, age }),
        (Some((file, _)), None) => Err(BundleError::NotReplaceable { path: output.into(), file }),
    }
}

/// Lists all entries below a directory, each directory after its contents. Links are listed, not followed.
fn entries(dir: &Path, prefix: &str) -> Result<Vec<(String, fs::Metadata)>, BundleError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(BundleError::io("list the directory", dir))? {
        let entry = entry.map_err(BundleError::io("list the directory", dir))?;
        let metadata = entry.metadata().map_err(BundleError::io("read the metadata of the file", entry.path()))?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if metadata.is_dir() {
            found.extend(entries(&entry.path(), &format!("{name}/"))?);
        }
        found.push((name, metadata));
    }
    Ok(found)
}

fn check_overlap(inputs: &[PathBuf], output: &Path) -> Result<(), BundleError> {
    // The nearest existing ancestor determines the real path of the output.
    let real = output
        .ancestors()
        .find_map(|ancestor| Some(ancestor.canonicalize().ok()?.join(output.strip_prefix(ancestor).ok()?)))
        .unwrap_or_else(|| output.into());
    if let Some(bundle) = real.ancestors().skip(1).find(|dir| dir.join(manifest::FILE_NAME).is_file()) {
        return Err(BundleError::OutputInBundle { output: output.into(), bundle: bundle.into() });
    }
    inputs.iter().try_for_each(|input| {
        let input = input.canonicalize().map_err(BundleError::io("open", input))?;
        if real.starts_with(&input) || input.starts_with(&real) {
            return Err(BundleError::OutputOverlaps { output: output.into(), input });
        }
        Ok(())
    })
}

/// Checks that the directory and everything in it are directories and regular files of this user, and that other users
/// cannot write to the directory.
fn check_owner(partial: &Path) -> Result<(), BundleError> {
    let user = rustix::process::geteuid().as_raw();
    let foreign = |path: &Path, reason| Err(BundleError::ForeignPartial { path: path.into(), reason });
    let metadata =
        partial.symlink_metadata().map_err(BundleError::io("read the metadata of the directory", partial))?;
    if !metadata.is_dir() {
        return foreign(partial, "not a directory");
    }
    if metadata.uid() != user {
        return foreign(partial, "it belongs to another user");
    }
    if metadata.mode() & 0o022 != 0 {
        return foreign(partial, "it is writable by other users");
    }
    for (name, metadata) in entries(partial, "")? {
        if metadata.uid() != user {
            return foreign(&partial.join(name), "it belongs to another user");
        }
        if !metadata.is_file() && !metadata.is_dir() {
            return foreign(&partial.join(name), "neither a file nor a directory");
        }
    }
    Ok(())
}

/// The lock of an unfinished output. Dropping it unlocks explicitly: closing the file would not release the lock while
/// a child process is being started, which has a copy of the descriptor until `exec`.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // The system also releases the lock when all copies are closed.
        let _ = self.0.unlock();
    }
}

fn lock(partial: &Path) -> Result<Lock, BundleError> {
    let path = partial.join("lock");
    loop {
        match DirBuilder::new().mode(0o700).create(partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // Ours if it is empty (after a crash between the two steps) or contains a lock; otherwise another
                // program's.
                let mut names = match fs::read_dir(partial) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                        return Err(BundleError::ForeignPartial { path: partial.into(), reason: "not a directory" });
                    }
                    other => other.map_err(BundleError::io("list the directory", partial))?,
                };
                if names.next().is_some() && path.symlink_metadata().is_err() && partial.symlink_metadata().is_ok() {
                    let reason = "it has no lock file of an interrupted run";
                    return Err(BundleError::ForeignPartial { path: partial.into(), reason });
                }
                // Check the owner before opening anything in it.
                match partial.symlink_metadata() {
                    Err(_) => continue,
                    Ok(metadata) if metadata.uid() != rustix::process::geteuid().as_raw() => {
                        let reason = "it belongs to another user";
                        return Err(BundleError::ForeignPartial { path: partial.into(), reason });
                    }
                    Ok(metadata) if !metadata.is_dir() => {
                        return Err(BundleError::ForeignPartial { path: partial.into(), reason: "not a directory" });
                    }
                    Ok(_) => {}
                }
            }
            other => other.map_err(BundleError::io("create the directory", partial))?,
        }
        failpoint("created");
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = match File::options().create(true).append(true).custom_flags(flags).open(&path) {
            // Its holder has just finished and removed the directory.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            // A link, or a FIFO without a reader.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => {
                return Err(BundleError::ForeignPartial { path, reason: "not a regular file" });
            }
            other => other.map_err(BundleError::io("open the lock", &path))?,
        };
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(BundleError::ForeignPartial { path, reason: "not a regular file" });
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(BundleError::Locked { path: partial.into(), by: Holder::of(&file) });
            }
            Err(TryLockError::Error(source)) => {
                return Err(BundleError::Io { action: "lock", path, source });
            }
        }
        // The file may have been removed by its holder between opening and locking.
        let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        if let (Ok(held), Ok(named)) = (file.metadata(), path.symlink_metadata())
            && same(held, named)
        {
            return Ok(Lock(file));
        }
    }
}

/// Removes directories without files, which a finished file of an earlier run may have left.
fn remove_empty_dirs(dir: &Path) -> Result<bool, BundleError> {
    let mut empty = true;
    for entry in fs::read_dir(dir).map_err(BundleError::io("list the directory", dir))? {
        let entry = entry.map_err(BundleError::io("list the directory", dir))?;
        let path = entry.path();
        let is_dir = entry.file_type().map_err(BundleError::io("read the metadata of the file", &path))?.is_dir();
        if is_dir && remove_empty_dirs(&path)? {
            fs::remove_dir(&path).map_err(BundleError::io("remove the directory", &path))?;
        } else {
            empty = false;
        }
    }
    Ok(empty)
}

fn remove(dir: &Path) -> Result<(), BundleError> {
    let removed = match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            allow_changes(dir)?;
            fs::remove_dir_all(dir)
        }
        other => other,
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(BundleError::io("remove the directory", dir)),
    }
}

/// Makes a directory and all below it writable for this user: a replaced output may be read-only.
fn allow_changes(dir: &Path) -> Result<(), BundleError> {
    let mode = dir.symlink_metadata().map_err(BundleError::io("read the metadata of the directory", dir))?.mode();
    if mode & 0o700 != 0o700 {
        let allowed = fs::Permissions::from_mode(mode & 0o7777 | 0o700);
        fs::set_permissions(dir, allowed).map_err(BundleError::io("change the mode of the directory", dir))?;
    }
    for entry in fs::read_dir(dir).map_err(BundleError::io("list the directory", dir))? {
        let entry = entry.map_err(BundleError::io("list the directory", dir))?;
        if entry.file_type().map_err(BundleError::io("read the metadata of the file", entry.path()))?.is_dir() {
            allow_changes(&entry.path())?;
        }
    }
    Ok(())
}

fn sync_dirs(dir: &Path) -> Result<(), BundleError> {
    for entry in fs::read_dir(dir).map_err(BundleError::io("list the directory", dir))? {
        let path = entry.map_err(BundleError::io("list the directory", dir))?.path();
        if path.is_dir() {
            sync_dirs(&path)?;
        }
    }
    files::sync_dir(dir)
}
