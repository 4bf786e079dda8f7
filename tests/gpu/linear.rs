//! Layers of bundles: every encoding, padded shapes, weights that cannot be packed, merged weights, any batch, graphs.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::harness::{Random, Weights, bf16, close, gpu, guard_is_intact, poison, refused, stream, value};
use rayon::prelude::*;
use unweight::format::{
    Histogram, Matrix,
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    raw::packed::{self, Window},
};
use unweight_bench::halves;
use unweight_codegen::spec::Epilogue;
use unweight_rt::{
    ContextSize, Device, DeviceBuffer, DeviceError, DeviceMatrix, DevicePacked, ExecContext, KernelSet, LaunchError,
    LayerBuilder, Linear, LoadError, LoadOptions, Loader, Merge, Placement, Stream, Unsuitable, cache::Progress,
    env::Env, raw::layer::loader::reachable,
};

/// A tensor with one dimension.
const NORM: &str = "layers.0.norm.weight";
const NORM_LENGTH: usize = 128;

/// Name, rows, columns, kind of weights.
const TENSORS: [(&str, usize, usize, Weights); 9] = [
    ("layers.0.q_proj.weight", 192, 128, Weights::TRAINED),
    ("layers.0.k_proj.weight", 64, 128, Weights::TRAINED),
    ("layers.0.gate_proj.weight", 96, 128, Weights::TRAINED),
    ("layers.0.up_proj.weight", 96, 128, Weights::TRAINED),
    ("layers.0.odd_proj.weight", 100, 72, Weights::TRAINED),
    ("layers.0.heavy_proj.weight", 128, 192, Weights::HeavyTails),
    ("layers.0.few_proj.weight", 320, 448, Weights::FewExponents),
    ("embed_tokens.weight", 256, 128, Weights::TRAINED),
    ("layers.0.v_proj.weight", 65, 128, Weights::TRAINED),
];

