//! Scales activations: `y = factor * x`, `y += factor * x`, or a soft cap `y = factor * tanh(x / factor)`.

use std::sync::Arc;

use unweight_codegen::{
    abi::ScaleArgs,
    plan::GemmShape,
    spec::{Op, ScaleForm, ScaleSpec},
};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixMut, MatrixRef,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{
        ExecContext,
        operands::{check_activations, check_len},
    },
};

/// A kernel of family `scale`.
#[derive(Clone, Debug)]
pub struct Scale {
    kernel: Arc<LoadedKernel>,
    spec: ScaleSpec,
}

impl Scale {
    /// Wraps a kernel of family `scale`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        let Op::Scale(spec) = kernel.spec().op else {
            return kernel.refuse(LaunchError::Family { wanted: "a scale kernel" });
        };
        Ok(Self { kernel, spec })
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues `y[m, n] = factor * x[m, n]`, or the kernel's other form (add or soft cap). `n` is a multiple of 8.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        factor: f32,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (x, y) = (x.desc(), y.desc());
        let apart = check_apart(("y", y.span()), [("x", x.span())]);
        apart.or_else(|refusal| self.kernel.refuse(refusal))?;
        self.launch(ctx, x, factor, y)
    }

    /// Enqueues `y[m, n] *= factor`, or caps `y`.
    ///
    /// # Errors
    /// As for [`Scale::enqueue`]; or the kernel adds.
    pub fn enqueue_in_place(&self, ctx: &mut ExecContext, y: MatrixMut<'_>, factor: f32) -> Result<(), DeviceError> {
        if self.spec.form == ScaleForm::Add {
            return self.kernel.refuse(LaunchError::Family { wanted: "a scale kernel that works in place" });
        }
        self.launch(ctx, y.desc(), factor, y.desc())
    }

    /// Enqueues `y[m, n] += factor * row[n]`, such as a bias of every row, with a kernel that adds. `n` is a multiple
    /// of 8.
    ///
    /// # Errors
    /// As for [`Scale::enqueue`]; or the kernel does not add.
    pub fn enqueue_row(
        &self,
        ctx: &mut ExecContext,
        row: &DeviceBuffer<u16>,
        factor: f32,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        if self.spec.form != ScaleForm::Add {
            return self.kernel.refuse(LaunchError::Family { wanted: "a scale kernel that adds" });
        }
        let (y, ordinal) = (y.desc(), self.kernel.device().ordinal());
        let check = || {
            check_len("the row", row.len(), y.cols)?;
            check_activations("y", y, u32::MAX)?;
            check_device("the row", row.device().ordinal(), ordinal)?;
            y.check_device("y", ordinal)?;
            check_apart(("y", y.span()), [("the row", row.span())])
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        // SAFETY: checked above; with a pitch of 0, every row of x is the row.
        unsafe { self.run(ctx, (row.address(), 0), factor, y) }
    }

    fn launch(&self, ctx: &mut ExecContext, x: &MatrixDesc, factor: f32, y: &MatrixDesc) -> Result<(), DeviceError> {
        let ordinal = self.kernel.device().ordinal();
        let check = || {
            check_shapes(x, y)?;
            x.check_device("x", ordinal)?;
            y.check_device("y", ordinal)
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        // SAFETY: shapes, pitches and places were checked above.
        unsafe { self.run(ctx, (x.address, x.pitch), factor, y) }
    }

    /// # Safety
    /// At `x`, an address and a pitch, are as many rows and columns as `y` has, on the device of the kernel, and `y`
    /// overlaps them not at all or element by element.
    unsafe fn run(
        &self,
        ctx: &mut ExecContext,
        (x, x_pitch): (u64, u64),
        factor: f32,
        y: &MatrixDesc,
    ) -> Result<(), DeviceError> {
        let args = ScaleArgs {
            x,
            y: y.address,
            x_pitch,
            y_pitch: y.pitch,
            columns: y.cols,
            row_blocks: y.cols.div_ceil(ScaleSpec::BLOCK_COLUMNS),
            factor,
            reserved: 0,
        };
        let problem = GemmShape { m: y.rows, n: y.cols, k: 0 };
        // SAFETY: the caller's promise; views were checked against their memory when they were created. A thread writes
        // only what no other thread reads. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), problem, &args) }
    }
}

/// Checks the shapes of input and output.
fn check_shapes(x: &MatrixDesc, y: &MatrixDesc) -> Result<(), LaunchError> {
    check_activations("x", x, u32::MAX)?;
    y.check_rows_aligned("y")?;
    if y.shape() == x.shape() { Ok(()) } else { Err(LaunchError::Output { output: y.shape(), tensor: x.shape() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_and_output_have_one_shape() {
        let desc = |rows, cols| MatrixDesc::new(0, 0x1000, rows, cols, cols.into(), u64::MAX).unwrap();
        assert_eq!(check_shapes(&desc(5, 72), &desc(5, 72)), Ok(()));
        for y in [desc(4, 72), desc(5, 64)] {
            assert!(matches!(check_shapes(&desc(5, 72), &y), Err(LaunchError::Output { .. })), "{y:?}");
        }
        assert!(matches!(check_shapes(&desc(5, 70), &desc(5, 70)), Err(LaunchError::Columns { .. })));
    }
}
