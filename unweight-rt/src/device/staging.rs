//! Uploads through page-locked memory, of which one piece is filled while the other is copied.
//!
//! What a file is read into can be swapped out, so the driver would copy it once more, on one thread. Here all
//! processors do, ahead of the copy engine.

use std::mem::size_of;

use bytemuck::Pod;
use rayon::prelude::*;

use crate::device::{DeviceBuffer, DeviceError, LaunchError, MatrixMut, Pinned, Stream, Transfer};

/// Two pieces of page-locked memory, taken when they are first needed. Its copies go to one stream.
#[derive(Debug)]
pub struct Staging {
    stream: Stream,
    /// The last copies, the older of which is next.
    slots: [Option<Transfer<u8>>; 2],
}

impl Staging {
    /// Of each piece.
    const BYTES: usize = 64 << 20;
    /// What one processor copies at a time.
    const SHARE: usize = 1 << 20;

    /// Makes buffers for uploads on a stream.
    pub fn new(stream: &Stream) -> Self {
        Self { stream: stream.clone(), slots: [None, None] }
    }

    /// The stream that its copies go to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Writes the rows, little-endian bf16 one after the other, in stream order.
    ///
    /// # Errors
    /// As for [`MatrixMut::write`].
    pub fn write(&mut self, to: &mut MatrixMut<'_>, bytes: &[u8]) -> Result<(), DeviceError> {
        let address = to.check_bytes(&self.stream, bytes.len())?;
        // SAFETY: the view was held against its memory when it was made, has no gaps and as many bytes. Dropping a
        // buffer waits for the copy.
        unsafe { self.send(address, bytes) }
    }

    /// Enqueues a copy; `bytes` are no longer needed when it returns.
    ///
    /// # Safety
    /// `to` is the address of as many bytes on the stream's device, which are freed by `cuMemFree` at the earliest.
    unsafe fn send(&mut self, to: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let mut to = to;
        for piece in bytes.chunks(Self::BYTES) {
            let mut pinned = match self.slots[0].take() {
                Some(transfer) => transfer.wait()?,
                None => Pinned::zeroed(self.stream.device(), Self::BYTES)?,
            };
            let shares = pinned.par_chunks_mut(Self::SHARE).zip(piece.par_chunks(Self::SHARE));
            shares.for_each(|(to, from)| to[..from.len()].copy_from_slice(from));
            // SAFETY: the piece's part of what the caller promises.
            self.slots[0] = Some(unsafe { pinned.send(&self.stream, to, piece.len()) }?);
            self.slots.swap(0, 1);
            to += piece.len() as u64;
        }
        Ok(())
    }
}

/// A way to copy the sections of a tensor to the device.
pub trait Upload {
    /// A copy of the values whose little-endian bytes these are, in stream order.
    ///
    /// # Errors
    /// No whole number of values, not enough memory, or an error of the driver.
    fn section<T: Pod>(&mut self, bytes: &[u8]) -> Result<DeviceBuffer<T>, DeviceError>;

    /// Waits until all of it is there, so that any stream may use it.
    ///
    /// # Errors
    /// What failed on the stream.
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
        // SAFETY: a buffer of as many bytes. Dropping it waits for the copy.
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
