//! A model of a GPU: predicts the time of a product from the device properties that its driver reports.
//! The model counts the unavoidable costs of a launch: bytes from memory, X from the L2 cache, the steps of the busiest
//! multiprocessor, and the launch overhead. It serves shapes and machines without measurements.

use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{Arch, GemmWgmmaSpec, Op},
};

use super::constants::*;
use crate::choose::candidates::{PackedUse, Registered};

/// The properties of a device in the model. They come from its driver and not from measurements, so that every start on
/// the device chooses the same kernels and computes the same bits (docs/adr/0014-gpu-model.md).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuModel {
    /// The architecture for which kernels are compiled.
    pub arch: Arch,
    /// The number of multiprocessors.
    pub sms: u32,
    /// Theoretical memory bandwidth in bytes per us: bus width times clock.
    pub memory: f64,
    /// The maximum clock of the multiprocessors in MHz.
    pub clock_mhz: f64,
    /// Floating-point operations per multiprocessor and clock ([`GpuModel::tensor_rate`]).
    pub tensor: f64,
}

/// Data-center cards with half the tensor-core rate, like gaming cards.
const HALF_RATE_CARDS: [&str; 3] = ["NVIDIA A10G", "NVIDIA L20", "NVIDIA L40"];

impl GpuModel {
    /// An H200 (SXM), to which the model was fitted, as described by its driver: kernels compiled without a device are
    /// those that an H200 will request (`device` in docs/records/2026-11-22/decode-compact.json).
    pub const H200: Self = Self { arch: Arch::Sm90a, sms: 132, memory: 4.814304e6, clock_mhz: 1980.0, tensor: 4096.0 };

    /// Returns a typical device of an architecture by its vendor's data, for compiling kernels without a device.
    pub fn usual(arch: Arch) -> Self {
        let (sms, memory, clock_mhz, name) = match arch {
            Arch::Sm90a => return Self::H200,
            Arch::Sm80 => (108, 2.039e6, 1410.0, "NVIDIA A100-SXM4-80GB"),
            Arch::Sm86 => (82, 0.936e6, 1695.0, "NVIDIA GeForce RTX 3090"),
            Arch::Sm89 => (128, 1.008e6, 2520.0, "NVIDIA GeForce RTX 4090"),
            Arch::Sm100a => (148, 8.0e6, 1965.0, "NVIDIA B200"),
            Arch::Sm103a => (148, 8.0e6, 1965.0, "NVIDIA B300"),
            Arch::Sm120a => (170, 1.792e6, 2407.0, "NVIDIA GeForce RTX 5090"),
        };
        Self { arch, sms, memory, clock_mhz, tensor: Self::tensor_rate(arch, name) }
    }

    /// Returns the floating-point operations per multiprocessor and clock, in BF16 with fp32 accumulation, of a device
    /// with this driver name: with `mma.sync`, on Hopper with `wgmma`. It is the data sheet's rate divided by
    /// multiprocessors and boost clock.
    ///
    /// On architectures that are also sold as gaming cards, those cards have half the rate with fp32 accumulation. So
    /// do an A10G, an L20 and an L40, but not an A10 or an L40S.
    pub fn tensor_rate(arch: Arch, name: &str) -> f64 {
        match arch {
            Arch::Sm90a => 4096.0,
            Arch::Sm80 | Arch::Sm100a | Arch::Sm103a => 2048.0,
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120a if name.contains("GeForce") || HALF_RATE_CARDS.contains(&name) => {
                512.0
            }
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120a => 1024.0,
        }
    }

    /// Returns the ratio of its clock to that of an H200.
    fn clock(&self) -> f64 {
        self.clock_mhz / Self::H200.clock_mhz
    }

    /// Returns the achievable read bandwidth in bytes per us.
    fn reads(&self) -> f64 {
        self.memory * MEMORY / Self::H200.memory
    }

    /// Returns cuBLAS's floating-point operations per us.
    fn cublas_flop(&self) -> f64 {
        match self.arch {
            // With `tcgen05`, whose rate `mma.sync` does not reach.
            Arch::Sm100a | Arch::Sm103a => self.tensor_flop(8192.0),
            _ => self.tensor_flop(self.tensor),
        }
    }

    /// Returns the floating-point operations per us for a rate per multiprocessor and clock.
    fn tensor_flop(&self, rate: f64) -> f64 {
        CUBLAS_SHARE * rate * f64::from(self.sms) * self.clock_mhz
    }

    /// Returns the ratio of its tensor-core rate per clock to Hopper's.
    fn tensor_share(&self) -> f64 {
        self.tensor / Self::H200.tensor
    }
}

