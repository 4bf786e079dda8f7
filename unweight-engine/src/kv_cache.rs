//! The KV cache on the device, in BF16 or packed pages.
//!
//! ```text
//! BF16     a prompt's chunk --rope--> pages <--attention of chunks and steps
//! packed   a prompt's chunk --rope--> staging <--attention of the chunk;  staging --pack--> pages, hot page
//!          a later chunk:             pages --unpack--> staging, first
//!          a step: attention reads pages and the hot page, and writes the hot page; after the last layer,
//!          full hot pages are packed
//! ```
//! Staging consists of BF16 pages of one layer for one sequence of the whole context, in the order of its tokens. The
//! kernels of a step read pages of earlier tokens before the preceding kernel has ended (programmatic dependent
//! launch). Pages are therefore packed after all of these kernels, in the same step, and two steps are never in one
//! graph.

use unweight_codegen::kv::PAGE_TOKENS;
use unweight_model::ModelConfig;
use unweight_rt::{
    DeviceBuffer, DeviceError, ExecContext, LaunchError, MatrixMut, MatrixRef, Stream,
    raw::ops::{
        attention::TokenRows,
        kv::{KvLayer, KvShape},
        kv_pack::KvPack,
        kv_packed::{DecodeCache, NO_PAGE, PackedKv, PackedShape},
        kv_unpack::KvUnpack,
    },
};

use crate::{memory::Memory, pages::pages_for};

/// The kernels of a packed cache.
#[derive(Debug)]
pub struct PackedKernels {
    /// Packs the hot pages that a step has filled.
    pub step: KvPack,
    /// Packs the pages of a chunk.
    pub chunk: KvPack,
    /// Releases BF16 units.
    pub release: KvPack,
    /// Unpacks the pages of earlier chunks.
    pub unpack: KvUnpack,
}

/// BF16 pages of one or more layers.
#[derive(Debug)]
pub struct Bf16Pages {
    data: DeviceBuffer<u16>,
    /// The shape of one layer.
    shape: KvShape,
}

impl Bf16Pages {
    fn new(stream: &Stream, shape: KvShape, layers: u32) -> Result<Self, DeviceError> {
        let elements = shape.layer_elements() as usize * layers as usize;
        Ok(Self { data: DeviceBuffer::zeroed(stream, elements)?, shape })
    }

    fn layer(&mut self, index: u32) -> Result<KvLayer<'_>, LaunchError> {
        KvLayer::new(&mut self.data, self.shape, index)
    }
}

/// A packed cache: its memory, and the kernels that pack and unpack pages.
#[derive(Debug)]
pub struct PackedCache {
    kernels: PackedKernels,
    pages: PackedKv,
    /// The hot pages of all layers.
    hot: Bf16Pages,
    /// The hot page of each row.
    hot_table: DeviceBuffer<u32>,
    staging: Bf16Pages,
    /// The page table of staging: 0, 1, 2, ...
    staging_table: DeviceBuffer<u32>,
    /// Per row of a step: whether a page of the row is lost.
    page_losses: DeviceBuffer<u32>,
    /// Whether a page of the chunk is lost.
    lost_chunk: DeviceBuffer<u32>,
    /// Pages whose BF16 units are to be released.
    freed: DeviceBuffer<u32>,
    /// The hot page of the sequence whose prompt runs; `None` if the sequence is not continued.
    hot_of_prompt: Option<u32>,
}

/// The KV cache of all layers.
#[derive(Debug)]
pub enum KvStore {
    /// BF16 pages of all layers.
    Bf16(Bf16Pages),
    /// Packed pages.
    Packed(Box<PackedCache>),
}

impl KvStore {
    /// Allocates the planned cache for steps of up to `batch` rows; packed if `kernels` are given.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn new(
        stream: &Stream,
        config: &ModelConfig,
        memory: &Memory,
        batch: u32,
        kernels: Option<PackedKernels>,
    ) -> Result<Self, DeviceError> {
        let shape = |pages: u32| KvShape::new(pages, config.kv_heads, config.head_dim);
        let pages = shape(memory.pages)?;
        let Some(kernels) = kernels else { return Ok(Self::Bf16(Bf16Pages::new(stream, pages, config.layers)?)) };
        let table_pages = pages_for(memory.context);
        let words = |len: u32| DeviceBuffer::<u32>::zeroed(stream, len as usize);
        Ok(Self::Packed(Box::new(PackedCache {
            kernels,
            pages: PackedKv::new(stream, PackedShape::new(pages, config.layers, memory.units)?)?,
            hot: Bf16Pages::new(stream, shape(memory.hot_pages)?, config.layers)?,
            hot_table: words(batch)?,
            staging: Bf16Pages::new(stream, shape(table_pages)?, 1)?,
            staging_table: DeviceBuffer::from_host(stream, &(0..table_pages).collect::<Vec<_>>())?,
            page_losses: words(batch)?,
            lost_chunk: words(1)?,
            freed: words(memory.pages)?,
            hot_of_prompt: None,
        })))
    }

    /// The packed cache; `None` if the cache is BF16.
    pub fn packed(&mut self) -> Option<&mut PackedCache> {
        match self {
            Self::Bf16(_) => None,
            Self::Packed(cache) => Some(cache),
        }
    }

    /// The value that fills a page table after the pages of a sequence.
    pub fn padding(&self) -> u32 {
        match self {
            Self::Bf16(_) => 0,
            Self::Packed(_) => NO_PAGE,
        }
    }

    /// Returns layer `index` for the attention of steps.
    ///
    /// # Errors
    /// [`LaunchError::Range`] if the layer does not exist.
    pub fn decode(&mut self, index: u32) -> Result<DecodeCache<'_>, LaunchError> {
        match self {
            Self::Bf16(pages) => Ok(pages.layer(index)?.into()),
            Self::Packed(cache) => {
                let PackedCache { pages, hot, hot_table, .. } = &mut **cache;
                Ok(DecodeCache::Packed { pages: pages.layer(index)?, hot: hot.layer(index)?, hot_table })
            }
        }
    }

    /// Returns where the keys and values of a prompt chunk are written, and the page table of its sequence there.
    /// `pages` is the page table of the sequence in the cache.
    ///
    /// # Errors
    /// [`LaunchError::Range`] if the layer does not exist.
    pub fn chunk<'a>(
        &'a mut self,
        index: u32,
        pages: &'a DeviceBuffer<u32>,
    ) -> Result<(KvLayer<'a>, &'a DeviceBuffer<u32>), LaunchError> {
        match self {
            Self::Bf16(all) => Ok((all.layer(index)?, pages)),
            Self::Packed(cache) => Ok((cache.staging.layer(0)?, &cache.staging_table)),
        }
    }

    /// The elements of all pages that [`KvStore::chunk`] returns.
    pub fn chunk_elements(&mut self) -> &mut DeviceBuffer<u16> {
        match self {
            Self::Bf16(pages) => &mut pages.data,
            Self::Packed(cache) => &mut cache.staging.data,
        }
    }
}

