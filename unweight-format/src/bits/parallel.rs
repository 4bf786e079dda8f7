//! Parallel loops on the current rayon pool.
//!
//! Rayon's iterators are generic over items and closures, so each loop compiles a scheduler of its own: 5,000 lines of
//! LLVM IR, for 60 loops a quarter of this crate. Here the only one is that of [`run`]; the generic functions just pass
//! items to it. An item must be worth a lock and an indirect call: tens of kilobytes.

use std::{
    iter,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use rayon::prelude::*;

/// Calls a function with each index below `count`.
pub(crate) fn run(count: usize, function: &(dyn Fn(usize) + Sync)) {
    match count {
        // Without a pool.
        0 | 1 => (0..count).for_each(function),
        _ => (0..count).into_par_iter().for_each(function),
    }
}

/// Calls a function with each item.
pub(crate) fn for_each<T: Send>(items: impl IntoIterator<Item = T>, function: impl Fn(T) + Sync) {
    let items: Vec<_> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    run(items.len(), &|index| {
        if let Some(item) = lock(&items[index]).take() {
            function(item);
        }
    });
}

/// Calls a function with each item. Returns the results in the order of the items.
pub(crate) fn map<T: Send, R: Send>(items: impl IntoIterator<Item = T>, function: impl Fn(T) -> R + Sync) -> Vec<R> {
    let items: Vec<_> = items.into_iter().map(|item| Mutex::new((Some(item), None))).collect();
    run(items.len(), &|index| {
        let (item, result) = &mut *lock(&items[index]);
        *result = item.take().map(&function);
    });
    items.into_iter().filter_map(|item| item.into_inner().unwrap_or_else(PoisonError::into_inner).1).collect()
}

/// Like [`map`]. After an error, no item behind its item starts.
///
/// # Errors
/// The error of the first item that fails, in the order of the items.
pub(crate) fn try_map<T: Send, R: Send, E: Send>(
    items: impl IntoIterator<Item = T>,
    function: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let failed = FirstError::new();
    let results = map(iter::zip(0.., items), |(index, item)| failed.attempt(index, || function(item)));
    failed.into_result().map(|()| results.into_iter().flatten().collect())
}

/// Calls a function with the index and the bytes of each chunk of `bytes` bytes; the last one may be shorter.
pub(crate) fn for_each_chunk(out: &mut [u8], bytes: usize, function: &(dyn Fn(usize, &mut [u8]) + Sync)) {
    let chunks: Vec<_> = out.chunks_mut(bytes).map(Mutex::new).collect();
    run(chunks.len(), &|index| function(index, &mut lock(&chunks[index])));
}

/// Like [`for_each_chunk`]. After an error, no chunk behind its chunk starts.
///
/// # Errors
/// The error of the first chunk that fails, in the order of the chunks.
pub(crate) fn try_for_each_chunk<E: Send>(
    out: &mut [u8],
    bytes: usize,
    function: impl Fn(usize, &mut [u8]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let failed = FirstError::new();
    for_each_chunk(out, bytes, &|index, chunk| {
        failed.attempt(index, || function(index, chunk));
    });
    failed.into_result()
}

/// Calls a function with each index below `tasks`, and with counters of which it increments some. Returns the sum of
/// each counter.
pub(crate) fn count(tasks: usize, counters: usize, function: &(dyn Fn(usize, &mut [u64]) + Sync)) -> Vec<u64> {
    let sums = Mutex::new(vec![0; counters]);
    run(tasks, &|index| {
        let mut counts = vec![0; counters];
        function(index, &mut counts);
        lock(&sums).iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    });
    sums.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Locks what no panic leaves half changed: a panic ends the loop.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The error of the first of several items that fails.
struct FirstError<E> {
    /// Index of the failed item, or `usize::MAX`.
    index: AtomicUsize,
    error: Mutex<Option<E>>,
}

impl<E> FirstError<E> {
    fn new() -> Self {
        Self { index: AtomicUsize::new(usize::MAX), error: Mutex::new(None) }
    }

    /// Does the work of an item, unless an item before it has failed. `None` if it was not done or fails.
    fn attempt<R>(&self, index: usize, work: impl FnOnce() -> Result<R, E>) -> Option<R> {
        if index > self.index.load(Ordering::Relaxed) {
            return None;
        }
        match work() {
            Ok(result) => Some(result),
            Err(error) => {
                self.add(index, error);
                None
            }
        }
    }

    fn add(&self, index: usize, error: E) {
        let mut first = lock(&self.error);
        if index < self.index.load(Ordering::Relaxed) {
            self.index.store(index, Ordering::Relaxed);
            *first = Some(error);
        }
    }

    fn into_result(self) -> Result<(), E> {
        self.error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `work` on pools of one and of several threads.
    fn on_pools(work: impl Fn() + Sync) {
        for threads in [1, 4] {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool").install(&work);
        }
    }

    #[test]
    fn results_have_the_order_of_the_items() {
        on_pools(|| {
            for count in [0, 1, 2, 1000] {
                let expected: Vec<usize> = (0..count).map(|i| i * i).collect();
                assert_eq!(map(0..count, |i| i * i), expected);
                assert_eq!(try_map(0..count, |i| Ok::<_, ()>(i * i)), Ok(expected));
                let mut items = vec![0; count];
                for_each(items.iter_mut().enumerate(), |(i, item)| *item += i + 1);
                assert!(items.iter().enumerate().all(|(i, &item)| item == i + 1));
            }
        });
    }

    #[test]
    fn chunks_are_those_of_the_standard_library() {
        on_pools(|| {
            for (len, bytes) in [(0, 1), (1, 1), (999, 10), (1000, 10), (7, 8)] {
                let (mut out, mut expected) = (vec![0; len], vec![0; len]);
                for_each_chunk(&mut out, bytes, &|i, chunk| chunk.fill((i + chunk.len()) as u8));
                expected.chunks_mut(bytes).enumerate().for_each(|(i, chunk)| chunk.fill((i + chunk.len()) as u8));
                assert_eq!(out, expected);
            }
        });
    }

    #[test]
    fn counts_are_added() {
        on_pools(|| {
            let sums = count(100, 7, &|index, counts| counts[index % 7] += index as u64);
            assert_eq!(sums.iter().sum::<u64>(), 4950);
            assert_eq!(sums[6], (6..100).step_by(7).sum::<usize>() as u64);
        });
    }

    #[test]
    fn the_first_error_is_returned_and_what_is_before_it_runs() {
        on_pools(|| {
            for _ in 0..20 {
                let ran: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
                let fails = |index: usize| {
                    ran[index].fetch_add(1, Ordering::Relaxed);
                    if index % 300 == 299 { Err(index) } else { Ok(index) }
                };
                assert_eq!(try_map(0..1000, fails), Err(299));
                assert!(ran[..300].iter().all(|ran| ran.load(Ordering::Relaxed) == 1));
                assert!(ran.iter().all(|ran| ran.load(Ordering::Relaxed) <= 1));
                let result = try_for_each_chunk(&mut [0; 5000], 5, |index, _| fails(index).map(drop));
                assert_eq!(result, Err(299));
            }
        });
    }

    #[test]
    fn a_panic_is_passed_on() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool");
        let run = || pool.install(|| map(0..100, |i| assert_ne!(i, 50, "item 50")));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).expect_err("it panics");
        assert!(panic.downcast_ref::<String>().is_some_and(|text| text.contains("item 50")));
    }
}
