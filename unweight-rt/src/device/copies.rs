//! Copies between pageable host memory and the device, by several threads through pinned memory.
//!
//! ```text
//! host memory <--thread 0: copy--> pinned block A, B <--copy engine--> device memory
//!             <--thread 1: copy--> pinned block A, B <--copy engine-->
//! ```
//! The driver would copy pageable memory on one thread, which is several times slower than the link. Here each thread
//! fills or empties one block while the copy engine moves the other. A thread takes the next piece when it is done with
//! one, so a slow thread does not delay the others.
//!
//! These are not rayon's threads: a task that waits inside rayon may run another task meanwhile, which then could wait
//! for what the first one holds.

use std::{
    collections::VecDeque,
    marker::PhantomData,
    num::NonZero,
    ops::Range,
    sync::{Mutex, PoisonError},
    thread,
};

use bytemuck::Pod;
use unweight_format::raw::zeroed;

use crate::device::{DeviceBuffer, DeviceError, LaunchError, Pinned, Stream, Transfer};

/// Copies host memory to and from the device. All copies use one stream.
#[derive(Debug)]
pub(crate) struct Copier {
    stream: Stream,
    workers: Vec<Worker>,
}

/// The pinned blocks of one thread, allocated on first use.
#[derive(Debug, Default)]
struct Worker {
    idle: Vec<Pinned<u8>>,
    /// Uploads that may still run, in the order in which they started.
    sent: VecDeque<Transfer<u8>>,
}

/// Elements of a device buffer to download.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'a> {
    address: u64,
    bytes: usize,
    /// Size on the host: bytes after those of the device are zero.
    host_bytes: usize,
    buffer: PhantomData<&'a ()>,
}

impl<'a> Part<'a> {
    /// The first `len` elements of a buffer.
    ///
    /// # Errors
    /// The buffer has fewer elements.
    pub(crate) fn front<T: Pod>(buffer: &'a DeviceBuffer<T>, len: usize) -> Result<Self, DeviceError> {
        Self::range(buffer, 0..len)
    }

    /// The elements of `range`.
    ///
    /// # Errors
    /// The buffer does not have them.
    pub(crate) fn range<T: Pod>(buffer: &'a DeviceBuffer<T>, range: Range<usize>) -> Result<Self, DeviceError> {
        let address = buffer.element(range.start, range.len())?;
        let bytes = range.len() * size_of::<T>();
        Ok(Self { address, bytes, host_bytes: bytes, buffer: PhantomData })
    }

    /// All elements of a buffer.
    pub(crate) fn all<T: Pod>(buffer: &'a DeviceBuffer<T>) -> Result<Self, DeviceError> {
        Self::front(buffer, buffer.len())
    }

    /// The address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes on the host.
    pub(crate) fn host_bytes(&self) -> usize {
        self.host_bytes
    }

    /// Rounds the size on the host up to a multiple of `unit` bytes.
    pub(crate) fn padded(self, unit: usize) -> Self {
        Self { host_bytes: self.bytes.next_multiple_of(unit), ..self }
    }
}

impl Copier {
    /// Bytes of a pinned block, and of the pieces that threads take.
    const BLOCK_BYTES: usize = 2 << 20;
    /// Pinned blocks of a thread.
    const BLOCKS: usize = 2;
    /// Maximum number of threads: enough for the rate of the link.
    const THREADS: usize = 8;

    /// Creates a copier; allocates nothing yet.
    pub(crate) fn new(stream: &Stream) -> Self {
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(Self::THREADS);
        Self { stream: stream.clone(), workers: std::iter::repeat_with(Worker::default).take(threads).collect() }
    }

    /// Returns the stream of the copies.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Overwrites the front of a buffer with little-endian bytes, in stream order. `host` may be changed when this
    /// returns.
    ///
    /// # Errors
    /// The buffer is too small, pinned memory cannot be allocated, or a driver error.
    pub(crate) fn upload<T: Pod>(&mut self, to: &mut DeviceBuffer<T>, host: &[u8]) -> Result<(), DeviceError> {
        if !host.len().is_multiple_of(size_of::<T>()) {
            let unit = size_of::<T>() as u64;
            return Err(LaunchError::Partial { section: "a matrix", bytes: host.len() as u64, unit }.into());
        }
        let to = to.element(0, host.len() / size_of::<T>())?;
        let pieces = host.chunks(Self::BLOCK_BYTES).enumerate();
        let pieces = Mutex::new(pieces.map(|(i, piece)| (to + (i * Self::BLOCK_BYTES) as u64, piece)));
        let stream = &self.stream;
        share(&mut self.workers, host.len(), |worker| {
            while let Some((to, piece)) = next(&pieces) {
                // SAFETY: a part of the range that was checked above; the buffer is owned or borrowed memory that only
                // `cuMemFree` or its owner frees, after this stream's work.
                unsafe { worker.send(stream, to, piece) }?;
            }
            Ok(())
        })
    }

