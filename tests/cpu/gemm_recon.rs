//! The reconstructive matmul, run on the CPU prelude: both sources and both epilogues against a float64 reference, bit-exact
//! reconstruction, hostile metadata, and planted bugs that must be caught.

use crate::harness::{Aligned, CpuKernel, Edit, Launch, MapSpec, Random, bf16};
use unweight_codegen::abi::GemmReconArgs;

const TILE: usize = 64;

#[derive(Clone, Copy)]
struct Config {
    palette: bool,
    n_tiles: usize,
    stages: usize,
    verbatim_rows: usize,
    store_add: bool,
}

impl Config {
    const fn exponent(n_tiles: usize, stages: usize) -> Self {
        Config { palette: false, n_tiles, stages, verbatim_rows: 0, store_add: false }
    }
    const fn palette(n_tiles: usize, stages: usize, verbatim_rows: usize) -> Self {
        Config { palette: true, n_tiles, stages, verbatim_rows, store_add: false }
    }
    const fn adding(mut self) -> Self {
        self.store_add = true;
        self
    }

    /// The sum stated in the head of kernels/gemm_recon.cuh.
    fn smem_bytes(&self) -> usize {
        let (x_bytes, x_slots) =
            if self.n_tiles == 2 { (3 * 256 * 128, 12) } else { ((self.stages + 1) * 16384, self.stages + 1) };
        let exponents = if self.palette { 2048 } else { 4096 };
        let verbatim = if self.palette && self.verbatim_rows > 0 { self.verbatim_rows * 64 + 8 } else { 0 };
        x_bytes
            + 3 * self.n_tiles * 8192
            + self.stages * self.n_tiles * (4096 + exponents + verbatim)
            + 16 * (self.stages + x_slots)
    }

    fn source(&self) -> String {
        format!(
            "#include \"unweight/kernels/gemm_recon.cuh\"\n\
             struct Config {{\n\
             \x20   static constexpr bool kPaletteSource = {};\n\
             \x20   static constexpr uw::u32 kNTiles = {}, kStages = {}, kVerbatimRows = {};\n\
             \x20   static constexpr bool kStoreAdd = {};\n\
             }};\n\
             static_assert(uw::gemm_recon::Smem<Config>::kBytes == {});\n\
             static_assert(uw::gemm_recon::kThreads == 384);\n\
             extern \"C\" __global__ void __launch_bounds__(384, 1) matmul(const __grid_constant__ uw::GemmReconArgs args) {{\n\
             \x20   uw::gemm_recon::run<Config>(args);\n\
             }}\n",
            self.palette,
            self.n_tiles,
            self.stages,
            self.verbatim_rows,
            self.store_add,
            self.smem_bytes()
        )
    }

    fn build(&self, edits: &[Edit]) -> CpuKernel {
        CpuKernel::build(&self.source(), "matmul", "uw::GemmReconArgs", edits)
    }
}

/// Weights and their stored form (docs/format.md, A.2 and A.7), encoded by hand.
struct Weights {
    n: usize,
    k: usize,
    bits: Vec<u16>,
    sign_mantissa: Aligned,
    exponents: Aligned,
    metadata: Aligned,
    verbatim: Aligned,
    verbatim_rows: u32,
    palette: [u8; 16],
}

