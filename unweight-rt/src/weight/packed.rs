//! Packed weights on the device, 12 bits per weight (`docs/format.md` A.9).

use std::ops::Range;

use unweight_format::{
    EncodingId, StoredTensor, TileGrid,
    bundle::SectionBytes,
    raw::{
        PackedTensor,
        layout::SECTION_ALIGN,
        packed::{self, Window},
    },
};

use super::{check_capacity, count, device_shape, elements};
use crate::device::{
    Copier, Device, DeviceBuffer, DeviceError, LaunchError, Stream, Upload, copies::Part, pinned_pool::HostMemory,
    view::check_device,
};

/// A packed tensor on the device (`docs/format.md` A.9), the input of packed matmuls.
#[derive(Debug)]
pub struct DevicePacked {
    grid: TileGrid,
    window: Window,
    has_escapes: bool,
    packed: DeviceBuffer<u8>,
    escape_heads: DeviceBuffer<u32>,
    escapes: DeviceBuffer<u32>,
}

impl DevicePacked {
    /// Copies a tensor to the device. Waits for the copy.
    pub fn upload<B: AsRef<[u8]>>(mut to: impl Upload, tensor: &PackedTensor<B>) -> Result<Self, DeviceError> {
        let device = Self::new(
            tensor.grid(),
            tensor.window(),
            to.section(tensor.packed())?,
            to.section(tensor.escape_heads())?,
            to.section(tensor.escapes())?,
        )?;
        to.finish()?;
        Ok(Self { has_escapes: tensor.escape_heads().iter().any(|byte| *byte != 0), ..device })
    }

    /// Copies the tensor on the device. Waits for the stream.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, DeviceError> {
        Ok(Self {
            packed: self.packed.duplicate(stream)?,
            escape_heads: self.escape_heads.duplicate(stream)?,
            escapes: self.escapes.duplicate(stream)?,
            ..*self
        })
    }

    /// Creates a tensor from sections on the device: u8 `[tiles, 6144]`, u32 `[tiles, 4]`, u32 `[words]`. Checks only
    /// their sizes; kernels bounds-check heads and lists. The tensor is assumed to have escapes.
    pub fn new(
        grid: TileGrid,
        window: Window,
        packed: DeviceBuffer<u8>,
        escape_heads: DeviceBuffer<u32>,
        escapes: DeviceBuffer<u32>,
    ) -> Result<Self, DeviceError> {
        device_shape(grid)?;
        for (extent, value) in [("n", grid.rows()), ("k", grid.cols())] {
            if !value.is_multiple_of(64) {
                // A grid's dimensions fit 32 bits.
                return Err(LaunchError::Multiple { extent, value: value as u32, of: 64 }.into());
            }
        }
        elements("packed", packed.len(), grid.tiles() * packed::TILE_BYTES)?;
        elements("escape_heads", escape_heads.len(), grid.tiles() * packed::ROW_BLOCKS)?;
        count("words of escapes", escapes.len())?;
        let ordinal = packed.device().ordinal();
        check_device("escape_heads", escape_heads.device().ordinal(), ordinal)?;
        check_device("escapes", escapes.device().ordinal(), ordinal)?;
        Ok(Self { grid, window, has_escapes: true, packed, escape_heads, escapes })
    }

    /// Copies the tensor to the host and validates it.
    ///
    /// # Errors
    /// The sections on the device are not a valid packed tensor, or a driver error.
    pub fn download(&self, stream: &Stream) -> Result<PackedTensor<Vec<u8>>, DeviceError> {
        let mut sections = Copier::new(stream).download(&self.parts()?)?.into_iter();
        let mut next = || sections.next().unwrap_or_default();
        let (escape_heads, escapes, packed) = (next(), next(), next());
        Ok(PackedTensor::from_parts(self.grid, self.window, packed, escape_heads, escapes)?)
    }

    /// Like [`DevicePacked::download`], as a stored tensor whose sections stay in memory that `memory` lends.
    pub(crate) fn download_to(
        &self,
        memory: Option<&HostMemory>,
        copier: &mut Copier,
    ) -> Result<StoredTensor<SectionBytes>, DeviceError> {
        let mut sections = vec![SectionBytes::from(self.window.stored().to_vec())];
        let [escape_heads, escapes, packed] = self.parts()?;
        let parts = [escape_heads, escapes.padded(SECTION_ALIGN), packed];
        sections.extend(HostMemory::download(memory, copier, &parts)?);
        Ok(StoredTensor::new(EncodingId::PACKED, self.grid, sections)?)
    }

    /// Returns the sections after the window, in stored order.
    fn parts(&self) -> Result<[Part<'_>; 3], DeviceError> {
        Ok([Part::all(&self.escape_heads)?, Part::all(&self.escapes)?, Part::all(&self.packed)?])
    }

    /// Allocates tiles and heads for another shape that refer to this tensor's escape lists; frees this tensor's tiles.
    /// Waits.
    pub(crate) fn into_slots(self, stream: &Stream, grid: TileGrid) -> Result<Self, DeviceError> {
        let Self { window, has_escapes, packed, escape_heads, escapes, .. } = self;
        // Freed first, so that both need not fit in memory.
        drop((packed, escape_heads));
        let packed = DeviceBuffer::zeroed(stream, grid.tiles() * packed::TILE_BYTES)?;
        let heads = DeviceBuffer::zeroed(stream, grid.tiles() * packed::ROW_BLOCKS)?;
        Ok(Self { has_escapes, ..Self::new(grid, window, packed, heads, escapes)? })
    }

    /// Sets every byte of the tiles and heads, in stream order.
    pub(crate) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.packed.fill_bytes(stream, byte)?;
        self.escape_heads.fill_bytes(stream, byte)
    }

    /// Returns the escapes and frees the tiles.
    pub(crate) fn into_escapes(self) -> PackedEscapes {
        let Self { grid, window, has_escapes, escape_heads, escapes, .. } = self;
        PackedEscapes { grid, window, has_escapes, escape_heads, escapes }
    }

    /// Returns the device of the tensor.
    pub fn device(&self) -> &Device {
        self.packed.device()
    }

    /// Returns the address ranges of the sections.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 3] {
        [("packed", self.packed.span()), ("escape_heads", self.escape_heads.span()), ("escapes", self.escapes.span())]
    }

    /// Returns shape and tiling, in tiles of 64 x 64.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// Returns the window of exponents that the codes cover.
    pub fn window(&self) -> Window {
        self.window
    }

    /// Returns whether the tensor may contain exponents outside the window.
    pub fn has_escapes(&self) -> bool {
        self.has_escapes
    }

    /// Returns the codes, u8 `[tiles, 6144]`.
    pub fn packed(&self) -> &DeviceBuffer<u8> {
        &self.packed
    }

    /// Returns the escape heads, u32 `[tiles, 4]`.
    pub fn escape_heads(&self) -> &DeviceBuffer<u32> {
        &self.escape_heads
    }

    /// Returns the escape lists, u32 `[words]`.
    pub fn escapes(&self) -> &DeviceBuffer<u32> {
        &self.escapes
    }

    /// Returns the size of all sections in bytes.
    pub fn bytes(&self) -> u64 {
        (self.packed.bytes() + self.escape_heads.bytes() + self.escapes.bytes()) as u64
    }
}

