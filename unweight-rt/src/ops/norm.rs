//! Norms of rows of activations: `y[r] = norm(x[r])`, or `y[r] += norm(x[r])` if the kernel adds.

use std::sync::Arc;

use unweight_codegen::{
    abi::NormArgs,
    family::norm::COLUMNS_MAX,
    plan::GemmShape,
    spec::{NormSpec, Op},
};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixMut, MatrixRef, RowFault,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{ExecContext, operands::check_activations},
};

/// A kernel of family `norm`.
#[derive(Clone, Debug)]
pub struct Norm {
    kernel: Arc<LoadedKernel>,
    spec: NormSpec,
}

impl Norm {
    /// Wraps a kernel of family `norm`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::Norm(spec) => Ok(Self { kernel, spec }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a norm kernel" }),
        }
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues the norm of all rows of `x` `[m, d]`, or of those in the list `rows`: `y` has one row per requested
    /// row, and `rows` has at least that many entries. `gamma` is `[d]`, or `[2 * d]` with the bias after the weights
    /// if the norm has one; `d` is a multiple of 8, at most 16384. For an entry of `rows` that is not a row of `x`,
    /// zeros are stored, or nothing is added; [`ExecContext::synchronize`] reports it.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        gamma: &DeviceBuffer<u16>,
        eps: f32,
        rows: Option<&DeviceBuffer<u32>>,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (x, y, ordinal) = (x.desc(), y.desc(), self.kernel.device().ordinal());
        let check = || {
            check_apart(("y", y.span()), [("x", x.span())])?;
            rows.map_or(Ok(()), |rows| {
                check_device("the list of rows", rows.device().ordinal(), ordinal)?;
                check_apart(("y", y.span()), [("the list of rows", rows.span())])
            })
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        self.launch(ctx, x, (gamma, eps), rows, y)
    }

    /// Enqueues `y[r] = norm(y[r])` for all rows.
    ///
    /// # Errors
    /// As for [`Norm::enqueue`].
    pub fn enqueue_in_place(
        &self,
        ctx: &mut ExecContext,
        y: MatrixMut<'_>,
        gamma: &DeviceBuffer<u16>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.launch(ctx, y.desc(), (gamma, eps), None, y.desc())
    }

    fn launch(
        &self,
        ctx: &mut ExecContext,
        x: &MatrixDesc,
        (gamma, eps): (&DeviceBuffer<u16>, f32),
        rows: Option<&DeviceBuffer<u32>>,
        y: &MatrixDesc,
    ) -> Result<(), DeviceError> {
        let ordinal = self.kernel.device().ordinal();
        let check = || {
            check_shapes(x, rows.map(DeviceBuffer::len), y)?;
            check_gamma(self.spec, gamma.len(), x.cols)?;
            check_device("gamma", gamma.device().ordinal(), ordinal)?;
            x.check_device("x", ordinal)?;
            y.check_device("y", ordinal)?;
            check_apart(("y", y.span()), [("gamma", gamma.span())])
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = NormArgs {
            x: x.address,
            gamma: gamma.address(),
            rows: rows.map_or(0, DeviceBuffer::address),
            y: y.address,
            fault: ctx.row_fault_address(RowFault::Source),
            x_pitch: x.pitch,
            y_pitch: y.pitch,
            eps,
            source_rows: x.rows,
            d: x.cols,
            reserved: 0,
        };
        // SAFETY: shapes, pitches, places and the list's length were checked above, views against their memory when
        // they were created; the kernel bounds-checks the entries of the list, and a thread writes only what no other
        // thread reads. The fault word lives as long as the context, on whose stream this runs. Dropping a buffer waits
        // for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), GemmShape::rows(y.rows), &args) }
    }
}

/// Checks the number of weights, and of biases if the norm has them.
fn check_gamma(spec: NormSpec, got: usize, cols: u32) -> Result<(), LaunchError> {
    let (got, expected) = (got as u64, spec.gamma_elements(cols));
    if got == expected { Ok(()) } else { Err(LaunchError::Elements { buffer: "gamma", got, expected }) }
}

/// Checks the shapes of input, list and output of a norm.
fn check_shapes(x: &MatrixDesc, rows: Option<usize>, y: &MatrixDesc) -> Result<(), LaunchError> {
    check_activations("x", x, COLUMNS_MAX)?;
    y.check_rows_aligned("y")?;
    let expected_rows = if rows.is_some() { y.rows } else { x.rows };
    if (y.rows, y.cols) != (expected_rows, x.cols) {
        return Err(LaunchError::Output { output: y.shape(), tensor: x.shape() });
    }
    match rows {
        Some(len) if (len as u64) < u64::from(y.rows) => {
            Err(LaunchError::Elements { buffer: "the list of rows", got: len as u64, expected: y.rows.into() })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::operands::CHUNK;

    fn desc(rows: u32, cols: u32) -> MatrixDesc {
        MatrixDesc::new(0, 0x1000, rows, cols, cols.into(), u64::MAX).unwrap()
    }

    #[test]
    fn a_norm_with_a_bias_has_two_vectors() {
        use unweight_codegen::spec::{NormKind, NormThreads};
        for kind in NormKind::ALL.iter().copied() {
            let spec = NormSpec { threads: NormThreads::ALL[0], kind, add: false, pdl: true };
            let expected = if kind == NormKind::LayerBias { 144 } else { 72 };
            assert_eq!(check_gamma(spec, expected, 72), Ok(()));
            for got in [0, 71, 216 - expected] {
                let wrong = LaunchError::Elements { buffer: "gamma", got: got as u64, expected: expected as u64 };
                assert_eq!(check_gamma(spec, got, 72), Err(wrong), "{kind:?}");
            }
        }
    }

    #[test]
    fn rows_and_columns_must_agree() {
        assert_eq!(check_shapes(&desc(5, 72), None, &desc(5, 72)), Ok(()));
        assert_eq!(check_shapes(&desc(5, 72), Some(3), &desc(3, 72)), Ok(()));
        assert_eq!(check_shapes(&desc(5, 72), Some(9), &desc(9, 72)), Ok(()), "a row may be named twice");
        for (y, rows) in [(desc(4, 72), None), (desc(5, 64), None), (desc(3, 64), Some(3))] {
            assert!(matches!(check_shapes(&desc(5, 72), rows, &y), Err(LaunchError::Output { .. })), "{y:?}");
        }
        let short = LaunchError::Elements { buffer: "the list of rows", got: 2, expected: 3 };
        assert_eq!(check_shapes(&desc(5, 72), Some(2), &desc(3, 72)), Err(short));
        let odd = LaunchError::Columns { operand: "x", cols: 70, of: CHUNK, max: 16384 };
        assert_eq!(check_shapes(&desc(5, 70), None, &desc(5, 70)), Err(odd));
        assert!(matches!(check_shapes(&desc(1, 16392), None, &desc(1, 16392)), Err(LaunchError::Columns { .. })));
    }
}
