//! The GPU: what it is, its memory, its streams.
//!
//! This module owns the CUDA context and is the only place that decides which [`Arch`] a device has. It knows nothing of kernels.
//! Nothing is touched before [`Device::open`], which asks [`toolchain`] for the driver first: cudarc panics where libcuda is
//! missing, and here that is an error.
//!
//! Memory comes from `cuMemAlloc` (256-byte aligned) and goes back with `cuMemFree`, which waits for work that still uses it; so
//! a buffer may be dropped while a kernel runs, and nothing of it belongs to a stream. It is slow: allocate when loading.

pub mod launch;
pub mod module;
pub mod tma;

use std::{
    fmt,
    marker::PhantomData,
    mem::size_of,
    ptr,
    sync::{Arc, Mutex},
};

use bytemuck::Pod;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result,
    sys::{self, CUdevice_attribute_enum as Attribute},
};
use serde::Serialize;
use unweight_codegen::{CodegenError, spec::Arch};
use unweight_format::CodecError;

use crate::jit::toolchain::{self, Library};

/// Why something on the device did not happen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A library is missing, or a kernel could not be compiled or found.
    #[error(transparent)]
    Toolchain(#[from] crate::Error),
    /// A variant cannot exist or be rendered.
    #[error(transparent)]
    Codegen(#[from] CodegenError),
    /// What came back from the device, or was to go there, is no valid tensor.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The driver refused a call.
    #[error("{call}: {text}")]
    Driver {
        /// What was asked for.
        call: &'static str,
        /// The driver's status.
        code: u32,
        /// The driver's words for it.
        text: String,
    },
    /// cuBLAS refused a call.
    #[error("{call}: cuBLAS status {status}")]
    Cublas {
        /// What was asked for.
        call: &'static str,
        /// cuBLAS's status.
        status: String,
    },
    /// No kernel is made for such a device.
    #[error("{name} has compute capability {major}.{minor}; kernels exist for 9.0 (sm_90a: H100, H200, GH200) only")]
    Arch {
        /// The device's name.
        name: String,
        /// Major number of its compute capability.
        major: i32,
        /// Minor number.
        minor: i32,
    },
    /// There is no device of this number.
    #[error("device {ordinal} does not exist; this machine has {count} (CUDA_VISIBLE_DEVICES hides some)")]
    Ordinal {
        /// What was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A kernel's needs and what was given do not go together.
    #[error("{name}: {what}")]
    Launch {
        /// The variant.
        name: String,
        /// What does not fit, with both numbers.
        what: String,
    },
    /// Matrices whose shapes do not go together, or that the operation cannot take.
    #[error("{0}")]
    Shape(String),
    /// A kernel met metadata that lead out of their sections and left the tile out.
    #[error("{name}: tile {tile} has metadata that leave their section; its output is not valid, verify the bundle")]
    Fault {
        /// The variant.
        name: String,
        /// The last such tile to be reported.
        tile: u32,
    },
}

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

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// CUDA's number for it.
    pub ordinal: usize,
    /// The vendor's name.
    pub name: String,
    /// The architecture that kernels are compiled for.
    #[serde(serialize_with = "arch_name")]
    pub arch: Arch,
    /// Multiprocessors.
    pub sms: u32,
    /// Second-level cache.
    pub l2_bytes: u64,
    /// Shared memory that one block may opt in to.
    pub smem_bytes_per_block: u32,
    /// Memory of the device.
    pub memory_bytes: u64,
    /// The CUDA version that the driver supports.
    pub driver: String,
}

fn arch_name<S: serde::Serializer>(arch: &Arch, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(arch.compiler_name())
}

/// A GPU with its context. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

struct Shared {
    context: Arc<CudaContext>,
    info: DeviceInfo,
}

impl Device {
    /// How many CUDA devices the machine has.
    ///
    /// # Errors
    /// There is no usable driver.
    pub fn count() -> Result<usize, DeviceError> {
        toolchain::require(Library::Driver)?;
        result::init().call("initialising the driver")?;
        Ok(CudaContext::device_count().call("counting devices")?.unsigned_abs() as usize)
    }

    /// Opens a device: its primary context, shared with whatever else the process runs on it.
    ///
    /// # Errors
    /// No driver, no such device, or a device without kernels.
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(DeviceError::Ordinal { ordinal, count });
        }
        let driver = toolchain::require(Library::Driver)?.version.to_string();
        let context = CudaContext::new(ordinal).call("creating a context")?;
        let attribute = |attribute| context.attribute(attribute).call("reading a device attribute");
        let count_of = |which| attribute(which).map(i32::unsigned_abs);
        let name = context.name().call("reading the device's name")?;
        let (major, minor) = context.compute_capability().call("reading the compute capability")?;
        let arch = match (major, minor) {
            (9, 0) => Arch::Sm90a,
            _ => return Err(DeviceError::Arch { name, major, minor }),
        };
        let info = DeviceInfo {
            ordinal,
            name,
            arch,
            sms: count_of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: count_of(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            smem_bytes_per_block: count_of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            memory_bytes: context.total_mem().call("reading the device's memory")? as u64,
            driver,
        };
        Ok(Self(Arc::new(Shared { context, info })))
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// A new stream that does not wait for the default stream.
    pub fn stream(&self) -> Result<Stream, DeviceError> {
        let inner = self.context().new_stream().call("creating a stream")?;
        Ok(Stream { device: self.clone(), inner })
    }

    /// A stream of somebody else, as a raw `CUstream` (or `cudaStream_t`; null is the default stream).
    ///
    /// # Safety
    /// The stream belongs to this device's primary context and outlives every use of what is returned.
    pub unsafe fn borrow_stream(&self, raw: *mut std::ffi::c_void) -> Stream {
        // SAFETY: the caller's promise.
        let inner = unsafe { self.context().wrap_borrowed_stream(raw.cast()) };
        Stream { device: self.clone(), inner }
    }

    /// Waits for everything on the device.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.context().synchronize().call("waiting for the device")
    }

    /// Free and total memory, bytes.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.context().mem_get_info().call("reading the free memory")
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.0.context
    }

    pub(crate) fn bind(&self) -> Result<(), DeviceError> {
        self.context().bind_to_thread().call("binding the context")
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info().fmt(f)
    }
}

