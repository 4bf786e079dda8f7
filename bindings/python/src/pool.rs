//! The thread pool that reads bundles and packs weights.
//!
//! Python programs fork (`DataLoader` workers, `multiprocessing`). A child has its parent's memory but not its threads,
//! and would wait for them forever. So each process makes its own pool. Python calls [`forget`] in a child; a fork
//! outside of Python is found by its pid, unless it has the same pid in another pid namespace.

use std::{
    num::NonZero,
    process,
    sync::atomic::{AtomicPtr, Ordering},
    thread,
};

use pyo3::{prelude::*, types::PyDict};
use rayon::ThreadPool;

use crate::error::no_threads;

/// The newest pool and the pid of its process. Not in a mutex: one that is locked during a fork stays so in the child.
static POOL: AtomicPtr<(u32, ThreadPool)> = AtomicPtr::new(std::ptr::null_mut());

/// Drops the parent's pool in a forked child. Comparing pids is not enough: both may be process 1 of a container.
#[pyfunction]
fn forget() {
    // The parent keeps its pool; the child leaks its copy.
    POOL.store(std::ptr::null_mut(), Ordering::Release);
}

/// Registers [`forget`] with `os.register_at_fork`, to run in each child.
pub fn follow_forks(py: Python<'_>) -> PyResult<()> {
    let after = PyDict::new(py);
    after.set_item("after_in_child", wrap_pyfunction!(forget, py)?)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&after)).map(drop)
}

/// The number of threads of the pool, and of work whose caller does not set one.
pub fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Runs `work` on the pool of this process with the GIL released.
pub fn on_pool<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| Ok(process_pool()?.install(work))).map_err(|error: rayon::ThreadPoolBuildError| no_threads(py, &error))
}

fn process_pool() -> Result<&'static ThreadPool, rayon::ThreadPoolBuildError> {
    let stored = POOL.load(Ordering::Acquire);
    // SAFETY: a stored pool is leaked and never changed.
    match unsafe { stored.as_ref() } {
        Some((process, pool)) if *process == process::id() => return Ok(pool),
        _ => {}
    }
    let builder = rayon::ThreadPoolBuilder::new().num_threads(processors()).thread_name(|i| format!("unweight-{i}"));
    let new = Box::into_raw(Box::new((process::id(), builder.build()?)));
    match POOL.compare_exchange(stored, new, Ordering::AcqRel, Ordering::Acquire) {
        // A replaced pool is the parent's: it has no threads in this process, and is leaked.
        // SAFETY: `new` was made above, and is leaked now.
        Ok(_) => Ok(unsafe { &(*new).1 }),
        Err(other) => {
            // SAFETY: `new` was made above and never stored.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: another thread of this process has stored `other`; a stored pool is leaked.
            Ok(unsafe { &(*other).1 })
        }
    }
}
