//! The GPU encoder with pinned memory: the same bytes as on the CPU, whatever that memory held before.

use std::{path::Path, thread};

use crate::harness::{SHAPES, Weights, gpu, stream};
use unweight_format::{
    CodeLimit, Matrix, StoredTensor,
    bundle::{self, CompressOptions, Encoder, Profile, SectionBytes, Silent},
    raw::{huffman, palette},
    testing::demo_model::{self, DemoOptions},
};
use unweight_rt::raw::{
    device::HostMemory,
    ops::{
        bundle_encoder::BundleEncoder,
        encode_huffman::{EncodeWorkspace, GpuEncoder},
    },
};

const LIMIT: CodeLimit = CodeLimit::DEFAULT;

/// Shapes of one piece and of several, most with an odd number of elements; the second is split inside a row.
const LARGE: [(usize, usize); 9] = [
    (1031, 257),
    (1, 9_000_001),
    (4_500_001, 1),
    (4097, 4031),
    (2048, 4096),
    (2047, 4097),
    (65, 130_001),
    (4096, 1024),
    (4097, 1024),
];

/// A tensor on its way through the encoder, and what the CPU makes of it.
fn expected(bytes: &[u8], shape: (usize, usize)) -> [StoredTensor<Vec<u8>>; 2] {
    let matrix = Matrix::new(bytes, shape.0, shape.1).unwrap();
    [huffman::encode(matrix, LIMIT).unwrap().into(), palette::encode(matrix, LIMIT).unwrap().into()]
}

/// Encodes in pinned memory if `memory` has some, after filling it with `poison`.
fn encode(
    encoder: &GpuEncoder,
    workspace: &mut EncodeWorkspace,
    memory: &HostMemory,
    bytes: &[u8],
    (rows, cols): (usize, usize),
    poison: u8,
) -> [StoredTensor<SectionBytes>; 2] {
    let mut pinned = memory.tensor(bytes.len());
    if let Some(pinned) = &mut pinned {
        pinned.copy_from_slice(bytes);
    }
    let matrix = Matrix::new(pinned.as_deref().unwrap_or(bytes), rows, cols).unwrap();
    memory.poison(poison);
    let huffman = encoder.encode_pinned(workspace, matrix, Some(memory)).unwrap();
    memory.poison(!poison);
    let palette = encoder.encode_palette_pinned(workspace, matrix, Some(memory)).unwrap();
    [huffman, palette]
}

