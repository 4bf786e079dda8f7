//! The register-sourced small-batch matmul, run on the CPU prelude: operands against the format's oracle bit by bit, results against float64,
//! hostile escapes, and planted bugs that must be caught.

#[path = "support/cpu_kernel.rs"]
mod cpu_kernel;

use cpu_kernel::{Aligned, CpuKernel, Edit, Launch, MapSpec, Random, bf16};
use unweight_codegen::abi::{FusedArgs, TensorMap};
use unweight_format::Histogram;
use unweight_format::packed::{PackedTensor, pack};
use unweight_format::tile::Matrix;

const TILE: usize = 64;
const BLOCK_ROWS: usize = 16;
const GUARD: u16 = 0x7fc1;
const GUARD_ROWS: usize = 2;

/// The fields of `Config` in kernels/fused_small.cuh.
#[derive(Clone, Copy, Debug)]
struct Config {
    row_blocks: usize,
    warps: usize,
    stages: usize,
    batch_tile: usize,
    cluster: usize,
    store_add: bool,
    silu_mul: bool,
    stream: bool,
    dump: bool,
}

impl Config {
    const fn new(row_blocks: usize, warps: usize, stages: usize, batch_tile: usize, cluster: usize) -> Self {
        Config {
            row_blocks,
            warps,
            stages,
            batch_tile,
            cluster,
            store_add: false,
            silu_mul: false,
            stream: false,
            dump: false,
        }
    }
    const fn adding(mut self) -> Self {
        self.store_add = true;
        self
    }
    const fn gated(mut self) -> Self {
        self.silu_mul = true;
        self
    }
    const fn streaming(mut self) -> Self {
        self.stream = true;
        self
    }
    const fn dumping(mut self) -> Self {
        self.dump = true;
        self
    }

    /// The sum stated in the head of kernels/fused_small.cuh.
    fn smem_bytes(&self) -> usize {
        let ring = (self.stages * (self.batch_tile * 128 + self.row_blocks * 1536)).next_multiple_of(1024);
        let sums = if self.stream { self.row_blocks * self.batch_tile * 64 } else { 0 };
        self.warps * (ring + sums + 8 * self.stages)
    }

    /// The smallest number of groups that this variant may be launched with.
    fn groups(&self, n: usize) -> usize {
        (n / BLOCK_ROWS).div_ceil(self.row_blocks)
    }

    /// Columns of Y.
    fn columns(&self, n: usize) -> usize {
        if self.silu_mul { n / 2 } else { n }
    }

