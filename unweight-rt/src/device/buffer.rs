//! Device memory.

use std::{fmt, marker::PhantomData, mem::size_of, ops::Range};

use bytemuck::Pod;
use cudarc::driver::{result, sys};

use crate::device::{Call, Device, DeviceError, LaunchError, Stream};

/// `[T]` on the device, 256-byte aligned.
///
/// At least [`DeviceBuffer::PAD_BYTES`] allocated bytes follow its last element: bulk copies round their ends up to
/// 16 bytes and may read (never write) past a section.
pub struct DeviceBuffer<T> {
    device: Device,
    address: u64,
    len: usize,
    /// Whether dropping the buffer frees the memory.
    is_owned: bool,
    marker: PhantomData<T>,
}

// SAFETY: an address and a length; the memory itself is accessed through streams, which the driver serialises.
unsafe impl<T: Send> Send for DeviceBuffer<T> {}
// SAFETY: shared references only copy out of the memory or pass its address to kernels.
unsafe impl<T: Sync> Sync for DeviceBuffer<T> {}

impl<T: Pod> DeviceBuffer<T> {
    /// The number of readable bytes after the last element.
    pub const PAD_BYTES: usize = 256;

    /// Allocates `len` elements and sets them and the padding to zero. Waits for the stream, so that any stream may use
    /// the buffer.
    pub fn zeroed(stream: &Stream, len: usize) -> Result<Self, DeviceError> {
        let device = stream.device().clone();
        let bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.checked_add(2 * Self::PAD_BYTES - 1))
            .map(|bytes| bytes / Self::PAD_BYTES * Self::PAD_BYTES)
            .ok_or(LaunchError::TooLarge {
                what: "elements",
                value: len as u64,
                limit: (usize::MAX / size_of::<T>().max(1)) as u64,
            })?;
        device.bind()?;
        // SAFETY: the memory is cleared below, before anything can read it.
        let allocated = unsafe { result::malloc_sync(bytes) }.call("allocating device memory");
        let address = allocated.map_err(|error| {
            error.or_out_of_memory(|| {
                let free = device.memory().map_or(0, |(free, _)| free as u64);
                DeviceError::Room { bytes: bytes as u64, free }
            })
        })?;
        let buffer = Self { device, address, len, is_owned: true, marker: PhantomData };
        // SAFETY: the range was just allocated. `T: Pod` is valid with zeros.
        unsafe { result::memset_d8_async(address, 0, bytes, stream.raw()) }.call("clearing device memory")?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Borrows memory that something else owns, such as a tensor of another framework. Dropping the buffer neither
    /// frees memory nor waits.
    ///
    /// # Safety
    /// `address` is the device address of `len` elements on `device`, followed by [`DeviceBuffer::PAD_BYTES`] more
    /// bytes that may be read (and, by [`DeviceBuffer::fill_padding`], written). The whole range stays allocated, and
    /// nothing else writes it, until the buffer is dropped and all work that uses it is done, including every replay of
    /// a graph that captured it.
    ///
    /// # Errors
    /// [`LaunchError::Alignment`] if the address is not a multiple of [`DeviceBuffer::PAD_BYTES`].
    /// [`LaunchError::TooLarge`] if the range ends beyond the address space.
    pub unsafe fn borrow(device: &Device, address: u64, len: usize) -> Result<Self, LaunchError> {
        check_borrowed(address, len as u64, size_of::<T>() as u64, Self::PAD_BYTES as u64)?;
        Ok(Self { device: device.clone(), address, len, is_owned: false, marker: PhantomData })
    }

    /// Creates an empty buffer without memory.
    pub(crate) fn empty(device: &Device) -> Self {
        Self { device: device.clone(), address: 0, len: 0, is_owned: false, marker: PhantomData }
    }

    /// Creates a copy of `host`. Waits for the copy.
    pub fn from_host(stream: &Stream, host: &[T]) -> Result<Self, DeviceError> {
        let mut buffer = Self::zeroed(stream, host.len())?;
        buffer.write(stream, 0, host)?;
        Ok(buffer)
    }

