//! Every catalogued packed matmul on the GPU.
//!
//! - The tensor cores' operands equal the oracle's, bit for bit (variants with `_dump`).
//! - Results are within fp32 accumulation and one rounding of a double-precision product, at every edge of the batch
//!   tile.
//! - The same input gives the same bits in every run, and a chain under dependent launch gives the same bits as
//!   launches in sequence.
//! - Unvalidated heads and lists cause no access outside the buffers.
//!
//! Outputs start as NaN and are followed by guard bytes.

use std::sync::OnceLock;

use crate::harness::{Random, bf16, gpu, guard_is_intact, poison, refused, stream, value};
use rayon::prelude::*;
use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{Arch, Epilogue, GemmMmaSpec, GemmWgmmaSpec, Op, catalog},
};
use unweight_format::{
    Histogram, Matrix,
    raw::{PackedTensor, packed::pack},
};
use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceMatrix, DevicePacked, ExecContext, KernelSet, LaunchError, MatrixMut, MatrixRef,
    Stream,
    raw::{
        choose::{candidates::PackedUse, policy::PackedChooser},
        ops::gemm_packed::{PackedGemm, context_size},
    },
};

fn catalogued(dump: bool) -> Vec<VariantSpec> {
    let all = catalog::of::<GemmMmaSpec>().chain(catalog::of::<GemmWgmmaSpec>());
    // And the variants for GPUs without a copy engine.
    let of_family = |spec: &VariantSpec| matches!(spec.op, Op::GemmMma(_));
    let all = all.chain(catalog::asynchronous(Arch::Sm90a).filter(of_family));
    all.filter(|spec| traits(spec).dump == dump).collect()
}

struct Traits {
    batch_tile: u32,
    escapes: bool,
    epilogue: Epilogue,
    dump: bool,
}

fn traits(spec: &VariantSpec) -> Traits {
    let (batch_tile, escapes, epilogue, dump) = match spec.op {
        Op::GemmMma(op) => (op.batch_tile.get(), op.escapes, op.epilogue, op.dump),
        Op::GemmWgmma(op) => (op.batch_tile.get(), op.escapes, op.epilogue, op.dump),
        _ => panic!("{spec} is not a packed matmul"),
    };
    Traits { batch_tile, escapes, epilogue, dump }
}

/// Returns a matrix whose exponents are in a window of 16, except for one element in `one_in` (0: none): zeros,
/// subnormals, larger and smaller numbers. If there are any, row 5 has a run of these, longer than a warp.
pub fn weights(n: usize, k: usize, one_in: usize, seed: u64) -> Vec<u16> {
    let mut rng = Random::new(seed);
    (0..n * k)
        .map(|at| {
            let outside =
                one_in > 0 && (rng.below(one_in as u64) == 0 || at / k == 5 && at % k < (n * k / 600).min(40));
            let exponent = if outside { [0, 90, 100, 130][rng.below(4) as usize] } else { 108 + rng.below(16) as u16 };
            // Half of the elements with exponent 0 are zeros, the others subnormals.
            let mantissa = if rng.below(2) == 0 { 0x7f } else { 0 };
            (rng.bits() as u16 & (0x8000 | mantissa)) | exponent << 7
        })
        .collect()
}

/// A weight with inputs, and their product in double precision.
struct Case {
    n: usize,
    k: usize,
    tensor: PackedTensor<Vec<u8>>,
    x: Vec<u16>,
    /// For each element of Y, the product and the sum of the magnitudes of its terms.
    exact: Vec<(f64, f64)>,
}

/// Batches of every case; more than the largest batch tile.
const ROWS: usize = 530;

impl Case {
    fn new(n: usize, k: usize, one_in: usize, seed: u64) -> Self {
        let w = weights(n, k, one_in, seed);
        let bytes: &[u8] = bytemuck::cast_slice(&w);
        let tensor = pack(Matrix::new(bytes, n, k).unwrap(), &Histogram::of(bytes)).unwrap();
        let mut rng = Random::new(seed ^ 0x5555);
        let x: Vec<u16> = (0..ROWS * k).map(|_| bf16(rng.normal())).collect();
        let (xs, ws): (Vec<f64>, Vec<f64>) =
            (x.iter().map(|b| value(*b)).collect(), w.iter().map(|b| value(*b)).collect());
        let exact = (0..ROWS * n)
            .into_par_iter()
            .map(|at| {
                let terms = xs[at / n * k..][..k].iter().zip(&ws[at % n * k..][..k]).map(|(x, w)| x * w);
                terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
            })
            .collect();
        Self { n, k, tensor, x, exact }
    }