    fn build(&self, edits: &[Edit]) -> CpuKernel {
        let source = format!(
            "#include \"unweight/kernels/fused_small.cuh\"\n\
             struct Config {{\n\
             \x20   static constexpr uw::u32 kRowBlocks = {}, kWarps = {}, kStages = {}, kBatchTile = {}, kCluster = {};\n\
             \x20   static constexpr bool kEscapes = true, kStoreAdd = {}, kSiluMul = {}, kDependent = true, kStream = {}, kDumpOperands = {};\n\
             }};\n\
             static_assert(uw::fused_small::Smem<Config>::kBytes == {});\n\
             extern \"C\" __global__ void fused(const __grid_constant__ uw::FusedArgs args) {{ uw::fused_small::run<Config>(args); }}\n",
            self.row_blocks,
            self.warps,
            self.stages,
            self.batch_tile,
            self.cluster,
            self.store_add,
            self.silu_mul,
            self.stream,
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
        assert_eq!(packed.unpack(), bytes);
        let x = (0..m * k).map(|_| (random.next() as u16 & 0x807f) | (120 + random.below(8) as u16) << 7).collect();
        let y = (0..m * config.columns(n))
            .map(|_| if config.store_add { (random.next() as u16 & 0x807f) | 126 << 7 } else { GUARD })
            .collect();
        Problem { m, n, k, weights, packed, x, y }
    }

    fn run(
        &self,
        config: &Config,
        kernel: &mut CpuKernel,
        groups: usize,
        seed: u64,
        heads: Option<(&[u8], u32)>,
    ) -> Result<Outcome, String> {
        let packed = Aligned::new(self.packed.packed());
        let (heads, escape_words) =
            heads.unwrap_or((self.packed.escape_heads(), (self.packed.escapes().len() / 4) as u32));
        let heads = Aligned::new(heads);
        let escapes = Aligned::new(&self.packed.escapes()[..escape_words as usize * 4]);
        let x = Aligned::new(bytemuck::cast_slice(&self.x));
        let mut y = self.y.clone();
        y.extend(std::iter::repeat_n(GUARD, GUARD_ROWS * self.n));
        let stored = self.y.len();
        let y = Aligned::new(bytemuck::cast_slice(&y));
        let workspace = Aligned::new(&vec![0u8; if config.dump { self.n * self.k * 2 } else { 0 }]);
        kernel.clear_registered();
        for (buffer, name) in [
            (packed.slice(), "packed"),
            (heads.slice(), "escape_heads"),
            (escapes.slice(), "escapes"),
            (workspace.slice(), "workspace"),
            (&y.slice()[..stored * 2], "y"),
        ] {
            kernel.register(buffer, name);
        }
        let args = FusedArgs {
            x: kernel.tensor_map(&MapSpec {
                data: x.slice(),
                element_bytes: 2,
                columns: self.k as u64,
                rows: self.m as u64,
                box_columns: 64,
                box_rows: config.batch_tile as u32,
                swizzle_bytes: 128,
            }),
            y_map: TensorMap([0; 16]),
            packed: packed.address(),
            escape_heads: heads.address(),
            escapes: escapes.address(),
            y: y.address(),
            workspace: workspace.address(),
            counters: 0,
            scale: self.packed.window().scale(),
            escape_words,
            m: self.m as u32,
            n: self.n as u32,
            k: self.k as u32,
            tile_cols: (self.k / TILE) as u32,
            reserved: [0; 14],
        };
        let launch = Launch {
            grid: (groups * self.m.div_ceil(config.batch_tile) * config.cluster) as u32,
            block: (config.warps * 32) as u32,
            smem_bytes: config.smem_bytes() as u32,
            cluster: config.cluster as u32,
            seed,
        };
        // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.launch(&launch, &args)? };
        let result: Vec<u16> = y.slice().chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect();
        assert!(result[stored..].iter().all(|&v| v == GUARD), "rows past m were written");
        let operands =
            workspace.slice().chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
        Ok(Outcome { y: result[..stored].to_vec(), operands })
    }

    /// Elements further from the float64 result than bf16 rounding and fp32 accumulation explain.
    fn mismatches(&self, config: &Config, y: &[u16]) -> usize {
        let x: Vec<f64> = self.x.iter().map(|&b| bf16(b)).collect();
        let w: Vec<f64> = self.weights.iter().map(|&b| bf16(b)).collect();
        // The product of a batch row and a row of W, and the magnitudes that went into it.
        let product = |row: usize, column: usize| {
            let terms = x[row * self.k..][..self.k].iter().zip(&w[column * self.k..][..self.k]).map(|(a, b)| a * b);
            terms.fold((0.0, 0.0), |(sum, magnitude): (f64, f64), term| (sum + term, magnitude + term.abs()))
        };
        let columns = config.columns(self.n);
        let wrong = |(at, &got): (usize, &u16)| {
            let (row, column) = (at / columns, at % columns);
            let (mut sum, mut slack);
            if config.silu_mul {
                let gate_row = column / BLOCK_ROWS * 2 * BLOCK_ROWS + column % BLOCK_ROWS;
                let ((gate, gate_size), (up, up_size)) = (product(row, gate_row), product(row, gate_row + BLOCK_ROWS));
                sum = gate / (1.0 + (-gate).exp()) * up;
                // The slope of silu is at most 1.1.
                slack = (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * 1e-6 + sum.abs() * 1e-5;
            } else {
                let magnitude;
                (sum, magnitude) = product(row, column);
                slack = magnitude * 1e-6;
            }
            if config.store_add {
                sum += bf16(self.y[at]);
                slack += bf16(self.y[at]).abs() * 1e-6;
            }
            let error = (bf16(got) - sum).abs();
            error.is_nan() || error > sum.abs() / 256.0 + slack
        };
        y.iter().enumerate().filter(|element| wrong(*element)).count()
    }
}

fn check(config: Config, shapes: &[(usize, usize, usize)]) {
    let mut kernel = config.build(&[]);
    for (i, &(m, n, k)) in shapes.iter().enumerate() {
        let problem = Problem::random(&config, m, n, k, 31 + i as u64);
        for more in [0, 1] {
            let groups = config.groups(n) + more;
            let groups = if config.stream { 1 + more } else { groups };
            let outcome = problem
                .run(&config, &mut kernel, groups, 1000 * more as u64 + i as u64, None)
                .unwrap_or_else(|e| panic!("{config:?} m={m} n={n} k={k} groups={groups}: {e}"));
            assert_eq!(problem.mismatches(&config, &outcome.y), 0, "{config:?} m={m} n={n} k={k} groups={groups}");
        }
    }
}

#[test]
fn batch_tile_8() {
    check(Config::new(4, 4, 2, 8, 1), &[(1, 128, 320), (8, 64, 128), (9, 192, 64)]);
}

#[test]
fn batch_tile_16_row_blocks_across_tiles() {
    check(Config::new(3, 2, 3, 16, 1), &[(7, 128, 192), (16, 192, 128), (17, 64, 64)]);
}

#[test]
fn batch_tile_32() {
    check(Config::new(2, 3, 2, 32, 1), &[(31, 64, 256), (33, 128, 64)]);
}

#[test]
fn seven_row_blocks() {
    check(Config::new(7, 2, 1, 8, 1), &[(5, 256, 192)]);
}

#[test]
fn cluster_splits_k_and_adds() {
    check(Config::new(4, 2, 2, 8, 2).adding(), &[(3, 128, 448), (8, 64, 64)]);
}

#[test]
fn stream_of_tasks() {
    check(Config::new(2, 2, 2, 8, 1).streaming(), &[(8, 192, 192), (10, 128, 64)]);
}

#[test]
fn gate_and_up_become_one() {
    check(Config::new(4, 2, 2, 8, 1).gated(), &[(3, 128, 320), (9, 320, 64)]);
    check(Config::new(2, 3, 2, 16, 2).gated(), &[(16, 128, 448)]);
    check(Config::new(4, 2, 2, 8, 1).gated().streaming(), &[(8, 320, 128)]);
}

#[test]
fn operands_are_the_weights() {
    for config in [Config::new(4, 2, 2, 8, 1).dumping(), Config::new(3, 2, 1, 8, 1).dumping()] {
        let mut kernel = config.build(&[]);
        let problem = Problem::random(&config, 2, 128, 192, 5);
        let outcome = problem.run(&config, &mut kernel, config.groups(128), 3, None).unwrap();
        let tiles = 128 / TILE * (192 / TILE);
        let mut lists = 0;
        for tile in 0..tiles {
            for (i, registers) in problem.packed.operands(tile).iter().enumerate() {
                let (block, step, lane) = (i / 128, i / 32 % 4, i % 32);
                for (register, &expected) in registers.iter().enumerate() {
                    let got = outcome.operands[((tile * 4 + block) * 16 + step * 4 + register) * 32 + lane];
                    assert_eq!(got, expected, "tile {tile} block {block} step {step} lane {lane} register {register}");
                }
            }
        }
        for word in problem.packed.escape_heads().chunks_exact(4) {
            let head = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            lists += head >> 31;
        }
        assert!(lists > 3, "the data has too few lists: {lists}");
    }
}

#[test]
fn hostile_escapes_stay_in_bounds() {
    let config = Config::new(4, 2, 2, 8, 1);
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
    let kernel = "unweight/kernels/fused_small.cuh";
    for (header, from, to) in [
        ("unweight/fused/packed.cuh", "0x00780078u", "0x00700070u"),
        ("unweight/fused/escapes.cuh", "? 0x5410 : 0x3254", "? 0x3254 : 0x5410"),
        (kernel, "parity ^= slot == 0;", "parity ^= 1;"),
        (kernel, "load_pieces.slot_bytes = S::kXBytes +", "load_pieces.slot_bytes = 0 *"),
        (kernel, "left -= here;", "left = 0;"),
        (kernel, "gate + fused::kBlockRows, up_low", "gate, up_low"),
        (kernel, "half * 4 + lane / 8;", "half * 4 + lane / 8 % 2;"),
    ] {
        let config = if to.contains("gate") { Config::new(2, 2, 3, 8, 1).gated() } else { Config::new(3, 2, 3, 8, 1) };
        let mut kernel = config.build(&[Edit { header, from, to }]);
        let problem = Problem::random(&config, 8, 128, 640, 3);
        let caught = (1..=4).any(|seed| match problem.run(&config, &mut kernel, config.groups(128), seed, None) {
            Err(_) => true,
            Ok(outcome) => problem.mismatches(&config, &outcome.y) > 0,
        });
        assert!(caught, "planting `{to}` for `{from}` went unnoticed");
    }
}
