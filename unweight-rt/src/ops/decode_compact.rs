//! Expands the compact encoding to BF16 or packed tiles on the GPU (`docs/format.md` A.11), bit for bit.
//!
//! ```text
//! DeviceCompact --full----> DeviceMatrix
//!               --packed--> the slot of an execution context: what a product reads next
//! ```
//! Both are ordinary launches: they start when all earlier work on the stream is done, and end before a product that
//! reads the slot starts.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::DecodeCompactArgs,
    plan::GemmShape,
    spec::{DecodeCompactStage, Op},
};

use unweight_format::{
    TileGrid,
    raw::packed::{self, Window},
};

use crate::{
    choose::route::SlotPlan,
    device::{
        DeviceBuffer, DeviceError, KernelSet, LaunchError, MatrixMut, Stream,
        module::LoadedKernel,
        view::{check_apart, check_device},
    },
    weight::{self, CompactTables, DeviceCompact},
};

/// The kernel that writes the weights of a compact tensor as BF16.
#[derive(Clone, Debug)]
pub struct CompactDecoder {
    kernel: Arc<LoadedKernel>,
}

impl CompactDecoder {
    /// Compiles or finds the kernel.
    ///
    /// # Errors
    /// The device or the compiler is missing, or failed.
    pub fn of(kernels: &KernelSet) -> Result<Self, DeviceError> {
        Self::new(kernels.get(&VariantSpec::decode_compact(kernels.device().info().arch, DecodeCompactStage::Full))?)
    }

    /// Wraps a kernel.
    ///
    /// # Errors
    /// The kernel belongs to another family or stage.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::DecodeCompact(spec) if spec.stage == DecodeCompactStage::Full => Ok(Self { kernel }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a decoder from compact to BF16" }),
        }
    }

    /// Enqueues the decoding of a tensor to a contiguous matrix.
    ///
    /// # Errors
    /// `output` has another shape, overlaps the tensor, or is on another device.
    pub fn full(&self, stream: &Stream, tensor: &DeviceCompact, output: MatrixMut<'_>) -> Result<(), DeviceError> {
        let (desc, expected) = (output.desc(), weight::shape(tensor.grid()));
        let check = || {
            if desc.shape() != expected {
                return Err(LaunchError::Output { output: desc.shape(), tensor: expected });
            }
            let ordinal = self.kernel.device().ordinal();
            desc.check_dense("the output")?;
            desc.check_aligned("the output")?;
            desc.check_device("the output", ordinal)?;
            check_device("the tensor", tensor.device().ordinal(), ordinal)?;
            check_apart(("the output", desc.span()), tensor.spans())
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = DecodeCompactArgs { weights: desc.address, ..args(tensor) };
        let problem = GemmShape { m: 0, n: args.n, k: args.k };
        // SAFETY: the sections belong to a checked tensor, with the counts that bound them, and `output` has the grid's
        // shape. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(stream, problem, &args) }
    }
}

/// The kernel that writes the packed tiles of a compact tensor into a slot before a product. Escape heads and lists of
/// the packed tensor stay on the device; the heads and sums that this kernel writes go to the end of the slot, where
/// nothing reads them.
#[derive(Clone, Debug)]
pub struct Expander {
    kernel: Arc<LoadedKernel>,
}

impl Expander {
    /// Wraps a kernel.
    ///
    /// # Errors
    /// The kernel belongs to another family or stage.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::DecodeCompact(spec) if spec.stage == DecodeCompactStage::Packed => Ok(Self { kernel }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a decoder from compact to packed tiles" }),
        }
    }

    /// Compiles or finds the kernel.
    ///
    /// # Errors
    /// The device or the compiler is missing, or failed.
    pub(crate) fn of(kernels: &KernelSet) -> Result<Self, DeviceError> {
        Self::new(kernels.get(&VariantSpec::decode_compact(kernels.device().info().arch, DecodeCompactStage::Packed))?)
    }

    /// Returns the slot size for a tensor in bytes.
    pub fn slot_bytes(grid: TileGrid) -> u64 {
        SlotPlan::of(grid).bytes
    }

    /// Checks all operands without enqueuing anything.
    pub(crate) fn check(&self, tensor: &DeviceCompact, slot: &DeviceBuffer<u8>) -> Result<(), DeviceError> {
        let check = || {
            let ordinal = self.kernel.device().ordinal();
            let need = Self::slot_bytes(tensor.grid());
            weight::check_capacity("the slot", slot.len(), usize::try_from(need).unwrap_or(usize::MAX))?;
            check_device("the slot", slot.device().ordinal(), ordinal)?;
            check_device("the tensor", tensor.device().ordinal(), ordinal)
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))
    }

    /// Enqueues writing the tiles to the start of `slot`, for the window of the packed tensor.
    ///
    /// # Errors
    /// The slot is too small or on another device, or a driver error.
    pub fn enqueue(
        &self,
        stream: &Stream,
        tensor: &DeviceCompact,
        window: Window,
        slot: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        self.check(tensor, slot)?;
        let (plan, at) = (SlotPlan::of(tensor.grid()), slot.address());
        let args = DecodeCompactArgs {
            packed: at,
            escape_heads: at + plan.heads,
            inexact: at + plan.inexact,
            group_words: at + plan.group_words,
            base: window.base().into(),
            ..args(tensor)
        };
        let problem = GemmShape { m: 0, n: args.n, k: args.k };
        // SAFETY: the sections belong to a checked tensor, with the counts that bound them; the slot has room for all
        // output. The sums are added to arbitrary initial values, but nothing reads them. Dropping a buffer waits for
        // the kernel.
        unsafe { self.kernel.launch(stream, problem, &args) }
    }
}