/// Writes a model with one safetensors file.
fn model(folder: &Path) {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    let mut add = |name: &str, shape: String, bytes: Vec<u8>| {
        let (from, to) = (data.len(), data.len() + bytes.len());
        entries.push(format!(r#""{name}":{{"dtype":"BF16","shape":[{shape}],"data_offsets":[{from},{to}]}}"#));
        data.extend(bytes);
    };
    for (seed, (name, rows, cols, kind)) in TENSORS.iter().enumerate() {
        add(name, format!("{rows},{cols}"), kind.bytes(*rows * *cols, seed as u64));
    }
    add(NORM, NORM_LENGTH.to_string(), Weights::TRAINED.bytes(NORM_LENGTH, 99));
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

/// Returns the rows of a matrix in double precision.
fn rows(bytes: &[u8], cols: usize) -> Vec<Vec<f64>> {
    let values: Vec<f64> = halves(bytes).into_iter().map(value).collect();
    values.chunks_exact(cols).map(<[f64]>::to_vec).collect()
}

/// Returns the product, with the sum of the magnitudes of each element's terms.
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

fn loader<'a>(kernels: &'a KernelSet, stream: &Stream, bundle: &'a Bundle, options: LoadOptions) -> Loader<'a> {
    Loader::new(kernels, stream, bundle, options, &|_| {}).unwrap_or_else(|error| panic!("{error}")).0
}

struct Run<'a> {
    stream: &'a Stream,
    ctx: ExecContext,
}

impl Run<'_> {
    /// Computes Y at batch `m` directly and with a replayed graph, which must give the same bits.
    fn y(&mut self, layer: &Linear, x: &[u16], m: u32, before: Option<&[u16]>, epilogue: Epilogue) -> Vec<u16> {
        let columns = if epilogue == Epilogue::SiluMul { layer.n() / 2 } else { layer.n() };
        let x = DeviceMatrix::from_host(self.stream, m, layer.k(), &x[..(m * layer.k()) as usize]).unwrap();
        let mut y = DeviceMatrix::zeroed(self.stream, m, columns).unwrap();
        let start = |y: &mut DeviceMatrix| {
            poison(self.stream, y);
            if let Some(before) = before {
                y.write(self.stream, 0, before).unwrap();
            }
        };
        start(&mut y);
        layer.enqueue(&mut self.ctx, x.view(), y.view_mut(), epilogue).unwrap();
        let direct = y.to_host(self.stream).unwrap();
        guard_is_intact(self.stream, &y, "a layer");
        let graph = self.stream.capture(|| layer.enqueue(&mut self.ctx, x.view(), y.view_mut(), epilogue)).unwrap();
        start(&mut y);
        // SAFETY: everything that the graph uses is alive.
        unsafe { graph.launch() }.unwrap();
        assert!(y.to_host(self.stream).unwrap() == direct, "a captured layer gives other bits");
        direct
    }
}

const MAX_BATCH: u32 = 300;
const BATCHES: [u32; 8] = [1, 7, 8, 33, 64, 65, 129, 300];

#[test]
#[ignore = "needs a GPU"]
fn every_encoding_loads_as_a_layer() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let mut rng = Random::new(8);
    let x: Vec<u16> = (0..MAX_BATCH as usize * 448).map(|_| bf16(rng.normal())).collect();
    for (profile, pdl) in [
        (Profile::Packed, true),
        (Profile::Packed, false),
        (Profile::Distribution, true),
        (Profile::Palette, true),
        (Profile::Compact, true),
        (Profile::Archive, true),
    ] {
        let bundle = bundle_of(home.path(), profile);
        let options = LoadOptions::default().max_batch(MAX_BATCH).pdl(pdl);
        let mut loader = loader(kernels, &stream, &bundle, options);
        let layers: Vec<Linear> =
            TENSORS.iter().map(|(name, ..)| loader.load(name).unwrap_or_else(|e| panic!("{e}"))).collect();
        let mut run = Run { stream: &stream, ctx: loader.context(&stream).unwrap() };
        for (layer, (name, n, k, kind)) in layers.iter().zip(TENSORS) {
            assert_eq!((layer.n() as usize, layer.k() as usize), (n, k));
            assert_eq!(layer.is_packed(), kind != Weights::HeavyTails, "{name} in a bundle of profile {profile:?}");
            let w = rows(&bundle.tensor(name).unwrap().decode().unwrap(), k);
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
    let bundle = bundle_of(home.path(), Profile::Packed);
    let options = LoadOptions::default().max_batch(MAX_BATCH);
    let mut loader = loader(kernels, &stream, &bundle, options);
    let [q, k, gate, up] = [0, 1, 2, 3].map(|i: usize| TENSORS[i].0);
    let qk = loader.merge(&[q, k], Merge::Rows).unwrap();
    let mlp = loader.merge(&[gate, up], Merge::SiluMul).unwrap();
    let mut run = Run { stream: &stream, ctx: loader.context(&stream).unwrap() };
    let mut rng = Random::new(9);
    let x: Vec<u16> = (0..MAX_BATCH as usize * 128).map(|_| bf16(rng.normal() * 8.0)).collect();
    let of = |name: &str| rows(&bundle.tensor(name).unwrap().decode().unwrap(), 128);
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
    let mut unsuitable = |names: &[&str], merge| match loader.merge(names, merge) {
        Err(LoadError::Unsuitable { why, .. }) => why,
        other => panic!("{:?}", other.map(|layer| layer.n())),
    };
    let columns = Unsuitable::Columns { cols: 72, first: q.to_owned(), first_cols: 128 };
    assert_eq!(unsuitable(&[q, TENSORS[4].0], Merge::Rows), columns);
    assert_eq!(unsuitable(&[gate, q], Merge::SiluMul), Unsuitable::Pair { gate: 96, up: 192, k: 128 });
    assert_eq!(unsuitable(&[gate], Merge::SiluMul), Unsuitable::NotAPair { count: 1 });
    assert_eq!(unsuitable(&[], Merge::Rows), Unsuitable::Nothing);
}

/// Merges the tensors on the host as a layer does: stacked or interleaved.
fn merged_on_host(bundle: &Bundle, names: &[&str], merge: Merge) -> Vec<u8> {
    let parts: Vec<Vec<u8>> = names.iter().map(|name| bundle.tensor(name).unwrap().decode().unwrap()).collect();
    match (merge, parts.as_slice()) {
        (Merge::SiluMul, [gate, up]) => {
            let turn = Epilogue::GATE_ROWS as usize * bundle.tensor(names[0]).unwrap().entry().shape[1] * 2;
            gate.chunks(turn).zip(up.chunks(turn)).flat_map(|(gate, up)| [gate, up].concat()).collect()
        }
        _ => parts.concat(),
    }
}

fn bytes_of(stream: &Stream, matrix: &DeviceMatrix) -> Vec<u8> {
    matrix.to_host(stream).unwrap().iter().flat_map(|bits| bits.to_le_bytes()).collect()
}

/// Checks the packed bytes against the host's packing of these weights, if the shape consists of whole tiles.
fn assert_packed(stream: &Stream, got: &DevicePacked, weights: &[u8], shape: (usize, usize), what: &str) {
    let matrix = Matrix::new(weights, shape.0, shape.1).unwrap();
    let expected = packed::pack(matrix, &Histogram::of(weights)).unwrap();
    let got = got.download(stream).unwrap();
    assert_eq!(got.window(), expected.window(), "{what}");
    assert!(got.packed() == expected.packed(), "{what}: containers differ");
    assert!(got.escape_heads() == expected.escape_heads(), "{what}: heads differ");
    assert!(got.escapes() == expected.escapes(), "{what}: escapes differ");
}

/// A merged layer has the bytes that the host makes from the parts' weights, whatever the parts' encodings.
#[test]
#[ignore = "needs a GPU"]
fn merged_layers_equal_those_merged_on_the_host() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let [q, k, gate, up, few, v] = [0, 1, 2, 3, 6, 8].map(|i: usize| TENSORS[i].0);
    for profile in [Profile::Packed, Profile::Distribution, Profile::Palette, Profile::Compact, Profile::Archive] {
        let bundle = bundle_of(home.path(), profile);
        let mut loader = loader(kernels, &stream, &bundle, LoadOptions::default().max_batch(8));
        // The last one is smaller than the previous contents of the scratch memory.
        let merges: [(&[&str], Merge, usize, usize); 4] = [
            (&[q, k], Merge::Rows, 256, 128),
            (&[few], Merge::Rows, 320, 448),
            (&[gate, up], Merge::SiluMul, 192, 128),
            (&[k], Merge::Rows, 64, 128),
        ];
        for (names, merge, rows, cols) in merges {
            let layer = loader.merge(names, merge).unwrap_or_else(|error| panic!("{error}"));
            let what = format!("{names:?}, {profile:?}");
            let packed = layer.packed_weights().unwrap_or_else(|| panic!("{what}"));
            assert_packed(&stream, packed, &merged_on_host(&bundle, names, merge), (rows, cols), &what);
        }
        // Padded: 257 rows of 320.
        let odd = loader.merge(&[q, v], Merge::Rows).unwrap();
        let weights = merged_on_host(&bundle, &[q, v], Merge::Rows);
        let fill = u16::from(Window::best(&Histogram::of(&weights)).0.base()) << 7;
        let padding = fill.to_le_bytes().repeat((320 - 257) * 128);
        let padded = [weights, padding].concat();
        assert_packed(&stream, odd.packed_weights().unwrap(), &padded, (320, 128), "a padded layer");
    }
}

/// The BF16 baseline: the same bundle on cuBLAS, with every encoding, alone and merged.
#[test]
#[ignore = "needs a GPU"]
fn any_bundle_loads_for_cublas() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let [q, k, gate, up, v] = [0, 1, 2, 3, 8].map(|i: usize| TENSORS[i].0);
    let mut rng = Random::new(11);
    let x: Vec<u16> = (0..8 * 128).map(|_| bf16(rng.normal())).collect();
    let inputs = rows(bytemuck::cast_slice(&x), 128);
    for profile in [Profile::Packed, Profile::Distribution, Profile::Palette, Profile::Compact, Profile::Archive] {
        let bundle = bundle_of(home.path(), profile);
        let options = LoadOptions::default().max_batch(8).placement(Placement::Bf16);
        let mut loader = loader(kernels, &stream, &bundle, options);
        for (name, rows, cols, _) in TENSORS {
            let layer = loader.load(name).unwrap_or_else(|error| panic!("{error}"));
            let weights = layer.bf16_weights().unwrap_or_else(|| panic!("{name}, {profile:?}"));
            assert_eq!((weights.rows() as usize, weights.cols() as usize), (rows, cols));
            assert!(
                bytes_of(&stream, weights) == bundle.tensor(name).unwrap().decode().unwrap(),
                "{name}, {profile:?}"
            );
        }
        let merges: [(&[&str], Merge); 2] = [(&[q, k, v], Merge::Rows), (&[gate, up], Merge::SiluMul)];
        for (names, merge) in merges {
            let layer = loader.merge(names, merge).unwrap();
            // Gate and up are stacked, too.
            let weights = merged_on_host(&bundle, names, Merge::Rows);
            assert!(bytes_of(&stream, layer.bf16_weights().unwrap()) == weights, "{names:?}, {profile:?}");
            let mut run = Run { stream: &stream, ctx: loader.context(&stream).unwrap() };
            let y = run.y(&layer, &x, 8, None, Epilogue::Store);
            let exact = product(&inputs, &rows(&weights, 128));
            close(&y, exact.into_iter().map(|(sum, size)| (sum, size * 1e-6)), &format!("{names:?}, {profile:?}"));
        }
    }
}

