//! Products from weights in every encoding, under load.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{Epilogue, JoinSource, Op, WeightSource},
};
use unweight_rt::{
    DeviceBuffer, MatrixMut, MatrixRef,
    raw::{
        device::module::LoadedKernel,
        ops::{gemm_compact::CompactGemm, gemm_packed::PackedGemm, gemm_recon::Matmul},
        weight::DeviceCompact,
    },
};

use super::{
    Launch, RUNS, Run, Subject,
    results::mismatch,
    weights::{ROWS, Weights},
};
use crate::error::BenchError;

impl Run<'_> {
    /// Makes a subject of a packed matmul, which adds to each row of its product either a bias or, if the variant adds,
    /// the row of Y.
    pub(super) fn packed<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        shape: GemmShape,
        with_bias: bool,
    ) -> Result<Subject<'a>, BenchError> {
        let (escapes, epilogue) = match kernel.spec().op {
            Op::GemmMma(op) => (op.escapes, op.epilogue),
            Op::GemmWgmma(op) => (op.escapes, op.epilogue),
            _ => unreachable!("the caller has matched the family"),
        };
        let (tensor, exact) = if escapes {
            (&weights.with_escapes, &weights.exact)
        } else {
            (&weights.without_escapes, &weights.exact_without_escapes)
        };
        let columns = if epilogue == Epilogue::SiluMul { shape.n / 2 } else { shape.n };
        let matmul = PackedGemm::new(kernel.clone())?;
        self.ctx.borrow_mut().reserve(matmul.context_size(shape.m, &tensor.device))?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, shape.m, shape.k, shape.k.into())?;
            // SAFETY: `y` is one of the outputs of `product`, which has this size and lives until the stream is
            // synchronized.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, shape.m, columns, columns.into()) }?;
            let ctx = &mut self.ctx.borrow_mut();
            if !with_bias {
                return matmul.enqueue(ctx, x, &tensor.device, y);
            }
            let bias = MatrixRef::new(&weights.bias, 1, shape.n, shape.n.into())?;
            matmul.enqueue_with_bias(ctx, x, &tensor.device, bias, y)
        };
        let subject = self.product(kernel, (shape, columns), epilogue, (weights, exact), Box::new(launch))?;
        if !with_bias {
            return Ok(subject);
        }
        let check = move |y: &[u8]| mismatch(y, shape, epilogue, exact, &weights.bias_rows);
        Ok(Subject { name: format!("{} with a bias", subject.name), before: None, check: Box::new(check), ..subject })
    }

    pub(super) fn compact<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        (weights, tensor): (&'a Weights, &'a DeviceCompact),
        shape: GemmShape,
    ) -> Result<Subject<'a>, BenchError> {
        let Op::GemmCompact(spec) = kernel.spec().op else { unreachable!("the caller has matched the family") };
        let columns = if spec.epilogue == Epilogue::SiluMul { shape.n / 2 } else { shape.n };
        let matmul = CompactGemm::new(kernel.clone())?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, shape.m, shape.k, shape.k.into())?;
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, shape.m, columns, columns.into()) }?;
            matmul.enqueue(self.stream, x, tensor, y)
        };
        self.product(kernel, (shape, columns), spec.epilogue, (weights, &weights.exact), Box::new(launch))
    }

    pub(super) fn recon<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        shape: GemmShape,
    ) -> Result<Subject<'a>, BenchError> {
        let (is_exponent, budget, epilogue) = match kernel.spec().op {
            Op::GemmRecon(spec) => match spec.source {
                WeightSource::Exponent => (true, 64, spec.epilogue),
                WeightSource::Palette { verbatim } => (false, verbatim.get(), spec.epilogue),
            },
            Op::GemmJoin(spec) => (spec.source == JoinSource::Exponent, 64, spec.epilogue),
            _ => unreachable!("the caller has matched the family"),
        };
        let (source, exact) = if budget < weights.few_rows.max_verbatim_rows {
            (&weights.no_rows, &weights.exact_without_escapes)
        } else {
            (&weights.few_rows, &weights.exact_few_rows)
        };
        let matmul = Matmul::new(kernel.clone())?;
        let launch = move |y: u64| {
            let x = MatrixRef::new(&weights.x, shape.m, shape.k, shape.k.into())?;
            // SAFETY: as above.
            let y = unsafe { MatrixMut::from_raw(self.kernels.device(), y, shape.m, shape.n, shape.n.into()) }?;
            let ctx = &mut self.ctx.borrow_mut();
            if is_exponent {
                matmul.exponent(ctx, x, source.huffman.as_exponent(&source.exponents), y)
            } else {
                matmul.palette(ctx, x, source.palette.view(), y)
            }
        };
        self.product(kernel, (shape, shape.n), epilogue, (weights, exact), Box::new(launch))
    }

    fn product<'a>(
        &'a self,
        kernel: &LoadedKernel,
        (shape, columns): (GemmShape, u32),
        epilogue: Epilogue,
        (weights, exact): (&'a Weights, &'a [(f64, f64)]),
        launch: Launch<'a>,
    ) -> Result<Subject<'a>, BenchError> {
        let elements = shape.m as usize * columns as usize;
        let bytes = elements * 2;
        let before = (epilogue == Epilogue::StoreAdd)
            .then(|| DeviceBuffer::from_host(self.stream, &weights.old[..bytes].repeat(RUNS as usize)))
            .transpose()?;
        let check = move |y: &[u8]| mismatch(y, shape, epilogue, exact, &weights.old);
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape,
            outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
            bytes,
            before,
            launch,
            check: Box::new(check),
        })
    }
}

/// Returns batches at and next to the edges of a variant's batch tile, and one in its third tile.
pub(super) fn batches(spec: &VariantSpec) -> Vec<u32> {
    let tile = match spec.op {
        Op::GemmMma(op) => op.batch_tile.get(),
        Op::GemmJoin(op) => op.batch_tile.get(),
        Op::GemmWgmma(op) => op.batch_tile.get(),
        Op::GemmCompact(op) => op.batch_tile.get(),
        Op::GemmGrouped(op) => op.batch_tile.get(),
        // Slots have 64, 128 or 256 rows, depending on the batch.
        _ => return vec![1, 63, 64, 65, 129, 257],
    };
    let mut batches = vec![1, tile - 1, tile, tile + 1, 2 * tile + tile / 2 + 1];
    batches.retain(|m| *m <= ROWS);
    batches
}

/// Returns whether a variant adds a bias or Y.
pub(super) fn takes_bias(spec: &VariantSpec) -> bool {
    match spec.op {
        Op::GemmMma(op) => op.epilogue == Epilogue::StoreAdd,
        Op::GemmWgmma(op) => op.epilogue == Epilogue::StoreAdd,
        _ => false,
    }
}

/// Returns whether a variant can compute a problem at all.
pub(super) fn supports(spec: &VariantSpec, shape: GemmShape, sms: u32) -> bool {
    let divides = match spec.op {
        Op::GemmRecon(op) => shape.n.is_multiple_of(64 * op.n_tiles.get()),
        _ => true,
    };
    divides && Plan::new(spec).is_ok_and(|plan| plan.launch.grid.blocks(shape, sms).is_some_and(|blocks| blocks > 0))
}
