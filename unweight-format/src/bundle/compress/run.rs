//! What the threads of a run share: memory, the first error, and the order to stop.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use crate::bundle::{BundleError, pipeline::ByteBudget};

/// The state that reader, encoder, writers and verification of a run share.
pub(super) struct Run {
    pub(super) budget: ByteBudget,
    pub(super) verified_tensors: AtomicU64,
    /// Set by a failure or a panic.
    stopped: AtomicBool,
    /// The error that comes first in the source, and its place.
    failed: Mutex<Option<(Place, BundleError)>>,
}

/// The index of a shard and of a unit in it.
type Place = (usize, usize);

impl Run {
    /// The place of errors that do not belong to a unit.
    pub(super) const LAST: Place = (usize::MAX, usize::MAX);

    /// The state of a run that may hold `ram_bytes` bytes. `encoder_bytes` of them are memory of the encoder.
    pub(super) fn new(ram_bytes: u64, encoder_bytes: u64) -> Self {
        Self {
            budget: ByteBudget::new(ram_bytes.saturating_sub(encoder_bytes)),
            verified_tensors: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            failed: Mutex::default(),
        }
    }

    /// Stops the run with an error, unless one of an earlier place is known.
    pub(super) fn fail(&self, place: Place, error: BundleError) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.as_ref().is_none_or(|(earlier, _)| place < *earlier) {
            *failed = Some((place, error));
        }
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether the run ends early.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Returns `done`. If the run ends early, wakes threads that wait for memory.
    pub(super) fn has_ended(&self, done: bool) -> bool {
        if self.is_stopped() {
            self.budget.release_all();
        }
        done
    }

    /// Returns a guard that stops the run if a panic drops it: others would wait for what the thread does not do.
    pub(super) fn stop_on_panic(&self) -> StopOnPanic<'_> {
        StopOnPanic(self)
    }

    /// Returns the number of verified tensors, or the first error.
    pub(super) fn end(self) -> Result<u64, BundleError> {
        let failed = self.failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(self.verified_tensors.into_inner()), |(_, error)| Err(error))
    }
}

/// See [`Run::stop_on_panic`].
pub(super) struct StopOnPanic<'a>(&'a Run);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stopped.store(true, Ordering::Relaxed);
            self.0.budget.release_all();
        }
    }
}
