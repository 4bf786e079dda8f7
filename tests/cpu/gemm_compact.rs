//! The compact matmul in the simulator: every weight alone, sums against float64, hostile streams, starts, heads and
//! lists, and planted bugs that must be caught.

use unweight_codegen::{
    VariantSpec,
    abi::GemmCompactArgs,
    plan::GemmShape,
    spec::{Epilogue, Op},
};
use unweight_format::{
    Histogram, Matrix,
    raw::{CompactTensor, compact::encode},
    testing::Random,
};

use crate::compact_sections::Sections;
use crate::harness::{Buffer, CpuKernel, Edit, MapSpec, Run, bf16, spec};
use crate::packed_problem::{columns, mismatches};

const GUARD: u16 = 0x7fc1;
const GUARD_ROWS: usize = 2;

/// Weights in whole tiles, with their encoding.
struct Problem {
    n: usize,
    k: usize,
    weights: Vec<u16>,
    tensor: CompactTensor<Vec<u8>>,
    sections: Sections,
}

/// Inputs, and the contents of Y before the launch.
struct Inputs {
    m: usize,
    x: Vec<u16>,
    before: Vec<u16>,
}

impl Problem {
    /// Makes weights with exponents around 120. One in 700 is far outside the window: a zero, a subnormal, a larger or
    /// a smaller number. From 50,000 elements on, row 5 has a run of these: a list longer than a warp.
    fn random(n: usize, k: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let weights: Vec<u16> = (0..n * k)
            .map(|i| {
                let r = random.bits();
                let dense = i / k == 5 && i % k < (n * k / 1500).min(40);
                let exponent = match dense || random.below(700) == 0 {
                    true => [0, 70, 80, 160][(r >> 32 & 3) as usize],
                    false => 122 - ((r >> 20).trailing_zeros() as u16).min(12),
                };
                let mantissa = if r >> 50 & 7 == 0 { 0 } else { 0x7f };
                (r as u16 & (mantissa | 0x8000)) | exponent << 7
            })
            .collect();
        let bytes: &[u8] = bytemuck::cast_slice(&weights);
        let tensor = encode(Matrix::new(bytes, n, k).unwrap(), &Histogram::of(bytes)).unwrap();
        let sections = Sections::of(&tensor);
        Self { n, k, weights, tensor, sections }
    }

    fn inputs(&self, m: usize, epilogue: Epilogue, seed: u64) -> Inputs {
        let mut random = Random::new(seed);
        let mut values = |count: usize, exponent: u16| -> Vec<u16> {
            (0..count).map(|_| (random.bits() as u16 & 0x807f) | (exponent + random.below(8) as u16) << 7).collect()
        };
        let x = values(m * self.k, 120);
        let elements = m * columns(epilogue, self.n);
        let before = if epilogue == Epilogue::StoreAdd { values(elements, 120) } else { vec![GUARD; elements] };
        Inputs { m, x, before }
    }

    fn run(&self, kernel: &mut CpuKernel, spec: &VariantSpec, inputs: &Inputs, seed: u64) -> Result<Vec<u16>, String> {
        self.run_with(kernel, spec, inputs, &self.sections, seed)
    }

    fn run_with(
        &self,
        kernel: &mut CpuKernel,
        spec: &VariantSpec,
        inputs: &Inputs,
        sections: &Sections,
        seed: u64,
    ) -> Result<Vec<u16>, String> {
        let (batch_tile, _) = traits(spec);
        let problem = GemmShape { m: inputs.m as u32, n: self.n as u32, k: self.k as u32 };
        let x = Buffer::of(bytemuck::cast_slice(&inputs.x));
        let mut y = inputs.before.clone();
        y.extend(std::iter::repeat_n(GUARD, GUARD_ROWS * self.n));
        let (stored, y) = (inputs.before.len(), Buffer::of(bytemuck::cast_slice(&y)));
        let args = GemmCompactArgs {
            x: kernel.tensor_map(&MapSpec {
                data: x.slice(),
                element_bytes: 2,
                columns: self.k as u64,
                rows: inputs.m as u64,
                box_columns: 64,
                box_rows: batch_tile,
                swizzle_bytes: 128,
            }),
            dense: sections.dense.address(),
            tiles: sections.tiles.address(),
            streams: sections.streams.address(),
            records: sections.records.address(),
            table: sections.table.address(),
            y: y.address(),
            scale: self.tensor.window().scale(),
            stream_words: (sections.streams.slice().len() / 4) as u32,
            record_words: (sections.records.slice().len() / 4) as u32,
            m: problem.m,
            n: problem.n,
            k: problem.k,
            tile_cols: problem.k / 64,
            reserved: [0; 13],
        };
        let buffers = [
            ("x", x.slice()),
            ("dense", sections.dense.slice()),
            ("tiles", sections.tiles.slice()),
            ("streams", sections.streams.slice()),
            ("records", sections.records.slice()),
            ("table", sections.table.slice()),
            ("y", &y.slice()[..stored * 2]),
        ];
        // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(spec, Run { problem, sms: 3, seed }, &args, &buffers)? };
        let mut result = y.u16s();
        assert!(result[stored..].iter().all(|&v| v == GUARD), "rows past m were written");
        result.truncate(stored);
        Ok(result)
    }

