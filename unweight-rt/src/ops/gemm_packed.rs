//! The packed matmuls: `Y[m, n] = X[m, k] * W[n, k]^T` from packed weights, which the kernels decode in registers
//! (`docs/format.md` A.9, `docs/records/2026-11-21/matmul-packed-log.md`).
//!
//! A launch allocates nothing, on the device or the host, and may be captured into a graph. With programmatic dependent
//! launch (variants with `_pdl`), a kernel prefetches its weights while the previous kernel on the stream still runs,
//! and accesses `X`, `Y` and the workspace only when that kernel is done.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::{GemmPackedArgs, TensorMap},
    family::Instruction,
    plan::{GemmShape, Plan},
    spec::{Epilogue, GemmWgmmaSpec, Op},
};
use unweight_format::TileGrid;

use crate::{
    device::{
        ContextSize, DeviceError, LaunchError, MatrixMut, MatrixRef, Stream,
        module::LoadedKernel,
        tma::TensorMapParams,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{ExecContext, context::ContextParts, operands::check_product, workspace::Workspace},
    weight::{self, DevicePacked},
};

/// Returns the context size for a launch of this variant.
///
/// # Errors
/// The variant cannot exist.
pub fn context_size(spec: &VariantSpec, problem: GemmShape, sms: u32) -> Result<ContextSize, DeviceError> {
    let plan = Plan::new(spec).map_err(unweight_codegen::CodegenError::from)?;
    Ok(plan.workspace(problem, sms).into())
}

/// What the kernel of a variant supports, apart from shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KernelSupport {
    /// Batch rows of an X box.
    x_box_rows: u32,
    escapes: bool,
    epilogue: Epilogue,
    /// Whether the copy engine reads X and writes Y. It needs tensor maps, which devices without a copy engine do not
    /// create.
    maps: bool,
}

impl KernelSupport {
    fn of(spec: &VariantSpec) -> Result<Self, LaunchError> {
        let (x_box_rows, escapes, epilogue) = match spec.op {
            Op::GemmMma(op) => (op.batch_tile.get(), op.escapes, op.epilogue),
            Op::GemmWgmma(op) => (GemmWgmmaSpec::X_BOX_ROWS, op.escapes, op.epilogue),
            _ => return Err(LaunchError::Family { wanted: "a matmul of packed weights" }),
        };
        Ok(Self { x_box_rows, escapes, epilogue, maps: spec.op.instructions().has(Instruction::TensorCopy) })
    }

    /// Returns the columns of `Y` for `n` rows of weights.
    fn columns(self, n: u64) -> u64 {
        if self.epilogue == Epilogue::SiluMul { n / 2 } else { n }
    }

    /// Checks the operands, but not the context's memory.
    fn check(self, ordinal: usize, x: &MatrixDesc, w: &Weights, y: &MatrixDesc) -> Result<(), LaunchError> {
        check_product(ordinal, x, w.shape, self.columns(w.shape[0]), y, w.spans.iter().cloned())?;
        // The copy engine reads X, and writes Y in some variants; other variants write contiguous rows of n.
        x.check_rows_aligned("x")?;
        y.check_rows_aligned("y")?;
        y.check_dense("y")?;
        if w.has_escapes && !self.escapes { Err(LaunchError::Escapes) } else { Ok(()) }
    }

    /// Checks a row that is added to each row of `y`, whose shape was checked.
    fn check_bias(self, ordinal: usize, bias: &MatrixDesc, y: &MatrixDesc) -> Result<(), LaunchError> {
        if self.epilogue != Epilogue::StoreAdd {
            return Err(LaunchError::Epilogue { asked: Epilogue::StoreAdd, loaded: self.epilogue });
        }
        let (got, expected) = (u64::from(bias.rows) * u64::from(bias.cols), y.cols);
        if bias.rows != 1 || bias.cols != expected {
            return Err(LaunchError::Elements { buffer: "bias", got, expected: expected.into() });
        }
        bias.check_device("bias", ordinal)?;
        bias.check_aligned("bias")?;
        check_apart(("y", y.span()), [("bias", bias.span())])
    }
}

