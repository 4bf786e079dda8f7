//! The GPU encoder against the CPU encoder: the same bytes in every section.

use crate::harness::{SHAPES, Weights, gpu, stream};
use unweight_format::{
    CodeLimit, EncodingId, Histogram, Matrix,
    bundle::{self, CompressOptions, Profile, Silent},
    raw::{Code, PaletteTensor, huffman, palette},
    testing::demo_model::{self, DemoOptions},
};
use unweight_rt::{
    KernelSet,
    raw::ops::{
        bundle_encoder::BundleEncoder,
        encode_huffman::{EncodeBuffers, EncodeWorkspace, GpuEncoder},
    },
};

fn same_bytes(
    kernels: &KernelSet,
    encoder: &GpuEncoder,
    limit: CodeLimit,
    bytes: &[u8],
    shape: (usize, usize),
    what: &str,
) {
    let stream = stream(kernels);
    let matrix = Matrix::new(bytes, shape.0, shape.1).unwrap();
    let mut buffers = EncodeBuffers::new(&stream, matrix.grid()).unwrap();
    // Nonzero, so that the test finds bytes that a stage does not write.
    // SAFETY: a whole pipeline runs next and overwrites the buffers.
    unsafe { buffers.poison(0xff) }.unwrap();
    buffers.set_weights(matrix).unwrap();
    encoder.enqueue_huffman(&mut buffers).unwrap();
    let expected = huffman::encode(matrix, limit).unwrap();
    let totals = buffers.totals().unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(totals.max_verbatim_rows, u64::from(expected.max_verbatim_rows()), "{what}");
    assert_eq!(totals.verbatim_rows as usize * 64, expected.verbatim_exponents().len(), "{what}");
    let got = buffers.huffman().unwrap_or_else(|error| panic!("{what}: {error}"));
    for &section in EncodingId::HUFFMAN.encoding().sections() {
        assert!(got.section(section) == expected.section(section), "{what}: section {section:?} differs");
    }

    // SAFETY: a whole pipeline runs next and overwrites the buffers.
    unsafe { buffers.poison(0xff) }.unwrap();
    encoder.enqueue_palette(&mut buffers).unwrap();
    let got: PaletteTensor<_> = buffers.palette().unwrap_or_else(|error| panic!("{what}: {error}"));
    let code = Code::from_histogram(&Histogram::of(bytes), limit).unwrap();
    let expected = palette::encode_with(matrix, &code).unwrap();
    for &section in EncodingId::PALETTE.encoding().sections() {
        assert!(got.section(section) == expected.section(section), "{what}: palette section {section:?} differs");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_kind_of_weight_in_every_shape() {
    let kernels = gpu();
    let limit = CodeLimit::DEFAULT;
    let encoder = GpuEncoder::new(kernels, limit).unwrap();
    for weights in Weights::ALL {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let bytes = weights.bytes(shape.0 * shape.1, seed as u64);
            same_bytes(kernels, &encoder, limit, &bytes, shape, &format!("{weights:?} {shape:?}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_code_limit() {
    let kernels = gpu();
    for bits in 6..=15 {
        let limit = CodeLimit::new(bits).unwrap();
        let encoder = GpuEncoder::new(kernels, limit).unwrap();
        for weights in [Weights::TRAINED, Weights::HeavyTails, Weights::LongRows { cols: 260 }, Weights::Noise] {
            let bytes = weights.bytes(190 * 260, u64::from(bits));
            same_bytes(kernels, &encoder, limit, &bytes, (190, 260), &format!("{weights:?} limit {bits}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn all_bit_patterns_in_every_arrangement() {
    let kernels = gpu();
    let limit = CodeLimit::DEFAULT;
    let encoder = GpuEncoder::new(kernels, limit).unwrap();
    let bytes = Weights::AllPatterns.bytes(256 * 256, 0);
    for shape in [(256, 256), (1024, 64), (64, 1024), (1, 65536), (65536, 1), (2048, 32)] {
        same_bytes(kernels, &encoder, limit, &bytes, shape, &format!("all patterns {shape:?}"));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_matrix_of_many_scan_blocks() {
    let kernels = gpu();
    let limit = CodeLimit::DEFAULT;
    let encoder = GpuEncoder::new(kernels, limit).unwrap();
    // 4,097 tiles, with partial tiles on both sides.
    let shape = (4097, 4031);
    let bytes = unweight_bench::normal_bf16(shape.0 * shape.1, 0.02, 9);
    same_bytes(kernels, &encoder, limit, &bytes, shape, "4097 x 4031");
    let stream = stream(kernels);
    let matrix = Matrix::new(&bytes, shape.0, shape.1).unwrap();
    assert_eq!(encoder.encode(&stream, matrix).unwrap(), huffman::encode(matrix, limit).unwrap());
    assert_eq!(encoder.encode_palette(&stream, matrix).unwrap(), palette::encode(matrix, limit).unwrap());
}

/// Bytes of an earlier tensor would show. The large shapes are copied in many pieces, by several threads.
#[test]
#[ignore = "needs a GPU"]
fn a_workspace_encodes_shape_after_shape() {
    let kernels = gpu();
    let limit = CodeLimit::DEFAULT;
    let encoder = GpuEncoder::new(kernels, limit).unwrap();
    let mut workspace = EncodeWorkspace::new(&stream(kernels));
    for (seed, shape) in [(2048, 4096), (65, 130), (4097, 4031), (1, 1), (2048, 4096)].into_iter().enumerate() {
        let bytes = unweight_bench::normal_bf16(shape.0 * shape.1, 0.02, seed as u64);
        let matrix = Matrix::new(&bytes, shape.0, shape.1).unwrap();
        let got = encoder.encode_in(&mut workspace, matrix).unwrap();
        assert!(got == huffman::encode(matrix, limit).unwrap(), "{shape:?}");
        let got = encoder.encode_palette_in(&mut workspace, matrix).unwrap();
        assert!(got == palette::encode(matrix, limit).unwrap(), "{shape:?}, palette");
    }
    let stages = workspace.stages();
    let names: Vec<&str> = stages.iter().map(|stage| stage.stage.as_str()).collect();
    assert_eq!(names, ["allocate", "upload", "kernels", "download"]);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_and_cpu_encode_to_the_same_bytes() {
    let kernels = gpu();
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    let demo = DemoOptions {
        layers: 3,
        hidden: 320,
        intermediate: 704,
        heads: 5,
        kv_heads: 5,
        vocab: 1000,
        ..DemoOptions::default()
    };
    demo_model::write(&model, &demo).unwrap();
    for profile in Profile::ALL {
        let options = CompressOptions::new(*profile);
        let encoder = BundleEncoder::new(kernels, options.code_limit).unwrap();
        let paths = ["cpu", "gpu"].map(|name| home.path().join(format!("{name}-{profile}")));
        bundle::compress(&model, &paths[0], &options, &Silent).unwrap();
        bundle::compress_with(&model, &paths[1], &options, &encoder, &Silent).unwrap();
        let names = |path: &std::path::Path| {
            let mut names: Vec<_> = std::fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&paths[0]), names(&paths[1]));
        for name in names(&paths[0]) {
            let [cpu, gpu] = [0, 1].map(|i: usize| std::fs::read(paths[i].join(&name)).unwrap());
            assert!(cpu == gpu, "{profile}: {} differs", name.display());
        }
    }
}
