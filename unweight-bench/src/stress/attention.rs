//! Attention under load: batches with rows of many lengths, some without a token, on pages whose unused lines are NaN;
//! and prompt chunks that begin and end inside pages.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use unweight_codegen::{
    plan::GemmShape,
    spec::{AttentionSpec, AttentionStep, Op},
};
use unweight_format::testing::Random;
use unweight_rt::{
    DeviceBuffer, MatrixMut,
    raw::{device::module::LoadedKernel, ops::attention::Attention},
};

use super::{RUNS, Run, Subject};
use crate::{
    attention::{Chunk, ChunkProblem, Decode, DeviceProblem, PAD, Problem},
    data::halves,
    error::BenchError,
};

/// Rows, query heads per KV head, the longest row, the window, and the number of parts for kernels that split rows.
const CASES: [(usize, usize, u64, u32, u32); 3] = [(1, 4, 2000, 0, 13), (37, 7, 300, 0, 2), (9, 16, 700, 130, 32)];

/// Position of a chunk's first token, number of tokens, query heads per KV head, and the window.
const CHUNKS: [(u32, u32, usize, u32); 4] = [(0, 1, 4, 0), (0, 300, 4, 0), (77, 129, 7, 0), (500, 65, 16, 130)];

/// A soft cap of about the size of most scores.
const SOFTCAP: f32 = 1.5;

impl Run<'_> {
    /// Returns the subjects of an attention kernel.
    pub(super) fn attention<'a>(&'a self, kernel: &Arc<LoadedKernel>) -> Result<Vec<Subject<'a>>, BenchError> {
        let Op::Attention(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        if spec.step == AttentionStep::Prefill {
            return CHUNKS.into_iter().map(|case| self.chunk(kernel, spec, case)).collect();
        }
        CASES
            .into_iter()
            .map(|(m, group, longest, window, parts)| {
                let mut random = Random::new(m as u64);
                let mut positions: Vec<u32> = (0..m).map(|_| random.below(longest) as u32).collect();
                positions[0] = longest as u32 - 1;
                if m > 1 {
                    positions[m / 2] = PAD;
                }
                let head_dim = spec.head_dim.get() as usize;
                let case = Decode {
                    window,
                    bias: window != 0,
                    norm: m > 1 && !spec.softcap,
                    softcap: spec.softcap.then_some(SOFTCAP),
                    plus_one: spec.plus_one,
                    ..Decode::new(head_dim, group, &positions)
                };
                let problem = Problem::new(&case);
                let attention = Attention::new(kernel.clone())?;
                let parts = if spec.split { parts } else { 1 };
                let on_device = DeviceProblem::new(self.stream, &problem)?;
                let on_device = RefCell::new(on_device.in_parts(&attention, &mut self.ctx.borrow_mut(), parts)?);
                let columns = case.out_columns();
                let bytes = m * columns * 2;
                let on_device = Rc::new(on_device);
                let of_check = on_device.clone();
                let launch = move |out: u64| {
                    let (rows, columns) = (m as u32, columns as u32);
                    // SAFETY: the address is one of the subject's outputs, which has this size and lives until the
                    // stream is synchronized.
                    let out =
                        unsafe { MatrixMut::from_raw(self.kernels.device(), out, rows, columns, columns.into()) }?;
                    on_device.borrow_mut().decode(&attention, &mut self.ctx.borrow_mut(), out)
                };
                let check = move |out: &[u8]| match of_check.borrow().layer(self.stream) {
                    Ok(layer) => problem.mismatch(&halves(out), &layer),
                    Err(error) => Some(error.to_string()),
                };
                Ok(Subject {
                    name: kernel.spec().to_string(),
                    shape: GemmShape { m: m as u32, n: columns as u32, k: longest as u32 },
                    outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
                    bytes,
                    before: None,
                    launch: Box::new(launch),
                    check: Box::new(check),
                })
            })
            .collect()
    }

    fn chunk<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        spec: AttentionSpec,
        (start, tokens, group, window): (u32, u32, usize, u32),
    ) -> Result<Subject<'a>, BenchError> {
        let (head_dim, seed) = (spec.head_dim.get() as usize, u64::from(tokens));
        let softcap = spec.softcap.then_some(SOFTCAP);
        let chunk = Chunk { head_dim, kv_heads: 2, group, start, tokens, window, softcap, seed };
        let problem = ChunkProblem::new(&chunk);
        let columns = problem.sequence.case.out_columns();
        let bytes = tokens as usize * columns * 2;
        let on_device = Rc::new(RefCell::new(DeviceProblem::new(self.stream, &problem.sequence)?));
        let (attention, of_check) = (Attention::new(kernel.clone())?, on_device.clone());
        let launch = move |out: u64| {
            let columns = columns as u32;
            // SAFETY: the address is one of the subject's outputs, which has this size and lives until the stream is
            // synchronized.
            let out = unsafe { MatrixMut::from_raw(self.kernels.device(), out, tokens, columns, columns.into()) }?;
            on_device.borrow_mut().prefill(&attention, &mut self.ctx.borrow_mut(), &chunk, out)
        };
        let check = move |out: &[u8]| match of_check.borrow().layer(self.stream) {
            Ok(layer) => problem.mismatch(&halves(out), &layer),
            Err(error) => Some(error.to_string()),
        };
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape: GemmShape { m: tokens, n: columns as u32, k: start + tokens },
            outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
            bytes,
            before: None,
            launch: Box::new(launch),
            check: Box::new(check),
        })
    }
}
