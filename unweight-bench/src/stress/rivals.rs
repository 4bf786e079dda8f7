//! Kernels of other systems' formats under load. These accept buffers, not addresses: each launch poisons its own
//! buffer, fills it, and copies it to the output that is compared.

use std::cell::RefCell;

use unweight_codegen::{ExternalSource, plan::GemmShape, spec::Epilogue};
use unweight_format::{Float, testing::float_weights};
use unweight_rivals::{
    cuda::{
        self,
        dfloat11::{DeviceUnit, UnitDecoder},
        matvans::{DeviceMatvans, MatvansKernels, round},
        tans::{DeviceTans, TansKernels, place},
        zipserv::{BATCH_TILES, DeviceZip, ZipKernels},
    },
    dfloat11::{THREADS, Unit},
    matvans::{self, Layout},
    tans, zipserv,
};
use unweight_rt::{DeviceBuffer, DeviceError, DeviceMatrix, MatrixMut, MatrixRef};

use super::{RUNS, Run, SHAPES, Subject, Weights, differs, mismatch};
use crate::{
    data::halves,
    error::BenchError,
    rivals::{not_storable, upload_error},
};

/// The operation of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rival {
    Dfloat11,
    Decompress,
    /// A product of at most this many rows.
    Gemm(u32),
    /// Runs after every product that is split along k.
    Reduce,
    Matvans(Layout),
    Dense,
    Tans,
    Plain,
}

impl Rival {
    fn of(kernel: &ExternalSource) -> Option<Self> {
        match (kernel.family, kernel.function) {
            ("dfloat11", "run") => Some(Self::Dfloat11),
            ("zipserv", "decompress") => Some(Self::Decompress),
            ("zipserv", "gemm") => {
                let tile = kernel.constants.iter().find(|(name, _)| *name == "kBatchTile");
                tile.map(|(_, tile)| Self::Gemm(*tile))
            }
            ("zipserv", "reduce") => Some(Self::Reduce),
            ("matvans", "rows") => Some(Self::Matvans(Layout::Rows)),
            ("matvans", "stripes") => Some(Self::Matvans(Layout::Stripes)),
            ("matvans", "lanes") => Some(Self::Matvans(Layout::Lanes)),
            ("matvans", "dense") => Some(Self::Dense),
            ("tans", "add") => Some(Self::Tans),
            ("tans", "plain") => Some(Self::Plain),
            _ => None,
        }
    }

    /// Returns whether the kernel's format can hold a matrix of this shape.
    fn supports(self, (n, k): (u32, u32)) -> bool {
        match self {
            Self::Matvans(layout) => {
                let (rows, cols) = layout.steps();
                n.is_multiple_of(rows as u32) && k.is_multiple_of(cols as u32)
            }
            _ => true,
        }
    }
}

/// The selected kernels and their launchers.
pub(super) struct Rivals {
    kernels: Vec<(String, Rival)>,
    dfloat11: UnitDecoder,
    zip: ZipKernels,
    matvans: MatvansKernels,
    tans: Option<TansKernels>,
}