/// Embeddings and norms are loaded unchanged; an embedding can also be packed.
#[test]
#[ignore = "needs a GPU"]
fn other_tensors_load_unchanged() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    for profile in [Profile::Packed, Profile::Distribution, Profile::Palette, Profile::Compact, Profile::Archive] {
        let bundle = bundle_of(home.path(), profile);
        let mut loader = loader(kernels, &stream, &bundle, LoadOptions::default().max_batch(8));
        for (name, rows, cols, kind) in TENSORS {
            let weights = bundle.tensor(name).unwrap().decode().unwrap();
            let matrix = loader.matrix(name).unwrap_or_else(|error| panic!("{error}"));
            assert!(bytes_of(&stream, &matrix) == weights, "{name}, {profile:?}");
            let whole_tiles = rows % 64 == 0 && cols % 64 == 0;
            match loader.packed(name) {
                Ok(packed) => assert_packed(&stream, &packed, &weights, (rows, cols), name),
                Err(LoadError::Unsuitable { why: Unsuitable::Unpackable(_), .. }) => {
                    assert!(!whole_tiles || kind == Weights::HeavyTails, "{name}, {profile:?}");
                }
                Err(error) => panic!("{error}"),
            }
        }
        let norm: Vec<u8> =
            loader.vector(NORM).unwrap().to_host(&stream).unwrap().iter().flat_map(|b| b.to_le_bytes()).collect();
        assert_eq!(norm, bundle.tensor(NORM).unwrap().decode().unwrap());
        let vector = loader.vector(TENSORS[0].0).unwrap_err().to_string();
        assert!(vector.contains("Bf16 of shape [192, 128] is not a vector"), "{vector}");
        let matrix = loader.matrix(NORM).unwrap_err().to_string();
        assert!(matrix.contains("is not the weight of a linear layer"), "{matrix}");
    }
}