fn assert_same(got: &[StoredTensor<SectionBytes>; 2], expected: &[StoredTensor<Vec<u8>>; 2], what: &str) {
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!(got.encoding(), expected.encoding(), "{what}");
        for ((name, got), (_, expected)) in got.sections().zip(expected.sections()) {
            assert!(got == expected, "{what}, {}: section {name:?} differs", expected.len());
        }
        assert!(got.sections().eq(expected.sections()), "{what}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_shape_from_and_to_poisoned_memory() {
    let kernels = gpu();
    let encoder = GpuEncoder::new(kernels, LIMIT).unwrap();
    let mut workspace = EncodeWorkspace::new(&stream(kernels));
    let memory = HostMemory::new(kernels.device(), 64 << 20, 128 << 20).unwrap();
    for (seed, shape) in LARGE.into_iter().chain(SHAPES).enumerate() {
        for weights in [Weights::TRAINED, Weights::HeavyTails, Weights::Noise] {
            let bytes = weights.bytes(shape.0 * shape.1, seed as u64);
            let got = encode(&encoder, &mut workspace, &memory, &bytes, shape, 0xa5);
            assert_same(&got, &expected(&bytes, shape), &format!("{weights:?} {shape:?}"));
        }
    }
}

/// Sections that are held while others are encoded keep their bytes, in whatever order they are dropped.
#[test]
#[ignore = "needs a GPU"]
fn sections_keep_their_bytes_until_they_are_dropped() {
    let kernels = gpu();
    let encoder = GpuEncoder::new(kernels, LIMIT).unwrap();
    let mut workspace = EncodeWorkspace::new(&stream(kernels));
    // Room for some of the tensors: the others are in pageable memory.
    let memory = HostMemory::new(kernels.device(), 16 << 20, 24 << 20).unwrap();
    let mut held = Vec::new();
    for round in 0..60u64 {
        let shape = [(1031, 257), (2047, 1025), (700, 801), (1500, 2048), (64, 64)][round as usize % 5];
        let bytes = unweight_bench::normal_bf16(shape.0 * shape.1, 0.02, round % 7);
        let got = encode(&encoder, &mut workspace, &memory, &bytes, shape, round as u8);
        held.push((got, expected(&bytes, shape), format!("{shape:?} of round {round}")));
        if held.len() > 5 {
            let (got, expected, what) = held.swap_remove(round as usize * 7 % held.len());
            assert_same(&got, &expected, &what);
        }
    }
    held.iter().for_each(|(got, expected, what)| assert_same(got, expected, what));
    // Sections outlive the memory that lent them, the workspace and the encoder.
    drop((memory, workspace, encoder));
    held.iter().for_each(|(got, expected, what)| assert_same(got, expected, what));
}

#[test]
#[ignore = "needs a GPU"]
fn threads_share_pinned_memory() {
    let kernels = gpu();
    let encoder = GpuEncoder::new(kernels, LIMIT).unwrap();
    let memory = HostMemory::new(kernels.device(), 48 << 20, 48 << 20).unwrap();
    thread::scope(|scope| {
        for seed in 0..3u64 {
            let (encoder, memory) = (&encoder, &memory);
            scope.spawn(move || {
                let mut workspace = EncodeWorkspace::new(&stream(kernels));
                let tensors = [(2047, 1025), (4097, 1031), (999, 999)].map(|shape: (usize, usize)| {
                    let bytes = unweight_bench::normal_bf16(shape.0 * shape.1, 0.02, seed);
                    (expected(&bytes, shape), bytes, shape)
                });
                for round in 0..10 {
                    for (expected, bytes, shape) in &tensors {
                        let got = encode(encoder, &mut workspace, memory, bytes, *shape, seed as u8);
                        assert_same(&got, expected, &format!("{shape:?} of thread {seed}, round {round}"));
                    }
                }
            });
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn memory_without_room_changes_nothing() {
    let kernels = gpu();
    let encoder = GpuEncoder::new(kernels, LIMIT).unwrap();
    let mut workspace = EncodeWorkspace::new(&stream(kernels));
    let shape = (1031, 2049);
    let bytes = Weights::TRAINED.bytes(shape.0 * shape.1, 3);
    let expected = expected(&bytes, shape);
    let elements = shape.0 * shape.1;
    // Nothing fits; only the tensor; only signs and mantissas; all but one page of both kinds of sections.
    for (tensor_bytes, section_bytes) in [(0, 0), (8 << 20, 4096), (4096, elements + 4096), (8 << 20, elements + 4096)]
    {
        let memory = HostMemory::new(kernels.device(), tensor_bytes, section_bytes).unwrap();
        assert_eq!(memory.tensor(bytes.len()).is_some(), tensor_bytes >= bytes.len());
        let got = encode(&encoder, &mut workspace, &memory, &bytes, shape, 0x5a);
        assert_same(&got, &expected, &format!("{tensor_bytes} and {section_bytes} bytes"));
    }
    let matrix = Matrix::new(&bytes, shape.0, shape.1).unwrap();
    let got = [
        encoder.encode_pinned(&mut workspace, matrix, None).unwrap(),
        encoder.encode_palette_pinned(&mut workspace, matrix, None).unwrap(),
    ];
    assert_same(&got, &expected, "no memory");
}

/// The model is large enough for pinned memory. One encoder makes several bundles, with more and with less memory.
#[test]
#[ignore = "needs a GPU"]
fn bundles_are_those_of_the_cpu() {
    let kernels = gpu();
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    let demo = DemoOptions {
        layers: 2,
        hidden: 1024,
        intermediate: 3008,
        heads: 8,
        kv_heads: 4,
        vocab: 4001,
        shards: 2,
        ..DemoOptions::default()
    };
    demo_model::write(&model, &demo).unwrap();
    let encoder = BundleEncoder::new(kernels, LIMIT).unwrap();
    for profile in Profile::ALL {
        let own = home.path().join(format!("cpu-{profile}"));
        bundle::compress(&model, &own, &CompressOptions::new(*profile), &Silent).unwrap();
        for ram_bytes in [None, Some(100 << 20), Some(1 << 20)] {
            let options = CompressOptions::new(*profile).ram_bytes(ram_bytes);
            let out = home.path().join("gpu");
            bundle::compress_with(&model, &out, &options, &encoder, &Silent).unwrap();
            assert_same_files(&own, &out, &format!("{profile}, {ram_bytes:?} bytes"));
            std::fs::remove_dir_all(&out).unwrap();
        }
    }
    let stages = encoder.stages();
    let bytes = |name| stages.iter().find(|stage| stage.stage == name).map_or(0, |stage| stage.bytes);
    assert!(bytes("pin memory") > 0 && bytes("upload") > 0 && bytes("download") > 0, "{stages:?}");
}

fn assert_same_files(own: &Path, out: &Path, what: &str) {
    let names = |path: &Path| {
        let mut names: Vec<_> = std::fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(own), names(out), "{what}");
    for name in names(own) {
        let [cpu, gpu] = [own, out].map(|path| std::fs::read(path.join(&name)).unwrap());
        assert!(cpu == gpu, "{what}: {} differs", name.display());
    }
}
