//! A layer of compact weights: kernels read them directly, or they are expanded before the product.

use std::{ops::Range, sync::Arc};

use unweight_codegen::spec::Epilogue;
use unweight_format::TileGrid;

use super::{
    expanded::{Expanded, ExpandedProduct},
    routes::{Routed, load_routes},
};
use crate::{
    choose::route::{BatchRoute, Route, Routes},
    device::{ContextSize, DeviceError, MatrixMut, MatrixRef, module::LoadedKernel, view::MatrixDesc},
    exec::{ExecContext, context::ContextParts},
    ops::{
        decode_compact::{CompactDecoder, Expander},
        gemm_compact::CompactGemm,
        gemm_packed::PackedGemm,
        silu_mul::SiluMul,
    },
    weight::{DeviceCompact, PackedEscapes},
};

/// A linear layer of compact weights, in whole tiles of 64 x 64.
#[derive(Debug)]
pub struct CompactLinear {
    weights: DeviceCompact,
    /// The escapes of the packed encoding; its tiles are written into the slot.
    escapes: PackedEscapes,
    routes: Vec<BatchRoute<CompactRoute>>,
}

/// How a batch is multiplied.
#[derive(Debug)]
pub(super) enum CompactRoute {
    /// A kernel reads compact weights.
    Direct(CompactGemm),
    /// Weights are expanded to packed tiles in the slot; a packed matmul reads those.
    ExpandToPacked(Expander, PackedGemm),
    /// Weights are expanded to BF16 in the slot; cuBLAS multiplies those.
    ExpandToBf16(CompactDecoder, ExpandedProduct),
}

impl CompactRoute {
    fn new(route: Route<Arc<LoadedKernel>>) -> Result<Self, DeviceError> {
        Ok(match route {
            Route::Direct(kernel) => Self::Direct(CompactGemm::new(kernel)?),
            Route::ExpandToPacked { expand, product } => {
                Self::ExpandToPacked(Expander::new(expand)?, PackedGemm::new(product)?)
            }
            Route::ExpandToBf16 { expand, activate } => {
                let activate = activate.map(SiluMul::new).transpose()?;
                Self::ExpandToBf16(CompactDecoder::new(expand)?, ExpandedProduct::new(activate))
            }
        })
    }
}

/// Returns the context size for weights that are expanded to packed tiles.
pub(super) fn slot_size(grid: TileGrid) -> ContextSize {
    ContextSize { slot_bytes: Expander::slot_bytes(grid), ..ContextSize::default() }
}

impl CompactLinear {
    /// Creates a layer from compact weights and the escapes of their packed encoding.
    ///
    /// # Errors
    /// A kernel belongs to another family.
    pub(crate) fn new(
        weights: DeviceCompact,
        escapes: PackedEscapes,
        routes: Routes<Arc<LoadedKernel>>,
    ) -> Result<Self, DeviceError> {
        Ok(Self { weights, escapes, routes: load_routes(routes, CompactRoute::new)? })
    }

    /// Returns the size of the weights on the device in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.weights.bytes() + self.escapes.bytes()
    }

    /// Enqueues the expansion to packed tiles, then the product from them.
    fn enqueue_packed(
        &self,
        ctx: ContextParts<'_>,
        (x, y): (&MatrixDesc, &MatrixDesc),
        (expander, gemm): (&Expander, &PackedGemm),
    ) -> Result<(), DeviceError> {
        let ContextParts { stream, workspace, slot, .. } = ctx;
        let have = ContextSize { slot_bytes: slot.len() as u64, ..workspace.size() };
        let grid = self.weights.grid();
        have.check(slot_size(grid).max(gemm.context_size_of(x.rows, grid)))?;
        // SAFETY: dropped on return. The layer and the context outlive the work enqueued here: dropping a buffer waits.
        let packed = unsafe { self.escapes.over(slot) }?;
        let Some(launch) = gemm.prepare(workspace, (x, None), &packed, y)? else { return Ok(()) };
        // An ordinary launch: it starts after the last product that read the slot.
        expander.enqueue(stream, &self.weights, self.escapes.window(), slot)?;
        // SAFETY: prepared with this context's workspace and slot; views were checked against their memory when they
        // were created. Also an ordinary launch: it starts after the tiles are written.
        unsafe { launch.enqueue(stream) }
    }
}

impl Routed for CompactLinear {
    type Route = CompactRoute;

    fn routes(&self) -> &[BatchRoute<CompactRoute>] {
        &self.routes
    }

    fn shape(&self) -> [u32; 2] {
        let grid = self.weights.grid();
        // A grid's dimensions fit 32 bits.
        [grid.rows() as u32, grid.cols() as u32]
    }

    fn ordinal(&self) -> usize {
        self.weights.device().ordinal()
    }

    fn spans(&self) -> impl Iterator<Item = (&'static str, Range<u64>)> {
        self.weights.spans().into_iter().chain(self.escapes.spans())
    }

    fn kernel<'a>(&self, route: &'a CompactRoute) -> Option<&'a LoadedKernel> {
        match route {
            CompactRoute::Direct(gemm) => Some(gemm.kernel()),
            CompactRoute::ExpandToPacked(_, gemm) => Some(gemm.kernel()),
            CompactRoute::ExpandToBf16(..) => None,
        }
    }

    fn rows_size(&self, route: &CompactRoute, rows: u32) -> ContextSize {
        let grid = self.weights.grid();
        match route {
            CompactRoute::Direct(_) => ContextSize::default(),
            CompactRoute::ExpandToPacked(_, gemm) => slot_size(grid).max(gemm.context_size_of(rows, grid)),
            CompactRoute::ExpandToBf16(_, product) => product.context_size(rows, grid),
        }
    }

    fn enqueue_rows(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        choice: &BatchRoute<CompactRoute>,
    ) -> Result<(), DeviceError> {
        match &choice.kernel {
            CompactRoute::Direct(gemm) => gemm.enqueue(ctx.stream(), x, &self.weights, y),
            CompactRoute::ExpandToPacked(expander, gemm) => {
                self.enqueue_packed(ctx.parts(), (x.desc(), y.desc()), (expander, gemm))
            }
            CompactRoute::ExpandToBf16(decoder, product) => {
                let mut ctx = ctx.parts();
                let weights = Expanded { grid: self.weights.grid(), ordinal: self.ordinal(), spans: self.spans() };
                let add = choice.epilogue == Epilogue::StoreAdd;
                let Some(launch) = product.prepare(&mut ctx, weights, (x.desc(), y.desc()), add)? else {
                    return Ok(());
                };
                let expand = |stream: &_, output: MatrixMut<'_>| decoder.full(stream, &self.weights, output);
                // SAFETY: prepared for these parts of the context. Views were checked against their memory when they
                // were created, and dropping a buffer waits for the work.
                unsafe { launch.enqueue(&mut ctx, expand) }
            }
        }
    }
}
