//! Shared by compressing, decompressing and verifying: threads, batches of tensors, and a bound on the bytes in flight.

use std::{
    io,
    num::NonZero,
    ops::Range,
    sync::{
        Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use super::BundleError;
use crate::failpoint::fault;

/// Maximum bytes in flight unless requested otherwise; stacks, tables and headers fit in the rest of a GiB.
const DEFAULT_RAM_BYTES: u64 = 768 << 20;
/// Original bytes of a batch of tensors, approximately: enough to keep all threads busy with small tensors, few enough
/// that writing overlaps with encoding.
const BATCH_BYTES: u64 = 64 << 20;

/// A larger raw tensor is copied in pieces, so that its size does not matter for memory.
pub(crate) const RAW_WHOLE_MAX: u64 = 64 << 20;

/// Runs `work` on a pool of `threads` threads. `None`: on a shared pool with a thread per processor.
///
/// Returns an error if threads cannot be created. Rayon's global pool, which starts implicitly, would panic.
pub(crate) fn on_threads<T: Send>(
    threads: Option<usize>,
    work: impl FnOnce() -> Result<T, BundleError> + Send,
) -> Result<T, BundleError> {
    if threads.is_none() && rayon::current_thread_index().is_some() {
        return work();
    }
    static SHARED: OnceLock<rayon::ThreadPool> = OnceLock::new();
    match threads {
        Some(threads) => pool(threads.max(1))?.install(work),
        None => match SHARED.get() {
            Some(shared) => shared.install(work),
            None => {
                let new = pool(thread::available_parallelism().map_or(1, NonZero::get))?;
                SHARED.get_or_init(|| new).install(work)
            }
        },
    }
}

fn pool(threads: usize) -> Result<rayon::ThreadPool, BundleError> {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("unweight-{i}"));
    builder.build().map_err(|error| BundleError::Threads { threads, reason: error.to_string() })
}

/// Starts a thread of a scope; returns an error if it cannot be created.
pub(crate) fn spawn<'scope, 'env, T: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, 'env>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<thread::ScopedJoinHandle<'scope, T>, BundleError> {
    let failed = |error: io::Error| BundleError::Threads { threads: 1, reason: error.to_string() };
    if fault("thread") {
        return Err(failed(io::ErrorKind::WouldBlock.into()));
    }
    thread::Builder::new().spawn_scoped(scope, work).map_err(failed)
}

/// Returns the thread's result, or resumes its panic.
pub(crate) fn join<T>(handle: thread::ScopedJoinHandle<'_, T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// What is read at once: consecutive tensors that are processed together, or one that is copied in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReadUnit {
    /// Tensors in memory.
    Batch(Range<usize>),
    /// The index of a raw tensor above [`RAW_WHOLE_MAX`].
    Pieces(usize),
}

/// Divides a sequence of (bytes, is raw) into batches of at most `BATCH_BYTES` (and the memory allowed), or of one
/// tensor.
pub(crate) fn read_units(tensors: impl Iterator<Item = (u64, bool)>, ram_bytes: Option<u64>) -> Vec<ReadUnit> {
    let limit = BATCH_BYTES.min(ram_bytes.unwrap_or(DEFAULT_RAM_BYTES) / 4);
    let (mut units, mut start, mut sum, mut end) = (Vec::new(), 0, 0u64, 0);
    for (bytes, raw) in tensors {
        let pieces = raw && bytes > RAW_WHOLE_MAX;
        if end > start && (pieces || sum.saturating_add(bytes) > limit) {
            units.push(ReadUnit::Batch(start..end));
            (start, sum) = (end, 0);
        }
        end += 1;
        if pieces {
            units.push(ReadUnit::Pieces(end - 1));
            start = end;
        } else {
            sum = sum.saturating_add(bytes);
        }
    }
    if end > start {
        units.push(ReadUnit::Batch(start..end));
    }
    units
}

/// Like [`read_units`], for the tensors from index `first` on.
pub(crate) fn read_units_from(
    first: usize,
    tensors: impl Iterator<Item = (u64, bool)>,
    ram_bytes: Option<u64>,
) -> Vec<ReadUnit> {
    let shifted = |unit| match unit {
        ReadUnit::Batch(range) => ReadUnit::Batch(range.start + first..range.end + first),
        ReadUnit::Pieces(index) => ReadUnit::Pieces(index + first),
    };
    read_units(tensors.skip(first), ram_bytes).into_iter().map(shifted).collect()
}

/// Bounds the bytes in flight between threads.
#[derive(Debug)]
pub(crate) struct ByteBudget {
    limit: u64,
    used: Mutex<u64>,
    changed: Condvar,
    released_all: AtomicBool,
}

impl ByteBudget {
    pub(crate) fn new(ram_bytes: Option<u64>) -> Self {
        Self {
            limit: ram_bytes.unwrap_or(DEFAULT_RAM_BYTES),
            used: Mutex::new(0),
            changed: Condvar::new(),
            released_all: AtomicBool::new(false),
        }
    }

    /// Maximum bytes in flight.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Waits until `bytes` fit. More than the limit waits until nothing else is in flight.
    pub(crate) fn acquire(&self, bytes: u64) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        while *used > 0 && used.saturating_add(bytes) > self.limit && !self.released_all.load(Ordering::Relaxed) {
            used = self.changed.wait(used).unwrap_or_else(PoisonError::into_inner);
        }
        *used = used.saturating_add(bytes);
    }

    /// Returns a guard that admits all waiting and future threads when it is dropped. The thread that releases bytes
    /// holds it, so that no other thread waits forever after a panic.
    pub(crate) fn release_all_on_drop(&self) -> ReleaseAllOnDrop<'_> {
        ReleaseAllOnDrop(self)
    }

    /// Releases bytes.
    pub(crate) fn release(&self, bytes: u64) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(bytes);
        self.changed.notify_all();
    }
}

