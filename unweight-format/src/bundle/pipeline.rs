//! Shared by compressing, decompressing and verifying: threads, batches of tensors, and a bound on the bytes in flight.

use std::{
    collections::VecDeque,
    io,
    num::NonZero,
    ops::Range,
    sync::{
        Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
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
    let (mut work, mut result) = (Some(work), None);
    install(threads, &mut || result = work.take().map(|work| work()))?;
    result.expect("a pool runs what is installed")
}

/// Does the work of [`on_threads`], compiled once for all types.
fn install(threads: Option<usize>, work: &mut (dyn FnMut() + Send)) -> Result<(), BundleError> {
    static SHARED: OnceLock<rayon::ThreadPool> = OnceLock::new();
    match threads {
        Some(threads) => pool(threads.max(1))?.install(work),
        None => match SHARED.get() {
            Some(shared) => shared.install(work),
            None => {
                let new = pool(thread::available_parallelism().map_or(1, NonZero::get))?;
                SHARED.get_or_init(|| new).install(work);
            }
        },
    }
    Ok(())
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

/// Executes tasks of the current pool until `done`. A pool may have only this thread, so it must not sleep while others
/// wait for tasks.
pub(crate) fn help_until(done: impl Fn() -> bool) {
    const PAUSE: Duration = Duration::from_millis(1);
    while !done() {
        if !matches!(rayon::yield_now(), Some(rayon::Yield::Executed)) {
            thread::sleep(PAUSE);
        }
    }
}

/// What is read at once: consecutive tensors that are processed together, or one that is copied in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReadUnit {
    /// Tensors in memory.
    Batch(Range<usize>),
    /// The index of a raw tensor above [`RAW_WHOLE_MAX`].
    Pieces(usize),
}

impl ReadUnit {
    /// The indices of its tensors.
    pub(crate) fn tensors(&self) -> Range<usize> {
        match self {
            Self::Batch(range) => range.clone(),
            Self::Pieces(index) => *index..*index + 1,
        }
    }
}

/// Maximum bytes in flight.
pub(crate) fn ram_bytes(requested: Option<u64>) -> u64 {
    requested.unwrap_or(DEFAULT_RAM_BYTES)
}

/// Maximum bytes of a batch of more than one tensor.
pub(crate) fn batch_bytes_max(requested: Option<u64>) -> u64 {
    BATCH_BYTES.min(ram_bytes(requested) / 4)
}

/// Divides a sequence of (bytes, is raw) into batches of at most `limit` bytes, or of one tensor.
pub(crate) fn read_units(tensors: impl Iterator<Item = (u64, bool)>, limit: u64) -> Vec<ReadUnit> {
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
pub(crate) fn read_units_from(first: usize, tensors: impl Iterator<Item = (u64, bool)>, limit: u64) -> Vec<ReadUnit> {
    let shifted = |unit| match unit {
        ReadUnit::Batch(range) => ReadUnit::Batch(range.start + first..range.end + first),
        ReadUnit::Pieces(index) => ReadUnit::Pieces(index + first),
    };
    read_units(tensors.skip(first), limit).into_iter().map(shifted).collect()
}

/// The order in which the units of several sequences are read: units of `at_once` sequences alternate, and the next
/// sequence begins where one ends. Each unit comes with the index of its sequence.
pub(crate) fn alternate(sequences: Vec<Vec<ReadUnit>>, at_once: usize) -> Vec<(usize, ReadUnit)> {
    let mut waiting = sequences.into_iter().map(Vec::into_iter).enumerate();
    let mut begun: VecDeque<_> = waiting.by_ref().take(at_once).collect();
    let mut order = Vec::new();
    while let Some((index, mut units)) = begun.pop_front() {
        match units.next() {
            Some(unit) => {
                order.push((index, unit));
                begun.push_back((index, units));
            }
            None => begun.extend(waiting.next()),
        }
    }
    order
}

/// Bounds the bytes in flight between threads, and keeps buffers for reuse within that bound. Threads are admitted in
/// the order in which they ask, so none of them takes all bytes that become free.
#[derive(Debug)]
pub(crate) struct ByteBudget {
    limit: u64,
    held: Mutex<Held>,
    changed: Condvar,
    released_all: AtomicBool,
}

#[derive(Debug, Default)]
struct Held {
    /// Bytes in flight, those of idle buffers included.
    bytes: u64,
    idle: Vec<Vec<u8>>,
    /// The number of requests so far, and of those that were admitted.
    requests: u64,
    admitted: u64,
}

impl Held {
    /// Returns the request's place in the order.
    fn queue(&mut self) -> u64 {
        self.requests += 1;
        self.requests - 1
    }
}

impl ByteBudget {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, held: Mutex::default(), changed: Condvar::new(), released_all: AtomicBool::new(false) }
    }

    /// Maximum bytes in flight.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether `bytes` more fit if `own` of the bytes in flight are those of the caller. More than the limit fits only
    /// alone.
    fn fits(&self, held: &Held, own: u64, bytes: u64) -> bool {
        held.bytes <= own || held.bytes.saturating_add(bytes) <= self.limit || self.released_all.load(Ordering::Relaxed)
    }

    /// Whether it is the turn of a request.
    fn is_next(&self, held: &Held, request: u64) -> bool {
        held.admitted == request || self.released_all.load(Ordering::Relaxed)
    }

    /// Adds the bytes of the request whose turn it is.
    fn admit(&self, held: &mut Held, bytes: u64) {
        held.bytes = held.bytes.saturating_add(bytes);
        held.admitted += 1;
        self.changed.notify_all();
    }

    /// Waits until `bytes` fit. More than the limit waits until nothing else is in flight. Drops idle buffers that take
    /// up the room.
    pub(crate) fn acquire(&self, bytes: u64) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let request = held.queue();
        loop {
            let is_next = self.is_next(&held, request);
            if is_next && self.fits(&held, 0, bytes) {
                return self.admit(&mut held, bytes);
            }
            match held.idle.pop() {
                Some(buffer) if is_next => held.bytes = held.bytes.saturating_sub(buffer.len() as u64),
                kept => {
                    held.idle.extend(kept);
                    held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Waits until a buffer of `bytes` bytes and `more` bytes fit. Returns a buffer that was given back, or an empty
    /// one, which the caller replaces by one of `bytes` bytes.
    pub(crate) fn acquire_buffer(&self, bytes: u64, more: u64) -> Vec<u8> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let request = held.queue();
        loop {
            if !self.is_next(&held, request) {
                held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let fitting = held.idle.iter().enumerate().filter(|(_, buffer)| buffer.len() as u64 >= bytes);
            let found = fitting.min_by_key(|(_, buffer)| buffer.len()).map(|(at, buffer)| (at, buffer.len() as u64));
            let (own, needed) = found.map_or((0, bytes.saturating_add(more)), |(_, own)| (own, more));
            if self.fits(&held, own, needed) {
                self.admit(&mut held, needed);
                return found.map_or_else(Vec::new, |(at, _)| held.idle.swap_remove(at));
            }
            // Another idle buffer takes up room that is needed now.
            match (0..held.idle.len()).find(|at| found.is_none_or(|(found, _)| found != *at)) {
                Some(at) => {
                    let buffer = held.idle.swap_remove(at);
                    held.bytes = held.bytes.saturating_sub(buffer.len() as u64);
                }
                None => held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Gives a buffer back, whose bytes stay counted until it is reused or dropped.
    pub(crate) fn give_back(&self, buffer: Vec<u8>) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.idle.push(buffer);
        self.changed.notify_all();
    }

    /// Admits all waiting and future threads: the work ends early, and what is in flight may not be released.
    pub(crate) fn release_all(&self) {
        self.released_all.store(true, Ordering::Relaxed);
        // Locked, so that a thread that has just looked at the flag waits before it is woken.
        drop(self.held.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Returns a guard that admits all waiting and future threads when it is dropped. The thread that releases bytes
    /// holds it, so that no other thread waits forever after a panic.
    pub(crate) fn release_all_on_drop(&self) -> ReleaseAllOnDrop<'_> {
        ReleaseAllOnDrop(self)
    }

    /// Releases bytes.
    pub(crate) fn release(&self, bytes: u64) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.bytes = held.bytes.saturating_sub(bytes);
        self.changed.notify_all();
    }
}

/// See [`ByteBudget::release_all_on_drop`].
pub(crate) struct ReleaseAllOnDrop<'a>(&'a ByteBudget);

impl Drop for ReleaseAllOnDrop<'_> {
    fn drop(&mut self) {
        self.0.release_all();
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
            let units = read_units(sizes.iter().map(|&bytes| (bytes, false)), batch_bytes_max(ram));
            units.into_iter().map(|unit| if let Batch(range) = unit { range } else { panic!() }).collect::<Vec<_>>()
        };
        assert_eq!(coded(&sizes, None), [0..2, 2..3, 3..5, 5..7]);
        assert!(coded(&[], None).is_empty());
        assert_eq!(coded(&[5, 5], Some(4)), [0..1, 1..2]);
        let raw = [(1, true), (u64::MAX, true), (RAW_WHOLE_MAX, true), (1, false)];
        assert_eq!(read_units(raw.into_iter(), BATCH_BYTES), [Batch(0..1), Pieces(1), Batch(2..3), Batch(3..4)]);
        assert_eq!(read_units_from(1, raw.into_iter(), BATCH_BYTES), [Pieces(1), Batch(2..3), Batch(3..4)]);
        assert_eq!(read_units_from(4, raw.into_iter(), BATCH_BYTES), []);
    }

    #[test]
    fn units_of_several_sequences_alternate() {
        use ReadUnit::Pieces;
        let sequence = |range: Range<usize>| range.map(Pieces).collect::<Vec<_>>();
        let order = |sequences: Vec<_>, at_once| {
            let index = |(index, unit)| if let Pieces(at) = unit { (index, at) } else { panic!() };
            alternate(sequences, at_once).into_iter().map(index).collect::<Vec<_>>()
        };
        let sequences = || vec![sequence(0..3), sequence(0..1), sequence(0..0), sequence(5..7)];
        assert_eq!(order(sequences(), 2), [(0, 0), (1, 0), (0, 1), (0, 2), (3, 5), (3, 6)]);
        assert_eq!(order(sequences(), 1), [(0, 0), (0, 1), (0, 2), (1, 0), (3, 5), (3, 6)]);
        assert_eq!(order(Vec::new(), 4), []);
    }

    /// A large request is not overtaken by later small ones, which would fit earlier.
    #[test]
    fn requests_are_admitted_in_order() {
        let budget = ByteBudget::new(10);
        budget.acquire(5);
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            let (budget, order) = (&budget, &order);
            let queued = |count| help_until(|| budget.held.lock().unwrap().requests == count);
            let ask = |bytes| {
                budget.acquire(bytes);
                order.lock().unwrap().push(bytes);
                budget.release(bytes);
            };
            scope.spawn(move || ask(8));
            queued(2);
            // Fits next to 5 bytes but not next to 8, so it is last.
            scope.spawn(move || ask(3));
            queued(3);
            assert!(order.lock().unwrap().is_empty());
            budget.release(5);
        });
        assert_eq!(order.into_inner().unwrap(), [8, 3]);
    }

    #[test]
    fn budget_bounds_memory_without_blocking_a_single_item() {
        let budget = ByteBudget::new(10);
        budget.acquire(100);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                budget.acquire(4);
                budget.acquire(6);
                budget.held.lock().unwrap().bytes
            });
            budget.release(100);
            assert_eq!(waiting.join().unwrap(), 10);
        });
    }

    #[test]
    fn idle_buffers_count_and_make_room() {
        let budget = ByteBudget::new(100);
        let held = || budget.held.lock().unwrap().bytes;
        assert!(budget.acquire_buffer(30, 20).is_empty());
        budget.give_back(vec![0; 30]);
        budget.release(20);
        assert_eq!(held(), 30);
        // Reused, also for less.
        assert_eq!(budget.acquire_buffer(25, 25).len(), 30);
        assert_eq!(held(), 55);
        budget.give_back(vec![0; 30]);
        // Too small, but there is room for both.
        assert!(budget.acquire_buffer(40, 5).is_empty());
        assert_eq!((held(), budget.held.lock().unwrap().idle.len()), (100, 1));
        // Too small and in the way.
        budget.release(45);
        assert!(budget.acquire_buffer(40, 20).is_empty());
        assert_eq!((held(), budget.held.lock().unwrap().idle.len()), (85, 0));
        // More than the limit: alone with its own idle buffer.
        budget.give_back(vec![0; 40]);
        budget.release(45);
        assert_eq!(budget.acquire_buffer(40, 1000).len(), 40);
    }

    /// Idle buffers make room for bytes without a buffer, too: they would take it up forever.
    #[test]
    fn idle_buffers_make_room_for_plain_bytes() {
        let budget = ByteBudget::new(100);
        let held = || {
            let held = budget.held.lock().unwrap();
            (held.bytes, held.idle.len())
        };
        for _ in 0..3 {
            assert!(budget.acquire_buffer(30, 0).is_empty());
        }
        (0..3).for_each(|_| budget.give_back(vec![0; 30]));
        budget.acquire(10);
        assert_eq!(held(), (100, 3));
        budget.acquire(31);
        assert_eq!(held(), (71, 1));
        budget.release(41);
        budget.acquire(1000);
        assert_eq!(held(), (1000, 0));
    }

    /// A buffer that is given back while a thread waits makes room for it.
    #[test]
    fn a_returned_buffer_wakes_the_waiting_thread() {
        let budget = ByteBudget::new(100);
        assert!(budget.acquire_buffer(60, 0).is_empty());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| budget.acquire_buffer(80, 10).len());
            budget.give_back(vec![0; 60]);
            assert_eq!(waiting.join().unwrap(), 0);
        });
        assert_eq!(budget.held.lock().unwrap().bytes, 90);
    }
}