/// Without a bundle: layers from weights on the device.
#[test]
#[ignore = "needs a GPU"]
fn raw_bf16_weights_load_as_layers() {
    let kernels = gpu();
    let stream = stream(kernels);
    for placement in [Placement::Packed, Placement::Bf16] {
        let options = LoadOptions::default().max_batch(8).placement(placement);
        let mut builder = LayerBuilder::new(kernels, &stream, options).unwrap();
        let [gate, up] = [5, 6].map(|seed| Weights::TRAINED.bytes(160 * 192, seed));
        let parts = [&gate, &up]
            .map(|bytes| DeviceMatrix::upload(&stream, Matrix::new(bytes.as_slice(), 160, 192).unwrap()).unwrap());
        let views = [parts[0].view(), parts[1].view()];
        let stacked = builder.layer("both", &views, Merge::Rows).unwrap();
        let gated = builder.layer("mlp", &views, Merge::SiluMul).unwrap();
        drop(parts);
        let rows = [gate.clone(), up.clone()].concat();
        let turn = Epilogue::GATE_ROWS as usize * 192 * 2;
        let turns: Vec<u8> =
            gate.chunks(turn).zip(up.chunks(turn)).flat_map(|(gate, up)| [gate, up].concat()).collect();
        match placement {
            Placement::Packed => {
                assert_packed(&stream, stacked.packed_weights().unwrap(), &rows, (320, 192), "stacked");
                assert_packed(&stream, gated.packed_weights().unwrap(), &turns, (320, 192), "gated");
            }
            _ => {
                assert!(bytes_of(&stream, stacked.bf16_weights().unwrap()) == rows);
                assert!(bytes_of(&stream, gated.bf16_weights().unwrap()) == rows);
            }
        }
        assert_eq!(builder.context(&stream).unwrap().size().cublas, placement == Placement::Bf16);
        let odd = DeviceMatrix::zeroed(&stream, 100, 192).unwrap();
        let pair = builder.layer("odd", &[odd.view(), odd.view()], Merge::SiluMul).map(|layer| layer.n());
        assert_eq!(pair.is_ok(), placement == Placement::Bf16);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn unloaded_batches_and_epilogues_are_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let bundle = bundle_of(home.path(), Profile::Packed);
    let mut loader = loader(kernels, &stream, &bundle, LoadOptions::default().max_batch(4).pdl(false));
    let layer = loader.load(TENSORS[0].0).unwrap();
    let mut ctx = loader.context(&stream).unwrap();
    let x = DeviceMatrix::zeroed(&stream, 5, 128).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, 5, 192).unwrap();
    // More rows than at load time are allowed, other columns are not.
    layer.enqueue(&mut ctx, x.view(), y.view_mut(), Epilogue::Store).unwrap();
    let mut fewer = DeviceMatrix::zeroed(&stream, 5, 128).unwrap();
    let shape = refused(layer.enqueue(&mut ctx, x.view(), fewer.view_mut(), Epilogue::Store));
    assert!(matches!(shape, LaunchError::Shape { y: [5, 128], x: [5, 128], .. }), "{shape}");
    let few = DeviceMatrix::zeroed(&stream, 4, 128).unwrap();
    let mut half = DeviceMatrix::zeroed(&stream, 4, 96).unwrap();
    let asked = Epilogue::SiluMul;
    let epilogue = refused(layer.enqueue(&mut ctx, few.view(), half.view_mut(), asked));
    assert_eq!(epilogue, LaunchError::Epilogue { asked, loaded: Epilogue::Store });
    let shape = refused(layer.enqueue(&mut ctx, few.view(), half.view_mut(), Epilogue::Store));
    assert!(matches!(shape, LaunchError::Shape { y: [4, 96], x: [4, 128], .. }), "{shape}");
    assert!(loader.load("layers.9.weight").is_err());
}

