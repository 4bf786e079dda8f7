//! Why the cache did not have a kernel.

use std::path::PathBuf;
use std::time::Duration;

/// Why a kernel was compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Miss {
    /// The store did not hold it.
    Absent,
    /// The store held a damaged entry, which was removed if that was possible; or a kernel attached to the bundle is
    /// not what its entry says.
    Damaged(String),
    /// Another process compiled the same kernel for longer than the timeout.
    LockTimeout(Duration),
    /// No usable store.
    NoStore(Unusable),
    /// `UNWEIGHT_JIT=off` turns the cache off.
    Off,
}

/// A cache folder that cannot be used at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cache folder {} not used: {why}", .root.display())]
pub struct Unusable {
    /// The folder of the cache.
    pub root: PathBuf,
    /// The reason why it cannot be used.
    pub why: String,
}

impl Unusable {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "kernel-cache-unusable"
    }
}
