//! Reasons why the cache did not have a kernel.

use std::{path::PathBuf, time::Duration};

/// Why a kernel was compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Miss {
    /// The store does not have the kernel.
    Absent,
    /// The store has a damaged entry, which was removed if possible; or a kernel attached to the bundle does not match
    /// its entry.
    Damaged(String),
    /// Another process held the lock of this kernel for longer than the timeout.
    LockTimeout(Duration),
    /// The store cannot be used.
    NoStore(Unusable),
    /// `UNWEIGHT_JIT=off` turns the cache off.
    Off,
}

/// A cache directory that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cache directory {} not used: {why}", .root.display())]
pub struct Unusable {
    /// The directory of the cache.
    pub root: PathBuf,
    /// Why it cannot be used.
    pub why: String,
}

impl Unusable {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "kernel-cache-unusable"
    }
}
