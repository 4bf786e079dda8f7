//! Unpacks a packed tensor to a BF16 matrix on the GPU (`docs/format.md` A.9).

use std::sync::Arc;

use unweight_codegen::{abi::PackArgs, plan::GemmShape, spec::Op};
use unweight_format::TileGrid;

use crate::{
    device::{
        DeviceError, LaunchError, MatrixMut, Stream,
        module::LoadedKernel,
        view::{check_apart, check_device},
    },
    weight::{self, DevicePacked},
};

/// The kernel that writes the weights of a packed tensor as BF16 into the slot of an execution context, before a
/// product by cuBLAS.
#[derive(Clone, Debug)]
pub struct Unpacker {
    kernel: Arc<LoadedKernel>,
}

impl Unpacker {
    /// Wraps a kernel.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::Unpack(_) => Ok(Self { kernel }),
            _ => kernel.refuse(LaunchError::Family { wanted: "an unpacker to BF16" }),
        }
    }

    /// Enqueues the unpacking of a tensor to a contiguous matrix, as an ordinary launch.
    ///
    /// # Errors
    /// `output` has another shape, overlaps the tensor, or is on another device.
    pub fn enqueue(&self, stream: &Stream, tensor: &DevicePacked, output: MatrixMut<'_>) -> Result<(), DeviceError> {
        let (grid, desc, ordinal) = (tensor.grid(), output.desc(), self.kernel.device().ordinal());
        let check = || {
            if desc.shape() != weight::shape(grid) {
                return Err(LaunchError::Output { output: desc.shape(), tensor: weight::shape(grid) });
            }
            desc.check_dense("the output")?;
            desc.check_aligned("the output")?;
            desc.check_device("the output", ordinal)?;
            check_device("the tensor", tensor.device().ordinal(), ordinal)?;
            check_apart(("the output", desc.span()), tensor.spans())
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = PackArgs { weights: desc.address, base: tensor.window().base().into(), ..shape(grid) };
        // SAFETY: the sections have the sizes that the grid requires or a count that bounds them, `output` has the
        // grid's shape, and the kernel bounds-checks every index. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(stream, problem(grid), &with_sections(args, tensor)) }
    }
}

/// Returns arguments with the sections of a packed tensor.
pub(super) fn with_sections(args: PackArgs, tensor: &DevicePacked) -> PackArgs {
    PackArgs {
        packed: tensor.packed().address(),
        escape_heads: tensor.escape_heads().address(),
        escapes: tensor.escapes().address(),
        // Below 2^32: checked when the tensor was created.
        escape_words: tensor.escapes().len() as u32,
        ..args
    }
}

/// Returns arguments with only the shape.
pub(super) fn shape(grid: TileGrid) -> PackArgs {
    PackArgs {
        // A grid's dimensions fit 32 bits.
        n: grid.rows() as u32,
        k: grid.cols() as u32,
        tile_rows: grid.tile_rows() as u32,
        tile_cols: grid.tile_cols() as u32,
        ..PackArgs::default()
    }
}

pub(super) fn problem(grid: TileGrid) -> GemmShape {
    GemmShape { m: 0, n: grid.rows() as u32, k: grid.cols() as u32 }
}
