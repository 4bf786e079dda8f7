//! Folders for what is only needed while a command runs.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

use tempfile::TempDir;

/// A temporary folder that the next run removes if this one is killed.
pub struct Scratch {
    dir: TempDir,
    /// Locked as long as the process lives, however it ends.
    _lock: File,
}

impl Scratch {
    /// A new folder in `home`. Those of this prefix that nobody works in any more are removed first.
    pub fn new(home: &Path, prefix: &str) -> io::Result<Self> {
        remove_abandoned(home, prefix);
        let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(home)?;
        let lock = File::options().write(true).create_new(true).open(dir.path().join("lock"))?;
        lock.lock()?;
        Ok(Self { dir, _lock: lock })
    }

    /// Where it is; `lock` in it is taken.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes what killed runs of this user left. What cannot be looked at or removed stays.
fn remove_abandoned(home: &Path, prefix: &str) {
    let own = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(home).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(prefix)
            && entry.metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == own);
        if !ours {
            continue;
        }
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let mut options = File::options();
        let lock = options.read(true).custom_flags(flags.bits() as i32).open(entry.path().join("lock"));
        if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