    fn input(&self, stream: &Stream, m: u32) -> DeviceMatrix {
        DeviceMatrix::from_host(stream, m, self.k as u32, &self.x[..m as usize * self.k]).unwrap()
    }

    /// Returns the number of columns of Y.
    fn columns(&self, epilogue: Epilogue) -> usize {
        if epilogue == Epilogue::SiluMul { self.n / 2 } else { self.n }
    }

    /// Counts elements of `y` whose error exceeds one rounding plus fp32 accumulation. `before` is Y before an
    /// addition.
    fn mismatches(&self, y: &[u16], epilogue: Epilogue, before: &[u16]) -> usize {
        let columns = self.columns(epilogue);
        let wrong = |at: usize, got: u16| {
            let (row, column) = (at / columns, at % columns);
            let (sum, slack) = match epilogue {
                Epilogue::Store => (self.exact[at].0, self.exact[at].1 * 1e-6),
                Epilogue::StoreAdd => {
                    let old = value(before[at]);
                    (self.exact[at].0 + old, (self.exact[at].1 + old.abs()) * 1e-6)
                }
                // Rows of gate and up are interleaved. The slope of silu is at most 1.1.
                Epilogue::SiluMul => {
                    let turn = Epilogue::GATE_ROWS as usize;
                    let gate_at = row * self.n + column / turn * 2 * turn + column % turn;
                    let ((gate, gate_size), (up, up_size)) = (self.exact[gate_at], self.exact[gate_at + turn]);
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

/// Returns cases with odd numbers of tiles and of row blocks per block, with and without escapes.
fn cases() -> &'static [Case; 3] {
    static CASES: OnceLock<[Case; 3]> = OnceLock::new();
    CASES.get_or_init(|| [Case::new(320, 448, 300, 1), Case::new(1088, 640, 1000, 2), Case::new(320, 448, 0, 3)])
}

fn ready(kernels: &KernelSet, specs: &[VariantSpec]) {
    kernels.prepare(specs, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
}

/// Returns an execution context for launches of this variant up to this problem.
pub fn context(stream: &Stream, spec: &VariantSpec, problem: GemmShape) -> ExecContext {
    let sms = stream.device().info().sms;
    ExecContext::new(stream, context_size(spec, problem, sms).unwrap()).unwrap()
}

fn matmul(kernels: &KernelSet, spec: &VariantSpec) -> PackedGemm {
    PackedGemm::new(kernels.get(spec).unwrap_or_else(|error| panic!("{error}"))).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_at_every_edge_of_its_batch_tile() {
    let kernels = gpu();
    let stream = stream(kernels);
    let specs = catalogued(false);
    ready(kernels, &specs);
    for case in cases() {
        let w = DevicePacked::upload(&stream, &case.tensor).unwrap();
        let problem = |m| GemmShape { m, n: case.n as u32, k: case.k as u32 };
        let mut rng = Random::new(99);
        let before: Vec<u16> = (0..ROWS * case.n).map(|_| bf16(rng.normal())).collect();
        let bias = DeviceMatrix::from_host(&stream, 1, case.n as u32, &before[..case.n]).unwrap();
        let bias_rows = before[..case.n].repeat(ROWS);
        for spec in &specs {
            let traits = traits(spec);
            if w.has_escapes() && !traits.escapes {
                continue;
            }
            let tile = traits.batch_tile;
            let mut ctx = context(&stream, spec, problem(ROWS as u32));
            let matmul = matmul(kernels, spec);
            for m in [1, tile - 1, tile, tile + 1, 2 * tile + 7] {
                let x = case.input(&stream, m);
                let columns = case.columns(traits.epilogue);
                let mut y = DeviceMatrix::zeroed(&stream, m, columns as u32).unwrap();
                let adds = traits.epilogue == Epilogue::StoreAdd;
                // A variant that adds, adds Y or a bias.
                for with_bias in [false, true].into_iter().take(1 + usize::from(adds)) {
                    let mut outputs = Vec::new();
                    for _ in 0..2 {
                        poison(&stream, &mut y);
                        if with_bias {
                            matmul.enqueue_with_bias(&mut ctx, x.view(), &w, bias.view(), y.view_mut()).unwrap();
                        } else {
                            if adds {
                                y.write(&stream, 0, &before[..m as usize * columns]).unwrap();
                            }
                            matmul.enqueue(&mut ctx, x.view(), &w, y.view_mut()).unwrap();
                        }
                        outputs.push(y.to_host(&stream).unwrap_or_else(|error| panic!("{spec} m = {m}: {error}")));
                        guard_is_intact(&stream, &y, &spec.to_string());
                    }
                    let added = if with_bias { &bias_rows } else { &before };
                    let wrong = case.mismatches(&outputs[0], traits.epilogue, added);
                    assert_eq!(wrong, 0, "{spec} m = {m} {} x {}, bias: {with_bias}", case.n, case.k);
                    assert!(outputs[0] == outputs[1], "{spec} m = {m}: two runs differ");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn operands_are_the_weights_bit_for_bit() {
    let kernels = gpu();
    let stream = stream(kernels);
    let specs = catalogued(true);
    ready(kernels, &specs);
    let case = &cases()[0];
    let w = DevicePacked::upload(&stream, &case.tensor).unwrap();
    for spec in &specs {
        let (m, n, k) = (3, case.n as u32, case.k as u32);
        let mut ctx = context(&stream, spec, GemmShape { m, n, k });
        let mut y = DeviceMatrix::zeroed(&stream, m, n).unwrap();
        let x = case.input(&stream, m);
        matmul(kernels, spec).enqueue(&mut ctx, x.view(), &w, y.view_mut()).unwrap();
        let bytes = ctx.partials().to_host(&stream).unwrap();
        let dumped: Vec<u32> = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        for tile in 0..case.tensor.grid().tiles() {
            for (i, registers) in case.tensor.operands(tile).iter().enumerate() {
                let (block, step, lane) = (i / 128, i / 32 % 4, i % 32);
                for (register, expected) in registers.iter().enumerate() {
                    let got = dumped[((tile * 4 + block) * 16 + step * 4 + register) * 32 + lane];
                    let position = format!("tile {tile} block {block} step {step} lane {lane} register {register}");
                    assert_eq!(got, *expected, "{spec}: {position}");
                }
            }
        }
    }
}

/// A chain `x -> W x -> W (W x) ...` in a graph: under dependent launch, each kernel starts while the kernel that makes
/// its input still runs.
#[test]
#[ignore = "needs a GPU"]
fn dependent_launches_wait_for_their_input() {
    const LINKS: usize = 24;
    let kernels = gpu();
    let stream = stream(kernels);
    let (n, info) = (1024usize, kernels.device().info());
    // Small weights keep a chain of products finite.
    let mut rng = Random::new(5);
    let w: Vec<u16> = (0..n * n).map(|_| bf16(rng.normal() / 32.0)).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&w);
    let tensor = pack(Matrix::new(bytes, n, n).unwrap(), &Histogram::of(bytes)).unwrap();
    let w = DevicePacked::upload(&stream, &tensor).unwrap();
    let dispatch = PackedChooser::of(info.into(), &info.name);
    for m in [1, 8, 16, 31, 64, 100, 256, 300] {
        let problem = GemmShape { m, n: n as u32, k: n as u32 };
        let first: Vec<u16> = (0..m as usize * n).map(|_| bf16(rng.normal())).collect();
        let results: Vec<Vec<u16>> = [false, true]
            .into_iter()
            .map(|pdl| {
                let packed_use = PackedUse { escapes: true, pdl, epilogue: Epilogue::Store };
                // The same shape of kernel in both cases, so that sums have the same order.
                let shape = dispatch.choose(problem, PackedUse { pdl: true, ..packed_use }).unwrap();
                let spec = packed_use.of(shape).unwrap();
                let matmul = matmul(kernels, &spec);
                let mut ctx = context(&stream, &spec, problem);
                let mut x = DeviceMatrix::from_host(&stream, m, n as u32, &first).unwrap();
                let mut y = DeviceMatrix::zeroed(&stream, m, n as u32).unwrap();
                poison(&stream, &mut y);
                let graph = stream
                    .capture(|| {
                        for link in 0..LINKS {
                            let (from, to) = if link % 2 == 0 { (&x, &mut y) } else { (&y, &mut x) };
                            matmul.enqueue(&mut ctx, from.view(), &w, to.view_mut())?;
                        }
                        Ok(())
                    })
                    .unwrap();
                for _ in 0..3 {
                    x.write(&stream, 0, &first).unwrap();
                    // SAFETY: all buffers are alive.
                    unsafe { graph.launch() }.unwrap();
                }
                x.to_host(&stream).unwrap()
            })
            .collect();
        assert!(results[0].iter().all(|bits| value(*bits).is_finite()) && results[0].iter().any(|bits| *bits != 0));
        assert!(results[0] == results[1], "m = {m}: a pdl chain differs from an ordinary one");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn hostile_escapes_stay_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = &cases()[0];
    let specs: Vec<VariantSpec> = catalogued(false).into_iter().filter(|spec| traits(spec).escapes).collect();
    ready(kernels, &specs);
    let stored = case.tensor.escapes().len() / 4;
    let words = |bytes: &[u8]| -> Vec<u32> {
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let lists = words(case.tensor.escapes());
    let mut rng = Random::new(17);
    for kept in [0, 1, stored / 2, stored] {
        let heads: Vec<u32> = (0..case.tensor.grid().tiles() * 4)
            .map(|_| {
                let index = if rng.below(2) == 0 { rng.bits() as u32 } else { rng.below((stored + 2) as u64) as u32 };
                index | (rng.below(2) as u32) << 31
            })
            .collect();
        let w = DevicePacked::new(
            case.tensor.grid(),
            case.tensor.window(),
            DeviceBuffer::from_host(&stream, case.tensor.packed()).unwrap(),
            DeviceBuffer::from_host(&stream, &heads).unwrap(),
            DeviceBuffer::from_host(&stream, &lists[..kept]).unwrap(),
        )
        .unwrap();
        for spec in &specs {
            let (m, columns) = (traits(spec).batch_tile, case.columns(traits(spec).epilogue));
            let mut ctx = context(&stream, spec, GemmShape { m, n: case.n as u32, k: case.k as u32 });
            let mut y = DeviceMatrix::zeroed(&stream, m, columns as u32).unwrap();
            poison(&stream, &mut y);
            let matmul = matmul(kernels, spec);
            let x = case.input(&stream, m);
            matmul.enqueue(&mut ctx, x.view(), &w, y.view_mut()).unwrap();
            stream.synchronize().unwrap_or_else(|error| panic!("{spec}: {error}"));
            guard_is_intact(&stream, &y, &spec.to_string());
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn mismatched_operands_are_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = &cases()[0];
    let w = DevicePacked::upload(&stream, &case.tensor).unwrap();
    let packed_use = PackedUse { escapes: false, pdl: false, epilogue: Epilogue::Store };
    let problem = GemmShape { m: 4, n: case.n as u32, k: case.k as u32 };
    // A variant without escapes, independent of dispatch.
    let info = kernels.device().info();
    let plain = |spec: &VariantSpec| {
        let blocks = |spec: &VariantSpec| Plan::new(spec).ok()?.launch.grid.blocks(problem, info.sms);
        matches!(spec.op, Op::GemmMma(op) if !op.escapes && !op.dump) && blocks(spec).is_some()
    };
    let spec = catalog::on::<GemmMmaSpec>(info.arch).find(plain).and_then(|spec| packed_use.of(spec)).unwrap();
    let mut ctx = context(&stream, &spec, problem);
    let mut y = DeviceMatrix::zeroed(&stream, 4, case.n as u32).unwrap();
    let x = case.input(&stream, 4);
    let plain = matmul(kernels, &spec);
    assert_eq!(refused(plain.enqueue(&mut ctx, x.view(), &w, y.view_mut())), LaunchError::Escapes);
    let matmul = matmul(kernels, &PackedUse { escapes: true, ..packed_use }.of(spec).unwrap());
    let mut narrow = DeviceMatrix::zeroed(&stream, 4, case.n as u32 - 64).unwrap();
    let shape = refused(matmul.enqueue(&mut ctx, x.view(), &w, narrow.view_mut()));
    assert!(matches!(shape, LaunchError::Shape { .. }), "{shape}");
    // Rows with gaps in between.
    let (columns, pitch) = (case.n as u32, case.n as u64 + 8);
    let mut wide = DeviceBuffer::zeroed(&stream, 4 * pitch as usize).unwrap();
    let gaps = MatrixMut::new(&mut wide, 4, columns, pitch).unwrap();
    assert!(matches!(refused(matmul.enqueue(&mut ctx, x.view(), &w, gaps)), LaunchError::Pitch { operand: "y", .. }));

    // Borrowed memory, as another framework would pass it.
    let (device, at, in_w) = (kernels.device(), x.data().address(), w.packed().address());
    // SAFETY: the addresses are inside the allocations of `x` and `w`, which live until the end of the test; every
    // launch fails.
    let (odd, over, inside) = unsafe {
        (
            MatrixRef::from_raw(device, at + 2, 3, case.k as u32, case.k as u64).unwrap(),
            MatrixMut::from_raw(device, at, 4, columns, columns.into()).unwrap(),
            MatrixMut::from_raw(device, in_w, 4, columns, columns.into()).unwrap(),
        )
    };
    let mut three = DeviceMatrix::zeroed(&stream, 3, columns).unwrap();
    let unaligned = refused(matmul.enqueue(&mut ctx, odd, &w, three.view_mut()));
    assert!(matches!(unaligned, LaunchError::Alignment { operand: "x", bytes: 16, .. }), "{unaligned}");
    let overlap = |other| LaunchError::Overlap { written: "y", other };
    assert_eq!(refused(matmul.enqueue(&mut ctx, x.view(), &w, over)), overlap("x"));
    assert_eq!(refused(matmul.enqueue(&mut ctx, x.view(), &w, inside)), overlap("packed"));
    stream.synchronize().unwrap();
}

/// X inside a wider matrix, so that its rows have gaps.
#[test]
#[ignore = "needs a GPU"]
fn rows_of_x_may_be_apart() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = &cases()[0];
    let w = DevicePacked::upload(&stream, &case.tensor).unwrap();
    let (m, n, k, pitch) = (70u32, case.n as u32, case.k as u32, case.k + 24);
    let problem = GemmShape { m, n, k };
    let mut apart = vec![0x7fc0u16; m as usize * pitch];
    for (row, from) in apart.chunks_exact_mut(pitch).zip(case.x.chunks_exact(case.k)) {
        row[..case.k].copy_from_slice(from);
    }
    let apart = DeviceBuffer::from_host(&stream, &apart).unwrap();
    let info = kernels.device().info();
    let chooser = PackedChooser::of(info.into(), &info.name);
    for m in [1, 33, m] {
        let packed_use = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::Store };
        let spec = chooser.choose(GemmShape { m, ..problem }, packed_use).unwrap();
        let (matmul, mut ctx) = (matmul(kernels, &spec), context(&stream, &spec, problem));
        let mut y = DeviceMatrix::zeroed(&stream, m, n).unwrap();
        poison(&stream, &mut y);
        let x = MatrixRef::new(&apart, m, k, pitch as u64).unwrap();
        matmul.enqueue(&mut ctx, x, &w, y.view_mut()).unwrap();
        let got = y.to_host(&stream).unwrap();
        assert_eq!(case.mismatches(&got, Epilogue::Store, &[]), 0, "{spec} m = {m}");
        guard_is_intact(&stream, &y, &spec.to_string());
    }
}

/// An execution context that is too small for stream-K is an error, and nothing is written. Once it is reserved, the
/// same launch runs.
#[test]
#[ignore = "needs a GPU"]
fn too_small_workspace_is_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = &cases()[1];
    let w = DevicePacked::upload(&stream, &case.tensor).unwrap();
    let spec = "uw_sm90a_gemm_wgmma_b128_g2p6_streamk_esc_store".parse().unwrap();
    let (m, matmul) = (200, matmul(kernels, &spec));
    let (x, mut y) = (case.input(&stream, m), DeviceMatrix::zeroed(&stream, m, case.n as u32).unwrap());
    let need = matmul.context_size(m, &w);
    assert!(need.workspace_bytes > 0 && need.counters > 0);
    let mut ctx = ExecContext::new(&stream, ContextSize::default()).unwrap();
    poison(&stream, &mut y);
    let have = ctx.size();
    let small = refused(matmul.enqueue(&mut ctx, x.view(), &w, y.view_mut()));
    assert_eq!(small, LaunchError::ContextTooSmall { need, have });
    assert!(y.to_host(&stream).unwrap().iter().all(|bits| *bits == 0xffff), "a refused launch has written");
    let captured = stream.capture(|| ctx.reserve(need));
    assert_eq!(captured.err().and_then(|error| error.launch_error().cloned()), Some(LaunchError::Capturing));
    ctx.reserve(need).unwrap();
    matmul.enqueue(&mut ctx, x.view(), &w, y.view_mut()).unwrap();
    assert_eq!(case.mismatches(&y.to_host(&stream).unwrap(), Epilogue::Store, &[]), 0);
}
