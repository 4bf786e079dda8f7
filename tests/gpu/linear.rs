//! Layers out of real bundles: every stored form, padded shapes, weights that cannot be packed, merged weights, any batch, captured.

use std::{fs, path::Path};

use crate::harness::{Rng, Weights, bf16, gpu, guard_is_whole, poison, stream, value};
use rayon::prelude::*;
use unweight::format::bundle::{self, Bundle, CompressOptions, Profile, Silent};
use unweight_codegen::spec::Epilogue;
use unweight_rt::{
    bench::halves,
    device::Stream,
    layer::linear::{Linear, LoadError, LoadOptions, Loader, Merge, Scratch},
    weight::DeviceMatrix,
};

/// Name, rows, columns, kind of weights.
const TENSORS: [(&str, usize, usize, Weights); 7] = [
    ("layers.0.q_proj.weight", 192, 128, Weights::Normal),
    ("layers.0.k_proj.weight", 64, 128, Weights::Normal),
    ("layers.0.gate_proj.weight", 96, 128, Weights::Normal),
    ("layers.0.up_proj.weight", 96, 128, Weights::Normal),
    ("layers.0.odd_proj.weight", 100, 72, Weights::Normal),
    ("layers.0.heavy_proj.weight", 128, 192, Weights::HeavyTailed),
    ("layers.0.few_proj.weight", 320, 448, Weights::FewExponents),
];

/// A model of one safetensors file.
fn model(folder: &Path) {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (seed, (name, rows, cols, kind)) in TENSORS.iter().enumerate() {
        let bytes = kind.bytes(*rows, *cols, seed as u64);
        let (from, to) = (data.len(), data.len() + bytes.len());
        entries.push(format!(r#""{name}":{{"dtype":"BF16","shape":[{rows},{cols}],"data_offsets":[{from},{to}]}}"#));
        data.extend(bytes);
    }
    let mut header = format!("{{{}}}", entries.join(","));
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("model.safetensors"), file).unwrap();
}

fn bundle_of(home: &Path, profile: Profile) -> Bundle {
    let folder = home.join(format!("{profile:?}"));
    let options = CompressOptions::new(profile).force(true);
    bundle::compress(&home.join("model"), &folder, &options, &Silent).unwrap();
    Bundle::open(&folder).unwrap()
}

/// Rows of a matrix in double precision.
fn rows(bytes: &[u8], cols: usize) -> Vec<Vec<f64>> {
    let values: Vec<f64> = halves(bytes).into_iter().map(value).collect();
    values.chunks_exact(cols).map(<[f64]>::to_vec).collect()
}

/// The product, and the magnitudes that went into each element.
fn product(x: &[Vec<f64>], w: &[Vec<f64>]) -> Vec<(f64, f64)> {
    let pairs: Vec<(usize, usize)> = (0..x.len()).flat_map(|i| (0..w.len()).map(move |j| (i, j))).collect();
    pairs
        .into_par_iter()
        .map(|(i, j)| {
            let terms = x[i].iter().zip(&w[j]).map(|(a, b)| a * b);
            terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
        })
        .collect()
}

struct Run<'a> {
    stream: &'a Stream,
    scratch: Scratch,
}

impl Run<'_> {
    /// Y at batch `m`, computed directly and as a replayed graph: the same bits.
    fn y(&mut self, layer: &Linear, x: &[u16], m: u32, before: Option<&[u16]>, epilogue: Epilogue) -> Vec<u16> {
        let columns = if epilogue == Epilogue::SiluMul { layer.n() / 2 } else { layer.n() };
        let x = DeviceMatrix::from_host(self.stream, m, layer.k(), &x[..(m * layer.k()) as usize]).unwrap();
        let mut y = DeviceMatrix::zeroed(self.stream, m, columns).unwrap();
        let start = |y: &mut DeviceMatrix| {
            poison(self.stream, y.data_mut());
            if let Some(before) = before {
                y.data_mut().write(self.stream, 0, before).unwrap();
            }
        };
        start(&mut y);
        layer.enqueue(self.stream, &x, &mut y, epilogue, &mut self.scratch).unwrap();
        let direct = y.data().to_host(self.stream).unwrap();
        guard_is_whole(self.stream, y.data(), "a layer");
        let graph =
            self.stream.capture(|| layer.enqueue(self.stream, &x, &mut y, epilogue, &mut self.scratch)).unwrap();
        start(&mut y);
        // SAFETY: everything that the graph names is alive.
        unsafe { graph.launch() }.unwrap();
        assert!(y.data().to_host(self.stream).unwrap() == direct, "a captured layer gives other bits");
        direct
    }
}

fn close(got: &[u16], exact: impl Iterator<Item = (f64, f64)>, what: &str) {
    for (at, (got, (sum, slack))) in got.iter().zip(exact).enumerate() {
        let error = (value(*got) - sum).abs();
        assert!(error <= sum.abs() / 256.0 + slack, "{what}: element {at} is {}, not {sum}", value(*got));
    }
}

const MAX_BATCH: u32 = 300;
const BATCHES: [u32; 8] = [1, 7, 8, 33, 64, 65, 129, 300];

