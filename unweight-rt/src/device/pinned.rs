//! Pinned host memory, and copies that run while the host continues.
//!
//! A copy owns the pinned memory until it is done. So the host can neither read data before it arrives nor overwrite
//! data before it is sent:
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
    mem::{ManuallyDrop, size_of},
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    slice, thread,
};

use bytemuck::Pod;
use cudarc::driver::{result, sys};
use unweight_format::raw::zeroed;

use crate::device::{Call, Device, DeviceBuffer, DeviceError, Event, LaunchError, Stream};

/// `[T]` in pinned host memory.
pub struct Pinned<T> {
    device: Device,
    start: NonNull<T>,
    len: usize,
    owner: Owner,
}

/// Who frees pinned memory.
enum Owner {
    /// `cuMemFreeHost`.
    Driver,
    /// The allocator, from which this vector came, after `cuMemHostUnregister`.
    Allocator { start: NonNull<u8>, capacity: usize },
}

// SAFETY: owns its memory, as a `Vec` does.
unsafe impl<T: Send> Send for Pinned<T> {}
// SAFETY: as above; shared references only read.
unsafe impl<T: Sync> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Allocates `len` elements and sets them to zero.
    ///
    /// # Errors
    /// The host cannot pin this much memory.
    pub fn zeroed(device: &Device, len: usize) -> Result<Self, DeviceError> {
        let bytes = len.max(1).checked_mul(size_of::<T>()).ok_or(LaunchError::TooLarge {
            what: "elements",
            value: len as u64,
            limit: (usize::MAX / size_of::<T>().max(1)) as u64,
        })?;
        device.bind()?;
        // SAFETY: the memory is cleared below, before anything can read it. Page-aligned, so aligned for any `Pod`.
        let allocated = unsafe { result::malloc_host(bytes, 0) }.call("allocating pinned host memory");
        let start =
            allocated.map_err(|error| error.or_out_of_memory(|| DeviceError::HostRoom { bytes: bytes as u64 }))?;
        let start = NonNull::new(start.cast::<T>()).ok_or_else(|| DeviceError::Driver {
            call: "allocating pinned host memory",
            code: 0,
            text: "the driver returned null".to_owned(),
        })?;
        // SAFETY: `bytes` bytes were just allocated there. `T: Pod` is valid with zeros.
        unsafe { start.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { device: device.clone(), start, len, owner: Owner::Driver })
    }
}

impl Pinned<u8> {
    /// Bytes of a huge page.
    const HUGE_PAGE: usize = 2 << 20;
    /// Threads that touch new pages.
    const THREADS: usize = 4;

    /// Like [`Pinned::zeroed`]; for much memory, pins huge pages if the system has some: the driver's own allocation
    /// takes 65 ms for 117 MB, most of it for page faults, one every 4 KiB.
    ///
    /// # Errors
    /// The host cannot pin this much memory.
    pub(crate) fn on_huge_pages(device: &Device, len: usize) -> Result<Self, DeviceError> {
        match Self::registered(device, len) {
            Some(pinned) => Ok(pinned),
            None => Self::zeroed(device, len),
        }
    }

    /// Pins memory of the allocator; `None` if it is small, or the driver refuses.
    fn registered(device: &Device, len: usize) -> Option<Self> {
        let capacity = len.checked_add(Self::HUGE_PAGE)?;
        if len < 2 * Self::HUGE_PAGE || device.bind().is_err() {
            return None;
        }
        let mut memory = zeroed(capacity);
        let skipped = memory.as_ptr().align_offset(Self::HUGE_PAGE);
        let own = memory.get_mut(skipped..skipped.checked_add(len)?)?;
        // Each thread touches its pages first: that takes a fault for each of them.
        thread::scope(|scope| {
            for part in own.chunks_mut(len.div_ceil(Self::THREADS)) {
                let touch = || part.chunks_mut(4096).for_each(|page| page[0] = 0);
                // Without further threads, the driver touches the pages.
                let _ = thread::Builder::new().spawn_scoped(scope, touch);
            }
        });
        let start = NonNull::new(own.as_mut_ptr())?;
        // SAFETY: `len` bytes of the vector, which is not freed before they are unregistered.
        unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), len, 0) }.result().ok()?;
        let mut memory = ManuallyDrop::new(memory);
        let owner = Owner::Allocator { start: NonNull::new(memory.as_mut_ptr())?, capacity: memory.capacity() };
        Some(Self { device: device.clone(), start, len, owner })
    }

    /// The first byte, for memory that is accessed in parts.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The addresses of the memory.
    pub(super) fn address_range(&self) -> Range<usize> {
        let start = self.start.as_ptr() as usize;
        start..start + self.len
    }
}

