//! The report's reconstructive matmul on device tensors: `Y[m, n] = X[m, k] * W[n, k]^T` (report section 8), by a
//! kernel of family `gemm_recon`, or of `gemm_join`, which is for small batches and reads the same operands.

use std::{ops::Range, sync::Arc};

use unweight_codegen::{
    abi::GemmReconArgs,
    plan::GemmShape,
    spec::{JoinSource, Op, WeightSource},
};
use unweight_format::TileGrid;

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixMut, MatrixRef,
        module::LoadedKernel,
        tma::TensorMapParams,
        view::{MatrixDesc, check_device},
    },
    exec::{ExecContext, operands::check_product},
    weight::{self, ExponentView, PaletteView},
};

/// A reconstructive matmul kernel.
#[derive(Clone, Debug)]
pub struct Matmul {
    kernel: Arc<LoadedKernel>,
    reads: Reads,
}

/// The operands that a kernel reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reads {
    /// The maximum number of verbatim rows per tile of palette indices; `None`: exponents.
    palette: Option<u32>,
    /// A divisor of the output features.
    columns: u32,
    /// Rows of a box of X.
    x_rows: u32,
    /// Rows of a box of sign-mantissa.
    sign_rows: u32,
}

impl Reads {
    /// Returns the operands of a reconstructive matmul; `None` for other families.
    fn of(op: &Op) -> Option<Self> {
        match op {
            Op::GemmRecon(spec) => Some(Self {
                palette: match spec.source {
                    WeightSource::Exponent => None,
                    WeightSource::Palette { verbatim } => Some(verbatim.get()),
                },
                columns: 64 * spec.n_tiles.get(),
                x_rows: 64,
                sign_rows: 64,
            }),
            // Every row of a tile may be verbatim.
            Op::GemmJoin(spec) => Some(Self {
                palette: (spec.source == JoinSource::Palette).then_some(64),
                columns: 64,
                x_rows: spec.batch_tile.get(),
                sign_rows: 16 * spec.row_blocks.get(),
            }),
            _ => None,
        }
    }
}

