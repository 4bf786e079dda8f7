//! Times graphs in interleaved rounds.

use std::fmt;

use serde::Serialize;
use unweight_codegen::plan::GemmShape;

use unweight_rt::{DeviceError, DeviceInfo, Graph, Stream};

use crate::{BenchError, options::options};

options! {
    /// Number of rounds, and the memory that the weights rotate through.
    Timing {
        /// Measured rounds.
        rounds: usize = 60,
        /// Warm-up rounds, which are not measured.
        warmup_rounds: usize = 10,
        /// Minimum number of copies of the weights.
        min_copies: usize = 5,
        /// Minimum bytes of all copies together.
        rotate_bytes: usize = 440_000_000,
        /// Memory bandwidth that the byte floor assumes, in units of 10^9 bytes per second. This is the rate of a plain
        /// read, not of the data sheet.
        floor_gb_per_s: f64 = 4100.0,
    }
}

/// The result of a benchmark, with its device and options.
#[derive(Clone, Debug, Serialize)]
pub struct Report<Options> {
    /// The GPU that was measured.
    pub device: DeviceInfo,
    /// The timing options.
    pub timing: Timing,
    /// The options of the run.
    pub options: Options,
    /// One row per contender and problem.
    pub rows: Vec<Row>,
}

/// The times of one contender on one problem.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `decode`, `encode`, `packed`, `compact`, `matmul`, `attention`, `kv_pack` or `kv_unpack`.
    pub family: &'static str,
    /// Name of the variant, `cublas`, or the encoder's stages.
    pub contender: String,
    /// Batch rows; 0 without a batch. `attention`: sequences; `kv_pack`: rows of a step, or pages; `kv_unpack`: pages.
    pub m: u32,
    /// Output features. `kv_pack`: layers of a step, or KV heads; `kv_unpack`: KV heads.
    pub n: u32,
    /// Input features. `attention`: tokens of each sequence; `kv_pack`: full rows of a step, or elements of a head;
    /// `kv_unpack`: elements of a head.
    pub k: u32,
    /// Copies of the weights.
    pub copies: usize,
    /// Median over the rounds, us.
    pub median_us: f64,
    /// 10th percentile, us.
    pub p10_us: f64,
    /// 90th percentile, us.
    pub p90_us: f64,
    /// Bytes that must be read or written.
    pub bytes: u64,
    /// `bytes` over the median time, in units of 10^9 bytes per second.
    pub gb_per_s: f64,
    /// The time to move `bytes` at [`Timing::floor_gb_per_s`], us.
    pub floor_us: f64,
    /// `floor_us / median_us`: 1 means memory speed.
    pub floor_fraction: f64,
    /// cuBLAS's median over this row's median, in the same rounds. Above 1 is faster than cuBLAS.
    pub speedup_over_cublas: Option<f64>,
    /// `attention`: BF16 attention's median over this row's median, in the same rounds. Above 1 is faster.
    pub speedup_over_bf16: Option<f64>,
    /// `|y - y_cublas| / |y_cublas|` of the outputs.
    pub error_to_cublas: Option<f64>,
    /// Whether dispatch selects this variant for this problem.
    pub dispatched: bool,
}

/// A graph to be timed, with its name and the bytes that it moves.
pub(crate) struct Contender {
    pub name: String,
    pub graph: Graph,
    /// Launches of the kernel in the graph.
    pub launches: usize,
    pub bytes: u64,
    pub error: Option<f64>,
    pub dispatched: bool,
}

impl Contender {
    /// Returns the cuBLAS baseline; `bytes` counts the weights and activations once.
    pub fn cublas((graph, launches): (Graph, usize), bytes: u64) -> Self {
        Self { name: "cublas".to_owned(), graph, launches, bytes, error: None, dispatched: false }
    }
}

/// Measures on one stream.
pub(crate) struct Timer<'a> {
    pub stream: &'a Stream,
    pub timing: &'a Timing,
}

