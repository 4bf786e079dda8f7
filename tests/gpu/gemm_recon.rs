//! Every catalogued matmul from exponents or palette indices (`gemm_recon`, `gemm_join`) on the GPU: exact where
//! possible, close to a double-precision reference, close to cuBLAS.
//!
//! - One-hot rows of X select single weights, so Y is W^T bit for bit. This covers every reconstructed weight of every
//!   variant.
//! - Random X at batches around every tile boundary, against float64.
//! - Outputs start as NaN and are followed by guard bytes.

use crate::harness::{Random, bf16, context, gpu, guard_is_intact, poison, refused, stream, value};
use rayon::prelude::*;
use std::collections::BTreeSet;
use unweight_bench::{halves, normal_bf16, relative_error};
use unweight_codegen::{
    VariantSpec,
    plan::GemmShape,
    spec::{Arch, DecodeOutput, Epilogue, JoinSource, Op, WeightSource, catalog},
};
use unweight_format::{
    CodeLimit, Matrix,
    raw::{HuffmanTensor, huffman},
};
use unweight_rt::{
    DeviceBuffer, DeviceError, DeviceMatrix, ExecContext, KernelSet, LaunchError, Stream,
    raw::{
        choose::{
            graph,
            recon::{Source, candidates},
        },
        device::LaunchMode,
        exec::cublas::Cublas,
        ops::{
            decode_huffman::{Decoder, output_bytes},
            gemm_recon::Matmul,
        },
        weight::{DeviceHuffman, DevicePalette},
    },
};

const BATCHES: [u32; 10] = [1, 2, 17, 64, 65, 128, 129, 256, 1000, 1024];
/// Batches at the edges of the batch tiles of `gemm_join`.
const JOIN_BATCHES: [u32; 10] = [1, 5, 8, 9, 16, 17, 31, 33, 64, 129];
/// A multiple of 64 times 1, 2, 3 and 4.
const N: usize = 768;
const K: usize = 512;

