//! Which register-sourced matmul computes a problem: a model of the machine, and a table of what was measured, which
//! overrides it.
//!
//! The model counts what a launch cannot avoid: bytes from memory, X from the second-level cache, the steps of the
//! multiprocessor that has most to do, and what a launch costs in itself. It is for shapes and machines that nobody has
//! measured; a benchmark writes a table for the machine at hand, which
//! [`KernelSet::chooser`](crate::device::KernelSet::chooser) follows.

use std::{collections::BTreeSet, sync::OnceLock};

use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    plan::{GemmShape, Plan},
    spec::{Arch, Epilogue, GemmCompactSpec, GemmMmaSpec, GemmWgmmaSpec, Op, catalog},
};

use super::table::MeasuredTable;

/// What a product is wanted for, beside its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedUse {
    /// The tensor has elements outside its window.
    pub escapes: bool,
    /// Programmatic dependent launch: the kernels of the stream before it may still run when it starts.
    pub pdl: bool,
    /// Overwrite or add.
    pub epilogue: Epilogue,
}

impl PackedUse {
    /// The same where the architecture may have no programmatic dependent launch.
    fn on(self, arch: Arch) -> Self {
        Self { pdl: self.pdl && arch.has(Instruction::DependentLaunch), ..self }
    }

    /// The variant of the same shape for this use; `None` if it is of another family.
    ///
    /// Without escapes only variants of batch tile 8 ship: beyond it nothing is gained, and some shapes spill.
    pub fn of(self, spec: VariantSpec) -> Option<VariantSpec> {
        let Self { escapes, pdl, epilogue } = self;
        let op = match spec.op {
            Op::GemmMma(op) => {
                let escapes = escapes || op.batch_tile.get() > 8;
                Op::GemmMma(GemmMmaSpec { escapes, pdl, epilogue, ..op })
            }
            Op::GemmWgmma(op) => Op::GemmWgmma(GemmWgmmaSpec { escapes: true, pdl, epilogue, ..op }),
            _ => return None,
        };
        Some(VariantSpec { op, ..spec })
    }
}

/// What the model knows of a device: what its driver says, no measurement, so that every start on it chooses the same
/// kernels and gives the same bits (docs/adr/0014-machines.md).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// What its kernels are compiled for.
    pub arch: Arch,
    /// Multiprocessors.
    pub sms: u32,
    /// What its memory could give, bytes per us: the width of its bus by its clock.
    pub memory: f64,
    /// The highest clock of its multiprocessors, MHz.
    pub clock_mhz: f64,
    /// Floating-point operations of a multiprocessor in a clock ([`Machine::tensor_rate`]).
    pub tensor: f64,
}

/// Cards for data centers whose tensor cores are halved as those for games.
const HALVED: [&str; 3] = ["NVIDIA A10G", "NVIDIA L20", "NVIDIA L40"];

impl Machine {
    /// An H200 (SXM), which the model was fitted to, as its driver describes it: what is compiled for one where there
    /// is none is what it will ask for (`device` in docs/records/h200-2026-11-22/decode-compact.json).
    pub const H200: Self = Self { arch: Arch::Sm90a, sms: 132, memory: 4.814304e6, clock_mhz: 1980.0, tensor: 4096.0 };

    /// A device of an architecture, as its vendor describes it, for kernels that are compiled where there is none.
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

    /// Floating-point operations of a multiprocessor in a clock, in BF16 with fp32 sums, of a device by its driver's
    /// name: by `mma.sync`, on Hopper by `wgmma`. It is what data sheets say of a card, over its multiprocessors and
    /// its boost clock.
    ///
    /// Of architectures that are sold for games, too, those cards do half of the others where sums are fp32; so do an
    /// A10G, an L20 and an L40, but not an A10 or an L40S.
    pub fn tensor_rate(arch: Arch, name: &str) -> f64 {
        match arch {
            Arch::Sm90a => 4096.0,
            Arch::Sm80 | Arch::Sm100a | Arch::Sm103a => 2048.0,
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120a if name.contains("GeForce") || HALVED.contains(&name) => 512.0,
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120a => 1024.0,
        }
    }

    /// Its clock over that of an H200.
    fn clock(&self) -> f64 {
        self.clock_mhz / Self::H200.clock_mhz
    }

    /// What reads get of its memory, bytes per us.
    fn reads(&self) -> f64 {
        self.memory * MEMORY / Self::H200.memory
    }

