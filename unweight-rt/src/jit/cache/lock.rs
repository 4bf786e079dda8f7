//! One compile per kernel among all processes of a machine.
//!
//! An advisory lock on a file per kernel (`flock` on Linux): the kernel of the operating system releases it when its
//! holder dies, however it dies, so there is no stale lock to recognise. A lock is an economy, not a need: a process
//! that cannot have it compiles without it, and the rename in the store decides which one was first.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

/// The outcome of trying to lock.
#[derive(Debug)]
pub enum Lock {
    /// Locked until dropped. `waited` if another process held it first.
    Held {
        /// The locked file, held for its drop.
        _file: File,
        /// Whether it was held by another at first.
        waited: bool,
    },
    /// Another process held the lock for the whole time.
    TimedOut(Duration),
    /// There can be no lock: a read-only folder, a file system without locks. Why will show when the kernel is stored.
    Unavailable,
}

/// Locks the file at `path`, creating it, and waits up to `timeout` for another holder.
///
/// The wait polls, up to 20 ms apart: the standard library has no lock with a timeout, and a compile takes 20 ms and
/// more.
pub fn acquire(path: &Path, timeout: Duration) -> Lock {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    let mut waited = false;
    loop {
        // A link would never be what the name is, and a FIFO without a reader would block.
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
        // Pruning removes lock files. One that was removed between our open and our lock excludes no other process:
        // take the new one.
        if is_at(&file, path) {
            return Lock::Held { _file: file, waited };
        }
    }
}

/// Whether `file` is what `path` names now.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(ours), Ok(theirs)) => ours.ino() == theirs.ino() && ours.dev() == theirs.dev(),
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