/// Returns the variants that can compute a problem from packed weights, with predicted microseconds, fastest first:
/// built-in and registered ones.
///
/// Empty if `n` or `k` is not a multiple of 64, or if there is nothing to compute.
pub fn candidates(
    gpu: &GpuModel,
    registered: &Registered,
    problem: GemmShape,
    packed_use: PackedUse,
) -> Vec<(VariantSpec, f64)> {
    ranked(gpu, problem, registered.packed(gpu.arch, packed_use))
}

/// Like [`candidates`], for compact weights; also empty for architectures without such variants.
pub fn compact_candidates(
    gpu: &GpuModel,
    registered: &Registered,
    problem: GemmShape,
    packed_use: PackedUse,
) -> Vec<(VariantSpec, f64)> {
    ranked(gpu, problem, registered.compact(gpu.arch, packed_use))
}

fn ranked(gpu: &GpuModel, problem: GemmShape, variants: impl Iterator<Item = VariantSpec>) -> Vec<(VariantSpec, f64)> {
    let GemmShape { m, n, k } = problem;
    if m == 0 || n == 0 || k == 0 || !n.is_multiple_of(64) || !k.is_multiple_of(64) {
        return Vec::new();
    }
    let mut found: Vec<(VariantSpec, f64)> =
        variants.filter_map(|spec| Some((spec, predicted_us(&spec, problem, gpu)?))).collect();
    // Stable: of equal times, built-in variants stay before registered ones.
    found.sort_by(|a, b| a.1.total_cmp(&b.1));
    found
}

/// Returns the microseconds of expanding a compact weight to packed tiles: bytes read and written, at the measured
/// share of the memory bandwidth (53.7 us for 14336x4096).
pub fn expand_us(gpu: &GpuModel, n: u32, k: u32) -> f64 {
    const BANDWIDTH_SHARE: f64 = 0.74;
    let weights = f64::from(n) * f64::from(k);
    LAUNCH_US + weights * (COMPACT_BYTES + 1.5) / (gpu.reads() * BANDWIDTH_SHARE)
}

/// Returns the microseconds of cuBLAS on BF16: the larger of memory reads and tensor-core work.
pub fn cublas_us(gpu: &GpuModel, problem: GemmShape) -> f64 {
    let GemmShape { m, n, k } = problem;
    let weights = f64::from(n) * f64::from(k);
    LAUNCH_US + (2.0 * weights / gpu.reads()).max(2.0 * weights * f64::from(m) / gpu.cublas_flop())
}

/// Returns the minimum microseconds of a product with `mma.sync`: the multiplications at cuBLAS's share of the
/// tensor-core rate. [`predicted_us`] was fitted to memory-bound batches and has no such minimum.
pub fn mma_floor_us(gpu: &GpuModel, problem: GemmShape) -> f64 {
    let GemmShape { m, n, k } = problem;
    2.0 * f64::from(n) * f64::from(k) * f64::from(m) / gpu.tensor_flop(gpu.tensor)
}

/// Returns the microseconds of expanding a packed or compact weight to BF16: bytes read and written, at the memory
/// bandwidth.
pub fn bf16_us(gpu: &GpuModel, n: u32, k: u32, compact: bool) -> f64 {
    let read = if compact { COMPACT_BYTES } else { 1.5 };
    LAUNCH_US + f64::from(n) * f64::from(k) * (read + 2.0) / gpu.reads()
}

