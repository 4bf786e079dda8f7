//! Time per stage on N(0, 0.02^2), [14336, 4096] (117 MB): `cargo bench -p unweight-format`.

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use unweight_format::{Code, CodeLimit, Digest, Histogram, Matrix, decode, encode, packed};

const ROWS: usize = 14336;
const COLS: usize = 4096;

/// Box-Muller over splitmix64: the distribution matters, not the generator.
fn normal_weights() -> Vec<u8> {
    let mut state = 1u64;
    let mut uniform = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut bytes = Vec::with_capacity(ROWS * COLS * 2);
    for _ in 0..ROWS * COLS / 2 {
        let radius = 0.02 * (-2.0 * uniform().max(1e-12).ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * uniform()).sin_cos();
        bytes.extend(half::bf16::from_f32(radius * cos).to_le_bytes());
        bytes.extend(half::bf16::from_f32(radius * sin).to_le_bytes());
    }
    bytes
}

fn stages(c: &mut Criterion) {
    let bytes = normal_weights();
    let matrix = Matrix::new(&bytes, ROWS, COLS).expect("a matrix");
    let histogram = Histogram::of(&bytes);
    let code = Code::from_histogram(&histogram, CodeLimit::DEFAULT).expect("a code");
    let tensor = encode::huffman_with(matrix, &code).expect("encodes");
    let palette = encode::palette_with(matrix, &code).expect("encodes");
    let packed = packed::pack(matrix, &histogram).expect("packs");
    let mut out = vec![0u8; bytes.len()];
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let mut group = c.benchmark_group(format!("{threads} threads"));
        group
            .throughput(Throughput::Bytes(bytes.len() as u64))
            .sample_size(10)
            .measurement_time(Duration::from_secs(2));
        let mut stage = |name: &str, run: &mut (dyn FnMut() + Send)| {
            group.bench_function(name, |b| b.iter(|| pool.install(&mut *run)));
        };
        stage("digest", &mut || _ = black_box(Digest::of(black_box(&bytes))));
        stage("survey", &mut || drop(black_box(encode::survey(black_box(&bytes)))));
        stage("encode huffman", &mut || drop(black_box(encode::huffman_with(matrix, &code))));
        stage("encode palette", &mut || drop(black_box(encode::palette_with(matrix, &code))));
        stage("pack", &mut || drop(black_box(packed::pack(matrix, &histogram))));
        stage("decode huffman", &mut || decode::huffman(&tensor, black_box(&mut out)).expect("decodes"));
        stage("decode palette", &mut || decode::palette(&palette, black_box(&mut out)).expect("decodes"));
        stage("unpack", &mut || decode::packed(&packed, black_box(&mut out)).expect("unpacks"));
        stage("transcode", &mut || drop(black_box(decode::transcode(&tensor))));
        group.finish();
    }
}

criterion_group!(benches, stages);
criterion_main!(benches);