/// The properties of packed weights that are checked.
struct Weights {
    shape: [u64; 2],
    spans: [(&'static str, std::ops::Range<u64>); 3],
    has_escapes: bool,
}

/// A matmul kernel that reads packed weights.
#[derive(Clone, Debug)]
pub struct PackedGemm {
    kernel: Arc<LoadedKernel>,
    support: KernelSupport,
}

impl PackedGemm {
    /// Wraps a kernel of `gemm_mma` or `gemm_wgmma`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        let support = KernelSupport::of(kernel.spec()).or_else(|refusal| kernel.refuse(refusal))?;
        Ok(Self { kernel, support })
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Returns the context size for a launch at batch `m`.
    pub fn context_size(&self, m: u32, w: &DevicePacked) -> ContextSize {
        self.context_size_of(m, w.grid())
    }

    /// Returns the context size for weights of this shape.
    pub(crate) fn context_size_of(&self, m: u32, w: TileGrid) -> ContextSize {
        self.kernel.plan().workspace(problem(m, w), self.kernel.device().info().sms).into()
    }

    /// Enqueues the product on the context's stream. `y` is overwritten, or added to by a `store_add` variant; for a
    /// `silu_mul` variant it is `[m, n / 2]`. Rows of `x` may have a pitch that is a multiple of 8 elements; rows of
    /// `y` are contiguous.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; weights with escapes for a variant without; an execution context that is too small; blocks
    /// that wait for each other and do not fit the device; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        w: &DevicePacked,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        self.enqueue_any(ctx, (x, None), w, y)
    }

    /// Enqueues `y = x * w^T + bias`, added in fp32 and rounded once, with a `store_add` variant. `bias` is `[1, n]`;
    /// the other operands are as for [`PackedGemm::enqueue`].
    ///
    /// # Errors
    /// As for [`PackedGemm::enqueue`]; [`LaunchError::Epilogue`] for a variant that adds nothing.
    pub fn enqueue_with_bias(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        w: &DevicePacked,
        bias: MatrixRef<'_>,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        self.enqueue_any(ctx, (x, Some(bias)), w, y)
    }

    fn enqueue_any(
        &self,
        ctx: &mut ExecContext,
        (x, bias): (MatrixRef<'_>, Option<MatrixRef<'_>>),
        w: &DevicePacked,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let ContextParts { stream, workspace, .. } = ctx.parts();
        let bias = bias.as_ref().map(MatrixRef::desc);
        match self.prepare(workspace, (x.desc(), bias), w, y.desc())? {
            // SAFETY: prepared with this workspace; views were checked against their memory when they were created.
            // Dropping a buffer waits for the kernel.
            Some(launch) => unsafe { launch.enqueue(stream) },
            None => Ok(()),
        }
    }

    /// Checks the operands, x and perhaps a bias, without enqueuing anything. Returns `None` if there is nothing to
    /// compute.
    pub(crate) fn prepare(
        &self,
        workspace: &Workspace,
        (x, bias): (&MatrixDesc, Option<&MatrixDesc>),
        w: &DevicePacked,
        y: &MatrixDesc,
    ) -> Result<Option<PackedLaunch<'_>>, DeviceError> {
        let check = || {
            let ordinal = self.kernel.device().ordinal();
            let weights = Weights { shape: weight::shape(w.grid()), spans: w.spans(), has_escapes: w.has_escapes() };
            self.support.check(ordinal, x, &weights, y)?;
            if let Some(bias) = bias {
                self.support.check_bias(ordinal, bias, y)?;
            }
            check_device("the weights", w.device().ordinal(), ordinal)?;
            workspace.size().check(self.context_size(x.rows, w))?;
            self.kernel.check_grid(problem(x.rows, w.grid()))
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let problem = problem(x.rows, w.grid());
        let GemmShape { m, n, k } = problem;
        if m == 0 || n == 0 || k == 0 {
            return Ok(None);
        }
        let y_map = match self.support.epilogue {
            Epilogue::Store | Epilogue::StoreAdd => TensorMapParams::product(y),
            Epilogue::SiluMul => TensorMapParams::gated_product(y),
        };
        let map = |params: TensorMapParams| match self.support.maps {
            true => params.encode(self.kernel.device()),
            false => Ok(TensorMap::default()),
        };
        let args = GemmPackedArgs {
            x: map(TensorMapParams::activations(x, self.support.x_box_rows))?,
            y_map: map(y_map)?,
            packed: w.packed().address(),
            escape_heads: w.escape_heads().address(),
            escapes: w.escapes().address(),
            y: y.address,
            workspace: workspace.partials.address(),
            counters: workspace.counters.address(),
            scale: w.window().scale(),
            // Below 2^32: checked when the tensor was created.
            escape_words: w.escapes().len() as u32,
            m,
            n,
            k,
            tile_cols: k / 64,
            x_data: x.address,
            x_row_bytes: 2 * x.pitch,
            bias: bias.map_or(0, |bias| bias.address),
            reserved: [0; 8],
        };
        Ok(Some(PackedLaunch { kernel: &self.kernel, problem, args }))
    }
}

/// A product with checked operands and the arguments of its kernel.
pub(crate) struct PackedLaunch<'k> {
    kernel: &'k LoadedKernel,
    problem: GemmShape,
    args: GemmPackedArgs,
}