/// A batch above the maximum at load time runs in parts. Each part gives the bits of its rows alone, on whole and
/// padded layers, also in a graph.
#[test]
#[ignore = "needs a GPU"]
fn large_batches_are_split() {
    const LOADED: u32 = 4;
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let bundle = bundle_of(home.path(), Profile::Packed);
    let mut loader = loader(kernels, &stream, &bundle, LoadOptions::default().max_batch(LOADED));
    let names = [0, 4].map(|at| TENSORS[at].0);
    let mut layers: Vec<(Linear, Epilogue)> =
        names.map(|name| (loader.load(name).unwrap(), Epilogue::Store)).into_iter().collect();
    layers.extend(names.map(|name| (loader.load(name).unwrap(), Epilogue::StoreAdd)));
    let pair = loader.merge(&[TENSORS[2].0, TENSORS[3].0], Merge::SiluMul).unwrap();
    layers.push((pair, Epilogue::SiluMul));
    let ctx = loader.context(&stream).unwrap();
    let mut run = Run { stream: &stream, ctx };
    for (layer, epilogue) in &layers {
        let columns = if *epilogue == Epilogue::SiluMul { layer.n() / 2 } else { layer.n() };
        for m in [LOADED + 1, 2 * LOADED, 5 * LOADED + 3] {
            let x = halves(&Weights::Gaussian { sigma: 1.0 }.bytes((m * layer.k()) as usize, 5));
            let before = halves(&Weights::Gaussian { sigma: 1.0 }.bytes((m * columns) as usize, 6));
            let before = (*epilogue == Epilogue::StoreAdd).then_some(&before[..]);
            let together = run.y(layer, &x, m, before, *epilogue);
            let mut apart = Vec::new();
            for first in (0..m).step_by(LOADED as usize) {
                let rows = LOADED.min(m - first);
                let at = |width: u32| (first * width) as usize..((first + rows) * width) as usize;
                apart.extend(run.y(layer, &x[at(layer.k())], rows, before.map(|y| &y[at(columns)]), *epilogue));
            }
            assert!(together == apart, "{epilogue:?} [{}, {}] at {m}", layer.n(), layer.k());
        }
    }
}