    /// Floating-point operations of cuBLAS in a us.
    fn cublas_flop(&self) -> f64 {
        match self.arch {
            // By `tcgen05`, which `mma.sync` does not reach.
            Arch::Sm100a | Arch::Sm103a => self.tensor_flop(8192.0),
            _ => self.tensor_flop(self.tensor),
        }
    }

    /// Floating-point operations in a us, at so many of a multiprocessor in a clock.
    fn tensor_flop(&self, rate: f64) -> f64 {
        CUBLAS_SHARE * rate * f64::from(self.sms) * self.clock_mhz
    }

    /// What a multiprocessor multiplies in a clock, over Hopper's.
    fn tensor_share(&self) -> f64 {
        self.tensor / Self::H200.tensor
    }
}

/// The catalogued shapes that can compute a problem, with the microseconds that the model predicts, fastest first.
///
/// Empty where `n` or `k` is no multiple of 64, or there is nothing to compute.
pub fn candidates(machine: &Machine, problem: GemmShape, wanted: PackedUse) -> Vec<(VariantSpec, f64)> {
    let GemmShape { m, n, k } = problem;
    if m == 0 || n == 0 || k == 0 || !n.is_multiple_of(64) || !k.is_multiple_of(64) {
        return Vec::new();
    }
    let wanted = wanted.on(machine.arch);
    let mut found: Vec<(VariantSpec, f64)> = shapes(machine.arch)
        .iter()
        .filter_map(|shape| {
            let spec = wanted.of(*shape)?;
            Some((spec, predicted_us(&spec, problem, machine)?))
        })
        .collect();
    found.sort_by(|a, b| a.1.total_cmp(&b.1));
    found
}

/// The catalogued products straight from compact weights that can compute a problem, with the microseconds that the
/// model predicts, fastest first. Empty as for [`candidates`], and where none ship.
pub fn compact_candidates(machine: &Machine, problem: GemmShape, wanted: PackedUse) -> Vec<(VariantSpec, f64)> {
    let GemmShape { m, n, k } = problem;
    if m == 0 || n == 0 || k == 0 || !n.is_multiple_of(64) || !k.is_multiple_of(64) {
        return Vec::new();
    }
    let mut found: Vec<(VariantSpec, f64)> = every_compact_candidate(machine.arch, wanted)
        .filter_map(|spec| Some((spec, predicted_us(&spec, problem, machine)?)))
        .collect();
    found.sort_by(|a, b| a.1.total_cmp(&b.1));
    found
}

/// Microseconds of the expansion of a compact weight to packed tiles: what it reads and writes, at the share of the
/// memory's rate that was measured (53.7 us for 14336x4096).
pub fn expand_us(machine: &Machine, n: u32, k: u32) -> f64 {
    const SHARE: f64 = 0.74;
    let weights = f64::from(n) * f64::from(k);
    LAUNCH_US + weights * (COMPACT_BYTES + 1.5) / (machine.reads() * SHARE)
}

/// Microseconds of cuBLAS on BF16: reads of the memory, or what its tensor cores multiply.
pub fn cublas_us(machine: &Machine, problem: GemmShape) -> f64 {
    let GemmShape { m, n, k } = problem;
    let weights = f64::from(n) * f64::from(k);
    LAUNCH_US + (2.0 * weights / machine.reads()).max(2.0 * weights * f64::from(m) / machine.cublas_flop())
}

/// What no product by `mma.sync` goes below, us: the multiplications at the share of the tensor cores that cuBLAS gets.
/// [`predicted_us`] was fitted to batches that memory limits, and knows of no such floor.
pub fn mma_floor_us(machine: &Machine, problem: GemmShape) -> f64 {
    let GemmShape { m, n, k } = problem;
    2.0 * f64::from(n) * f64::from(k) * f64::from(m) / machine.tensor_flop(machine.tensor)
}

/// Microseconds of the expansion of a packed or a compact weight to BF16: what it reads and writes, at the rate of the
/// memory.
pub fn bf16_us(machine: &Machine, n: u32, k: u32, compact: bool) -> f64 {
    let read = if compact { COMPACT_BYTES } else { 1.5 };
    LAUNCH_US + f64::from(n) * f64::from(k) * (read + 2.0) / machine.reads()
}

