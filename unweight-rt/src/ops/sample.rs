//! Samples the next token of each row from its logits on the device.

use std::sync::Arc;

pub use unweight_codegen::abi::{AdjustRow, SampleRow, TokenState};
use unweight_codegen::{abi::SampleArgs, plan::GemmShape, spec::Op};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixRef, RowFault,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{ExecContext, operands::check_logits},
};

/// A kernel of `sample`.
#[derive(Clone, Debug)]
pub struct Sample {
    kernel: Arc<LoadedKernel>,
}

/// A kernel of `sample` for adjusted logits.
#[derive(Clone, Debug)]
pub struct AdjustedSample {
    kernel: Arc<LoadedKernel>,
}

/// Adjustments of rows, and the token states on which they depend.
#[derive(Debug)]
pub struct RowAdjustments<'a> {
    /// The adjustments, one entry per row.
    pub rows: &'a DeviceBuffer<AdjustRow>,
    /// One entry per slot and token. The caller guarantees that it contains every slot in `rows`.
    pub tokens: &'a mut DeviceBuffer<TokenState>,
    /// The number of entries from one slot to the next; at least the vocabulary, and a multiple of 2.
    pub token_pitch: u32,
    /// One bit per token that may be sampled; a mask has one word per 32 tokens. The caller guarantees that it contains
    /// every mask in `rows`.
    pub masks: &'a DeviceBuffer<u32>,
}

impl AdjustedSample {
    /// Wraps a kernel of family `sample` for adjusted logits.
    ///
    /// # Errors
    /// The kernel is of another kind.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::Sample(spec) if spec.adjusted => Ok(Self { kernel }),
            _ => kernel.refuse(LaunchError::Family { wanted: "an adjusted sampler" }),
        }
    }

    /// Enqueues sampling for each row of `logits` that has adjustments. Runs after [`Sample::enqueue`] of the same
    /// rows, whose token in `ids` it overwrites; `positions` are those that it has advanced. The token is counted in
    /// its slot. Other rows do not change. If no token of a row may be sampled, its token is `u32::MAX`, and
    /// [`ExecContext::synchronize`] reports it.
    ///
    /// # Errors
    /// As for [`Sample::enqueue`].
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        logits: MatrixRef<'_>,
        rows: &DeviceBuffer<SampleRow>,
        adjustments: RowAdjustments<'_>,
        positions: &DeviceBuffer<u32>,
        ids: &mut DeviceBuffer<u32>,
    ) -> Result<(), DeviceError> {
        let (desc, ordinal) = (logits.desc(), self.kernel.device().ordinal());
        let RowAdjustments { rows: adjusts, tokens, token_pitch, masks } = adjustments;
        let check = || {
            check_shapes(desc, [rows.len(), positions.len(), ids.len()])?;
            check_states(desc, adjusts.len(), tokens.len(), token_pitch)?;
            desc.check_device("logits", ordinal)?;
            check_device("rows", rows.device().ordinal(), ordinal)?;
            check_device("adjustments", adjusts.device().ordinal(), ordinal)?;
            check_device("tokens", tokens.device().ordinal(), ordinal)?;
            check_device("masks", masks.device().ordinal(), ordinal)?;
            check_device("positions", positions.device().ordinal(), ordinal)?;
            check_device("ids", ids.device().ordinal(), ordinal)?;
            let read = || {
                let params = [("rows", rows.span()), ("adjustments", adjusts.span()), ("masks", masks.span())];
                [("logits", desc.span()), ("positions", positions.span())].into_iter().chain(params)
            };
            check_apart(("tokens", tokens.span()), read())?;
            check_apart(("ids", ids.span()), read().chain([("tokens", tokens.span())]))
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = SampleArgs {
            logits: desc.address,
            rows: rows.address(),
            positions: positions.address(),
            ids: ids.address(),
            fault: ctx.row_fault_address(RowFault::Logits),
            adjusts: adjusts.address(),
            tokens: tokens.address(),
            masks: masks.address(),
            pitch: desc.pitch,
            vocabulary: desc.cols,
            token_pitch,
        };
        // SAFETY: as for `Sample`; by the contract of `RowAdjustments`, token states have a row for every slot, and
        // masks one for every mask.
        unsafe { self.kernel.launch(ctx.stream(), GemmShape::rows(desc.rows), &args) }
    }
}