impl Pinned<u8> {
    /// Enqueues a copy of the first `len` bytes to the device.
    ///
    /// # Safety
    /// `to` is the address of `len` bytes on the stream's device, which only `cuMemFree` frees.
    pub(super) unsafe fn send(self, stream: &Stream, to: u64, len: usize) -> Result<Transfer<u8>, DeviceError> {
        let Some(host) = self.get(..len) else {
            return Err(LaunchError::Range { at: 0, len: len as u64, have: self.len as u64 }.into());
        };
        self.device.bind()?;
        if len > 0 {
            // SAFETY: the caller's promise; the transfer keeps the host's memory until the copy is done.
            unsafe { result::memcpy_htod_async(to, host, stream.raw()) }.call("copying to the device")?;
        }
        DeviceBuffer::<u8>::begin_transfer(stream, self)
    }

    /// Enqueues a copy of `len` bytes from the device to the start of the memory.
    ///
    /// # Safety
    /// `from` is the address of `len` bytes on the stream's device, which are not freed before the copy is done.
    pub(super) unsafe fn receive(
        mut self,
        stream: &Stream,
        from: u64,
        len: usize,
    ) -> Result<Transfer<u8>, DeviceError> {
        let have = self.len as u64;
        let Some(host) = self.get_mut(..len) else {
            return Err(LaunchError::Range { at: 0, len: len as u64, have }.into());
        };
        stream.device().bind()?;
        if len > 0 {
            // SAFETY: the caller's promise; the transfer keeps the host's memory until the copy is done.
            unsafe { result::memcpy_dtoh_async(host, from, stream.raw()) }.call("copying from the device")?;
        }
        DeviceBuffer::<u8>::begin_transfer(stream, self)
    }
}

impl<T> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised elements, and no copy is running: a running copy owns the memory.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // A failure cannot be handled here; the context keeps it and reports it at the next call.
        let context = self.device.context();
        context.record_err(context.bind_to_thread());
        match self.owner {
            // SAFETY: allocated by `zeroed`, freed once, and no copy is running.
            Owner::Driver => context.record_err(unsafe { result::free_host(self.start.as_ptr().cast()) }),
            Owner::Allocator { start, capacity } => {
                // SAFETY: registered by `registered`, unregistered once, and no copy is running.
                let unpinned = unsafe { sys::cuMemHostUnregister(self.start.as_ptr().cast()) }.result();
                if unpinned.is_ok() {
                    // SAFETY: from a vector of bytes with this capacity, which was forgotten.
                    drop(unsafe { Vec::from_raw_parts(start.as_ptr(), 0, capacity) });
                }
                // Otherwise it stays pinned and must not be reused.
                context.record_err(unpinned);
            }
        }
    }
}

impl<T> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

/// A running copy to or from pinned memory. Dropping it waits for the copy.
#[derive(Debug)]
#[must_use = "dropping a copy waits for it"]
pub struct Transfer<T> {
    /// `None` once the memory was returned.
    pinned: Option<Pinned<T>>,
    done: Event,
}

impl<T> Transfer<T> {
    /// Waits for the copy and returns the memory.
    ///
    /// # Errors
    /// An error of earlier work on the stream.
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
            // The copy may still be running: the memory must not be freed.
            std::mem::forget(pinned);
        }
    }
}

/// Pinned memory that is no longer written, and whose parts can be copied any number of times on one stream. Dropping
/// it waits for that stream.
#[derive(Debug)]
pub struct Source<T> {
    /// `None` only during drop.
    pinned: Option<Pinned<T>>,
    stream: Stream,
}

impl<T: Pod> Source<T> {
    /// Creates a source that copies `pinned` on `stream`. A graph of the copies must be dropped before the source.
    pub fn new(stream: &Stream, pinned: Pinned<T>) -> Self {
        Self { pinned: Some(pinned), stream: stream.clone() }
    }

    /// Returns the size of the host memory in bytes.
    pub fn bytes(&self) -> u64 {
        self.pinned.as_ref().map_or(0, |pinned| (pinned.len * size_of::<T>()) as u64)
    }

    /// Enqueues a copy of `len` elements from index `from` to index `at` of `to`. The caller orders it with other
    /// accesses to these elements.
    ///
    /// # Errors
    /// Elements that do not exist, or a driver error.
    pub fn copy(&self, from: usize, len: usize, to: &DeviceBuffer<T>, at: usize) -> Result<(), DeviceError> {
        let address = to.element(at, len)?;
        let all = self.pinned.as_deref().unwrap_or_default();
        let host = from.checked_add(len).and_then(|end| all.get(from..end));
        let Some(host) = host else {
            return Err(LaunchError::Range { at: from as u64, len: len as u64, have: all.len() as u64 }.into());
        };
        self.stream.device().bind()?;
        if len > 0 {
            // SAFETY: the range is inside the buffer, whose memory only `cuMemFree` frees; the host memory is not
            // written, and is freed after the stream's work.
            unsafe { result::memcpy_htod_async(address, host, self.stream.raw()) }.call("copying to the device")?;
        }
        Ok(())
    }
}