/// The variants that ship for an architecture, without what [`PackedUse`] chooses.
fn shapes(arch: Arch) -> &'static [VariantSpec] {
    static SHAPES: [OnceLock<Vec<VariantSpec>>; Arch::ALL.len()] = [const { OnceLock::new() }; Arch::ALL.len()];
    SHAPES[arch as usize].get_or_init(|| {
        let plain = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::Store };
        let mut shapes: Vec<VariantSpec> = catalog::on::<GemmMmaSpec>(arch)
            .chain(catalog::on::<GemmWgmmaSpec>(arch))
            .filter(|spec| !dumps(spec))
            .filter_map(|spec| plain.of(spec))
            .collect();
        shapes.sort_unstable();
        shapes.dedup();
        shapes
    })
}

/// Every variant that a card of an architecture can be given for a use and for batches up to this, whatever its
/// multiprocessors and its memory: all shapes that ship there, as far as [`predicted_us`] considers them at such
/// batches.
pub fn every_candidate(arch: Arch, max_batch: u32, wanted: PackedUse) -> impl Iterator<Item = VariantSpec> {
    let wanted = wanted.on(arch);
    let considered = move |shape: &&VariantSpec| max_batch > SMALL_BATCH || !matches!(shape.op, Op::GemmWgmma(_));
    shapes(arch).iter().filter(considered).filter_map(move |shape| wanted.of(*shape))
}

/// Every variant of [`compact_candidates`] that a card of an architecture can be given for a use.
pub fn every_compact_candidate(arch: Arch, wanted: PackedUse) -> impl Iterator<Item = VariantSpec> {
    let PackedUse { pdl, epilogue, .. } = wanted.on(arch);
    let used =
        move |spec: &VariantSpec| matches!(spec.op, Op::GemmCompact(op) if (op.pdl, op.epilogue) == (pdl, epilogue));
    catalog::on::<GemmCompactSpec>(arch).filter(used)
}

/// Whether a register-sourced matmul is for dependent launch; `None` for other families.
pub fn is_pdl(spec: &VariantSpec) -> Option<bool> {
    match spec.op {
        Op::GemmMma(op) => Some(op.pdl),
        Op::GemmWgmma(op) => Some(op.pdl),
        _ => None,
    }
}

fn dumps(spec: &VariantSpec) -> bool {
    match spec.op {
        Op::GemmMma(op) => op.dump,
        Op::GemmWgmma(op) => op.dump,
        _ => false,
    }
}

/// Multiprocessors of an H200.
const H200_SMS: f64 = Machine::H200.sms as f64;
/// Plain reads of an H200's memory, bytes per us, with enough of them in flight.
const MEMORY: f64 = 4.6e6;
/// What one multiprocessor can read of it.
const MEMORY_PER_SM: f64 = 60e3;
/// How long a byte is in flight at the full rate, us: rings that hold less than their product cannot reach it.
const MEMORY_LATENCY_US: f64 = 1.2;
/// What a launch costs beside its work, us: ramp, last tiles' latency, reduction.
const LAUNCH_US: f64 = 4.2;
/// The same where the kernel before hides the ramp.
const DEPENDENT_LAUNCH_US: f64 = 1.9;
/// X from the second-level cache as `gemm_mma` reads it beside the weights: bytes per us that its time grows with.
const CACHED_X: f64 = 22e6;
/// A row block by 64 of k: us for the decode, and for each 8 batch rows.
const SMALL_STEP_US: (f64, f64) = (2.6e-3, 1.6e-3);
/// Where not all blocks fit at once, the last to come keep some multiprocessors waiting, us: all of each one, or half.
const SMALL_WAVE_US: (f64, f64) = (2.0, 0.4);
/// What meeting across a cluster costs, us.
const CLUSTER_US: f64 = 1.0;
/// Of what tensor cores could do (4096 operations a clock of a Hopper's multiprocessor), what cuBLAS got of an H200:
/// 7.0e8 a us of 10.7e8.
const CUBLAS_SHARE: f64 = 0.654;
/// Bytes of a compact weight (docs/adr/0013-compact.md: 10.83 to 10.92 bits).
const COMPACT_BYTES: f64 = 1.36;
/// A tile of 64 x 64 that `gemm_compact` decodes: us of a multiprocessor that always has a warp to run, and us of one
/// warp by itself.
const COMPACT_TILE_US: (f64, f64) = (0.149, 1.79);
/// What 8 batch rows more add to a warp's tile, us; to a multiprocessor's an eighth of it.
const COMPACT_ROWS_US: f64 = 0.175;
/// What meeting across a cluster costs there, us, each time that blocks come and go.
const COMPACT_CLUSTER_US: f64 = 2.34;
/// The start and the end of a wave of blocks: tables, first copies, the last warp's tile, us.
const COMPACT_WAVE_US: f64 = 1.95;
/// The rate at which such products read, as a share of the memory's.
const COMPACT_READS: f64 = 0.896;
/// Up to this batch `gemm_wgmma` multiplies mostly zeros and was hardly ever best.
const SMALL_BATCH: u32 = 32;
/// A launch of `gemm_wgmma` beside its steps, us.
const WIDE_LAUNCH_US: f64 = 5.5;
/// And the rate at which it reads weights, bytes per us.
const WIDE_MEMORY: f64 = 4.4e6;
/// What meeting across a cluster costs there where 128 features by 256 batch rows are summed, us.
const WIDE_CLUSTER_US: f64 = 4.0;
/// Of the multiprocessors, those that clusters of more than 2 can have: 120 of 132.
const WIDE_CLUSTERED: f64 = 10.0 / 11.0;

