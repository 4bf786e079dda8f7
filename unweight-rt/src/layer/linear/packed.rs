//! A layer of packed weights: kernels read them directly, or they are expanded to BF16 for cuBLAS.

use std::{ops::Range, sync::Arc};

use unweight_codegen::spec::Epilogue;

use super::{
    expanded::{Expanded, ExpandedLaunch, ExpandedProduct},
    routes::{Routed, load_routes, parts},
};
use crate::{
    choose::route::{BatchRoute, Route, Routes},
    device::{
        ContextSize, DeviceBuffer, DeviceError, LaunchError, MatrixMut, MatrixRef,
        module::LoadedKernel,
        view::{MatrixDesc, check_device},
    },
    exec::{ExecContext, context::ContextParts, operands::check_product},
    ops::{
        gemm_packed::{PackedGemm, PackedLaunch},
        silu_mul::SiluMul,
        unpack::Unpacker,
    },
    weight::DevicePacked,
};

/// A linear layer of packed weights. Weights whose shape is not a multiple of 64 are padded; activations are then
/// copied to padded buffers and back.
#[derive(Debug)]
pub struct PackedLinear {
    n: u32,
    k: u32,
    weights: DevicePacked,
    routes: Vec<BatchRoute<PackedRoute>>,
}

/// How a batch is multiplied.
#[derive(Debug)]
pub(super) enum PackedRoute {
    /// A kernel reads packed weights.
    Direct(PackedGemm),
    /// Weights are unpacked to BF16 in the slot; cuBLAS multiplies those.
    ExpandToBf16(Unpacker, ExpandedProduct),
}

