//! The register-sourced large-batch matmul, run on the CPU prelude: operands against the format's oracle bit by bit, results against float64,
//! shares of k in every position, hostile escapes, and planted bugs that must be caught.

#[path = "support/cpu_kernel.rs"]
mod cpu_kernel;

use cpu_kernel::{Aligned, CpuKernel, Edit, Launch, MapSpec, Random, bf16};
use unweight_codegen::abi::FusedArgs;
use unweight_format::Histogram;
use unweight_format::packed::{PackedTensor, pack};
use unweight_format::tile::Matrix;

const TILE: usize = 64;
const GUARD: u16 = 0x7fc1;
const GUARD_ROWS: usize = 2;

/// The fields of `Config` in kernels/fused_wide.cuh.
#[derive(Clone, Copy, Debug)]
struct Config {
    batch_tile: usize,
    stages: usize,
    warpgroups: usize,
    cluster: usize,
    stream_k: bool,
    store_add: bool,
    dump: bool,
}

impl Config {
    const fn new(batch_tile: usize, stages: usize, warpgroups: usize) -> Self {
        Config { batch_tile, stages, warpgroups, cluster: 1, stream_k: false, store_add: false, dump: false }
    }
    const fn streaming(mut self) -> Self {
        self.stream_k = true;
        self
    }
    const fn clustered(mut self, cluster: usize) -> Self {
        self.cluster = cluster;
        self
    }
    const fn adding(mut self) -> Self {
        self.store_add = true;
        self
    }
    const fn dumping(mut self) -> Self {
        self.dump = true;
        self
    }

    /// The sum stated in the head of kernels/fused_wide.cuh.
    fn smem_bytes(&self) -> usize {
        let rows =
            if self.cluster == 1 && self.batch_tile > 64 && self.batch_tile.is_multiple_of(64) { 64 } else { 32 };
        let buffers = (self.batch_tile / rows).clamp(2, 3);
        self.stages * (self.batch_tile * 128 + self.warpgroups * (6144 + 256) + 16)
            + self.warpgroups * (buffers * rows * 128 + 8)
    }

    fn tiles(&self, m: usize, n: usize) -> usize {
        n.div_ceil(TILE * self.warpgroups) * m.div_ceil(self.batch_tile)
    }

    fn grid(&self, m: usize, n: usize, k: usize, multiprocessors: usize) -> usize {
        if self.cluster > 1 {
            return self.tiles(m, n) * self.cluster;
        }
        let units = self.tiles(m, n) * if self.stream_k { k / TILE } else { 1 };
        units.min(multiprocessors)
    }

    fn build(&self, edits: &[Edit]) -> CpuKernel {
        let source = format!(
            "#include \"unweight/kernels/fused_wide.cuh\"\n\
             struct Config {{\n\
             \x20   static constexpr uw::u32 kBatchTile = {}, kStages = {}, kWarpgroups = {}, kCluster = {};\n\
             \x20   static constexpr bool kStreamK = {}, kEscapes = true, kStoreAdd = {}, kDependent = true, kDumpOperands = {};\n\
             }};\n\
             static_assert(uw::fused_wide::Smem<Config>::kBytes == {});\n\
             extern \"C\" __global__ void fused(const __grid_constant__ uw::FusedArgs args) {{ uw::fused_wide::run<Config>(args); }}\n",
            self.batch_tile,
            self.stages,
            self.warpgroups,
            self.cluster,
            self.stream_k,
            self.store_add,
            self.dump,
            self.smem_bytes()
        );
        CpuKernel::build(&source, "fused", "uw::FusedArgs", edits)
    }
}

struct Problem {
    m: usize,
    n: usize,
    k: usize,
    weights: Vec<u16>,
    packed: PackedTensor<Vec<u8>>,
    x: Vec<u16>,
    y: Vec<u16>,
}

struct Outcome {
    y: Vec<u16>,
    operands: Vec<u32>,
}