impl Weights {
    fn encode(bits: Vec<u16>, n: usize, k: usize, config: &Config, palette: [u8; 16]) -> Self {
        let (tile_rows, tile_cols) = (n / TILE, k / TILE);
        let sign_mantissa: Vec<u8> = bits.iter().map(|&b| ((b >> 8 & 0x80) | (b & 0x7f)) as u8).collect();
        let exponent = |row: usize, column: usize| (bits[row * k + column] >> 7 & 0xff) as u8;
        let (mut stored, mut metadata, mut verbatim) = (Vec::new(), Vec::<u32>::new(), Vec::new());
        for tile in 0..tile_rows * tile_cols {
            let (row0, column0) = (tile / tile_cols * TILE, tile % tile_cols * TILE);
            let mut mask = 0u64;
            let first = verbatim.len() / TILE;
            for r in 0..TILE {
                let row: Vec<u8> = (0..TILE).map(|c| exponent(row0 + r, column0 + c)).collect();
                if !config.palette {
                    stored.extend_from_slice(&row);
                    continue;
                }
                let indices: Option<Vec<u8>> =
                    row.iter().map(|e| palette.iter().position(|p| p == e).map(|i| i as u8)).collect();
                match indices {
                    Some(indices) => stored.extend(indices.chunks(2).map(|pair| pair[0] | pair[1] << 4)),
                    None => {
                        mask |= 1 << r;
                        stored.extend_from_slice(&[0; TILE / 2]);
                        verbatim.extend_from_slice(&row);
                    }
                }
            }
            assert!(
                !config.palette || mask.count_ones() as usize <= config.verbatim_rows,
                "the test data exceeds the variant's budget"
            );
            metadata.extend_from_slice(&[0, first as u32, mask as u32, (mask >> 32) as u32]);
        }
        Weights {
            n,
            k,
            sign_mantissa: Aligned::new(&sign_mantissa),
            exponents: Aligned::new(&stored),
            metadata: Aligned::new(bytemuck::cast_slice(&metadata)),
            verbatim_rows: (verbatim.len() / TILE) as u32,
            verbatim: Aligned::new(&verbatim),
            palette,
            bits,
        }
    }

    /// Sixteen exponents of either parity on both sides of 128, in no order; with a verbatim budget, a few rows hold one outside.
    fn random(n: usize, k: usize, config: &Config, random: &mut Random) -> Self {
        const PALETTE: [u8; 16] = [121, 122, 120, 123, 119, 124, 118, 125, 128, 117, 129, 126, 127, 3, 116, 130];
        let mut bits: Vec<u16> = (0..n * k)
            .map(|_| {
                let r = random.next();
                let index = (r >> 20 & 15).min(r >> 24 & 15) as usize;
                (r as u16 & 0x807f) | u16::from(PALETTE[index]) << 7
            })
            .collect();
        if config.palette && config.verbatim_rows > 0 {
            for tile_row in 0..n / TILE {
                for tile_col in 0..k / TILE {
                    for _ in 0..random.below(config.verbatim_rows as u64 + 1) {
                        let row = tile_row * TILE + random.below(64) as usize;
                        let column = tile_col * TILE + random.below(64) as usize;
                        bits[row * k + column] = (bits[row * k + column] & 0x807f) | 90 << 7;
                    }
                }
            }
        }
        Self::encode(bits, n, k, config, PALETTE)
    }
}

struct Problem {
    weights: Weights,
    m: usize,
    x: Vec<u16>,
    y: Vec<u16>,
}

/// Rows behind `y` that no kernel may touch.
const GUARD_ROWS: usize = 3;
const GUARD: u16 = 0x7fc1;

impl Problem {
    fn random(config: &Config, m: usize, n: usize, k: usize, seed: u64) -> Self {
        let mut random = Random(seed | 1);
        let weights = Weights::random(n, k, config, &mut random);
        let x = (0..m * k).map(|_| (random.next() as u16 & 0x807f) | (120 + random.below(8) as u16) << 7).collect();
        let y = (0..m * n)
            .map(|_| if config.store_add { (random.next() as u16 & 0x807f) | 126 << 7 } else { GUARD })
            .collect();
        Problem { weights, m, x, y }
    }