/// Work in order. What is enqueued runs later: [`Stream::synchronize`] waits and reports what failed.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    inner: Arc<CudaStream>,
}

impl Stream {
    /// The device that it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits for everything enqueued.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.inner.synchronize().call("waiting for a stream")
    }

    /// Marks a place in the stream whose time can be read.
    pub fn event(&self) -> Result<Event, DeviceError> {
        let event = self.inner.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).call("recording an event")?;
        Ok(Event(event))
    }

    /// Records what `enqueue` puts on this stream into a graph instead of running it.
    ///
    /// `enqueue` must not allocate, wait or copy to the host. If it fails, the recording is thrown away.
    pub fn capture(&self, enqueue: impl FnOnce() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        self.inner
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .call("beginning a capture")?;
        let enqueued = enqueue();
        let ended = self.inner.end_capture(sys::CUgraphInstantiate_flags(0)).call("ending a capture");
        enqueued?;
        match ended? {
            Some(graph) => {
                graph.upload().call("uploading a graph")?;
                Ok(Graph(Mutex::new(graph)))
            }
            None => {
                Err(DeviceError::Driver { call: "ending a capture", code: 0, text: "no graph came back".to_owned() })
            }
        }
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.inner.cu_stream()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:p} of device {})", self.raw(), self.device.info().ordinal)
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Event(CudaEvent);

impl Event {
    /// Microseconds from this place to a later one; waits for both.
    pub fn elapsed_us(&self, later: &Event) -> Result<f64, DeviceError> {
        Ok(f64::from(self.0.elapsed_ms(&later.0).call("reading a time")?) * 1e3)
    }
}

/// Work that was recorded once and can be run again, on the stream that recorded it.
///
/// The memory that it names must be alive when it runs; what enqueues into a capture says so.
pub struct Graph(Mutex<CudaGraph>);

