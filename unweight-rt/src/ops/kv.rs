//! The KV cache of a layer: pages of 64 tokens, and a page table per sequence.
//!
//! ```text
//! cache   bf16 [layer][page][kv_head][K | V][64 tokens * head_dim], one allocation
//! ```
//! Token `t` of a sequence is token `t % 64` of the page at index `t / 64` of its table. [`unweight_codegen::kv`]
//! defines the offset of an element in its page, for hosts and kernels.

use std::{marker::PhantomData, ops::Range};

pub use unweight_codegen::kv::KvHalf;
use unweight_codegen::kv::{self, PAGE_TOKENS};

use crate::device::{Device, DeviceBuffer, LaunchError, view::check_device};

/// The position of a padding row of a batch.
pub const PAD_POSITION: u32 = u32::MAX;

/// Bytes of a BF16 element.
const ELEMENT: u64 = 2;

/// The number of pages, the number of heads and the head size, which are equal in all layers of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pages: u32,
    kv_heads: u32,
    head_dim: u32,
}

impl KvShape {
    /// Creates the shape of a cache with `pages` pages of [`PAGE_TOKENS`] tokens and `kv_heads` heads of `head_dim`
    /// elements.
    ///
    /// # Errors
    /// [`LaunchError::HeadDim`]; [`LaunchError::TooLarge`] if a layer has more than 2^48 elements.
    pub fn new(pages: u32, kv_heads: u32, head_dim: u32) -> Result<Self, LaunchError> {
        check_head_dim(head_dim)?;
        let shape = Self { pages, kv_heads, head_dim };
        let elements = u64::from(pages).checked_mul(u64::from(kv_heads)).and_then(|tiles| {
            let tile = u64::from(2 * PAGE_TOKENS * head_dim);
            tiles.checked_mul(tile)
        });
        const LIMIT: u64 = 1 << 48;
        match elements {
            Some(elements) if elements <= LIMIT => Ok(shape),
            _ => {
                let value = elements.unwrap_or(u64::MAX);
                Err(LaunchError::TooLarge { what: "elements of a layer's KV cache", value, limit: LIMIT })
            }
        }
    }

    /// Returns the number of pages in a layer.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the number of key heads, which is also the number of value heads.
    pub fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Returns the number of elements in a head.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Returns the number of elements in one page of one layer.
    pub fn page_elements(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(2 * PAGE_TOKENS * self.head_dim)
    }

    /// Returns the number of elements in a layer.
    pub fn layer_elements(&self) -> u64 {
        // At most 2^48: checked on creation.
        u64::from(self.pages) * self.page_elements()
    }

    /// Returns the offset of an element in its layer: `token` is 0..64 in a page, `index` is in a head.
    pub fn element(&self, page: u32, kv_head: u32, half: KvHalf, token: u32, index: u32) -> u64 {
        let head = u64::from(page) * u64::from(self.kv_heads) + u64::from(kv_head);
        let tile = 2 * head + u64::from(half == KvHalf::Value);
        tile * u64::from(PAGE_TOKENS * self.head_dim) + u64::from(kv::element(self.head_dim, token, index))
    }
}

/// Checks that kernels support the head size: elements that are rotated together are in whole chunks of 8.
pub(crate) fn check_head_dim(head_dim: u32) -> Result<(), LaunchError> {
    if head_dim.is_multiple_of(16) && (16..=256).contains(&head_dim) {
        Ok(())
    } else {
        Err(LaunchError::HeadDim { head_dim })
    }
}

/// One layer of a cache, for reading and writing.
///
/// Tables on the device assign pages to sequences. Kernels skip a page index outside of the layer, and
/// [`ExecContext::synchronize`](crate::exec::ExecContext::synchronize) reports it.
#[derive(Debug)]
pub struct KvLayer<'a> {
    device: usize,
    address: u64,
    shape: KvShape,
    /// The number of elements from the address to the end of the cache.
    elements: u64,
    memory: PhantomData<&'a mut [u16]>,
}

