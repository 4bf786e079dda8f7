//! Reproduces the tables of the report's section 11: sizes, whole steps, decoders, products and encoders. Each figure
//! is shown next to the report's, which was measured on an H100.
//!
//! Whole steps use a geometry with random weights, with the default pipelines or with tuned ones. As in the report,
//! `HHR-PPR` and `all Huffman` encode only MLPs. Their baseline is the same engine with BF16 weights on cuBLAS, with
//! the fastest algorithm that cuBLASLt proposes. `packed` stores all linears in this project's own encoding.

use std::{fmt, time::Instant};

use serde::Serialize;
use unweight_engine::Placement;
use unweight_format::{
    CodeLimit, Matrix, StoredTensor,
    bundle::{Profile, SectionBytes},
    raw::{huffman, palette},
};
use unweight_model::ModelConfig;
use unweight_rt::{
    DeviceError, DeviceInfo, KernelSet,
    raw::{
        device::HostMemory,
        ops::encode_huffman::{EncodeWorkspace, GpuEncoder},
    },
};

use crate::{
    BenchError, BenchOptions, DecodeModel, DecodeOptions, bench_decode, bench_kernels, data::normal_bf16,
    timing::Timing, tuned::TunedRow,
};

/// A figure of a table.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Number of the report's table.
    pub table: u32,
    /// The quantity that was measured.
    pub what: String,
    /// Sequences, or rows of a product; null where there are none.
    pub batch: Option<u32>,
    /// Unit of `ours` and `theirs`.
    pub unit: &'static str,
    /// The value measured here.
    pub ours: f64,
    /// The report's value; null if it has none.
    pub theirs: Option<f64>,
    /// `ours` over our own baseline; null for a baseline.
    pub our_ratio: Option<f64>,
    /// `theirs` over the report's baseline.
    pub their_ratio: Option<f64>,
}

/// The figures of all tables.
#[derive(Clone, Debug, Serialize)]
pub struct Tables {
    /// The GPU that was measured.
    pub device: DeviceInfo,
    /// Tokens in the KV cache per sequence of a step.
    pub context: u32,
    /// Rounds of each figure.
    pub rounds: usize,
    /// The tuned settings of HHR-PPR.
    pub tuned: Vec<TunedRow>,
    /// The figures, ordered by table.
    pub figures: Vec<Figure>,
}

/// HHR-PPR with tuned settings, which the report's own figures use, too.
const TUNED: &str = "HHR-PPR, tuned";
/// Batches of the report.
pub const BATCHES: [u32; 5] = [1, 64, 256, 512, 1024];
/// `gate_proj` of Llama-3.1-8B.
const GATE: (u32, u32) = (14336, 4096);

/// Bytes in a GiB. The report prints GiB as GB: its 14.97 is the 16.06 * 10^9 bytes of Llama-3.1-8B.
const GIB: f64 = (1u64 << 30) as f64;

/// Sizes, GiB: baseline, HHR-PPR, all Huffman.
const TABLE_8: [f64; 3] = [14.97, 13.07, 11.74];
/// Tokens per second by batch: baseline, HHR-PPR.
const TABLE_9: [[f64; 2]; 5] =
    [[168.0, 100.0], [7752.0, 5136.0], [18097.0, 11677.0], [21685.0, 14406.0], [23464.0, 16520.0]];
/// Decoders, us.
const TABLE_10: [(&str, f64); 3] = [("exponent", 130.0), ("full", 193.3), ("palette", 116.5)];
/// Products by batch, us: cuBLAS, exponents, palette.
const TABLE_11: [[f64; 3]; 5] =
    [[86.1, 109.1, 128.1], [87.7, 108.2, 128.7], [93.8, 149.6, 209.9], [135.2, 265.8, 387.6], [213.1, 458.6, 700.2]];
/// Encoders with allocation and copies, ms: Huffman, palette.
const TABLE_12: [f64; 2] = [5.2, 3.3];