    /// Counts elements whose error exceeds one rounding plus fp32 accumulation.
    fn wrong_sums(&self, kernel: &mut CpuKernel, spec: &VariantSpec, m: usize, seed: u64) -> Result<usize, String> {
        let (_, epilogue) = traits(spec);
        let inputs = self.inputs(m, epilogue, seed);
        let y = self.run(kernel, spec, &inputs, seed)?;
        Ok(mismatches(&y, &inputs.before, &inputs.x, &self.weights, self.k, epilogue))
    }

    /// Counts weights that are not restored bit for bit, except for the sign of zero. Each row of X selects one column
    /// of W.
    fn wrong_weights(&self, kernel: &mut CpuKernel, spec: &VariantSpec) -> Result<usize, String> {
        let (batch_tile, epilogue) = traits(spec);
        let m = batch_tile as usize;
        let mut wrong = 0;
        for first in (0..self.k).step_by(m) {
            let mut inputs = self.inputs(m, epilogue, 1);
            inputs.x.fill(0);
            for row in 0..m {
                inputs.x[row * self.k + first + row] = 0x3f80;
            }
            let y = self.run(kernel, spec, &inputs, first as u64)?;
            for (at, &got) in y.iter().enumerate() {
                let (row, column) = (at / self.n, at % self.n);
                wrong += usize::from(bf16(got) != bf16(self.weights[column * self.k + first + row]));
            }
        }
        Ok(wrong)
    }
}

fn traits(spec: &VariantSpec) -> (u32, Epilogue) {
    let Op::GemmCompact(op) = spec.op else { panic!("{spec} does not read the compact encoding") };
    (op.batch_tile.get(), op.epilogue)
}

type Shape = (usize, usize, usize);

fn check(cases: &[(&str, &[Shape])]) {
    let specs: Vec<_> = cases.iter().map(|(name, _)| spec(&format!("gemm_compact_{name}"))).collect();
    let mut kernel = CpuKernel::all(&specs, &[]);
    for (spec, (_, shapes)) in specs.iter().zip(cases) {
        for (i, &(m, n, k)) in shapes.iter().enumerate() {
            let problem = Problem::random(n, k, 31 + i as u64);
            for seed in [1, 1000] {
                let wrong = problem.wrong_sums(&mut kernel, spec, m, seed + i as u64);
                assert_eq!(wrong, Ok(0), "{spec} m = {m}, n = {n}, k = {k}");
            }
        }
    }
}

#[test]
fn every_weight_round_trips() {
    let mut lists = 0;
    for (name, n, k) in [("b8_w3p2c1_store", 192, 128), ("b32_w2p1c2_pdl_store", 128, 448)] {
        let spec = spec(&format!("gemm_compact_{name}"));
        let problem = Problem::random(n, k, 7);
        assert_eq!(problem.wrong_weights(&mut CpuKernel::of(&spec, &[]), &spec), Ok(0), "{spec}");
        lists += problem.tensor.tiles().chunks_exact(8).filter(|tile| tile[7] >> 6 >= 2).count();
    }
    assert!(lists > 5, "the data has too few lists: {lists}");
}

#[test]
fn batch_tile_8() {
    check(&[
        // Odd numbers of tiles, fewer tiles than warps, and batches at and next to the edge.
        ("b8_w4p2c1_store", &[(1, 128, 320), (8, 64, 128), (9, 192, 64), (7, 64, 704), (17, 64, 192)]),
        ("b8_w2p1c1_pdl_store_add", &[(5, 128, 320), (9, 64, 192)]),
    ]);
}

