//! The matmul that reads the compact encoding: `Y[m, n] = X[m, k] * W[n, k]^T` (`docs/format.md` A.11,
//! `docs/adr/0013`).
//!
//! A launch allocates nothing, on the device or the host, needs no memory of an execution context, and may be captured
//! into a graph. With programmatic dependent launch (variants with `_pdl`), a kernel prefetches its weights while the
//! previous kernel on the stream still runs, and accesses `X` and `Y` only when that kernel is done.

use std::sync::Arc;

use unweight_codegen::{
    abi::GemmCompactArgs,
    plan::GemmShape,
    spec::{Epilogue, Op},
};

use crate::{
    device::{
        DeviceError, LaunchError, MatrixMut, MatrixRef, Stream,
        module::LoadedKernel,
        tma::TensorMapParams,
        view::{MatrixDesc, check_device},
    },
    exec::operands::check_product,
    weight::{self, DeviceCompact},
};

/// A matmul kernel that reads the compact encoding.
#[derive(Clone, Debug)]
pub struct CompactGemm {
    kernel: Arc<LoadedKernel>,
    batch_tile: u32,
    epilogue: Epilogue,
}

impl CompactGemm {
    /// Wraps a kernel of family `gemm_compact`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::GemmCompact(op) => Ok(Self { batch_tile: op.batch_tile.get(), epilogue: op.epilogue, kernel }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a matmul from the compact encoding" }),
        }
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Returns the columns of `Y` for `n` rows of weights.
    fn columns(&self, n: u64) -> u64 {
        if self.epilogue == Epilogue::SiluMul { n / 2 } else { n }
    }

    /// Checks the operands without enqueuing anything.
    pub(crate) fn check(&self, x: &MatrixDesc, w: &DeviceCompact, y: &MatrixDesc) -> Result<(), DeviceError> {
        let check = || {
            let (ordinal, shape) = (self.kernel.device().ordinal(), weight::shape(w.grid()));
            check_product(ordinal, x, shape, self.columns(shape[0]), y, w.spans())?;
            x.check_rows_aligned("x")?;
            y.check_rows_aligned("y")?;
            y.check_dense("y")?;
            check_device("the weights", w.device().ordinal(), ordinal)?;
            self.kernel.check_grid(problem(x.rows, w))
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))
    }

    /// Enqueues the product. `y` is overwritten, or added to by a `store_add` variant; for a `silu_mul` variant it is
    /// `[m, n / 2]`. Rows of `x` may have a pitch that is a multiple of 8 elements; rows of `y` are contiguous.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; more blocks than a grid may have; or a driver error.
    pub fn enqueue(
        &self,
        stream: &Stream,
        x: MatrixRef<'_>,
        w: &DeviceCompact,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (x, y) = (x.desc(), y.desc());
        self.check(x, w, y)?;
        let problem = problem(x.rows, w);
        let GemmShape { m, n, k } = problem;
        if m == 0 || n == 0 || k == 0 {
            return Ok(());
        }
        let args = GemmCompactArgs {
            x: TensorMapParams::activations(x, self.batch_tile).encode(self.kernel.device())?,
            dense: w.dense().address(),
            tiles: w.tiles().address(),
            streams: w.streams().address(),
            records: w.escapes().address(),
            table: w.table().address(),
            y: y.address,
            scale: w.window().scale(),
            // Below 2^32: checked when the tensor was uploaded.
            stream_words: w.streams().len() as u32,
            record_words: w.escapes().len() as u32,
            m,
            n,
            k,
            tile_cols: k / 64,
            reserved: [0; 13],
        };
        // SAFETY: shapes, pitches and places were checked against this problem above, views against their memory when
        // they were created; the kernel bounds-checks streams, heads and lists. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(stream, problem, &args) }
    }
}

fn problem(m: u32, w: &DeviceCompact) -> GemmShape {
    // A grid's dimensions fit 32 bits.
    GemmShape { m, n: w.grid().rows() as u32, k: w.grid().cols() as u32 }
}
