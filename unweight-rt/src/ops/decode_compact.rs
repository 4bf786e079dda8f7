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

use unweight_format::{TileGrid, raw::packed::Window};

use crate::{
    choose::route::SlotPlan,
    device::{
        DeviceBuffer, DeviceError, KernelSet, LaunchError, MatrixMut, Stream,
        module::LoadedKernel,
        view::{check_apart, check_device},
    },
    weight::{self, DeviceCompact},
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
