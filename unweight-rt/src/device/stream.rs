//! Streams: work in order.

use std::{fmt, mem, ptr, sync::Arc};

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use crate::device::{Call, Device, DeviceError, Graph};

/// A CUDA stream: work that runs in order, after it was enqueued. [`Stream::synchronize`] waits and reports errors.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    inner: Arc<CudaStream>,
    mode: LaunchMode,
}

/// The launch mode of one handle of a stream; other handles keep their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchMode {
    /// Multiprocessors that grids are made for, where a grid depends on them; `None` for all of the device.
    pub sms: Option<u32>,
    /// No programmatic dependents: a kernel starts when what is before it on the stream has ended.
    pub ordinary: bool,
}

impl Device {
    /// A new stream that does not wait for the default stream.
    pub fn stream(&self) -> Result<Stream, DeviceError> {
        let inner = self.context().new_stream().call("creating a stream")?;
        Ok(Stream::new(self, inner))
    }

    /// A borrowed stream, as a raw `CUstream` (or `cudaStream_t`; null is the default stream).
    ///
    /// # Safety
    /// The stream belongs to this device's primary context and outlives every use of what is returned.
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

    /// The device of the stream.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The launch mode of this handle.
    pub fn mode(&self) -> LaunchMode {
        self.mode
    }

    pub(crate) fn set_mode(&mut self, mode: LaunchMode) {
        self.mode = mode;
    }

    /// Records `mark` at this point of the stream, for other streams to wait for. Replaces its previous point. In a
    /// capture the mark belongs to the graph.
    ///
    /// # Errors
    /// A mark of another device, or an error of the driver.
    pub fn record(&self, mark: &Mark) -> Result<(), DeviceError> {
        mark.0.record(&self.inner).call("recording an event")
    }

    /// Makes later work of this stream wait for a mark. A mark that was never recorded is ignored.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn wait(&self, mark: &Mark) -> Result<(), DeviceError> {
        self.inner.wait(&mark.0).call("waiting for an event")
    }

    /// Waits for all enqueued work, and returns its first error.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.inner.synchronize().call("waiting for a stream")
    }

    /// Records a point in the stream whose time can be read.
    pub fn event(&self) -> Result<Event, DeviceError> {
        let event = self.inner.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).call("recording an event")?;
        Ok(Event(event))
    }

    /// Captures the work that `enqueue` puts on this stream into a graph, without running it.
    ///
    /// `enqueue` must not allocate, wait or copy to the host; the products of this crate do none of these.
    /// Streams that wait for a [`Mark`] that was recorded inside are recorded, too, until this one waits for their last
    /// work; the graph runs on this one.
    /// If it fails or panics, the recording is thrown away and the stream is as it was.
    pub fn capture(&self, enqueue: impl FnOnce() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        self.inner
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .call("beginning a capture")?;
        let recording = Recording(self);
        let enqueued = enqueue();
        let ended = self.inner.end_capture(sys::CUgraphInstantiate_flags(0)).call("ending a capture");
        if ended.is_ok() {
            // Ended. Another thread may already record the next on this stream.
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

    /// Whether the stream is captured.
    pub fn is_capturing(&self) -> Result<bool, DeviceError> {
        let status = self.inner.capture_status().call("asking whether a stream is captured")?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The capture that records what comes, if one does.
    pub(crate) fn capture_of(&self) -> Result<Captured, DeviceError> {
        if !self.is_capturing()? {
            return Ok(Captured::No);
        }
        if !self.device.knows_captures() {
            return Ok(Captured::Unknown);
        }
        let (mut status, mut number) = (sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        // SAFETY: a live stream; the two outputs are live, and the others may be left out.
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
        .call("asking which capture records a stream")?;
        Ok(match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Captured::By(number),
            // An error ended it; what comes is refused by the driver.
            _ => Captured::Unknown,
        })
    }

    /// Makes later work of this stream wait for all work that another stream has enqueued so far.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn wait_for(&self, other: &Stream) -> Result<(), DeviceError> {
        self.inner.join(&other.inner).call("waiting for another stream")
    }

    /// The raw `CUstream`, for calls of other libraries. Valid as long as this handle.
    pub fn handle(&self) -> *mut std::ffi::c_void {
        self.raw().cast()
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.inner.cu_stream()
    }
}

/// Whether what is enqueued on a stream is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Captured {
    /// It runs.
    No,
    /// By the capture of this number, which no other of the process has.
    By(u64),
    /// By a capture that the driver does not number, or that failed.
    Unknown,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:p} of device {})", self.raw(), self.device.info().ordinal)
    }
}

/// Ends a capture that was not ended: `enqueue` panicked, or an error from before made cudarc return before it
/// asked the driver. A stream left recording would refuse to wait, and swallow all work, from then on.
struct Recording<'a>(&'a Stream);

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let (stream, context) = (self.0.raw(), self.0.device.context());
        // Not `bind`, which reports an error from before instead of binding. Nothing can be done about a failure of
        // these calls; a recording that an error ended has no graph, and the driver says so by an error that `capture`
        // has reported or that a panic outranks.
        // SAFETY: the device keeps its context, and the stream its handle, while they are borrowed.
        let capturing = unsafe { result::ctx::set_current(context.cu_ctx()) }
            .and_then(|()| unsafe { result::stream::is_capturing(stream) });
        if matches!(capturing, Ok(status) if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) {
            let mut graph = ptr::null_mut();
            // SAFETY: the stream is recording, begun by this thread, which `Stream::capture` does not leave. What comes
            // back is null or a graph that nothing else refers to.
            unsafe {
                let _ = sys::cuStreamEndCapture(stream, &mut graph);
                if !graph.is_null() {
                    let _ = sys::cuGraphDestroy(graph);
                }
            }
        }
    }
}

/// A place in a stream that others can wait for. Its time cannot be read.
#[derive(Debug)]
pub struct Mark(CudaEvent);

impl Mark {
    /// A mark that was not recorded yet.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn new(device: &Device) -> Result<Self, DeviceError> {
        let event = device.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING));
        Ok(Self(event.call("making an event")?))
    }
}

/// A point in a stream whose time can be read.
#[derive(Debug)]
pub struct Event(CudaEvent);

impl Event {
    /// Waits until the stream has reached it.
    ///
    /// # Errors
    /// What failed on the stream.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.0.synchronize().call("waiting for an event")
    }

    /// Microseconds from this point to a later one. Waits for both.
    pub fn elapsed_us(&self, later: &Event) -> Result<f64, DeviceError> {
        Ok(f64::from(self.0.elapsed_ms(&later.0).call("reading a time")?) * 1e3)
    }
}
