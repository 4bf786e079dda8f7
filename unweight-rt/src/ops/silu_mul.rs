//! The activation of a gated MLP after a stored product of gate and up: `y = silu(gate) * up`, or another function of
//! the gate.

use std::sync::Arc;

use unweight_codegen::{
    abi::SiluMulArgs,
    plan::GemmShape,
    spec::{Epilogue, Op, SiluMulSpec},
};

use crate::{
    device::{
        DeviceError, LaunchError, MatrixMut, MatrixRef, Stream,
        error::PitchRule,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart},
    },
    exec::{ExecContext, operands::check_activations},
};

/// A kernel of `silu(gate) * up`, or of another function of the gate.
#[derive(Clone, Debug)]
pub struct SiluMul {
    kernel: Arc<LoadedKernel>,
    spec: SiluMulSpec,
}

impl SiluMul {
    /// Wraps a kernel of family `silu_mul`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        let Op::SiluMul(spec) = kernel.spec().op else {
            return kernel.refuse(LaunchError::Family { wanted: "a silu_mul kernel" });
        };
        Ok(Self { kernel, spec })
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues `y[m, n] = silu(x[m, 0..n]) * x[m, n..2n]`, computed in fp32 and rounded once. `n` is a multiple of 8.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; or a driver error.
    pub fn enqueue(&self, ctx: &mut ExecContext, x: MatrixRef<'_>, y: MatrixMut<'_>) -> Result<(), DeviceError> {
        check_shapes(x.desc(), y.desc()).or_else(|refusal| self.kernel.refuse(refusal))?;
        let half = |cols| x.part(0..x.rows(), cols);
        self.enqueue_pair(ctx, half(0..y.cols())?, half(y.cols()..2 * y.cols())?, y)
    }

    /// Enqueues `y[m, n] = silu(gate[m, n]) * up[m, n]` for two products in any memory; both have the same pitch.
    ///
    /// # Errors
    /// As for [`SiluMul::enqueue`].
    pub fn enqueue_pair(
        &self,
        ctx: &mut ExecContext,
        gate: MatrixRef<'_>,
        up: MatrixRef<'_>,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (gate, up, y, ordinal) = (gate.desc(), up.desc(), y.desc(), self.kernel.device().ordinal());
        let check = || {
            check_pair(gate, up, y)?;
            gate.check_device("the gate", ordinal)?;
            up.check_device("the up", ordinal)?;
            y.check_device("y", ordinal)?;
            check_apart(("y", y.span()), [("the gate", gate.span()), ("the up", up.span())])
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = SiluMulArgs {
            gate: gate.address,
            up: up.address,
            y: y.address,
            x_pitch: gate.pitch,
            y_pitch: y.pitch,
            columns: y.cols,
            row_blocks: y.cols.div_ceil(self.spec.block_columns()),
            spread: 1,
            reserved: 0,
        };
        let problem = GemmShape { m: y.rows, n: y.cols, k: 0 };
        // SAFETY: shapes, pitches and places were checked above, views against their memory when they were created.
        // Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), problem, &args) }
    }

    /// Checks the operands of [`SiluMul::launch_interleaved`] without enqueuing anything.
    ///
    /// # Errors
    /// As for [`SiluMul::enqueue`].
    pub(crate) fn check_interleaved(&self, x: &MatrixDesc, y: &MatrixDesc) -> Result<(), DeviceError> {
        let ordinal = self.kernel.device().ordinal();
        let check = || {
            check_shapes(x, y)?;
            x.check_device("x", ordinal)?;
            y.check_device("y", ordinal)?;
            check_apart(("y", y.span()), [("x", x.span())])
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))
    }

    /// Enqueues `y[m, n] = silu(gate[m, n]) * up[m, n]` for `x[m, 2n]`, in which [`Epilogue::GATE_ROWS`] columns of the
    /// gate alternate with as many columns of the up.
    ///
    /// # Safety
    /// [`SiluMul::check_interleaved`] accepts these operands, or more rows of them; their memory stays allocated until
    /// the work is done.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) unsafe fn launch_interleaved(
        &self,
        stream: &Stream,
        x: &MatrixDesc,
        y: &MatrixDesc,
    ) -> Result<(), DeviceError> {
        const { assert!(Epilogue::GATE_ROWS == 8, "a thread takes as many columns") };
        let args = SiluMulArgs {
            gate: x.address,
            up: x.address + u64::from(Epilogue::GATE_ROWS) * 2,
            y: y.address,
            x_pitch: x.pitch,
            y_pitch: y.pitch,
            columns: y.cols,
            row_blocks: y.cols.div_ceil(self.spec.block_columns()),
            spread: 2,
            reserved: 0,
        };
        let problem = GemmShape { m: y.rows, n: y.cols, k: 0 };
        // SAFETY: the caller's promise; gate and up fill the columns of `x`.
        unsafe { self.kernel.launch(stream, problem, &args) }
    }
}

/// Checks the shapes of input and output.
fn check_shapes(x: &MatrixDesc, y: &MatrixDesc) -> Result<(), LaunchError> {
    check_activations("y", y, u32::MAX / 2)?;
    x.check_rows_aligned("x")?;
    if (x.rows, u64::from(x.cols)) == (y.rows, 2 * u64::from(y.cols)) {
        Ok(())
    } else {
        Err(LaunchError::Gated { x: x.shape(), y: y.shape() })
    }
}

/// Checks the shapes of two products and of their output.
fn check_pair(gate: &MatrixDesc, up: &MatrixDesc, y: &MatrixDesc) -> Result<(), LaunchError> {
    check_activations("y", y, u32::MAX / 2)?;
    gate.check_rows_aligned("the gate")?;
    up.check_rows_aligned("the up")?;
    if [gate.shape(), up.shape()] != [y.shape(); 2] {
        return Err(LaunchError::Gated { x: [gate.shape()[0], gate.shape()[1] + up.shape()[1]], y: y.shape() });
    }
    if gate.pitch != up.pitch {
        let wanted = PitchRule::MultipleOf(gate.pitch);
        return Err(LaunchError::Pitch { operand: "the up", pitch: up.pitch, wanted });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desc(rows: u32, cols: u32) -> MatrixDesc {
        MatrixDesc::new(0, 0x1000, rows, cols, cols.into(), u64::MAX).unwrap()
    }

    #[test]
    fn a_gate_and_an_up_make_half_the_columns() {
        assert_eq!(check_shapes(&desc(3, 144), &desc(3, 72)), Ok(()));
        for (x, y) in [(desc(3, 72), desc(3, 72)), (desc(4, 144), desc(3, 72)), (desc(3, 144), desc(3, 144))] {
            assert_eq!(check_shapes(&x, &y), Err(LaunchError::Gated { x: x.shape(), y: y.shape() }));
        }
        assert_eq!(check_pair(&desc(3, 72), &desc(3, 72), &desc(3, 72)), Ok(()));
        for (gate, up) in [((3, 72), (3, 80)), ((2, 72), (3, 72)), ((3, 80), (3, 80))] {
            let pair = check_pair(&desc(gate.0, gate.1), &desc(up.0, up.1), &desc(3, 72));
            assert!(matches!(pair, Err(LaunchError::Gated { .. })), "{pair:?}");
        }
        let wide = MatrixDesc::new(0, 0x1000, 3, 72, 80, u64::MAX).unwrap();
        assert!(matches!(check_pair(&desc(3, 72), &wide, &desc(3, 72)), Err(LaunchError::Pitch { .. })));
        assert!(matches!(check_shapes(&desc(3, 24), &desc(3, 12)), Err(LaunchError::Columns { operand: "y", .. })));
    }
}
