//! The product of weights that a kernel writes as BF16 into the context's slot, from where cuBLAS multiplies.

use std::ops::Range;

use unweight_format::TileGrid;

use super::routes::parts;
use crate::{
    device::{
        ContextSize, DeviceError, LaunchError, MatrixMut, Stream,
        view::{Place, check_apart, check_device},
    },
    exec::{
        context::ContextParts,
        cublas::{Cublas, Product},
        operands::check_product,
    },
    ops::silu_mul::SiluMul,
};

/// Rows of a gate and an up that are multiplied before they are activated: a large batch takes several such parts.
const GATED_ROWS: u32 = 512;

/// What a context must provide for `m` rows of weights that are expanded to BF16 ahead of cuBLAS.
pub(super) fn size(m: u32, grid: TileGrid, gated: bool) -> ContextSize {
    // A grid's elements and rows fit.
    let product = if gated { u64::from(m.min(GATED_ROWS)) * grid.rows() as u64 } else { 0 };
    ContextSize { slot_bytes: 2 * grid.elements() as u64, padded_y: product, cublas: true, ..ContextSize::default() }
}

/// What multiplies with BF16 in the slot: cuBLAS, and for a gate and an up the kernel that activates their product.
#[derive(Debug)]
pub(super) struct ExpandedProduct {
    activate: Option<SiluMul>,
}

/// A product whose operands were checked. `'k` is the layer's life, `'c` the context's.
pub(super) struct ExpandedLaunch<'k, 'c> {
    x: Place,
    y: Place,
    /// The weights as BF16, at the front of the slot.
    weights: Place,
    cublas: &'c mut Cublas,
    kind: Kind<'k>,
}

enum Kind<'k> {
    /// One product into `y`.
    Plain(Product),
    /// Products of some rows, each activated into rows of `y`.
    Gated(&'k SiluMul),
}

/// The weights of a layer that are expanded.
pub(super) struct Expanded<I> {
    /// Shape and tiling, padding included.
    pub(super) grid: TileGrid,
    /// The device that holds them.
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

    /// Checks the operands and the context, without enqueuing anything. `None` for a batch without rows.
    pub(super) fn prepare<'c, I: Iterator<Item = (&'static str, Range<u64>)>>(
        &self,
        ctx: &mut ContextParts<'c>,
        weights: Expanded<I>,
        (x, y): (&Place, &Place),
        add: bool,
    ) -> Result<Option<ExpandedLaunch<'_, 'c>>, DeviceError> {
        let Expanded { grid, ordinal, spans } = weights;
        // A grid's dimensions fit 32 bits.
        let (n, k) = (grid.rows() as u32, grid.cols() as u32);
        let columns = if self.activate.is_some() { n / 2 } else { n };
        let slot = ("the slot", ctx.slot.span());
        check_product(ordinal, x, [n.into(), k.into()], columns.into(), y, spans.chain([slot.clone()]))?;
        // cuBLAS takes any row, the layer's other routes do not: a layer refuses the same rows at every batch.
        x.check_rows_aligned("x")?;
        y.check_rows_aligned("y")?;
        check_device("the ctx", ctx.stream.device().ordinal(), ordinal)?;
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
        let own = Place::new(ordinal, ctx.slot.address(), n, k, k.into(), ctx.slot.len() as u64 / 2)?;
        let kind = match &self.activate {
            None => Kind::Plain(Product::new(x, &own, y, add)?),
            Some(activate) => {
                let rows = x.rows.min(GATED_ROWS);
                let product = Place::of(&ctx.padded.y, rows, n)?;
                check_apart(("the product of gate and up", product.span()), [("x", x.span()), slot])?;
                Product::new(&x.part(0..rows, 0..k)?, &own, &product, false)?;
                activate.check_interleaved(&product, &y.part(0..rows, 0..columns)?)?;
                Kind::Gated(activate)
            }
        };
        Ok(Some(ExpandedLaunch { x: *x, y: *y, weights: own, cublas, kind }))
    }
}

impl ExpandedLaunch<'_, '_> {
    /// Enqueues the expansion by `expand`, then the product.
    ///
    /// # Safety
    /// `context` is what the launch was prepared for, and the memory of `x` and `y` is there until the work is done.
    pub(super) unsafe fn enqueue(
        self,
        ctx: &mut ContextParts<'_>,
        expand: impl FnOnce(&Stream, MatrixMut<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Self { x, y, weights, cublas, kind } = self;
        let ContextParts { stream, padded, slot, .. } = ctx;
        let (n, k) = (weights.rows, weights.cols);
        // SAFETY: the slot has room for the matrix (`prepare`), the context alone uses it, on this stream alone.
        let whole = unsafe { MatrixMut::from_raw(slot.device(), slot.address(), n, k, k.into()) }?;
        // An ordinary launch: the product that read the slot last is done when it starts.
        expand(stream, whole)?;
        match kind {
            // SAFETY: `prepare` has checked these operands; the caller keeps their memory. cuBLAS's launches are
            // ordinary ones: they start when the weights are written.
            Kind::Plain(product) => unsafe { cublas.enqueue(&product) },
            Kind::Gated(activate) => {
                for rows in parts(x.rows, GATED_ROWS) {
                    let part = Place::of(&padded.y, rows.end - rows.start, n)?;
                    let product = Product::new(&x.part(rows.clone(), 0..k)?, &weights, &part, false)?;
                    // SAFETY: as above; the context's memory has room for the product of so many rows.
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
