//! Double-buffered uploads through pinned memory: one buffer is filled while the other is copied.
//!
//! Memory into which a file is read is pageable, so the driver would copy it once more, on one thread. Here all
//! processors do that copy, ahead of the copy engine.

use std::mem::size_of;

use bytemuck::Pod;
use rayon::prelude::*;

use crate::device::{DeviceBuffer, DeviceError, LaunchError, MatrixMut, Pinned, Stream, Transfer};

/// Two pinned buffers, allocated on first use. All copies use one stream.
#[derive(Debug)]
pub struct Staging {
    stream: Stream,
    /// The last copies; the older one is reused next.
    slots: [Option<Transfer<u8>>; 2],
}

impl Staging {
    /// Size of each buffer in bytes.
    const BUFFER_BYTES: usize = 64 << 20;
    /// Bytes that one processor copies at a time.
    const CHUNK_BYTES: usize = 1 << 20;

    /// Creates buffers for uploads on a stream; allocates nothing yet.
    pub fn new(stream: &Stream) -> Self {
        Self { stream: stream.clone(), slots: [None, None] }
    }

    /// Returns the stream of the copies.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Writes the rows of `to` from contiguous little-endian BF16, in stream order.
    ///
    /// # Errors
    /// As for [`MatrixMut::write`].
    pub fn write(&mut self, to: &mut MatrixMut<'_>, bytes: &[u8]) -> Result<(), DeviceError> {
        let address = to.check_bytes(&self.stream, bytes.len())?;
        // SAFETY: the view was checked against its memory when it was created, is contiguous and has this many bytes.
        // Dropping a buffer waits for the copy.
        unsafe { self.send(address, bytes) }
    }

    /// Enqueues a copy; `bytes` may be freed when this returns.
    ///
    /// # Safety
    /// `to` is the address of `bytes.len()` bytes on the stream's device, which only `cuMemFree` frees.
    unsafe fn send(&mut self, to: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let mut to = to;
        for piece in bytes.chunks(Self::BUFFER_BYTES) {
            let mut pinned = match self.slots[0].take() {
                Some(transfer) => transfer.wait()?,
                None => Pinned::zeroed(self.stream.device(), Self::BUFFER_BYTES)?,
            };
            let chunks = pinned.par_chunks_mut(Self::CHUNK_BYTES).zip(piece.par_chunks(Self::CHUNK_BYTES));
            chunks.for_each(|(to, from)| to[..from.len()].copy_from_slice(from));
            // SAFETY: a part of the range that the caller promises.
            self.slots[0] = Some(unsafe { pinned.send(&self.stream, to, piece.len()) }?);
            self.slots.swap(0, 1);
            to += piece.len() as u64;
        }
        Ok(())
    }
}

/// A way to upload the sections of a tensor to the device.
pub trait Upload {
    /// Uploads values from their little-endian bytes, in stream order.
    ///
    /// # Errors
    /// `bytes` is not a whole number of values, not enough memory, or a driver error.
    fn section<T: Pod>(&mut self, bytes: &[u8]) -> Result<DeviceBuffer<T>, DeviceError>;

    /// Waits until all sections are uploaded, so that any stream may use them.
    ///
    /// # Errors
    /// An error of earlier work on the stream.
    fn finish(&mut self) -> Result<(), DeviceError>;
}

/// Uploads directly from the bytes, without pinned memory.
impl Upload for &Stream {
    fn section<T: Pod>(&mut self, bytes: &[u8]) -> Result<DeviceBuffer<T>, DeviceError> {
        let mut buffer = DeviceBuffer::zeroed(self, elements::<T>(bytes)?)?;
        buffer.write_bytes(self, bytes)?;
        Ok(buffer)
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.synchronize()
    }
}

impl Upload for &mut Staging {
    fn section<T: Pod>(&mut self, bytes: &[u8]) -> Result<DeviceBuffer<T>, DeviceError> {
        let buffer = DeviceBuffer::zeroed(&self.stream, elements::<T>(bytes)?)?;
        // SAFETY: the buffer has this many bytes. Dropping it waits for the copy.
        unsafe { self.send(buffer.address(), bytes) }?;
        Ok(buffer)
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.stream.synchronize()
    }
}

fn elements<T>(bytes: &[u8]) -> Result<usize, LaunchError> {
    if bytes.len().is_multiple_of(size_of::<T>()) {
        Ok(bytes.len() / size_of::<T>())
    } else {
        Err(LaunchError::Partial { section: "a section", bytes: bytes.len() as u64, unit: size_of::<T>() as u64 })
    }
}