impl<'a> KvLayer<'a> {
    /// Returns layer `layer` of a cache, counted from 0.
    ///
    /// # Errors
    /// [`LaunchError::Range`] if the buffer ends before the layer does.
    pub fn new(cache: &'a mut DeviceBuffer<u16>, shape: KvShape, layer: u32) -> Result<Self, LaunchError> {
        let (len, have) = (shape.layer_elements(), cache.len() as u64);
        // Below 2^80, so it fits u128.
        let end = (u128::from(layer) + 1) * u128::from(len);
        let at = len.saturating_mul(layer.into());
        if end > u128::from(have) {
            return Err(LaunchError::Range { at, len, have });
        }
        let address = cache.address() + at * ELEMENT;
        let elements = have.saturating_sub(at);
        Ok(Self { device: cache.device().ordinal(), address, shape, elements, memory: PhantomData })
    }

    /// Returns one layer in memory that something else owns.
    ///
    /// # Safety
    /// `address` is the device address of a layer of this shape on `device`, a multiple of 16. The memory stays
    /// allocated, and nothing else reads or writes it, until all work that uses this layer is done, including every
    /// replay of a graph that captured it.
    pub unsafe fn from_raw(device: &'a Device, address: u64, shape: KvShape) -> Self {
        let elements = shape.layer_elements();
        Self { device: device.ordinal(), address, shape, elements, memory: PhantomData }
    }

    /// Returns this layer with a shorter borrow.
    pub fn reborrow(&mut self) -> KvLayer<'_> {
        KvLayer { memory: PhantomData, ..*self }
    }

    /// Returns pages, heads and head size.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Returns the address of the first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the address range of the elements.
    pub fn span(&self) -> Range<u64> {
        self.address..self.address + self.shape.layer_elements() * ELEMENT
    }

    /// Checks that the cache has at least this many layers from this one on.
    pub(crate) fn check_layers(&self, layers: u32) -> Result<(), LaunchError> {
        let (len, have) = (self.shape.layer_elements().saturating_mul(layers.into()), self.elements);
        if len <= have { Ok(()) } else { Err(LaunchError::Range { at: 0, len, have }) }
    }

    /// Checks that the layer is on device `ordinal`.
    pub fn check_device(&self, ordinal: usize) -> Result<(), LaunchError> {
        check_device("the KV cache", self.device, ordinal)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Every element of a layer has a distinct offset.
    #[test]
    fn kv_elements_fill_a_layer() {
        let shape = KvShape::new(2, 3, 48).unwrap();
        let mut offsets = BTreeSet::new();
        for tile in 0..12u32 {
            let (page, kv_head, half) = (tile / 6, tile / 2 % 3, [KvHalf::Key, KvHalf::Value][tile as usize % 2]);
            for token in 0..PAGE_TOKENS {
                for index in 0..48 {
                    let at = shape.element(page, kv_head, half, token, index);
                    assert_eq!(at / u64::from(PAGE_TOKENS * 48), u64::from(tile), "the tiles follow each other");
                    offsets.insert(at);
                }
            }
        }
        assert_eq!(offsets.len() as u64, shape.layer_elements());
        assert_eq!(offsets.last(), Some(&(shape.layer_elements() - 1)));
    }

    #[test]
    fn unsupported_heads_are_rejected() {
        for head_dim in [0, 8, 72, 272, u32::MAX] {
            assert_eq!(KvShape::new(1, 1, head_dim), Err(LaunchError::HeadDim { head_dim }));
        }
        let large = KvShape::new(u32::MAX, u32::MAX, 256);
        assert!(matches!(large, Err(LaunchError::TooLarge { value: u64::MAX, .. })), "{large:?}");
        let text = LaunchError::HeadDim { head_dim: 72 }.to_string();
        assert!(text.contains("72") && text.contains("multiple of 16") && text.contains("256"), "{text}");
    }
}
