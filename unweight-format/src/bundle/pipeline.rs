//! What compressing, decompressing and verifying share: threads, batches of tensors, and a bound on the bytes in flight.

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

/// Bytes in flight unless the user says otherwise; stacks, tables and the headers fit the rest of a GiB.
const DEFAULT_RAM_BYTES: u64 = 768 << 20;
/// Tensors are worked on in batches of about this many original bytes: enough to keep every thread busy with small tensors, few
/// enough that writing overlaps with encoding.
const BATCH_BYTES: u64 = 64 << 20;

/// A raw tensor above this is moved in pieces, so that it costs no memory however large it is.
pub(crate) const RAW_WHOLE_MAX: u64 = 64 << 20;

/// Runs `work` on a pool of `threads` (`None`: one for each processor, of a pool that all calls share).
///
/// Where threads cannot be made, that is an error, not the panic of rayon's own pool, which starts by itself.
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

/// A thread of a scope, or an error where none can be made.
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

/// What a thread returned; its panic goes on here.
pub(crate) fn join<T>(handle: thread::ScopedJoinHandle<'_, T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Consecutive tensors that are worked on together, or one that is moved in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Work {
    /// These, in memory.
    Batch(Range<usize>),
    /// A raw tensor above [`RAW_WHOLE_MAX`].
    Pieces(usize),
}

/// Cuts a sequence of (bytes, is raw) in batches: as many as fit `BATCH_BYTES` (and the memory allowed), at least one.
pub(crate) fn batches(tensors: impl Iterator<Item = (u64, bool)>, ram_bytes: Option<u64>) -> Vec<Work> {
    let limit = BATCH_BYTES.min(ram_bytes.unwrap_or(DEFAULT_RAM_BYTES) / 4);
    let (mut work, mut start, mut sum, mut end) = (Vec::new(), 0, 0u64, 0);
    for (bytes, raw) in tensors {
        let pieces = raw && bytes > RAW_WHOLE_MAX;
        if end > start && (pieces || sum.saturating_add(bytes) > limit) {
            work.push(Work::Batch(start..end));
            (start, sum) = (end, 0);
        }
        end += 1;
        if pieces {
            work.push(Work::Pieces(end - 1));
            start = end;
        } else {
            sum = sum.saturating_add(bytes);
        }
    }
    if end > start {
        work.push(Work::Batch(start..end));
    }
    work
}

/// As [`batches`], of the tensors from `first` on.
pub(crate) fn batches_from(
    first: usize,
    tensors: impl Iterator<Item = (u64, bool)>,
    ram_bytes: Option<u64>,
) -> Vec<Work> {
    let shifted = |work| match work {
        Work::Batch(range) => Work::Batch(range.start + first..range.end + first),
        Work::Pieces(index) => Work::Pieces(index + first),
    };
    batches(tensors.skip(first), ram_bytes).into_iter().map(shifted).collect()
}

/// Bounds the bytes in flight between threads.
#[derive(Debug)]
pub(crate) struct Gate {
    limit: u64,
    used: Mutex<u64>,
    changed: Condvar,
    opened: AtomicBool,
}

impl Gate {
    pub(crate) fn new(ram_bytes: Option<u64>) -> Self {
        Self {
            limit: ram_bytes.unwrap_or(DEFAULT_RAM_BYTES),
            used: Mutex::new(0),
            changed: Condvar::new(),
            opened: AtomicBool::new(false),
        }
    }

    /// Bytes that may be in flight.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Waits until `bytes` fit; what exceeds the limit by itself waits until it is alone.
    pub(crate) fn enter(&self, bytes: u64) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        while *used > 0 && used.saturating_add(bytes) > self.limit && !self.opened.load(Ordering::Relaxed) {
            used = self.changed.wait(used).unwrap_or_else(PoisonError::into_inner);
        }
        *used = used.saturating_add(bytes);
    }

    /// Lets everyone through from now on: nothing more will be worked on.
    pub(crate) fn open(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = 0;
        self.opened.store(true, Ordering::Relaxed);
        self.changed.notify_all();
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
        use Work::{Batch, Pieces};
        let sizes = [1u64, 2, 64 << 20, 1, 63 << 20, 2 << 20, 0];
        let coded = |sizes: &[u64], ram| {
            let work = batches(sizes.iter().map(|&bytes| (bytes, false)), ram);
            work.into_iter().map(|work| if let Batch(range) = work { range } else { panic!() }).collect::<Vec<_>>()
        };
        assert_eq!(coded(&sizes, None), [0..2, 2..3, 3..5, 5..7]);
        assert!(coded(&[], None).is_empty());
        assert_eq!(coded(&[5, 5], Some(4)), [0..1, 1..2]);
        let raw = [(1, true), (u64::MAX, true), (RAW_WHOLE_MAX, true), (1, false)];
        assert_eq!(batches(raw.into_iter(), None), [Batch(0..1), Pieces(1), Batch(2..3), Batch(3..4)]);
        assert_eq!(batches_from(1, raw.into_iter(), None), [Pieces(1), Batch(2..3), Batch(3..4)]);
        assert_eq!(batches_from(4, raw.into_iter(), None), []);
    }

    #[test]
    fn gate_bounds_memory_without_blocking_a_single_item() {
        let gate = Gate::new(Some(10));
        gate.enter(100);
        thread::scope(|scope| {
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