/// Returns finite weights whose tile with the most verbatim rows has exactly `verbatim`.
///
/// Sixteen exponents occur everywhere; a row with a seventeenth is verbatim. The sixteen span 2^-19 to 2^-4, so that
/// one-hot rows cover every palette entry.
fn weights(n: usize, k: usize, verbatim: u32, seed: u64) -> Vec<u8> {
    let mut rng = Random::new(seed);
    let mut bits: Vec<u16> =
        (0..n * k).map(|_| (rng.bits() as u16 & 0x807f) | (108 + rng.below(16) as u16) << 7).collect();
    if verbatim > 0 {
        for tile in 0..(n / 64) * (k / 64) {
            // Counts vary from tile to tile; the first and the last have the maximum.
            let last = (n / 64) * (k / 64) - 1;
            let count = if tile == 0 || tile == last {
                verbatim as usize
            } else {
                rng.below((verbatim as usize + 1) as u64) as usize
            };
            let (row, col) = (tile / (k / 64) * 64, tile % (k / 64) * 64);
            let mut rows: Vec<usize> = (0..64).collect();
            for i in 0..count {
                let j = i + (rng.below((64 - i) as u64) as usize);
                rows.swap(i, j);
                let exponent: u16 = if rng.below(2) == 0 { 125 } else { 90 };
                let at = (row + rows[i]) * k + col + (rng.below(64) as usize);
                bits[at] = (bits[at] & 0x807f) | exponent << 7;
            }
        }
    }
    bits.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// Weights in every encoding that a matmul reads.
struct Encodings {
    tensor: HuffmanTensor<Vec<u8>>,
    huffman: DeviceHuffman,
    palette: DevicePalette,
    exponents: DeviceBuffer<u8>,
    /// Decoded on the device: their metadata has word offsets, unlike that of `palette`.
    indices: DeviceBuffer<u8>,
    whole: DeviceMatrix,
}

fn encodings(kernels: &KernelSet, stream: &Stream, bytes: &[u8], n: usize, k: usize) -> Encodings {
    let tensor = huffman::encode(Matrix::new(bytes, n, k).unwrap(), CodeLimit::DEFAULT).unwrap();
    let huffman = DeviceHuffman::upload(stream, &tensor).unwrap();
    let palette = DevicePalette::upload(stream, &huffman::transcode(&tensor).unwrap()).unwrap();
    let decoder = |output| {
        let spec = graph::decoder(Arch::Sm90a, output, huffman.code_bits()).unwrap();
        Decoder::new(kernels.get(&spec).unwrap_or_else(|error| panic!("{error}"))).unwrap()
    };
    let mut exponents = DeviceBuffer::zeroed(stream, output_bytes(tensor.grid(), DecodeOutput::Exponent)).unwrap();
    let mut ctx = context(stream);
    decoder(DecodeOutput::Exponent).exponent(&mut ctx, &huffman, &mut exponents).unwrap();
    ctx.synchronize().unwrap();
    let mut indices = DeviceBuffer::zeroed(stream, output_bytes(tensor.grid(), DecodeOutput::Palette)).unwrap();
    decoder(DecodeOutput::Palette).palette(&mut ctx, &huffman, &mut indices).unwrap();
    ctx.synchronize().unwrap();
    let whole = DeviceMatrix::from_host(stream, n as u32, k as u32, &halves(bytes)).unwrap();
    Encodings { tensor, huffman, palette, exponents, indices, whole }
}

/// The properties of a variant that its operands depend on.
struct Traits {
    is_palette: bool,
    /// The maximum number of verbatim rows of a tile.
    verbatim_rows: u32,
    adds: bool,
    splits: u32,
    batches: [u32; 10],
}

/// Returns the properties of a matmul from exponents or palette indices; `None` for other variants.
fn try_traits(spec: &VariantSpec) -> Option<Traits> {
    Some(match spec.op {
        Op::GemmRecon(op) => Traits {
            is_palette: op.source != WeightSource::Exponent,
            verbatim_rows: op.verbatim_rows(),
            adds: op.epilogue == Epilogue::StoreAdd,
            splits: op.splits.get(),
            batches: BATCHES,
        },
        Op::GemmJoin(op) => {
            let is_palette = op.source == JoinSource::Palette;
            Traits {
                is_palette,
                verbatim_rows: if is_palette { 64 } else { 0 },
                adds: op.epilogue == Epilogue::StoreAdd,
                splits: op.cluster.get(),
                batches: JOIN_BATCHES,
            }
        }
        _ => return None,
    })
}

fn traits(spec: &VariantSpec) -> Traits {
    try_traits(spec).unwrap_or_else(|| panic!("{spec} does not read exponents or palette indices"))
}

fn adds(spec: &VariantSpec) -> bool {
    traits(spec).adds
}

/// Runs a variant on the encodings. `stored` selects the stored palette instead of the decoded one.
fn run(
    kernels: &KernelSet,
    stream: &Stream,
    spec: &VariantSpec,
    encodings: &Encodings,
    stored: bool,
    x: &DeviceMatrix,
    y: &mut DeviceMatrix,
) {
    let matmul = Matmul::new(kernels.get(spec).unwrap_or_else(|error| panic!("{error}"))).unwrap();
    enqueue(&matmul, spec, &mut context(stream), (encodings, stored), x, y).unwrap_or_else(|error| panic!("{error}"));
}

fn enqueue(
    matmul: &Matmul,
    spec: &VariantSpec,
    ctx: &mut ExecContext,
    (encodings, stored): (&Encodings, bool),
    x: &DeviceMatrix,
    y: &mut DeviceMatrix,
) -> Result<(), DeviceError> {
    let (x, y) = (x.view(), y.view_mut());
    match traits(spec).is_palette {
        false => matmul.exponent(ctx, x, encodings.huffman.as_exponent(&encodings.exponents), y),
        true if stored => matmul.palette(ctx, x, encodings.palette.view(), y),
        true => matmul.palette(ctx, x, encodings.huffman.as_palette(&encodings.indices), y),
    }
}

/// Initializes an output: NaN if it is overwritten, known values if it is added to.
fn start(stream: &Stream, spec: &VariantSpec, y: &mut DeviceMatrix, before: &[u16]) {
    poison(stream, y);
    if adds(spec) {
        y.write(stream, 0, before).unwrap();
    }
}

/// Returns `X[m, k] * W[n, k]^T` in double precision.
fn reference(x: &[u16], w: &[u16], m: usize, n: usize, k: usize) -> Vec<f64> {
    let (x, w): (Vec<f64>, Vec<f64>) = (x.iter().map(|b| value(*b)).collect(), w.iter().map(|b| value(*b)).collect());
    (0..m * n)
        .into_par_iter()
        .map(|at| {
            let (x, w) = (&x[at / n * k..][..k], &w[at % n * k..][..k]);
            x.iter().zip(w).map(|(x, w)| x * w).sum()
        })
        .collect()
}

fn by_budget() -> Vec<(u32, Vec<VariantSpec>)> {
    let all: Vec<_> = catalog::all(Arch::Sm90a).into_iter().filter(|spec| try_traits(spec).is_some()).collect();
    let reads = |spec: &VariantSpec, budget| match spec.op {
        // Any number of verbatim rows: none, few and all.
        Op::GemmJoin(op) if op.source == JoinSource::Palette => [0, 8, 64].contains(&budget),
        _ => traits(spec).verbatim_rows == budget,
    };
    let of = |budget| (budget, all.iter().filter(|spec| reads(spec, budget)).copied().collect());
    [0, 4, 8, 16, 32, 64].map(of).into()
}

/// Needs no GPU: the tests below rely on these weights.
#[test]
fn the_weights_have_the_verbatim_rows_that_they_are_asked_for() {
    for (budget, specs) in by_budget() {
        assert!(!specs.is_empty());
        let bytes = weights(N, K, budget, 7 + u64::from(budget));
        let tensor = huffman::encode(Matrix::new(&bytes, N, K).unwrap(), CodeLimit::DEFAULT).unwrap();
        assert_eq!(tensor.max_verbatim_rows(), budget);
        assert_eq!(tensor.code().palette().exponents().len(), 16, "every palette entry is in use");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_reconstructs_every_weight_exactly() {
    let kernels = gpu();
    let stream = stream(kernels);
    // One-hot rows: m = k, plus a partial last tile of rows that repeat the first ones.
    let m = K + 7;
    let x: Vec<u16> = (0..m * K).map(|at| if at / K % K == at % K { 0x3f80 } else { 0 }).collect();
    let x = DeviceMatrix::from_host(&stream, m as u32, K as u32, &x).unwrap();
    let before: Vec<u16> = vec![bf16(0.5); m * N];
    for (budget, specs) in by_budget() {
        let bytes = weights(N, K, budget, 7 + u64::from(budget));
        let encodings = encodings(kernels, &stream, &bytes, N, K);
        assert_eq!(encodings.tensor.max_verbatim_rows(), budget, "the weights have the verbatim rows of this test");
        kernels.prepare(&specs, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
        let w = halves(&bytes);
        let mut y = DeviceMatrix::zeroed(&stream, m as u32, N as u32).unwrap();
        for spec in &specs {
            // Only a palette source has a stored encoding that differs from the decoded one.
            let forms_of_source: &[bool] = if traits(spec).is_palette { &[false, true] } else { &[false] };
            for &stored in forms_of_source {
                start(&stream, spec, &mut y, &before);
                run(kernels, &stream, spec, &encodings, stored, &x, &mut y);
                let got = y.to_host(&stream).unwrap();
                let add = adds(spec);
                for (at, got) in got.iter().enumerate() {
                    let weight = w[at % N * K + at / N % K];
                    let expected_bits = if add { bf16(0.5 + value(weight)) } else { weight };
                    // A sum that begins with +0 turns -0 into +0.
                    let same = *got == expected_bits || value(*got) == 0.0 && value(expected_bits) == 0.0;
                    assert!(
                        same,
                        "{spec} (stored: {stored}): y[{}, {}] = {got:#06x} instead of {expected_bits:#06x}",
                        at / N,
                        at % N
                    );
                }
                guard_is_intact(&stream, &y, &spec.to_string());
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_at_every_batch_against_float64_and_cublas() {
    let kernels = gpu();
    let stream = stream(kernels);
    let max_batch = BATCHES[BATCHES.len() - 1] as usize;
    let x = halves(&normal_bf16(max_batch * K, 1.0, 11));
    let before = halves(&normal_bf16(max_batch * N, 1.0, 12));
    for (budget, specs) in by_budget() {
        let bytes = weights(N, K, budget, 70 + u64::from(budget));
        let encodings = encodings(kernels, &stream, &bytes, N, K);
        let w = halves(&bytes);
        // Rows are independent: every batch consists of the first rows of the largest.
        let exact = reference(&x, &w, max_batch, N, K);
        let norm: Vec<f64> = {
            let magnitude = |v: &[u16]| v.iter().map(|bits| bits & 0x7fff).collect::<Vec<_>>();
            reference(&magnitude(&x), &magnitude(&w), max_batch, N, K)
        };
        kernels.prepare(&specs, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
        let batches: BTreeSet<u32> = BATCHES.into_iter().chain(JOIN_BATCHES).collect();
        for m in batches {
            let count = m as usize * N;
            let x = DeviceMatrix::from_host(&stream, m, K as u32, &x[..m as usize * K]).unwrap();
            let mut y = DeviceMatrix::zeroed(&stream, m, N as u32).unwrap();
            let mut cublas = Cublas::new(&stream).unwrap();
            cublas.matmul(x.view(), encodings.whole.view(), y.view_mut(), false).unwrap();
            let by_cublas = y.to_host(&stream).unwrap();
            for spec in specs.iter().filter(|spec| traits(spec).batches.contains(&m)) {
                start(&stream, spec, &mut y, &before[..count]);
                run(kernels, &stream, spec, &encodings, false, &x, &mut y);
                let got = y.to_host(&stream).unwrap();
                let add = adds(spec);
                let (mut difference, mut size) = (0.0, 0.0);
                for at in 0..count {
                    let want = exact[at] + if add { value(before[at]) } else { 0.0 };
                    let error = value(got[at]) - want;
                    // bf16 rounding of the result (2^-9) and fp32 accumulation of K products (at most K * 2^-24), with
                    // a factor of two.
                    let bound = want.abs() * 2f64.powi(-8) + norm[at] * K as f64 * 2f64.powi(-23);
                    assert!(
                        error.abs() <= bound,
                        "{spec} m = {m}: y[{}, {}] = {}, expected {want} +- {bound}",
                        at / N,
                        at % N,
                        value(got[at])
                    );
                    difference += error * error;
                    size += want * want;
                }
                let relative = f64::sqrt(difference / size);
                assert!(relative < 1e-2, "{spec} m = {m}: relative error {relative:.2e}");
                if !add {
                    let relative = relative_error(&got, &by_cublas);
                    assert!(relative < 1e-2, "{spec} m = {m}: differs from cuBLAS by {relative:.2e}");
                }
                guard_is_intact(&stream, &y, &spec.to_string());
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_default_variants_on_large_shapes_against_cublas() {
    let kernels = gpu();
    let stream = stream(kernels);
    for (n, k) in [(4096, 4096), (14336, 4096), (4096, 14336)] {
        let bytes = normal_bf16(n * k, 0.02, 21);
        let encodings = encodings(kernels, &stream, &bytes, n, k);
        let mut cublas = Cublas::new(&stream).unwrap();
        for m in [1u32, 7, 12, 31, 64, 200, 256, 1024] {
            let x = halves(&normal_bf16(m as usize * k, 1.0, 22));
            let x = DeviceMatrix::from_host(&stream, m, k as u32, &x).unwrap();
            let mut y = DeviceMatrix::zeroed(&stream, m, n as u32).unwrap();
            cublas.matmul(x.view(), encodings.whole.view(), y.view_mut(), false).unwrap();
            let expected = y.to_host(&stream).unwrap();
            let problem = GemmShape { m, n: n as u32, k: k as u32 };
            let max_verbatim_rows = encodings.huffman.max_verbatim_rows();
            for source in [Source::Exponent, Source::Palette { max_verbatim_rows }] {
                let sms = kernels.device().info().sms;
                for spec in candidates(Arch::Sm90a, source, problem, sms, Epilogue::Store).into_iter().take(3) {
                    poison(&stream, &mut y);
                    run(kernels, &stream, &spec, &encodings, false, &x, &mut y);
                    let error = relative_error(&y.to_host(&stream).unwrap(), &expected);
                    assert!(error < 1e-2, "{spec} m = {m}, {n} x {k}: differs from cuBLAS by {error:.2e}");
                    guard_is_intact(&stream, &y, &spec.to_string());
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_same_launch_gives_the_same_bits() {
    let kernels = gpu();
    let stream = stream(kernels);
    let bytes = weights(N, K, 8, 31);
    let encodings = encodings(kernels, &stream, &bytes, N, K);
    let x = halves(&normal_bf16(129 * K, 1.0, 32));
    let x = DeviceMatrix::from_host(&stream, 129, K as u32, &x).unwrap();
    // Variants of `gemm_join` are candidates at any batch.
    let problem = GemmShape { m: 129, n: N as u32, k: K as u32 };
    let source = Source::Palette { max_verbatim_rows: 8 };
    for spec in candidates(Arch::Sm90a, source, problem, kernels.device().info().sms, Epilogue::Store) {
        let mut y = DeviceMatrix::zeroed(&stream, 129, N as u32).unwrap();
        let mut first = None;
        for _ in 0..10 {
            poison(&stream, &mut y);
            run(kernels, &stream, &spec, &encodings, false, &x, &mut y);
            let got = y.to_host(&stream).unwrap();
            assert!(*first.get_or_insert_with(|| got.clone()) == got, "{spec} is not deterministic");
        }
    }
}

/// Returns the shipped variants that split k over `splits` blocks and have room for 8 verbatim rows.
fn split_by(splits: u32) -> Vec<VariantSpec> {
    let reads_8 = |of: &Traits| !of.is_palette || of.verbatim_rows == 8;
    let chosen = |spec: &VariantSpec| match spec.op {
        Op::GemmJoin(_) => traits(spec).splits == splits,
        _ => try_traits(spec).is_some_and(|of| of.splits == splits && reads_8(&of)),
    };
    catalog::all(Arch::Sm90a).into_iter().filter(chosen).collect()
}

/// Splits of k at odd shapes, including uneven shares: close to float64, and the same bits on the whole device, on
/// parts where clusters process several tasks in turn, and in a graph.
#[test]
#[ignore = "needs a GPU"]
fn splits_of_k_give_the_same_bits_on_any_grid() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    let max_batch = 300;
    for (n, k, seed) in [(64, 256, 51), (192, 704, 52), (1984, 320, 53), (4096, 576, 54)] {
        let bytes = weights(n, k, 8, seed);
        let encodings = encodings(kernels, &stream, &bytes, n, k);
        let (x, before) =
            (halves(&normal_bf16(max_batch * k, 1.0, seed + 10)), halves(&normal_bf16(max_batch * n, 1.0, seed + 20)));
        let (w, magnitude) = (halves(&bytes), |v: &[u16]| v.iter().map(|bits| bits & 0x7fff).collect::<Vec<_>>());
        let exact = reference(&x, &w, max_batch, n, k);
        let norm = reference(&magnitude(&x), &magnitude(&w), max_batch, n, k);
        for m in [1, 15, 16, 17, 63, 64, 65, 128, 129, 300] {
            let x = DeviceMatrix::from_host(&stream, m as u32, k as u32, &x[..m * k]).unwrap();
            let mut y = DeviceMatrix::zeroed(&stream, m as u32, n as u32).unwrap();
            for spec in [2, 4].into_iter().flat_map(split_by) {
                let what = format!("{spec} m = {m}, {n} x {k}");
                let matmul = Matmul::new(kernels.get(&spec).unwrap()).unwrap();
                let add = adds(&spec);
                let mut first: Option<Vec<u16>> = None;
                for sms in [None, Some(1), Some(7), Some(70)] {
                    ctx.set_mode(LaunchMode { sms, ..LaunchMode::default() });
                    start(&stream, &spec, &mut y, &before[..m * n]);
                    enqueue(&matmul, &spec, &mut ctx, (&encodings, false), &x, &mut y).unwrap();
                    ctx.synchronize().unwrap();
                    let got = y.to_host(&stream).unwrap();
                    guard_is_intact(&stream, &y, &what);
                    assert!(*first.get_or_insert_with(|| got.clone()) == got, "{what}: other bits on {sms:?}");
                }
                ctx.set_mode(LaunchMode::default());
                let got = first.unwrap();
                for (at, got) in got.iter().enumerate() {
                    let want = exact[at] + if add { value(before[at]) } else { 0.0 };
                    let bound = want.abs() * 2f64.powi(-8) + norm[at] * k as f64 * 2f64.powi(-23);
                    let error = (value(*got) - want).abs();
                    assert!(error <= bound, "{what}: y[{}, {}] is {error} off", at / n, at % n);
                }
                let graph =
                    stream.capture(|| enqueue(&matmul, &spec, &mut ctx, (&encodings, false), &x, &mut y)).unwrap();
                start(&stream, &spec, &mut y, &before[..m * n]);
                // SAFETY: everything that the graph uses is alive.
                unsafe { graph.launch() }.unwrap();
                assert!(y.to_host(&stream).unwrap() == got, "{what}: a captured launch has other bits");
            }
        }
    }
}

/// Blocks that read each other's memory, in thousands of launches without a pause: the same bits.
#[test]
#[ignore = "needs a GPU"]
fn splits_of_k_give_the_same_bits_thousands_of_times() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    // 129 tasks at 300 rows: clusters process several in turn.
    let (n, k) = (2752, K);
    let bytes = weights(n, k, 8, 61);
    let encodings = encodings(kernels, &stream, &bytes, n, k);
    for m in [1usize, 65, 300] {
        let x = halves(&normal_bf16(m * k, 1.0, 62));
        let x = DeviceMatrix::from_host(&stream, m as u32, k as u32, &x).unwrap();
        let before = halves(&normal_bf16(m * n, 1.0, 63));
        for spec in [2, 4].into_iter().flat_map(split_by) {
            let matmul = Matmul::new(kernels.get(&spec).unwrap()).unwrap();
            let mut ys: Vec<_> = (0..50).map(|_| DeviceMatrix::zeroed(&stream, m as u32, n as u32).unwrap()).collect();
            let mut first = None;
            for round in 0..20 {
                ys.iter_mut().for_each(|y| start(&stream, &spec, y, &before));
                // Without a pause: a launch begins on SMs that another one leaves.
                for y in &mut ys {
                    enqueue(&matmul, &spec, &mut ctx, (&encodings, false), &x, y).unwrap();
                }
                ctx.synchronize().unwrap();
                for (launch, y) in ys.iter().enumerate() {
                    let got = y.to_host(&stream).unwrap();
                    let same = *first.get_or_insert_with(|| got.clone()) == got;
                    assert!(same, "{spec} m = {m}: launch {launch} of round {round} has other bits");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn mismatched_operands_are_rejected_before_the_launch() {
    let kernels = gpu();
    let stream = stream(kernels);
    let bytes = weights(N, K, 16, 41);
    let encodings = encodings(kernels, &stream, &bytes, N, K);
    let x = DeviceMatrix::zeroed(&stream, 3, K as u32).unwrap();
    let matmul = |name: &str| Matmul::new(kernels.get(&name.parse().unwrap()).unwrap()).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, 3, N as u32).unwrap();
    let palette = encodings.huffman.as_palette(&encodings.indices);

    let mut ctx = context(&stream);

    let v8 = matmul("uw_sm90a_gemm_recon_palette_n2p4_v8_store");
    let small = refused(v8.palette(&mut ctx, x.view(), palette, y.view_mut()));
    assert_eq!(small, LaunchError::VerbatimRows { room: 8, rows: 16 });
    let exponent = matmul("uw_sm90a_gemm_recon_exponent_n2p4_store");
    let kind = refused(exponent.palette(&mut ctx, x.view(), palette, y.view_mut()));
    assert_eq!(kind, LaunchError::Source { takes: "exponent", got: "palette" });
    let mut wrong = DeviceMatrix::zeroed(&stream, 4, N as u32).unwrap();
    let v16 = matmul("uw_sm90a_gemm_recon_palette_n2p4_v16_store");
    let shape = refused(v16.palette(&mut ctx, x.view(), palette, wrong.view_mut()));
    assert!(matches!(shape, LaunchError::Shape { y: [4, _], x: [3, _], .. }), "{shape}");

    // Two steps of k leave some of four blocks without work.
    let split = matmul("uw_sm90a_gemm_recon_exponent_n1p6s4_store");
    let bytes = weights(N, 128, 0, 42);
    let short = self::encodings(kernels, &stream, &bytes, N, 128);
    let x = DeviceMatrix::zeroed(&stream, 3, 128).unwrap();
    let few = refused(split.exponent(&mut ctx, x.view(), short.huffman.as_exponent(&short.exponents), y.view_mut()));
    assert!(matches!(few, LaunchError::Grid { cluster: 4, .. }), "{few}");

    // An empty batch needs no work.
    let none = DeviceMatrix::zeroed(&stream, 0, K as u32).unwrap();
    let mut nothing = DeviceMatrix::zeroed(&stream, 0, N as u32).unwrap();
    v16.palette(&mut ctx, none.view(), palette, nothing.view_mut()).unwrap();
    stream.synchronize().unwrap();
}