/// Returns the predicted microseconds of a launch. `None` for a variant that cannot exist, belongs to another family or
/// is not considered at this batch. The constants were fitted to an H200
/// (docs/records/2026-11-21/matmul-packed-log.md; for `gemm_wgmma`, 2026-11-27/matmul-wgmma.csv).
pub fn predicted_us(spec: &VariantSpec, problem: GemmShape, gpu: &GpuModel) -> Option<f64> {
    let (sms, clock) = (gpu.sms, gpu.clock());
    let plan = Plan::new(spec).ok()?;
    let GemmShape { m, n, k } = problem;
    let weight_bytes = f64::from(n) * f64::from(k) * 1.5;
    let (sms_f, columns) = (f64::from(sms), f64::from(k) / 64.0);
    match spec.op {
        // They read the weights once per tile.
        Op::GemmMma(op) if op.batch_tile.get() < 32 && m > SMALL_TILES_BATCH => None,
        Op::GemmMma(op) => {
            let blocks = f64::from(plan.launch.grid.blocks(problem, sms)?);
            let (batch_tile, cluster) = (f64::from(op.batch_tile.get()), f64::from(op.cluster.get()));
            let batch_tiles = f64::from(m.div_ceil(op.batch_tile.get()));
            let groups = blocks / (cluster * batch_tiles);
            let rows_per_group = (f64::from(n / 16) / groups).ceil();
            let per_sm = f64::from(plan.launch.blocks_per_sm);
            let (active, resident) = (sms_f.min(blocks), (blocks / sms_f).ceil().min(per_sm));
            let row_blocks = rows_per_group.min(f64::from(op.row_blocks.get()));
            let in_flight = active * resident * f64::from(op.warps.get() * op.stages.get()) * row_blocks * 1536.0;
            let rate = gpu.reads().min(in_flight / MEMORY_LATENCY_US).min(active * MEMORY_PER_SM * clock);
            let x = groups * batch_tiles * f64::from(k) * batch_tile * 2.0 / (CACHED_X * clock * sms_f / H200_SMS);
            let steps = (blocks / sms_f).ceil() * rows_per_group * columns / cluster;
            let multiply = SMALL_STEP_US.1 * batch_tile / 8.0 / gpu.tensor_share();
            let computed = steps * (SMALL_STEP_US.0 + multiply) / clock;
            let waves = (blocks / (sms_f * per_sm)).ceil() - 1.0;
            let wave_us = waves * if per_sm == 1.0 { SMALL_WAVE_US.0 } else { SMALL_WAVE_US.1 };
            let exchange_us = if cluster > 1.0 { CLUSTER_US } else { 0.0 };
            // The fewer bytes are in flight, the longer the wait for the last ones.
            let tail = 3e6 / in_flight;
            let launch = if op.pdl { DEPENDENT_LAUNCH_US } else { LAUNCH_US };
            Some(launch + (weight_bytes * batch_tiles / rate + x).max(computed) + wave_us + exchange_us + tail)
        }
        // Decoding is the limit, not memory: the dependent decode chains of a single warp, or the instruction rate of a
        // multiprocessor. Fitted to 32 problems (docs/records/2026-11-22/matmul-compact-nine.csv): for each, the
        // variant predicted to be fastest was the fastest.
        Op::GemmCompact(op) => {
            let blocks = f64::from(plan.launch.grid.blocks(problem, sms)?);
            let (cluster, warps) = (f64::from(op.cluster.get()), f64::from(op.warps.get()));
            let per_sm = f64::from(plan.launch.blocks_per_sm);
            let rows = COMPACT_ROWS_US * (f64::from(op.batch_tile.get()) / 8.0 - 1.0) / gpu.tensor_share();
            let exchange_us = if cluster > 1.0 { COMPACT_CLUSTER_US } else { 0.0 };
            // The time of a wave with `resident` blocks per multiprocessor, each with its share of a cluster's rows of
            // tiles.
            let batch_tiles = f64::from(m.div_ceil(op.batch_tile.get()));
            let groups = blocks / (cluster * batch_tiles);
            let tiles = (f64::from(n / 64) / groups).ceil() * columns;
            let wave = |resident: f64| {
                let alone = (tiles / (cluster * warps)).ceil() * (COMPACT_TILE_US.1 + rows);
                let shared = tiles / cluster * resident * (COMPACT_TILE_US.0 + rows / 8.0);
                alone.max(shared) / clock + exchange_us + COMPACT_WAVE_US
            };
            let (waves, rest) = ((blocks / (sms_f * per_sm)).floor(), blocks % (sms_f * per_sm));
            let last = if rest > 0.0 { wave((rest / sms_f).ceil()) } else { 0.0 };
            let read = f64::from(n) * f64::from(k) * COMPACT_BYTES * batch_tiles / (gpu.reads() * COMPACT_READS);
            let launch = if op.pdl { DEPENDENT_LAUNCH_US } else { LAUNCH_US };
            Some(launch + (waves * wave(per_sm) + last).max(read))
        }
        Op::GemmWgmma(op) if m > SMALL_BATCH => {
            // Empty and oversized grids have no time.
            plan.launch.grid.blocks(problem, sms)?;
            Some(wide_us(&op, problem, gpu))
        }
        _ => None,
    }
}

