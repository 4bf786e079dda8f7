//! Pinned host memory that is allocated once and lent in ranges.
//!
//! Pinning takes longer than copying (65 ms against 2.1 ms for 117 MB), so memory for tensors is kept. A [`PinnedPool`]
//! never waits and never grows: it lends a range or nothing. A [`Download`] owns the ranges into which the copy engine
//! writes until it is done.

use std::{
    fmt,
    mem::size_of,
    ops::{Deref, DerefMut, Range},
    slice,
    sync::{Arc, Mutex, PoisonError},
};

use bytemuck::Pod;
use cudarc::driver::result;
use unweight_format::bundle::SectionBytes;

use crate::device::{
    Call, Copier, Device, DeviceBuffer, DeviceError, LaunchError, Pinned, Stream,
    copies::Part,
    ranges::{Ranges, places},
};

/// Pinned memory of fixed size, lent in ranges.
pub struct PinnedPool {
    /// Accessed through the buffers only.
    memory: Pinned<u8>,
    ranges: Mutex<Ranges>,
}

impl PinnedPool {
    /// Allocates `bytes` bytes.
    ///
    /// # Errors
    /// The host cannot pin this much memory.
    pub fn new(device: &Device, bytes: usize) -> Result<Arc<Self>, DeviceError> {
        let too_large = || LaunchError::TooLarge { what: "bytes", value: bytes as u64, limit: usize::MAX as u64 };
        let bytes = Ranges::rounded(bytes).ok_or_else(too_large)?;
        let memory = Pinned::on_huge_pages(device, bytes)?;
        Ok(Arc::new(Self { memory, ranges: Mutex::new(Ranges::new(bytes)) }))
    }

    /// Lends `bytes` bytes, which have any contents; `None` if they are not free.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<PinnedBuffer> {
        let range = self.ranges.lock().unwrap_or_else(PoisonError::into_inner).take(bytes)?;
        Some(PinnedBuffer { pool: self.clone(), range, bytes })
    }

    /// Whether all of `bytes` is memory of this pool.
    fn contains(&self, bytes: &[u8]) -> bool {
        let (own, other) = (self.memory.address_range(), bytes.as_ptr_range());
        own.start <= other.start as usize && other.end as usize <= own.end
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedPool[{}]", self.memory.address_range().len())
    }
}

/// A range of pinned memory that a pool lent. Dropping it returns the range.
#[derive(Debug)]
pub struct PinnedBuffer {
    pool: Arc<PinnedPool>,
    range: Range<usize>,
    bytes: usize,
}

