//! Progress and cancellation of long work.

/// Receives progress, and may stop the work. Its methods are called from several threads.
pub trait Progress: Sync {
    /// Work on this number of bytes (of the original files) starts.
    fn start(&self, total_bytes: u64) {
        let _ = total_bytes;
    }
    /// The interrupted run cannot be resumed, for this reason; all work is repeated.
    fn starts_over(&self, reason: &str) {
        let _ = reason;
    }
    /// Work on a file starts.
    fn file(&self, name: &str) {
        let _ = name;
    }
    /// Work on a tensor starts.
    fn tensor(&self, name: &str) {
        let _ = name;
    }
    /// This number of further bytes is done.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }
    /// Whether to stop the work with [`BundleError::Interrupted`](super::BundleError::Interrupted) at the next tensor.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Ignores progress and never stops the work.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}
