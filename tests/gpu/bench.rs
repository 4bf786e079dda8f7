//! The benchmarks on a GPU: small problems, every family, a plausible report.

use std::collections::BTreeSet;

use crate::harness::gpu;
use unweight_bench::{
    BenchOptions, MatmulOptions, Report, RivalsOptions, Timing, bench_kernels, bench_matmul, bench_rivals,
};
use unweight_codegen::{VariantSpec, plan::GemmShape, spec::Epilogue};
use unweight_rt::raw::choose::recon::{Source, candidates};

/// Small problems, whose times are not representative.
fn quick() -> BenchOptions {
    BenchOptions::nothing().shapes(vec![(256, 320)]).batches(vec![1, 130])
}

fn quick_timing() -> Timing {
    Timing::default().rounds(5).warmup_rounds(2).min_copies(2).rotate_bytes(0)
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
#[ignore = "needs a GPU"]
fn decoders_and_encoder() {
    let kernels = gpu();
    let options = quick().decode(true).encode(true);
    let report = bench_kernels(kernels, &options, &quick_timing(), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    // Three decoders; five stages of the Huffman encoder, each with the stages before, and the palette encoder.
    check(&report, 3 + 6);
}

#[test]
#[ignore = "needs a GPU"]
fn matmuls_against_cublas() {
    let kernels = gpu();
    let options = quick().matmul(true).all_variants(true);
    let report = bench_kernels(kernels, &options, &quick_timing(), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    check(&report, report.rows.len());
    assert!(report.rows.iter().all(|row| row.speedup_over_cublas.is_some()));
    let info = kernels.device().info();
    for m in [1, 130] {
        let contenders: Vec<&str> =
            report.rows.iter().filter(|row| row.m == m).map(|row| row.contender.as_str()).collect();
        let variants: Vec<VariantSpec> = contenders.iter().filter_map(|name| name.parse().ok()).collect();
        assert_eq!(variants.len() + 1, contenders.len(), "cuBLAS, and variants: {contenders:?}");
        let of_source = |palette: bool| {
            let is_of_it = |spec: &VariantSpec| spec.to_string().contains("_palette_") == palette;
            variants.iter().copied().filter(is_of_it).collect::<BTreeSet<_>>()
        };
        // Every variant that supports the shape, for both sources. The number for exponents does not depend on the
        // weights.
        let problem = GemmShape { m, n: 256, k: 320 };
        let every = candidates(info.arch, Source::Exponent, problem, info.sms, Epilogue::Store);
        assert!(every.len() > 1, "{every:?}");
        assert_eq!(of_source(false), every.into_iter().collect());
        assert!(!of_source(true).is_empty(), "{contenders:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn conversions_of_the_packed_encoding() {
    let kernels = gpu();
    let options = quick().packed(true);
    let report = bench_kernels(kernels, &options, &quick_timing(), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    // Three steps of packing, each with the steps before, and unpacking; the compact encoding to BF16 and to packed.
    check(&report, 4 + 2);
}

#[test]
#[ignore = "needs a GPU"]
fn packed_matmuls_against_cublas() {
    let kernels = gpu();
    let options =
        MatmulOptions::default().shapes(vec![(256, 320), (192, 64)]).batches(vec![1, 70]).candidates(3).layer(false);
    let report = bench_matmul(kernels, &options, &quick_timing(), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    // The dispatched variant once per problem and kind of launch, plus at least one candidate of the cost model.
    assert_eq!(report.rows.iter().filter(|row| row.dispatched).count(), 2 * 2 * 2);
    assert!(report.rows.len() >= 2 * 2 * (1 + 2 * 3));
    let table = report.table(kernels.chooser().registered());
    assert_eq!((table.rows.len(), table.device.as_str()), (2 * 2 * 2, report.device.name.as_str()));
    for row in &table.rows {
        let of = |contender: &str| {
            let same = |other: &&unweight_bench::Row| (other.n, other.k, other.m) == (row.n, row.k, row.m);
            report.rows.iter().filter(same).find(|other| other.contender == contender).map(|row| row.median_us)
        };
        let best = of(&row.variant.to_string()).expect("the table names a measured variant");
        let launch = if row.pdl { "_pdl_" } else { "_esc_store" };
        let others = report.rows.iter().filter(|other| (other.n, other.k, other.m) == (row.n, row.k, row.m));
        assert!(others.filter(|other| other.contender.contains(launch)).all(|other| other.median_us >= best));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn rivals_against_cublas() {
    let kernels = gpu();
    let options = RivalsOptions::default().shapes(vec![(1024, 512)]).batches(vec![1, 40]).int8(512).fp8_mib(vec![1]);
    let report = bench_rivals(kernels, &options, &quick_timing(), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    println!("{report}");
    let of = |family: &str, m: u32| report.rows.iter().filter(|row| row.family == family && row.m == m).count();
    assert_eq!((of("rivals_decode", 0), of("rivals_elements", 0), of("rivals_fp8", 0)), (7, 4, 5));
    // Four ways to multiply, and separate decoding for the two that decode first.
    assert_eq!((of("rivals_layer", 1), of("rivals_layer", 40)), (6, 6));
    assert!(report.rows.iter().all(|row| row.median_us > 0.0));
    let host = report.rows.iter().find(|row| row.contender == "copy from the host").map(|row| row.bytes);
    assert_eq!(host, Some(2 * 1024 * 512));
}

#[test]
#[ignore = "needs a GPU"]
fn packed_kv_cache_is_measured() {
    let options = BenchOptions::nothing().kv_cache(true);
    let report = bench_kernels(gpu(), &options, &quick_timing(), &|line| println!("{line}")).unwrap();
    // Nine problems with two caches; packing and unpacking of a chunk, and steps with three numbers of full pages.
    check(&report, 23);
    let attention = report.rows.iter().filter(|row| row.family == "attention");
    assert!(attention.clone().count() == 18 && attention.clone().all(|row| row.speedup_over_bf16.is_some()));
}
