//! Measures the linears of one Llama-3.1-8B layer by batch: DFloat11, which decodes the layer in one launch before it
//! multiplies, next to formats that multiply directly. The time of a step is decoding, which does not depend on the
//! batch, plus products.

use unweight_codegen::{plan::GemmShape, spec::Epilogue};
use unweight_format::{Histogram, Matrix, raw::packed};
use unweight_rivals::{
    cuda::{
        dfloat11::{DeviceUnit, UnitDecoder},
        zipserv::{DeviceZip, ZipKernels},
    },
    dfloat11::{THREADS, Unit},
    zipserv,
};
use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceError, DeviceMatrix, DevicePacked, ExecContext, MatrixRef,
    raw::{
        choose::candidates::PackedUse,
        ops::gemm_packed::{PackedGemm, context_size},
    },
};

use super::{Bench, contender, not_storable, upload_error};
use crate::{
    BenchError,
    data::{halves, normal_bf16, relative_error},
    timing::{Contender, Row},
};

/// q, k, v, o, gate, up, down, in the order in which a DFloat11 unit stores them.
const SHAPES: [(u32, u32); 7] =
    [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)];

/// Passes over the layer per graph. One pass takes about 100 us, which hides most of the gap between two graphs.
const PASSES: usize = 4;

/// The layer in all encodings. One copy suffices, because the layer is larger than any cache.
struct Layer {
    bits: Vec<u16>,
    whole: Vec<DeviceMatrix>,
    packed: Vec<DevicePacked>,
    zips: Vec<DeviceZip>,
    unit: DeviceUnit,
}

