//! Places where a test ends the process, to see what a crash there leaves (`docs/adr/0007-staging-protocol.md`).

/// Every place, in the order of a run that replaces an existing output.
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

/// Ends the process without a word where `UNWEIGHT_FAILPOINT` is `name`, or `name:N` and this is the N-th time. Nothing
/// without the feature `failpoints`.
#[inline]
pub(crate) fn failpoint(name: &str) {
    #[cfg(feature = "failpoints")]
    {
        use std::sync::atomic::{AtomicU64, Ordering};

        static PASSED: AtomicU64 = AtomicU64::new(0);
        debug_assert!(FAILPOINTS.contains(&name));
        let Ok(wanted) = std::env::var("UNWEIGHT_FAILPOINT") else { return };
        let (wanted, times) = wanted.split_once(':').unwrap_or((&wanted, "1"));
        if wanted == name && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == times.parse().unwrap_or(1) {
            std::process::abort();
        }
    }
    #[cfg(not(feature = "failpoints"))]
    {
        _ = name;
    }
}

/// What a test can make the system refuse: a swap of two names, the rename of the finished output, that of the old one
/// back, a thread.
#[cfg(feature = "failpoints")]
pub const FAULTS: &[&str] = &["swap", "publish", "back", "thread"];

/// True where `UNWEIGHT_FAULT` lists `name` (`a,b`), or `name:N` and this is the N-th time. Never without the feature
/// `failpoints`.
#[inline]
pub(crate) fn fault(name: &str) -> bool {
    #[cfg(feature = "failpoints")]
    {
        use std::sync::atomic::{AtomicU64, Ordering};

        static COUNTED: AtomicU64 = AtomicU64::new(0);
        debug_assert!(FAULTS.contains(&name));
        let Ok(wanted) = std::env::var("UNWEIGHT_FAULT") else { return false };
        wanted.split(',').any(|wanted| match wanted.split_once(':') {
            None => wanted == name,
            Some((wanted, time)) => wanted == name && time.parse() == Ok(COUNTED.fetch_add(1, Ordering::Relaxed) + 1),
        })
    }
    #[cfg(not(feature = "failpoints"))]
    {
        _ = name;
        false
    }
}
