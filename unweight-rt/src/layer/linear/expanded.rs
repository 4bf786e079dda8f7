//! The product of weights that a kernel expands to BF16 in the context's slot for cuBLAS.

use std::ops::Range;

use unweight_format::TileGrid;

use super::routes::parts;
use crate::{
    device::{
        ContextSize, DeviceError, LaunchError, MatrixMut, Stream,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{
        context::ContextParts,
        cublas::{Cublas, Product},
        operands::check_product,
    },
    ops::silu_mul::SiluMul,
};

/// The maximum number of rows per product of a gate and an up before activation; larger batches are split.
const GATED_ROWS: u32 = 512;

/// Returns the context size for `m` rows of weights that are expanded to BF16 for cuBLAS.
pub(super) fn size(m: u32, grid: TileGrid, gated: bool) -> ContextSize {
    // The size of a grid's elements and rows fits u64.
    let product = if gated { u64::from(m.min(GATED_ROWS)) * grid.rows() as u64 } else { 0 };
    ContextSize { slot_bytes: 2 * grid.elements() as u64, padded_y: product, cublas: true, ..ContextSize::default() }
}

/// The operations that multiply BF16 weights in the slot: cuBLAS and, for a gate and an up, the activation kernel.
#[derive(Debug)]
pub(super) struct ExpandedProduct {
    activate: Option<SiluMul>,
}

/// A product with checked operands. `'k` is the lifetime of the layer, `'c` of the context.
pub(super) struct ExpandedLaunch<'k, 'c> {
    x: MatrixDesc,
    y: MatrixDesc,
    /// The BF16 weights at the start of the slot.
    weights: MatrixDesc,
    cublas: &'c mut Cublas,
    kind: Kind<'k>,
}

enum Kind<'k> {
    /// One product into `y`.
    Plain(Product),
    /// Products of some rows each, which are then activated into rows of `y`.
    Gated(&'k SiluMul),
}

/// The weights of an expanded layer.
pub(super) struct Expanded<I> {
    /// Shape and tiling, padding included.
    pub(super) grid: TileGrid,
    /// The device of the weights.
    pub(super) ordinal: usize,
    /// The address range of each section.
    pub(super) spans: I,
}

impl ExpandedProduct {
    pub(super) fn new(activate: Option<SiluMul>) -> Self {
        Self { activate }
    }

    pub(super) fn context_size(&self, m: u32, grid: TileGrid) -> ContextSize {
        size(m, grid, self.activate.is_some())
    }

    /// Checks operands and context without enqueuing anything. Returns `None` for a batch without rows.
    pub(super) fn prepare<'c, I: Iterator<Item = (&'static str, Range<u64>)>>(
        &self,
        ctx: &mut ContextParts<'c>,
        weights: Expanded<I>,
        (x, y): (&MatrixDesc, &MatrixDesc),
        add: bool,
    ) -> Result<Option<ExpandedLaunch<'_, 'c>>, DeviceError> {
        let Expanded { grid, ordinal, spans } = weights;
        // A grid's dimensions fit 32 bits.
        let (n, k) = (grid.rows() as u32, grid.cols() as u32);
        let columns = if self.activate.is_some() { n / 2 } else { n };
        let slot = ("the slot", ctx.slot.span());
        check_product(ordinal, x, [n.into(), k.into()], columns.into(), y, spans.chain([slot.clone()]))?;
        // cuBLAS accepts unaligned rows, the layer's other routes do not. A layer rejects the same operands at every
        // batch.
        x.check_rows_aligned("x")?;
        y.check_rows_aligned("y")?;
        check_device("the execution context", ctx.stream.device().ordinal(), ordinal)?;
        let have = ContextSize {
            slot_bytes: ctx.slot.len() as u64,
            padded_y: ctx.padded.y.len() as u64,
            cublas: ctx.cublas.is_some(),
            ..ContextSize::default()
        };
        let need = self.context_size(x.rows, grid);
        let Some(cublas) = ctx.cublas.take().filter(|_| have.max(need) == have) else {
            return Err(LaunchError::ContextTooSmall { need, have }.into());
        };
        if x.rows == 0 {
            return Ok(None);
        }
        let weights = MatrixDesc::new(ordinal, ctx.slot.address(), n, k, k.into(), ctx.slot.len() as u64 / 2)?;
        let kind = match &self.activate {
            None => Kind::Plain(Product::new(x, &weights, y, add)?),
            Some(activate) => {
                let rows = x.rows.min(GATED_ROWS);
                let product = MatrixDesc::of(&ctx.padded.y, rows, n)?;
                check_apart(("the product of gate and up", product.span()), [("x", x.span()), slot])?;
                Product::new(&x.part(0..rows, 0..k)?, &weights, &product, false)?;
                activate.check_interleaved(&product, &y.part(0..rows, 0..columns)?)?;
                Kind::Gated(activate)
            }
        };
        Ok(Some(ExpandedLaunch { x: *x, y: *y, weights, cublas, kind }))
    }
}

impl ExpandedLaunch<'_, '_> {
    /// Enqueues the expansion by `expand`, then the product.
    ///
    /// # Safety
    /// `ctx` is the context that the launch was prepared for, and the memory of `x` and `y` stays valid until the work
    /// is done.
    pub(super) unsafe fn enqueue(
        self,
        ctx: &mut ContextParts<'_>,
        expand: impl FnOnce(&Stream, MatrixMut<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Self { x, y, weights, cublas, kind } = self;
        let ContextParts { stream, padded, slot, .. } = ctx;
        let (n, k) = (weights.rows, weights.cols);
        // SAFETY: the slot has room for the matrix (`prepare`); only the context uses it, and only on this stream.
        let whole = unsafe { MatrixMut::from_raw(slot.device(), slot.address(), n, k, k.into()) }?;
        // An ordinary launch: it starts after the last product that read the slot.
        expand(stream, whole)?;
        match kind {
            // SAFETY: `prepare` has checked these operands; the caller keeps their memory. cuBLAS's launches are
            // ordinary launches: they start after the weights are written.
            Kind::Plain(product) => unsafe { cublas.enqueue(&product) },
            Kind::Gated(activate) => {
                for rows in parts(x.rows, GATED_ROWS) {
                    let part = MatrixDesc::of(&padded.y, rows.end - rows.start, n)?;
                    let product = Product::new(&x.part(rows.clone(), 0..k)?, &weights, &part, false)?;
                    // SAFETY: as above; the context's memory has room for the product of this many rows.
                    unsafe {
                        cublas.enqueue(&product)?;
                        activate.launch_interleaved(stream, &part, &y.part(rows, 0..n / 2)?)?;
                    }
                }
                Ok(())
            }
        }
    }
}