impl PackedCache {
    /// Sets the hot pages of the rows of the following steps, and clears the flags of lost pages. Waits for the copy.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn set_rows(&mut self, stream: &Stream, hot: &[u32]) -> Result<(), DeviceError> {
        self.hot_table.write(stream, 0, hot)?;
        self.page_losses.fill_bytes(stream, 0)
    }

    /// One word per row of the last steps, not 0 if the row lost a page.
    pub fn page_losses(&self) -> &DeviceBuffer<u32> {
        &self.page_losses
    }

    /// Sets the hot page for the last page of the sequence whose prompt runs next, and clears the flag of lost pages.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn set_prompt(&mut self, stream: &Stream, hot: Option<u32>) -> Result<(), DeviceError> {
        self.hot_of_prompt = hot;
        self.lost_chunk.fill_bytes(stream, 0)
    }

    /// Whether a page of the last prompt is lost. Waits for the device.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn prompt_is_lost(&self, stream: &Stream) -> Result<bool, DeviceError> {
        Ok(self.lost_chunk.read(stream, 0, 1)?.iter().any(|flag| *flag != 0))
    }

    /// The number of free BF16 units. Waits for the device.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn free_units(&self, stream: &Stream) -> Result<u32, DeviceError> {
        self.pages.free_units(stream)
    }

    /// Enqueues the packing of the hot pages that a step of `rows` rows has filled.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn pack_step(&mut self, ctx: &mut ExecContext, tokens: TokenRows<'_>, rows: u32) -> Result<(), DeviceError> {
        let hot = (self.hot.layer(0)?, &self.hot_table);
        self.kernels.step.step(ctx, hot, self.pages.layers(), tokens, rows, &mut self.page_losses)
    }

    /// Enqueues the unpacking of the pages of tokens before `start` in layer `index` to staging.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn unpack(
        &mut self,
        ctx: &mut ExecContext,
        index: u32,
        (pages, start): (&DeviceBuffer<u32>, u32),
    ) -> Result<(), DeviceError> {
        let count = start / PAGE_TOKENS;
        if count == 0 {
            return Ok(());
        }
        self.kernels.unpack.enqueue(ctx, self.pages.layer(index)?, (pages, count), self.staging.layer(0)?)
    }

    /// Enqueues the packing of the pages that tokens `start..end` of the prompt fill in layer `index`, and the copy of
    /// the partial page after them to the hot page.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn pack_chunk(
        &mut self,
        ctx: &mut ExecContext,
        index: u32,
        pages: &DeviceBuffer<u32>,
        (start, end): (u32, u32),
    ) -> Result<(), DeviceError> {
        let (first, full) = (start / PAGE_TOKENS, end / PAGE_TOKENS);
        if full > first {
            let (source, layer) = ((self.staging.layer(0)?, first), self.pages.layer(index)?);
            self.kernels.chunk.chunk(ctx, source, layer, (pages, first, full - first), &mut self.lost_chunk)?;
        }
        let Some(hot) = self.hot_of_prompt.filter(|_| !end.is_multiple_of(PAGE_TOKENS)) else { return Ok(()) };
        self.copy_to_hot(ctx.stream(), full, index, hot)
    }

    /// Enqueues the copy of a page of staging to a hot page of layer `index`.
    fn copy_to_hot(&mut self, stream: &Stream, page: u32, index: u32, hot: u32) -> Result<(), DeviceError> {
        // A page has the same size in both buffers: it is a row of a matrix.
        let Self { staging, hot: Bf16Pages { data, shape }, pages, .. } = self;
        let columns = shape.page_elements() as u32;
        let pitch = columns.into();
        let from = MatrixRef::new(&staging.data, staging.shape.pages(), columns, pitch)?;
        let at = index * shape.pages() + hot;
        let mut all = MatrixMut::new(data, shape.pages() * pages.shape().layers, columns, pitch)?;
        all.part(at..at + 1, 0..columns)?.copy_from(stream, from.part(page..page + 1, 0..columns)?)
    }

    /// Enqueues the release of the BF16 units of these pages, which no sequence uses any more. Waits for the copy of
    /// the list.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn release(&mut self, ctx: &mut ExecContext, pages: &[u32]) -> Result<(), DeviceError> {
        for part in pages.chunks(self.freed.len().max(1)) {
            self.freed.write(ctx.stream(), 0, part)?;
            // At most the length of the buffer.
            self.kernels.release.release(ctx, self.pages.layers(), &self.freed, part.len() as u32)?;
        }
        Ok(())
    }
}