/// Some tiles of a compact tensor, as device addresses.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct TilesAt {
    /// The number of tiles, below 2^26.
    pub count: u32,
    /// u8 `[count, 5120]`, 16-byte aligned.
    pub dense: u64,
    /// u32 `[count + 1, 2]`, 8-byte aligned: as `class_tiles`, with offsets from `streams`.
    pub tiles: u64,
    /// u32 `[stream_words]`, 16-byte aligned.
    pub streams: u64,
    /// Words in `streams`, a multiple of 4.
    pub stream_words: u32,
}

impl TilesAt {
    /// Returns these sections, with a grid of as many tiles: tiles are independent of their place in a matrix.
    pub fn args(self) -> DecodeCompactArgs {
        let Self { count, dense, tiles, streams, stream_words } = self;
        let (n, k, tile_rows, tile_cols) = (64 * count, 64, count, 1);
        DecodeCompactArgs {
            dense,
            tiles,
            streams,
            stream_words,
            n,
            k,
            tile_rows,
            tile_cols,
            ..DecodeCompactArgs::default()
        }
    }
}

impl Expander {
    /// Returns the bytes of scratch for this many tiles: their heads, the index of an inexact element, sums of lists.
    pub(crate) const fn scratch_bytes(tiles: usize) -> usize {
        tiles * packed::ROW_BLOCKS * 4 + 8 + tiles.div_ceil(SlotPlan::GROUP_TILES) * 4
    }

    /// Enqueues writing packed tiles to `packed` for the window of the packed tensor, whose heads must be written
    /// separately: what the kernel writes besides goes to `scratch`.
    ///
    /// # Safety
    /// `from` names memory of these sizes that may have any contents. `packed` and `scratch` are the addresses,
    /// multiples of 16 and 8, of `6144 * from.count` and [`Expander::scratch_bytes`] bytes on the kernel's device.
    /// Nothing else accesses this memory until the work is done.
    pub(crate) unsafe fn enqueue_tiles(
        &self,
        stream: &Stream,
        (from, tables): (TilesAt, &CompactTables),
        window: Window,
        (packed, scratch): (u64, u64),
    ) -> Result<(), DeviceError> {
        let inexact = scratch + (from.count as usize * packed::ROW_BLOCKS * 4) as u64;
        let args = DecodeCompactArgs {
            records: tables.escapes.address(),
            table: tables.table.address(),
            // Below 2^32: checked when the tensor was created.
            record_words: tables.escapes.len() as u32,
            class_base: tables.window.base().into(),
            base: window.base().into(),
            packed,
            escape_heads: scratch,
            inexact,
            group_words: inexact + 8,
            ..from.args()
        };
        // SAFETY: the caller's promise; the tables belong to a tensor, with the counts that bound them. The sums are
        // added to arbitrary initial values, but nothing reads them.
        unsafe { self.kernel.launch(stream, GemmShape { m: 0, n: args.n, k: args.k }, &args) }
    }
}

/// Returns the sections and the shape, which all stages read.
#[doc(hidden)]
pub fn args(tensor: &DeviceCompact) -> DecodeCompactArgs {
    let grid = tensor.grid();
    DecodeCompactArgs {
        dense: tensor.dense().address(),
        tiles: tensor.tiles().address(),
        streams: tensor.streams().address(),
        records: tensor.escapes().address(),
        table: tensor.table().address(),
        // Counts below 2^32: checked when the tensor was uploaded; a grid's dimensions fit 32 bits.
        stream_words: tensor.streams().len() as u32,
        record_words: tensor.escapes().len() as u32,
        class_base: tensor.window().base().into(),
        n: grid.rows() as u32,
        k: grid.cols() as u32,
        tile_rows: grid.tile_rows() as u32,
        tile_cols: grid.tile_cols() as u32,
        ..DecodeCompactArgs::default()
    }
}