#[test]
fn batch_tile_16() {
    check(&[("b16_w2p3c1_pdl_store", &[(7, 128, 192), (16, 192, 128), (17, 64, 64)])]);
}

#[test]
fn batch_tile_32() {
    check(&[("b32_w3p2c1_pdl_store", &[(31, 64, 256), (33, 128, 64)])]);
}

#[test]
fn cluster_splits_k_and_adds() {
    check(&[("b8_w2p2c2_pdl_store_add", &[(3, 128, 448), (8, 64, 64)]), ("b16_w1p2c8_store", &[(16, 64, 960)])]);
}

/// Rows are split over clusters and tiles over warps: shares that end in the middle of a row, in a warp, and between
/// blocks; fewer tiles than warps; warps with several rows.
#[test]
fn row_blocks_are_distributed() {
    check(&[
        ("b8_w3p1c1_persistent_store", &[(8, 64 * 7, 320), (3, 64, 128), (9, 192, 64)]),
        ("b8_w2p1c2_t32_persistent_pdl_store_add", &[(5, 64 * 8, 448), (8, 64, 64), (1, 64 * 5, 192)]),
        // As many rows as a block may end, and a block with one tile more than its neighbor.
        ("b8_w8p1c2_persistent_store", &[(8, 512, 192)]),
        ("b8_w3p1c4_persistent_store", &[(8, 960, 64)]),
        ("b16_w5p2c4_t8_persistent_silu_mul", &[(16, 64 * 13, 64 * 3), (30, 128, 64)]),
        ("b32_w1p1c2_t16_persistent_store", &[(32, 64 * 6, 64 * 3), (7, 64 * 3, 64)]),
    ]);
}

#[test]
fn copies_of_the_table_are_one() {
    check(&[("b8_w2p1c1_t8_store", &[(3, 128, 320)]), ("b16_w1p1c2_t32_pdl_store", &[(16, 64, 448)])]);
}

#[test]
fn gate_and_up_become_one() {
    check(&[("b8_w4p2c1_pdl_silu_mul", &[(3, 128, 320), (9, 320, 64)]), ("b32_w1p1c8_silu_mul", &[(30, 64, 640)])]);
}

/// More tiles than a warp reads start offsets of at once.
#[test]
fn more_tiles_than_one_read_of_places() {
    check(&[("b8_w1p1c1_store", &[(3, 64, 64 * 67)]), ("b8_w1p16c1_store", &[(3, 64, 64 * 81)])]);
}

#[test]
fn any_bytes_stay_in_bounds() {
    for name in ["b8_w2p2c1_pdl_store", "b8_w3p1c2_t8_persistent_store"] {
        any_bytes_of(name);
    }
}

fn any_bytes_of(name: &str) {
    let spec = spec(&format!("gemm_compact_{name}"));
    let mut kernel = CpuKernel::of(&spec, &[]);
    let problem = Problem::random(128, 320, 9);
    let inputs = problem.inputs(3, Epilogue::Store, 1);
    let mut random = Random::new(78);
    for turn in 0..15 {
        let mut sections = Sections::of(&problem.tensor);
        let mut noise = |buffer: &Buffer| Buffer::of(&random.bytes(buffer.slice().len()));
        // Random streams only, so that the tiles lead to them; random starts and heads only; random everything except
        // the table, whose entries are not addresses; random lists only.
        match turn % 4 {
            0 => sections.streams = noise(&sections.streams),
            1 => sections.tiles = noise(&sections.tiles),
            2 => sections.records = noise(&sections.records),
            _ => {
                sections.streams = noise(&sections.streams);
                sections.tiles = noise(&sections.tiles);
                sections.records = noise(&sections.records);
                sections.dense = noise(&sections.dense);
            }
        }
        problem.run_with(&mut kernel, &spec, &inputs, &sections, turn).unwrap();
    }
    // Lanes of maximum length, lists that promise more elements than a tile has, and a list that ends with its section.
    let mut sections = Sections::of(&problem.tensor);
    sections.streams = Buffer::filled(sections.streams.slice().len(), 0xff);
    sections.records = Buffer::filled(sections.records.slice().len(), 0xff);
    problem.run_with(&mut kernel, &spec, &inputs, &sections, 3).unwrap();
    for words in [0, 1, 2, 33] {
        let mut sections = Sections::of(&problem.tensor);
        sections.records = Buffer::filled(words * 4, 0xff);
        problem.run_with(&mut kernel, &spec, &inputs, &sections, 4).unwrap();
    }
}