impl Problem {
    /// Weights with exponents 108..=123; one in 1000 lies outside: a zero, a subnormal, something larger or smaller. The first row block
    /// holds a run of them: from 24,000 elements on, a list longer than a warp.
    fn random(config: &Config, m: usize, n: usize, k: usize, seed: u64) -> Self {
        let mut random = Random(seed | 1);
        let weights: Vec<u16> = (0..n * k)
            .map(|i| {
                let r = random.next();
                let dense = i / k == 5 && i % k < (n * k / 600).min(40);
                let exponent = if dense || random.below(1000) == 0 {
                    [0, 90, 100, 130][(r >> 32 & 3) as usize]
                } else {
                    108 + (r >> 20 & 15) as u16
                };
                let mantissa = if r >> 50 & 7 == 0 { 0 } else { 0x807f };
                (r as u16 & (mantissa | 0x8000)) | exponent << 7
            })
            .collect();
        let bytes: &[u8] = bytemuck::cast_slice(&weights);
        let matrix = Matrix::new(bytes, n, k).unwrap();
        let packed = pack(matrix, &Histogram::of(matrix.bytes())).unwrap();
        let x = (0..m * k).map(|_| (random.next() as u16 & 0x807f) | (120 + random.below(8) as u16) << 7).collect();
        let y = (0..m * n)
            .map(|_| if config.store_add { (random.next() as u16 & 0x807f) | 126 << 7 } else { GUARD })
            .collect();
        Problem { m, n, k, weights, packed, x, y }
    }

    fn run(
        &self,
        config: &Config,
        kernel: &mut CpuKernel,
        multiprocessors: usize,
        seed: u64,
        heads: Option<(&[u8], u32)>,
    ) -> Result<Outcome, String> {
        let grid = config.grid(self.m, self.n, self.k, multiprocessors);
        let packed = Aligned::new(self.packed.packed());
        let (heads, escape_words) =
            heads.unwrap_or((self.packed.escape_heads(), (self.packed.escapes().len() / 4) as u32));
        let heads = Aligned::new(heads);
        let escapes = Aligned::new(&self.packed.escapes()[..escape_words as usize * 4]);
        let x = Aligned::new(bytemuck::cast_slice(&self.x));
        let mut y = self.y.clone();
        y.extend(std::iter::repeat_n(GUARD, GUARD_ROWS * self.n));
        let y = Aligned::new(bytemuck::cast_slice(&y));
        let partials = if config.stream_k { 2 * grid * TILE * config.warpgroups * config.batch_tile * 4 } else { 0 };
        let workspace = Aligned::new(&vec![0u8; if config.dump { self.n * self.k * 2 } else { partials }]);
        let counters = Aligned::new(&vec![0u8; if config.stream_k { 2 * grid * config.warpgroups * 4 } else { 0 }]);
        kernel.clear_registered();
        for (buffer, name) in [
            (packed.slice(), "packed"),
            (heads.slice(), "escape_heads"),
            (escapes.slice(), "escapes"),
            (workspace.slice(), "workspace"),
            (counters.slice(), "counters"),
        ] {
            kernel.register(buffer, name);
        }
        let map = |kernel: &mut CpuKernel, data, columns: usize, box_rows: usize| {
            kernel.tensor_map(&MapSpec {
                data,
                element_bytes: 2,
                columns: columns as u64,
                rows: self.m as u64,
                box_columns: 64,
                box_rows: box_rows as u32,
                swizzle_bytes: 128,
            })
        };
        let args = FusedArgs {
            x: map(kernel, x.slice(), self.k, config.batch_tile),
            y_map: map(kernel, &y.slice()[..self.m * self.n * 2], self.n, 32),
            packed: packed.address(),
            escape_heads: heads.address(),
            escapes: escapes.address(),
            y: y.address(),
            workspace: workspace.address(),
            counters: counters.address(),
            scale: self.packed.window().scale(),
            escape_words,
            m: self.m as u32,
            n: self.n as u32,
            k: self.k as u32,
            tile_cols: (self.k / TILE) as u32,
            reserved: [0; 14],
        };
        let launch = Launch {
            grid: grid as u32,
            block: (128 * (config.warpgroups + 1)) as u32,
            smem_bytes: config.smem_bytes() as u32,
            // Blocks that wait for each other have to run at the same time, and those of a cluster do.
            cluster: if config.stream_k { grid as u32 } else { config.cluster as u32 },
            seed,
        };
        // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.launch(&launch, &args)? };
        assert!(counters.slice().iter().all(|&byte| byte == 0), "counters were left set");
        let result: Vec<u16> = y.slice().chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect();
        assert!(result[self.m * self.n..].iter().all(|&v| v == GUARD), "rows past m were written");
        let operands =
            workspace.slice().chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
        Ok(Outcome { y: result[..self.m * self.n].to_vec(), operands })
    }

