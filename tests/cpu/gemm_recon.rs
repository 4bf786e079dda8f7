//! The reconstructive matmul in the simulator: both sources and both epilogues against a float64 reference, bit-exact
//! reconstruction, hostile metadata, and planted bugs that must be caught. `gemm_join.rs` runs its problems, too.

use crate::harness::{Buffer, CpuKernel, Edit, MapSpec, Run, bf16, spec};
use crate::packed_problem::dot;
use unweight_codegen::{
    VariantSpec,
    abi::GemmReconArgs,
    plan::GemmShape,
    spec::{Epilogue, JoinSource, Op, WeightSource},
};
use unweight_format::testing::Random;

const TILE: usize = 64;

/// The properties of a variant that its problems depend on.
struct Traits {
    is_palette: bool,
    /// The maximum number of verbatim rows of a tile.
    verbatim_rows: u32,
    adds: bool,
    /// Rows of the boxes of X and of sign-mantissa.
    box_rows: [u32; 2],
}

fn traits(spec: &VariantSpec) -> Traits {
    match spec.op {
        Op::GemmRecon(op) => Traits {
            is_palette: op.source != WeightSource::Exponent,
            verbatim_rows: op.verbatim_rows(),
            adds: op.epilogue == Epilogue::StoreAdd,
            box_rows: [64, 64],
        },
        Op::GemmJoin(op) => {
            let is_palette = op.source == JoinSource::Palette;
            Traits {
                is_palette,
                verbatim_rows: if is_palette { 64 } else { 0 },
                adds: op.epilogue == Epilogue::StoreAdd,
                box_rows: [op.batch_tile.get(), 16 * op.row_blocks.get()],
            }
        }
        _ => panic!("{spec} is of another family"),
    }
}

fn is_palette(spec: &VariantSpec) -> bool {
    traits(spec).is_palette
}

fn adds(spec: &VariantSpec) -> bool {
    traits(spec).adds
}

/// Weights and their encoding (docs/format.md, A.2 and A.7), encoded by hand.
pub struct Weights {
    n: usize,
    k: usize,
    pub bits: Vec<u16>,
    sign_mantissa: Buffer,
    exponents: Buffer,
    pub metadata: Buffer,
    verbatim: Buffer,
    pub verbatim_rows: u32,
    palette: [u8; 16],
}

impl Weights {
    pub fn encode(bits: Vec<u16>, n: usize, k: usize, spec: &VariantSpec, palette: [u8; 16]) -> Self {
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
                if !is_palette(spec) {
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
                !is_palette(spec) || mask.count_ones() <= traits(spec).verbatim_rows,
                "the test data exceeds the variant's budget"
            );
            metadata.extend_from_slice(&[0, first as u32, mask as u32, (mask >> 32) as u32]);
        }
        Weights {
            n,
            k,
            sign_mantissa: Buffer::of(&sign_mantissa),
            exponents: Buffer::of(&stored),
            metadata: Buffer::of(bytemuck::cast_slice(&metadata)),
            verbatim_rows: (verbatim.len() / TILE) as u32,
            verbatim: Buffer::of(&verbatim),
            palette,
            bits,
        }
    }

    /// Makes weights with sixteen exponents of either parity on both sides of 128, in random order. With a verbatim
    /// budget, a few rows contain an exponent outside.
    fn random(n: usize, k: usize, spec: &VariantSpec, random: &mut Random) -> Self {
        const PALETTE: [u8; 16] = [121, 122, 120, 123, 119, 124, 118, 125, 128, 117, 129, 126, 127, 3, 116, 130];
        let mut bits: Vec<u16> = (0..n * k)
            .map(|_| {
                let r = random.bits();
                let index = (r >> 20 & 15).min(r >> 24 & 15) as usize;
                (r as u16 & 0x807f) | u16::from(PALETTE[index]) << 7
            })
            .collect();
        // A tile whose rows are all verbatim is rare; gemm_join has no budget.
        let budget = traits(spec).verbatim_rows;
        if budget > 0 {
            for tile_row in 0..n / TILE {
                for tile_col in 0..k / TILE {
                    for _ in 0..random.below(u64::from(budget) + 1) {
                        let row = tile_row * TILE + random.below(64) as usize;
                        let column = tile_col * TILE + random.below(64) as usize;
                        bits[row * k + column] = (bits[row * k + column] & 0x807f) | 90 << 7;
                    }
                }
            }
        }
        Self::encode(bits, n, k, spec, PALETTE)
    }
}

pub struct Problem {
    pub weights: Weights,
    pub m: usize,
    pub x: Vec<u16>,
    pub y: Vec<u16>,
}

