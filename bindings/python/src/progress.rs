//! Runs long work on another thread with the GIL released; the calling thread reports progress and handles signals.

use std::{
    io,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use pyo3::prelude::*;
use unweight_format::bundle::{BundleError, Progress};

use crate::error::{no_threads, panicked, raised};

/// The interval of checks for signals and of calls of the callback.
const PERIOD: Duration = Duration::from_millis(100);

/// The progress that the work has reported so far.
#[derive(Default)]
struct State {
    total: AtomicU64,
    done: AtomicU64,
    names: Mutex<(String, String)>,
    cancelled: AtomicBool,
}

impl Progress for State {
    fn start(&self, total_bytes: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total_bytes, Ordering::Relaxed);
    }

    fn file(&self, name: &str) {
        if let Ok(mut names) = self.names.lock() {
            names.0 = name.to_owned();
        }
    }

    fn tensor(&self, name: &str) {
        if let Ok(mut names) = self.names.lock() {
            names.1 = name.to_owned();
        }
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

impl State {
    fn report(&self, py: Python<'_>, callback: &Py<PyAny>) -> PyResult<()> {
        let (file, tensor) = self.names.lock().map(|names| names.clone()).unwrap_or_default();
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
        let progress = py.import("unweight")?.getattr("Progress")?.call1((done, total, file, tensor))?;
        callback.call1(py, (progress,)).map(drop)
    }
}

/// Runs `work` to its end. A signal or an exception in the callback cancels it. That exception is raised once the work
/// has stopped; its `__cause__` is the error of the work, which says what is kept, and where.
pub fn run_with_progress<T: Send>(
    py: Python<'_>,
    callback: Option<&Py<PyAny>>,
    work: impl FnOnce(&dyn Progress) -> Result<T, BundleError> + Send,
) -> PyResult<T> {
    let state = State::default();
    let outcome = py.detach(|| {
        thread::scope(|scope| {
            let (send, receive) = mpsc::sync_channel(1);
            let state = &state;
            let worker = thread::Builder::new().spawn_scoped(scope, move || send.send(work(state)))?;
            let mut exception = None;
            loop {
                match receive.recv_timeout(PERIOD) {
                    Ok(result) => return Ok((Some(result), exception)),
                    Err(RecvTimeoutError::Disconnected) => {
                        // The worker panicked. Joining it here keeps the scope from panicking as well.
                        let _ = worker.join();
                        return Ok((None, exception));
                    }
                    Err(RecvTimeoutError::Timeout) if exception.is_some() => {}
                    Err(RecvTimeoutError::Timeout) => {
                        let step = Python::attach(|py| {
                            py.check_signals()?;
                            callback.map_or(Ok(()), |callback| state.report(py, callback))
                        });
                        if let Err(error) = step {
                            state.cancelled.store(true, Ordering::Relaxed);
                            exception = Some(error);
                        }
                    }
                }
            }
        })
    });
    let (result, exception) = outcome.map_err(|error: io::Error| no_threads(py, &error))?;
    let result = result.ok_or_else(panicked)?;
    if let Some(exception) = exception {
        if let Err(error) = &result {
            exception.set_cause(py, Some(raised(py, error)));
        }
        return Err(exception);
    }
    let value = result.map_err(|error| raised(py, &error))?;
    if let Some(callback) = callback {
        state.report(py, callback)?;
    }
    Ok(value)
}
