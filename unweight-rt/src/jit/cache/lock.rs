//! Ensures one compile per kernel among all processes of a machine.
//!
//! Uses an advisory lock on one file per kernel (`flock` on Linux). The operating system releases it when its holder
//! dies, so there are no stale locks. The lock only saves work: a process that cannot get it compiles without it, and
//! the rename in the store decides which process was first.

use std::{
    fs::{File, OpenOptions, TryLockError},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::{Duration, Instant},
};

use rustix::fs::OFlags;

/// The outcome of a lock attempt.
#[derive(Debug)]
pub enum Lock {
    /// Locked until dropped.
    Held {
        /// The locked file; dropping it releases the lock.
        _file: File,
        /// Whether another process held the lock first.
        waited: bool,
    },
    /// Another process held the lock until the timeout.
    TimedOut(Duration),
    /// Locking is impossible: a read-only directory, or a file system without locks. Storing the kernel reports the
    /// reason.
    Unavailable,
}

/// Locks the file at `path`, creating it if necessary, and waits up to `timeout` for another holder.
///
/// Polls at intervals of up to 20 ms: the standard library has no lock with a timeout, and a compile takes at least 20
/// ms.
pub fn acquire(path: &Path, timeout: Duration) -> Lock {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    let mut waited = false;
    loop {
        // The name must not be a link, and a FIFO without a reader would block.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        let open = OpenOptions::new().create(true).truncate(false).write(true).custom_flags(flags).open(path);
        let file = match open {
            Ok(file) if file.metadata().is_ok_and(|metadata| metadata.is_file()) => file,
            _ => return Lock::Unavailable,
        };
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::Error(_)) => return Lock::Unavailable,
                Err(TryLockError::WouldBlock) => {
                    waited = true;
                    let elapsed = start.elapsed();
                    if elapsed >= timeout {
                        return Lock::TimedOut(timeout);
                    }
                    std::thread::sleep(pause.min(timeout - elapsed));
                    pause = (pause * 2).min(Duration::from_millis(20));
                }
            }
        }
        // Pruning removes lock files. A file removed between open and lock excludes no other process: open the new
        // file.
        if is_at(&file, path) {
            return Lock::Held { _file: file, waited };
        }
    }
}

/// Returns whether `path` still names `file`.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(opened), Ok(current)) => opened.ino() == current.ino() && opened.dev() == current.dev(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_waits_then_gives_up_then_gets_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = acquire(&path, Duration::ZERO);
        assert!(matches!(first, Lock::Held { waited: false, .. }));
        let start = Instant::now();
        assert!(matches!(acquire(&path, Duration::from_millis(60)), Lock::TimedOut(_)));
        assert!(start.elapsed() >= Duration::from_millis(60));
        let waiter = std::thread::spawn({
            let path = path.clone();
            move || acquire(&path, Duration::from_secs(20))
        });
        std::thread::sleep(Duration::from_millis(30));
        drop(first);
        assert!(matches!(waiter.join().unwrap(), Lock::Held { .. }));
    }

    #[test]
    fn removed_lock_file_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let Lock::Held { _file: first, .. } = acquire(&path, Duration::ZERO) else { panic!("not locked") };
        let waiter = std::thread::spawn({
            let path = path.clone();
            move || acquire(&path, Duration::from_secs(20))
        });
        std::thread::sleep(Duration::from_millis(30));
        std::fs::remove_file(&path).unwrap();
        drop(first);
        let Lock::Held { _file: file, .. } = waiter.join().unwrap() else { panic!("not locked") };
        assert!(is_at(&file, &path));
    }

    #[test]
    fn missing_folder_gives_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent/lock");
        assert!(matches!(acquire(&path, Duration::from_secs(5)), Lock::Unavailable));
    }
}
