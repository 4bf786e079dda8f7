//! The GPU: what it is, its memory, its streams, and the kernels that are loaded on it.
//!
//! ```text
//! device   the CUDA context; the only place that decides which architecture a device has
//! stream   work in order, events, recording    graph   work that was recorded
//! buffer   [T] on the device                   view    matrices inside buffers, or in borrowed memory
//! module   a cubin that the driver has taken   launch  one launch              kernels   all of a device, by variant
//! tma      what the copy engine sees           context_size   how much memory launches of one stream share
//! pinned   host memory for copies that run while the host continues          staging   uploads through it
//! ```
//! Nothing is touched before [`Device::open`], which looks for the driver first: cudarc panics where libcuda is
//! missing, and here that is an error.
//!
//! Memory comes from `cuMemAlloc` (256-byte aligned) and goes back with `cuMemFree`, which waits for work that still
//! uses it; so a buffer may be dropped while a kernel runs, and no part of a buffer belongs to a stream. It is slow:
//! allocate when loading.

pub mod buffer;
pub mod context_size;
#[expect(clippy::module_inception, reason = "the room and what it is named for")]
pub mod device;
pub mod error;
pub mod external;
pub mod graph;
pub mod kernels;
pub mod launch;
pub mod module;
pub mod pinned;
pub mod raw;
pub mod staging;
pub mod stream;
pub mod tma;
pub mod view;

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

use cudarc::driver::DriverError;

/// Names the call that a driver status belongs to.
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