/// A product with checked operands. `'k` is the lifetime of the layer, `'c` of the context.
#[expect(clippy::large_enum_variant, reason = "boxing would allocate host memory at every launch")]
enum Launch<'k, 'c> {
    Direct(PackedLaunch<'k>),
    ExpandToBf16(&'k Unpacker, ExpandedLaunch<'k, 'c>),
}

impl PackedRoute {
    fn new(route: Route<Arc<LoadedKernel>>) -> Result<Self, DeviceError> {
        match route {
            Route::Direct(kernel) => Ok(Self::Direct(PackedGemm::new(kernel)?)),
            Route::ExpandToBf16 { expand, activate } => {
                let activate = activate.map(SiluMul::new).transpose()?;
                Ok(Self::ExpandToBf16(Unpacker::new(expand)?, ExpandedProduct::new(activate)))
            }
            Route::ExpandToPacked { expand, .. } => {
                expand.refuse(LaunchError::Family { wanted: "a kernel that reads packed weights" })
            }
        }
    }
}

impl PackedLinear {
    /// Creates a layer from the first `n` rows and `k` columns of packed weights; the rest is padding.
    ///
    /// # Errors
    /// A kernel belongs to another family.
    pub(crate) fn new(
        (n, k): (u32, u32),
        weights: DevicePacked,
        routes: Routes<Arc<LoadedKernel>>,
    ) -> Result<Self, DeviceError> {
        Ok(Self { n, k, weights, routes: load_routes(routes, PackedRoute::new)? })
    }

    /// Returns the weights in tiles of 64 x 64. Only the first `n` rows and `k` columns belong to the layer.
    pub fn weights(&self) -> &DevicePacked {
        &self.weights
    }

    /// Returns the rows and columns of the weights, including padding.
    fn padded(&self) -> (u32, u32) {
        let grid = self.weights.grid();
        // A grid's dimensions fit 32 bits.
        (grid.rows() as u32, grid.cols() as u32)
    }

    /// Returns whether [`PackedLinear::enqueue_with_bias`] can multiply a batch: kernels read its weights directly.
    pub(crate) fn takes_bias(&self, m: u32) -> bool {
        let Ok((_, rows)) = self.route(m, Epilogue::StoreAdd) else { return false };
        (self.n, self.k) == self.padded() && [rows, m % rows.max(1)].iter().all(|rows| self.direct(*rows).is_ok())
    }

    /// Returns the kernel that adds to the product of a batch that is not split.
    fn direct(&self, rows: u32) -> Result<&PackedGemm, LaunchError> {
        match self.route(rows, Epilogue::StoreAdd)?.0.kernel {
            PackedRoute::Direct(ref gemm) => Ok(gemm),
            PackedRoute::ExpandToBf16(..) => Err(LaunchError::Family { wanted: "a matmul of packed weights" }),
        }
    }

    /// Enqueues `y[m, n] = x[m, k] * W^T + bias[1, n]`, added in fp32 and rounded once.
    ///
    /// # Errors
    /// As for [`Linear::enqueue`](super::Linear::enqueue), and for a batch that [`PackedLinear::takes_bias`] excludes.
    pub(crate) fn enqueue_with_bias(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        bias: MatrixRef<'_>,
        mut y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (m, rows) = (x.rows(), self.route(x.rows(), Epilogue::StoreAdd)?.1);
        let w = [u64::from(self.n), self.k.into()];
        check_product(self.ordinal(), x.desc(), w, self.n.into(), y.desc(), self.spans())?;
        // Everything is checked before anything is enqueued.
        for rows in [rows, m % rows.max(1)] {
            self.direct(rows)?;
        }
        for part in parts(m, rows) {
            let gemm = self.direct(part.end - part.start)?;
            let (x, y) = (x.part(part.clone(), 0..self.k)?, y.part(part, 0..self.n)?);
            gemm.enqueue_with_bias(ctx, x, &self.weights, bias, y)?;
        }
        Ok(())
    }

    /// Checks the operands without enqueuing anything. Returns `None` if there is nothing to compute.
    fn prepare<'k, 'c>(
        &'k self,
        route: &'k PackedRoute,
        ctx: &mut ContextParts<'c>,
        (x, y): (&MatrixDesc, &MatrixDesc),
        add: bool,
    ) -> Result<Option<Launch<'k, 'c>>, DeviceError> {
        Ok(match route {
            PackedRoute::Direct(gemm) => gemm.prepare(ctx.workspace, (x, None), &self.weights, y)?.map(Launch::Direct),
            PackedRoute::ExpandToBf16(unpacker, product) => {
                let spans = self.weights.spans().into_iter();
                let weights = Expanded { grid: self.weights.grid(), ordinal: self.ordinal(), spans };
                product.prepare(ctx, weights, (x, y), add)?.map(|launch| Launch::ExpandToBf16(unpacker, launch))
            }
        })
    }

    /// # Safety
    /// `ctx` is the context that the launch was prepared for, and the operands' memory stays valid until the work is
    /// done.
    unsafe fn launch(&self, launch: Launch<'_, '_>, ctx: &mut ContextParts<'_>) -> Result<(), DeviceError> {
        match launch {
            // SAFETY: the caller's promise. The weights outlive the work: dropping a buffer waits.
            Launch::Direct(launch) => unsafe { launch.enqueue(ctx.stream) },
            Launch::ExpandToBf16(unpacker, launch) => {
                let expand = |stream: &_, output: MatrixMut<'_>| unpacker.enqueue(stream, &self.weights, output);
                // SAFETY: the caller's promise.
                unsafe { launch.enqueue(ctx, expand) }
            }
        }
    }

    /// Enqueues a batch with padded activations: copies them in, multiplies, and copies the result out.
    fn enqueue_padded(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        mut y: MatrixMut<'_>,
        choice: &BatchRoute<PackedRoute>,
    ) -> Result<(), DeviceError> {
        let (m, ordinal, (padded_n, padded_k)) = (x.rows(), self.ordinal(), self.padded());
        let add = choice.epilogue == Epilogue::StoreAdd;
        let w = [u64::from(self.n), self.k.into()];
        check_product(ordinal, x.desc(), w, self.n.into(), y.desc(), self.spans())?;
        check_device("the execution context", ctx.stream().device().ordinal(), ordinal)?;
        ctx.size().check(padding((self.n, self.k), (padded_n, padded_k), m))?;
        if m == 0 {
            return Ok(());
        }
        let mut ctx = ctx.parts();
        let padded_x = MatrixDesc::of(&ctx.padded.x, m, padded_k)?;
        let padded_y = MatrixDesc::of(&ctx.padded.y, m, padded_n)?;
        let launch = self.prepare(&choice.kernel, &mut ctx, (&padded_x, &padded_y), add)?;

        // Columns past k must be zeros: they are multiplied with the weights' padding. The count does not overflow: it
        // was checked against the context's size.
        let (stream, padded) = (ctx.stream, &mut *ctx.padded);
        padded.x.fill_front(stream, m as usize * padded_k as usize, 0)?;
        front(&mut padded.x, m, self.k, padded_k)?.copy_from(stream, x)?;
        if add {
            front(&mut padded.y, m, self.n, padded_n)?.copy_from(stream, y.as_ref())?;
        }
        if let Some(launch) = launch {
            // SAFETY: prepared for these parts of the context, whose memory outlives the work: dropping a buffer waits.
            unsafe { self.launch(launch, &mut ctx) }?;
        }
        y.copy_from(stream, MatrixRef::new(&ctx.padded.y, m, self.n, padded_n.into())?)
    }
}

impl Routed for PackedLinear {
    type Route = PackedRoute;

    fn routes(&self) -> &[BatchRoute<PackedRoute>] {
        &self.routes
    }

    fn shape(&self) -> [u32; 2] {
        [self.n, self.k]
    }

    fn ordinal(&self) -> usize {
        self.weights.device().ordinal()
    }

    fn spans(&self) -> impl Iterator<Item = (&'static str, Range<u64>)> {
        self.weights.spans().into_iter()
    }

    fn kernel<'a>(&self, route: &'a PackedRoute) -> Option<&'a LoadedKernel> {
        match route {
            PackedRoute::Direct(gemm) => Some(gemm.kernel()),
            PackedRoute::ExpandToBf16(..) => None,
        }
    }