/// Returns the report's figures for a batch.
fn of_batch<const N: usize>(table: &[[f64; N]; 5], batch: u32) -> Option<[f64; N]> {
    BATCHES.iter().position(|listed| *listed == batch).map(|at| table[at])
}

/// Measures the figures of all tables at `batches`, with `context` tokens in the KV cache per sequence. With `tune`,
/// also measures HHR-PPR with tuned settings.
///
/// # Errors
/// Fails if the engines do not fit in memory, or if a measurement fails.
pub fn bench_tables(
    kernels: &KernelSet,
    config: &ModelConfig,
    (batches, context, tune): (&[u32], u32, bool),
    timing: &Timing,
    progress: &(dyn Fn(&str) + Sync),
) -> Result<Tables, BenchError> {
    let mut figures = Vec::new();
    let tuned = steps(kernels, config, (batches, context, tune), timing, progress, &mut figures)?;
    let one = BenchOptions::nothing().shapes(vec![GATE]).batches(batches.to_vec()).decode(true).matmul(true);
    let report = bench_kernels(kernels, &one, timing, &|line| progress(line))?;
    for (name, theirs) in TABLE_10 {
        let row = report.rows.iter().find(|row| row.family == "decode" && row.contender.contains(name));
        figures.extend(row.map(|row| Figure {
            table: 10,
            what: format!("decode {name}"),
            batch: None,
            unit: "us",
            ours: row.median_us,
            theirs: Some(theirs),
            our_ratio: None,
            their_ratio: None,
        }));
    }
    for &batch in batches {
        let theirs = of_batch(&TABLE_11, batch);
        let rows = || report.rows.iter().filter(|row| row.family == "matmul" && row.m == batch);
        let cublas = rows().find(|row| row.contender == "cublas").map(|row| row.median_us);
        for (at, name) in ["cublas", "exponent", "palette"].into_iter().enumerate() {
            let Some(row) = rows().find(|row| row.contender.contains(name)) else { continue };
            let ratio = |us: f64, base: f64| (at > 0).then_some(base / us);
            figures.push(Figure {
                table: 11,
                what: format!("product, {name}"),
                batch: Some(batch),
                unit: "us",
                ours: row.median_us,
                theirs: theirs.map(|theirs| theirs[at]),
                our_ratio: cublas.and_then(|cublas| ratio(row.median_us, cublas)),
                their_ratio: theirs.and_then(|theirs| ratio(theirs[at], theirs[0])),
            });
        }
    }
    encoders(kernels, timing, &mut figures)?;
    let rounds = timing.rounds.max(1);
    Ok(Tables { device: kernels.device().info().clone(), context, rounds, tuned, figures })
}

/// Measures table 12 alone.
///
/// # Errors
/// A measurement fails.
pub fn bench_encoders(kernels: &KernelSet, timing: &Timing) -> Result<Tables, BenchError> {
    let mut figures = Vec::new();
    encoders(kernels, timing, &mut figures)?;
    let (device, rounds) = (kernels.device().info().clone(), timing.rounds.max(1));
    Ok(Tables { device, context: 0, rounds, tuned: Vec::new(), figures })
}