/// Returns the predicted microseconds of a `gemm_wgmma` launch: the steps of the busiest multiprocessor, each 64 of k
/// of an output tile, or the reads of the weights. Fitted to docs/records/2026-11-27/matmul-wgmma.csv; the test
/// `wide_choices_are_near_the_fastest` states how far the choices are from the fastest variants there.
fn wide_us(op: &GemmWgmmaSpec, GemmShape { m, n, k }: GemmShape, gpu: &GpuModel) -> f64 {
    let (sms, columns) = (f64::from(gpu.sms), f64::from(k) / 64.0);
    let (cluster, warpgroups, tile_rows) = (op.cluster.get(), op.warpgroups.get(), op.batch_tile.get());
    let (features, batch_tiles) = (f64::from(n.div_ceil(64 * warpgroups)), f64::from(m.div_ceil(tile_rows)));
    let cluster_us = |(once, of_tile): (f64, f64)| once + of_tile * f64::from(warpgroups * tile_rows) / 512.0;

    // Only as many clusters are resident as fit; a work unit of stream-K has a block for each batch tile.
    let usable = if cluster > 2 { sms * WIDE_CLUSTERED } else { sms };
    let per_block = match (sms / batch_tiles).floor() {
        units if op.stream_k && units > 0.0 => features / units,
        _ => features * batch_tiles / (usable / f64::from(cluster)).floor().max(1.0),
    };

    // Tensor cores and decoding overlap, so that the longer one determines the time, unless both take about as long.
    let tensor = WIDE_ROW_US * f64::from(warpgroups * tile_rows) / gpu.tensor_share();
    let decode = WIDE_DECODE_US[(warpgroups - 1) as usize];
    let busy = (features * batch_tiles * f64::from(cluster) / sms).min(1.0);
    let power = match op.stream_k {
        _ if per_block > 1.0 => WIDE_WARM,
        true => 1.0,
        false => 1.0 + WIDE_BUSY.0 * (busy - WIDE_BUSY.1),
    };
    let step = (tensor.powi(4) + decode.powi(4)).powf(0.25) * power / gpu.clock();

    let work = if op.stream_k {
        let x_bytes = batch_tiles * f64::from(tile_rows) * f64::from(k) * 2.0;
        let misses = 1.0 + WIDE_X_MISSES * (x_bytes / WIDE_X_BYTES).min(1.0);
        let fixup = if per_block.fract() > 0.0 { cluster_us(WIDE_FIXUP_US) } else { 0.0 };
        per_block * columns * step * misses + fixup
    } else {
        per_block.ceil() * columns * step / f64::from(cluster)
    };
    let exchange = if cluster > 1 { per_block.ceil() * cluster_us(WIDE_CLUSTER_US) } else { 0.0 };
    let launch = match (op.stream_k, op.pdl) {
        (true, _) => WIDE_LAUNCH_US.0 + WIDE_COOPERATIVE_US,
        (false, true) => WIDE_LAUNCH_US.0,
        (false, false) => WIDE_LAUNCH_US.0 + WIDE_LAUNCH_US.1,
    };
    let read = f64::from(n) * f64::from(k) * 1.5 / (WIDE_MEMORY * gpu.reads() / MEMORY);
    launch + work.max(read) + exchange
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_of_the_device_that_the_model_describes() {
        assert_eq!(H200_SMS, f64::from(GpuModel::H200.sms));
    }

    /// Rates from data sheets in TFLOPS: dense BF16, fp32 accumulation.
    #[test]
    fn tensor_core_rates_match_data_sheets() {
        for (name, arch, sms, boost_mhz, tflops) in [
            ("NVIDIA A100-SXM4-80GB", Arch::Sm80, 108, 1410.0, 312.0),
            ("NVIDIA A30", Arch::Sm80, 56, 1440.0, 165.0),
            ("NVIDIA GeForce RTX 3090", Arch::Sm86, 82, 1695.0, 71.0),
            ("NVIDIA GeForce RTX 3080", Arch::Sm86, 68, 1710.0, 59.5),
            ("NVIDIA A40", Arch::Sm86, 84, 1740.0, 149.7),
            ("NVIDIA A10", Arch::Sm86, 72, 1695.0, 125.0),
            ("NVIDIA RTX A6000", Arch::Sm86, 84, 1800.0, 154.8),
            ("NVIDIA GeForce RTX 4090", Arch::Sm89, 128, 2520.0, 165.2),
            ("NVIDIA GeForce RTX 4080", Arch::Sm89, 76, 2505.0, 97.5),
            ("NVIDIA L4", Arch::Sm89, 58, 2040.0, 121.0),
            ("NVIDIA A10G", Arch::Sm86, 80, 1710.0, 70.0),
            ("NVIDIA L20", Arch::Sm89, 92, 2520.0, 119.5),
            ("NVIDIA L40", Arch::Sm89, 142, 2490.0, 181.05),
            ("NVIDIA L40S", Arch::Sm89, 142, 2520.0, 362.05),
            ("NVIDIA RTX 6000 Ada Generation", Arch::Sm89, 142, 2505.0, 364.2),
            ("NVIDIA H200", Arch::Sm90a, 132, 1830.0, 989.0),
            ("NVIDIA GeForce RTX 5090", Arch::Sm120a, 170, 2407.0, 209.5),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", Arch::Sm120a, 188, 2617.0, 503.8),
        ] {
            let modelled = GpuModel::tensor_rate(arch, name) * f64::from(sms) * boost_mhz / 1e6;
            assert!((modelled / tflops - 1.0_f64).abs() < 0.02, "{name}: {modelled:.1} TFLOPS, data sheet: {tflops}");
        }
    }
}