impl Run<'_> {
    /// Loads the selected kernels. Returns `None` if none is selected, if a fault is planted, or if only variants
    /// without the copy engine run.
    pub(super) fn load_rivals(&self) -> Result<Option<Rivals>, BenchError> {
        let arch = self.kernels.device().info().arch;
        let named = cuda::kernels(arch).into_iter().filter_map(|kernel| Some((kernel.name(), Rival::of(&kernel)?)));
        let kernels: Vec<_> = named.filter(|(name, _)| self.options.selects(name)).collect();
        if kernels.is_empty() || self.options.asynchronous || self.options.plant.is_some() {
            return Ok(None);
        }
        let (stream, set) = (self.stream, self.kernels);
        let tallest = SHAPES.iter().map(|(n, _)| *n).max().unwrap_or(0);
        Ok(Some(Rivals {
            kernels,
            dfloat11: UnitDecoder::of(stream, set)?,
            zip: ZipKernels::of(stream, set, tallest)?,
            matvans: MatvansKernels::of(stream, set)?,
            tans: if cuda::tans::runs_on(arch) { Some(TansKernels::of(stream, set)?) } else { None },
        }))
    }

    /// Makes the subjects of all kernels at a shape, one after the other.
    pub(super) fn rivals<'a>(
        &'a self,
        rivals: &'a Rivals,
        weights: &'a Weights,
    ) -> Result<impl Iterator<Item = Result<Subject<'a>, BenchError>>, BenchError> {
        let shape = weights.shape;
        let zip = zipserv::encode(&weights.bytes, shape.0 as usize, shape.1 as usize);
        let zip = zip.map_err(not_storable("ZipServ", shape))?;
        let cases = rivals.kernels.iter().filter(move |(_, rival)| rival.supports(shape)).flat_map(|(name, rival)| {
            let details: Vec<u32> = match rival {
                Rival::Reduce => Vec::new(),
                // The smallest batch that uses this tile is one above the tile before.
                Rival::Gemm(tile) => {
                    let before = BATCH_TILES.into_iter().filter(|other| other < tile).max().unwrap_or(0);
                    vec![before + 1, tile - 1, *tile]
                }
                Rival::Tans => vec![128, 512],
                _ => vec![0],
            };
            details.into_iter().map(move |detail| (name.as_str(), *rival, detail))
        });
        Ok(cases.map(move |(name, rival, detail)| match rival {
            Rival::Dfloat11 => self.unit(name, rivals, weights),
            Rival::Decompress => self.decompress(name, rivals, weights, &zip),
            Rival::Gemm(_) | Rival::Reduce => self.zip_product(name, rivals, weights, &zip, detail),
            Rival::Matvans(layout) => self.int8(name, rivals, shape, Some(layout)),
            Rival::Dense => self.int8(name, rivals, shape, None),
            Rival::Tans => self.sum(name, rivals, shape, detail as usize),
            Rival::Plain => self.sum(name, rivals, shape, 0),
        }))
    }

    /// Makes a subject. `launch` fills a buffer of `bytes` and returns its address.
    fn rival<'a>(
        &'a self,
        name: &str,
        shape: GemmShape,
        bytes: usize,
        launch: impl FnMut() -> Result<u64, DeviceError> + 'a,
        check: impl Fn(&[u8]) -> Option<String> + 'a,
    ) -> Result<Subject<'a>, BenchError> {
        let (launch, device) = (RefCell::new(launch), self.kernels.device());
        let halves = (bytes / 2) as u32;
        let launch_and_copy = move |to: u64| {
            let from = (launch.borrow_mut())()?;
            // SAFETY: `from` is the buffer that was just filled, which the launch owns. `to` is one of the outputs
            // below, which live until the stream is synchronized. Both have `bytes` bytes.
            let (from, mut to) = unsafe {
                (
                    MatrixRef::from_raw(device, from, 1, halves, halves.into())?,
                    MatrixMut::from_raw(device, to, 1, halves, halves.into())?,
                )
            };
            to.copy_from(self.stream, from)
        };
        Ok(Subject {
            name: name.to_owned(),
            shape,
            outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
            bytes,
            before: None,
            launch: Box::new(launch_and_copy),
            check: Box::new(check),
        })
    }

    /// Returns `wrong`, or else an error if a kernel counted inputs that it could not decode.
    fn or_faults(&self, wrong: Option<String>, faults: Result<u32, DeviceError>) -> Option<String> {
        wrong.or_else(|| match faults {
            Ok(0) => None,
            Ok(faults) => Some(format!("the kernel counted {faults} faults in valid input")),
            Err(error) => Some(error.to_string()),
        })
    }

    fn unit<'a>(&'a self, name: &str, rivals: &'a Rivals, weights: &'a Weights) -> Result<Subject<'a>, BenchError> {
        let (stream, (n, k)) = (self.stream, weights.shape);
        let unit = Unit::encode(&weights.bytes, THREADS).map_err(not_storable("DFloat11", (n, k)))?;
        let unit = DeviceUnit::upload(stream, &unit).map_err(upload_error((n, k)))?;
        let mut out = DeviceBuffer::<u16>::zeroed(stream, weights.bytes.len() / 2)?;
        let launch = move || {
            out.fill_bytes(stream, 0xff)?;
            rivals.dfloat11.decode(stream, &unit, &mut out)?;
            Ok(out.address())
        };
        let check = move |got: &[u8]| self.or_faults(differs(got, &weights.bytes), rivals.dfloat11.faults(stream));
        self.rival(name, GemmShape { m: 0, n, k }, weights.bytes.len(), launch, check)
    }

    fn decompress<'a>(
        &'a self,
        name: &str,
        rivals: &'a Rivals,
        weights: &'a Weights,
        matrix: &zipserv::Encoded,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, (n, k)) = (self.stream, weights.shape);
        let matrix = DeviceZip::upload(stream, matrix).map_err(upload_error((n, k)))?;
        let mut out = DeviceMatrix::zeroed(stream, n, k)?;
        let launch = move || {
            out.fill_bytes(stream, 0xff)?;
            rivals.zip.decompress(stream, &matrix, &mut out)?;
            Ok(out.data().address())
        };
        let check = move |got: &[u8]| self.or_faults(differs(got, &weights.bytes), rivals.zip.faults(stream));
        self.rival(name, GemmShape { m: 0, n, k }, weights.bytes.len(), launch, check)
    }

    fn zip_product<'a>(
        &'a self,
        name: &str,
        rivals: &'a Rivals,
        weights: &'a Weights,
        matrix: &zipserv::Encoded,
        m: u32,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, (n, k)) = (self.stream, weights.shape);
        let shape = GemmShape { m, n, k };
        let matrix = DeviceZip::upload(stream, matrix).map_err(upload_error((n, k)))?;
        let x = weights.x.read(stream, 0, m as usize * k as usize)?;
        let x = DeviceMatrix::from_host(stream, m, k, &x)?;
        let mut y = DeviceMatrix::zeroed(stream, m, n)?;
        let bytes = y.bytes();
        let launch = move || {
            y.fill_bytes(stream, 0xff)?;
            rivals.zip.gemm(stream, &x, &matrix, &mut y)?;
            Ok(y.data().address())
        };
        let check = move |got: &[u8]| {
            let wrong = mismatch(got, shape, Epilogue::Store, &weights.exact, &weights.old);
            self.or_faults(wrong, rivals.zip.faults(stream))
        };
        self.rival(name, shape, bytes, launch, check)
    }

    /// Makes a subject of the product of an int8 matrix and a vector, from coded or plain values.
    fn int8<'a>(
        &'a self,
        name: &str,
        rivals: &'a Rivals,
        (n, k): (u32, u32),
        layout: Option<Layout>,
    ) -> Result<Subject<'a>, BenchError> {
        /// Few sums saturate.
        const SCALE: f32 = 0.01;
        let (stream, rows, cols) = (self.stream, n as usize, k as usize);
        let integers = |count: usize, seed: u64| -> Vec<i8> {
            let bits = halves(&crate::data::normal_bf16(count, 9.0, seed));
            bits.into_iter().map(|bits| f32::from_bits(u32::from(bits) << 16).round() as i8).collect()
        };
        let (values, x) = (integers(rows * cols, 31), integers(cols, 32));
        let sum = |row: &[i8]| row.iter().zip(&x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        let expected: Vec<u8> = values.chunks_exact(cols).map(|row| round(sum(row), SCALE).cast_unsigned()).collect();
        let encoded = layout.map(|layout| matvans::encode(&values, rows, cols, layout)).transpose();
        let encoded = encoded.map_err(not_storable("MatVANS", (n, k)))?;
        let coded = encoded.map(|matrix| DeviceMatvans::upload(stream, &matrix)).transpose()?;
        let (dense, x) = (DeviceBuffer::from_host(stream, &values)?, DeviceBuffer::from_host(stream, &x)?);
        let mut y = DeviceBuffer::<i8>::zeroed(stream, rows)?;
        let launch = move || {
            y.fill_bytes(stream, 0x55)?;
            match &coded {
                Some(matrix) => rivals.matvans.multiply(stream, matrix, &x, SCALE, &mut y)?,
                None => rivals.matvans.multiply_dense(stream, &dense, &x, SCALE, &mut y)?,
            }
            Ok(y.address())
        };
        let check = move |got: &[u8]| self.or_faults(differs(got, &expected), rivals.matvans.faults(stream));
        self.rival(name, GemmShape { m: 1, n, k }, rows, launch, check)
    }

    /// Makes a subject of the sum of two FP8 vectors of `n * k` bytes: in streams of `per_stream` bytes, or plain if 0.
    fn sum<'a>(
        &'a self,
        name: &str,
        rivals: &'a Rivals,
        (n, k): (u32, u32),
        per_stream: usize,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, bytes) = (self.stream, n as usize * k as usize);
        let Some(kernels) = &rivals.tans else { unreachable!("tANS kernels are listed only if they were loaded") };
        let [a, b] = [41, 42].map(|seed| float_weights(Float::E4M3, bytes, seed));
        let on_device = |bytes: &[u8]| DeviceBuffer::from_host(stream, bytes);
        let (plain_a, plain_b) = (on_device(&a)?, on_device(&b)?);
        let code = |bytes: &[u8]| -> Result<DeviceTans, BenchError> {
            let vector = tans::encode(bytes, per_stream, &tans::QWEN3_14B).map_err(not_storable("tANS", (n, k)))?;
            DeviceTans::upload(stream, &vector).map_err(upload_error((n, k)))
        };
        let coded = if per_stream > 0 { Some((code(&a)?, code(&b)?)) } else { None };
        let mut out = DeviceBuffer::<u8>::zeroed(stream, bytes)?;
        let launch = move || {
            // The value is NaN, so no sum of these vectors.
            out.fill_bytes(stream, 0xff)?;
            match &coded {
                Some((a, b)) => kernels.add(stream, a, b, &mut out)?,
                None => kernels.add_plain(stream, &plain_a, &plain_b, &mut out)?,
            }
            Ok(out.address())
        };
        let check = move |got: &[u8]| {
            // For each pair of bytes, the sum that was already found correct.
            let mut correct: Vec<Option<u8>> = vec![None; 1 << 16];
            let wrong = (0..bytes).find_map(|at| {
                let at_output = if per_stream > 0 { place(at, per_stream, bytes / per_stream) } else { at };
                let (a, b, got) = (a[at], b[at], got[at_output]);
                let accepted = &mut correct[usize::from(a) << 8 | usize::from(b)];
                if *accepted != Some(got) && !tans::oracle::is_sum(got, a, b) {
                    return Some(format!("byte {at}: {got:#04x} is not the sum of {a:#04x} and {b:#04x}"));
                }
                *accepted = Some(got);
                None
            });
            self.or_faults(wrong, kernels.faults(stream))
        };
        self.rival(name, GemmShape { m: per_stream as u32, n, k }, bytes, launch, check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unweight_codegen::spec::Arch;

    #[test]
    fn every_kernel_has_a_stress_problem() {
        for arch in Arch::ALL {
            for kernel in cuda::kernels(*arch) {
                let rival = Rival::of(&kernel);
                assert!(rival.is_some(), "no stress problem runs {kernel}");
                assert!(SHAPES.iter().filter(|shape| rival.is_some_and(|rival| rival.supports(**shape))).count() >= 3);
            }
        }
    }
}