#[test]
#[ignore = "needs a GPU"]
fn every_stored_form_becomes_a_layer() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let mut rng = Rng(8);
    let x: Vec<u16> = (0..MAX_BATCH as usize * 448).map(|_| bf16(rng.normal())).collect();
    for (profile, pdl) in
        [(Profile::Resident, true), (Profile::Resident, false), (Profile::Distribution, true), (Profile::Palette, true)]
    {
        let bundle = bundle_of(home.path(), profile);
        let mut loader = Loader::new(kernels, &stream, LoadOptions { max_batch: MAX_BATCH, pdl }).unwrap();
        let layers: Vec<Linear> =
            TENSORS.iter().map(|(name, ..)| loader.load(&bundle, name).unwrap_or_else(|e| panic!("{e}"))).collect();
        let mut run = Run { stream: &stream, scratch: loader.scratch(&stream).unwrap() };
        for (layer, (name, n, k, kind)) in layers.iter().zip(TENSORS) {
            assert_eq!((layer.n() as usize, layer.k() as usize), (n, k));
            assert_eq!(layer.is_packed(), kind != Weights::HeavyTailed, "{name} in a bundle of profile {profile:?}");
            let w = rows(&bundle.decode(name).unwrap(), k);
            let before: Vec<u16> = (0..MAX_BATCH as usize * n).map(|_| bf16(rng.normal())).collect();
            for m in BATCHES {
                let inputs = rows(bytemuck::cast_slice(&x[..m as usize * k]), k);
                let exact = product(&inputs, &w);
                let what = format!("{name}, {profile:?}, m = {m}");
                let y = run.y(layer, &x, m, None, Epilogue::Store);
                close(&y, exact.iter().map(|(sum, size)| (*sum, size * 1e-6)), &what);
                let old = &before[..m as usize * n];
                let y = run.y(layer, &x, m, Some(old), Epilogue::StoreAdd);
                // cuBLAS may round the product before it adds.
                let twice = if layer.is_packed() { 0.0 } else { 1.0 / 256.0 };
                let sums = exact.iter().zip(old).map(|((product, size), old)| {
                    let sum = product + value(*old);
                    (sum, (size + value(*old).abs()) * 1e-6 + product.abs() * twice)
                });
                close(&y, sums, &format!("{what}, added"));
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn merged_weights_are_one_layer() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let bundle = bundle_of(home.path(), Profile::Resident);
    let options = LoadOptions { max_batch: MAX_BATCH, ..LoadOptions::default() };
    let mut loader = Loader::new(kernels, &stream, options).unwrap();
    let [q, k, gate, up] = [0, 1, 2, 3].map(|i: usize| TENSORS[i].0);
    let qk = loader.merge(&bundle, &[q, k], Merge::Rows).unwrap();
    let mlp = loader.merge(&bundle, &[gate, up], Merge::SiluMul).unwrap();
    let mut run = Run { stream: &stream, scratch: loader.scratch(&stream).unwrap() };
    let mut rng = Rng(9);
    let x: Vec<u16> = (0..MAX_BATCH as usize * 128).map(|_| bf16(rng.normal() * 8.0)).collect();
    let of = |name: &str| rows(&bundle.decode(name).unwrap(), 128);
    for m in BATCHES {
        let inputs = rows(bytemuck::cast_slice(&x[..m as usize * 128]), 128);
        let both: Vec<Vec<f64>> = of(q).into_iter().chain(of(k)).collect();
        let y = run.y(&qk, &x, m, None, Epilogue::Store);
        close(&y, product(&inputs, &both).into_iter().map(|(sum, size)| (sum, size * 1e-6)), "q and k");
        let (gates, ups) = (product(&inputs, &of(gate)), product(&inputs, &of(up)));
        let y = run.y(&mlp, &x, m, None, Epilogue::SiluMul);
        let exact = gates.iter().zip(&ups).map(|((gate, gate_size), (up, up_size))| {
            let out = gate / (1.0 + (-gate).exp()) * up;
            (out, (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * 1e-6 + out.abs() * 1e-5)
        });
        close(&y, exact, "gate and up");
    }
    let refused = |names: &[&str], merge, words: &str| match Loader::new(kernels, &stream, LoadOptions::default())
        .unwrap()
        .merge(&bundle, names, merge)
    {
        Err(LoadError::Unsuitable { what, .. }) => assert!(what.contains(words), "{what}"),
        other => panic!("{:?}", other.map(|layer| layer.n())),
    };
    refused(&[q, TENSORS[4].0], Merge::Rows, "72 columns");
    refused(&[gate, q], Merge::SiluMul, "same multiple of 32 rows");
    refused(&[gate], Merge::SiluMul, "2 tensors");
}

#[test]
#[ignore = "needs a GPU"]
fn what_a_layer_was_not_loaded_for_is_refused() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let bundle = bundle_of(home.path(), Profile::Resident);
    let mut loader = Loader::new(kernels, &stream, LoadOptions { max_batch: 4, pdl: false }).unwrap();
    let layer = loader.load(&bundle, TENSORS[0].0).unwrap();
    let mut scratch = loader.scratch(&stream).unwrap();
    let x = DeviceMatrix::zeroed(&stream, 5, 128).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, 5, 192).unwrap();
    let mut message = |y: &mut DeviceMatrix, epilogue| {
        crate::harness::refusal(layer.enqueue(&stream, &x, y, epilogue, &mut scratch)).expect("a refusal")
    };
    assert!(message(&mut y, Epilogue::Store).contains("loaded for 4"));
    let mut half = DeviceMatrix::zeroed(&stream, 5, 96).unwrap();
    assert!(message(&mut half, Epilogue::SiluMul).contains("silu_mul"));
    assert!(message(&mut half, Epilogue::Store).contains("do not go together"));
    assert!(loader.load(&bundle, "layers.9.weight").is_err());
}