#[test]
fn planted_bugs_are_caught() {
    let (encoding, kernel_header) = ("unweight/encoding/compact.cuh", "unweight/kernels/gemm_compact.cuh");
    let ring = "unweight/pipeline/warp_ring.cuh";
    let persistent = |from: &str| ["clear_sums", "first_of", "ahead_of"].iter().any(|word| from.contains(word));
    for (header, from, to) in [
        (encoding, "at = kUp ? at + used : at - used;", "at = at + used;"),
        (encoding, "p[6] = and_or(w[1] >> 2, 0x01800180u,", "p[6] = and_or(w[1] >> 2, 0x01000100u,"),
        (kernel_header, "parity ^= slot == 0;", "parity ^= 1;"),
        // The refill may overtake the warp's own loads.
        (ring, "            release_to_copy_engine();", "            ptx::bar_warp_sync();"),
        (kernel_header, "chains(stream_slot(stream) + skip * 4, lane)", "chains(stream_slot(stream), lane)"),
        // The streams of the next tile overwrite those that are being read.
        (kernel_header, "load_stream + 1 == S::kStreamSlots", "load_stream + 1 == Config::kStages"),
        (kernel_header, "if (block % kPairs != pair) return;", "if (block / kPairs != pair) return;"),
        (
            kernel_header,
            "ptx::shfl_sync_idx(ahead.words, load_turn);",
            "ptx::shfl_sync_idx(ahead.words, load_turn) & 28;",
        ),
        (kernel_header, "if (head != 0) patch(operands, kPair, head, records);", ""),
        (kernel_header, "for (u32 i = 32; i <= count", "for (u32 i = 33; i <= count"),
        (kernel_header, "args.tiles, first_tile +", "args.tiles,"),
        (kernel_header, "now = ahead;\n            turn = 0;", "turn = 0;"),
        (kernel_header, "sums[kPair + i * kPairs][f]", "sums[2 * kPair + i][f]"),
        (kernel_header, "ptx::mbarrier_expect_tx(slots.full(s), compact::kDenseTileBytes);", ""),
        (kernel_header, "(c % kHalf < kFirst) != (kPair == 0)", "(c % kHalf < 2) != (kPair == 0)"),
        (encoding, "st_shared_x4(shared + at * 4, ptx", "st_shared_x4(shared + at, ptx"),
        (encoding, "ptx::ld_global_nc(table + at / kCopies)", "ptx::ld_global_nc(table + at / 4)"),
        (encoding, "word + 4 * i);", "word + 4 * (i < 3 ? i : 2));"),
        // Sums of one row in those of the next, sums at the place of another row, and sums that the next row's warp
        // never wrote.
        (kernel_header, "                clear_sums();", ""),
        (kernel_header, "(row - first_of_block(by) / args.tile_cols)", "(row & 1)"),
        (kernel_header, "first_of(last + 1) > behind ?", "first_of(last + 1) >= behind ?"),
        (kernel_header, "more + (thing - ahead_of) / each", "more + thing / each"),
        (kernel_header, "half * 4 + lane / 8;", "half * 4 + lane / 8 % 2;"),
        (kernel_header, "gate + packed::kGateRows, up_low", "gate, up_low"),
    ] {
        let spec = spec(match to {
            _ if header == encoding && to.contains("at / 4") => "gemm_compact_b8_w1p2c1_t8_pdl_store",
            _ if persistent(from) => "gemm_compact_b8_w3p1c2_persistent_store",
            _ if to.contains("gate") => "gemm_compact_b8_w1p2c1_pdl_silu_mul",
            // Batch tile 8 loads all dense words at once.
            _ if to.contains("kHalf") => "gemm_compact_b16_w1p2c1_pdl_store",
            _ => "gemm_compact_b8_w1p2c1_pdl_store",
        });
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let problem = if persistent(from) { Problem::random(64 * 7, 320, 3) } else { Problem::random(128, 64 * 37, 3) };
        // A small error of one weight, as of one escape, shows only when each weight is checked alone.
        let caught = (1..=3).any(|seed| problem.wrong_sums(&mut kernel, &spec, 8, seed) != Ok(0))
            || traits(&spec).1 == Epilogue::Store
                && Problem::random(128, 448, 7).wrong_weights(&mut kernel, &spec) != Ok(0);
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