impl PinnedBuffer {
    fn start(&self) -> *mut u8 {
        // SAFETY: the range is inside the memory.
        unsafe { self.pool.memory.as_ptr().add(self.range.start) }
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised when the pool was created. No other buffer has the range, and no copy is running: a
        // running copy to the memory owns the buffer.
        unsafe { slice::from_raw_parts(self.start(), self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let range = self.range.clone();
        self.pool.ranges.lock().unwrap_or_else(PoisonError::into_inner).give_back(range);
    }
}

/// Pinned memory for tensors on their way to the device, and apart from it for their sections on the way back, so that
/// neither takes it all.
#[derive(Debug)]
pub struct HostMemory {
    tensors: Arc<PinnedPool>,
    sections: Arc<PinnedPool>,
}

impl HostMemory {
    /// Smaller tensors and sections are not worth a copy of their own.
    pub(crate) const BYTES_MIN: usize = 256 << 10;
    /// Sections begin at multiples of this number of bytes.
    const ALIGN: usize = 256;

    /// Allocates memory for tensors and for sections.
    ///
    /// # Errors
    /// The host cannot pin this much memory.
    pub fn new(device: &Device, tensor_bytes: usize, section_bytes: usize) -> Result<Self, DeviceError> {
        let (tensors, sections) = (PinnedPool::new(device, tensor_bytes)?, PinnedPool::new(device, section_bytes)?);
        Ok(Self { tensors, sections })
    }

    /// Overwrites all memory that is not lent, which reveals what a copy does not write. For tests.
    #[doc(hidden)]
    pub fn poison(&self, byte: u8) {
        for pool in [&self.tensors, &self.sections] {
            let mut free = Vec::new();
            for unit in (0..usize::BITS).rev().map(|bit| 1 << bit) {
                free.extend(std::iter::from_fn(|| pool.take(unit)));
            }
            free.iter_mut().for_each(|buffer| buffer.fill(byte));
        }
    }

    /// Lends memory for a tensor; `None` if there is not enough, or the tensor is small.
    pub fn tensor(&self, bytes: usize) -> Option<PinnedBuffer> {
        (bytes >= Self::BYTES_MIN).then(|| self.tensors.take(bytes)).flatten()
    }

    /// Lends memory for a section; `None` if there is not enough, or the section is small.
    pub(crate) fn section(&self, bytes: usize) -> Option<PinnedBuffer> {
        (bytes >= Self::BYTES_MIN).then(|| self.sections.take(bytes)).flatten()
    }

    /// Whether the copy engine reads `bytes` directly.
    pub(crate) fn contains(&self, bytes: &[u8]) -> bool {
        self.tensors.contains(bytes)
    }

    /// Copies parts of device buffers to the host, after earlier work of the copier's stream: to memory lent from
    /// `memory` if there is enough. Waits for the copies.
    ///
    /// # Errors
    /// An error of earlier work on the stream, or memory for the copies cannot be pinned.
    pub(crate) fn download(
        memory: Option<&Self>,
        copier: &mut Copier,
        parts: &[Part<'_>],
    ) -> Result<Vec<SectionBytes>, DeviceError> {
        let found = places(parts.iter().map(Part::host_bytes), Self::ALIGN);
        let found = found.and_then(|(places, bytes)| Some((places, memory?.section(bytes)?)));
        let Some((places, buffer)) = found else {
            return Ok(copier.download(parts)?.into_iter().map(SectionBytes::from).collect());
        };
        let stream = copier.stream().clone();
        let mut download = Download::new(&stream, buffer);
        for (part, place) in parts.iter().zip(&places) {
            download.add(part, place.clone())?;
        }
        let buffer = Arc::new(download.finish()?);
        let section = |place: Range<usize>| SectionBytes::part(buffer.clone(), place);
        let sections: Option<Vec<_>> = places.into_iter().map(section).collect();
        Ok(sections.unwrap_or_else(|| unreachable!("`places` returned ranges inside the buffer")))
    }
}

/// Copies to pinned memory that may be running. Dropping them waits.
#[derive(Debug)]
pub(crate) struct Download<'s> {
    stream: &'s Stream,
    /// `None` once the memory was returned.
    buffer: Option<PinnedBuffer>,
}

impl<'s> Download<'s> {
    /// Begins copies on `stream` to `buffer`.
    pub(crate) fn new(stream: &'s Stream, buffer: PinnedBuffer) -> Self {
        Self { stream, buffer: Some(buffer) }
    }

    /// Enqueues a copy of a part to a range of the buffer, whose bytes after those of the device become zero.
    ///
    /// # Errors
    /// Bytes that the buffer does not have, or a driver error.
    pub(crate) fn add(&mut self, part: &Part<'_>, to: Range<usize>) -> Result<(), DeviceError> {
        let all = self.buffer.as_deref_mut().unwrap_or_default();
        let have = all.len() as u64;
        let (at, len) = (to.start as u64, part.host_bytes() as u64);
        let Some(host) = all.get_mut(to).filter(|host| host.len() == part.host_bytes()) else {
            return Err(LaunchError::Range { at, len, have }.into());
        };
        let (host, rest) = host.split_at_mut(part.bytes());
        rest.fill(0);
        self.stream.device().bind()?;
        if !host.is_empty() {
            // SAFETY: the part is inside its buffer, whose memory only `cuMemFree` frees, after this copy. The host
            // memory is neither read nor lent to others until the stream's work is done.
            unsafe { result::memcpy_dtoh_async(host, part.address(), self.stream.raw()) }
                .call("copying from the device")?;
        }
        Ok(())
    }

    /// Waits for the copies and returns the memory.
    ///
    /// # Errors
    /// An error of earlier work on the stream.
    pub(crate) fn finish(mut self) -> Result<PinnedBuffer, DeviceError> {
        self.stream.synchronize()?;
        match self.buffer.take() {
            Some(buffer) => Ok(buffer),
            None => unreachable!("taken here alone, and `finish` consumes the copies"),
        }
    }
}

impl Drop for Download<'_> {
    fn drop(&mut self) {
        if self.buffer.is_some() && self.stream.synchronize().is_err() {
            // A copy may still be running: the range must not be lent again.
            std::mem::forget(self.buffer.take());
        }
    }
}

/// Copies from borrowed pinned memory that may be running. Dropping them waits.
#[derive(Debug)]
pub(crate) struct Upload<'s, 'b> {
    stream: &'s Stream,
    bytes: &'b [u8],
}

impl<'s, 'b> Upload<'s, 'b> {
    /// Begins copies of parts of `bytes` on `stream`.
    pub(crate) fn new(stream: &'s Stream, bytes: &'b [u8]) -> Self {
        Self { stream, bytes }
    }

    /// Enqueues a copy of a range of the bytes to index `at` of a buffer.
    ///
    /// # Errors
    /// Bytes or elements that do not exist, or a driver error.
    pub(crate) fn add<T: Pod>(
        &mut self,
        range: Range<usize>,
        to: &mut DeviceBuffer<T>,
        at: usize,
    ) -> Result<(), DeviceError> {
        let len = range.len() / size_of::<T>();
        let address = to.element(at, len)?;
        let (start, have) = (range.start as u64, self.bytes.len() as u64);
        let host = self.bytes.get(range).filter(|host| host.len() == len * size_of::<T>());
        let Some(host) = host else {
            return Err(LaunchError::Range { at: start, len: len as u64, have }.into());
        };
        self.stream.device().bind()?;
        if !host.is_empty() {
            // SAFETY: the range is inside the buffer, whose memory only `cuMemFree` frees; the bytes are borrowed until
            // the stream's work is done.
            unsafe { result::memcpy_htod_async(address, host, self.stream.raw()) }.call("copying to the device")?;
        }
        Ok(())
    }

    /// Waits for the copies.
    ///
    /// # Errors
    /// An error of earlier work on the stream.
    pub(crate) fn finish(self) -> Result<(), DeviceError> {
        self.stream.synchronize()
    }
}

impl Drop for Upload<'_, '_> {
    fn drop(&mut self) {
        // A failure was or will be returned by another call. The copies then only read memory that stays pinned.
        let _ = self.stream.synchronize();
    }
}