impl Bench<'_> {
    /// Measures decoding and products of a layer, by batch.
    pub(super) fn layer(&self, batches: &[u32]) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let layer = self.encode_layer()?;
        let widest = SHAPES.iter().map(|(n, _)| *n).max().unwrap_or(0);
        let (zip, dfloat11) = (ZipKernels::of(stream, self.kernels, widest)?, UnitDecoder::of(stream, self.kernels)?);
        let mut flat = DeviceBuffer::<u16>::zeroed(stream, layer.bits.len())?;
        let mut decoded =
            SHAPES.iter().map(|&(n, k)| DeviceMatrix::zeroed(stream, n, k)).collect::<Result<Vec<_>, _>>()?;
        self.check_decoders(&layer, (&dfloat11, &mut flat), (&zip, &mut decoded))?;
        let mut rows = Vec::new();
        for &m in batches {
            rows.extend(self.layer_rows(m, &layer, (&dfloat11, &mut flat), (&zip, &mut decoded))?);
        }
        Ok(rows)
    }

    fn encode_layer(&self) -> Result<Layer, BenchError> {
        let stream = self.timer.stream;
        let (mut flat, mut whole, mut pack, mut zips) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for ((n, k), seed) in SHAPES.into_iter().zip(20..) {
            let (rows, cols) = (n as usize, k as usize);
            let bytes = normal_bf16(rows * cols, 0.02, seed);
            let matrix = Matrix::new(&bytes, rows, cols)?;
            whole.push(DeviceMatrix::upload(stream, matrix)?);
            let tensor = packed::pack(matrix, &Histogram::of(&bytes));
            let tensor = tensor.map_err(|why| BenchError::Unpackable { n, k, why })?;
            pack.push(DevicePacked::upload(stream, &tensor)?);
            let tensor = zipserv::encode(&bytes, rows, cols).map_err(not_storable("ZipServ", (n, k)))?;
            zips.push(DeviceZip::upload(stream, &tensor).map_err(upload_error((n, k)))?);
            flat.extend(bytes);
        }
        let shape = SHAPES[0];
        let unit = Unit::encode(&flat, THREADS).map_err(not_storable("DFloat11", shape))?;
        let unit = DeviceUnit::upload(stream, &unit).map_err(upload_error(shape))?;
        let elements = flat.len() / 2;
        self.report_bits("a layer, unweight packed", pack.iter().map(DevicePacked::bytes).sum(), elements);
        self.report_bits("a layer, dfloat11", unit.bytes(), elements);
        self.report_bits("a layer, zipserv", zips.iter().map(DeviceZip::bytes).sum(), elements);
        Ok(Layer { bits: halves(&flat), whole, packed: pack, zips, unit })
    }

    fn check_decoders(
        &self,
        layer: &Layer,
        (dfloat11, flat): (&UnitDecoder, &mut DeviceBuffer<u16>),
        (zip, decoded): (&ZipKernels, &mut [DeviceMatrix]),
    ) -> Result<(), BenchError> {
        let stream = self.timer.stream;
        flat.fill_bytes(stream, 0xff)?;
        dfloat11.decode(stream, &layer.unit, flat)?;
        if flat.to_host(stream)? != layer.bits {
            return Err(BenchError::WrongBits { kernel: "dfloat11" });
        }
        let mut remaining = layer.bits.as_slice();
        for (tensor, to) in layer.zips.iter().zip(decoded) {
            to.fill_bytes(stream, 0xff)?;
            zip.decompress(stream, tensor, to)?;
            let (weights, rest) = remaining.split_at(to.bytes() / 2);
            if to.to_host(stream)? != weights {
                return Err(BenchError::WrongBits { kernel: "zipserv" });
            }
            remaining = rest;
        }
        Ok(())
    }

    fn layer_rows(
        &self,
        m: u32,
        layer: &Layer,
        (dfloat11, flat): (&UnitDecoder, &mut DeviceBuffer<u16>),
        (zip, decoded): (&ZipKernels, &mut [DeviceMatrix]),
    ) -> Result<Vec<Row>, BenchError> {
        let (stream, sms) = (self.timer.stream, self.kernels.device().info().sms);
        let mut ctx = ExecContext::new(stream, ContextSize::default().with_cublas())?;
        let problems = SHAPES.map(|(n, k)| GemmShape { m, n, k });
        let vector = |problem: &GemmShape| {
            let bytes = normal_bf16(m as usize * problem.k as usize, 1.0, u64::from(problem.k) + u64::from(m));
            DeviceMatrix::from_host(stream, m, problem.k, &halves(&bytes))
        };
        let x = problems.iter().map(vector).collect::<Result<Vec<_>, _>>()?;
        let outputs = problems.iter().map(|problem| DeviceMatrix::zeroed(stream, m, problem.n));
        let mut y = outputs.collect::<Result<Vec<_>, _>>()?;
        let mut products = Vec::new();
        for (problem, tensor) in problems.iter().zip(&layer.packed) {
            let packed_use = PackedUse { escapes: tensor.has_escapes(), pdl: false, epilogue: Epilogue::Store };
            let spec = self.kernels.chooser().choose(*problem, packed_use).ok_or(BenchError::NoVariant(*problem))?;
            ctx.reserve(context_size(&spec, *problem, sms)?)?;
            products.push(PackedGemm::new(self.kernels.get(&spec)?)?);
        }
        let io: u64 = x.iter().chain(&y).map(|matrix| matrix.bytes() as u64).sum();
        let whole_bytes = 2 * layer.bits.len() as u64;
        let packed_bytes: u64 = layer.packed.iter().map(DevicePacked::bytes).sum();
        let zip_bytes: u64 = layer.zips.iter().map(DeviceZip::bytes).sum();
        let (mut contenders, mut expected): (Vec<Contender>, Vec<Vec<u16>>) = (Vec::new(), Vec::new());
        for (name, bytes, multiplies) in [
            ("cublas", io + whole_bytes, true),
            ("unweight packed", io + packed_bytes, true),
            ("zipserv, faster way", io + zip_bytes, true),
            ("dfloat11 by cublas", io + layer.unit.bytes() + 2 * whole_bytes, true),
            ("zipserv, decoding", zip_bytes + whole_bytes, false),
            ("dfloat11, decoding", layer.unit.bytes() + whole_bytes, false),
        ] {
            let mut run = |y: &mut [DeviceMatrix]| -> Result<(), DeviceError> {
                if name.starts_with("dfloat11") {
                    dfloat11.decode(stream, &layer.unit, flat)?;
                }
                let mut at = 0u64;
                for (i, (n, k)) in SHAPES.into_iter().enumerate() {
                    let y = &mut y[i];
                    match name {
                        "cublas" => ctx.cublas()?.matmul(x[i].view(), layer.whole[i].view(), y.view_mut(), false)?,
                        "unweight packed" => {
                            products[i].enqueue(&mut ctx, x[i].view(), &layer.packed[i], y.view_mut())?
                        }
                        "zipserv, faster way" => zip.multiply(&mut ctx, &x[i], &layer.zips[i], &mut decoded[i], y)?,
                        "zipserv, decoding" => zip.decompress(stream, &layer.zips[i], &mut decoded[i])?,
                        "dfloat11 by cublas" => {
                            let address = flat.address() + 2 * at;
                            // SAFETY: the unit's weights have the layer's shapes, end to end; graphs of them are
                            // dropped before the buffer.
                            let weights = unsafe { MatrixRef::from_raw(flat.device(), address, n, k, k.into()) }?;
                            ctx.cublas()?.matmul(x[i].view(), weights, y.view_mut(), false)?;
                        }
                        _ => {}
                    }
                    at += u64::from(n) * u64::from(k);
                }
                Ok(())
            };
            y.iter_mut().try_for_each(|y| y.fill_bytes(stream, 0xff))?;
            run(&mut y)?;
            let mut error = None;
            if multiplies {
                let got = y.iter().map(|y| y.to_host(stream)).collect::<Result<Vec<_>, _>>()?;
                for ((problem, got), expected) in problems.iter().zip(&got).zip(&expected) {
                    let product_error = relative_error(got, expected);
                    BenchError::check_product(name, *problem, product_error)?;
                    error = Some(error.map_or(product_error, |largest: f64| largest.max(product_error)));
                }
                if expected.is_empty() {
                    expected = got;
                }
            }
            stream.synchronize()?;
            let graph = stream.capture(|| (0..PASSES).try_for_each(|_| run(&mut y)))?;
            contenders.push(contender(name, (graph, PASSES), bytes, error));
        }
        let rows = self.timer.measure("rivals_layer", contenders, 1, GemmShape { m, n: 0, k: 0 }, self.progress);
        // The graphs use these.
        drop((ctx, x, y));
        rows
    }
}