    /// Copies parts of device buffers to the host, after earlier work of the stream. Waits for the copies.
    ///
    /// # Errors
    /// Pinned memory cannot be allocated, or an error of earlier work on the stream.
    pub(crate) fn download(&mut self, parts: &[Part<'_>]) -> Result<Vec<Vec<u8>>, DeviceError> {
        // On huge pages, which the copying threads touch first: a page fault every 4 KiB would take most of the time.
        let mut host: Vec<Vec<u8>> = parts.iter().map(|part| zeroed(part.host_bytes)).collect();
        let pieces = parts.iter().zip(&mut host).flat_map(|(part, host)| {
            let chunks = host[..part.bytes].chunks_mut(Self::BLOCK_BYTES).enumerate();
            chunks.map(move |(i, piece)| (part.address + (i * Self::BLOCK_BYTES) as u64, piece))
        });
        let pieces = Mutex::new(pieces);
        let stream = &self.stream;
        let bytes = parts.iter().map(|part| part.bytes).sum();
        share(&mut self.workers, bytes, |worker| {
            let mut running: Option<(Transfer<u8>, &mut [u8])> = None;
            while let Some((from, piece)) = next(&pieces) {
                // SAFETY: inside a buffer that is borrowed until all copies are done.
                let transfer = unsafe { worker.receive(stream, from, piece.len()) }?;
                if let Some((transfer, piece)) = running.replace((transfer, piece)) {
                    worker.take(transfer, piece)?;
                }
            }
            running.map_or(Ok(()), |(transfer, piece)| worker.take(transfer, piece))
        })?;
        Ok(host)
    }
}

impl Worker {
    /// Enqueues a copy of at most a block to the device.
    ///
    /// # Safety
    /// As for [`Pinned::send`].
    unsafe fn send(&mut self, stream: &Stream, to: u64, piece: &[u8]) -> Result<(), DeviceError> {
        let reuse = if self.sent.len() < Copier::BLOCKS { None } else { self.sent.pop_front() };
        let mut block = match (reuse, self.idle.pop()) {
            (Some(sent), idle) => {
                self.idle.extend(idle);
                sent.wait()?
            }
            (None, Some(idle)) => idle,
            (None, None) => Pinned::zeroed(stream.device(), Copier::BLOCK_BYTES)?,
        };
        block[..piece.len()].copy_from_slice(piece);
        // SAFETY: the caller's promise.
        self.sent.push_back(unsafe { block.send(stream, to, piece.len()) }?);
        Ok(())
    }

    /// Enqueues a copy of at most a block from the device.
    ///
    /// # Safety
    /// As for [`Pinned::receive`].
    unsafe fn receive(&mut self, stream: &Stream, from: u64, bytes: usize) -> Result<Transfer<u8>, DeviceError> {
        let block = match (self.idle.pop(), self.sent.pop_front()) {
            (Some(idle), sent) => {
                if let Some(sent) = sent {
                    self.sent.push_front(sent);
                }
                idle
            }
            (None, Some(sent)) => sent.wait()?,
            (None, None) => Pinned::zeroed(stream.device(), Copier::BLOCK_BYTES)?,
        };
        // SAFETY: the caller's promise.
        unsafe { block.receive(stream, from, bytes) }
    }

    /// Waits for a copy from the device and passes its bytes on.
    fn take(&mut self, transfer: Transfer<u8>, to: &mut [u8]) -> Result<(), DeviceError> {
        let block = transfer.wait()?;
        to.copy_from_slice(&block[..to.len()]);
        self.idle.push(block);
        Ok(())
    }
}

/// Takes the next piece, in any thread.
fn next<T>(pieces: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    pieces.lock().unwrap_or_else(PoisonError::into_inner).next()
}

/// Runs `work` on this thread and, for more than one block, on others. Returns the first error.
fn share(
    workers: &mut [Worker],
    bytes: usize,
    work: impl Fn(&mut Worker) -> Result<(), DeviceError> + Sync,
) -> Result<(), DeviceError> {
    let count = bytes.div_ceil(Copier::BLOCK_BYTES).clamp(1, workers.len());
    let Some((own, others)) = workers[..count].split_first_mut() else { return Ok(()) };
    thread::scope(|scope| {
        // Without further threads, this one copies everything.
        let others = others.iter_mut().map_while(|worker| {
            let work = &work;
            thread::Builder::new().spawn_scoped(scope, move || work(worker)).ok()
        });
        let others: Vec<_> = others.collect();
        let own = work(own);
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        others.into_iter().map(join).fold(own, Result::and)
    })
}
