//! Maintains the store: list, verify, prune, clear. Only the command line calls these functions, never loading a
//! kernel.

use std::time::{Duration, SystemTime};

use super::{
    lock::{self, Lock},
    store::{KernelMeta, Store, is_ours, remove},
};

/// A listed entry of the cache.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The directory name below `entries`.
    pub directory: String,
    /// The size of its files in bytes.
    pub bytes: u64,
    /// The time of the last use, to the minute.
    pub last_used: SystemTime,
    /// The entry's metadata, or why they are invalid.
    pub meta: Result<KernelMeta, String>,
}

/// The result of [`Store::verify`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The number of undamaged entries.
    pub good: usize,
    /// Directory and defect of each damaged entry.
    pub damaged: Vec<(String, String)>,
    /// The number of damaged entries that were removed.
    pub evicted: usize,
}

/// The result of [`Store::prune`] and [`Store::clear`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// The number of removed kernels.
    pub entries: usize,
    /// The size of these kernels in bytes.
    pub bytes: u64,
    /// The number of other removed items: leftovers of processes that died, and sources that did not compile; for
    /// [`Store::clear`], also tables of measurements.
    pub leftovers: usize,
    /// The number of kernels that could not be removed.
    pub failed: usize,
}

impl Store {
    /// Returns every entry, the least recently used first.
    ///
    /// Reads metadata, not binaries; [`Store::verify`] reads binaries.
    pub fn ls(&self) -> std::io::Result<Vec<Listed>> {
        let mut listed = Vec::new();
        for directory in self.directories()? {
            let path = self.entries().join(&directory);
            let bytes = std::fs::read_dir(&path)
                .into_iter()
                .flatten()
                .filter_map(|file| Some(file.ok()?.metadata().ok()?.len()))
                .sum();
            let last_used = std::fs::metadata(path.join("meta.json"))
                .or_else(|_| std::fs::symlink_metadata(&path))
                .and_then(|metadata| metadata.modified());
            // Another process pruned it between the two reads.
            let Ok(last_used) = last_used else { continue };
            let meta = self.describe(&directory);
            listed.push(Listed { directory, bytes, last_used, meta });
        }
        listed.sort_by(|a, b| (a.last_used, &a.directory).cmp(&(b.last_used, &b.directory)));
        Ok(listed)
    }

    /// Reads every entry in full and compares digests; removes damaged entries if `evict` is set.
    pub fn verify(&self, evict: bool) -> std::io::Result<Verified> {
        let mut verified = Verified::default();
        for directory in self.directories()? {
            match self.check(&directory) {
                Ok(_) => verified.good += 1,
                // Pruned between the two reads.
                Err(_) if std::fs::symlink_metadata(self.entries().join(&directory)).is_err() => {}
                Err(why) => {
                    verified.evicted += usize::from(evict && self.evict(&directory));
                    verified.damaged.push((directory, why));
                }
            }
        }
        Ok(verified)
    }

    /// Removes damaged entries, leftovers, and the least recently used entries until at most `max_bytes` are left.
    ///
    /// Keeps entries that are being built or looked up.
    pub fn prune(&self, max_bytes: u64) -> std::io::Result<Removed> {
        let mut removed =
            Removed { leftovers: self.sweep_abandoned() + self.remove_ours("failed"), ..Removed::default() };
        let listed = self.ls()?;
        let mut total: u64 = listed.iter().map(|entry| entry.bytes).sum();
        for entry in listed {
            if total > max_bytes || entry.meta.is_err() {
                let path = self.lock_path(&entry.directory);
                // A free lock is acquired so that its file may be removed as well; a lock that cannot exist protects
                // nothing.
                let lock = lock::acquire(&path, Duration::ZERO);
                if matches!(lock, Lock::TimedOut(_)) {
                    continue;
                }
                if self.evict(&entry.directory) {
                    let _ = std::fs::remove_file(&path);
                    total = total.saturating_sub(entry.bytes);
                    removed.entries += 1;
                    removed.bytes += entry.bytes;
                } else {
                    removed.failed += 1;
                }
            }
        }
        Ok(removed)
    }

    /// Removes every kernel and all other files that the store created, and nothing else.
    pub fn clear(&self) -> std::io::Result<Removed> {
        let mut removed = Removed::default();
        for entry in self.ls()? {
            if self.evict(&entry.directory) {
                removed.entries += 1;
                removed.bytes += entry.bytes;
            } else {
                removed.failed += 1;
            }
        }
        removed.leftovers = self.sweep(Duration::ZERO) + self.remove_ours("failed") + self.remove_ours("tables");
        let locks = std::fs::read_dir(self.root().join("locks")).into_iter().flatten().flatten();
        for file in locks.filter(|file| is_ours(&file.file_name().to_string_lossy())) {
            // A held lock stays: its process is compiling.
            if matches!(lock::acquire(&file.path(), Duration::ZERO), Lock::Held { .. }) {
                let _ = std::fs::remove_file(file.path());
            }
        }
        Ok(removed)
    }

    /// Removes everything that the store created in one of its directories; returns the number of removed items.
    fn remove_ours(&self, directory: &str) -> usize {
        let entries = std::fs::read_dir(self.root().join(directory)).into_iter().flatten().flatten();
        let ours = entries.filter(|entry| is_ours(&entry.file_name().to_string_lossy()));
        ours.filter(|entry| remove(&entry.path()).is_ok()).count()
    }

    fn directories(&self) -> std::io::Result<Vec<String>> {
        let entries = match std::fs::read_dir(self.entries()) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut directories = Vec::new();
        for entry in entries {
            // Our names begin with a kernel's name; the store created nothing else, and must not touch anything else.
            let entry = entry?;
            if let Some(directory) = entry.file_name().into_string().ok().filter(|name| is_ours(name)) {
                directories.push(directory);
            }
        }
        directories.sort();
        Ok(directories)
    }
}
