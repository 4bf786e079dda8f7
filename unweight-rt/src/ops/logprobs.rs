//! Computes log probabilities of sampled tokens and of the most likely tokens on the device.

use std::sync::Arc;

use unweight_codegen::{abi::LogprobsArgs, family::logprobs::TOP_MAX, plan::GemmShape, spec::Op};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixRef,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{ExecContext, operands::check_logits},
};

/// Words per row of results: token and f32 of the sampled token and of the most likely tokens.
pub const ROW_WORDS: usize = 2 * (1 + TOP_MAX as usize);

/// A kernel of `logprobs`.
#[derive(Clone, Debug)]
pub struct Logprobs {
    kernel: Arc<LoadedKernel>,
}

impl Logprobs {
    /// Wraps a kernel of family `logprobs`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::Logprobs(_) => Ok(Self { kernel }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a log-probability kernel" }),
        }
    }

    /// Enqueues the log probabilities of rows of `logits` `[m, V]`, V up to 2^20: of the token in `ids`, and of the
    /// most likely tokens. `wanted` is 0 for a row without log probabilities, else 1 + the number of most likely
    /// tokens, up to 20. `out` has [`ROW_WORDS`] words per row: pairs of a token and the bits of an f32, the sampled
    /// token first; unused pairs are `u32::MAX` and NaN. Rows without log probabilities are not written.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        logits: MatrixRef<'_>,
        wanted: &DeviceBuffer<u32>,
        ids: &DeviceBuffer<u32>,
        out: &mut DeviceBuffer<u32>,
    ) -> Result<(), DeviceError> {
        let (desc, ordinal) = (logits.desc(), self.kernel.device().ordinal());
        let check = || {
            check_shapes(desc, [wanted.len(), ids.len(), out.len() / ROW_WORDS])?;
            desc.check_device("logits", ordinal)?;
            check_device("wanted", wanted.device().ordinal(), ordinal)?;
            check_device("ids", ids.device().ordinal(), ordinal)?;
            check_device("log probabilities", out.device().ordinal(), ordinal)?;
            let read = [("logits", desc.span()), ("wanted", wanted.span()), ("ids", ids.span())];
            check_apart(("log probabilities", out.span()), read)
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = LogprobsArgs {
            logits: desc.address,
            wanted: wanted.address(),
            ids: ids.address(),
            out: out.address(),
            pitch: desc.pitch,
            vocabulary: desc.cols,
            reserved: 0,
        };
        // SAFETY: shapes, pitch and places were checked above, the view against its memory when it was created, and
        // each buffer has an entry for every row. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), GemmShape::rows(desc.rows), &args) }
    }
}

/// Checks the shape of the logits, and the lengths of `wanted`, ids and results.
fn check_shapes(logits: &MatrixDesc, [wanted, ids, out]: [usize; 3]) -> Result<(), LaunchError> {
    check_logits(logits, [("wanted", wanted), ("ids", ids), ("log probabilities", out)])
}

#[cfg(test)]
mod tests {
    use unweight_codegen::family::sample::VOCABULARY_MAX;

    use super::*;

    #[test]
    fn rows_have_all_that_they_need() {
        let desc = |rows, cols, pitch| MatrixDesc::new(0, 0x1000, rows, cols, pitch, u64::MAX).unwrap();
        assert_eq!(check_shapes(&desc(3, 1000, 1000), [3; 3]), Ok(()));
        for (buffer, rows) in [("wanted", [2, 3, 3]), ("ids", [3, 2, 3]), ("log probabilities", [3, 3, 2])] {
            let short = LaunchError::Elements { buffer, got: 2, expected: 3 };
            assert_eq!(check_shapes(&desc(3, 8, 8), rows), Err(short));
        }
        assert!(check_shapes(&desc(3, VOCABULARY_MAX + 1, 2 << 20), [3; 3]).is_err());
        assert!(matches!(check_shapes(&desc(2, 997, 997), [2; 3]), Err(LaunchError::Pitch { .. })));
    }
}