    /// Runs the kernel and returns Y.
    fn run(&self, config: &Config, kernel: &mut CpuKernel, grid: u32, seed: u64) -> Result<Vec<u16>, String> {
        let (w, m) = (&self.weights, self.m);
        let x = Aligned::new(bytemuck::cast_slice(&self.x));
        let mut y = self.y.clone();
        y.extend(std::iter::repeat_n(GUARD, GUARD_ROWS * w.n));
        let y = Aligned::new(bytemuck::cast_slice(&y));
        let palette = Aligned::new(&w.palette);
        kernel.clear_registered();
        for (buffer, name) in [
            (w.exponents.slice(), "exponents"),
            (w.metadata.slice(), "tile_metadata"),
            (w.verbatim.slice(), "verbatim_exponents"),
            (palette.slice(), "palette"),
            (&y.slice()[..m * w.n * 2], "y"),
        ] {
            kernel.register(buffer, name);
        }
        let (columns, box_columns, box_rows) = (w.k as u64, 64, 64);
        let args = GemmReconArgs {
            x: kernel.tensor_map(&MapSpec {
                data: x.slice(),
                element_bytes: 2,
                columns,
                rows: m as u64,
                box_columns,
                box_rows,
                swizzle_bytes: 128,
            }),
            sign_mantissa: kernel.tensor_map(&MapSpec {
                data: w.sign_mantissa.slice(),
                element_bytes: 1,
                columns,
                rows: w.n as u64,
                box_columns,
                box_rows,
                swizzle_bytes: 0,
            }),
            exponents: w.exponents.address(),
            tile_metadata: w.metadata.address(),
            verbatim_exponents: w.verbatim.address(),
            palette: palette.address(),
            y: y.address(),
            verbatim_rows: w.verbatim_rows,
            m: m as u32,
            n: w.n as u32,
            k: w.k as u32,
            tile_cols: (w.k / TILE) as u32,
            reserved: 0,
        };
        let launch = Launch { grid, block: 384, smem_bytes: config.smem_bytes() as u32, cluster: 1, seed };
        // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.launch(&launch, &args)? };
        let result: Vec<u16> = y.slice().chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect();
        assert!(result[m * w.n..].iter().all(|&v| v == GUARD), "rows past m were written");
        Ok(result[..m * w.n].to_vec())
    }

    /// Elements further from the float64 result than bf16 rounding and fp32 accumulation explain.
    fn mismatches(&self, config: &Config, y: &[u16]) -> usize {
        let (n, k) = (self.weights.n, self.weights.k);
        let x: Vec<f64> = self.x.iter().map(|&b| bf16(b)).collect();
        let w: Vec<f64> = self.weights.bits.iter().map(|&b| bf16(b)).collect();
        let mut bad = 0;
        for row in 0..self.m {
            for column in 0..n {
                let (mut sum, mut magnitude) = (0.0, 0.0);
                for i in 0..k {
                    let product = x[row * k + i] * w[column * k + i];
                    sum += product;
                    magnitude += product.abs();
                }
                if config.store_add {
                    let old = bf16(self.y[row * n + column]);
                    sum += old;
                    magnitude += old.abs();
                }
                let error = (bf16(y[row * n + column]) - sum).abs();
                if error.is_nan() || error > sum.abs() / 256.0 + magnitude * 1e-5 {
                    bad += 1;
                }
            }
        }
        bad
    }
}

fn tasks(config: &Config, m: usize, n: usize) -> u32 {
    (m.div_ceil(128) * n / (64 * config.n_tiles)) as u32
}

fn check(config: Config, shapes: &[(usize, usize, usize)]) {
    let mut kernel = config.build(&[]);
    for (i, &(m, n, k)) in shapes.iter().enumerate() {
        for seed in [1, 2] {
            let problem = Problem::random(&config, m, n, k, 77 + i as u64);
            let grid = tasks(&config, m, n).min(1 + seed as u32);
            let y = problem
                .run(&config, &mut kernel, grid, seed * 1000 + i as u64)
                .unwrap_or_else(|e| panic!("m={m} n={n} k={k} seed={seed}: {e}"));
            assert_eq!(problem.mismatches(&config, &y), 0, "m={m} n={n} k={k} seed={seed}");
        }
    }
}

const BATCHES: [(usize, usize, usize); 6] =
    [(1, 128, 256), (17, 256, 64), (64, 128, 192), (65, 128, 128), (128, 256, 128), (130, 128, 256)];

#[test]
fn exponent_source_matches_the_reference() {
    check(Config::exponent(2, 4), &BATCHES);
    check(Config::exponent(1, 2), &[(1, 64, 64), (130, 192, 128)]);
    check(Config::exponent(4, 2), &[(130, 256, 256)]);
}

