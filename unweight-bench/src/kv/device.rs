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
    /// Sizes of a cache of `pages` pages with these heads.
    ///
    /// # Errors
    /// Heads of a size that no kernel takes.
    pub fn shape(self, pages: u32) -> Result<KvShape, LaunchError> {
        KvShape::new(pages, self.kv_heads, self.head_dim)
    }
}

impl Cache {
    /// Uploads a cache without gaps.
    ///
    /// # Errors
    /// Not enough memory; [`LaunchError::Range`]: the cache has gaps.
    pub fn upload(&self, stream: &Stream) -> Result<PackedKv, DeviceError> {
        let shape = PackedShape::new(self.heads.shape(self.pages)?, self.layers, self.units)?;
        let mut device = PackedKv::new(stream, shape)?;
        self.write_to(stream, &mut device)?;
        Ok(device)
    }

    /// Overwrites a cache of the same sizes on the device. Waits.
    ///
    /// # Errors
    /// As for [`Cache::upload`].
    pub fn write_to(&self, stream: &Stream, device: &mut PackedKv) -> Result<(), DeviceError> {
        device.packed_mut().write(stream, 0, &self.packed)?;
        device.records_mut().write(stream, 0, &self.records)?;
        device.units_mut().write(stream, 0, &self.unit_pages)?;
        device.free_mut().write(stream, 0, &self.free)
    }

    /// What a cache of the same sizes holds on the device, once everything before on `stream` is done. Waits.
    ///
    /// # Errors
    /// What failed on the stream.
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

/// The packed pages of a problem of attention on a device.
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
    /// Not enough memory, or heads of a size that no kernel takes.
    pub fn new(stream: &Stream, from: &PackedPages) -> Result<Self, DeviceError> {
        let pages = (from.packed.len() / from.heads.page_bytes().max(1)) as u32;
        let mut own = PackedKv::new(stream, PackedShape::new(from.heads.shape(pages)?, 1, from.units)?)?;
        own.packed_mut().write(stream, 0, &from.packed)?;
        own.records_mut().write(stream, 0, &from.records)?;
        own.units_mut().write(stream, 0, &from.unit_pages)?;
        Ok(Self {
            pages: own,
            hot: DeviceBuffer::from_host(stream, &from.hot)?,
            hot_shape: from.heads.shape(from.hot_pages)?,
            hot_table: DeviceBuffer::from_host(stream, &from.hot_table)?,
            table: DeviceBuffer::from_host(stream, &from.table)?,
        })
    }

    /// Sizes of the hot pages.
    pub fn hot_shape(&self) -> KvShape {
        self.hot_shape
    }

    /// The cache as attention takes it, and the page table.
    ///
    /// # Errors
    /// None that an uploaded cache has.
    pub fn cache(&mut self) -> Result<(DecodeCache<'_>, &DeviceBuffer<u32>), DeviceError> {
        let hot = KvLayer::new(&mut self.hot, self.hot_shape, 0)?;
        let cache = DecodeCache::Packed { pages: self.pages.layers(), hot, hot_table: &self.hot_table };
        Ok((cache, &self.table))
    }

    /// As [`DevicePages::cache`], with these hot pages instead of its own.
    pub fn with_hot<'a>(&'a mut self, hot: KvLayer<'a>) -> (DecodeCache<'a>, &'a DeviceBuffer<u32>) {
        let cache = DecodeCache::Packed { pages: self.pages.layers(), hot, hot_table: &self.hot_table };
        (cache, &self.table)
    }

    /// The hot pages, once everything before on `stream` is done. Waits.
    ///
    /// # Errors
    /// What failed on the stream.
    pub fn hot(&self, stream: &Stream) -> Result<Vec<u16>, DeviceError> {
        self.hot.to_host(stream)
    }

    /// The page table and the table of hot pages, to be damaged.
    pub fn tables(&mut self) -> [&mut DeviceBuffer<u32>; 2] {
        [&mut self.table, &mut self.hot_table]
    }

    /// The records, to be damaged.
    pub fn records(&mut self) -> &mut DeviceBuffer<u8> {
        self.pages.records_mut()
    }
}
