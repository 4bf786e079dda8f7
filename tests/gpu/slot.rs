//! Layers with compact weights: small batches use them directly; larger batches use packed tiles that are written into
//! a slot of the execution context before each product.
//!
//! - Results are within fp32 accumulation and one rounding of a double-precision product. A second run and a graph give
//!   the same bits.
//! - Above the largest batch tile, the bits equal those of the packed layer: the same kernel shapes, on the same tiles.
//! - Layers share one slot hundreds of times without a pause: no layer reads another's tiles.

use std::path::Path;

use crate::harness::{Random, WHOLE_TILES, Weights, bf16, close, gpu, guard_is_intact, poison, refused, stream, value};
use rayon::prelude::*;
use unweight_bench::halves;
use unweight_codegen::spec::{Epilogue, Op};
use unweight_format::{
    EncodingId,
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    testing::demo_model::{self, DemoOptions},
};
use unweight_rt::{
    Device, DeviceMatrix, ExecContext, Expand, KernelSet, LaunchError, LayerBuilder, Linear, LoadOptions, Loader,
    Merge, Placement, Stream, env::Env, raw::choose::candidates::COMPACT_BATCH,
};

const MAX_BATCH: u32 = 300;
/// At and next to each batch tile, at the first expanded batch, and in parts of the largest batch.
const BATCHES: [u32; 12] = [1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 300, 333];

fn builder<'k>(kernels: &'k KernelSet, stream: &Stream, placement: Placement, pdl: bool) -> LayerBuilder<'k> {
    let options = LoadOptions::default().max_batch(MAX_BATCH).placement(placement).pdl(pdl);
    LayerBuilder::new(kernels, stream, options).unwrap()
}

fn matrix(stream: &Stream, n: usize, k: usize, seed: u64) -> (DeviceMatrix, Vec<f64>) {
    let mut random = Random::new(seed);
    let mut bits = halves(&Weights::TRAINED.bytes(n * k, seed));
    // Zeros and numbers far outside both windows: single escapes, and escapes in lists.
    for at in 0..n * k / 3000 {
        let near = at % 7 == 0 && at > 0;
        let index = if near { at * 37 % 64 } else { random.below((n * k) as u64) as usize };
        bits[index] = [0, 0x8000, bf16(3e-9), bf16(0.75)][at % 4];
    }
    let values = bits.iter().map(|bits| value(*bits)).collect();
    (DeviceMatrix::from_host(stream, n as u32, k as u32, &bits).unwrap(), values)
}

/// Returns `x[m, k] * w[n, k]^T`, with the sum of the magnitudes of each element's terms.
fn product(x: &[f64], w: &[f64], k: usize) -> Vec<(f64, f64)> {
    x.par_chunks(k)
        .flat_map_iter(|x| {
            w.chunks(k).map(move |w| {
                let terms = x.iter().zip(w).map(|(a, b)| a * b);
                terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
            })
        })
        .collect()
}

/// Computes Y directly, again, and in a graph, which must give the same bits.
fn run(
    stream: &Stream,
    ctx: &mut ExecContext,
    layer: &Linear,
    x: &[u16],
    before: Option<&[u16]>,
    epilogue: Epilogue,
) -> Vec<u16> {
    let m = x.len() as u32 / layer.k();
    let columns = if epilogue == Epilogue::SiluMul { layer.n() / 2 } else { layer.n() };
    let x = DeviceMatrix::from_host(stream, m, layer.k(), x).unwrap();
    let mut y = DeviceMatrix::zeroed(stream, m, columns).unwrap();
    let start = |y: &mut DeviceMatrix| {
        poison(stream, y);
        if let Some(before) = before {
            y.write(stream, 0, before).unwrap();
        }
    };
    let mut outputs = Vec::new();
    for _ in 0..2 {
        start(&mut y);
        layer.enqueue(ctx, x.view(), y.view_mut(), epilogue).unwrap();
        outputs.push(y.to_host(stream).unwrap());
        guard_is_intact(stream, &y, "a compact layer");
    }
    let graph = stream.capture(|| layer.enqueue(ctx, x.view(), y.view_mut(), epilogue)).unwrap();
    start(&mut y);
    // SAFETY: everything that the graph uses is alive.
    unsafe { graph.launch() }.unwrap();
    outputs.push(y.to_host(stream).unwrap());
    assert!(outputs.iter().all(|output| *output == outputs[0]), "two runs, or a run and the graph, differ at {m} rows");
    outputs.swap_remove(0)
}

fn inputs(m: u32, k: u32, seed: u64) -> Vec<u16> {
    let mut random = Random::new(seed);
    (0..m * k).map(|_| bf16(random.normal())).collect()
}

