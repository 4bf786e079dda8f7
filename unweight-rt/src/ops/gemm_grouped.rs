//! The grouped matmul of a mixture of experts: one launch multiplies each expert's weights with the rows of its tokens.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::GemmGroupedArgs,
    family::Instruction,
    plan::GemmShape,
    spec::{Arch, Epilogue, GemmGroupedSpec, Op},
};

use crate::{
    device::{DeviceError, KernelSet, LaunchError, Stream, module::LoadedKernel},
    weight::ExpertWeights,
};

/// A grouped matmul kernel.
#[derive(Clone, Debug)]
pub struct GroupedGemm {
    kernel: Arc<LoadedKernel>,
}

/// Device addresses of lists: pairs of a token and one of its experts, and items of pairs of one expert each.
#[derive(Clone, Copy)]
pub(crate) struct Lists {
    pub(crate) pairs: u64,
    pub(crate) items: u64,
    /// The number of items.
    pub(crate) count: u32,
}

/// What the blocks of a product multiply.
#[derive(Clone, Copy)]
pub(crate) enum Items {
    /// The items of a list.
    Lists(Lists),
    /// Every pair by itself.
    Pairs {
        /// Device address of the expert of each pair; those that are not below `experts` are skipped.
        ids: u64,
        count: u32,
        experts: u32,
    },
}

/// The rows of a grouped product, as device addresses.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) x: u64,
    /// Pitch of `x` in bytes.
    pub(crate) x_row_bytes: u64,
    pub(crate) y: u64,
    /// The number of pairs that share a row of `x`.
    pub(crate) pairs_per_row: u32,
}

/// Returns the variant of a shape on an architecture.
pub(crate) fn variant(arch: Arch, shape: GemmGroupedSpec, epilogue: Epilogue) -> VariantSpec {
    VariantSpec::gemm_grouped(arch, GemmGroupedSpec { pdl: arch.has(Instruction::DependentLaunch), epilogue, ..shape })
}

impl GroupedGemm {
    /// Compiles or finds the kernel of a shape.
    ///
    /// # Errors
    /// The kernel cannot be compiled or loaded, or the device failed.
    pub fn of(kernels: &KernelSet, shape: GemmGroupedSpec, epilogue: Epilogue) -> Result<Self, DeviceError> {
        Self::new(kernels.get(&variant(kernels.device().info().arch, shape, epilogue))?)
    }

    /// Wraps a kernel of family `gemm_grouped`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::GemmGrouped(_) => Ok(Self { kernel }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a grouped matmul" }),
        }
    }

    /// Enqueues the products of items, with weights `[n, k]` per expert.
    ///
    /// # Safety
    /// The items have pairs whose rows are in `rows`, and experts of these weights; all memory stays allocated until
    /// the work is done.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        w: &ExpertWeights,
        [n, k]: [u32; 2],
        items: Items,
        rows: Rows,
    ) -> Result<(), DeviceError> {
        if matches!(self.kernel.spec().op, Op::GemmGrouped(op) if op.bf16 != w.is_bf16()) {
            let (takes, got) = if w.is_bf16() { ("packed", "bf16") } else { ("bf16", "packed") };
            return self.kernel.refuse(LaunchError::Source { takes, got });
        }
        let (count, args) = match items {
            Items::Lists(Lists { pairs, items, count }) => (count, GemmGroupedArgs { pairs, items, ..weight_args(w) }),
            Items::Pairs { ids, count, experts } => {
                (count, GemmGroupedArgs { items: ids, is_pairs: 1, experts, ..weight_args(w) })
            }
        };
        let args = GemmGroupedArgs {
            y: rows.y,
            x_data: rows.x,
            x_row_bytes: rows.x_row_bytes,
            n,
            k,
            tile_cols: k / 64,
            pairs_per_row: rows.pairs_per_row,
            ..args
        };
        // SAFETY: the caller's promise.
        unsafe { self.kernel.launch(stream, GemmShape { m: count, n, k }, &args) }
    }
}

/// Returns the arguments that describe the weights.
fn weight_args(w: &ExpertWeights) -> GemmGroupedArgs {
    match w {
        ExpertWeights::Packed(packed) => GemmGroupedArgs {
            packed: packed.packed().address(),
            escape_heads: packed.escape_heads().address(),
            escapes: packed.escapes().address(),
            scale: packed.window().scale(),
            // Below 2^32: checked when the tensor was created.
            escape_words: packed.escapes().len() as u32,
            ..GemmGroupedArgs::default()
        },
        ExpertWeights::Bf16 { weights, .. } => {
            GemmGroupedArgs { packed: weights.data().address(), scale: 1.0, ..GemmGroupedArgs::default() }
        }
    }
}