impl PackedLaunch<'_> {
    /// Enqueues the product.
    ///
    /// # Safety
    /// The memory of the operands and of the workspace stays allocated until the work is done, and `stream` is the
    /// stream to which the workspace belongs.
    pub(crate) unsafe fn enqueue(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: `prepare` has checked shapes, pitches, places and the workspace's size against this problem; the
        // kernel bounds-checks heads and lists. The rest is the caller's promise.
        unsafe { self.kernel.launch(stream, self.problem, &self.args) }
    }
}

fn problem(m: u32, w: TileGrid) -> GemmShape {
    // A grid's dimensions fit 32 bits.
    GemmShape { m, n: w.rows() as u32, k: w.cols() as u32 }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::spec::{Arch, EncodeHuffmanStage};

    use super::*;
    use crate::device::error::PitchRule;

    fn support(name: &str) -> KernelSupport {
        KernelSupport::of(&name.parse().unwrap()).unwrap()
    }

    fn weights(n: u64, k: u64, has_escapes: bool) -> Weights {
        let spans = [("packed", 0x10_0000..0x20_0000), ("escape_heads", 0..0), ("escapes", 0x30_0000..0x30_0100)];
        Weights { shape: [n, k], spans, has_escapes }
    }

    fn desc(address: u64, rows: u32, cols: u32, pitch: u64) -> MatrixDesc {
        MatrixDesc::new(0, address, rows, cols, pitch, u64::MAX).unwrap()
    }

    /// The driver of a device without a copy engine may refuse to create tensor maps.
    #[test]
    fn only_tma_variants_need_maps() {
        for (name, maps) in [
            ("uw_sm90a_gemm_mma_b8_r2w16p2c1_esc_store", true),
            ("uw_sm90a_gemm_mma_b8_r2w16p2c1_async_esc_store", false),
            ("uw_sm89_gemm_mma_b8_r2w8p3c1_async_esc_store", false),
            ("uw_sm90a_gemm_wgmma_b64_g2p10_esc_store", true),
        ] {
            assert_eq!(support(name).maps, maps, "{name}");
        }
    }

    #[test]
    fn unsupported_operands_are_rejected() {
        let plain = support("uw_sm90a_gemm_mma_b8_r2w8p3c1_esc_store");
        let (x, y) = (desc(0x1000, 5, 128, 128), desc(0x8000, 5, 192, 192));
        let w = weights(192, 128, true);
        assert_eq!(plain.check(0, &x, &w, &y), Ok(()));
        assert_eq!(plain.check(0, &desc(0x1000, 5, 128, 136), &w, &y), Ok(()), "rows of X may be apart");
        assert_eq!(
            plain.check(0, &desc(0x1000, 5, 128, 132), &w, &y),
            Err(LaunchError::Pitch { operand: "x", pitch: 132, wanted: PitchRule::MultipleOf(8) })
        );
        assert_eq!(
            plain.check(0, &x, &w, &desc(0x8000, 5, 192, 200)),
            Err(LaunchError::Pitch { operand: "y", pitch: 200, wanted: PitchRule::Columns(192) })
        );
        for (operand, x, y) in [("x", desc(0x1002, 5, 128, 128), y), ("y", x, desc(0x8008, 5, 192, 192))] {
            assert!(matches!(
                plain.check(0, &x, &w, &y),
                Err(LaunchError::Alignment { operand: named, bytes: 16, .. }) if named == operand
            ));
        }
        let inside = desc(0x10_8000, 5, 192, 192);
        let overlap = LaunchError::Overlap { written: "y", other: "packed" };
        assert_eq!(plain.check(0, &x, &w, &inside), Err(overlap));
        assert_eq!(support("uw_sm90a_gemm_mma_b8_r2w8p3c1_store").check(0, &x, &w, &y), Err(LaunchError::Escapes));
        assert!(matches!(plain.check(0, &x, &weights(192, 64, true), &y), Err(LaunchError::Shape { .. })));
    }

    #[test]
    fn a_bias_is_one_aligned_row_apart_from_y_and_needs_a_variant_that_adds() {
        let adding = support("uw_sm90a_gemm_wgmma_b64_g2p10_esc_store_add");
        let (y, bias) = (desc(0x8000, 5, 192, 192), desc(0x4000, 1, 192, 192));
        assert_eq!(adding.check_bias(0, &bias, &y), Ok(()));
        let plain = support("uw_sm90a_gemm_wgmma_b64_g2p10_esc_store");
        let epilogue = LaunchError::Epilogue { asked: Epilogue::StoreAdd, loaded: Epilogue::Store };
        assert_eq!(plain.check_bias(0, &bias, &y), Err(epilogue));
        for (rows, cols, got) in [(1, 128, 128), (2, 96, 192), (2, 192, 384)] {
            let wrong = LaunchError::Elements { buffer: "bias", got, expected: 192 };
            assert_eq!(adding.check_bias(0, &desc(0x4000, rows, cols, cols.into()), &y), Err(wrong));
        }
        let odd = adding.check_bias(0, &desc(0x4002, 1, 192, 192), &y);
        assert!(matches!(odd, Err(LaunchError::Alignment { operand: "bias", bytes: 16, .. })), "{odd:?}");
        let inside = adding.check_bias(0, &desc(0x8180, 1, 192, 192), &y);
        assert_eq!(inside, Err(LaunchError::Overlap { written: "y", other: "bias" }));
        let other = adding.check_bias(1, &bias, &y);
        assert!(matches!(other, Err(LaunchError::OtherDevice { operand: "bias", .. })), "{other:?}");
    }

    #[test]
    fn a_gate_and_an_up_make_half_the_columns() {
        let gated = support("uw_sm90a_gemm_mma_b8_r2w8p3c1_esc_silu_mul");
        let x = desc(0x1000, 5, 128, 128);
        assert_eq!(gated.check(0, &x, &weights(192, 128, true), &desc(0x8000, 5, 96, 96)), Ok(()));
        let whole = gated.check(0, &x, &weights(192, 128, true), &desc(0x8000, 5, 192, 192));
        assert_eq!(whole, Err(LaunchError::Shape { y: [5, 192], x: [5, 128], w: [192, 128] }));
    }

    #[test]
    fn a_kernel_of_another_family_is_refused() {
        let other = KernelSupport::of(&VariantSpec::encode_huffman(Arch::Sm90a, EncodeHuffmanStage::Stats));
        assert_eq!(other, Err(LaunchError::Family { wanted: "a matmul of packed weights" }));
    }
}