impl Sample {
    /// Wraps a kernel of family `sample`.
    ///
    /// # Errors
    /// The kernel belongs to another family, or is for adjusted logits.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::Sample(spec) if !spec.adjusted => Ok(Self { kernel }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a sampler" }),
        }
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues sampling for each row of `logits` `[m, V]`, V up to 2^20. The other buffers have at least one entry per
    /// row. `rows` contains the sampling parameters. `positions` contains the position of the token whose logits these
    /// are; it is advanced by 1. `ids` receives the sampled token, for the advanced position. A row at
    /// [`PAD_POSITION`](crate::ops::kv::PAD_POSITION) is skipped. A token depends only on its row: on logits,
    /// parameters and position, not on the rest of the batch. If all logits of a row are NaN, its token is `u32::MAX`,
    /// which is not a token, and [`ExecContext::synchronize`] reports it.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        logits: MatrixRef<'_>,
        rows: &DeviceBuffer<SampleRow>,
        positions: &mut DeviceBuffer<u32>,
        ids: &mut DeviceBuffer<u32>,
    ) -> Result<(), DeviceError> {
        let (desc, ordinal) = (logits.desc(), self.kernel.device().ordinal());
        let check = || {
            check_shapes(desc, [rows.len(), positions.len(), ids.len()])?;
            desc.check_device("logits", ordinal)?;
            check_device("rows", rows.device().ordinal(), ordinal)?;
            check_device("positions", positions.device().ordinal(), ordinal)?;
            check_device("ids", ids.device().ordinal(), ordinal)?;
            let read = || [("logits", desc.span()), ("rows", rows.span())];
            check_apart(("positions", positions.span()), read())?;
            check_apart(("ids", ids.span()), read().into_iter().chain([("positions", positions.span())]))
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = SampleArgs {
            logits: desc.address,
            rows: rows.address(),
            positions: positions.address(),
            ids: ids.address(),
            fault: ctx.row_fault_address(RowFault::Logits),
            adjusts: 0,
            tokens: 0,
            masks: 0,
            pitch: desc.pitch,
            vocabulary: desc.cols,
            token_pitch: 0,
        };
        // SAFETY: shapes, pitch and places were checked above, the view against its memory when it was created, and
        // each buffer has an entry for every row. The fault word lives as long as the context, on whose stream this
        // runs. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), GemmShape::rows(desc.rows), &args) }
    }
}

/// Checks the shape of the logits, and the lengths of rows, positions and ids.
fn check_shapes(logits: &MatrixDesc, [rows, positions, ids]: [usize; 3]) -> Result<(), LaunchError> {
    check_logits(logits, [("rows", rows), ("positions", positions), ("ids", ids)])
}

/// Checks the lengths of adjustments and token states, and the pitch of the states.
fn check_states(logits: &MatrixDesc, adjusts: usize, tokens: usize, token_pitch: u32) -> Result<(), LaunchError> {
    if (adjusts as u64) < u64::from(logits.rows) {
        let (got, expected) = (adjusts as u64, logits.rows.into());
        return Err(LaunchError::Elements { buffer: "adjustments", got, expected });
    }
    let expected = u64::from(logits.cols.next_multiple_of(2));
    if !token_pitch.is_multiple_of(2) || u64::from(token_pitch) < expected {
        return Err(LaunchError::Elements { buffer: "a row of tokens", got: token_pitch.into(), expected });
    }
    let (got, expected) = (tokens as u64, token_pitch.into());
    if got < expected { Err(LaunchError::Elements { buffer: "tokens", got, expected }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::family::sample::VOCABULARY_MAX;

    use super::*;

    fn desc(rows: u32, cols: u32, pitch: u64) -> MatrixDesc {
        MatrixDesc::new(0, 0x1000, rows, cols, pitch, u64::MAX).unwrap()
    }

    #[test]
    fn rows_have_all_that_they_need() {
        assert_eq!(check_shapes(&desc(3, 1000, 1000), [3; 3]), Ok(()));
        assert_eq!(check_shapes(&desc(3, 997, 1000), [4, 3, 9]), Ok(()), "any vocabulary; of a bucket's buffers");
        assert_eq!(check_shapes(&desc(1, 997, 997), [1; 3]), Ok(()), "the pitch of a single row says nothing");
        assert_eq!(check_shapes(&desc(0, 8, 8), [0; 3]), Ok(()));
        for (buffer, lengths) in [("rows", [2, 3, 3]), ("positions", [3, 2, 3]), ("ids", [3, 3, 2])] {
            let short = LaunchError::Elements { buffer, got: 2, expected: 3 };
            assert_eq!(check_shapes(&desc(3, 8, 8), lengths), Err(short));
        }
        for cols in [0, VOCABULARY_MAX + 1] {
            let none = LaunchError::Logits { cols, max: VOCABULARY_MAX };
            assert_eq!(check_shapes(&desc(3, cols, 2 << 20), [3; 3]), Err(none));
        }
        assert!(matches!(check_shapes(&desc(2, 997, 997), [2; 3]), Err(LaunchError::Pitch { operand: "logits", .. })));
        assert_eq!(check_states(&desc(3, 997, 1000), 3, 998, 998), Ok(()));
        for (adjusts, tokens, pitch) in [(2, 998, 998), (3, 998, 997), (3, 997, 998), (3, 998, 996)] {
            let short = check_states(&desc(3, 997, 1000), adjusts, tokens, pitch);
            assert!(matches!(short, Err(LaunchError::Elements { .. })), "{adjusts} {tokens} {pitch}");
        }
        let odd = MatrixDesc { address: 0x1002, ..desc(1, 8, 8) };
        assert!(matches!(check_shapes(&odd, [1; 3]), Err(LaunchError::Alignment { operand: "logits", .. })));
    }
}
