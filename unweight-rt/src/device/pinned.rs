//! Host memory that the copy engines reach, and copies that run while the host continues.
//!
//! A copy owns the pinned memory until it is done, so the host can neither read what has not arrived nor overwrite what
//! has not left:
//! ```compile_fail,E0382
//! # use unweight_rt::{DeviceBuffer, DeviceError, Stream, raw::device::Pinned};
//! # fn read(stream: &Stream, ids: &DeviceBuffer<u32>, pinned: Pinned<u32>) -> Result<u32, DeviceError> {
//! let transfer = ids.read_later(stream, 0, pinned)?;
//! Ok(pinned[0])
//! # }
//! ```
//! ```
//! # use unweight_rt::{DeviceBuffer, DeviceError, Stream, raw::device::Pinned};
//! # fn read(stream: &Stream, ids: &DeviceBuffer<u32>, pinned: Pinned<u32>) -> Result<u32, DeviceError> {
//! let transfer = ids.read_later(stream, 0, pinned)?;
//! let pinned = transfer.wait()?;
//! Ok(pinned[0])
//! # }
//! ```

use std::{
    fmt,
    mem::size_of,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
};

use bytemuck::Pod;
use cudarc::driver::result;

use crate::device::{Call, Device, DeviceBuffer, DeviceError, Event, LaunchError, Stream};

/// `[T]` of page-locked host memory.
pub struct Pinned<T> {
    device: Device,
    start: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its memory, as a `Vec` does.
unsafe impl<T: Send> Send for Pinned<T> {}
// SAFETY: as above; shared references only read.
unsafe impl<T: Sync> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// `len` elements of zeros.
    ///
    /// # Errors
    /// More bytes than the host gives out page-locked.
    pub fn zeroed(device: &Device, len: usize) -> Result<Self, DeviceError> {
        let bytes = len.max(1).checked_mul(size_of::<T>()).ok_or(LaunchError::TooLarge {
            what: "elements",
            value: len as u64,
            limit: (usize::MAX / size_of::<T>().max(1)) as u64,
        })?;
        device.bind()?;
        // SAFETY: the memory is set below, before anything can read it. Page-aligned, so aligned for any `Pod`.
        let allocated = unsafe { result::malloc_host(bytes, 0) }.call("allocating page-locked memory");
        let start = allocated.map_err(|error| error.of_room(|| DeviceError::HostRoom { bytes: bytes as u64 }))?;
        let start = NonNull::new(start.cast::<T>()).ok_or_else(|| DeviceError::Driver {
            call: "allocating page-locked memory",
            code: 0,
            text: "the driver returned null".to_owned(),
        })?;
        // SAFETY: `bytes` bytes were just allocated there. `T: Pod` is valid with zeros.
        unsafe { start.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { device: device.clone(), start, len })
    }
}

impl Pinned<u8> {
    /// Enqueues a copy of the first `len` bytes to the device.
    ///
    /// # Safety
    /// `to` is the address of as many bytes on the stream's device, which are freed by `cuMemFree` at the earliest.
    pub(super) unsafe fn send(self, stream: &Stream, to: u64, len: usize) -> Result<Transfer<u8>, DeviceError> {
        let Some(host) = self.get(..len) else {
            return Err(LaunchError::Range { at: 0, len: len as u64, have: self.len as u64 }.into());
        };
        self.device.bind()?;
        if len > 0 {
            // SAFETY: the caller's promise; the transfer keeps the host's memory until the copy is done.
            unsafe { result::memcpy_htod_async(to, host, stream.raw()) }.call("copying to the device")?;
        }
        DeviceBuffer::<u8>::under_way(stream, self)
    }
}

impl<T> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised elements, and no copy runs: a copy owns what it works on.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed alone.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // Nothing can be done about a failure here; the context keeps it and reports it at the next call.
        let context = self.device.context();
        context.record_err(context.bind_to_thread());
        // SAFETY: allocated by `zeroed`, freed once, and no copy runs.
        context.record_err(unsafe { result::free_host(self.start.as_ptr().cast()) });
    }
}

impl<T> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

/// A copy under way, to or from pinned memory. Dropping it waits for the copy.
#[derive(Debug)]
#[must_use = "dropping a copy waits for it"]
pub struct Transfer<T> {
    /// `None` once taken back.
    pinned: Option<Pinned<T>>,
    done: Event,
}

impl<T> Transfer<T> {
    /// The memory, once the copy is done.
    ///
    /// # Errors
    /// What failed on the stream.
    pub fn wait(mut self) -> Result<Pinned<T>, DeviceError> {
        self.done.wait()?;
        match self.pinned.take() {
            Some(pinned) => Ok(pinned),
            None => unreachable!("taken here alone, and `wait` consumes the copy"),
        }
    }
}

impl<T> Drop for Transfer<T> {
    fn drop(&mut self) {
        let Some(pinned) = self.pinned.take() else { return };
        if self.done.wait().is_err() {
            // Whether the copy runs is unknown: the memory must stay.
            std::mem::forget(pinned);
        }
    }
}

