//! The compact form to BF16 on the GPU (`docs/format.md` A.11): the weights, bit for bit.
//!
//! ```text
//! DeviceCompact --full--> DeviceMatrix
//! ```

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::TranscodeArgs,
    plan::GemmShape,
    spec::{Op, TranscodeStage},
};

use crate::{
    device::{
        DeviceError, KernelSet, MatrixMut, Refusal, Stream,
        module::LoadedKernel,
        view::{check_apart, check_device},
    },
    weight::{self, DeviceCompact},
};

/// The kernel that writes the weights of a compact tensor.
#[derive(Clone, Debug)]
pub struct Transcoder {
    kernel: Arc<LoadedKernel>,
}

impl Transcoder {
    /// Compiles or finds the kernel.
    ///
    /// # Errors
    /// The device or the compiler is missing, or failed.
    pub fn of(kernels: &KernelSet) -> Result<Self, DeviceError> {
        Self::new(kernels.get(&VariantSpec::transcode(kernels.device().info().arch, TranscodeStage::Full))?)
    }

    /// Wraps a kernel.
    ///
    /// # Errors
    /// A kernel of another family, or of another stage.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::Transcode(spec) if spec.stage == TranscodeStage::Full => Ok(Self { kernel }),
            _ => kernel.refuse(Refusal::Family { wanted: "a transcoder to bf16" }),
        }
    }

    /// Enqueues the decoding of a tensor to a matrix without gaps.
    ///
    /// # Errors
    /// `output` has another shape, overlaps the tensor, or lies on another device.
    pub fn full(&self, stream: &Stream, tensor: &DeviceCompact, output: MatrixMut<'_>) -> Result<(), DeviceError> {
        let (place, wanted) = (output.place(), weight::shape(tensor.grid()));
        let check = || {
            if place.shape() != wanted {
                return Err(Refusal::Output { output: place.shape(), tensor: wanted });
            }
            let own = self.kernel.device().ordinal();
            place.check_dense("the output")?;
            place.check_aligned("the output")?;
            place.check_device("the output", own)?;
            check_device("the tensor", tensor.device().ordinal(), own)?;
            check_apart(("the output", place.span()), tensor.spans())
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = TranscodeArgs { weights: place.address, ..args(tensor) };
        let problem = GemmShape { m: 0, n: args.n, k: args.k };
        // SAFETY: the sections are those of a checked tensor, beside the counts that bound them, and `output` has the grid's
        // shape. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(stream, problem, &args) }
    }
}

/// What all stages read, and the shape.
#[doc(hidden)]
pub fn args(tensor: &DeviceCompact) -> TranscodeArgs {
    let grid = tensor.grid();
    TranscodeArgs {
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
        ..TranscodeArgs::default()
    }
}