/// Memory borrowed from another buffer: written through one, read through the other, and freed once.
#[test]
#[ignore = "needs a GPU"]
fn borrowed_buffer_is_not_freed() {
    let kernels = gpu();
    let stream = stream(kernels);
    let owned = DeviceBuffer::<u16>::from_host(&stream, &[1, 2, 3, 4]).unwrap();
    for round in 0..3u16 {
        // SAFETY: the memory belongs to `owned`, which outlives the borrowed buffer, and nothing else accesses it at
        // the same time.
        let mut borrowed = unsafe { DeviceBuffer::<u16>::borrow(stream.device(), owned.address(), 4) }.unwrap();
        borrowed.write(&stream, 1, &[10 + round, 20 + round]).unwrap();
        drop(borrowed);
        assert_eq!(owned.to_host(&stream).unwrap(), [1, 10 + round, 20 + round, 4]);
    }
    // SAFETY: the call fails, so the address is never used.
    let odd = unsafe { DeviceBuffer::<u16>::borrow(stream.device(), owned.address() + 2, 2) };
    assert!(matches!(odd, Err(LaunchError::Alignment { bytes: 256, .. })));
}

/// An execution context of another loader lacks what padded layers and cuBLAS need: an error, with nothing written,
/// until it is reserved.
#[test]
#[ignore = "needs a GPU"]
fn workspace_of_another_loader_is_rejected_before_writing() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let bundle = bundle_of(home.path(), Profile::Packed);
    let options = LoadOptions::default().max_batch(300);
    let mut loader = loader(kernels, &stream, &bundle, options);
    let mut other = self::loader(kernels, &stream, &bundle, LoadOptions::default().max_batch(8));
    // Fewer rows of the same padded layer, and no cuBLAS.
    other.load(TENSORS[4].0).unwrap();
    for (name, n, k, kind) in [TENSORS[4], TENSORS[5]] {
        let layer = loader.load(name).unwrap();
        let mut ctx = other.context(&stream).unwrap();
        let x = DeviceMatrix::zeroed(&stream, 300, k as u32).unwrap();
        let mut y = DeviceMatrix::zeroed(&stream, 300, n as u32).unwrap();
        poison(&stream, &mut y);
        let run = |ctx: &mut ExecContext, y: &mut DeviceMatrix| -> Result<(), DeviceError> {
            layer.enqueue(ctx, x.view(), y.view_mut(), Epilogue::Store)
        };
        let have = ctx.size();
        let small = refused(run(&mut ctx, &mut y));
        let LaunchError::ContextTooSmall { need, .. } = small else { panic!("{small}") };
        assert!(have.check(need).is_err() && layer.context_size().check(need).is_ok(), "{name}");
        assert_eq!(need.cublas, kind == Weights::HeavyTails, "{name}");
        assert!(y.to_host(&stream).unwrap().iter().all(|bits| *bits == 0xffff), "{name}: a refused launch has written");
        ctx.reserve(layer.context_size()).unwrap();
        run(&mut ctx, &mut y).unwrap();
        assert!(y.to_host(&stream).unwrap().iter().all(|bits| *bits == 0), "{name}: zeros times weights");
        guard_is_intact(&stream, &y, name);
    }
}

