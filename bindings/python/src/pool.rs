//! The threads that bundles are read and weights are packed on.
//!
//! Python forks: workers of a `DataLoader`, `multiprocessing`. A child has the memory of its parent, but not its
//! threads, and would wait for them for ever. So the pool knows its process, and a child makes its own: Python tells of
//! its forks, and what forks without Python has another number, unless it is in another namespace of them.

use std::{
    num::NonZero,
    process,
    sync::atomic::{AtomicPtr, Ordering},
    thread,
};

use pyo3::{prelude::*, types::PyDict};
use rayon::ThreadPool;

use crate::error::no_threads;

/// The newest pool and its process. No lock: one that another thread held at a fork would stay locked.
static POOL: AtomicPtr<(u32, ThreadPool)> = AtomicPtr::new(std::ptr::null_mut());

/// A child of a fork has no pool. Its number may be its parent's: the first process of a container, say.
#[pyfunction]
fn forget() {
    // The parent's stays as it is there; here it is leaked.
    POOL.store(std::ptr::null_mut(), Ordering::Release);
}

/// Has Python call [`forget`] in each child.
pub fn follow_forks(py: Python<'_>) -> PyResult<()> {
    let after = PyDict::new(py);
    after.set_item("after_in_child", wrap_pyfunction!(forget, py)?)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&after)).map(drop)
}

/// How many threads a pool has, and other work that is not told how many.
pub fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Runs `work` on the pool of this process, without the interpreter.
pub fn on_pool<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| Ok(of_process()?.install(work))).map_err(|error: rayon::ThreadPoolBuildError| no_threads(py, &error))
}

fn of_process() -> Result<&'static ThreadPool, rayon::ThreadPoolBuildError> {
    let known = POOL.load(Ordering::Acquire);
    // SAFETY: what is stored is leaked and never changed.
    match unsafe { known.as_ref() } {
        Some((process, pool)) if *process == process::id() => return Ok(pool),
        _ => {}
    }
    let builder = rayon::ThreadPoolBuilder::new().num_threads(processors()).thread_name(|i| format!("unweight-{i}"));
    let new = Box::into_raw(Box::new((process::id(), builder.build()?)));
    match POOL.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire) {
        // A parent's pool has no threads here to be stopped, and stays.
        // SAFETY: it was made above, and is leaked now.
        Ok(_) => Ok(unsafe { &(*new).1 }),
        Err(other) => {
            // SAFETY: it was made above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: what is stored is leaked; another thread of this process has stored it since.
            Ok(unsafe { &(*other).1 })
        }
    }
}
