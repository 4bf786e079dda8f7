//! GPUs: properties, memory, streams and loaded kernels.
//!
//! ```text
//! device   a GPU with its CUDA context; determines its architecture
//! stream   work in order, events, captures     graph   captured work
//! buffer   [T] on the device                   view    matrices inside buffers, or in borrowed memory
//! module   a cubin loaded by the driver        launch  one launch              kernels   all of a device, by variant
//! tma      tensor maps of the copy engine      context_size   the memory that launches of one stream share
//! pinned   host memory for copies that run while the host continues          staging   uploads through it
//! copies   copies of pageable memory through it, by several threads
//! pinned_pool  host memory that is kept and lent in ranges             ranges    free and lent ranges, pieces
//! ```
//! Nothing uses the driver before [`Device::open`], which searches for it first: cudarc panics if libcuda is missing,
//! while this crate returns an error.
//!
//! Memory comes from `cuMemAlloc` (256-byte aligned) and is freed with `cuMemFree`, which waits for work that still
//! uses it. So a buffer may be dropped while a kernel runs, and no buffer belongs to a stream. Allocation is slow:
//! allocate when loading.

pub mod buffer;
pub mod context_size;
pub(crate) mod copies;
#[expect(clippy::module_inception, reason = "the module is named after its type")]
pub mod device;
pub mod error;
pub mod external;
pub mod graph;
pub mod kernels;
pub mod launch;
pub mod module;
pub mod pinned;
pub(crate) mod pinned_pool;
pub(crate) mod ranges;
pub mod raw;
pub mod staging;
pub mod stream;
pub mod tma;
pub mod view;

#[doc(hidden)]
pub use self::pinned_pool::{HostMemory, PinnedBuffer};
pub use self::{
    buffer::DeviceBuffer,
    context_size::ContextSize,
    device::{Device, DeviceInfo},
    error::{DeviceError, LaunchError, RowFault},
    external::ExternalKernel,
    graph::Graph,
    kernels::{KernelSet, Prepared},
    pinned::{Pinned, Transfer},
    staging::{Staging, Upload},
    stream::{Event, LaunchMode, Mark, Stream},
    view::{MatrixMut, MatrixRef},
};

pub(crate) use self::copies::Copier;

use cudarc::driver::DriverError;

/// Adds the name of the failed call to a driver status.
pub(crate) trait Call<T> {
    fn call(self, call: &'static str) -> Result<T, DeviceError>;
}

impl<T> Call<T> for Result<T, DriverError> {
    fn call(self, call: &'static str) -> Result<T, DeviceError> {
        self.map_err(|error| DeviceError::Driver {
            call,
            code: error.0 as u32,
            text: match (error.error_name(), error.error_string()) {
                (Ok(name), Ok(text)) => format!("{} ({})", text.to_string_lossy(), name.to_string_lossy()),
                _ => format!("driver status {}", error.0 as u32),
            },
        })
    }
}