/// What the model says a launch takes, us; `None` for a variant that cannot exist, is of another family or is out of
/// the question at this batch. The constants were fitted to an H200 (docs/adr/0004-register-sourced-kernels.md): over
/// the 334 problems measured there, the variant that it finds fastest took 1.1 % longer than the best on average, 25 %
/// at most; clusters of `gemm_wgmma` joined later, and were fitted again with stream-K (item 12 of `fused_wide` there).
pub fn predicted_us(spec: &VariantSpec, problem: GemmShape, machine: &Machine) -> Option<f64> {
    let (sms, clock) = (machine.sms, machine.clock());
    let plan = Plan::new(spec).ok()?;
    let GemmShape { m, n, k } = problem;
    let weight_bytes = f64::from(n) * f64::from(k) * 1.5;
    let (sms_f, columns) = (f64::from(sms), f64::from(k) / 64.0);
    match spec.op {
        Op::GemmMma(op) => {
            let blocks = f64::from(plan.launch.grid.blocks(problem, sms)?);
            let (batch_tile, cluster) = (f64::from(op.batch_tile.get()), f64::from(op.cluster.get()));
            let batch_tiles = f64::from(m.div_ceil(op.batch_tile.get()));
            let groups = blocks / (cluster * batch_tiles);
            let dealt = (f64::from(n / 16) / groups).ceil();
            let per_sm = f64::from(plan.launch.blocks_per_sm);
            let (active, resident) = (sms_f.min(blocks), (blocks / sms_f).ceil().min(per_sm));
            let row_blocks = dealt.min(f64::from(op.row_blocks.get()));
            let in_flight = active * resident * f64::from(op.warps.get() * op.stages.get()) * row_blocks * 1536.0;
            let rate = machine.reads().min(in_flight / MEMORY_LATENCY_US).min(active * MEMORY_PER_SM * clock);
            let x = groups * batch_tiles * f64::from(k) * batch_tile * 2.0 / (CACHED_X * clock * sms_f / H200_SMS);
            let steps = (blocks / sms_f).ceil() * dealt * columns / cluster;
            let multiply = SMALL_STEP_US.1 * batch_tile / 8.0 / machine.tensor_share();
            let computed = steps * (SMALL_STEP_US.0 + multiply) / clock;
            let waves = (blocks / (sms_f * per_sm)).ceil() - 1.0;
            let waiting = waves * if per_sm == 1.0 { SMALL_WAVE_US.0 } else { SMALL_WAVE_US.1 };
            let meeting = if cluster > 1.0 { CLUSTER_US } else { 0.0 };
            // The fewer bytes are in flight, the longer the last of them are waited for.
            let tail = 3e6 / in_flight;
            let launch = if op.pdl { DEPENDENT_LAUNCH_US } else { LAUNCH_US };
            Some(launch + (weight_bytes * batch_tiles / rate + x).max(computed) + waiting + meeting + tail)
        }
        // Decoding is the limit, not the memory: a warp's chains of codes by themselves, or all of a multiprocessor's
        // instructions. Fitted to 32 problems (docs/records/h200-2026-11-22/matmul-compact-nine.csv): what it finds
        // fastest was the fastest of each.
        Op::GemmCompact(op) => {
            let blocks = f64::from(plan.launch.grid.blocks(problem, sms)?);
            let (cluster, warps) = (f64::from(op.cluster.get()), f64::from(op.warps.get()));
            let per_sm = f64::from(plan.launch.blocks_per_sm);
            let rows = COMPACT_ROWS_US * (f64::from(op.batch_tile.get()) / 8.0 - 1.0) / machine.tensor_share();
            let meeting = if cluster > 1.0 { COMPACT_CLUSTER_US } else { 0.0 };
            // With so many blocks on a multiprocessor, each with a share of a cluster's rows of tiles.
            let batch_tiles = f64::from(m.div_ceil(op.batch_tile.get()));
            let groups = blocks / (cluster * batch_tiles);
            let tiles = (f64::from(n / 64) / groups).ceil() * columns;
            let wave = |resident: f64| {
                let alone = (tiles / (cluster * warps)).ceil() * (COMPACT_TILE_US.1 + rows);
                let shared = tiles / cluster * resident * (COMPACT_TILE_US.0 + rows / 8.0);
                alone.max(shared) / clock + meeting + COMPACT_WAVE_US
            };
            let (waves, rest) = ((blocks / (sms_f * per_sm)).floor(), blocks % (sms_f * per_sm));
            let last = if rest > 0.0 { wave((rest / sms_f).ceil()) } else { 0.0 };
            let read = f64::from(n) * f64::from(k) * COMPACT_BYTES * batch_tiles / (machine.reads() * COMPACT_READS);
            let launch = if op.pdl { DEPENDENT_LAUNCH_US } else { LAUNCH_US };
            Some(launch + (waves * wave(per_sm) + last).max(read))
        }
        Op::GemmWgmma(op) if m > SMALL_BATCH => {
            let tiles = f64::from(n.div_ceil(64 * op.warpgroups.get())) * f64::from(m.div_ceil(op.batch_tile.get()));
            let cluster = f64::from(op.cluster.get());
            // A cluster for each tile of Y, of which no more are resident than fit.
            plan.launch.grid.blocks(problem, sms)?;
            let usable = if cluster > 2.0 { sms_f * WIDE_CLUSTERED } else { sms_f };
            let share = tiles / (usable / cluster).floor().max(1.0);
            let cost = WideCost::of(op.batch_tile.get());
            let warpgroups = f64::from(op.warpgroups.get());
            let of_two = if warpgroups == 1.0 { cost.lone } else { warpgroups / 2.0 };
            let step = if share <= 1.0 { cost.step_us } else { cost.warm_step_us } / clock * of_two;
            let work = if op.stream_k && share.fract() > 0.0 {
                cost.share_us + share * columns * step
            } else {
                share.ceil() * columns * step / cluster
            };
            // What a cluster exchanges comes after all its loads.
            let sums = warpgroups * f64::from(op.batch_tile.get()) / 512.0;
            let exchange = if cluster > 1.0 { share.ceil() * WIDE_CLUSTER_US * sums } else { 0.0 };
            // A cooperative launch waits for the kernel before it to end.
            let hidden = if op.pdl && !op.stream_k { LAUNCH_US - DEPENDENT_LAUNCH_US } else { 0.0 };
            Some(WIDE_LAUNCH_US - hidden + work.max(weight_bytes / (WIDE_MEMORY * machine.reads() / MEMORY)) + exchange)
        }
        _ => None,
    }
}

