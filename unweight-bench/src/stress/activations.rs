//! The kernels of activations under load. Each shape of weights gives them columns; rows are few and many.

use std::sync::Arc;

use unweight_codegen::{
    plan::GemmShape,
    spec::{EmbedSource, Op},
};
use unweight_format::testing::Random;
use unweight_rt::{
    device::{DeviceBuffer, MatrixMut, MatrixRef, module::LoadedKernel},
    ops::{
        embed::{Embed, EmbedTable},
        norm::Norm,
        silu_mul::SiluMul,
    },
};

use super::{Launch, RUNS, Run, Subject, Weights, differs};
use crate::{data::halves, error::BenchError, oracle};

/// Rows of a batch: one, a few, and more than the device has multiprocessors for.
pub(super) const ROWS: [u32; 3] = [1, 7, 300];

const EPS: f32 = 1e-5;

impl Run<'_> {
    /// The subjects of a kernel of activations; none of another family.
    pub(super) fn activations<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
    ) -> Result<Vec<Subject<'a>>, BenchError> {
        ROWS.into_iter()
            .map(|m| match kernel.spec().op {
                Op::Norm(_) => self.norm(kernel, weights, m),
                Op::Embed(spec) => self.embed(kernel, weights, m, spec.source),
                _ => self.silu_mul(kernel, weights, m),
            })
            .collect()
    }

    fn norm<'a>(&'a self, kernel: &Arc<LoadedKernel>, weights: &'a Weights, m: u32) -> Result<Subject<'a>, BenchError> {
        let (stream, d) = (self.stream, weights.shape.1);
        let gamma: Vec<u16> = halves(&weights.old)[..d as usize].to_vec();
        let x = weights.x.read(stream, 0, (m * d) as usize)?;
        let spans: Vec<_> = x.chunks_exact(d as usize).flat_map(|row| oracle::norm(row, &gamma, EPS)).collect();
        let (norm, gamma) = (Norm::new(kernel.clone())?, DeviceBuffer::from_host(stream, &gamma)?);
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, m, d, d.into())?;
            // SAFETY: one of the outputs of the subject, of this size, which lives until the stream was waited for.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, m, d, d.into()) }?;
            norm.enqueue(&mut self.lane.borrow_mut(), x, &gamma, EPS, None, y)
        };
        self.rows(kernel, (m, d), Box::new(launch), move |y| oracle::outside(&halves(y), &spans))
    }

    fn silu_mul<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, k) = (self.stream, weights.shape.1);
        let columns = k / 2;
        let x = weights.x.read(stream, 0, (m * k) as usize)?;
        let activated = |row: &[u16]| {
            let (gate, up) = row.split_at(columns as usize);
            gate.iter().zip(up).map(|(gate, up)| oracle::silu_mul(*gate, *up)).collect::<Vec<_>>()
        };
        let spans: Vec<_> = x.chunks_exact(k as usize).flat_map(activated).collect();
        let silu_mul = SiluMul::new(kernel.clone())?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, m, k, k.into())?;
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, m, columns, columns.into()) }?;
            silu_mul.enqueue(&mut self.lane.borrow_mut(), x, y)
        };
        self.rows(kernel, (m, columns), Box::new(launch), move |y| oracle::outside(&halves(y), &spans))
    }

    fn embed<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        m: u32,
        source: EmbedSource,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, (n, d)) = (self.stream, weights.shape);
        let mut random = Random::new(u64::from(n) + u64::from(m));
        let ids: Vec<u32> = (0..m).map(|_| random.below(n.into()) as u32).collect();
        let row = |id: &u32| weights.bytes[*id as usize * d as usize * 2..][..d as usize * 2].to_vec();
        let expected: Vec<u8> = ids.iter().flat_map(row).collect();
        let bf16 = match source {
            EmbedSource::Bf16 => DeviceBuffer::from_host(stream, &halves(&weights.bytes))?,
            EmbedSource::Packed => DeviceBuffer::zeroed(stream, 0)?,
        };
        let (embed, ids) = (Embed::new(kernel.clone())?, DeviceBuffer::from_host(stream, &ids)?);
        let launch = move |y: u64| {
            let table = match source {
                EmbedSource::Bf16 => EmbedTable::Bf16(MatrixRef::new(&bf16, n, d, d.into())?),
                EmbedSource::Packed => EmbedTable::Packed { weights: &weights.with_escapes.device, vocabulary: n },
            };
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, m, d, d.into()) }?;
            embed.enqueue(&mut self.lane.borrow_mut(), &ids, table, y)
        };
        self.rows(kernel, (m, d), Box::new(launch), move |y| differs(y, &expected))
    }

    /// A subject with `[m, columns]` bf16 as its output.
    fn rows<'a>(
        &'a self,
        kernel: &LoadedKernel,
        (m, columns): (u32, u32),
        launch: Launch<'a>,
        check: impl Fn(&[u8]) -> Option<String> + 'a,
    ) -> Result<Subject<'a>, BenchError> {
        let bytes = m as usize * columns as usize * 2;
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape: GemmShape { m, n: columns, k: 0 },
            outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
            bytes,
            before: None,
            launch,
            check: Box::new(check),
        })
    }
}