impl Timer<'_> {
    /// Returns how many copies of `bytes` of weights are needed.
    pub fn copies(&self, bytes: usize) -> usize {
        self.timing.rotate_bytes.div_ceil(bytes.max(1)).clamp(self.timing.min_copies.max(1), 128)
    }

    pub fn each<T>(
        &self,
        copies: usize,
        make: impl FnMut(usize) -> Result<T, DeviceError>,
    ) -> Result<Vec<T>, DeviceError> {
        (0..copies).map(make).collect()
    }

    /// Records a graph that runs over all copies, several times if there are few. Also returns its number of launches.
    pub fn record(
        &self,
        problem: GemmShape,
        copies: usize,
        mut run: impl FnMut(usize) -> Result<(), DeviceError>,
    ) -> Result<(Graph, usize), DeviceError> {
        /// Enough launches to hide the gap of a few us between two graphs.
        const LAUNCHES_MIN: usize = 20;
        /// A launch with more multiplications than this takes longer than 100 us and hides the gap by itself.
        const LONG: u64 = 1 << 35;
        let multiplications = u64::from(problem.m) * u64::from(problem.n) * u64::from(problem.k);
        let passes = if multiplications > LONG { 1 } else { LAUNCHES_MIN.div_ceil(copies) };
        self.stream.synchronize()?;
        let graph = self.stream.capture(|| (0..passes * copies).try_for_each(|i| run(i % copies)))?;
        Ok((graph, passes * copies))
    }

    pub fn measure(
        &self,
        family: &'static str,
        contenders: Vec<Contender>,
        copies: usize,
        problem: GemmShape,
        progress: &dyn Fn(&str),
    ) -> Result<Vec<Row>, BenchError> {
        let rounds = self.timing.rounds.max(1);
        let mut times: Vec<Vec<f64>> = vec![Vec::with_capacity(rounds); contenders.len()];
        let launch = |contender: &Contender| {
            // SAFETY: the callers keep every buffer of their graphs alive until they have received their rows.
            unsafe { contender.graph.launch() }
        };
        for round in 0..rounds + self.timing.warmup_rounds {
            // Keep the device busy while the host enqueues the round.
            contenders.last().map_or(Ok(()), launch)?;
            let mut events = Vec::with_capacity(contenders.len());
            for contender in &contenders {
                let start = self.stream.event()?;
                launch(contender)?;
                events.push((start, self.stream.event()?));
            }
            self.stream.synchronize()?;
            if round >= self.timing.warmup_rounds {
                for ((times, (start, end)), contender) in times.iter_mut().zip(&events).zip(&contenders) {
                    times.push(start.elapsed_us(end)? / contender.launches as f64);
                }
            }
        }
        let mut rows: Vec<Row> = contenders
            .into_iter()
            .zip(times)
            .map(|(contender, mut times)| {
                times.sort_by(f64::total_cmp);
                let at = |q: f64| times[((times.len() - 1) as f64 * q).round() as usize];
                let (median_us, floor_us) = (at(0.5), contender.bytes as f64 / (self.timing.floor_gb_per_s * 1e3));
                Row {
                    family,
                    contender: contender.name,
                    m: problem.m,
                    n: problem.n,
                    k: problem.k,
                    copies,
                    median_us,
                    p10_us: at(0.1),
                    p90_us: at(0.9),
                    bytes: contender.bytes,
                    gb_per_s: contender.bytes as f64 / (median_us * 1e3),
                    floor_us,
                    floor_fraction: floor_us / median_us,
                    speedup_over_cublas: None,
                    speedup_over_bf16: None,
                    error_to_cublas: contender.error,
                    dispatched: contender.dispatched,
                }
            })
            .collect();
        if let Some(cublas) = rows.iter().find(|row| row.contender == "cublas").map(|row| row.median_us) {
            rows.iter_mut().for_each(|row| row.speedup_over_cublas = Some(cublas / row.median_us));
        }
        for row in &rows {
            progress(&row.to_string());
        }
        Ok(rows)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { contender, m, n, k, median_us, p10_us, p90_us, floor_us, floor_fraction, .. } = self;
        write!(f, "{n}x{k} m={m} {contender}: {median_us:.1} us ({p10_us:.1}..{p90_us:.1})")?;
        write!(f, ", floor {floor_us:.1} us ({:.0} %)", floor_fraction * 100.0)?;
        match self.speedup_over_cublas {
            Some(speedup) => write!(f, ", {speedup:.2}x cuBLAS"),
            None => Ok(()),
        }
    }
}

/// Prints a Markdown table.
impl<Options> fmt::Display for Report<Options> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceInfo { name, sms, driver, .. } = &self.device;
        let Timing { rounds, floor_gb_per_s, .. } = &self.timing;
        writeln!(f, "{name}, {sms} SMs, CUDA {driver}; median of {rounds} rounds, floor at {floor_gb_per_s} GB/s\n")?;
        writeln!(f, "| shape | m | contender | median us | p10 | p90 | GB/s | of the floor | over cuBLAS | copies |")?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|")?;
        for row in &self.rows {
            let speedup = row.speedup_over_cublas.map_or_else(String::new, |speedup| format!("{speedup:.2}"));
            writeln!(
                f,
                "| {}x{} | {} | {} | {:.1} | {:.1} | {:.1} | {:.0} | {:.0} % | {speedup} | {} |",
                row.n,
                row.k,
                row.m,
                row.contender,
                row.median_us,
                row.p10_us,
                row.p90_us,
                row.gb_per_s,
                row.floor_fraction * 100.0,
                row.copies
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unweight_codegen::spec::Arch;

    #[test]
    fn a_report_is_json_and_a_table() {
        let device = DeviceInfo {
            ordinal: 0,
            name: "H".to_owned(),
            arch: Arch::Sm90a,
            sms: 132,
            clock_mhz: 1980,
            memory_mb_per_s: 4_917_000,
            l2_bytes: 1,
            smem_bytes_per_block: 1,
            memory_bytes: 1,
            driver: "13.0".to_owned(),
        };
        let row = Row {
            family: "matmul",
            contender: "cublas".to_owned(),
            m: 1,
            n: 64,
            k: 64,
            copies: 5,
            median_us: 10.0,
            p10_us: 9.0,
            p90_us: 11.0,
            bytes: 41_000,
            gb_per_s: 4.1,
            floor_us: 0.01,
            floor_fraction: 0.001,
            speedup_over_cublas: Some(1.0),
            speedup_over_bf16: None,
            error_to_cublas: None,
            dispatched: false,
        };
        let report = Report { device, timing: Timing::default(), options: (), rows: vec![row] };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["rows"][0]["median_us"], 10.0);
        assert_eq!(json["device"]["arch"], "sm_90a");
        assert!(report.to_string().contains("| 64x64 | 1 | cublas | 10.0 | 9.0 | 11.0 | 4 | 0 % | 1.00 | 5 |"));
    }
}
