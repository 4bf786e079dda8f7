//! The weights of experts in pinned host memory, and how one expert gets to a slot.

use unweight_format::{
    TileGrid,
    raw::{
        compact::Uncompact,
        layout::DENSE_TILE_BYTES,
        packed::{self, ROW_BLOCKS},
    },
};

use super::{
    link::Link,
    pieces::{Pieces, TILES_MAX},
};
use crate::{
    device::{
        DeviceError, LaunchError, Pinned, Stream,
        pinned::{Gather, Source},
    },
    ops::encode_compact::EncodeCompactError,
    weight::{CompactTables, DeviceCompact, DeviceMatrix, DevicePacked, ExpertWeights},
};

/// How the experts of one product are encoded in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostEncoding {
    /// Compact, about 10.9 bits per weight. Experts are expanded to packed tiles when they arrive.
    Compact,
    /// Packed, 12 bits per weight.
    Packed {
        /// Why they are not compact; `None` if that would not be smaller, or if packed was requested.
        why: Option<Uncompact>,
    },
    /// BF16, as on the device.
    Bf16,
}

/// Encodes packed weights as a compact tensor; `None` if packed ones are requested.
pub(in crate::layer) type Encode<'a> =
    &'a mut dyn FnMut(&DevicePacked) -> Result<Option<DeviceCompact>, EncodeCompactError>;

/// The weights of all experts for one product in host memory.
#[derive(Debug)]
pub(super) enum HostWeights {
    Compact {
        bytes: Source<u8>,
        pieces: Pieces,
        tables: CompactTables,
        /// The number of tiles per expert.
        each: usize,
    },
    Packed {
        tiles: Source<u8>,
        heads: Source<u32>,
        /// The number of tiles per expert.
        each: usize,
        why: Option<Uncompact>,
    },
    Bf16 {
        rows: Source<u16>,
        /// The number of elements per expert.
        each: usize,
    },
}

/// The experts whose weights are moved: rows of each, how many there are, and how many have slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub rows: u32,
    pub experts: u32,
    pub slots: u32,
}

impl HostWeights {
    /// Copies weights from the device to the host, and replaces them by room for the experts with slots. Packed weights
    /// are encoded by `encode`, and stay packed if they cannot be or if that is not smaller. Waits.
    pub(super) fn take(
        stream: &Stream,
        link: &Link,
        weights: ExpertWeights,
        counts: Counts,
        encode: Encode<'_>,
    ) -> Result<(Self, ExpertWeights), DeviceError> {
        let Counts { rows, slots, .. } = counts;
        // At most as many rows as all experts have.
        let all = rows.checked_mul(slots).ok_or(LaunchError::TooLarge {
            what: "rows of slots",
            value: u64::from(rows) * u64::from(slots),
            limit: u32::MAX.into(),
        })?;
        match weights {
            ExpertWeights::Packed(packed) => {
                let cols = packed.grid().cols();
                let each = TileGrid::new(rows as usize, cols)?.tiles();
                let (compact, why) = match encode(&packed) {
                    Ok(compact) => (compact, None),
                    Err(EncodeCompactError::Uncompact(why)) => (None, Some(why)),
                    Err(EncodeCompactError::Device(error)) => return Err(error),
                };
                let host = match compact {
                    Some(compact) => Self::take_compact((stream, link), &packed, compact, (counts.experts, each))?,
                    None => None,
                };
                let host = match host {
                    Some(host) => host,
                    None => Self::take_packed((stream, link), &packed, each, why)?,
                };
                let slots = packed.into_slots(stream, TileGrid::new(all as usize, cols)?)?;
                Ok((host, slots.into()))
            }
            ExpertWeights::Bf16 { weights, why } => {
                let cols = weights.cols();
                let elements = Pinned::zeroed(stream.device(), weights.data().len())?;
                let elements = weights.data().read_later(stream, 0, elements)?.wait()?;
                // Freed first, so that both need not fit in memory.
                drop(weights);
                let weights = DeviceMatrix::zeroed(stream, all, cols)?;
                let each = rows as usize * cols as usize;
                let rows = Source::new(link.copies(), elements);
                Ok((Self::Bf16 { rows, each }, ExpertWeights::Bf16 { weights, why }))
            }
        }
    }

    fn take_packed(
        (stream, link): (&Stream, &Link),
        weights: &DevicePacked,
        each: usize,
        why: Option<Uncompact>,
    ) -> Result<Self, DeviceError> {
        let device = stream.device();
        let tiles = Pinned::zeroed(device, weights.packed().len())?;
        let tiles = weights.packed().read_later(stream, 0, tiles)?.wait()?;
        let heads = Pinned::zeroed(device, weights.escape_heads().len())?;
        let heads = weights.escape_heads().read_later(stream, 0, heads)?.wait()?;
        let (tiles, heads) = (Source::new(link.copies(), tiles), Source::new(link.copies(), heads));
        Ok(Self::Packed { tiles, heads, each, why })
    }