// SAFETY: the driver lets any thread use a graph as long as no two do at the same time; the mutex sees to that.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// Enqueues the recorded work.
    ///
    /// # Safety
    /// Every buffer that the recorded work reads or writes is still alive.
    pub unsafe fn launch(&self) -> Result<(), DeviceError> {
        let graph = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        graph.launch().call("launching a graph")
    }
}

/// `[T]` on the device, 256-byte aligned.
///
/// Behind its last element lie at least [`DeviceBuffer::PAD_BYTES`] allocated bytes: bulk copies round their ends up to 16 bytes
/// and may read (never write) past a section.
pub struct DeviceBuffer<T> {
    device: Device,
    address: u64,
    len: usize,
    marker: PhantomData<T>,
}

// SAFETY: an address and a length; the memory itself is reached through streams, which the driver serialises.
unsafe impl<T: Send> Send for DeviceBuffer<T> {}
// SAFETY: shared references only copy out of the memory or hand its address to kernels.
unsafe impl<T: Sync> Sync for DeviceBuffer<T> {}

impl<T: Pod> DeviceBuffer<T> {
    /// Bytes behind the last element that may be read.
    pub const PAD_BYTES: usize = 256;

    /// `len` elements of zeros, the padding included.
    pub fn zeroed(stream: &Stream, len: usize) -> Result<Self, DeviceError> {
        let device = stream.device().clone();
        let bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.checked_add(2 * Self::PAD_BYTES - 1))
            .map(|bytes| bytes / Self::PAD_BYTES * Self::PAD_BYTES)
            .ok_or_else(|| DeviceError::Shape(format!("{len} elements do not fit the address space")))?;
        device.bind()?;
        // SAFETY: the memory is set below, before anything can read it.
        let address = unsafe { result::malloc_sync(bytes) }.call("allocating device memory")?;
        let buffer = Self { device, address, len, marker: PhantomData };
        // SAFETY: the range was just allocated. `T: Pod` is valid with zeros.
        unsafe { result::memset_d8_async(address, 0, bytes, stream.raw()) }.call("clearing device memory")?;
        Ok(buffer)
    }

    /// A copy of `host`. Waits for the copy.
    pub fn from_host(stream: &Stream, host: &[T]) -> Result<Self, DeviceError> {
        let mut buffer = Self::zeroed(stream, host.len())?;
        buffer.write(stream, 0, host)?;
        Ok(buffer)
    }

    /// Overwrites elements from `at` on. Waits for the copy.
    pub fn write(&mut self, stream: &Stream, at: usize, host: &[T]) -> Result<(), DeviceError> {
        self.check(at, host.len())?;
        if host.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the range lies inside the buffer, and `host` lives until the wait below.
        unsafe { result::memcpy_htod_async(self.address + (at * size_of::<T>()) as u64, host, stream.raw()) }
            .call("copying to the device")?;
        stream.synchronize()
    }

    /// The elements, once everything before on `stream` is done.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<T>, DeviceError> {
        self.read(stream, 0, self.len)
    }

    /// `len` elements from `at` on, once everything before on `stream` is done.
    pub fn read(&self, stream: &Stream, at: usize, len: usize) -> Result<Vec<T>, DeviceError> {
        self.check(at, len)?;
        let mut host = vec![T::zeroed(); len];
        if len > 0 {
            self.device.bind()?;
            // SAFETY: the range lies inside the buffer, and `host` lives until the wait below.
            unsafe { result::memcpy_dtoh_async(&mut host, self.address + (at * size_of::<T>()) as u64, stream.raw()) }
                .call("copying from the device")?;
        }
        stream.synchronize()?;
        Ok(host)
    }

    /// Sets every byte of the elements, in stream order.
    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.fill_front(stream, self.len, byte)
    }

    /// Sets every byte of the first `len` elements, in stream order.
    pub fn fill_front(&mut self, stream: &Stream, len: usize, byte: u8) -> Result<(), DeviceError> {
        self.check(0, len)?;
        self.device.bind()?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the range lies inside the buffer. Any bytes are a valid `T: Pod`.
        unsafe { result::memset_d8_async(self.address, byte, len * size_of::<T>(), stream.raw()) }
            .call("filling device memory")
    }

    /// Sets the bytes behind the last element, so that a kernel that writes past the end shows in [`DeviceBuffer::padding`].
    pub fn fill_padding(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: `zeroed` allocates at least this many bytes behind the elements.
        unsafe { result::memset_d8_async(self.address + self.bytes() as u64, byte, Self::PAD_BYTES, stream.raw()) }
            .call("filling device memory")
    }

    /// The [`DeviceBuffer::PAD_BYTES`] behind the last element, once everything before on `stream` is done.
    pub fn padding(&self, stream: &Stream) -> Result<Vec<u8>, DeviceError> {
        let mut host = vec![0u8; Self::PAD_BYTES];
        self.device.bind()?;
        // SAFETY: as in `fill_padding`; `host` lives until the wait below.
        unsafe { result::memcpy_dtoh_async(&mut host, self.address + self.bytes() as u64, stream.raw()) }
            .call("copying from the device")?;
        stream.synchronize()?;
        Ok(host)
    }

    /// Copies all elements from a buffer of the same length, in stream order.
    pub fn copy_from(&mut self, stream: &Stream, source: &Self) -> Result<(), DeviceError> {
        if source.len != self.len {
            return Err(DeviceError::Shape(format!("copy of {} elements to {}", source.len, self.len)));
        }
        self.device.bind()?;
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are whole buffers of this many bytes.
        unsafe { result::memcpy_dtod_async(self.address, source.address, self.bytes(), stream.raw()) }
            .call("copying on the device")
    }

    /// Copies a matrix of `(rows, cols)` elements out of `source`, in stream order; a row follows another by the pitches, in elements.
    pub fn copy_rows(
        &mut self,
        stream: &Stream,
        pitch: usize,
        source: &Self,
        source_pitch: usize,
        (rows, cols): (usize, usize),
    ) -> Result<(), DeviceError> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let end = |pitch: usize| pitch.checked_mul(rows - 1).and_then(|start| start.checked_add(cols));
        let fits = |end: Option<usize>, len: usize| end.is_some_and(|end| end <= len);
        if cols > pitch.min(source_pitch) || !fits(end(pitch), self.len) || !fits(end(source_pitch), source.len) {
            let (to, from) = (self.len, source.len);
            return Err(DeviceError::Shape(format!(
                "copy of {rows} x {cols} elements, pitch {source_pitch} of {from} to pitch {pitch} of {to}"
            )));
        }
        self.device.bind()?;
        let bytes = size_of::<T>();
        let copy = sys::CUDA_MEMCPY2D_st {
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: source.address,
            srcPitch: source_pitch * bytes,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: self.address,
            dstPitch: pitch * bytes,
            WidthInBytes: cols * bytes,
            Height: rows,
            srcXInBytes: 0,
            srcY: 0,
            srcHost: ptr::null(),
            srcArray: ptr::null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstHost: ptr::null_mut(),
            dstArray: ptr::null_mut(),
        };
        // SAFETY: both matrices lie inside their buffers, as checked above.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.raw()) }.result().call("copying rows on the device")
    }

    /// A copy of the elements in a buffer of their own.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, DeviceError> {
        let mut copy = Self::zeroed(stream, self.len)?;
        copy.copy_from(stream, self)?;
        Ok(copy)
    }

    fn check(&self, at: usize, len: usize) -> Result<(), DeviceError> {
        if at.checked_add(len).is_some_and(|end| end <= self.len) {
            Ok(())
        } else {
            Err(DeviceError::Shape(format!("elements {at}..{at}+{len} of a buffer of {}", self.len)))
        }
    }
}

impl<T> DeviceBuffer<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device address, for a kernel's arguments.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        // Nothing can be done about a failure here; the context keeps it and reports it at the next call.
        let context = self.device.context();
        context.record_err(context.bind_to_thread());
        // SAFETY: allocated by `zeroed`, freed once. `cuMemFree` waits for kernels that still use it.
        context.record_err(unsafe { result::free_sync(self.address) });
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_gives_an_error_that_says_what_is_missing() {
        // Where there is a GPU, the other arm is what is tested.
        match Device::open(0) {
            Ok(device) => assert!(device.info().sms > 0),
            Err(DeviceError::Toolchain(error)) => assert!(error.to_string().contains("libcuda"), "{error}"),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}