/// What the work of `gemm_wgmma` costs at a batch tile, for two warpgroups.
struct WideCost {
    /// 64 of k for one tile of Y, us.
    step_us: f64,
    /// The same where a multiprocessor has several tiles, and the card grows warm.
    warm_step_us: f64,
    /// Sums handed from block to block where tiles are shared, us.
    share_us: f64,
    /// A step of a single warpgroup, whose waits nobody fills, as a share of that of two.
    lone: f64,
}

impl WideCost {
    fn of(batch_tile: u32) -> Self {
        let (step_us, warm_step_us, share_us, lone) = match batch_tile {
            0..=64 => (0.30, 0.31, 6.0, 0.8),
            65..=128 => (0.37, 0.43, 6.0, 0.8),
            129..=192 => (0.50, 0.60, 8.0, 0.6),
            _ => (0.64, 0.79, 9.0, 0.6),
        };
        Self { step_us, warm_step_us, share_us, lone }
    }
}

/// Chooses variants for one device.
#[derive(Clone, Debug)]
pub struct PackedChooser {
    machine: Machine,
    table: MeasuredTable,
}

impl PackedChooser {
    /// The model alone.
    pub fn model(machine: Machine) -> Self {
        Self { machine, table: MeasuredTable::default() }
    }

    /// The model, and the table that ships where it is of a device of this name.
    pub fn of(machine: Machine, name: &str) -> Self {
        Self::model(machine).with_table(name, MeasuredTable::builtin().clone())
    }