/// Measures tables 8 and 9. Returns the tuned settings of HHR-PPR.
fn steps(
    kernels: &KernelSet,
    config: &ModelConfig,
    (batches, context, tune): (&[u32], u32, bool),
    timing: &Timing,
    progress: &(dyn Fn(&str) + Sync),
    figures: &mut Vec<Figure>,
) -> Result<Vec<TunedRow>, BenchError> {
    let (mut sizes, mut all, mut tuned) = (Vec::new(), Vec::new(), Vec::new());
    for (profile, name) in [(Profile::Inference, "HHR-PPR"), (Profile::Distribution, "all Huffman")] {
        let options = DecodeOptions::default()
            .batches(batches.to_vec())
            .context(context)
            .placement(Some(Placement::Stored))
            // The report encodes only MLPs.
            .linears(Placement::Bf16)
            // The report ships and tunes HHR-PPR.
            .tune(tune && profile == Profile::Inference)
            .profile(Some(profile));
        progress(&format!("measuring whole steps: {name}"));
        let report = bench_decode(kernels, DecodeModel::Geometry(config), &options, timing, progress)?;
        let named = |placement: &str| match placement {
            "bf16" => "baseline",
            "stored" => name,
            "tuned" => TUNED,
            _ => "packed",
        };
        for engine in &report.engines {
            sizes.push((named(engine.placement.name()), engine.weight_bytes as f64 / GIB));
        }
        for row in &report.rows {
            all.push((named(row.placement), row.batch, row.tokens_per_s, row.over_baseline));
        }
        tuned.extend(report.tuned);
    }
    let baseline = sizes.iter().find(|(name, _)| *name == "baseline").map(|(_, size)| *size);
    for (at, name) in ["baseline", "HHR-PPR", "all Huffman", "packed"].into_iter().enumerate() {
        let Some((_, ours)) = sizes.iter().find(|(engine, _)| *engine == name) else { continue };
        let theirs = TABLE_8.get(at).copied();
        figures.push(Figure {
            table: 8,
            what: name.to_owned(),
            batch: None,
            unit: "GiB",
            ours: *ours,
            theirs,
            our_ratio: baseline.filter(|_| at > 0).map(|baseline| ours / baseline),
            their_ratio: theirs.filter(|_| at > 0).map(|theirs| theirs / TABLE_8[0]),
        });
    }
    for &batch in batches {
        let theirs = of_batch(&TABLE_9, batch);
        for (column, name) in [(0, "baseline"), (1, "HHR-PPR"), (1, TUNED), (2, "all Huffman"), (3, "packed")] {
            // The baseline and packed weights were measured with both profiles; the first time counts.
            let found = all.iter().find(|(engine, of, ..)| *engine == name && *of == batch);
            let Some((_, _, ours, ratio)) = found else { continue };
            let theirs = theirs.filter(|_| column < 2);
            figures.push(Figure {
                table: 9,
                what: name.to_owned(),
                batch: Some(batch),
                unit: "tokens/s",
                ours: *ours,
                theirs: theirs.map(|theirs| theirs[column]),
                our_ratio: ratio.filter(|_| column > 0),
                their_ratio: theirs.filter(|_| column > 0).map(|theirs| theirs[column] / theirs[0]),
            });
        }
    }
    Ok(tuned)
}

/// Measures table 12: encodes one tensor, including copies. Device memory is kept from round to round, as by PyTorch's
/// allocator. Host memory is either pageable, for the sections new in each round; or pinned and kept, as by PyTorch's
/// allocator of pinned memory. Each round begins with the tensor and ends with all sections in host memory. Those of
/// another round in the same memory are compared with the CPU's.
fn encoders(kernels: &KernelSet, timing: &Timing, figures: &mut Vec<Figure>) -> Result<(), BenchError> {
    let (n, k) = (GATE.0 as usize, GATE.1 as usize);
    let bytes = normal_bf16(n * k, 0.02, 1);
    let matrix = Matrix::new(&bytes, n, k)?;
    let encoder = GpuEncoder::new(kernels, CodeLimit::DEFAULT)?;
    let mut workspace = EncodeWorkspace::new(&kernels.device().stream()?);
    let mut add = |name: &str, theirs, times: f64| {
        figures.push(Figure {
            table: 12,
            what: format!("encode {name}"),
            batch: None,
            unit: "ms",
            ours: times,
            theirs: Some(theirs),
            our_ratio: None,
            their_ratio: None,
        });
    };
    let [huffman_ms, palette_ms] = TABLE_12;
    let huffman = median_ms(timing, || encoder.encode_in(&mut workspace, matrix).map(drop))?;
    add("Huffman, pageable memory", huffman_ms, huffman);
    let palette = median_ms(timing, || encoder.encode_palette_in(&mut workspace, matrix).map(drop))?;
    add("palette, pageable memory", palette_ms, palette);

    // Sections are not larger than the tensor.
    let memory = HostMemory::new(kernels.device(), bytes.len(), bytes.len())?;
    let mut pinned = memory.tensor(bytes.len()).ok_or(DeviceError::HostRoom { bytes: bytes.len() as u64 })?;
    pinned.copy_from_slice(&bytes);
    let matrix = Matrix::new(&pinned, n, k)?;
    let huffman = median_ms(timing, || encoder.encode_pinned(&mut workspace, matrix, Some(&memory)).map(drop))?;
    memory.poison(0xa5);
    let expected = huffman::encode(matrix, CodeLimit::DEFAULT)?.into();
    same_sections(&encoder.encode_pinned(&mut workspace, matrix, Some(&memory))?, &expected)?;
    add("Huffman, pinned memory", huffman_ms, huffman);
    let palette = median_ms(timing, || encoder.encode_palette_pinned(&mut workspace, matrix, Some(&memory)).map(drop))?;
    memory.poison(0xa5);
    let expected = palette::encode(matrix, CodeLimit::DEFAULT)?.into();
    same_sections(&encoder.encode_palette_pinned(&mut workspace, matrix, Some(&memory))?, &expected)?;
    add("palette, pinned memory", palette_ms, palette);
    Ok(())
}

