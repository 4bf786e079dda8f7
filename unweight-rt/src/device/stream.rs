//! CUDA streams, events and captures.

use std::{fmt, mem, ptr, sync::Arc};

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use crate::device::{Call, Device, DeviceError, Graph};

/// A CUDA stream: runs enqueued work in order. [`Stream::synchronize`] waits and reports errors.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    inner: Arc<CudaStream>,
    mode: LaunchMode,
}

/// The launch mode of one handle of a stream; other handles keep their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchMode {
    /// The number of multiprocessors for sizing grids that depend on it; `None` means the whole device.
    pub sms: Option<u32>,
    /// Disables programmatic dependent launch: a kernel starts when all earlier work on the stream has ended.
    pub serialized: bool,
}

impl Device {
    /// Creates a stream that does not wait for the default stream.
    pub fn stream(&self) -> Result<Stream, DeviceError> {
        let inner = self.context().new_stream().call("creating a stream")?;
        Ok(Stream::new(self, inner))
    }

    /// Creates a stream like [`Device::stream`] with the highest priority: thread blocks of its kernels start before
    /// waiting blocks of other streams.
    pub(crate) fn urgent_stream(&self) -> Result<Stream, DeviceError> {
        self.bind()?;
        let (_, highest) = result::stream::get_priority_range().call("reading the priorities of streams")?;
        let inner = self.context().new_stream_with_priority(highest).call("creating a stream")?;
        Ok(Stream::new(self, inner))
    }

    /// Borrows a stream from a raw `CUstream` (or `cudaStream_t`; null is the default stream).
    ///
    /// # Safety
    /// The stream belongs to this device's primary context and outlives every use of the returned value.
    pub unsafe fn borrow_stream(&self, raw: *mut std::ffi::c_void) -> Stream {
        // SAFETY: the caller's promise.
        let inner = unsafe { self.context().wrap_borrowed_stream(raw.cast()) };
        Stream::new(self, inner)
    }
}

impl Stream {
    fn new(device: &Device, inner: Arc<CudaStream>) -> Self {
        Self { device: device.clone(), inner, mode: LaunchMode::default() }
    }

    /// Returns the device of the stream.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the launch mode of this handle.
    pub fn mode(&self) -> LaunchMode {
        self.mode
    }

    pub(crate) fn set_mode(&mut self, mode: LaunchMode) {
        self.mode = mode;
    }

    /// Records `mark` at this point of the stream, so that other streams can wait for it. Replaces its previous point.
    /// During a capture, the mark belongs to the graph.
    ///
    /// # Errors
    /// A mark of another device, or a driver error.
    pub fn record(&self, mark: &Mark) -> Result<(), DeviceError> {
        mark.0.record(&self.inner).call("recording an event")
    }

    /// Makes later work of this stream wait for a mark. A mark that was never recorded is ignored.
    ///
    /// # Errors
    /// A driver error.
    pub fn wait(&self, mark: &Mark) -> Result<(), DeviceError> {
        self.inner.wait(&mark.0).call("waiting for an event")
    }

