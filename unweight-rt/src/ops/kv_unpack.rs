//! Unpacks pages of a KV cache to BF16, for later chunks of a prompt that attend to them.

use std::sync::Arc;

use unweight_codegen::{
    abi::KvUnpackArgs,
    plan::GemmShape,
    spec::{KvUnpackSpec, Op},
};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, RowFault,
        module::LoadedKernel,
        view::{check_apart, check_buffer},
    },
    exec::ExecContext,
    ops::{kv::KvLayer, kv_packed::PackedLayers},
};

/// A kernel of `kv_unpack`.
#[derive(Clone, Debug)]
pub struct KvUnpack {
    kernel: Arc<LoadedKernel>,
    spec: KvUnpackSpec,
}

impl KvUnpack {
    /// Wraps a kernel of family `kv_unpack`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::KvUnpack(spec) => Ok(Self { kernel, spec }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a kv_unpack kernel" }),
        }
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues unpacking of the first `count` pages of `table`, of one layer, to pages `0..count` of `out`. A page or
    /// unit that the cache does not have, or that cannot be read, is skipped, and [`ExecContext::synchronize`] reports
    /// it; a lost unit is skipped.
    ///
    /// # Errors
    /// Operands that do not match, overlap or are on another device; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        layer: PackedLayers<'_>,
        (table, count): (&DeviceBuffer<u32>, u32),
        out: KvLayer<'_>,
    ) -> Result<(), DeviceError> {
        let ordinal = self.kernel.device().ordinal();
        let shape = layer.shape();
        let check = || {
            layer.check(ordinal, self.spec.head_dim.get())?;
            layer.check_heads(&out.shape())?;
            out.check_device(ordinal)?;
            check_buffer("the page table", table, count.into(), ordinal)?;
            let (got, expected) = (out.shape().pages().into(), count.into());
            if got < expected {
                return Err(LaunchError::Elements { buffer: "the BF16 pages", got, expected });
            }
            let read = layer.spans().into_iter().chain([("the page table", table.span())]);
            check_apart(("the BF16 pages", out.span()), read)
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = KvUnpackArgs {
            packed: layer.packed(),
            records: layer.records(),
            unit_pages: layer.units(),
            page_table: table.address(),
            out: out.address(),
            fault: ctx.row_fault_address(RowFault::Page),
            m: count,
            kv_heads: shape.kv.kv_heads(),
            pages: shape.kv.pages(),
            units: shape.units,
        };
        let units = u64::from(count) * u64::from(shape.kv.kv_heads()) * 2;
        // SAFETY: the table and the output were checked against `count` above, caches against their memory when they
        // were created; the kernel bounds-checks pages and units. The fault word lives as long as the context, on whose
        // stream this runs. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), GemmShape::rows(u32::try_from(units).unwrap_or(u32::MAX)), &args) }
    }
}