/// The escapes of a packed tensor whose tiles are written into a slot for each product.
#[derive(Debug)]
pub(crate) struct PackedEscapes {
    grid: TileGrid,
    window: Window,
    has_escapes: bool,
    escape_heads: DeviceBuffer<u32>,
    escapes: DeviceBuffer<u32>,
}

impl PackedEscapes {
    /// Returns the window of exponents that the codes cover.
    pub(crate) fn window(&self) -> Window {
        self.window
    }

    /// Returns the address ranges of the sections.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 2] {
        [("escape_heads", self.escape_heads.span()), ("escapes", self.escapes.span())]
    }

    /// Returns the size of the sections in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.escape_heads.bytes() + self.escapes.bytes()) as u64
    }

    /// Returns the tensor whose tiles are at the start of `slot`.
    ///
    /// # Safety
    /// The result is dropped, and its work is enqueued, before the slot or the escapes are dropped.
    ///
    /// # Errors
    /// The slot is too small or on another device.
    pub(crate) unsafe fn over(&self, slot: &DeviceBuffer<u8>) -> Result<DevicePacked, DeviceError> {
        let device = self.escape_heads.device();
        let bytes = self.grid.tiles() * packed::TILE_BYTES;
        check_capacity("the slot", slot.len(), bytes)?;
        check_device("the slot", slot.device().ordinal(), device.ordinal())?;
        // SAFETY: the start of the slot and both whole sections, with readable bytes after each (after the tiles: the
        // rest of the slot or its padding); alive by the caller's promise.
        let packed = unsafe {
            DevicePacked::new(
                self.grid,
                self.window,
                DeviceBuffer::borrow(device, slot.address(), bytes)?,
                DeviceBuffer::borrow(device, self.escape_heads.address(), self.escape_heads.len())?,
                DeviceBuffer::borrow(device, self.escapes.address(), self.escapes.len())?,
            )
        }?;
        Ok(DevicePacked { has_escapes: self.has_escapes, ..packed })
    }
}