/// Pinned memory that is not written again, from which parts are copied on one stream, as often as wanted. Dropping it
/// waits for that stream.
#[derive(Debug)]
pub struct Source<T> {
    /// `None` while it is dropped.
    pinned: Option<Pinned<T>>,
    stream: Stream,
}

impl<T: Pod> Source<T> {
    /// A source that copies `pinned` on `stream`. A graph of the copies must be dropped before the source.
    pub fn new(stream: &Stream, pinned: Pinned<T>) -> Self {
        Self { pinned: Some(pinned), stream: stream.clone() }
    }

    /// Bytes of the host's memory.
    pub fn bytes(&self) -> u64 {
        self.pinned.as_ref().map_or(0, |pinned| (pinned.len * size_of::<T>()) as u64)
    }

    /// Enqueues a copy of `len` elements from `from` on to those of `to` from `at` on. What else touches these, the
    /// caller orders.
    ///
    /// # Errors
    /// Elements that are not there, or an error of the driver.
    pub fn copy(&self, from: usize, len: usize, to: &DeviceBuffer<T>, at: usize) -> Result<(), DeviceError> {
        let address = to.element(at, len)?;
        let all = self.pinned.as_deref().unwrap_or_default();
        let host = from.checked_add(len).and_then(|end| all.get(from..end));
        let Some(host) = host else {
            return Err(LaunchError::Range { at: from as u64, len: len as u64, have: all.len() as u64 }.into());
        };
        self.stream.device().bind()?;
        if len > 0 {
            // SAFETY: the range is inside the buffer, whose memory is freed by `cuMemFree` at the earliest; that of
            // the host is not written, and goes behind the stream's work.
            unsafe { result::memcpy_htod_async(address, host, self.stream.raw()) }.call("copying to the device")?;
        }
        Ok(())
    }
}

impl<T> Drop for Source<T> {
    fn drop(&mut self) {
        if self.stream.synchronize().is_err() {
            // Whether a copy runs is unknown: the memory must stay.
            std::mem::forget(self.pinned.take());
        }
    }
}

impl<T: Pod> DeviceBuffer<T> {
    /// Enqueues a copy of as many elements as `pinned` has, from `at` on, to the host.
    ///
    /// # Errors
    /// Elements that the buffer does not have, or an error of the driver.
    pub fn read_later(&self, stream: &Stream, at: usize, pinned: Pinned<T>) -> Result<Transfer<T>, DeviceError> {
        let len = pinned.len;
        self.read_front_later(stream, at, pinned, len)
    }

    /// Enqueues a copy of `len` elements, from `at` on, to the first ones of `pinned`.
    ///
    /// # Errors
    /// Elements that the buffer or `pinned` does not have, or an error of the driver.
    pub(crate) fn read_front_later(
        &self,
        stream: &Stream,
        at: usize,
        mut pinned: Pinned<T>,
        len: usize,
    ) -> Result<Transfer<T>, DeviceError> {
        let from = self.element(at, len)?;
        let have = pinned.len as u64;
        let Some(host) = pinned.get_mut(..len) else {
            return Err(LaunchError::Range { at: 0, len: len as u64, have }.into());
        };
        self.device().bind()?;
        if len > 0 {
            // SAFETY: the range is inside the buffer; the transfer keeps the host's memory until the copy is done.
            unsafe { result::memcpy_dtoh_async(host, from, stream.raw()) }.call("copying from the device")?;
        }
        Self::under_way(stream, pinned)
    }

    /// Enqueues a copy of the first `len` elements of `pinned` to the elements from `at` on.
    ///
    /// # Errors
    /// Elements that the buffer or `pinned` does not have, or an error of the driver.
    pub(crate) fn write_later(
        &mut self,
        stream: &Stream,
        at: usize,
        pinned: Pinned<T>,
        len: usize,
    ) -> Result<Transfer<T>, DeviceError> {
        let to = self.element(at, len)?;
        let Some(host) = pinned.get(..len) else {
            return Err(LaunchError::Range { at: 0, len: len as u64, have: pinned.len as u64 }.into());
        };
        self.device().bind()?;
        if len > 0 {
            // SAFETY: the range is inside the buffer; the transfer keeps the host's memory until the copy is done.
            unsafe { result::memcpy_htod_async(to, host, stream.raw()) }.call("copying to the device")?;
        }
        Self::under_way(stream, pinned)
    }

    /// Marks the end of a copy.
    fn under_way(stream: &Stream, pinned: Pinned<T>) -> Result<Transfer<T>, DeviceError> {
        match stream.event() {
            Ok(done) => Ok(Transfer { pinned: Some(pinned), done }),
            Err(error) => {
                if stream.synchronize().is_err() {
                    // Whether the copy runs is unknown: the memory must stay.
                    std::mem::forget(pinned);
                }
                Err(error)
            }
        }
    }
}
