//! Scratch directories for the duration of a command, and temporary files that become the output.

use std::{
    fs::{self, File, Metadata, Permissions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

#[cfg(any(feature = "hub", feature = "sign"))]
use std::io::Write as _;

use tempfile::{NamedTempFile, TempDir};

use super::failure::Failure;

/// Returns the directory of a file.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a temporary file in the directory of `path`, which can be renamed to it. Errors do not name the temporary
/// file.
pub fn unfinished(path: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    // The mode of an ordinary new file, as the umask allows.
    builder.prefix(".unweight-").permissions(Permissions::from_mode(0o666));
    builder.tempfile_in(folder_of(path)).map_err(|error| error.kind().into())
}

/// Writes a file, which has its name only when it is complete.
#[cfg(any(feature = "hub", feature = "sign"))]
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = unfinished(path)?;
    file.write_all(bytes)?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Creates a temporary file as [`unfinished`] does; the failure names the directory.
pub fn unfinished_or_failure(path: &Path) -> Result<NamedTempFile, Failure> {
    unfinished(path).map_err(Failure::io(folder_of(path).display()))
}

/// A scratch directory. If this process is killed, the next run removes it.
pub struct Scratch {
    dir: TempDir,
    /// A lock that the system releases when the process ends, however it ends.
    _lock: File,
}

impl Scratch {
    /// Creates a directory in `home`. First removes unused directories with this prefix.
    pub fn new(home: &Path, prefix: &str) -> io::Result<Self> {
        remove_abandoned(home, prefix);
        loop {
            let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(home)?;
            let path = dir.path().join("lock");
            let lock = File::options().write(true).create_new(true).open(&path)?;
            lock.lock()?;
            // Before the lock was taken, another run may have removed the directory as abandoned.
            if path.symlink_metadata().is_ok_and(|named| lock.metadata().is_ok_and(|held| same(&held, &named))) {
                return Ok(Self { dir, _lock: lock });
            }
        }
    }

    /// The path of the directory. The name `lock` in it is reserved.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

fn same(a: &Metadata, b: &Metadata) -> bool {
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// Removes directories that killed runs of this user left. Directories that cannot be read or removed stay.
fn remove_abandoned(home: &Path, prefix: &str) {
    let user = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(home).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(prefix)
            && entry.metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user);
        if !is_ours {
            continue;
        }
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let mut options = File::options();
        let lock = options.read(true).custom_flags(flags.bits() as i32).open(entry.path().join("lock"));
        // Held until the directory is removed: a run that waits for the lock in `new` then sees that its directory is
        // gone.
        if let Ok(lock) = lock
            && lock.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use super::*;

    /// Runs that start at the same time remove leftovers of killed runs, and never each other's directories.
    #[test]
    fn directory_in_use_is_never_removed() {
        let home = tempfile::tempdir().unwrap();
        let together = Barrier::new(8);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        together.wait();
                        let scratch = Scratch::new(home.path(), "run-").unwrap();
                        fs::write(scratch.path().join("file"), "here").unwrap();
                        thread::yield_now();
                        assert_eq!(fs::read(scratch.path().join("file")).unwrap(), b"here");
                        let held = scratch._lock.metadata().unwrap();
                        assert!(same(&held, &scratch.path().join("lock").symlink_metadata().unwrap()));
                    }
                });
            }
        });
        // The next run removes a directory whose lock is free.
        fs::create_dir(home.path().join("run-killed")).unwrap();
        fs::write(home.path().join("run-killed/lock"), "").unwrap();
        drop(Scratch::new(home.path(), "run-").unwrap());
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
    }
}