fn values(bits: &[u16]) -> Vec<f64> {
    bits.iter().map(|bits| value(*bits)).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn compact_layers_multiply_at_every_batch() {
    let kernels = gpu();
    let stream = stream(kernels);
    for pdl in [true, false] {
        let mut small = builder(kernels, &stream, Placement::Compact, pdl);
        let mut fast = builder(kernels, &stream, Placement::Packed, pdl);
        for (n, k, seed) in [(512, 1024, 1), (1088, 640, 2), (320, 4096, 3)] {
            let (weights, w) = matrix(&stream, n, k, seed);
            let layer = small.layer("small", &[weights.view()], Merge::Rows).unwrap();
            let packed = fast.layer("fast", &[weights.view()], Merge::Rows).unwrap();
            assert!(layer.is_compact() && packed.is_packed(), "{n} x {k}");
            assert!(layer.bytes() * 100 < packed.bytes() * 94, "{} and {} bytes", layer.bytes(), packed.bytes());
            let mut ctx = small.context(&stream).unwrap();
            let mut other = fast.context(&stream).unwrap();
            for m in BATCHES {
                let what = format!("{n} x {k} at {m}, pdl = {pdl}");
                let direct = matches!(layer.variant(m, Epilogue::Store).unwrap().op, Op::GemmCompact(_));
                assert_eq!(direct, m <= COMPACT_BATCH, "{what}");
                let x = inputs(m, k as u32, seed + 10);
                let exact = product(&values(&x), &w, k);
                let y = run(&stream, &mut ctx, &layer, &x, None, Epilogue::Store);
                close(&y, exact.iter().map(|(sum, size)| (*sum, size * 1e-6)), &what);
                let before = inputs(m, n as u32, seed + 20);
                let added = run(&stream, &mut ctx, &layer, &x, Some(&before), Epilogue::StoreAdd);
                let sums = exact.iter().zip(&before).map(|((product, size), old)| {
                    let old = value(*old);
                    (product + old, (size + old.abs()) * 1e-6)
                });
                close(&added, sums, &what);
                if !direct && m <= MAX_BATCH {
                    let packed_y = run(&stream, &mut other, &packed, &x, None, Epilogue::Store);
                    assert!(packed_y == y, "{what}: other bits than the packed layer");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_compact_gate_and_up_activate_their_product() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut small = builder(kernels, &stream, Placement::Compact, true);
    let (n, k) = (512, 448);
    let ((gate, gates), (up, ups)) = (matrix(&stream, n, k, 5), matrix(&stream, n, k, 6));
    let layer = small.layer("mlp", &[gate.view(), up.view()], Merge::SiluMul).unwrap();
    let stacked = small.layer("stacked", &[gate.view(), up.view()], Merge::Rows).unwrap();
    assert!(layer.is_compact() && stacked.is_compact());
    let mut ctx = small.context(&stream).unwrap();
    for m in BATCHES {
        let x = inputs(m, k as u32, 7);
        let (gates, ups) = (product(&values(&x), &gates, k), product(&values(&x), &ups, k));
        let exact = gates.iter().zip(&ups).map(|((gate, gate_size), (up, up_size))| {
            let out = gate / (1.0 + (-gate).exp()) * up;
            (out, (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * 1e-6 + out.abs() * 1e-5)
        });
        let y = run(&stream, &mut ctx, &layer, &x, None, Epilogue::SiluMul);
        close(&y, exact, &format!("gate and up at {m}"));
        let y = run(&stream, &mut ctx, &stacked, &x, None, Epilogue::Store);
        let rows = gates
            .chunks(n)
            .zip(ups.chunks(n))
            .flat_map(|(gate, up)| gate.iter().chain(up).copied().collect::<Vec<_>>());
        close(&y, rows.map(|(sum, size)| (sum, size * 1e-6)), &format!("stacked at {m}"));
    }
}

/// An expansion that begins before the previous product has read the slot, or a product that begins before its
/// expansion is complete, would mix two layers' weights.
#[test]
#[ignore = "needs a GPU"]
fn layers_share_one_slot() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut small = builder(kernels, &stream, Placement::Compact, true);
    const SIDE: usize = 1024;
    let weights: Vec<DeviceMatrix> = (0..4).map(|seed| matrix(&stream, SIDE, SIDE, 30 + seed).0).collect();
    let layers: Vec<Linear> =
        weights.iter().map(|w| small.layer("one of four", &[w.view()], Merge::Rows).unwrap()).collect();
    let mut ctx = small.context(&stream).unwrap();
    assert!(ctx.size().slot_bytes >= (SIDE * SIDE * 3 / 2) as u64 && ctx.size().slot_bytes < (SIDE * SIDE * 2) as u64);
    for m in [33, 64, 256] {
        let x = inputs(m, SIDE as u32, 8);
        let alone: Vec<Vec<u16>> =
            layers.iter().map(|layer| run(&stream, &mut ctx, layer, &x, None, Epilogue::Store)).collect();
        let x = DeviceMatrix::from_host(&stream, m, SIDE as u32, &x).unwrap();
        let mut ys: Vec<DeviceMatrix> =
            layers.iter().map(|_| DeviceMatrix::zeroed(&stream, m, SIDE as u32).unwrap()).collect();
        // In between, small batches directly from the weights, as programmatic dependents.
        let mut one = DeviceMatrix::zeroed(&stream, 1, SIDE as u32).unwrap();
        let first = x.view().part(0..1, 0..SIDE as u32).unwrap();
        let graph = stream.capture(|| {
            for turn in 0..12 {
                let layer = &layers[turn % 4];
                layer.enqueue(&mut ctx, x.view(), ys[turn % 4].view_mut(), Epilogue::Store)?;
                if turn % 3 == 0 {
                    layer.enqueue(&mut ctx, first, one.view_mut(), Epilogue::Store)?;
                }
            }
            Ok(())
        });
        let graph = graph.unwrap();
        for round in 0..200 {
            ys.iter_mut().for_each(|y| poison(&stream, y));
            // SAFETY: everything that the graph uses is alive.
            unsafe { graph.launch() }.unwrap();
            for (y, alone) in ys.iter().zip(&alone) {
                assert!(y.to_host(&stream).unwrap() == *alone, "round {round} at {m}: another layer's weights");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn workspace_without_a_slot_is_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut small = builder(kernels, &stream, Placement::Compact, true);
    let (weights, _) = matrix(&stream, 256, 256, 9);
    let layer = small.layer("small", &[weights.view()], Merge::Rows).unwrap();
    let x = DeviceMatrix::zeroed(&stream, 64, 256).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, 64, 256).unwrap();
    let mut without = layer.context_size();
    without.slot_bytes = 0;
    let mut ctx = ExecContext::new(&stream, without).unwrap();
    poison(&stream, &mut y);
    let refusal = refused(layer.enqueue(&mut ctx, x.view(), y.view_mut(), Epilogue::Store));
    let LaunchError::ContextTooSmall { need, .. } = refusal else { panic!("{refusal}") };
    assert_eq!(need.slot_bytes, layer.context_size().slot_bytes);
    assert!(y.to_host(&stream).unwrap().iter().all(|bits| *bits == 0xffff), "a refused launch has written");
    ctx.reserve(layer.context_size()).unwrap();
    layer.enqueue(&mut ctx, x.view(), y.view_mut(), Epilogue::Store).unwrap();
    assert!(y.to_host(&stream).unwrap().iter().all(|bits| *bits == 0), "zeros times weights");
}

fn compact_bundle(home: &Path) -> Bundle {
    let (source, target) = (home.join("model"), home.join("bundle"));
    demo_model::write(&source, &DemoOptions { layers: 1, ..WHOLE_TILES }).unwrap();
    bundle::compress(&source, &target, &CompressOptions::new(Profile::Compact), &Silent).unwrap();
    Bundle::open(&target).unwrap()
}

/// Layers of a bundle: single layers as stored, merged layers as the host encodes them. Layers that are not requested
/// as compact are packed.
#[test]
#[ignore = "needs a GPU"]
fn compact_tensors_of_a_bundle_stay_compact() {
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    let home = tempfile::tempdir().unwrap();
    let bundle = compact_bundle(home.path());
    let name = |part: &str| format!("model.layers.0.{part}_proj.weight");
    let [q, k, v] = ["q", "k", "v"].map(|part| name(&format!("self_attn.{part}")));
    let [gate, up, down] = ["gate", "up", "down"].map(|part| name(&format!("mlp.{part}")));
    for placement in [Placement::Compact, Placement::Packed] {
        let options = LoadOptions::default().max_batch(MAX_BATCH).placement(placement);
        // A separate kernel set, so that no concurrent test loads kernels into it.
        let kernels = KernelSet::open(&device, Env::process().unwrap());
        let (mut loader, _) = Loader::new(&kernels, &stream, &bundle, options, &|_| {}).unwrap();
        let loaded = kernels.len();
        let down_layer = loader.load(&down).unwrap();
        let qkv = loader.merge(&[&q, &k, &v], Merge::Rows).unwrap();
        let mlp = loader.merge(&[&gate, &up], Merge::SiluMul).unwrap();
        assert_eq!(kernels.len(), loaded, "{placement}: loading a layer compiled a kernel");
        // Small tensors may be stored in another encoding. Then they are packed, alone or with the rest of their layer.
        let stored = |name: &String| bundle.tensor(name).unwrap().encoding() == EncodingId::COMPACT;
        let mut stay = 0;
        for (layer, names) in [(&down_layer, vec![&down]), (&qkv, vec![&q, &k, &v]), (&mlp, vec![&gate, &up])] {
            let may = placement == Placement::Compact && names.iter().all(|name| stored(name));
            assert!(layer.is_packed() || may && layer.is_compact(), "{names:?}, {placement}");
            stay += usize::from(layer.is_compact());
        }
        assert_eq!(stay > 0, placement == Placement::Compact, "{stay} layers stay compact");
        let mut ctx = loader.context(&stream).unwrap();
        for (layer, names) in [(&down_layer, vec![&down]), (&qkv, vec![&q, &k, &v])] {
            let w: Vec<f64> = names
                .iter()
                .flat_map(|name| values(&halves(&bundle.tensor(name).unwrap().decode().unwrap())))
                .collect();
            for m in [1, 32, 33, 300] {
                let x = inputs(m, layer.k(), 11);
                let exact = product(&values(&x), &w, layer.k() as usize);
                let y = run(&stream, &mut ctx, layer, &x, None, Epilogue::Store);
                close(
                    &y,
                    exact.iter().map(|(sum, size)| (*sum, size * 1e-6)),
                    &format!("{names:?} at {m}, {placement}"),
                );
            }
        }
    }
}

/// The path above batch 64 on architectures without `wgmma`, enabled by an option: packed and compact weights are
/// expanded to BF16 for cuBLAS, which may round a product before an addition or an activation.
#[test]
#[ignore = "needs a GPU"]
fn weights_are_expanded_to_bf16_for_cublas() {
    let kernels = gpu();
    let stream = stream(kernels);
    for placement in [Placement::Packed, Placement::Compact] {
        let options = LoadOptions::default().max_batch(700).placement(placement).expand(Expand::Above(64));
        let mut builder = LayerBuilder::new(kernels, &stream, options).unwrap();
        let (n, k) = (512, 448);
        let ((gate, gates), (up, ups)) = (matrix(&stream, n, k, 5), matrix(&stream, n, k, 6));
        let rows = builder.layer("rows", &[gate.view()], Merge::Rows).unwrap();
        let mlp = builder.layer("mlp", &[gate.view(), up.view()], Merge::SiluMul).unwrap();
        // Packed and padded, whatever the requested placement.
        let (odd, odds) = matrix(&stream, 100, 72, 7);
        let padded = builder.layer("padded", &[odd.view()], Merge::Rows).unwrap();
        assert_eq!(
            (rows.is_compact(), mlp.is_compact()),
            (placement == Placement::Compact, placement == Placement::Compact)
        );
        assert!(padded.is_packed());
        let mut ctx = builder.context(&stream).unwrap();
        assert!(ctx.size().cublas && ctx.size().slot_bytes >= (2 * 2 * n * k) as u64);
        // Batches that use the scratch memory in several parts, and several parts of the largest batch.
        for m in [64, 65, 128, 513, 700, 701] {
            let what = format!("{placement} at {m}");
            assert_eq!(rows.variant(m, Epilogue::Store).is_none(), m > 64, "{what}");
            let x = inputs(m, k as u32, 7);
            let (gates, ups) = (product(&values(&x), &gates, k), product(&values(&x), &ups, k));
            let y = run(&stream, &mut ctx, &rows, &x, None, Epilogue::Store);
            close(&y, gates.iter().map(|(sum, size)| (*sum, size * 1e-6)), &what);
            let before = inputs(m, n as u32, 21);
            let added = run(&stream, &mut ctx, &rows, &x, Some(&before), Epilogue::StoreAdd);
            let sums = gates.iter().zip(&before).map(|((product, size), old)| {
                let old = value(*old);
                (product + old, (size + old.abs()) * 1e-6 + product.abs() / 256.0)
            });
            close(&added, sums, &format!("{what}, added"));
            // Both products are rounded before the activation: by at most 2^-8 relative each.
            let activated = gates.iter().zip(&ups).map(|((gate, gate_size), (up, up_size))| {
                let out = gate / (1.0 + (-gate).exp()) * up;
                let (gate_error, up_error) = (gate_size * 1e-6 + gate.abs() / 256.0, up_size * 1e-6 + up.abs() / 256.0);
                (out, gate_error * up.abs() * 1.1 + up_error * gate.abs() + gate_error * up_error + out.abs() * 1e-5)
            });
            let y = run(&stream, &mut ctx, &mlp, &x, None, Epilogue::SiluMul);
            close(&y, activated, &format!("{what}, activated"));
            let x = inputs(m, 72, 9);
            let exact = product(&values(&x), &odds, 72);
            let y = run(&stream, &mut ctx, &padded, &x, None, Epilogue::Store);
            close(&y, exact.iter().map(|(sum, size)| (*sum, size * 1e-6)), &format!("{what}, padded"));
        }
    }
}
