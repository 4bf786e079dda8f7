//! Plots of the measurements.

use std::collections::BTreeMap;

use unweight::cli::plot::{Drawing, Ratios};
use unweight_bench::{DecodeReport, Row};

type Lines = Vec<(String, BTreeMap<u32, f64>)>;

fn ratios(caption: &'static str, (x_name, ratio_name): (&'static str, &'static str), lines: Lines) -> Drawing<'static> {
    Drawing::Ratios(Ratios { caption, x_name, ratio_name, lines })
}

/// Plots the speedup over cuBLAS by batch, one line per shape. Shows the dispatched variant, under dependent launch if
/// that was measured.
pub fn speedups(rows: &[Row]) -> Drawing<'static> {
    let caption = "Matmul from compressed weights: times cuBLAS, in the same rounds";
    ratios(caption, ("batch", "times cuBLAS"), dispatched(rows))
}

/// Returns the speedups of dispatched variants by shape and encoding, then by batch.
fn dispatched(rows: &[Row]) -> Lines {
    // Keep the last dispatched row per shape and batch: ordinary launches come before dependent ones.
    let mut lines: Lines = Vec::new();
    for row in rows.iter().filter(|row| row.dispatched) {
        let Some(speedup) = row.speedup_over_cublas else { continue };
        let encoding = if row.contender.contains("gemm_compact") { ", compact" } else { "" };
        let name = if row.n == 0 { "a whole layer".to_owned() } else { format!("{} x {}{encoding}", row.n, row.k) };
        match lines.iter_mut().find(|line| line.0 == name) {
            Some((_, line)) => drop(line.insert(row.m, speedup)),
            None => lines.push((name, BTreeMap::from([(row.m, speedup)]))),
        }
    }
    lines
}

/// Plots the speedup of a decode step over the BF16 baseline, by batch.
pub fn decode_steps(report: &DecodeReport) -> Drawing<'static> {
    // An engine with pipelines comes after the packed one, so the first engine is the one to plot.
    let measured = report.engines.first().map(|engine| (engine.placement.name(), engine.kv_cache));
    let steps = report.rows.iter().filter(|row| Some((row.placement, row.kv_cache)) == measured);
    let line = steps.filter_map(|row| Some((row.batch, row.over_baseline?))).collect();
    let name = format!("context {}", report.options.context);
    let caption = "A decode step: times the same engine on cuBLAS, in the same rounds";
    ratios(caption, ("batch", "times the BF16 baseline"), vec![(name, line)])
}

/// Plots the rate of sums of coded FP8 vectors over that of plain vectors, by size. This is the factor by which coding
/// increases the effective memory bandwidth.
pub fn amplification(rows: &[Row]) -> Drawing<'static> {
    ratios("Sums of two FP8 vectors: times the rate of plain ones", ("MiB a vector", "times plain"), amplified(rows))
}

fn amplified(rows: &[Row]) -> Lines {
    const PLAIN: &str = "fp8 as it is";
    let sums = || rows.iter().filter(|row| row.family == "rivals_fp8");
    let mut lines: Lines = Vec::new();
    for row in sums().filter(|row| row.contender != PLAIN) {
        let Some(plain) = sums().find(|plain| plain.contender == PLAIN && plain.n == row.n) else { continue };
        let (name, point) = (format!("{} bytes", row.contender), (row.n >> 20, plain.median_us / row.median_us));
        match lines.iter_mut().find(|line| line.0 == name) {
            Some((_, line)) => drop(line.insert(point.0, point.1)),
            None => lines.push((name, BTreeMap::from([point]))),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(contender: &str, n: u32, median_us: f64) -> Row {
        Row {
            family: "rivals_fp8",
            contender: contender.to_owned(),
            m: 0,
            n,
            k: 1,
            copies: 1,
            median_us,
            p10_us: median_us,
            p90_us: median_us,
            bytes: 0,
            gb_per_s: 0.0,
            floor_us: 0.0,
            floor_fraction: 0.0,
            speedup_over_cublas: None,
            speedup_over_bf16: None,
            error_to_cublas: None,
            dispatched: false,
        }
    }

    #[test]
    fn coded_sums_are_drawn_next_to_plain_ones() {
        let rows = [
            sum("fp8 as it is", 1 << 25, 25.0),
            sum("tans 128", 1 << 25, 75.0),
            sum("fp8 as it is", 1 << 26, 50.0),
            sum("tans 128", 1 << 26, 100.0),
            sum("tans 512", 1 << 26, 125.0),
            sum("tans 512", 1 << 27, 1.0),
        ];
        let line = |name: &str, points: &[(u32, f64)]| (name.to_owned(), points.iter().copied().collect());
        let expected = [line("tans 128 bytes", &[(32, 1.0 / 3.0), (64, 0.5)]), line("tans 512 bytes", &[(64, 0.4)])];
        assert_eq!(amplified(&rows), expected);
    }

    #[test]
    fn both_placements_of_a_shape_have_a_line() {
        let row = |contender: &str, m, speedup| Row {
            family: "gemm_packed",
            contender: contender.to_owned(),
            m,
            n: 4096,
            k: 64,
            copies: 1,
            median_us: 1.0,
            p10_us: 1.0,
            p90_us: 1.0,
            bytes: 1,
            gb_per_s: 1.0,
            floor_us: 1.0,
            floor_fraction: 1.0,
            speedup_over_cublas: Some(speedup),
            speedup_over_bf16: None,
            error_to_cublas: None,
            dispatched: contender != "cublas",
        };
        let (packed, compact) = ("uw_sm90a_gemm_mma_b8_r4w8p2c1_store", "uw_sm90a_gemm_compact_b8_w8p1c1_store");
        let rows = [
            row("cublas", 1, 1.0),
            row(packed, 1, 1.2),
            row(packed, 1, 1.4),
            row(compact, 1, 1.3),
            row(packed, 2, 1.5),
        ];
        let lines = dispatched(&rows);
        let line = |points: &[(u32, f64)]| points.iter().copied().collect::<BTreeMap<_, _>>();
        assert_eq!(
            lines,
            [
                ("4096 x 64".to_owned(), line(&[(1, 1.4), (2, 1.5)])),
                ("4096 x 64, compact".to_owned(), line(&[(1, 1.3)])),
            ]
        );
    }
}
