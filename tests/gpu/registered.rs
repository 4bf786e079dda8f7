//! Declared variants: loaded by type, and registered for dispatch.

use crate::harness::{Random, Weights, bf16, gpu, stream, value};
use unweight_bench::halves;
use unweight_codegen::{
    Variant, VariantSpec,
    spec::{Epilogue, Op},
    unweight_variant,
};
use unweight_format::{Histogram, Matrix, raw::packed};
use unweight_rt::{
    DeviceMatrix, DevicePacked, ExecContext, KernelSet, LayerBuilder, LoadOptions, LoadVariant, Merge, RegisterError,
    env::Env,
    raw::{
        choose::table::{MeasuredRow, MeasuredTable},
        ops::gemm_packed::PackedGemm,
    },
};

/// In no catalogue: ten warps.
#[unweight_variant(op = gemm_mma, arch = sm90a, batch_tile = 8, row_blocks = 3, warps = 10, stages = 2)]
struct OwnVariant;

#[unweight_variant(op = decode_huffman, output = full)]
struct Decode;

#[unweight_variant(op = gemm_mma, arch = sm89, batch_tile = 8, row_blocks = 2, warps = 8, stages = 2, copy = async)]
struct OfAnotherArchitecture;

const N: u32 = 448;
const K: u32 = 320;
const M: u32 = 5;

/// Returns the product in double precision, with the sum of the magnitudes of each element's terms.
fn oracle(x: &[u16], w: &[u16]) -> Vec<(f64, f64)> {
    let row = |values: &[u16], at: usize| values[at * K as usize..][..K as usize].to_vec();
    let of = |i: usize| {
        let (x, w) = (row(x, i / N as usize), row(w, i % N as usize));
        let terms = x.iter().zip(&w).map(|(x, w)| value(*x) * value(*w));
        terms.fold((0.0, 0.0), |(sum, size): (f64, f64), term| (sum + term, size + term.abs()))
    };
    (0..M as usize * N as usize).map(of).collect()
}

fn assert_close(got: &[u16], exact: &[(f64, f64)]) {
    assert_eq!(got.len(), exact.len());
    for (at, (got, (sum, size))) in got.iter().zip(exact).enumerate() {
        let error = (value(*got) - sum).abs();
        assert!(error <= sum.abs() / 256.0 + size * 1e-6, "element {at} is {}, not {sum}", value(*got));
    }
}

/// Returns weights `[N, K]` and activations `[M, K]`.
fn operands() -> (Vec<u8>, Vec<u16>) {
    let mut rng = Random::new(26);
    let x = (0..M as usize * K as usize).map(|_| bf16(rng.normal())).collect();
    (Weights::TRAINED.bytes(N as usize * K as usize, 26), x)
}

/// Returns a separate kernel set, because other tests share theirs.
fn kernels() -> KernelSet {
    KernelSet::open(gpu().device(), Env::process().expect("the environment"))
}

#[test]
#[ignore = "needs a GPU"]
fn a_registered_variant_is_chosen_by_a_layer_and_multiplies() {
    let mut kernels = kernels();
    let stream = stream(&kernels);
    kernels.register::<OwnVariant>().unwrap();
    assert_eq!(kernels.registered().collect::<Vec<_>>(), [&OwnVariant::SPEC]);
    // Pinned, because the cost model's choice does not matter for this test.
    let row = MeasuredRow { n: N, k: K, m: 8, pdl: false, variant: OwnVariant::SPEC };
    let kernels = kernels.with_table(MeasuredTable { device: gpu().device().info().name.clone(), rows: vec![row] });
    let (w, x) = operands();
    let options = LoadOptions::default().max_batch(64).pdl(false);
    let mut builder = LayerBuilder::new(&kernels, &stream, options).unwrap();
    let weights = DeviceMatrix::from_host(&stream, N, K, &halves(&w)).unwrap();
    let layer = builder.layer("registered", &[weights.view()], Merge::Rows).unwrap();
    let mut ctx = ExecContext::new(&stream, layer.context_size()).unwrap();

    for (epilogue, before) in [(Epilogue::Store, 0.0), (Epilogue::StoreAdd, 2.0)] {
        let variant = layer.variant(M, epilogue).expect("a packed layer");
        let (Op::GemmMma(chosen), Op::GemmMma(registered)) = (variant.op, OwnVariant::SPEC.op) else {
            panic!("{variant}")
        };
        let shape = |op: unweight_codegen::spec::GemmMmaSpec| (op.batch_tile, op.row_blocks, op.warps, op.stages);
        assert_eq!((shape(chosen), chosen.epilogue), (shape(registered), epilogue));
        assert!(kernels.try_get(&variant).is_some(), "{variant} is loaded with the layer");
        let on_device = DeviceMatrix::from_host(&stream, M, K, &x).unwrap();
        let start = vec![bf16(before); (M * N) as usize];
        let mut y = DeviceMatrix::from_host(&stream, M, N, &start).unwrap();
        layer.enqueue(&mut ctx, on_device.view(), y.view_mut(), epilogue).unwrap();
        let exact: Vec<_> = oracle(&x, &halves(&w)).into_iter().map(|(sum, size)| (sum + before, size)).collect();
        assert_close(&y.to_host(&stream).unwrap(), &exact);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_declared_variant_loads_as_the_launcher_of_its_op() {
    let kernels = kernels();
    let stream = stream(&kernels);
    let (w, x) = operands();
    let matrix = Matrix::new(&w, N as usize, K as usize).unwrap();
    let weights = DevicePacked::upload(&stream, &packed::pack(matrix, &Histogram::of(&w)).unwrap()).unwrap();
    let matmul: PackedGemm = OwnVariant::load(&kernels).unwrap();
    assert_eq!(matmul.kernel().spec(), &OwnVariant::SPEC);
    let mut ctx = ExecContext::new(&stream, matmul.context_size(M, &weights)).unwrap();
    let on_device = DeviceMatrix::from_host(&stream, M, K, &x).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, M, N).unwrap();
    matmul.enqueue(&mut ctx, on_device.view(), &weights, y.view_mut()).unwrap();
    assert_close(&y.to_host(&stream).unwrap(), &oracle(&x, &halves(&w)));
    assert_eq!(Decode::load(&kernels).unwrap().kernel().spec(), &Decode::SPEC);
}

#[test]
#[ignore = "needs a GPU"]
fn what_dispatch_cannot_choose_is_not_registered() {
    let mut kernels = kernels();
    assert!(matches!(kernels.register::<OfAnotherArchitecture>(), Err(RegisterError::Arch { .. })));
    assert!(matches!(kernels.register::<Decode>(), Err(RegisterError::Family { .. })));
    let too_large: VariantSpec = "uw_sm90a_gemm_mma_b64_r8w16p16c1_esc_store".parse().unwrap();
    assert!(matches!(kernels.register_spec(too_large), Err(RegisterError::Infeasible { .. })));
    assert_eq!(kernels.registered().count(), 0);
}