/// Checks the operands against the kernel of a variant.
fn check(
    reads: &Reads,
    ordinal: usize,
    x: &MatrixDesc,
    w: [u64; 2],
    y: &MatrixDesc,
    read: impl IntoIterator<Item = (&'static str, Range<u64>)>,
) -> Result<(), LaunchError> {
    check_product(ordinal, x, w, w[0], y, read)?;
    for (extent, value, of) in [("n", y.cols, reads.columns), ("k", x.cols, 64)] {
        if !value.is_multiple_of(of) {
            return Err(LaunchError::Multiple { extent, value, of });
        }
    }
    x.check_rows_aligned("x")?;
    y.check_aligned("y")?;
    y.check_dense("y")
}

impl Matmul {
    /// Wraps a kernel of family `gemm_recon` or `gemm_join`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match Reads::of(&kernel.spec().op) {
            Some(reads) => Ok(Self { kernel, reads }),
            None => kernel.refuse(LaunchError::Family { wanted: "a reconstructive matmul" }),
        }
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues the product with weights as decoded exponents on the context's stream. `y` is overwritten, or added to
    /// by a `store_add` variant.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; or a driver error.
    pub fn exponent(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        w: ExponentView<'_>,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        if self.reads.palette.is_some() {
            return self.kernel.refuse(LaunchError::Source { takes: "palette", got: "exponent" });
        }
        let exponents = Expected { name: "exponents", buffer: w.exponents, bytes: w.grid.tiles() * 4096 };
        let args = self.args(x, w.grid, w.sign_mantissa, exponents, &[], y)?;
        // SAFETY: `args` has checked shapes, sizes and places against this problem.
        unsafe { self.enqueue(ctx, args) }
    }

    /// Enqueues the product with weights as palette indices on the context's stream. `y` is overwritten, or added to by
    /// a `store_add` variant.
    ///
    /// # Errors
    /// As for [`Matmul::exponent`]; or weights with more verbatim rows in a tile than the variant supports.
    pub fn palette(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        w: PaletteView<'_>,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let Some(supported) = self.reads.palette else {
            return self.kernel.refuse(LaunchError::Source { takes: "exponent", got: "palette" });
        };
        let rows = w.max_verbatim_rows;
        if rows > supported {
            return self.kernel.refuse(LaunchError::VerbatimRows { room: supported, rows });
        }
        let indices = Expected { name: "palette_index", buffer: w.palette_index, bytes: w.grid.tiles() * 2048 };
        let read = [
            ("tile_metadata", w.tile_metadata.span()),
            ("verbatim_exponents", w.verbatim_exponents.span()),
            ("palette", w.palette.span()),
        ];
        let mut args = self.args(x, w.grid, w.sign_mantissa, indices, &read, y)?;
        args.tile_metadata = w.tile_metadata.address();
        args.verbatim_exponents = w.verbatim_exponents.address();
        args.palette = w.palette.address();
        // Below 2^32: checked when the tensor was uploaded.
        args.verbatim_rows = (w.verbatim_exponents.len() / 64) as u32;
        // SAFETY: `args` and the lines above have checked shapes and sizes; the kernel bounds verbatim rows by their
        // count.
        unsafe { self.enqueue(ctx, args) }
    }

    fn args(
        &self,
        x: MatrixRef<'_>,
        grid: TileGrid,
        sign_mantissa: &DeviceBuffer<u8>,
        exponents: Expected<'_>,
        read: &[(&'static str, Range<u64>)],
        y: MatrixMut<'_>,
    ) -> Result<GemmReconArgs, DeviceError> {
        let (x, y) = (x.desc(), y.desc());
        let ordinal = self.kernel.device().ordinal();
        let check_all = || {
            let Expected { name, buffer, bytes } = exponents;
            weight::elements(name, buffer.len(), bytes)?;
            check_device(name, buffer.device().ordinal(), ordinal)?;
            check_device("sign_mantissa", sign_mantissa.device().ordinal(), ordinal)?;
            let spans = [("sign_mantissa", sign_mantissa.span()), (name, buffer.span())];
            check(&self.reads, ordinal, x, weight::shape(grid), y, spans.into_iter().chain(read.iter().cloned()))
        };
        check_all().or_else(|refusal| self.kernel.refuse(refusal))?;
        let (m, n, k) = (x.rows, y.cols, x.cols);
        let device = self.kernel.device();
        // A batch without rows has no tensor map, and results in no blocks.
        let map = |params: TensorMapParams| {
            if m == 0 { Ok(bytemuck::Zeroable::zeroed()) } else { params.encode(device) }
        };
        Ok(GemmReconArgs {
            x: map(TensorMapParams::activations(x, self.reads.x_rows))?,
            sign_mantissa: map(TensorMapParams::sign_mantissa(sign_mantissa.address(), [n, k], self.reads.sign_rows))?,
            exponents: exponents.buffer.address(),
            tile_metadata: 0,
            verbatim_exponents: 0,
            palette: 0,
            y: y.address,
            verbatim_rows: 0,
            m,
            n,
            k,
            tile_cols: k / 64,
            reserved: 0,
        })
    }

    /// # Safety
    /// The addresses point to memory of the sizes that the shape requires.
    unsafe fn enqueue(&self, ctx: &ExecContext, args: GemmReconArgs) -> Result<(), DeviceError> {
        let problem = GemmShape { m: args.m, n: args.n, k: args.k };
        // SAFETY: the caller's promise. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), problem, &args) }
    }
}

/// A buffer of a weight and the size that its grid requires.
#[derive(Clone, Copy)]
struct Expected<'a> {
    name: &'static str,
    buffer: &'a DeviceBuffer<u8>,
    bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_operands_are_rejected() {
        let spec: unweight_codegen::VariantSpec = "uw_sm90a_gemm_recon_exponent_n2p4_store".parse().unwrap();
        let reads = Reads::of(&spec.op).unwrap();
        let desc = |address, rows, cols, pitch| MatrixDesc::new(0, address, rows, cols, pitch, u64::MAX).unwrap();
        let (x, y) = (desc(0x1000, 5, 192, 192), desc(0x8000, 5, 128, 128));
        let check =
            |x: &MatrixDesc, w, y: &MatrixDesc| check(&reads, 0, x, w, y, [("exponents", 0x10_0000..0x20_0000)]);
        assert_eq!(check(&x, [128, 192], &y), Ok(()));
        assert_eq!(check(&desc(0x1000, 5, 192, 256), [128, 192], &y), Ok(()), "rows of X may be apart");
        let narrow = desc(0x8000, 5, 64, 64);
        let multiple = LaunchError::Multiple { extent: "n", value: 64, of: 128 };
        assert_eq!(check(&x, [64, 192], &narrow), Err(multiple));
        let odd = desc(0x1000, 5, 200, 200);
        let multiple = LaunchError::Multiple { extent: "k", value: 200, of: 64 };
        assert_eq!(check(&odd, [128, 200], &y), Err(multiple));
        let apart = desc(0x8000, 5, 128, 192);
        assert!(matches!(check(&x, [128, 192], &apart), Err(LaunchError::Pitch { operand: "y", .. })));
        let inside = desc(0x10_8000, 5, 128, 128);
        let overlap = LaunchError::Overlap { written: "y", other: "exponents" };
        assert_eq!(check(&x, [128, 192], &inside), Err(overlap));
    }
}
