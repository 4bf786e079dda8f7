//! A KV cache at 12 bits per element: packed pages of all layers, their records, and BF16 units for data that do not
//! fit a record (`docs/kv-cache.md`).
//!
//! ```text
//! packed    u8  [layer][page][kv_head][tile][K | V][24 * head_dim]
//! records   u8  [layer][page][kv_head][K | V][32 or 48]
//! units     u8  [unit][128 * head_dim], shared by all layers
//! free      u32 [1 + units]: the number of free units, followed by their indices
//! ```
//! The page that a sequence is currently writing, its hot page, is a BF16 page of another cache ([`KvLayer`]). All
//! earlier pages of the sequence are packed, so a token's position alone determines where it is stored.

use std::{marker::PhantomData, ops::Range};

use unweight_codegen::kv::packed;

use crate::{
    device::{DeviceBuffer, DeviceError, LaunchError, Stream, view::check_device},
    ops::kv::{KvLayer, KvShape},
};

/// The entry of a page table for a page that is never packed, because its sequence ends in it.
pub const NO_PAGE: u32 = u32::MAX;

/// Sizes of a packed KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedShape {
    /// Pages, KV heads and head size of a layer.
    pub kv: KvShape,
    /// The number of layers.
    pub layers: u32,
    /// The number of BF16 units, shared by all layers.
    pub units: u32,
}

impl PackedShape {
    /// Creates the sizes of a cache with `layers` layers and `units` BF16 units.
    ///
    /// # Errors
    /// [`LaunchError::HeadDim`] if pages with this head size cannot be packed.
    pub fn new(kv: KvShape, layers: u32, units: u32) -> Result<Self, LaunchError> {
        let head_dim = kv.head_dim();
        if packed::takes(head_dim) { Ok(Self { kv, layers, units }) } else { Err(LaunchError::HeadDim { head_dim }) }
    }

    /// Returns the bytes of a page of one layer, including its records.
    pub fn page_bytes(kv_heads: u32, head_dim: u32) -> u64 {
        let head = packed::page_head_bytes(head_dim) + 2 * packed::record_bytes(head_dim);
        u64::from(kv_heads) * u64::from(head)
    }

    /// Returns the bytes of a BF16 unit, including its entry in the list of free units.
    pub fn unit_bytes(head_dim: u32) -> u64 {
        u64::from(packed::unit_bytes(head_dim)) + size_of::<u32>() as u64
    }

    fn heads(&self) -> u64 {
        u64::from(self.kv.pages()) * u64::from(self.kv.kv_heads())
    }

    /// Returns the bytes of the packed pages of one layer.
    fn layer_bytes(&self) -> u64 {
        self.heads() * u64::from(packed::page_head_bytes(self.kv.head_dim()))
    }

    /// Returns the bytes of the records of one layer.
    fn record_bytes(&self) -> u64 {
        self.heads() * 2 * u64::from(packed::record_bytes(self.kv.head_dim()))
    }
}

/// A packed KV cache of all layers.
#[derive(Debug)]
pub struct PackedKv {
    shape: PackedShape,
    packed: DeviceBuffer<u8>,
    records: DeviceBuffer<u8>,
    units: DeviceBuffer<u8>,
    free: DeviceBuffer<u32>,
}

impl PackedKv {
    /// Allocates a cache; all its units are free.
    ///
    /// # Errors
    /// A driver error, or sizes beyond the address space.
    pub fn new(stream: &Stream, shape: PackedShape) -> Result<Self, DeviceError> {
        let PackedShape { kv, layers, units } = shape;
        let bytes = |each: u64, count: u32| -> Result<usize, LaunchError> {
            let all = each.checked_mul(count.into()).and_then(|bytes| usize::try_from(bytes).ok());
            let (what, limit) = ("bytes of the KV cache", usize::MAX as u64);
            all.ok_or(LaunchError::TooLarge { what, value: u64::MAX, limit })
        };
        let free: Vec<u32> = std::iter::once(units).chain((0..units).rev()).collect();
        Ok(Self {
            packed: DeviceBuffer::zeroed(stream, bytes(shape.layer_bytes(), layers)?)?,
            records: DeviceBuffer::zeroed(stream, bytes(shape.record_bytes(), layers)?)?,
            units: DeviceBuffer::zeroed(stream, bytes(packed::unit_bytes(kv.head_dim()).into(), units)?)?,
            free: DeviceBuffer::from_host(stream, &free)?,
            shape,
        })
    }

    /// Returns the sizes of the cache.
    pub fn shape(&self) -> PackedShape {
        self.shape
    }

    /// Returns the number of free units. Waits for earlier work on `stream`.
    ///
    /// # Errors
    /// An error of earlier work on the stream.
    pub fn free_units(&self, stream: &Stream) -> Result<u32, DeviceError> {
        Ok(self.free.read(stream, 0, 1)?.first().copied().unwrap_or(0))
    }

    /// Returns all bytes of packed pages, for tests.
    pub fn packed_mut(&mut self) -> &mut DeviceBuffer<u8> {
        &mut self.packed
    }

    /// Returns all bytes of records, for tests.
    pub fn records_mut(&mut self) -> &mut DeviceBuffer<u8> {
        &mut self.records
    }

    /// Returns all bytes of BF16 units, for tests.
    pub fn units_mut(&mut self) -> &mut DeviceBuffer<u8> {
        &mut self.units
    }