    /// Elements further from the float64 result than bf16 rounding and fp32 accumulation explain.
    fn mismatches(&self, config: &Config, y: &[u16]) -> usize {
        let x: Vec<f64> = self.x.iter().map(|&b| bf16(b)).collect();
        let w: Vec<f64> = self.weights.iter().map(|&b| bf16(b)).collect();
        let mut bad = 0;
        for (at, &got) in y.iter().enumerate() {
            let (row, column) = (at / self.n, at % self.n);
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for (a, b) in x[row * self.k..][..self.k].iter().zip(&w[column * self.k..][..self.k]) {
                sum += a * b;
                magnitude += (a * b).abs();
            }
            if config.store_add {
                sum += bf16(self.y[at]);
                magnitude += bf16(self.y[at]).abs();
            }
            let error = (bf16(got) - sum).abs();
            bad += usize::from(error.is_nan() || error > sum.abs() / 256.0 + magnitude * 1e-6);
        }
        bad
    }
}

/// Shapes are (m, n, k, multiprocessors).
fn check(config: Config, shapes: &[(usize, usize, usize, usize)]) {
    let mut kernel = config.build(&[]);
    for (i, &(m, n, k, multiprocessors)) in shapes.iter().enumerate() {
        let problem = Problem::random(&config, m, n, k, 31 + i as u64);
        let outcome = problem
            .run(&config, &mut kernel, multiprocessors, i as u64, None)
            .unwrap_or_else(|e| panic!("{config:?} m={m} n={n} k={k} multiprocessors={multiprocessors}: {e}"));
        let bad = problem.mismatches(&config, &outcome.y);
        assert_eq!(bad, 0, "{config:?} m={m} n={n} k={k} multiprocessors={multiprocessors}");
    }
}

#[test]
fn whole_tiles() {
    check(Config::new(64, 3, 2), &[(1, 128, 64, 8), (64, 64, 192, 8), (65, 192, 128, 2)]);
}

#[test]
fn batch_tile_128_stages_fewer_than_steps() {
    check(Config::new(128, 3, 2), &[(127, 128, 320, 4), (129, 64, 128, 1)]);
}

#[test]
fn batch_tile_256_one_warpgroup() {
    check(Config::new(256, 3, 1), &[(250, 64, 128, 4)]);
}

#[test]
fn batch_tile_of_three_boxes() {
    check(Config::new(96, 3, 3), &[(95, 192, 128, 4), (97, 256, 64, 4)]);
}

#[test]
fn shares_of_k() {
    // Several shares of one tile, shares with the end of one tile and the beginning of the next, whole tiles before them, and shares of a single step.
    check(
        Config::new(32, 3, 1).streaming(),
        &[(20, 64, 448, 3), (32, 192, 320, 5), (40, 256, 192, 3), (5, 64, 128, 8), (33, 192, 64, 4)],
    );
}

#[test]
fn shares_of_k_that_add() {
    check(Config::new(64, 3, 2).streaming().adding(), &[(64, 320, 256, 4), (70, 128, 128, 3)]);
}

#[test]
fn clusters_of_2() {
    check(Config::new(64, 3, 2).clustered(2), &[(1, 128, 128, 1), (65, 192, 448, 1)]);
    check(Config::new(128, 5, 1).clustered(2).adding(), &[(128, 64, 192, 1)]);
}

#[test]
fn clusters_of_4() {
    check(Config::new(64, 4, 2).clustered(4), &[(64, 128, 256, 1), (33, 192, 576, 1)]);
    check(Config::new(96, 4, 2).clustered(4).adding(), &[(97, 128, 448, 1)]);
}