/// Compares the sections of the GPU with those of the CPU.
fn same_sections(got: &StoredTensor<SectionBytes>, expected: &StoredTensor<Vec<u8>>) -> Result<(), BenchError> {
    if got.sections().eq(expected.sections()) {
        Ok(())
    } else {
        Err(BenchError::WrongBits { kernel: "encode_huffman" })
    }
}

/// Returns the median time of `encode` in milliseconds.
fn median_ms(timing: &Timing, mut encode: impl FnMut() -> Result<(), DeviceError>) -> Result<f64, BenchError> {
    let mut times = Vec::new();
    for round in 0..timing.warmup_rounds + timing.rounds.max(1) {
        let start = Instant::now();
        encode()?;
        if round >= timing.warmup_rounds {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times.get(times.len() / 2).copied().unwrap_or(f64::NAN))
}

/// Prints Markdown tables.
impl fmt::Display for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceInfo { name, sms, driver, .. } = &self.device;
        writeln!(f, "{name}, {sms} SMs, CUDA {driver}; context {}, median of {} rounds", self.context, self.rounds)?;
        let mut last = 0;
        for Figure { table, what, batch, unit, ours, theirs, our_ratio, their_ratio } in &self.figures {
            if *table != last {
                last = *table;
                writeln!(f, "\nTable {table}, {unit}\n")?;
                writeln!(
                    f,
                    "| | batch | measured | report | measured / baseline | report's ratio |\n|---|---|---|---|---|---|"
                )?;
            }
            let batch = batch.map_or_else(String::new, |batch| batch.to_string());
            let of = |value: &Option<f64>, digits: usize| {
                value.map_or_else(String::new, |value| format!("{value:.digits$}"))
            };
            let digits = if *unit == "tokens/s" { 0 } else { 2 };
            let (theirs, our_ratio, their_ratio) = (of(theirs, digits), of(our_ratio, 2), of(their_ratio, 2));
            writeln!(f, "| {what} | {batch} | {ours:.digits$} | {theirs} | {our_ratio} | {their_ratio} |")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_figures_match_their_batch() {
        assert_eq!(of_batch(&TABLE_9, 256), Some([18097.0, 11677.0]));
        assert_eq!(of_batch(&TABLE_11, 1024), Some([213.1, 458.6, 700.2]));
        assert_eq!(of_batch(&TABLE_9, 8), None);
        // The report's text states penalties from 29.6 to 40.7 %.
        let ratios: Vec<f64> = TABLE_9.iter().map(|[baseline, theirs]| 1.0 - theirs / baseline).collect();
        assert!(ratios.iter().all(|penalty| (0.295..0.41).contains(penalty)), "{ratios:?}");
    }
}
