//! The report's reconstructive matmul on device tensors: `Y[m, n] = X[m, k] * W[n, k]^T` (report section 8).

use std::sync::Arc;

use unweight_codegen::{
    abi::GemmReconArgs,
    plan::GemmShape,
    spec::{GemmReconSpec, Op, WeightSource},
};
use unweight_format::TileGrid;

use crate::{
    device::module::LoadedKernel,
    device::tma::TensorMapParams,
    device::{DeviceBuffer, DeviceError, Stream},
    weight::{DeviceMatrix, ExponentView, PaletteView},
};

/// A matmul kernel.
#[derive(Clone, Debug)]
pub struct Matmul {
    kernel: Arc<LoadedKernel>,
    spec: GemmReconSpec,
}

impl Matmul {
    /// Wraps a kernel of the matmul family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::GemmRecon(spec) => Ok(Self { kernel, spec }),
            _ => kernel.refuse("is not a matmul".to_owned()),
        }
    }

    /// The kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues the product with weights of decoded exponents. `y` is overwritten, or added to by a `store_add` variant.
    pub fn exponent(
        &self,
        stream: &Stream,
        x: &DeviceMatrix,
        w: ExponentView<'_>,
        y: &mut DeviceMatrix,
    ) -> Result<(), DeviceError> {
        if self.spec.source != WeightSource::Exponent {
            return self.kernel.refuse("takes a palette source".to_owned());
        }
        self.size("exponents", w.exponents.len(), w.grid.tiles() * 4096)?;
        let mut args = self.args(x, w.grid, w.sign_mantissa, y)?;
        args.exponents = w.exponents.address();
        // SAFETY: `args` and the line above: shapes and sizes are checked.
        unsafe { self.enqueue(stream, args) }
    }

    /// Enqueues the product with weights of palette indices. `y` is overwritten, or added to by a `store_add` variant.
    pub fn palette(
        &self,
        stream: &Stream,
        x: &DeviceMatrix,
        w: PaletteView<'_>,
        y: &mut DeviceMatrix,
    ) -> Result<(), DeviceError> {
        let WeightSource::Palette { verbatim } = self.spec.source else {
            return self.kernel.refuse("takes an exponent source".to_owned());
        };
        if w.max_verbatim_rows > verbatim.get() {
            return self.kernel.refuse(format!(
                "has room for {} verbatim rows in a tile, the tensor has {}; take a larger budget",
                verbatim.get(),
                w.max_verbatim_rows
            ));
        }
        self.size("palette_index", w.palette_index.len(), w.grid.tiles() * 2048)?;
        let mut args = self.args(x, w.grid, w.sign_mantissa, y)?;
        args.exponents = w.palette_index.address();
        args.tile_metadata = w.tile_metadata.address();
        args.verbatim_exponents = w.verbatim_exponents.address();
        args.palette = w.palette.address();
        // Below 2^32: checked when the tensor was uploaded.
        args.verbatim_rows = (w.verbatim_exponents.len() / 64) as u32;
        // SAFETY: `args` and the lines above: shapes and sizes are checked; the kernel bounds verbatim rows by their count.
        unsafe { self.enqueue(stream, args) }
    }

    fn size(&self, name: &str, got: usize, expected: usize) -> Result<(), DeviceError> {
        if got == expected {
            Ok(())
        } else {
            self.kernel.refuse(format!("{name} has {got} B, the weights need {expected}"))
        }
    }

    fn args(
        &self,
        x: &DeviceMatrix,
        grid: TileGrid,
        sign_mantissa: &DeviceBuffer<u8>,
        y: &mut DeviceMatrix,
    ) -> Result<GemmReconArgs, DeviceError> {
        let (m, n, k) = (x.rows(), y.cols(), x.cols());
        if (n as usize, k as usize) != (grid.rows(), grid.cols()) || y.rows() != m {
            return self.kernel.refuse(format!(
                "Y[{}, {n}] = X[{m}, {k}] * W[{}, {}]^T: the shapes do not go together",
                y.rows(),
                grid.rows(),
                grid.cols()
            ));
        }
        let step = 64 * self.spec.n_tiles.get();
        if !n.is_multiple_of(step) || !k.is_multiple_of(64) {
            return self.kernel.refuse(format!("n = {n} must be a multiple of {step} and k = {k} of 64"));
        }
        let device = self.kernel.device();
        // A batch without rows has no tensor map and, below, no blocks.
        let map = |params: TensorMapParams| {
            if m == 0 { Ok(bytemuck::Zeroable::zeroed()) } else { params.encode(device) }
        };
        Ok(GemmReconArgs {
            x: map(TensorMapParams::activations(x.data().address(), m, k, 64))?,
            sign_mantissa: map(TensorMapParams::sign_mantissa(sign_mantissa.address(), n, k))?,
            exponents: 0,
            tile_metadata: 0,
            verbatim_exponents: 0,
            palette: 0,
            y: y.data_mut().address(),
            verbatim_rows: 0,
            m,
            n,
            k,
            tile_cols: k / 64,
            reserved: 0,
        })
    }

    /// # Safety
    /// The addresses name memory of the sizes that the shape asks for.
    unsafe fn enqueue(&self, stream: &Stream, args: GemmReconArgs) -> Result<(), DeviceError> {
        let problem = GemmShape { m: args.m, n: args.n, k: args.k };
        // SAFETY: the caller's promise. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(stream, problem, &args) }
    }
}