    /// Returns the number of free units, followed by their indices, for tests.
    pub fn free_mut(&mut self) -> &mut DeviceBuffer<u32> {
        &mut self.free
    }

    /// Returns all layers.
    pub fn layers(&mut self) -> PackedLayers<'_> {
        PackedLayers {
            shape: self.shape,
            device: self.packed.device().ordinal(),
            packed: self.packed.address(),
            records: self.records.address(),
            units: self.units.address(),
            free: self.free.address(),
            memory: PhantomData,
        }
    }

    /// Returns layer `layer`, counted from 0.
    ///
    /// # Errors
    /// [`LaunchError::Range`] if the cache has fewer layers.
    pub fn layer(&mut self, layer: u32) -> Result<PackedLayers<'_>, LaunchError> {
        let shape = self.shape;
        if layer >= shape.layers {
            return Err(LaunchError::Range { at: layer.into(), len: 1, have: shape.layers.into() });
        }
        let all = self.layers();
        Ok(PackedLayers {
            shape: PackedShape { layers: 1, ..shape },
            packed: all.packed + u64::from(layer) * shape.layer_bytes(),
            records: all.records + u64::from(layer) * shape.record_bytes(),
            ..all
        })
    }
}

/// Layers of a packed cache, for reading and writing: all layers or one.
///
/// Page indices come from tables on the device. Kernels skip an index that is not in the cache, and
/// [`ExecContext::synchronize`](crate::exec::ExecContext::synchronize) reports it.
#[derive(Debug)]
pub struct PackedLayers<'a> {
    shape: PackedShape,
    device: usize,
    packed: u64,
    records: u64,
    units: u64,
    free: u64,
    memory: PhantomData<&'a mut [u8]>,
}

impl PackedLayers<'_> {
    /// Returns the sizes of the cache.
    pub fn shape(&self) -> PackedShape {
        self.shape
    }

    /// Returns the address of the packed pages.
    pub(crate) fn packed(&self) -> u64 {
        self.packed
    }

    /// Returns the address of the records.
    pub(crate) fn records(&self) -> u64 {
        self.records
    }

    /// Returns the address of the BF16 units.
    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    /// Returns the address of the list of free units.
    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Returns the pitch of layers in bytes, for packed pages and for records.
    pub(crate) fn pitches(&self) -> (u64, u64) {
        (self.shape.layer_bytes(), self.shape.record_bytes())
    }

    /// Returns the address ranges of pages, records and units.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 3] {
        let PackedShape { kv, layers, units } = self.shape;
        let span = |at: u64, bytes: u64| at..at + bytes;
        [
            ("the packed KV cache", span(self.packed, self.shape.layer_bytes() * u64::from(layers))),
            ("the records of the KV cache", span(self.records, self.shape.record_bytes() * u64::from(layers))),
            (
                "the units of the KV cache",
                span(self.units, u64::from(packed::unit_bytes(kv.head_dim())) * u64::from(units)),
            ),
        ]
    }

    /// Checks that the layers are on device `ordinal` and have heads of `head_dim` elements.
    pub(crate) fn check(&self, ordinal: usize, head_dim: u32) -> Result<(), LaunchError> {
        let cache = self.shape.kv.head_dim();
        if cache != head_dim {
            return Err(LaunchError::HeadDimOf { takes: head_dim, cache });
        }
        check_device("the packed KV cache", self.device, ordinal)
    }

    /// Checks that a BF16 cache has the same heads.
    pub(crate) fn check_heads(&self, other: &KvShape) -> Result<(), LaunchError> {
        let heads = |shape: &KvShape| [shape.kv_heads(), shape.head_dim()];
        let (packed, bf16) = (heads(&self.shape.kv), heads(other));
        if packed == bf16 { Ok(()) } else { Err(LaunchError::KvHeads { packed, bf16 }) }
    }
}

/// The KV cache for attention of single tokens, which read and write it.
#[derive(Debug)]
pub enum DecodeCache<'a> {
    /// BF16 pages.
    Bf16(KvLayer<'a>),
    /// Packed pages, and a hot page per row.
    Packed {
        /// One layer of packed pages.
        pages: PackedLayers<'a>,
        /// The hot pages of the same layer.
        hot: KvLayer<'a>,
        /// u32 `[m]` or more: the hot page of each row.
        hot_table: &'a DeviceBuffer<u32>,
    },
}

impl<'a> From<KvLayer<'a>> for DecodeCache<'a> {
    fn from(layer: KvLayer<'a>) -> Self {
        Self::Bf16(layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_take_twelve_bits_and_a_record() {
        let bits = |head_dim: u32| PackedShape::page_bytes(1, head_dim) as f64 * 8.0 / f64::from(2 * 64 * head_dim);
        assert_eq!(bits(128), 12.046_875);
        assert_eq!(bits(64), 12.0625);
        assert_eq!(PackedShape::page_bytes(8, 128), 8 * (24_576 + 96));
    }

    #[test]
    fn heads_that_cannot_be_packed_are_refused() {
        let kv = KvShape::new(4, 2, 256).unwrap();
        assert_eq!(PackedShape::new(kv, 1, 0), Err(LaunchError::HeadDim { head_dim: 256 }));
        let kv = KvShape::new(4, 2, 112).unwrap();
        assert!(PackedShape::new(kv, 1, 0).is_ok());
    }
}
