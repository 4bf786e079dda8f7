//! The benchmark itself on a GPU: small problems, every family, a report whose numbers can be true.

#[path = "support/gpu.rs"]
mod gpu;

use gpu::gpu;
use unweight_rt::bench::{BenchOptions, Report, Timing, bench_kernels};

/// Small problems: the numbers are not for records.
fn quick() -> BenchOptions {
    BenchOptions {
        shapes: vec![(256, 320)],
        batches: vec![1, 130],
        decode: false,
        encode: false,
        matmul: false,
        ..BenchOptions::default()
    }
}

fn quick_timing() -> Timing {
    Timing { rounds: 5, warmup_rounds: 2, min_copies: 2, rotate_bytes: 0, ..Timing::default() }
}

fn check(report: &Report<BenchOptions>, rows: usize) {
    println!("{report}");
    assert_eq!(report.rows.len(), rows);
    for row in &report.rows {
        assert!(row.p10_us > 0.0 && row.p10_us <= row.median_us && row.median_us <= row.p90_us, "{row}");
        assert!(row.bytes > 0 && row.copies >= 2, "{row}");
    }
}

#[test]
fn decoders_and_encoder() {
    let Some(kernels) = gpu() else { return };
    let options = BenchOptions { decode: true, encode: true, ..quick() };
    let report = bench_kernels(kernels, &options, &quick_timing(), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    // Three decoders; five stages of a Huffman tensor, each with those before it, and the palette encoder.
    check(&report, 3 + 6);
}

#[test]
fn matmuls_beside_cublas() {
    let Some(kernels) = gpu() else { return };
    let options = BenchOptions { matmul: true, all_variants: true, ..quick() };
    let report = bench_kernels(kernels, &options, &quick_timing(), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    // At each batch cuBLAS, and of both sources every ring of Table 5 but n = 3, which does not divide 256.
    check(&report, 2 * (1 + 2 * 7));
    assert!(report.rows.iter().all(|row| row.speedup_over_cublas.is_some()));
}

/// The record of docs/benchmarks.md: `gpu_bench record --ignored --nocapture`, JSON into `$OUT/kernels.json` where that is set.
#[test]
#[ignore = "minutes on a GPU that nobody else uses"]
fn record() {
    let Some(kernels) = gpu() else { return };
    let report = bench_kernels(kernels, &BenchOptions::default(), &Timing::default(), &|line| println!("{line}"))
        .unwrap_or_else(|error| panic!("{error}"));
    println!("{report}");
    if let Some(folder) = std::env::var_os("OUT") {
        let path = std::path::Path::new(&folder).join("kernels.json");
        std::fs::write(path, serde_json::to_vec_pretty(&report).unwrap()).unwrap();
    }
}