impl<T> Drop for Source<T> {
    fn drop(&mut self) {
        if self.stream.synchronize().is_err() {
            // A copy may still be running: the memory must not be freed.
            std::mem::forget(self.pinned.take());
        }
    }
}

/// Pinned memory that is filled from parts of device buffers. Dropping it waits for running copies.
#[derive(Debug)]
pub(crate) struct Gather<'s> {
    stream: &'s Stream,
    /// `None` once the memory was returned.
    pinned: Option<Pinned<u8>>,
}

impl<'s> Gather<'s> {
    /// Allocates `bytes` bytes, which copies on `stream` will fill.
    ///
    /// # Errors
    /// The host cannot pin this much memory.
    pub(crate) fn new(stream: &'s Stream, bytes: usize) -> Result<Self, DeviceError> {
        Ok(Self { stream, pinned: Some(Pinned::zeroed(stream.device(), bytes)?) })
    }

    /// Enqueues a copy of `len` elements of `from` from index `at` to byte `to`.
    ///
    /// # Errors
    /// Elements or bytes that do not exist, or a driver error.
    pub(crate) fn add<T: Pod>(
        &mut self,
        from: &DeviceBuffer<T>,
        (at, len): (usize, usize),
        to: usize,
    ) -> Result<(), DeviceError> {
        let source = from.element(at, len)?;
        let all = self.pinned.as_deref_mut().unwrap_or_default();
        let (bytes, have) = (len * size_of::<T>(), all.len() as u64);
        let Some(host) = to.checked_add(bytes).and_then(|end| all.get_mut(to..end)) else {
            return Err(LaunchError::Range { at: to as u64, len: bytes as u64, have }.into());
        };
        self.stream.device().bind()?;
        if bytes > 0 {
            // SAFETY: the range is inside the buffer, whose memory only `cuMemFree` frees; the host memory is neither
            // read nor freed until the stream's work is done.
            unsafe { result::memcpy_dtoh_async(host, source, self.stream.raw()) }.call("copying from the device")?;
        }
        Ok(())
    }

    /// Waits for the copies and returns the memory.
    ///
    /// # Errors
    /// An error of earlier work on the stream.
    pub(crate) fn finish(mut self) -> Result<Pinned<u8>, DeviceError> {
        self.stream.synchronize()?;
        match self.pinned.take() {
            Some(pinned) => Ok(pinned),
            None => unreachable!("taken here alone, and `finish` consumes the copies"),
        }
    }
}

impl Drop for Gather<'_> {
    fn drop(&mut self) {
        if self.pinned.is_some() && self.stream.synchronize().is_err() {
            // A copy may still be running: the memory must not be freed.
            std::mem::forget(self.pinned.take());
        }
    }
}

impl<T: Pod> DeviceBuffer<T> {
    /// Enqueues a copy of elements from index `at` to the host, as many as `pinned` holds.
    ///
    /// # Errors
    /// Elements that the buffer does not have, or a driver error.
    pub fn read_later(&self, stream: &Stream, at: usize, pinned: Pinned<T>) -> Result<Transfer<T>, DeviceError> {
        let len = pinned.len;
        self.read_front_later(stream, at, pinned, len)
    }

    /// Enqueues a copy of `len` elements from index `at` to the start of `pinned`.
    ///
    /// # Errors
    /// Elements that the buffer or `pinned` does not have, or a driver error.
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
        Self::begin_transfer(stream, pinned)
    }

    /// Enqueues a copy of the first `len` elements of `pinned` to index `at` of the buffer.
    ///
    /// # Errors
    /// Elements that the buffer or `pinned` does not have, or a driver error.
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
        Self::begin_transfer(stream, pinned)
    }

    /// Records an event at the end of a copy.
    fn begin_transfer(stream: &Stream, pinned: Pinned<T>) -> Result<Transfer<T>, DeviceError> {
        match stream.event() {
            Ok(done) => Ok(Transfer { pinned: Some(pinned), done }),
            Err(error) => {
                if stream.synchronize().is_err() {
                    // The copy may still be running: the memory must not be freed.
                    std::mem::forget(pinned);
                }
                Err(error)
            }
        }
    }
}