/// An execution context that grows keeps the buffers of captured graphs.
#[test]
#[ignore = "needs a GPU"]
fn graph_survives_growth_of_its_workspace() {
    let kernels = gpu();
    let stream = stream(kernels);
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    let bundle = bundle_of(home.path(), Profile::Packed);
    let mut loader = loader(kernels, &stream, &bundle, LoadOptions::default().max_batch(64));
    let (_, n, k, _) = TENSORS[4];
    let layer = loader.load(TENSORS[4].0).unwrap();
    let mut rng = Random::new(10);
    let x: Vec<u16> = (0..64 * k).map(|_| bf16(rng.normal())).collect();
    let x = DeviceMatrix::from_host(&stream, 64, k as u32, &x).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, 64, n as u32).unwrap();
    let mut ctx = loader.context(&stream).unwrap();
    layer.enqueue(&mut ctx, x.view(), y.view_mut(), Epilogue::Store).unwrap();
    let first = y.to_host(&stream).unwrap();
    let graph = stream.capture(|| layer.enqueue(&mut ctx, x.view(), y.view_mut(), Epilogue::Store)).unwrap();
    ctx.reserve(ctx.size().max(layer.context_size()).with_cublas()).unwrap();
    let mut more = ContextSize::default();
    (more.padded_x, more.padded_y, more.workspace_bytes) = (1 << 22, 1 << 22, 1 << 22);
    ctx.reserve(more).unwrap();
    poison(&stream, &mut y);
    // SAFETY: `x`, `y` and the context are alive, and nothing else runs.
    unsafe { graph.launch() }.unwrap();
    assert!(y.to_host(&stream).unwrap() == first, "the graph still uses its captured workspace");
    ctx.synchronize().unwrap();
}

/// All kernels that a bundle can use are loaded before the first layer, with a line of progress per kernel. Loading
/// layers adds none.
#[test]
#[ignore = "needs a GPU"]
fn loading_compiles_only_reachable_kernels() {
    let device = Device::open(0).unwrap();
    let stream = device.stream().unwrap();
    let home = tempfile::tempdir().unwrap();
    model(&home.path().join("model"));
    for profile in [Profile::Packed, Profile::Distribution, Profile::Palette, Profile::Compact, Profile::Archive] {
        let bundle = bundle_of(home.path(), profile);
        // A separate kernel set, so that no other test has loaded kernels into it.
        let kernels = KernelSet::open(&device, Env::process().unwrap());
        let lines = AtomicUsize::new(0);
        let line = |_: &Progress<'_>| {
            lines.fetch_add(1, Ordering::Relaxed);
        };
        let options = LoadOptions::default().max_batch(MAX_BATCH);
        let (mut loader, prepared) = Loader::new(&kernels, &stream, &bundle, options, &line).unwrap();
        assert_eq!(lines.load(Ordering::Relaxed), prepared.loaded, "{profile:?}");
        let chooser = kernels.chooser().clone();
        assert_eq!(kernels.len(), reachable(&bundle, options, chooser).len(), "{profile:?}");
        let before = kernels.len();
        for (name, ..) in TENSORS {
            loader.load(name).unwrap_or_else(|error| panic!("{error}"));
        }
        let [q, k, gate, up] = [0, 1, 2, 3].map(|i: usize| TENSORS[i].0);
        loader.merge(&[gate, up], Merge::SiluMul).unwrap();
        assert_eq!(kernels.len(), before, "{profile:?}: loading a layer compiled a kernel");
        // No server merges only q and k, so this kernel may be loaded late, and works.
        loader.merge(&[q, k], Merge::Rows).unwrap();
    }
}