#[test]
fn palette_source_matches_the_reference() {
    check(Config::palette(2, 3, 8), &BATCHES);
    // Four tasks of up to 256 rows on a grid of 2 and 3: with 3, the last one is cut in two.
    check(Config::palette(2, 2, 4), &[(300, 256, 128)]);
    check(Config::palette(1, 6, 0), &[(17, 64, 256), (65, 128, 64)]);
    // More steps than one batch of metadata (32 / 3).
    check(Config::palette(3, 2, 64), &[(65, 192, 768)]);
}

#[test]
fn store_add_reads_adds_and_rounds_once() {
    check(Config::exponent(2, 2).adding(), &[(1, 128, 128), (130, 256, 128)]);
    check(Config::palette(4, 2, 4).adding(), &[(65, 256, 128)]);
}

/// X = identity copies W^T: every finite pattern must come through untouched (-0 becomes +0 in the sum).
#[test]
fn reconstruction_is_exact() {
    let identity: Vec<u16> = (0..128 * 128).map(|i| if i % 129 == 0 { 0x3f80 } else { 0 }).collect();
    for config in [Config::exponent(2, 2), Config::palette(2, 2, 64)] {
        let mut kernel = config.build(&[]);
        // All signs and mantissas with exponent bytes 0..=254; 16 arbitrary ones of them in the palette, the rest in verbatim rows.
        let bits: Vec<u16> = (0..512 * 128u32)
            .map(|i| {
                let b = i as u16;
                if b >> 7 & 0xff == 0xff { b & 0x807f } else { b }
            })
            .collect();
        let weights = Weights::encode(
            bits,
            512,
            128,
            &config,
            [0, 254, 1, 128, 127, 3, 200, 77, 5, 64, 32, 255, 16, 130, 9, 100],
        );
        let problem = Problem { weights, m: 128, x: identity.clone(), y: vec![GUARD; 128 * 512] };
        let y = problem.run(&config, &mut kernel, 2, 5).unwrap();
        for column in 0..512 {
            for row in 0..128 {
                let w = problem.weights.bits[column * 128 + row];
                let expected = if w == 0x8000 { 0 } else { w };
                assert_eq!(y[row * 512 + column], expected, "weight ({column}, {row})");
            }
        }
    }
}

/// Metadata that lies gives wrong numbers, never an access outside a buffer and never a hang.
#[test]
fn hostile_metadata_stays_inside_the_buffers() {
    let config = Config::palette(2, 2, 4);
    let mut kernel = config.build(&[]);
    let mut random = Random(99);
    for round in 0..6 {
        let mut problem = Problem::random(&config, 17, 128, 256, 5);
        let tiles = 2 * 4;
        let metadata: Vec<u32> = (0..tiles)
            .flat_map(|_| {
                let offset = match round {
                    0 => 0,
                    1 => u32::MAX,
                    2 => problem.weights.verbatim_rows - 1,
                    _ => random.below(1 << 32) as u32 >> random.below(32),
                };
                [random.next() as u32, offset, if round < 3 { u32::MAX } else { random.next() as u32 }, u32::MAX]
            })
            .collect();
        problem.weights.metadata = Aligned::new(bytemuck::cast_slice(&metadata));
        problem.run(&config, &mut kernel, 1, round).unwrap();
    }
}