/// Rows after `y` that no kernel may write.
const GUARD_ROWS: usize = 3;
pub const GUARD: u16 = 0x7fc1;

impl Problem {
    pub fn random(spec: &VariantSpec, m: usize, n: usize, k: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let weights = Weights::random(n, k, spec, &mut random);
        let x = (0..m * k).map(|_| (random.bits() as u16 & 0x807f) | (120 + random.below(8) as u16) << 7).collect();
        let y =
            (0..m * n).map(|_| if adds(spec) { (random.bits() as u16 & 0x807f) | 126 << 7 } else { GUARD }).collect();
        Problem { weights, m, x, y }
    }

    /// Runs the kernel and returns Y.
    pub fn run(&self, spec: &VariantSpec, kernel: &mut CpuKernel, sms: u32, seed: u64) -> Result<Vec<u16>, String> {
        let (w, m) = (&self.weights, self.m);
        let x = Buffer::of(bytemuck::cast_slice(&self.x));
        let mut y = self.y.clone();
        y.extend(std::iter::repeat_n(GUARD, GUARD_ROWS * w.n));
        let y = Buffer::of(bytemuck::cast_slice(&y));
        let palette = Buffer::of(&w.palette);
        let (columns, box_columns, [x_rows, sign_rows]) = (w.k as u64, 64, traits(spec).box_rows);
        let args = GemmReconArgs {
            x: kernel.tensor_map(&MapSpec {
                data: x.slice(),
                element_bytes: 2,
                columns,
                rows: m as u64,
                box_columns,
                box_rows: x_rows,
                swizzle_bytes: 128,
            }),
            sign_mantissa: kernel.tensor_map(&MapSpec {
                data: w.sign_mantissa.slice(),
                element_bytes: 1,
                columns,
                rows: w.n as u64,
                box_columns,
                box_rows: sign_rows,
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
        let buffers = [
            ("exponents", w.exponents.slice()),
            ("tile_metadata", w.metadata.slice()),
            ("verbatim_exponents", w.verbatim.slice()),
            ("palette", palette.slice()),
            ("y", &y.slice()[..m * w.n * 2]),
        ];
        let run = Run { problem: GemmShape { m: args.m, n: args.n, k: args.k }, sms, seed };
        // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(spec, run, &args, &buffers)? };
        let mut result = y.u16s();
        assert!(result[m * w.n..].iter().all(|&v| v == GUARD), "rows past m were written");
        result.truncate(m * w.n);
        Ok(result)
    }

    /// Counts elements further from the float64 result than bf16 rounding and fp32 accumulation explain.
    pub fn mismatches(&self, spec: &VariantSpec, y: &[u16]) -> usize {
        let (n, k) = (self.weights.n, self.weights.k);
        let x: Vec<f64> = self.x.iter().map(|&b| bf16(b)).collect();
        let w: Vec<f64> = self.weights.bits.iter().map(|&b| bf16(b)).collect();
        let mut bad = 0;
        for row in 0..self.m {
            for column in 0..n {
                let (mut sum, mut magnitude) = dot(&x[row * k..][..k], &w[column * k..][..k]);
                if adds(spec) {
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

fn check(name: &str, shapes: &[(usize, usize, usize)]) {
    check_on(name, shapes, [2, 3]);
}

pub fn check_on(name: &str, shapes: &[(usize, usize, usize)], sms: [u32; 2]) {
    let spec = spec(name);
    let mut kernel = CpuKernel::of(&spec, &[]);
    for (i, &(m, n, k)) in shapes.iter().enumerate() {
        for (seed, sms) in [1, 2].into_iter().zip(sms) {
            let problem = Problem::random(&spec, m, n, k, 77 + i as u64);
            let y = problem
                .run(&spec, &mut kernel, sms, seed * 1000 + i as u64)
                .unwrap_or_else(|e| panic!("{spec} m={m} n={n} k={k} seed={seed}: {e}"));
            assert_eq!(problem.mismatches(&spec, &y), 0, "{spec} m={m} n={n} k={k} seed={seed}");
        }
    }
}

const BATCHES: [(usize, usize, usize); 6] =
    [(1, 128, 256), (17, 256, 64), (64, 128, 192), (65, 128, 128), (128, 256, 128), (130, 128, 256)];

#[test]
fn exponent_source_matches_the_reference() {
    check("gemm_recon_exponent_n2p4_store", &BATCHES);
    check("gemm_recon_exponent_n1p2_store", &[(1, 64, 64), (130, 192, 128)]);
    check("gemm_recon_exponent_n4p2_store", &[(130, 256, 256)]);
}

#[test]
fn palette_source_matches_the_reference() {
    check("gemm_recon_palette_n2p3_v8_store", &BATCHES);
    // Four tasks of up to 256 rows on a grid of 2 and 3; with 3, the last one is split in two.
    check("gemm_recon_palette_n2p2_v4_store", &[(300, 256, 128)]);
    check("gemm_recon_palette_n1p6_v0_store", &[(17, 64, 256), (65, 128, 64)]);
    // More steps than one batch of metadata covers (32 / 3).
    check("gemm_recon_palette_n3p2_v64_store", &[(65, 192, 768)]);
}

#[test]
fn store_add_reads_adds_and_rounds_once() {
    check("gemm_recon_exponent_n2p2_store_add", &[(1, 128, 128), (130, 256, 128)]);
    check("gemm_recon_palette_n4p2_v4_store_add", &[(65, 256, 128)]);
}

/// Clusters share k: even and uneven shares, last tasks of few rows, and clusters that process several tasks in turn (5
/// and 6 SMs are 2 clusters of 2, 5 also one of 4).
#[test]
fn splits_of_k_match_the_reference() {
    let shapes = [(1, 64, 128), (17, 192, 256), (64, 128, 192), (65, 128, 320), (130, 192, 128)];
    check_on("gemm_recon_exponent_n1p2s2_store", &shapes, [5, 132]);
    check_on("gemm_recon_palette_n1p6s2_v8_store_add", &shapes, [6, 132]);
    let shapes = [(1, 64, 256), (33, 128, 320), (130, 192, 704)];
    check_on("gemm_recon_palette_n1p3s4_v4_store", &shapes, [5, 132]);
    check_on("gemm_recon_exponent_n1p6s4_store_add", &shapes, [1, 132]);
}

/// Sums do not depend on the interleaving of blocks: the order of summation is fixed.
#[test]
fn splits_give_the_same_bits_in_every_interleaving() {
    for name in ["gemm_recon_palette_n1p2s2_v8_store", "gemm_recon_exponent_n1p2s4_store"] {
        let spec = spec(name);
        let mut kernel = CpuKernel::of(&spec, &[]);
        let problem = Problem::random(&spec, 70, 128, 576, 12);
        let first = problem.run(&spec, &mut kernel, 132, 1).unwrap();
        for seed in 2..8 {
            assert!(problem.run(&spec, &mut kernel, seed as u32, seed).unwrap() == first, "{spec}: seed {seed}");
        }
    }
}

#[test]
fn reconstruction_is_exact() {
    check_weights_are_exact("gemm_recon_exponent_n2p2_store");
    check_weights_are_exact("gemm_recon_palette_n2p2_v64_store");
}

/// X = identity copies W^T: every finite pattern must be unchanged (-0 becomes +0 in the sum).
pub fn check_weights_are_exact(name: &str) {
    let spec = spec(name);
    let mut kernel = CpuKernel::of(&spec, &[]);
    // All signs and mantissas with exponent bytes 0..=254; 16 arbitrary exponents are in the palette, the rest in
    // verbatim rows.
    let bits: Vec<u16> = (0..512 * 128u32)
        .map(|i| {
            let b = i as u16;
            if b >> 7 & 0xff == 0xff { b & 0x807f } else { b }
        })
        .collect();
    let palette = [0, 254, 1, 128, 127, 3, 200, 77, 5, 64, 32, 255, 16, 130, 9, 100];
    let weights = Weights::encode(bits, 512, 128, &spec, palette);
    let identity = (0..128 * 128).map(|i| if i % 129 == 0 { 0x3f80 } else { 0 }).collect();
    let problem = Problem { weights, m: 128, x: identity, y: vec![GUARD; 128 * 512] };
    let y = problem.run(&spec, &mut kernel, 2, 5).unwrap();
    for column in 0..512 {
        for row in 0..128 {
            let w = problem.weights.bits[column * 128 + row];
            let expected = if w == 0x8000 { 0 } else { w };
            assert_eq!(y[row * 512 + column], expected, "{spec}: weight ({column}, {row})");
        }
    }
}

#[test]
fn hostile_metadata_stays_in_bounds() {
    check_hostile_metadata("gemm_recon_palette_n2p2_v4_store", 17);
}

/// Invalid metadata gives wrong numbers, but never an access outside a buffer or a hang.
pub fn check_hostile_metadata(name: &str, m: usize) {
    let spec = spec(name);
    let mut kernel = CpuKernel::of(&spec, &[]);
    let mut random = Random::new(99);
    for round in 0..6 {
        let mut problem = Problem::random(&spec, m, 128, 256, 5);
        let tiles = 2 * 4;
        let metadata: Vec<u32> = (0..tiles)
            .flat_map(|_| {
                let offset = match round {
                    0 => 0,
                    1 => u32::MAX,
                    2 => problem.weights.verbatim_rows - 1,
                    _ => random.below(1 << 32) as u32 >> random.below(32),
                };
                [random.bits() as u32, offset, if round < 3 { u32::MAX } else { random.bits() as u32 }, u32::MAX]
            })
            .collect();
        problem.weights.metadata = Buffer::of(bytemuck::cast_slice(&metadata));
        problem.run(&spec, &mut kernel, 1, round).unwrap();
    }
}

/// The visible effect of a planted bug.
#[derive(Debug)]
pub enum Symptom {
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
                from: "mbarrier_wait_parity(full(c.slot), c.parity)",
                to: "mbarrier_wait_parity(full(c.slot), c.parity ^ 1)",
            },
            // A slot's readers run a phase ahead of its bytes.
            Error("no thread has released"),
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
    check_caught("gemm_recon_palette_n1p2_v8_store", bugs.into());
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
    check_caught("gemm_recon_palette_n2p2_v8_store", bugs.into());
}

/// Synchronization between the blocks of a split. Two clusters process eight tasks.
#[test]
fn planted_bugs_are_caught_where_blocks_share_k() {
    use Symptom::{Error, Wrong};
    let header = "unweight/kernels/gemm_recon/batch_rows.cuh";
    let sources = "unweight/kernels/gemm_recon/sources.cuh";
    let bugs = [
        // The shares of blocks.
        (Edit { header: sources, from: "return rank * steps / kSplits;", to: "return 0;" }, Wrong),
        (Edit { header: sources, from: "return this->first(args.tile_cols) + (s", to: "return (s" }, Wrong),
        // Sums that are read before they are written, and X that is filled before the sums are read.
        (
            Edit { header, from: "        sync_cluster();\n        if (has_rows) {", to: "        if (has_rows) {" },
            Error("deadlock"),
        ),
        (
            Edit {
                header,
                from: "        sync_cluster();\n        if (has_rows) {",
                to: "        ptx::barrier_cluster_arrive();\n        if (has_rows) {",
            },
            Wrong,
        ),
        (
            Edit {
                header,
                from: "            sync_cluster();\n            sync_cluster();\n",
                to: "            sync_cluster();\n            ptx::barrier_cluster_arrive();\n",
            },
            Error("refills shared offset"),
        ),
        (Edit { header, from: "        ptx::fence_proxy_async();\n", to: "" }, Error("without fence.proxy.async")),
        // Pieces of the wrong block, or of no block.
        (Edit { header, from: "const u32 peer = j + (j >= rank);", to: "const u32 peer = j;" }, Wrong),
        (Edit { header, from: "(rank - (rank > peer))", to: "rank" }, Wrong),
        (Edit { header, from: "y + rank * kPieceColumns, args.n", to: "y, args.n" }, Wrong),
        (
            Edit { header: "unweight/epilogue/store.cuh", from: "row / kLineRows % (8 / kLineRows)", to: "row % 8" },
            Wrong,
        ),
    ];
    check_caught_on("gemm_recon_palette_n1p2s2_v8_store", bugs.into(), 5);
}

fn check_caught(name: &str, bugs: Vec<(Edit, Symptom)>) {
    check_caught_on(name, bugs, 4);
}

fn check_caught_on(name: &str, bugs: Vec<(Edit, Symptom)>, sms: u32) {
    let spec = spec(name);
    check_caught_by(&Problem::random(&spec, 130, 256, 384, 3), &spec, bugs, sms);
}

/// Checks that a problem shows each planted bug.
pub fn check_caught_by(problem: &Problem, spec: &VariantSpec, bugs: Vec<(Edit, Symptom)>, sms: u32) {
    for (edit, symptom) in bugs.into_iter().filter(|(edit, _)| !edit.is_left_out()) {
        let what = format!("{} -> {}", edit.from.trim(), edit.to.trim());
        let mut kernel = CpuKernel::of(spec, &[edit]);
        // A race shows only in some interleavings.
        let mut outcomes = Vec::new();
        let caught = (0..8).any(|seed| {
            let outcome = problem.run(spec, &mut kernel, sms, seed).map(|y| problem.mismatches(spec, &y));
            let caught = match (&symptom, &outcome) {
                (Symptom::Error(text), Err(e)) => e.contains(text),
                (Symptom::Wrong, Ok(wrong)) => *wrong > 0,
                _ => false,
            };
            outcomes.push(outcome);
            caught
        });
        assert!(caught, "{what}: expected {symptom:?}, got {outcomes:?}");
    }
}
