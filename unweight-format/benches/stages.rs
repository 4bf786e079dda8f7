//! Time per stage on N(0, 0.02^2), [14336, 4096] (117 MB): `cargo bench -p unweight-format`. `cargo test` runs each
//! stage once on a sixteenth of the rows.

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use unweight_format::{
    CodeLimit, Digest, Float, Histogram, Matrix, Survey,
    raw::{Code, huffman, packed, palette},
    testing::Weights,
};

const ROWS: usize = 14336;
const COLS: usize = 4096;

fn stages(c: &mut Criterion) {
    let rows = if std::env::args().any(|argument| argument == "--bench") { ROWS } else { ROWS / 16 };
    let bytes = Weights::TRAINED.bytes(rows * COLS, 1);
    let matrix = Matrix::new(&bytes, rows, COLS).expect("a matrix");
    let histogram = Histogram::of(&bytes);
    let code = Code::from_histogram(&histogram, CodeLimit::DEFAULT).expect("a code");
    let tensor = huffman::encode_with(matrix, &code).expect("encodes");
    let palette = palette::encode_with(matrix, &code).expect("encodes");
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
        stage("survey", &mut || drop(black_box(Survey::of(Float::Bf16, black_box(&bytes)))));
        stage("encode huffman", &mut || drop(black_box(huffman::encode_with(matrix, &code))));
        stage("encode palette", &mut || drop(black_box(palette::encode_with(matrix, &code))));
        stage("pack", &mut || drop(black_box(packed::pack(matrix, &histogram))));
        stage("decode huffman", &mut || huffman::decode_into(&tensor, black_box(&mut out)).expect("decodes"));
        stage("decode palette", &mut || palette::decode_into(&palette, black_box(&mut out)).expect("decodes"));
        stage("unpack", &mut || packed::decode_into(&packed, black_box(&mut out)).expect("unpacks"));
        stage("transcode", &mut || drop(black_box(huffman::transcode(&tensor))));
        group.finish();
    }
}

criterion_group!(benches, stages);
criterion_main!(benches);