    /// For an H200 (SXM): what is chosen where there is no device to ask.
    pub fn h200() -> Self {
        Self::of(Machine::H200, "NVIDIA H200")
    }

    /// For the card of an architecture that is told of where no device is there.
    pub fn usual(arch: Arch) -> Self {
        match arch {
            Arch::Sm90a => Self::h200(),
            _ => Self::model(Machine::usual(arch)),
        }
    }

    /// The device that it chooses for.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// What was measured, which stands above the model.
    pub fn table(&self) -> &MeasuredTable {
        &self.table
    }

    /// The architecture that it chooses for.
    pub fn arch(&self) -> Arch {
        self.machine.arch
    }

    /// With a table ahead of what it has, if it is of a device of this name.
    #[must_use]
    pub fn with_table(mut self, device: &str, table: MeasuredTable) -> Self {
        if table.device == device {
            self.table = table.over(&self.table);
        }
        self
    }

    /// The variant for a problem: what was measured, else what the model finds fastest. `None` where no variant takes
    /// the shape.
    pub fn choose(&self, problem: GemmShape, wanted: PackedUse) -> Option<VariantSpec> {
        let measured = self.table.choose(problem, wanted.on(self.arch()));
        let measured = measured.filter(|spec| spec.arch == self.arch() && Plan::new(spec).is_ok());
        measured.or_else(|| candidates(&self.machine, problem, wanted).first().map(|(spec, _)| *spec))
    }

    /// As [`PackedChooser::choices`], of the products straight from compact weights: by the model alone, which is
    /// fitted to what was measured.
    pub fn compact_choices(&self, n: u32, k: u32, max_batch: u32, wanted: PackedUse) -> Vec<(u32, VariantSpec)> {
        let mut choices: Vec<(u32, VariantSpec)> = Vec::new();
        for m in (8..max_batch).step_by(8).chain([max_batch]) {
            let problem = GemmShape { m, n, k };
            let found = compact_candidates(&self.machine, problem, wanted);
            let Some(&(spec, _)) = found.first() else { return Vec::new() };
            match choices.last_mut() {
                Some((last, same)) if *same == spec => *last = m,
                _ => choices.push((m, spec)),
            }
        }
        choices
    }

    /// The choice for every batch of 1 to `max_batch`: each variant with the largest batch that takes it, ascending.
    /// Empty where no variant takes the shape.
    pub fn choices(&self, n: u32, k: u32, max_batch: u32, wanted: PackedUse) -> Vec<(u32, VariantSpec)> {
        // Between two of these nothing changes: all batch tiles are multiples of 8.
        let tiles = (8..max_batch).step_by(8);
        let measured =
            self.table.rows.iter().filter(|row| (row.n, row.k) == (n, k) && row.m < max_batch).map(|row| row.m);
        let ends: BTreeSet<u32> = tiles.chain(measured).chain([max_batch]).collect();
        let mut choices: Vec<(u32, VariantSpec)> = Vec::new();
        for m in ends {
            let Some(spec) = self.choose(GemmShape { m, n, k }, wanted) else { return Vec::new() };
            match choices.last_mut() {
                Some((last, same)) if *same == spec => *last = m,
                _ => choices.push((m, spec)),
            }
        }
        choices
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::table::MeasuredRow;

    const USE: PackedUse = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::Store };
    const SHAPES: [(u32, u32); 9] = [
        (64, 64),
        (192, 320),
        (1024, 4096),
        (4096, 4096),
        (6144, 4096),
        (14336, 4096),
        (4096, 14336),
        (28672, 8192),
        (128256, 4096),
    ];

    #[test]
    fn every_batch_of_every_shape_has_a_variant_and_nothing_else_has() {
        let dispatch = PackedChooser::model(Machine::H200);
        for (n, k) in SHAPES {
            for m in (1..=130).chain([255, 256, 257, 1000, 4095, 4096]) {
                let problem = GemmShape { m, n, k };
                let spec = dispatch.choose(problem, USE).unwrap_or_else(|| panic!("{problem:?}"));
                let plan = Plan::new(&spec).unwrap();
                assert!(plan.launch.grid.blocks(problem, 132).is_some_and(|blocks| blocks > 0), "{spec} {problem:?}");
            }
        }
        // A gate with its up, at every batch: the shape that a plain product takes.
        let plain = PackedUse { pdl: true, ..USE };
        let gated = PackedUse { epilogue: Epilogue::SiluMul, ..plain };
        for (n, k) in SHAPES {
            for m in [1, 8, 9, 64, 65, 129, 300, 1024, 4096] {
                let problem = GemmShape { m, n, k };
                let spec = dispatch.choose(problem, gated).unwrap();
                assert!(spec.to_string().ends_with("_esc_pdl_silu_mul") && Plan::new(&spec).is_ok(), "{spec}");
                assert_eq!(plain.of(spec), dispatch.choose(problem, plain), "{problem:?}");
            }
        }
        for (m, n, k) in [(0, 64, 64), (1, 100, 64), (1, 64, 100), (1, 0, 64), (1, 64, 0)] {
            assert_eq!(dispatch.choose(GemmShape { m, n, k }, USE), None);
        }
    }

