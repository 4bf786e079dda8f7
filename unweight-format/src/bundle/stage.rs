//! Where an output grows until it is complete.
//!
//! ```text
//! <output>.partial/lock      held while a process works here
//!                  work/     files being written
//!                  tree/     finished files; becomes <output> in one rename
//!                  records/  what is known of finished shards, for a later run
//! ```

use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::{BundleError, files};

#[derive(Debug)]
pub(crate) struct Stage {
    output: PathBuf,
    partial: PathBuf,
    force: bool,
    /// Bytes still to be written, as far as known: for the message when the disk is full.
    left_bytes: AtomicU64,
    _lock: File,
}

impl Stage {
    /// Fails if `output` is taken or overlaps `input`; touches nothing.
    pub(crate) fn check(input: &Path, output: &Path, force: bool) -> Result<(), BundleError> {
        let output = std::path::absolute(output).map_err(BundleError::io("resolve the path", output))?;
        check_output(&output, force)?;
        check_overlap(input, &output)
    }

    /// Prepares to make `output` from `input`. Nothing is written before it is sure that the output may be.
    pub(crate) fn open(input: &Path, output: &Path, force: bool, resume: bool) -> Result<Self, BundleError> {
        let output = std::path::absolute(output).map_err(BundleError::io("resolve the path", output))?;
        let (Some(parent), Some(name)) = (output.parent(), output.file_name()) else {
            return Err(BundleError::Unstorable { path: output, reason: "not a name for an output" });
        };
        let mut partial_name = OsString::from(name);
        partial_name.push(".partial");
        let partial = parent.join(partial_name);
        check_output(&output, force)?;
        check_overlap(input, &output)?;
        fs::create_dir_all(parent).map_err(BundleError::io("create the directory", parent))?;
        // Once it exists, links on the way to the output are known.
        check_overlap(input, &output)?;
        let lock = lock(&partial)?;
        // Whoever held the lock may have finished this very output.
        check_output(&output, force)?;
        let stage = Self { output, partial, force, left_bytes: AtomicU64::new(0), _lock: lock };
        if !resume {
            remove(&stage.tree())?;
            remove(&stage.records())?;
        }
        remove(&stage.work())?;
        for dir in [stage.tree(), stage.work(), stage.records()] {
            fs::create_dir_all(&dir).map_err(BundleError::io("create the directory", &dir))?;
        }
        Ok(stage)
    }

    pub(crate) fn tree(&self) -> PathBuf {
        self.partial.join("tree")
    }

    pub(crate) fn work(&self) -> PathBuf {
        self.partial.join("work")
    }

    pub(crate) fn records(&self) -> PathBuf {
        self.partial.join("records")
    }

    pub(crate) fn interrupted(&self) -> BundleError {
        BundleError::Interrupted { partial: self.partial.clone() }
    }

