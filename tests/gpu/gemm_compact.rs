//! Every catalogued compact matmul on the GPU.
//!
//! - Every weight is restored bit for bit, except for the sign of zero, when each row of X selects one column of W.
//! - Results are within fp32 accumulation and one rounding of a double-precision product, at every edge of the batch
//!   tile.
//! - The same input gives the same bits, run after run, and with dependent launch the same as without.
//!
//! Outputs start as NaN and are followed by guard bytes.

use crate::harness::{Random, bf16, gpu, guard_is_intact, poison, refused, stream, value};
use unweight_codegen::{
    VariantSpec,
    spec::{Epilogue, GemmCompactSpec, Op, catalog},
};
use unweight_format::{Histogram, Matrix, raw::compact::encode};
use unweight_rt::{
    DeviceMatrix, KernelSet, LaunchError, Stream,
    raw::{ops::gemm_compact::CompactGemm, weight::DeviceCompact},
};

fn op(spec: &VariantSpec) -> GemmCompactSpec {
    let Op::GemmCompact(op) = spec.op else { panic!("{spec} does not read the compact encoding") };
    op
}

/// Weights with inputs.
struct Case {
    n: usize,
    k: usize,
    weights: Vec<u16>,
    x: Vec<u16>,
}

/// Batches of every case; more than the largest batch tile.
const ROWS: usize = 80;

impl Case {
    /// Makes weights of which one in 700 is far outside the window: zeros, subnormals, larger and smaller numbers. Row
    /// 5 has a run of these, longer than a warp.
    fn new(n: usize, k: usize, seed: u64) -> Self {
        let mut rng = Random::new(seed);
        let weights = (0..n * k)
            .map(|at| {
                let outside = at / k == 5 && at % k < (n * k / 1500).min(40) || rng.below(700) == 0;
                let bits = bf16(rng.normal() / 50.0);
                if outside { bits & 0x807f | [0, 70, 80, 160][rng.below(4) as usize] << 7 } else { bits }
            })
            .collect();
        let x = (0..ROWS * k).map(|_| bf16(rng.normal())).collect();
        Self { n, k, weights, x }
    }

    fn upload(&self, stream: &Stream) -> DeviceCompact {
        let bytes: &[u8] = bytemuck::cast_slice(&self.weights);
        let host = encode(Matrix::new(bytes, self.n, self.k).unwrap(), &Histogram::of(bytes)).unwrap();
        assert!(host.escape_count() > 0, "the data has no escapes");
        DeviceCompact::upload(stream, &host).unwrap()
    }

    fn columns(&self, epilogue: Epilogue) -> usize {
        if epilogue == Epilogue::SiluMul { self.n / 2 } else { self.n }
    }

    /// Returns each element of the product, with the sum of the magnitudes of its terms.
    fn exact(&self) -> Vec<(f64, f64)> {
        let values = |bits: &[u16]| bits.iter().map(|bits| value(*bits)).collect::<Vec<f64>>();
        let (x, w) = (values(&self.x), values(&self.weights));
        let element = |at: usize| {
            let terms = x[at / self.n * self.k..][..self.k].iter().zip(&w[at % self.n * self.k..][..self.k]);
            terms.fold((0.0, 0.0), |(sum, size), (x, w)| (sum + x * w, size + (x * w).abs()))
        };
        (0..ROWS * self.n).map(element).collect()
    }

