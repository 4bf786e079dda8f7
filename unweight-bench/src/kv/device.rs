//! Packed pages on a device.

use unweight_rt::{
    DeviceBuffer, DeviceError, LaunchError, Stream,
    raw::ops::{
        kv::{KvLayer, KvShape},
        kv_packed::{DecodeCache, PackedKv, PackedShape},
    },
};

use super::{Cache, Heads, PackedPages};

impl Heads {
    /// Returns the shape of a cache of `pages` pages with these heads.
    ///
    /// # Errors
    /// Fails if no kernel supports the size of the heads.
    pub fn shape(self, pages: u32) -> Result<KvShape, LaunchError> {
        KvShape::new(pages, self.kv_heads, self.head_dim)
    }
}

impl Cache {
    /// Uploads a cache without gaps.
    ///
    /// # Errors
    /// Fails without enough memory, and with [`LaunchError::Range`] if the cache has gaps.
    pub fn upload(&self, stream: &Stream) -> Result<PackedKv, DeviceError> {
        let shape = PackedShape::new(self.heads.shape(self.pages)?, self.layers, self.units)?;
        let mut device = PackedKv::new(stream, shape)?;
        self.write_to(stream, &mut device)?;
        Ok(device)
    }

    /// Overwrites a cache of the same shape on the device. Synchronizes.
    ///
    /// # Errors
    /// See [`Cache::upload`].
    pub fn write_to(&self, stream: &Stream, device: &mut PackedKv) -> Result<(), DeviceError> {
        device.packed_mut().write(stream, 0, &self.packed)?;
        device.records_mut().write(stream, 0, &self.records)?;
        device.units_mut().write(stream, 0, &self.unit_pages)?;
        device.free_mut().write(stream, 0, &self.free)
    }

    /// Reads a cache of the same shape from the device after all work on `stream`. Synchronizes.
    ///
    /// # Errors
    /// Returns an error of earlier work on the stream.
    pub fn read_from(&self, stream: &Stream, device: &mut PackedKv) -> Result<Self, DeviceError> {
        Ok(Self {
            packed: device.packed_mut().to_host(stream)?,
            records: device.records_mut().to_host(stream)?,
            unit_pages: device.units_mut().to_host(stream)?,
            free: device.free_mut().to_host(stream)?,
            ..*self
        })
    }
}

/// The packed pages of an attention problem on a device.
#[derive(Debug)]
pub struct DevicePages {
    pages: PackedKv,
    hot: DeviceBuffer<u16>,
    hot_shape: KvShape,
    hot_table: DeviceBuffer<u32>,
    table: DeviceBuffer<u32>,
}

impl DevicePages {
    /// Uploads packed pages.
    ///
    /// # Errors
    /// Fails without enough memory, or if no kernel supports the size of the heads.
    pub fn new(stream: &Stream, from: &PackedPages) -> Result<Self, DeviceError> {
        let pages = (from.packed.len() / from.heads.page_bytes().max(1)) as u32;
        let mut device = PackedKv::new(stream, PackedShape::new(from.heads.shape(pages)?, 1, from.units)?)?;
        device.packed_mut().write(stream, 0, &from.packed)?;
        device.records_mut().write(stream, 0, &from.records)?;
        device.units_mut().write(stream, 0, &from.unit_pages)?;
        Ok(Self {
            pages: device,
            hot: DeviceBuffer::from_host(stream, &from.hot)?,
            hot_shape: from.heads.shape(from.hot_pages)?,
            hot_table: DeviceBuffer::from_host(stream, &from.hot_table)?,
            table: DeviceBuffer::from_host(stream, &from.table)?,
        })
    }

    /// Returns the shape of the hot pages.
    pub fn hot_shape(&self) -> KvShape {
        self.hot_shape
    }

    /// Returns the cache in the form that attention accepts, and the page table.
    ///
    /// # Errors
    /// Never fails for an uploaded cache.
    pub fn cache(&mut self) -> Result<(DecodeCache<'_>, &DeviceBuffer<u32>), DeviceError> {
        let hot = KvLayer::new(&mut self.hot, self.hot_shape, 0)?;
        let cache = DecodeCache::Packed { pages: self.pages.layers(), hot, hot_table: &self.hot_table };
        Ok((cache, &self.table))
    }

    /// Returns the result of [`DevicePages::cache`] with these hot pages instead of its own.
    pub fn with_hot<'a>(&'a mut self, hot: KvLayer<'a>) -> (DecodeCache<'a>, &'a DeviceBuffer<u32>) {
        let cache = DecodeCache::Packed { pages: self.pages.layers(), hot, hot_table: &self.hot_table };
        (cache, &self.table)
    }

    /// Reads the hot pages after all work on `stream`. Synchronizes.
    ///
    /// # Errors
    /// Returns an error of earlier work on the stream.
    pub fn hot(&self, stream: &Stream) -> Result<Vec<u16>, DeviceError> {
        self.hot.to_host(stream)
    }

    /// Returns the page table and the table of hot pages, for tests that corrupt them.
    pub fn tables(&mut self) -> [&mut DeviceBuffer<u32>; 2] {
        [&mut self.table, &mut self.hot_table]
    }

    /// Returns the records, for tests that corrupt them.
    pub fn records(&mut self) -> &mut DeviceBuffer<u8> {
        self.pages.records_mut()
    }
}
