//! Packed weights on the device, 12 bits each (`docs/format.md` A.9).

use std::ops::Range;

use unweight_format::{
    TileGrid,
    raw::{
        PackedTensor,
        packed::{self, Window},
    },
};

use super::{count, device_shape, elements, room, stored_words};
use crate::device::{Device, DeviceBuffer, DeviceError, LaunchError, Stream, Upload, view::check_device};

/// A packed tensor on the device (`docs/format.md` A.9), which the matmuls of packed weights read.
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

    /// A copy on the device. Waits for the stream.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, DeviceError> {
        Ok(Self {
            packed: self.packed.duplicate(stream)?,
            escape_heads: self.escape_heads.duplicate(stream)?,
            escapes: self.escapes.duplicate(stream)?,
            ..*self
        })
    }

    /// A tensor of sections on the device: u8 `[tiles, 6144]`, u32 `[tiles, 4]`, u32 `[words]`. Only their sizes are
    /// checked; kernels bound heads and lists. The tensor counts as one with escapes.
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
        let own = packed.device().ordinal();
        check_device("escape_heads", escape_heads.device().ordinal(), own)?;
        check_device("escapes", escapes.device().ordinal(), own)?;
        Ok(Self { grid, window, has_escapes: true, packed, escape_heads, escapes })
    }

    /// The tensor on the host, checked.
    ///
    /// # Errors
    /// What is on the device is not a packed tensor.
    pub fn download(&self, stream: &Stream) -> Result<PackedTensor<Vec<u8>>, DeviceError> {
        let (heads, escapes) = (stored_words(stream, &self.escape_heads)?, stored_words(stream, &self.escapes)?);
        Ok(PackedTensor::from_parts(self.grid, self.window, self.packed.to_host(stream)?, heads, escapes)?)
    }

    /// Room for tiles and heads of another shape that refer to the escape lists of this tensor; frees its own tiles.
    /// Waits.
    pub(crate) fn into_room(self, stream: &Stream, grid: TileGrid) -> Result<Self, DeviceError> {
        let Self { window, has_escapes, packed, escape_heads, escapes, .. } = self;
        // Before there is room for others.
        drop((packed, escape_heads));
        let packed = DeviceBuffer::zeroed(stream, grid.tiles() * packed::TILE_BYTES)?;
        let heads = DeviceBuffer::zeroed(stream, grid.tiles() * packed::ROW_BLOCKS)?;
        Ok(Self { has_escapes, ..Self::new(grid, window, packed, heads, escapes)? })
    }

    /// Overwrites tiles and heads, in stream order.
    pub(crate) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.packed.fill_bytes(stream, byte)?;
        self.escape_heads.fill_bytes(stream, byte)
    }

    /// Its escapes; frees its tiles.
    pub(crate) fn into_escapes(self) -> PackedEscapes {
        let Self { grid, window, has_escapes, escape_heads, escapes, .. } = self;
        PackedEscapes { grid, window, has_escapes, escape_heads, escapes }
    }

    /// The device that holds it.
    pub fn device(&self) -> &Device {
        self.packed.device()
    }

    /// The addresses of its sections.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 3] {
        [("packed", self.packed.span()), ("escape_heads", self.escape_heads.span()), ("escapes", self.escapes.span())]
    }

    /// Shape and tiling, in tiles of 64 x 64.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// The window of exponents that the codes cover.
    pub fn window(&self) -> Window {
        self.window
    }

    /// Whether exponents outside the window are possible.
    pub fn has_escapes(&self) -> bool {
        self.has_escapes
    }

    /// The codes, u8 `[tiles, 6144]`.
    pub fn packed(&self) -> &DeviceBuffer<u8> {
        &self.packed
    }

    /// The escape heads, u32 `[tiles, 4]`.
    pub fn escape_heads(&self) -> &DeviceBuffer<u32> {
        &self.escape_heads
    }

    /// The escape lists, u32 `[words]`.
    pub fn escapes(&self) -> &DeviceBuffer<u32> {
        &self.escapes
    }

    /// Bytes of all sections.
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
    /// The window of exponents that the codes cover.
    pub(crate) fn window(&self) -> Window {
        self.window
    }

    /// The addresses of its sections.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 2] {
        [("escape_heads", self.escape_heads.span()), ("escapes", self.escapes.span())]
    }

    /// Bytes of its sections.
    pub(crate) fn bytes(&self) -> u64 {
        (self.escape_heads.bytes() + self.escapes.bytes()) as u64
    }

    /// The tensor whose tiles are at the front of `slot`.
    ///
    /// # Safety
    /// The result is dropped, and its work enqueued, before the slot or the escapes are dropped.
    ///
    /// # Errors
    /// The slot is too small or on another device.
    pub(crate) unsafe fn over(&self, slot: &DeviceBuffer<u8>) -> Result<DevicePacked, DeviceError> {
        let device = self.escape_heads.device();
        let bytes = self.grid.tiles() * packed::TILE_BYTES;
        room("the slot", slot.len(), bytes)?;
        check_device("the slot", slot.device().ordinal(), device.ordinal())?;
        // SAFETY: the front of the slot and both sections, whole, with what is readable behind them (behind the tiles:
        // the rest of the slot, or its own padding); alive by the caller's promise.
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