    /// Data sheets' rates, TFLOPS: dense BF16, fp32 sums.
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
            let ours = Machine::tensor_rate(arch, name) * f64::from(sms) * boost_mhz / 1e6;
            assert!((ours / tflops - 1.0_f64).abs() < 0.02, "{name}: {ours:.1} TFLOPS, its data sheet says {tflops}");
        }
    }

    /// Every card gets variants of its own architecture, and at small batches its memory is what limits them.
    #[test]
    fn other_gpus_have_their_own_choices() {
        let wanted = PackedUse { pdl: true, ..USE };
        // An L40S, too: more multiprocessors than a 4090 on less memory.
        let l40s = Machine { arch: Arch::Sm89, sms: 142, memory: 0.864e6, clock_mhz: 2520.0, tensor: 1024.0 };
        for machine in Arch::ALL.iter().map(|arch| Machine::usual(*arch)).chain([l40s]) {
            let (chooser, name) = (PackedChooser::of(machine, "any"), machine.arch);
            for (n, k) in SHAPES {
                for m in [1, 8, 16, 17, 64, 65, 256, 2048] {
                    let problem = GemmShape { m, n, k };
                    let spec = chooser.choose(problem, wanted).unwrap_or_else(|| panic!("{name:?}: {problem:?}"));
                    let plan = Plan::new(&spec).unwrap();
                    assert_eq!(spec.arch, machine.arch, "{spec}");
                    assert!(plan.launch.grid.blocks(problem, machine.sms).is_some_and(|b| b > 0), "{spec} {problem:?}");
                }
            }
            for (n, k) in [(14336, 4096), (4096, 14336), (128_256, 4096)] {
                let floor = f64::from(n) * f64::from(k) * 1.5 / machine.memory;
                let (spec, us) = candidates(&machine, GemmShape { m: 1, n, k }, wanted)[0];
                assert!((1.0..1.4).contains(&(us / floor)), "{spec} at {n}x{k}: {us:.0} us, floor {floor:.0}");
            }
        }
    }

    /// The batch tile that the batch asks for, growing times, and the measured choices (docs/records/h200-2026-11-22).
    #[test]
    fn products_from_compact_weights_are_chosen_as_measured() {
        let wanted = PackedUse { pdl: true, ..USE };
        let best = |m, n, k| compact_candidates(&Machine::H200, GemmShape { m, n, k }, wanted)[0];
        // Where weights are few, more blocks are worth more than reading them once.
        for (n, k) in SHAPES.into_iter().filter(|(n, k)| n * k >= 1 << 24) {
            let mut last = 0.0;
            for m in [1, 8, 9, 16, 17, 32] {
                let (spec, us) = best(m, n, k);
                let Op::GemmCompact(op) = spec.op else { panic!("{spec}") };
                assert!(op.pdl && op.batch_tile.get() >= m, "{spec} at {m} of {n}x{k} reads the weights twice");
                assert!(us >= last, "{spec} at {m} of {n}x{k}: {us} after {last}");
                last = us;
            }
        }
        for (m, n, k, shape, measured) in [
            (1, 14336, 4096, "b8_w8p1c1_t16", 22.6),
            (8, 6144, 4096, "b8_w16p1c1_t32", 12.9),
            (1, 4096, 14336, "b8_w16p1c2_t32_pdl", 22.1),
            (8, 128_256, 4096, "b8_w8p1c1_t16", 172.8),
            (16, 14336, 4096, "b16_w8p1c1_t8", 24.9),
            (16, 8192, 8192, "b16_w16p1c1_t32", 25.7),
            (8, 28672, 4096, "b8_w16p1c2_t32_dealt", 41.7),
            (32, 28672, 8192, "b32_w12p1c2_t16_dealt", 101.7),
            (32, 4096, 14336, "b32_w12p1c2_t16_pdl", 29.5),
        ] {
            let (spec, us) = best(m, n, k);
            assert!(spec.to_string().contains(shape), "{spec} at {m} of {n}x{k}, not {shape}");
            assert!(
                (0.9..1.15).contains(&(us / measured)),
                "{spec} at {m} of {n}x{k}: {us:.1} us, measured {measured}"
            );
        }
        // A row of tiles for each block leaves half of the machine idle.
        let narrow = compact_candidates(&Machine::H200, GemmShape { m: 1, n: 4096, k: 4096 }, wanted)[0].0;
        assert!(matches!(narrow.op, Op::GemmCompact(op) if op.cluster.get() == 2), "{narrow}");
        assert!(compact_candidates(&Machine::usual(Arch::Sm89), GemmShape { m: 1, n: 64, k: 64 }, USE).is_empty());
        assert!(compact_candidates(&Machine::H200, GemmShape { m: 1, n: 65, k: 64 }, USE).is_empty());
        let us = expand_us(&Machine::H200, 14336, 4096);
        assert!((52.0..55.0).contains(&us), "{us}");
    }

    /// As docs/adr/0004 measured them: clusters where their tiles fill the machine once.
    #[test]
    fn model_chooses_clusters_where_they_were_fastest() {
        for (n, k, m, shape) in [
            (4096, 4096, 128, "b128_g1p8c2"),
            (4096, 4096, 256, "b128_g2p6c2"),
            (8192, 8192, 128, "b128_g2p6c2"),
            (8192, 8192, 256, "b256_g2p4c2"),
            (4096, 14336, 512, "b256_g2p4c2"),
            (1024, 4096, 128, "b128_g1p8c4"),
        ] {
            let spec = PackedChooser::model(Machine::H200).choose(GemmShape { m, n, k }, USE).unwrap();
            assert_eq!(spec.to_string(), format!("uw_sm90a_gemm_wgmma_{shape}_esc_store"), "{n} x {k}, m = {m}");
        }
    }

    #[test]
    fn batch_ranges_equal_per_batch_choices() {
        let row = |m, variant: &str| MeasuredRow { n: 4096, k: 4096, m, pdl: false, variant: variant.parse().unwrap() };
        let table = MeasuredTable {
            device: "H".to_owned(),
            rows: vec![
                row(5, "uw_sm90a_gemm_mma_b8_r2w8p2c1_esc_store"),
                row(17, "uw_sm90a_gemm_mma_b32_r2w8p2c1_store"),
                row(331, "uw_sm90a_gemm_mma_b64_r2w8p2c1_esc_store"),
            ],
        };
        let dispatch = PackedChooser::model(Machine::H200).with_table("H", table);
        for (n, k) in SHAPES {
            let choices = dispatch.choices(n, k, 700, USE);
            assert_eq!(choices.last().map(|(m, _)| *m), Some(700));
            for m in 1..=700 {
                let (_, range) = choices.iter().find(|(last, _)| m <= *last).unwrap();
                assert_eq!(dispatch.choose(GemmShape { m, n, k }, USE), Some(*range), "m = {m}, {n} x {k}");
            }
        }
        assert!(dispatch.choices(100, 64, 8, USE).is_empty());
    }

    #[test]
    fn measured_table_overrides_the_model_on_its_gpu_only() {
        let measured = "uw_sm90a_gemm_mma_b64_r1w4p2c1_esc_store";
        let row = MeasuredRow { n: 4096, k: 4096, m: 16, pdl: true, variant: measured.parse().unwrap() };
        let table = MeasuredTable { device: "H".to_owned(), rows: vec![row] };
        let dispatch = |device| PackedChooser::model(Machine::H200).with_table(device, table.clone());
        let pdl = PackedUse { pdl: true, epilogue: Epilogue::StoreAdd, ..USE };
        let at = |m| GemmShape { m, n: 4096, k: 4096 };
        let chosen = dispatch("H").choose(at(9), pdl).unwrap();
        assert_eq!(chosen.to_string(), "uw_sm90a_gemm_mma_b64_r1w4p2c1_esc_pdl_store_add");
        assert_ne!(dispatch("H").choose(at(17), pdl), Some(chosen), "a larger batch was not measured");
        assert_ne!(dispatch("H").choose(at(9), USE).unwrap().to_string(), measured, "nor an ordinary launch");
        assert_ne!(dispatch("another").choose(at(9), pdl), Some(chosen));
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<MeasuredTable>(&text).unwrap(), table);
    }
}