#[test]
fn operands_are_the_weights() {
    let config = Config::new(64, 4, 2).dumping();
    let mut kernel = config.build(&[]);
    let problem = Problem::random(&config, 2, 192, 192, 5);
    let outcome = problem.run(&config, &mut kernel, 3, 3, None).unwrap();
    let tiles = 192 / TILE * (192 / TILE);
    for tile in 0..tiles {
        for (i, registers) in problem.packed.operands(tile).iter().enumerate() {
            let (block, step, lane) = (i / 128, i / 32 % 4, i % 32);
            for (register, &expected) in registers.iter().enumerate() {
                let got = outcome.operands[((tile * 4 + block) * 16 + step * 4 + register) * 32 + lane];
                assert_eq!(got, expected, "tile {tile} block {block} step {step} lane {lane} register {register}");
            }
        }
    }
    let heads = problem.packed.escape_heads().chunks_exact(4);
    let lists = heads.filter(|word| word[3] >> 7 == 1).count();
    assert!(lists > 3, "the data has too few lists: {lists}");
}

#[test]
fn hostile_escapes_stay_in_bounds() {
    let config = Config::new(32, 3, 2);
    let mut kernel = config.build(&[]);
    let problem = Problem::random(&config, 3, 128, 128, 9);
    let stored = (problem.packed.escapes().len() / 4) as u32;
    let mut random = Random(77);
    for words in [0, 1, 2, stored / 2, stored] {
        let heads: Vec<u8> = (0..problem.packed.escape_heads().len() / 4)
            .flat_map(|_| {
                let r = random.next();
                let index = if r >> 60 & 1 == 0 { (r >> 8) as u32 } else { (r >> 8) as u32 % (stored + 2) };
                (index | (r as u32 & 1) << 31).to_le_bytes()
            })
            .collect();
        problem.run(&config, &mut kernel, 2, u64::from(words), Some((&heads, words))).unwrap();
    }
}

#[test]
fn planted_bugs_are_caught() {
    let streaming = Config::new(128, 3, 1).streaming();
    let clustered = Config::new(64, 3, 2).clustered(2);
    for (config, from, to) in [
        // The ring: a slot given back while it is read, sums read too early, a wrong byte count, another warp's weights.
        (streaming, "if (step != s.first) release(slots, p);", "release(slots, p);"),
        (streaming, "ptx::wgmma_wait_group<0>();", "ptx::wgmma_wait_group<4>();"),
        (streaming, "S::kXBytes + S::kWBytes);", "S::kXBytes);"),
        (streaming, "p.warp * fused::kBlockBytes", "0 * fused::kBlockBytes"),
        // Another row block's escapes.
        (streaming, "p.warp * kBlockRecordBytes", "0 * kBlockRecordBytes"),
        // Shares of k: a part left out, a flag left standing.
        (streaming, "first + j <= sharing.last_team", "first + j < sharing.last_team"),
        (streaming, "if (waits) ptx::reduce_add_global(flag, ~0u);", "if (waits) ptx::reduce_add_global(flag, 0);"),
        // The store: the wrong half of a fragment.
        (streaming, "p.warp * 2 + p.lane / 8 % 2", "p.warp * 2 + p.lane / 16"),
        // A cluster: sums written over X that another warpgroup reads, a peer's left out, steps taken twice.
        (clustered, "ptx::named_barrier_sync(4, Config::kWarpgroups * kWarpgroupThreads);", "sync_warpgroup(p);"),
        (clustered, "j + (j >= schedule.team)", "j"),
        (clustered, "team * steps / Config::kCluster", "0"),
    ] {
        let header = "unweight/kernels/fused_wide.cuh";
        let mut kernel = config.build(&[Edit { header, from, to }]);
        let problem = Problem::random(&config, 128, 128, 320, 3);
        let caught = (1..=4).any(|seed| {
            // In turn: all tiles in one block, whose ring and buffers go round, and tiles shared by several blocks.
            let multiprocessors = if seed % 2 == 1 { 1 } else { 5 };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                problem.run(&config, &mut kernel, multiprocessors, seed, None)
            }));
            !matches!(outcome, Ok(Ok(outcome)) if problem.mismatches(&config, &outcome.y) == 0)
        });
        assert!(caught, "planting `{to}` for `{from}` went unnoticed");
    }
}
