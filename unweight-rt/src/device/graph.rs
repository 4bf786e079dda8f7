//! CUDA graphs: captured work.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::CudaGraph;

use crate::device::{Call, DeviceError};

/// Captured work that can be launched again, on the stream that captured it.
///
/// The memory that it uses must be alive when it runs; functions that enqueue into a capture state this.
pub struct Graph(Mutex<CudaGraph>);

// SAFETY: the driver lets any thread use a graph if no two do so at once; the mutex ensures that.
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
    /// Every buffer and context that the captured work reads or writes is still alive, and no other stream uses them
    /// meanwhile. Kernels stay loaded for the life of the process
    /// ([`LoadedKernel`](crate::device::module::LoadedKernel)).
    pub unsafe fn launch(&self) -> Result<(), DeviceError> {
        let graph = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        graph.launch().call("launching a graph")
    }
}
