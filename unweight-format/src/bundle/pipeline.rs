//! What compressing, decompressing and verifying share: threads, batches of tensors, and a bound on the bytes in flight.

use std::{
    ops::Range,
    sync::{Condvar, Mutex, PoisonError},
};

use super::BundleError;

/// Bytes in flight unless the user says otherwise; stacks, tables and the headers fit the rest of a GiB.
const DEFAULT_RAM_BYTES: u64 = 768 << 20;
/// Tensors are worked on in batches of about this many original bytes: enough to keep every thread busy with small tensors, few
/// enough that writing overlaps with encoding.
const BATCH_BYTES: u64 = 64 << 20;

/// Runs `work` on a pool of `threads` (`None`: the pool that is there).
pub(crate) fn on_threads<T: Send>(
    threads: Option<usize>,
    work: impl FnOnce() -> Result<T, BundleError> + Send,
) -> Result<T, BundleError> {
    let Some(threads) = threads else { return work() };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .thread_name(|i| format!("unweight-{i}"))
        .build()
        .map_err(|error| BundleError::Threads { threads, reason: error.to_string() })?;
    pool.install(work)
}

/// Cuts a sequence of sizes in batches: as many as fit `BATCH_BYTES` (and the memory allowed), at least one.
pub(crate) fn batches(sizes: impl Iterator<Item = u64>, ram_bytes: Option<u64>) -> Vec<Range<usize>> {
    let limit = BATCH_BYTES.min(ram_bytes.unwrap_or(DEFAULT_RAM_BYTES) / 4);
    let (mut batches, mut start, mut sum, mut end) = (Vec::new(), 0, 0u64, 0);
    for size in sizes {
        if end > start && sum.saturating_add(size) > limit {
            batches.push(start..end);
            (start, sum) = (end, 0);
        }
        sum = sum.saturating_add(size);
        end += 1;
    }
    if end > start {
        batches.push(start..end);
    }
    batches
}

/// Bounds the bytes in flight between threads.
#[derive(Debug)]
pub(crate) struct Gate {
    limit: u64,
    used: Mutex<u64>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn new(ram_bytes: Option<u64>) -> Self {
        Self { limit: ram_bytes.unwrap_or(DEFAULT_RAM_BYTES), used: Mutex::new(0), changed: Condvar::new() }
    }

    /// Bytes that may be in flight.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Waits until `bytes` fit; what exceeds the limit by itself waits until it is alone.
    pub(crate) fn enter(&self, bytes: u64) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        while *used > 0 && used.saturating_add(bytes) > self.limit {
            used = self.changed.wait(used).unwrap_or_else(PoisonError::into_inner);
        }
        *used = used.saturating_add(bytes);
    }

    /// Gives bytes back.
    pub(crate) fn leave(&self, bytes: u64) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(bytes);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_cover_everything_in_order() {
        let sizes = [1u64, 2, 64 << 20, 1, 63 << 20, 2 << 20, 0];
        assert_eq!(batches(sizes.into_iter(), None), [0..2, 2..3, 3..5, 5..7]);
        assert!(batches(std::iter::empty(), None).is_empty());
        assert_eq!(batches([5, 5].into_iter(), Some(4)), [0..1, 1..2]);
    }

    #[test]
    fn a_gate_bounds_but_never_blocks_a_single_one() {
        let gate = Gate::new(Some(10));
        gate.enter(100);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                gate.enter(4);
                gate.enter(6);
                *gate.used.lock().unwrap()
            });
            gate.leave(100);
            assert_eq!(waiting.join().unwrap(), 10);
        });
    }
}