/// See [`ByteBudget::release_all_on_drop`].
pub(crate) struct ReleaseAllOnDrop<'a>(&'a ByteBudget);

impl Drop for ReleaseAllOnDrop<'_> {
    fn drop(&mut self) {
        let ByteBudget { used, changed, released_all, .. } = self.0;
        *used.lock().unwrap_or_else(PoisonError::into_inner) = 0;
        released_all.store(true, Ordering::Relaxed);
        changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_units_cover_everything_in_order() {
        use ReadUnit::{Batch, Pieces};
        let sizes = [1u64, 2, 64 << 20, 1, 63 << 20, 2 << 20, 0];
        let coded = |sizes: &[u64], ram| {
            let units = read_units(sizes.iter().map(|&bytes| (bytes, false)), ram);
            units.into_iter().map(|unit| if let Batch(range) = unit { range } else { panic!() }).collect::<Vec<_>>()
        };
        assert_eq!(coded(&sizes, None), [0..2, 2..3, 3..5, 5..7]);
        assert!(coded(&[], None).is_empty());
        assert_eq!(coded(&[5, 5], Some(4)), [0..1, 1..2]);
        let raw = [(1, true), (u64::MAX, true), (RAW_WHOLE_MAX, true), (1, false)];
        assert_eq!(read_units(raw.into_iter(), None), [Batch(0..1), Pieces(1), Batch(2..3), Batch(3..4)]);
        assert_eq!(read_units_from(1, raw.into_iter(), None), [Pieces(1), Batch(2..3), Batch(3..4)]);
        assert_eq!(read_units_from(4, raw.into_iter(), None), []);
    }

    #[test]
    fn budget_bounds_memory_without_blocking_a_single_item() {
        let budget = ByteBudget::new(Some(10));
        budget.acquire(100);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                budget.acquire(4);
                budget.acquire(6);
                *budget.used.lock().unwrap()
            });
            budget.release(100);
            assert_eq!(waiting.join().unwrap(), 10);
        });
    }
}
