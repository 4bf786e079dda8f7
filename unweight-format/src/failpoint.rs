//! Places where a test ends the process, to check what a crash leaves there (`docs/adr/0007-staging-protocol.md`).

/// Every failpoint, in the order of a run that replaces an existing output.
#[cfg(feature = "failpoints")]
pub const FAILPOINTS: &[&str] = &[
    "created",
    "locked",
    "records-removed",
    "cleared",
    "prepared",
    "kept",
    "part-written",
    "journalled",
    "before-accept",
    "accepted",
    "before-record",
    "recorded",
    "synced",
    "set-aside",
    "published",
    "tidied",
    "unlocked",
];

/// Aborts the process if `UNWEIGHT_FAILPOINT` is `name`, or `name:N` and this is the N-th call with that name. Does
/// nothing without the feature `failpoints`.
#[inline]
pub(crate) fn failpoint(name: &str) {
    #[cfg(feature = "failpoints")]
    {
        use std::sync::atomic::{AtomicU64, Ordering};

        static PASSED: AtomicU64 = AtomicU64::new(0);
        debug_assert!(FAILPOINTS.contains(&name));
        let Ok(requested) = std::env::var("UNWEIGHT_FAILPOINT") else { return };
        let (requested, times) = requested.split_once(':').unwrap_or((&requested, "1"));
        if requested == name && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == times.parse().unwrap_or(1) {
            std::process::abort();
        }
    }
    #[cfg(not(feature = "failpoints"))]
    {
        _ = name;
    }
}

/// Operations that a test can make fail: the swap of two names, the rename of the finished output, the rename that
/// restores the old output, starting a thread, the thread that writes weights, which panics, and the storage, which
/// flips a bit of a written tensor or of a finished shard.
#[cfg(feature = "failpoints")]
pub const FAULTS: &[&str] = &["swap", "publish", "back", "thread", "writer", "flip-written", "flip-finished"];

/// Whether `UNWEIGHT_FAULT` lists `name` (`a,b`), or `name:N` and this is the N-th call with that name. Always false
/// without the feature `failpoints`.
#[inline]
pub(crate) fn fault(name: &str) -> bool {
    #[cfg(feature = "failpoints")]
    {
        use std::sync::atomic::{AtomicU64, Ordering};

        static COUNTED: AtomicU64 = AtomicU64::new(0);
        debug_assert!(FAULTS.contains(&name));
        let Ok(requested) = std::env::var("UNWEIGHT_FAULT") else { return false };
        requested.split(',').any(|requested| match requested.split_once(':') {
            None => requested == name,
            Some((requested, time)) => {
                requested == name && time.parse() == Ok(COUNTED.fetch_add(1, Ordering::Relaxed) + 1)
            }
        })
    }
    #[cfg(not(feature = "failpoints"))]
    {
        _ = name;
        false
    }
}

/// Panics where [`fault`] is true.
#[inline]
pub(crate) fn panic_fault(name: &str) {
    assert!(!fault(name), "the injected fault '{name}'");
}
