//! The register-sourced matmuls: `Y[m, n] = X[m, k] * W[n, k]^T` from packed weights (`docs/format.md` A.9, `docs/adr/0004`).
//!
//! A launch allocates nothing, on the device or the host, and may be captured into a graph. Under programmatic dependent launch
//! (variants with `_pdl`) a kernel asks for its weights while the kernel before it on the stream still runs, and touches `X`, `Y` and the
//! workspace after that one is done.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::GemmPackedArgs,
    plan::{GemmShape, Plan},
    spec::{Epilogue, Op},
};

use crate::{
    device::module::LoadedKernel,
    device::tma::TensorMapParams,
    device::{DeviceBuffer, DeviceError, Stream},
    weight::{DeviceMatrix, DevicePacked},
};

/// Memory for partial sums, shared by all kernels of one stream.
///
/// Kernels on different streams need workspaces of their own.
#[derive(Debug)]
pub struct Workspace {
    partials: DeviceBuffer<u8>,
    counters: DeviceBuffer<u32>,
}

impl Workspace {
    /// What the largest of these launches needs.
    ///
    /// # Errors
    /// A variant that cannot exist, or not enough memory.
    pub fn new(
        stream: &Stream,
        launches: impl IntoIterator<Item = (VariantSpec, GemmShape)>,
    ) -> Result<Self, DeviceError> {
        let sms = stream.device().info().sms;
        let (mut bytes, mut counters) = (0, 0);
        for (spec, problem) in launches {
            let plan = Plan::new(&spec).map_err(unweight_codegen::CodegenError::from)?;
            let needs = plan.workspace(problem, sms);
            bytes = bytes.max(needs.bytes);
            counters = counters.max(needs.counters);
        }
        let size = |value: u64| {
            usize::try_from(value).map_err(|_| DeviceError::Shape(format!("a workspace of {value} does not fit")))
        };
        Ok(Self {
            partials: DeviceBuffer::zeroed(stream, size(bytes)?)?,
            counters: DeviceBuffer::zeroed(stream, size(counters)?)?,
        })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.partials.bytes() + self.counters.bytes()
    }

    /// The partial sums; a `_dump` variant leaves its operands here.
    pub fn partials(&self) -> &DeviceBuffer<u8> {
        &self.partials
    }
}

/// A register-sourced matmul kernel.
#[derive(Clone, Debug)]
pub struct PackedGemm {
    kernel: Arc<LoadedKernel>,
    batch_tile: u32,
    exact_escapes: bool,
    silu_mul: bool,
}

impl PackedGemm {
    /// Wraps a kernel of `gemm_mma` or `gemm_wgmma`.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        let (batch_tile, exact_escapes, epilogue) = match kernel.spec().op {
            Op::GemmMma(spec) => (spec.batch_tile.get(), spec.escapes, spec.epilogue),
            Op::GemmWgmma(spec) => (spec.batch_tile.get(), spec.escapes, spec.epilogue),
            _ => return kernel.refuse("is not a register-sourced matmul".to_owned()),
        };
        Ok(Self { kernel, batch_tile, exact_escapes, silu_mul: epilogue == Epilogue::SiluMul })
    }

    /// The kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues the product. `y` is overwritten, or added to by a `store_add` variant; of a `silu_mul` variant it is `[m, n / 2]`.
    ///
    /// # Errors
    /// Shapes that do not go together, weights with escapes for a variant without, a workspace that is too small, or the driver's refusal.
    pub fn enqueue(
        &self,
        stream: &Stream,
        x: &DeviceMatrix,
        w: &DevicePacked,
        y: &mut DeviceMatrix,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let grid = w.grid();
        let columns = grid.rows() / if self.silu_mul { 2 } else { 1 };
        if (y.cols() as usize, x.cols() as usize) != (columns, grid.cols()) || y.rows() != x.rows() {
            return self.kernel.refuse(format!(
                "Y[{}, {}] from X[{}, {}] and W[{}, {}]: the shapes do not go together",
                y.rows(),
                y.cols(),
                x.rows(),
                x.cols(),
                grid.rows(),
                grid.cols()
            ));
        }
        self.enqueue_at(stream, (x.data().address(), x.rows()), w, y.data_mut().address(), workspace)
    }

    /// As [`PackedGemm::enqueue`], of rows and columns whose size the caller answers for.
    pub(crate) fn enqueue_at(
        &self,
        stream: &Stream,
        (x, m): (u64, u32),
        w: &DevicePacked,
        y: u64,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        // A grid's dimensions fit 32 bits.
        let (n, k) = (w.grid().rows() as u32, w.grid().cols() as u32);
        if m == 0 || n == 0 || k == 0 {
            return Ok(());
        }
        if !self.exact_escapes && w.has_escapes() {
            return self.kernel.refuse("has no escapes, the tensor has; take a variant with _esc".to_owned());
        }
        let problem = GemmShape { m, n, k };
        let needs = self.kernel.plan().workspace(problem, self.kernel.device().info().sms);
        if needs.bytes > workspace.partials.len() as u64 || needs.counters > workspace.counters.len() as u64 {
            return self.kernel.refuse(format!(
                "needs a workspace of {} B and {} counters for m = {m}, n = {n}, k = {k}; there are {} B and {}",
                needs.bytes,
                needs.counters,
                workspace.partials.len(),
                workspace.counters.len()
            ));
        }
        let device = self.kernel.device();
        let args = GemmPackedArgs {
            x: TensorMapParams::activations(x, m, k, self.batch_tile).encode(device)?,
            y_map: TensorMapParams::product(y, m, n).encode(device)?,
            packed: w.packed().address(),
            escape_heads: w.escape_heads().address(),
            escapes: w.escapes().address(),
            y,
            workspace: workspace.partials.address(),
            counters: workspace.counters.address(),
            scale: w.window().scale(),
            // Below 2^32: checked when the tensor was made.
            escape_words: w.escapes().len() as u32,
            m,
            n,
            k,
            tile_cols: k / 64,
            reserved: [0; 14],
        };
        // SAFETY: shapes and sizes are checked above; the kernel bounds what heads and lists lead to. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(stream, problem, &args) }
    }
}
