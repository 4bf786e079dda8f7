//! Progress and cancellation of long work.

/// Receives progress, and may stop the work. Its methods are called from several threads.
pub trait Progress: Sync {
    /// Work begins on this many bytes (of the original files).
    fn start(&self, total_bytes: u64) {
        let _ = total_bytes;
    }
    /// Nothing of the interrupted run can be resumed, for this reason: its work is done again.
    fn starts_over(&self, reason: &str) {
        let _ = reason;
    }
    /// Work on a file begins.
    fn file(&self, name: &str) {
        let _ = name;
    }
    /// Work on a tensor begins.
    fn tensor(&self, name: &str) {
        let _ = name;
    }
    /// This many more bytes are done.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }
    /// True stops the work with [`BundleError::Interrupted`](super::BundleError::Interrupted) at the next tensor.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Ignores progress and never stops the work.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}