    /// Waits for all enqueued work, and returns its first error.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.inner.synchronize().call("waiting for a stream")
    }

    /// Records an event with a timestamp at this point of the stream.
    pub fn event(&self) -> Result<Event, DeviceError> {
        let event = self.inner.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).call("recording an event")?;
        Ok(Event(event))
    }

    /// Captures the work that `enqueue` enqueues on this stream into a graph, without running it.
    ///
    /// `enqueue` must not allocate, wait or copy to the host; the products of this crate do none of these. Other
    /// streams that wait for a [`Mark`] recorded inside are captured, too, until this stream waits for their last work;
    /// the graph runs on this stream. If `enqueue` fails or panics, the capture is discarded and the stream is usable
    /// as before.
    pub fn capture(&self, enqueue: impl FnOnce() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        self.inner
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .call("starting a capture")?;
        let recording = Recording(self);
        let enqueued = enqueue();
        let ended = self.inner.end_capture(sys::CUgraphInstantiate_flags(0)).call("ending a capture");
        if ended.is_ok() {
            // The capture has ended; another thread may already capture on this stream.
            mem::forget(recording);
        } else {
            drop(recording);
        }
        enqueued?;
        match ended? {
            Some(graph) => {
                graph.upload().call("uploading a graph")?;
                Ok(Graph::new(graph))
            }
            None => {
                Err(DeviceError::Driver { call: "ending a capture", code: 0, text: "no graph came back".to_owned() })
            }
        }
    }

    /// Returns whether the stream is being captured.
    pub fn is_capturing(&self) -> Result<bool, DeviceError> {
        let status = self.inner.capture_status().call("querying whether a stream is being captured")?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Returns the capture that records the stream's work, if any.
    pub(crate) fn capture_of(&self) -> Result<Captured, DeviceError> {
        if !self.is_capturing()? {
            return Ok(Captured::No);
        }
        if !self.device.has_capture_info_v3() {
            return Ok(Captured::Unknown);
        }
        let (mut status, mut number) = (sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        // SAFETY: a live stream; the two outputs are live, and the other outputs are optional.
        unsafe {
            sys::cuStreamGetCaptureInfo_v3(
                self.raw(),
                &mut status,
                &mut number,
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
            )
        }
        .result()
        .call("querying the capture of a stream")?;
        Ok(match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Captured::By(number),
            // An error ended the capture; the driver rejects further work.
            _ => Captured::Unknown,
        })
    }

    /// Makes later work of this stream wait for all work that another stream has enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    pub fn wait_for(&self, other: &Stream) -> Result<(), DeviceError> {
        self.inner.join(&other.inner).call("waiting for another stream")
    }

    /// Returns the raw `CUstream` for calls to other libraries; valid as long as this handle.
    pub fn handle(&self) -> *mut std::ffi::c_void {
        self.raw().cast()
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.inner.cu_stream()
    }
}

/// Whether work enqueued on a stream is captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Captured {
    /// Work is not captured.
    No,
    /// Work is captured with this id, which is unique in the process.
    By(u64),
    /// Work is captured, but the driver does not identify the capture, or the capture has failed.
    Unknown,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:p} of device {})", self.raw(), self.device.info().ordinal)
    }
}

/// Ends a capture that is still open because `enqueue` panicked, or because cudarc returned an earlier error before it
/// called the driver. Otherwise the stream would reject waits and swallow all later work.
struct Recording<'a>(&'a Stream);

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let (stream, context) = (self.0.raw(), self.0.device.context());
        // Not `bind`, which returns an earlier error instead of binding. A failure of these calls cannot be handled. A
        // capture that an error ended has no graph: the driver reports an error that `capture` already returned, or
        // that matters less than the panic.
        // SAFETY: the device keeps its context, and the stream its handle, while they are borrowed.
        let capturing = unsafe { result::ctx::set_current(context.cu_ctx()) }
            .and_then(|()| unsafe { result::stream::is_capturing(stream) });
        if matches!(capturing, Ok(status) if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) {
            let mut graph = ptr::null_mut();
            // SAFETY: the stream is being captured, begun by this thread in `Stream::capture`, which has not returned.
            // The returned graph is null or not referenced elsewhere.
            unsafe {
                let _ = sys::cuStreamEndCapture(stream, &mut graph);
                if !graph.is_null() {
                    let _ = sys::cuGraphDestroy(graph);
                }
            }
        }
    }
}

/// A point in a stream that other streams can wait for. It has no timestamp.
#[derive(Debug)]
pub struct Mark(CudaEvent);

impl Mark {
    /// Creates a mark that is not recorded yet.
    ///
    /// # Errors
    /// A driver error.
    pub fn new(device: &Device) -> Result<Self, DeviceError> {
        let event = device.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING));
        Ok(Self(event.call("creating an event")?))
    }
}

/// A point in a stream with a timestamp.
#[derive(Debug)]
pub struct Event(CudaEvent);

impl Event {
    /// Waits until the stream has reached this point.
    ///
    /// # Errors
    /// An error of earlier work on the stream.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.0.synchronize().call("waiting for an event")
    }

    /// Returns the microseconds from this point to a later one. Waits for both.
    pub fn elapsed_us(&self, later: &Event) -> Result<f64, DeviceError> {
        Ok(f64::from(self.0.elapsed_ms(&later.0).call("reading the time between events")?) * 1e3)
    }
}