    /// Copies a compact tensor of the same weights; `None` if the packed one is not larger.
    fn take_compact(
        (stream, link): (&Stream, &Link),
        weights: &DevicePacked,
        compact: DeviceCompact,
        (experts, each): (u32, usize),
    ) -> Result<Option<Self>, DeviceError> {
        let class_tiles = compact.tiles().to_host(stream)?;
        let pieces = Pieces::new(&class_tiles, (experts as usize, each), TILES_MAX)?;
        let of_packed = weights.packed().bytes() + weights.escape_heads().bytes();
        if pieces.bytes() >= of_packed {
            return Ok(None);
        }
        let mut gather = Gather::new(stream, pieces.bytes())?;
        for piece in pieces.all() {
            let (first, count) = (piece.tiles.start, piece.tiles.len());
            gather.add(compact.dense(), (first * DENSE_TILE_BYTES, count * DENSE_TILE_BYTES), piece.at)?;
            let heads = (first * ROW_BLOCKS, count * ROW_BLOCKS);
            gather.add(weights.escape_heads(), heads, piece.at + piece.heads_at())?;
            let words = (piece.words.start, piece.words.len());
            gather.add(compact.streams(), words, piece.at + piece.streams_at())?;
        }
        let mut bytes = gather.finish()?;
        for piece in pieces.all() {
            let table = piece.table(&class_tiles);
            let table: &[u8] = bytemuck::cast_slice(&table);
            let (at, have) = (piece.at + piece.table_at(), bytes.len() as u64);
            let to = bytes.get_mut(at..at + table.len());
            let range = LaunchError::Range { at: at as u64, len: table.len() as u64, have };
            to.ok_or(range)?.copy_from_slice(table);
        }
        let bytes = Source::new(link.copies(), bytes);
        Ok(Some(Self::Compact { bytes, pieces, tables: compact.into_tables(), each }))
    }

    /// Returns the encoding in host memory.
    pub(super) fn encoding(&self) -> HostEncoding {
        match self {
            Self::Compact { .. } => HostEncoding::Compact,
            Self::Packed { why, .. } => HostEncoding::Packed { why: *why },
            Self::Bf16 { .. } => HostEncoding::Bf16,
        }
    }

    /// Returns the size in host memory in bytes.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Compact { bytes, .. } => bytes.bytes(),
            Self::Packed { tiles, heads, .. } => tiles.bytes() + heads.bytes(),
            Self::Bf16 { rows, .. } => rows.bytes(),
        }
    }

    /// Returns the bytes on the device that slots do not include.
    pub(super) fn device_bytes(&self) -> u64 {
        match self {
            Self::Compact { tables, .. } => tables.bytes(),
            Self::Packed { .. } | Self::Bf16 { .. } => 0,
        }
    }

    /// Returns the bytes that a fetch of an expert copies.
    pub(super) fn fetch_bytes(&self, expert: u32) -> u64 {
        match self {
            Self::Compact { pieces, .. } => pieces.of(expert).iter().map(|piece| piece.bytes() as u64).sum(),
            Self::Packed { each, .. } => (each * (packed::TILE_BYTES + ROW_BLOCKS * size_of::<u32>())) as u64,
            Self::Bf16 { each, .. } => (each * size_of::<u16>()) as u64,
        }
    }

    /// Enqueues a fetch of an expert's weights to a slot; returns the copied bytes.
    pub(super) fn fetch(&self, link: &Link, expert: u32, to: &ExpertWeights, slot: u32) -> Result<u64, DeviceError> {
        let copied = self.fetch_bytes(expert);
        let (index, slot) = (expert as usize, slot as usize);
        match (self, to) {
            (Self::Compact { bytes, pieces, tables, each }, ExpertWeights::Packed(to)) => {
                for piece in pieces.of(expert) {
                    let first = slot * each + (piece.tiles.start - index * each);
                    link.fetch(piece, (bytes, tables), (to, first))?;
                }
            }
            (Self::Packed { tiles, heads, each, .. }, ExpertWeights::Packed(to)) => {
                let (bytes, words) = (each * packed::TILE_BYTES, each * ROW_BLOCKS);
                tiles.copy(index * bytes, bytes, to.packed(), slot * bytes)?;
                heads.copy(index * words, words, to.escape_heads(), slot * words)?;
            }
            (Self::Bf16 { rows, each }, ExpertWeights::Bf16 { weights, .. }) => {
                rows.copy(index * each, *each, weights.data(), slot * each)?;
            }
            (Self::Compact { .. } | Self::Packed { .. }, ExpertWeights::Bf16 { .. })
            | (Self::Bf16 { .. }, ExpertWeights::Packed(_)) => {
                unreachable!("`take` returns host memory and slots of the same weights")
            }
        }
        Ok(copied)
    }
}