/// What a planted bug looks like from outside.
#[derive(Debug)]
enum Symptom {
    Wrong,
    Error(&'static str),
}

#[test]
fn planted_bugs_are_caught() {
    use Symptom::{Error, Wrong};
    let matmul = "unweight/kernels/gemm_recon/batch_rows.cuh";
    let sources = "unweight/kernels/gemm_recon/sources.cuh";
    let ring = "unweight/pipeline/ring.cuh";
    let bugs = [
        (
            Edit {
                header: sources,
                from: "S::kSignSlotBytes + S::kExponentSlotBytes);",
                to: "S::kSignSlotBytes + S::kExponentSlotBytes + 16);",
            },
            Error("deadlock"),
        ),
        (
            Edit {
                header: ring,
                from: "wait_parity(full(c.slot), c.parity)",
                to: "wait_parity(full(c.slot), c.parity ^ 1)",
            },
            // A slot's readers run a phase ahead of its bytes.
            Error("nobody has released"),
        ),
        (
            Edit {
                header: ring,
                from: "wait_parity(empty(c.slot), c.parity ^ 1)",
                to: "wait_parity(empty(c.slot), c.parity)",
            },
            Error("deadlock"),
        ),
        (
            Edit {
                header: sources,
                from: "sources.init(1, kConsumerWarps)",
                to: "sources.init(1, kConsumerWarps + 1)",
            },
            Error("deadlock"),
        ),
        (
            Edit {
                header: "unweight/mma/descriptor.cuh",
                from: "kDescriptorStepK16 = 32 / 16",
                to: "kDescriptorStepK16 = 16 / 16",
            },
            Wrong,
        ),
        (
            Edit {
                header: sources,
                from: "const u32 below = (1u << (row % 32)) - 1;",
                to: "const u32 below = (2u << (row % 32)) - 1;",
            },
            Wrong,
        ),
        (
            Edit { header: matmul, from: "            ptx::fence_proxy_async_shared();\n", to: "" },
            Error("without fence.proxy.async"),
        ),
        (
            Edit { header: matmul, from: "            if constexpr (kActive) ptx::wgmma_wait_group<1>();\n", to: "" },
            Wrong,
        ),
        (Edit { header: sources, from: "constexpr u32 kBBuffers = 3;", to: "constexpr u32 kBBuffers = 2;" }, Wrong),
        (
            Edit {
                header: "unweight/mma/reconstruct.cuh",
                from: "palette.z << 7 & kSigns",
                to: "palette.z << 6 & kSigns",
            },
            Wrong,
        ),
    ];
    catches(&Config::palette(1, 2, 8), bugs.into());
}

#[test]
fn planted_bugs_are_caught_where_the_weights_own_the_rows() {
    use Symptom::{Error, Wrong};
    let header = "unweight/kernels/gemm_recon/weight_rows.cuh";
    let bugs = [
        (
            Edit { header, from: "            ptx::fence_proxy_async_shared();\n", to: "" },
            Error("without fence.proxy.async"),
        ),
        (Edit { header, from: "            ptx::wgmma_wait_group<1>();\n", to: "" }, Wrong),
        (
            Edit {
                header,
                from: "activations.init(1, kConsumerWarpgroups)",
                to: "activations.init(1, kConsumerWarpgroups + 1)",
            },
            Error("deadlock"),
        ),
        (Edit { header, from: "over % count * rows", to: "over / count * rows" }, Wrong),
        (
            Edit {
                header,
                from: "matrix_chunk = p.warp * 2 + p.lane / 8 % 2",
                to: "matrix_chunk = p.warp * 2 + p.lane / 16",
            },
            Wrong,
        ),
        (Edit { header, from: "k_step = rotated(step, t.column)", to: "k_step = step" }, Wrong),
    ];
    catches(&Config::palette(2, 2, 8), bugs.into());
}

fn catches(config: &Config, bugs: Vec<(Edit, Symptom)>) {
    let problem = Problem::random(config, 130, 256, 384, 3);
    for (edit, symptom) in bugs {
        let what = format!("{} -> {}", edit.from.trim(), edit.to.trim());
        // Fewer B buffers change the sum that the source asserts.
        let smaller = edit.to.contains("kBBuffers = 2");
        let source = config.source();
        let source =
            if smaller { source.replace(&format!("kBytes == {}", config.smem_bytes()), "kBytes > 0") } else { source };
        let mut kernel = CpuKernel::build(&source, "matmul", "uw::GemmReconArgs", &[edit]);
        // A race shows in some interleavings only.
        let mut seen = Vec::new();
        let caught = (0..8).any(|seed| {
            let outcome = problem.run(config, &mut kernel, 4, seed).map(|y| problem.mismatches(config, &y));
            let caught = match (&symptom, &outcome) {
                (Symptom::Error(text), Err(e)) => e.contains(text),
                (Symptom::Wrong, Ok(wrong)) => *wrong > 0,
                _ => false,
            };
            seen.push(outcome);
            caught
        });
        assert!(caught, "{what}: expected {symptom:?}, got {seen:?}");
    }
}