    /// Overwrites elements from index `at`. Waits for the copy.
    pub fn write(&mut self, stream: &Stream, at: usize, host: &[T]) -> Result<(), DeviceError> {
        self.check(at, host.len())?;
        let to = self.address + (at * size_of::<T>()) as u64;
        // SAFETY: the range is inside the buffer.
        unsafe { copy_to_device(stream, to, bytemuck::cast_slice(host)) }
    }

    /// Overwrites all elements from their little-endian bytes. Waits for the copy.
    pub(super) fn write_bytes(&mut self, stream: &Stream, host: &[u8]) -> Result<(), DeviceError> {
        if host.len() != self.bytes() {
            let (got, expected) = (host.len() as u64, self.bytes() as u64);
            return Err(LaunchError::Elements { buffer: "the bytes of a section", got, expected }.into());
        }
        // SAFETY: `host` has exactly as many bytes as the buffer.
        unsafe { copy_to_device(stream, self.address, host) }
    }

    /// Copies all elements to the host, after earlier work on `stream`. Waits for the copy.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<T>, DeviceError> {
        self.read(stream, 0, self.len)
    }

    /// Copies `len` elements from index `at` to the host, after earlier work on `stream`. Waits for the copy.
    pub fn read(&self, stream: &Stream, at: usize, len: usize) -> Result<Vec<T>, DeviceError> {
        self.check(at, len)?;
        let mut host = vec![T::zeroed(); len];
        if len > 0 {
            self.device.bind()?;
            // SAFETY: the range is inside the buffer, and `host` lives until the wait below.
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
    pub(crate) fn fill_front(&mut self, stream: &Stream, len: usize, byte: u8) -> Result<(), DeviceError> {
        self.check(0, len)?;
        self.device.bind()?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the range is inside the buffer. Any bytes are a valid `T: Pod`.
        unsafe { result::memset_d8_async(self.address, byte, len * size_of::<T>(), stream.raw()) }
            .call("filling device memory")
    }

    /// Sets the padding bytes after the last element, so that [`DeviceBuffer::padding`] reveals a kernel that writes
    /// past the end.
    pub fn fill_padding(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: `zeroed` allocates at least this many bytes after the elements.
        unsafe { result::memset_d8_async(self.address + self.bytes() as u64, byte, Self::PAD_BYTES, stream.raw()) }
            .call("filling device memory")
    }

    /// Returns the [`DeviceBuffer::PAD_BYTES`] after the last element. Waits for earlier work on `stream`.
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
            let (got, expected) = (source.len as u64, self.len as u64);
            return Err(LaunchError::Elements { buffer: "the source of a copy", got, expected }.into());
        }
        self.device.bind()?;
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are whole buffers of this many bytes.
        unsafe { result::memcpy_dtod_async(self.address, source.address, self.bytes(), stream.raw()) }
            .call("copying on the device")
    }

    /// Copies the elements to a new buffer. Waits for the stream, so that any stream may use the copy.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, DeviceError> {
        let mut copy = Self::zeroed(stream, self.len)?;
        copy.copy_from(stream, self)?;
        stream.synchronize()?;
        Ok(copy)
    }

    /// Returns the address of element `at`, after checking that `len` elements exist from there.
    pub(crate) fn element(&self, at: usize, len: usize) -> Result<u64, DeviceError> {
        self.check(at, len)?;
        Ok(self.address + (at * size_of::<T>()) as u64)
    }

    fn check(&self, at: usize, len: usize) -> Result<(), DeviceError> {
        if at.checked_add(len).is_some_and(|end| end <= self.len) {
            Ok(())
        } else {
            Err(LaunchError::Range { at: at as u64, len: len as u64, have: self.len as u64 }.into())
        }
    }
}

/// Checks that a buffer of `len` elements and its padding fit at an address.
fn check_borrowed(address: u64, len: u64, element: u64, pad: u64) -> Result<(), LaunchError> {
    // Aligned like an allocation, because bulk copies and tensor maps read sections.
    if !address.is_multiple_of(pad) {
        return Err(LaunchError::Alignment { operand: "a borrowed buffer", address, bytes: pad });
    }
    let end =
        len.checked_mul(element).and_then(|bytes| bytes.checked_add(pad)).and_then(|all| all.checked_add(address));
    let limit = (u64::MAX - address).saturating_sub(pad) / element.max(1);
    end.map(|_| ()).ok_or(LaunchError::TooLarge { what: "elements", value: len, limit })
}