    /// Counts elements of `y` whose error exceeds one rounding plus fp32 accumulation. `before` is Y before an
    /// addition.
    fn mismatches(&self, exact: &[(f64, f64)], y: &[u16], epilogue: Epilogue, before: &[u16]) -> usize {
        let columns = self.columns(epilogue);
        let wrong = |at: usize, got: u16| {
            let (sum, slack) = match epilogue {
                Epilogue::Store => (exact[at].0, exact[at].1 * 1e-6),
                Epilogue::StoreAdd => {
                    let old = value(before[at]);
                    (exact[at].0 + old, (exact[at].1 + old.abs()) * 1e-6)
                }
                // Rows of gate and up are interleaved. The slope of silu is at most 1.1.
                Epilogue::SiluMul => {
                    let (row, column, turn) = (at / columns, at % columns, Epilogue::GATE_ROWS as usize);
                    let gate_at = row * self.n + column / turn * 2 * turn + column % turn;
                    let ((gate, gate_size), (up, up_size)) = (exact[gate_at], exact[gate_at + turn]);
                    let sum = gate / (1.0 + (-gate).exp()) * up;
                    (sum, (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * 1e-6 + sum.abs() * 1e-5)
                }
            };
            let error = (value(got) - sum).abs();
            error.is_nan() || error > sum.abs() / 256.0 + slack
        };
        y.iter().enumerate().filter(|(at, got)| wrong(*at, **got)).count()
    }
}

fn catalogued(kernels: &KernelSet) -> Vec<VariantSpec> {
    let specs: Vec<VariantSpec> = catalog::of::<GemmCompactSpec>().collect();
    kernels.prepare(&specs, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    specs
}

fn matmul(kernels: &KernelSet, spec: &VariantSpec) -> CompactGemm {
    CompactGemm::new(kernels.get(spec).unwrap_or_else(|error| panic!("{error}"))).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn every_weight_round_trips() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = Case::new(192, 448, 3);
    let w = case.upload(&stream);
    for spec in catalogued(kernels).iter().filter(|spec| op(spec).epilogue == Epilogue::Store) {
        let m = op(spec).batch_tile.get() as usize;
        let matmul = matmul(kernels, spec);
        for first in (0..case.k).step_by(m) {
            let mut x = vec![0u16; m * case.k];
            (0..m).for_each(|row| x[row * case.k + first + row] = 0x3f80);
            let x = DeviceMatrix::from_host(&stream, m as u32, case.k as u32, &x).unwrap();
            let mut y = DeviceMatrix::zeroed(&stream, m as u32, case.n as u32).unwrap();
            poison(&stream, &mut y);
            matmul.enqueue(&stream, x.view(), &w, y.view_mut()).unwrap();
            for (at, got) in y.to_host(&stream).unwrap().into_iter().enumerate() {
                let (row, column) = (at % case.n, first + at / case.n);
                let weight = case.weights[row * case.k + column];
                assert!(value(got) == value(weight), "{spec}: [{row}, {column}] is {got:04x}, not {weight:04x}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_at_every_edge_of_its_batch_tile() {
    let kernels = gpu();
    let stream = stream(kernels);
    let specs = catalogued(kernels);
    // A row and a column of tiles; odd numbers of tiles; more tiles than a warp reads start offsets of at once.
    for case in [
        Case::new(64, 512, 1),
        Case::new(512, 64, 6),
        Case::new(320, 448, 2),
        Case::new(1088, 640, 3),
        Case::new(64, 64 * 531, 4),
        // Several rows of tiles per persistent cluster.
        Case::new(64 * 66 * 4 - 64, 192, 5),
    ] {
        let w = case.upload(&stream);
        let exact = case.exact();
        let mut rng = Random::new(99);
        let before: Vec<u16> = (0..ROWS * case.n).map(|_| bf16(rng.normal())).collect();
        // The ordinary variant's output by shape and batch, for comparison with the dependent one.
        let mut ordinary = std::collections::BTreeMap::new();
        for spec in &specs {
            let GemmCompactSpec { epilogue, pdl, .. } = op(spec);
            let tile = op(spec).batch_tile.get();
            let matmul = matmul(kernels, spec);
            for m in [1, tile - 1, tile, tile + 1, 2 * tile + 7] {
                let x = DeviceMatrix::from_host(&stream, m, case.k as u32, &case.x[..m as usize * case.k]).unwrap();
                let columns = case.columns(epilogue);
                let mut y = DeviceMatrix::zeroed(&stream, m, columns as u32).unwrap();
                let mut outputs = Vec::new();
                for _ in 0..2 {
                    poison(&stream, &mut y);
                    if epilogue == Epilogue::StoreAdd {
                        y.write(&stream, 0, &before[..m as usize * columns]).unwrap();
                    }
                    matmul.enqueue(&stream, x.view(), &w, y.view_mut()).unwrap();
                    outputs.push(y.to_host(&stream).unwrap_or_else(|error| panic!("{spec} m = {m}: {error}")));
                    guard_is_intact(&stream, &y, &spec.to_string());
                }
                let wrong = case.mismatches(&exact, &outputs[0], epilogue, &before);
                assert_eq!(wrong, 0, "{spec} m = {m} {} x {}", case.n, case.k);
                assert!(outputs[0] == outputs[1], "{spec} m = {m}: two runs differ");
                let key = (GemmCompactSpec { pdl: false, ..op(spec) }, m);
                let first = ordinary.entry(key).or_insert_with(|| outputs[0].clone());
                assert!(*first == outputs[0], "{spec} m = {m}: pdl = {pdl} gives other bits");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn mismatched_operands_are_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = Case::new(128, 192, 5);
    let w = case.upload(&stream);
    let matmul = matmul(kernels, &"uw_sm90a_gemm_compact_b8_w8p1c1_store".parse().unwrap());
    let x = DeviceMatrix::from_host(&stream, 4, 192, &case.x[..4 * 192]).unwrap();
    let mut narrow = DeviceMatrix::zeroed(&stream, 4, 64).unwrap();
    let shape = refused(matmul.enqueue(&stream, x.view(), &w, narrow.view_mut()));
    assert!(matches!(shape, LaunchError::Shape { .. }), "{shape}");
    let other = kernels.get(&"uw_sm90a_gemm_mma_b8_r2w8p3c1_esc_store".parse().unwrap()).unwrap();
    assert!(matches!(refused(CompactGemm::new(other)), LaunchError::Family { .. }));
}
