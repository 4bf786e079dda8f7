//! Recorded work.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::CudaGraph;

use crate::device::{Call, DeviceError};

/// Captured work that can be launched again, on the stream that captured it.
///
/// The memory that it names must be alive when it runs; what enqueues into a capture says so.
pub struct Graph(Mutex<CudaGraph>);

// SAFETY: the driver lets any thread use a graph as long as no two do at the same time; the mutex sees to that.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    pub(super) fn new(graph: CudaGraph) -> Self {
        Self(Mutex::new(graph))
    }

    /// Enqueues the captured work.
    ///
    /// # Safety
    /// Every buffer and context that the captured work reads or writes is still alive, and no other stream works with
    /// them meanwhile. Kernels need no care: they stay loaded for the life of the process
    /// ([`LoadedKernel`](crate::device::module::LoadedKernel)).
    pub unsafe fn launch(&self) -> Result<(), DeviceError> {
        let graph = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        graph.launch().call("launching a graph")
    }
}