    /// Bytes free for this user on the output's disk; `None` if the system does not tell.
    pub(crate) fn free_bytes(&self) -> Option<u64> {
        let stat = rustix::fs::statvfs(&self.partial).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Fails early when `bytes` cannot fit; otherwise remembers them as still to be written.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<(), BundleError> {
        self.left_bytes.store(bytes, Ordering::Relaxed);
        match self.free_bytes() {
            Some(free_bytes) if free_bytes < bytes => {
                Err(BundleError::NoRoom { path: self.partial.clone(), needed_bytes: bytes, free_bytes })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn wrote(&self, bytes: u64) {
        // Only a message depends on it.
        let left = self.left_bytes.load(Ordering::Relaxed);
        self.left_bytes.store(left.saturating_sub(bytes), Ordering::Relaxed);
    }

    /// The error for a failed write.
    pub(crate) fn write_error(&self, path: &Path) -> impl FnOnce(io::Error) -> BundleError {
        let (path, needed_bytes, free_bytes) =
            (path.to_path_buf(), self.left_bytes.load(Ordering::Relaxed), self.free_bytes().unwrap_or(0));
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
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
        fs::rename(work, &target).map_err(self.write_error(&target))?;
        target.parent().map_or(Ok(()), files::sync_dir)
    }

    /// Writes a small file to `tree`.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) -> Result<(), BundleError> {
        let work = self.work().join("file");
        files::write_durably(&work, bytes).map_err(self.write_error(&work))?;
        self.wrote(bytes.len() as u64);
        self.accept(&work, name)
    }

    /// Copies a file to `tree`.
    pub(crate) fn copy(
        &self,
        from: &Path,
        name: &str,
        sha256: bool,
        advance: impl FnMut(u64) -> Result<(), BundleError>,
    ) -> Result<files::Contents, BundleError> {
        self.copy_checked(from, name, sha256, advance, |_| Ok(()))
    }

    /// Copies a file to `tree` if `check` accepts what was read.
    pub(crate) fn copy_checked(
        &self,
        from: &Path,
        name: &str,
        sha256: bool,
        mut advance: impl FnMut(u64) -> Result<(), BundleError>,
        check: impl FnOnce(&files::Contents) -> Result<(), BundleError>,
    ) -> Result<files::Contents, BundleError> {
        use std::io::Write;
        let work = self.work().join("file");
        let mut file = File::create(&work).map_err(self.write_error(&work))?;
        let contents = files::read_through(from, sha256, |chunk| {
            file.write_all(chunk).map_err(self.write_error(&work))?;
            self.wrote(chunk.len() as u64);
            advance(chunk.len() as u64)
        })?;
        check(&contents)?;
        file.sync_all().map_err(self.write_error(&work))?;
        self.accept(&work, name)?;
        Ok(contents)
    }

    /// Removes files of `tree` that are not in `names`: what an interrupted run left that this one does not want.
    pub(crate) fn keep_only(&self, names: &std::collections::HashSet<String>) -> Result<(), BundleError> {
        for (name, path) in files::walk(&self.tree())? {
            if !names.contains(&name) {
                fs::remove_file(&path).map_err(BundleError::io("remove the file", &path))?;
            }
        }
        Ok(())
    }

    /// Gives the complete tree its name.
    pub(crate) fn finish(self) -> Result<(), BundleError> {
        let tree = self.tree();
        sync_dirs(&tree)?;
        let old = self.partial.join("replaced");
        let renamed = if self.force && self.output.symlink_metadata().is_ok() {
            // One step where the system can swap two names; else the old output waits aside until the new one is there.
            renameat_with(CWD, &tree, CWD, &self.output, RenameFlags::EXCHANGE).map_err(io::Error::from).or_else(|_| {
                fs::rename(&self.output, &old)?;
                fs::rename(&tree, &self.output)
            })
        } else {
            match renameat_with(CWD, &tree, CWD, &self.output, RenameFlags::NOREPLACE) {
                Err(rustix::io::Errno::EXIST) => {
                    return Err(BundleError::OutputExists { path: self.output });
                }
                // Not every file system knows the flag.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => fs::rename(&tree, &self.output),
                other => other.map_err(io::Error::from),
            }
        };
        renamed.map_err(BundleError::io("rename the finished output to its name", &self.output))?;
        if let Some(parent) = self.output.parent() {
            files::sync_dir(parent)?;
        }
        for dir in [tree, old, self.work(), self.records()] {
            remove(&dir)?;
        }
        let lock = self.partial.join("lock");
        fs::remove_file(&lock).map_err(BundleError::io("remove the file", &lock))?;
        fs::remove_dir(&self.partial).map_err(BundleError::io("remove the directory", &self.partial))
    }
}

fn check_output(output: &Path, force: bool) -> Result<(), BundleError> {
    match output.symlink_metadata() {
        Err(_) => Ok(()),
        Ok(metadata) if force && metadata.is_dir() => Ok(()),
        Ok(_) if force => Err(BundleError::NotADirectory { path: output.into() }),
        Ok(_) => Err(BundleError::OutputExists { path: output.into() }),
    }
}

fn check_overlap(input: &Path, output: &Path) -> Result<(), BundleError> {
    let input = input.canonicalize().map_err(BundleError::io("open the directory", input))?;
    // The nearest existing ancestor decides where the output would be.
    let real = output
        .ancestors()
        .find_map(|ancestor| Some(ancestor.canonicalize().ok()?.join(output.strip_prefix(ancestor).ok()?)))
        .unwrap_or_else(|| output.into());
    if real.starts_with(&input) || input.starts_with(&real) {
        return Err(BundleError::OutputOverlaps { output: output.into(), input });
    }
    Ok(())
}

fn lock(partial: &Path) -> Result<File, BundleError> {
    let path = partial.join("lock");
    loop {
        let exists = partial.symlink_metadata().is_ok();
        if exists && !path.exists() {
            let empty = fs::read_dir(partial).is_ok_and(|mut entries| entries.next().is_none());
            // Made by us if it is empty (a crash between the two steps), somebody else's otherwise.
            if !empty {
                return Err(BundleError::ForeignPartial { path: partial.into() });
            }
        }
        match fs::create_dir(partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.map_err(BundleError::io("create the directory", partial))?,
        }
        let file = match File::options().create(true).append(true).open(&path) {
            // The holder has just finished and removed the directory.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.map_err(BundleError::io("open the lock", &path))?,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(BundleError::Locked { path: partial.into() }),
            Err(TryLockError::Error(source)) => {
                return Err(BundleError::Io { action: "lock", path, source });
            }
        }
        // The file may have been removed by its holder between opening and locking.
        let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        if let (Ok(held), Ok(named)) = (file.metadata(), path.metadata())
            && same(held, named)
        {
            return Ok(file);
        }
    }
}

fn remove(dir: &Path) -> Result<(), BundleError> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(BundleError::io("remove the directory", dir)),
    }
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