/// Copies from any host memory, and waits for the copy.
///
/// # Safety
/// `to` is the address of `host.len()` bytes of device memory.
pub(crate) unsafe fn copy_to_device(stream: &Stream, to: u64, host: &[u8]) -> Result<(), DeviceError> {
    if host.is_empty() {
        return Ok(());
    }
    stream.device().bind()?;
    // SAFETY: the caller's promise; `host` lives until the wait below.
    unsafe { result::memcpy_htod_async(to, host, stream.raw()) }.call("copying to the device")?;
    stream.synchronize()
}

/// Enqueues a copy of `bytes` bytes between two addresses.
///
/// # Safety
/// Both are addresses of so many bytes on the stream's device, without overlap, until the copy is done.
pub(crate) unsafe fn copy_on_device(stream: &Stream, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
    stream.device().bind()?;
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.raw()) }.call("copying on the device")
}

impl DeviceBuffer<u8> {
    /// Enqueues a copy of bytes from index `from` to `len` elements of `to` from index `at`. The caller orders it with
    /// other accesses to these elements.
    pub(crate) fn copy_to<T: Pod>(
        &self,
        stream: &Stream,
        from: usize,
        (to, at, len): (&DeviceBuffer<T>, usize, usize),
    ) -> Result<(), DeviceError> {
        let target = to.element(at, len)?;
        let bytes = len * size_of::<T>();
        let source = self.element(from, bytes)?;
        self.device.bind()?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are inside their buffers, whose memory only `cuMemFree` frees. Any bytes are a valid
        // `T: Pod`.
        unsafe { result::memcpy_dtod_async(target, source, bytes, stream.raw()) }.call("copying on the device")
    }
}

impl DeviceBuffer<u16> {
    /// Sets the first `len` elements, in stream order.
    pub(crate) fn fill_elements(&mut self, stream: &Stream, len: usize, value: u16) -> Result<(), DeviceError> {
        self.check(0, len)?;
        self.device.bind()?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the range is inside the buffer, whose elements have 16 bits.
        unsafe { sys::cuMemsetD16Async(self.address, value, len, stream.raw()) }.result().call("filling device memory")
    }
}

impl<T> DeviceBuffer<T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size of the elements in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the device that holds the buffer.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the device address, for a kernel's arguments.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the address range of the elements.
    pub(crate) fn span(&self) -> Range<u64> {
        // An allocation ends inside the address space.
        self.address..self.address + self.bytes() as u64
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if !self.is_owned {
            return;
        }
        // A failure cannot be handled here; the context keeps it and reports it at the next call.
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

/// Converts `value` to a length in host memory.
pub(crate) fn length(what: &'static str, value: u64) -> Result<usize, LaunchError> {
    usize::try_from(value).map_err(|_| LaunchError::TooLarge { what, value, limit: usize::MAX as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borrowed_memory_must_be_aligned() {
        assert_eq!(check_borrowed(0x7f00_0000_0100, 1 << 40, 2, 256), Ok(()));
        assert_eq!(check_borrowed(0x100, 0, 4, 256), Ok(()));
        for address in [0x101, 0x110, 0x180] {
            let operand = "a borrowed buffer";
            assert_eq!(
                check_borrowed(address, 1, 1, 256),
                Err(LaunchError::Alignment { operand, address, bytes: 256 })
            );
        }
        let top = u64::MAX - 255 - 0x1000;
        let limit = (0x1000 - 1) / 2;
        assert_eq!(check_borrowed(top, limit, 2, 256), Ok(()));
        for len in [limit + 1, u64::MAX / 2, u64::MAX] {
            let refused = LaunchError::TooLarge { what: "elements", value: len, limit };
            assert_eq!(check_borrowed(top, len, 2, 256), Err(refused));
        }
    }
}
