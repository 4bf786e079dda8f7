//! The way of experts from host memory to slots: streams and staging buffers, which all layers share.
//!
//! ```text
//! copies:  copy 0 | copy 1 | copy 2 | copy 3 | ...      pieces, into staging buffers 0, 1, 2, 0, ...
//! expand:           decode 0 | decode 1 | decode 2 ...  from the staging buffer to packed tiles in a slot
//! ```
//! Packed and BF16 weights are copied to their slot at once.

use std::sync::{Mutex, PoisonError};

use unweight_format::raw::packed;

use super::pieces::{BYTES_MAX, Piece, TILES_MAX};
use crate::{
    device::{DeviceBuffer, DeviceError, KernelSet, Mark, Stream, pinned::Source},
    ops::decode_compact::{Expander, TilesAt},
    weight::{CompactTables, DevicePacked},
};

/// The number of staging buffers: while one is decoded and one is filled, a third absorbs late decodes, because their
/// thread blocks wait for blocks of products.
const BUFFERS: usize = 3;

/// The streams and staging buffers that fetch experts.
#[derive(Debug)]
pub(in crate::layer) struct Link {
    copies: Stream,
    /// Decodes compact pieces.
    expand: Stream,
    /// All copies so far are done. A wait uses its last record, so it serves all.
    copied: Mark,
    expander: Expander,
    staging: Mutex<Staging>,
}

#[derive(Debug)]
struct Staging {
    buffers: Vec<Buffer>,
    /// The buffer of the next piece.
    next: usize,
    /// What decoding writes and nothing reads.
    scratch: DeviceBuffer<u8>,
}

#[derive(Debug)]
struct Buffer {
    bytes: DeviceBuffer<u8>,
    /// The last piece in it was decoded.
    decoded: Mark,
}

const _: () = assert!(Link::BYTES / 100_000 == 194, "stated in docs/engine.md");

impl Link {
    /// The size of the memory on the device in bytes.
    pub(super) const BYTES: usize = BUFFERS * BYTES_MAX + Expander::scratch_bytes(TILES_MAX);

    /// Allocates the staging buffers, and compiles or finds the kernel. Waits for `stream`.
    ///
    /// # Errors
    /// Too little memory, or a kernel that cannot be compiled or loaded.
    pub(in crate::layer) fn new(kernels: &KernelSet, stream: &Stream) -> Result<Self, DeviceError> {
        let device = stream.device();
        let buffer = || {
            Ok::<_, DeviceError>(Buffer {
                bytes: DeviceBuffer::zeroed(stream, BYTES_MAX)?,
                decoded: Mark::new(device)?,
            })
        };
        let buffers = (0..BUFFERS).map(|_| buffer()).collect::<Result<_, _>>()?;
        let scratch = DeviceBuffer::zeroed(stream, Expander::scratch_bytes(TILES_MAX))?;
        Ok(Self {
            copies: device.stream()?,
            // Decoding is short, and copies to its buffer wait for it.
            expand: device.urgent_stream()?,
            copied: Mark::new(device)?,
            expander: Expander::of(kernels)?,
            staging: Mutex::new(Staging { buffers, next: 0, scratch }),
        })
    }

    /// Returns the stream of copies from host memory.
    pub(super) fn copies(&self) -> &Stream {
        &self.copies
    }

    /// Makes all later fetches wait for a mark.
    pub(super) fn wait(&self, mark: &Mark) -> Result<(), DeviceError> {
        // Decoding waits for its copy.
        self.copies.wait(mark)
    }

    /// Records a mark when all fetches so far are done, copied and decoded. Marks are reached in the order of their
    /// records.
    pub(super) fn record(&self, mark: &Mark) -> Result<(), DeviceError> {
        // `copied`: packed and BF16 weights are in their slots.
        self.copies.record(&self.copied)?;
        self.expand.wait(&self.copied)?;
        self.expand.record(mark)
    }

    /// Enqueues the copy of a piece, and its decoding to tiles of `to` from index `first`, whose window and escapes are
    /// those of the same weights.
    ///
    /// # Errors
    /// Tiles or bytes that do not exist, or a driver error.
    pub(super) fn fetch(
        &self,
        piece: &Piece,
        (source, tables): (&Source<u8>, &CompactTables),
        (to, first): (&DevicePacked, usize),
    ) -> Result<(), DeviceError> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let Staging { buffers, next, scratch } = &mut *staging;
        let at = *next % BUFFERS;
        *next = at + 1;
        let Buffer { bytes, decoded } = &buffers[at];
        let count = piece.tiles.len();
        let target = to.packed().element(first * packed::TILE_BYTES, count * packed::TILE_BYTES)?;
        let room = scratch.element(0, Expander::scratch_bytes(count))?;
        // `decoded`: the piece before has been read before the copy overwrites it.
        self.copies.wait(decoded)?;
        source.copy(piece.at, piece.bytes(), bytes, 0)?;
        // `copied`: the piece is in the buffer before it is decoded. The slot is free then, too: the copy waited for
        // its readers.
        self.copies.record(&self.copied)?;
        self.expand.wait(&self.copied)?;
        let words = packed::ROW_BLOCKS;
        bytes.copy_to(&self.expand, piece.heads_at(), (to.escape_heads(), first * words, count * words))?;
        let section = |offset: usize| bytes.address() + offset as u64;
        let from = TilesAt {
            // At most `TILES_MAX` tiles, and a buffer has fewer than 2^32 bytes.
            count: count as u32,
            dense: section(0),
            tiles: section(piece.table_at()),
            streams: section(piece.streams_at()),
            stream_words: piece.words.len() as u32,
        };
        // SAFETY: the copy checked that the piece, whose parts these are, fits the buffer; tiles and scratch were
        // checked above. The marks keep copies away from the buffer, the order of this stream keeps other pieces away
        // from the scratch, and the callers' marks keep products away from the slot. Dropping memory waits.
        unsafe { self.expander.enqueue_tiles(&self.expand, (from, tables), to.window(), (target, room)) }?;
        self.expand.record(decoded)
    }

    /// Waits for all fetches, and sets every byte of the staging buffers. For tests.
    pub(super) fn poison(&self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.copies.synchronize()?;
        self.expand.synchronize()?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        for Buffer { bytes, .. } in &mut staging.buffers {
            bytes.fill_bytes(stream, byte)?;
        }
        stream.synchronize()
    }
}
