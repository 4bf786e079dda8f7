//! Looking after the store: list, verify, prune, clear. The command line calls these; loading a kernel never does.

use std::time::{Duration, SystemTime};

use super::lock::{self, Lock};
use super::store::{Meta, Store, is_ours, remove};

/// An entry of the cache, as it is listed.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The folder below `entries`.
    pub folder: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// When it was last used, to a minute.
    pub last_used: SystemTime,
    /// Description of the entry, or what is wrong with it.
    pub meta: Result<Meta, String>,
}

/// The result of [`Store::verify`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Undamaged entries.
    pub good: usize,
    /// Folder of each damaged one, and what is wrong with it.
    pub damaged: Vec<(String, String)>,
    /// Number of damaged entries that were removed.
    pub evicted: usize,
}

/// The result of [`Store::prune`] and [`Store::clear`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// The number of kernels.
    pub entries: usize,
    /// Bytes of these kernels.
    pub bytes: u64,
    /// Remains of processes that died, and kept sources that did not compile; of [`Store::clear`] also tables of
    /// measurements.
    pub leftovers: usize,
    /// Kernels that should have gone and could not be removed.
    pub failed: usize,
}

impl Store {
    /// Every entry, the least recently used first.
    ///
    /// Reads descriptions, not binaries: [`Store::verify`] does that.
    pub fn ls(&self) -> std::io::Result<Vec<Listed>> {
        let mut listed = Vec::new();
        for folder in self.folders()? {
            let path = self.entries().join(&folder);
            let bytes = std::fs::read_dir(&path)
                .into_iter()
                .flatten()
                .filter_map(|file| Some(file.ok()?.metadata().ok()?.len()))
                .sum();
            let last_used = std::fs::metadata(path.join("meta.json"))
                .or_else(|_| std::fs::symlink_metadata(&path))
                .and_then(|metadata| metadata.modified());
            // Gone between the two looks: pruned by another process.
            let Ok(last_used) = last_used else { continue };
            let meta = self.describe(&folder);
            listed.push(Listed { folder, bytes, last_used, meta });
        }
        listed.sort_by(|a, b| (a.last_used, &a.folder).cmp(&(b.last_used, &b.folder)));
        Ok(listed)
    }

    /// Reads every entry in full and compares digests; removes the damaged ones if `evict`.
    pub fn verify(&self, evict: bool) -> std::io::Result<Verified> {
        let mut verified = Verified::default();
        for folder in self.folders()? {
            match self.check(&folder) {
                Ok(_) => verified.good += 1,
                // Pruned between the two looks.
                Err(_) if std::fs::symlink_metadata(self.entries().join(&folder)).is_err() => {}
                Err(why) => {
                    verified.evicted += usize::from(evict && self.evict(&folder));
                    verified.damaged.push((folder, why));
                }
            }
        }
        Ok(verified)
    }

    /// Removes damaged entries, leftovers, and the least recently used entries until at most `max_bytes` are left.
    ///
    /// An entry that is being built or looked for right now stays.
    pub fn prune(&self, max_bytes: u64) -> std::io::Result<Removed> {
        let mut removed =
            Removed { leftovers: self.sweep_abandoned() + self.remove_ours("failed"), ..Removed::default() };
        let listed = self.ls()?;
        let mut total: u64 = listed.iter().map(|entry| entry.bytes).sum();
        for entry in listed {
            if total > max_bytes || entry.meta.is_err() {
                let path = self.lock_path(&entry.folder);
                // A free lock is taken so that its file may be removed as well; a lock that cannot exist protects
                // nothing.
                let held = lock::acquire(&path, Duration::ZERO);
                if matches!(held, Lock::TimedOut(_)) {
                    continue;
                }
                if self.evict(&entry.folder) {
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

    /// Removes every kernel and everything else that the store made, and nothing that it did not make.
    pub fn clear(&self) -> std::io::Result<Removed> {
        let mut removed = Removed::default();
        for entry in self.ls()? {
            if self.evict(&entry.folder) {
                removed.entries += 1;
                removed.bytes += entry.bytes;
            } else {
                removed.failed += 1;
            }
        }
        removed.leftovers = self.sweep(Duration::ZERO) + self.remove_ours("failed") + self.remove_ours("tables");
        let locks = std::fs::read_dir(self.root().join("locks")).into_iter().flatten().flatten();
        for file in locks.filter(|file| is_ours(&file.file_name().to_string_lossy())) {
            // A lock that is held stays: its process is compiling.
            if matches!(lock::acquire(&file.path(), Duration::ZERO), Lock::Held { .. }) {
                let _ = std::fs::remove_file(file.path());
            }
        }
        Ok(removed)
    }

    /// Everything of ours in a folder of the store.
    fn remove_ours(&self, folder: &str) -> usize {
        let entries = std::fs::read_dir(self.root().join(folder)).into_iter().flatten().flatten();
        let ours = entries.filter(|entry| is_ours(&entry.file_name().to_string_lossy()));
        ours.filter(|entry| remove(&entry.path()).is_ok()).count()
    }

    fn folders(&self) -> std::io::Result<Vec<String>> {
        let entries = match std::fs::read_dir(self.entries()) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut folders = Vec::new();
        for entry in entries {
            // Names of ours begin with a kernel's; anything else was not made by the store and is not touched.
            let entry = entry?;
            if let Some(folder) = entry.file_name().into_string().ok().filter(|name| is_ours(name)) {
                folders.push(folder);
            }
        }
        folders.sort();
        Ok(folders)
    }
}