    fn rows_size(&self, route: &PackedRoute, rows: u32) -> ContextSize {
        let grid = self.weights.grid();
        let product = match route {
            PackedRoute::Direct(gemm) => gemm.context_size_of(rows, grid),
            PackedRoute::ExpandToBf16(_, product) => product.context_size(rows, grid),
        };
        product.max(padding((self.n, self.k), self.padded(), rows))
    }

    fn enqueue_rows(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        choice: &BatchRoute<PackedRoute>,
    ) -> Result<(), DeviceError> {
        if (self.n, self.k) != self.padded() {
            return self.enqueue_padded(ctx, x, y, choice);
        }
        let (mut ctx, add) = (ctx.parts(), choice.epilogue == Epilogue::StoreAdd);
        let Some(launch) = self.prepare(&choice.kernel, &mut ctx, (x.desc(), y.desc()), add)? else {
            return Ok(());
        };
        // SAFETY: prepared for these parts of the context. Views were checked against their memory when they were
        // created, and dropping a buffer waits for the work.
        unsafe { self.launch(launch, &mut ctx) }
    }
}

/// Returns the context size for `m` rows of a layer `(n, k)` with weights of shape `padded`; empty without padding.
pub(super) fn padding(layer: (u32, u32), padded: (u32, u32), m: u32) -> ContextSize {
    if layer == padded {
        return ContextSize::default();
    }
    let (m, (n, k)) = (u64::from(m), padded);
    // No overflow: products of two 32-bit numbers.
    ContextSize { padded_x: m * u64::from(k), padded_y: m * u64::from(n), ..ContextSize::default() }
}

fn front(buffer: &mut DeviceBuffer<u16>, rows: u32, cols: u32, pitch: u32) -> Result<MatrixMut<'_>, LaunchError> {
    MatrixMut::new(buffer, rows, cols, pitch.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of the padded copies is checked against the context before anything is copied.
    #[test]
    fn padded_layers_have_whole_row_tiles() {
        assert_eq!(padding((192, 128), (192, 128), 300), ContextSize::default());
        let need = padding((100, 72), (128, 128), 300);
        assert_eq!(need, ContextSize { padded_x: 300 * 128, padded_y: 300 * 128, ..ContextSize::default() });
        // A context for another layer, with less memory.
        let have = ContextSize { workspace_bytes: 1 << 20, counters: 1 << 10, padded_x: 299 * 128, ..need };
        assert_eq!(have.check(need), Err(LaunchError::ContextTooSmall { need, have }));
        assert_eq!(padding((1, 1), (u32::MAX, u32::MAX), u32::MAX).padded_x, u64::from(u32::MAX).pow(2));
    }
}
