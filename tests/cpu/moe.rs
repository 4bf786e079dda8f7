//! Routing and the grouped product of a mixture of experts in the simulator: lists of pairs and items against a sort on
//! the host, rows of every pair against float64, and planted bugs that must be caught.

use unweight_codegen::{
    VariantSpec,
    abi::{GemmGroupedArgs, KernelArgs, RouteArgs},
    plan::GemmShape,
    spec::{Epilogue, Op, RouteSpec},
};
use unweight_format::{
    Histogram, Matrix,
    raw::{PackedTensor, packed::pack},
    testing::Random,
};

use crate::harness::{Buffer, CpuKernel, Edit, Run, bf16, spec};
use crate::packed_problem::{columns, mismatches};

/// Columns after each row.
const GAP: usize = 8;
const GUARD: u16 = 0x7fc1;
const POISON: u32 = 0xa5a5_a5a5;
/// The id of an expert that is not on this device.
const ELSEWHERE: u32 = u32::MAX;

pub fn launch<A: KernelArgs>(
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    problem: GemmShape,
    args: &A,
    buffers: &[(&str, &Buffer)],
    seed: u64,
) -> Result<(), String> {
    let slices: Vec<_> = buffers.iter().map(|(name, buffer)| (*name, buffer.slice())).collect();
    // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run(spec, Run { problem, sms: 2, seed }, args, &slices) }
}

// ---- which token goes where ----

/// The experts of each token.
#[derive(Clone)]
struct Routes {
    experts: u32,
    top_k: u32,
    ids: Vec<u32>,
}

/// Pairs by expert, and the items of a batch tile.
struct Lists {
    pairs: Vec<u32>,
    items: Vec<[u32; 4]>,
}

impl Routes {
    /// Chooses distinct experts for each token; one id in ten is not on this device.
    fn random(tokens: u32, experts: u32, top_k: u32, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut distinct: Vec<u32> = Vec::new();
            while distinct.len() < top_k as usize {
                let id = random.below(experts.into()) as u32;
                if !distinct.contains(&id) {
                    distinct.push(id);
                }
            }
            ids.extend(distinct.into_iter().map(|id| match random.below(10) {
                0 => [ELSEWHERE, experts, experts + 7][id as usize % 3],
                _ => id,
            }));
        }
        Self { experts, top_k, ids }
    }

    /// Routes all tokens to one expert.
    fn single(tokens: u32, experts: u32, expert: u32) -> Self {
        Self { experts, top_k: 1, ids: vec![expert; tokens as usize] }
    }

    fn tokens(&self) -> u32 {
        self.ids.len() as u32 / self.top_k
    }

    fn items_max(&self, rows: u32) -> u32 {
        RouteSpec::items_max(self.ids.len() as u32, self.experts, rows)
    }

    /// Computes the expected lists on the host.
    fn lists(&self, rows: u32) -> Lists {
        let (mut pairs, mut items) = (Vec::new(), Vec::new());
        for expert in 0..self.experts {
            let first = pairs.len();
            pairs.extend((0..self.ids.len() as u32).filter(|pair| self.ids[*pair as usize] == expert));
            for at in (first..pairs.len()).step_by(rows as usize) {
                items.push([expert, at as u32, rows.min((pairs.len() - at) as u32), 0]);
            }
        }
        assert!(items.len() <= self.items_max(rows) as usize, "there are more items than items_max");
        items.resize(self.items_max(rows) as usize, [0; 4]);
        Lists { pairs, items }
    }

    fn args(&self) -> RouteArgs {
        RouteArgs { tokens: self.tokens(), experts: self.experts, top_k: self.top_k, ..RouteArgs::default() }
    }

    /// Compares the kernel's lists with the host's.
    fn check_sort(&self, kernel: &mut CpuKernel, spec: &VariantSpec, rows: u32, seed: u64) -> Result<(), String> {
        let items_max = self.items_max(rows);
        let ids = words(&self.ids);
        let (pairs, items) = (Buffer::new(self.ids.len() * 4), Buffer::new(items_max as usize * 16));
        let args = RouteArgs {
            ids: ids.address(),
            pairs: pairs.address(),
            items: items.address(),
            item_rows: rows,
            items_max,
            ..self.args()
        };
        let buffers = [("ids", &ids), ("pairs", &pairs), ("items", &items)];
        launch(kernel, spec, GemmShape::rows(1), &args, &buffers, seed)?;
        let expected = self.lists(rows);
        let (got, rest) = (pairs.u32s(), expected.pairs.len());
        if got[..rest] != expected.pairs {
            return Err("the pairs differ from the reference".to_owned());
        }
        if got[rest..].iter().any(|word| *word != POISON) {
            return Err("pairs without an expert have entries".to_owned());
        }
        match items.u32s() == expected.items.concat() {
            true => Ok(()),
            false => Err("the items differ from the reference".to_owned()),
        }
    }
}

fn words(words: &[u32]) -> Buffer {
    Buffer::of(bytemuck::cast_slice(words))
}

fn routes() -> Vec<Routes> {
    vec![
        Routes::random(1, 128, 8, 1),
        Routes::random(37, 60, 4, 2),
        Routes::random(3, 8, 2, 3),
        Routes::random(5, 8, 8, 4),
        Routes::random(2, 512, 32, 5),
        // More pairs than the block has threads: several steps per warp.
        Routes::random(301, 9, 7, 6),
        Routes::random(5000, 40, 1, 7),
        Routes::single(97, 8, 7),
        Routes::single(40, 33, 32),
        // No pairs at all.
        Routes { experts: 4, top_k: 2, ids: vec![ELSEWHERE; 6] },
        Routes { experts: 1, top_k: 1, ids: vec![0] },
    ]
}

#[test]
fn pairs_are_sorted_by_expert() {
    let specs = [spec("route_sort"), spec("route_sort_pdl")];
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in &specs {
        for (i, case) in routes().iter().enumerate() {
            for rows in [8, 64] {
                case.check_sort(&mut kernel, spec, rows, i as u64)
                    .unwrap_or_else(|wrong| panic!("{spec} {i}: {wrong}"));
            }
        }
    }
}

#[test]
fn planted_bugs_of_the_sort_are_caught() {
    let header = "unweight/kernels/route.cuh";
    for (from, to) in [
        ("counts = expert < args.experts;", "counts = expert != ~0u;"),
        ("ptx::popc(peers & ((1u << lane) - 1))", "ptx::popc(peers & ((2u << lane) - 1))"),
        ("ptx::st_shared(address, total);\n", ""),
        ("(pairs + run - 1) / run;", "pairs / run;"),
        ("if (w < warp) {", "if (w <= warp) {"),
        ("(total + args.item_rows - 1) / args.item_rows;", "total / args.item_rows;"),
        ("more < args.item_rows ? more : args.item_rows, 0", "args.item_rows, 0"),
        ("i = all_items + thread;", "i = all_items + 1 + thread;"),
        ("+ place + step.before, at + lane", "+ place, at + lane"),
        ("place + ptx::popc(step.peers));", "place + 1);"),
        ("first = entries_to - total,", "first = entries_to,"),
        ("if (lane >= distance) {", "if (lane > distance) {"),
        ("ptx::bar_warp_sync();\n    }\n    ptx::bar_sync();", "ptx::bar_warp_sync();\n    }"),
        ("items_to});\n    ptx::bar_sync();", "items_to});"),
        ("U32x4{0, 0, 0, 0});\n    }\n    ptx::bar_sync();", "U32x4{0, 0, 0, 0});\n    }"),
    ] {
        let spec = spec("route_sort_pdl");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = routes().iter().enumerate().any(|(i, case)| {
            // An invalid expert id may address any shared memory, which the simulator reports.
            (0..2).any(|seed| case.check_sort(&mut kernel, &spec, 8, 10 * seed + i as u64).is_err())
        });
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

// ---- products ----

/// Experts stacked in one tensor, and rows of X.
struct Problem {
    n: usize,
    k: usize,
    /// X has a row per pair, not per token.
    by_pair: bool,
    /// Pairs are not sorted: each is an item.
    unsorted: bool,
    routes: Routes,
    weights: Vec<u16>,
    /// `None` if the weights cannot be packed.
    packed: Option<PackedTensor<Vec<u8>>>,
    x: Vec<u16>,
}

impl Problem {
    /// Makes weights with exponents 108..=123. One in 1000 is outside, and a row of the last expert has a run of these.
    fn random(routes: Routes, (n, k): (usize, usize), by_pair: bool, seed: u64) -> Self {
        let rows = routes.experts as usize * n;
        let problem = Self::of(routes, (n, k), by_pair, seed, |i, random| {
            let r = random.bits();
            let outside = i / k == rows - 11 && i % k < (rows * k / 1500).min(40) || random.below(1000) == 0;
            let exponent =
                if outside { [0, 90, 100, 130][(r >> 32 & 3) as usize] } else { 108 + (r >> 20 & 15) as u16 };
            (r as u16 & 0x807f) | exponent << 7
        });
        assert!(problem.packed.is_some());
        problem
    }

    /// Makes the weights with `weight`, from their index in row-major order.
    fn of(
        routes: Routes,
        (n, k): (usize, usize),
        by_pair: bool,
        seed: u64,
        weight: impl Fn(usize, &mut Random) -> u16,
    ) -> Self {
        let mut random = Random::new(seed);
        let rows = routes.experts as usize * n;
        let weights: Vec<u16> = (0..rows * k).map(|i| weight(i, &mut random)).collect();
        let matrix = Matrix::new(bytemuck::cast_slice(&weights), rows, k).unwrap();
        let packed = pack(matrix, &Histogram::of(matrix.bytes())).ok();
        let x_rows = if by_pair { routes.ids.len() } else { routes.tokens() as usize };
        let x =
            (0..x_rows * k).map(|_| (random.bits() as u16 & 0x807f) | (120 + random.below(8) as u16) << 7).collect();
        Self { n, k, by_pair, unsorted: false, routes, weights, packed, x }
    }

    fn unsorted(self) -> Self {
        Self { unsorted: true, ..self }
    }

    /// Returns Y, with a row per pair.
    fn run(&self, kernel: &mut CpuKernel, spec: &VariantSpec, seed: u64) -> Result<Vec<u16>, String> {
        let Op::GemmGrouped(op) = spec.op else { panic!("{spec} is not a grouped product") };
        let lists = self.routes.lists(op.batch_tile.get());
        // A bf16 variant must not read heads and escapes.
        let packed = self.packed.as_ref().filter(|_| !op.bf16);
        let section = |of: fn(&PackedTensor<Vec<u8>>) -> &[u8]| Buffer::of(packed.map_or(&[], of));
        let weights = match packed {
            Some(packed) => Buffer::of(packed.packed()),
            None => Buffer::of(bytemuck::cast_slice(&self.weights)),
        };
        let (heads, escapes) = (section(PackedTensor::escape_heads), section(PackedTensor::escapes));
        let x = Buffer::of(bytemuck::cast_slice(&self.x));
        let (pairs, items) = match self.unsorted {
            true => (words(&[]), words(&self.routes.ids)),
            false => (words(&lists.pairs), words(&lists.items.concat())),
        };
        let columns = columns(op.epilogue, self.n);
        let y = vec![GUARD; self.routes.ids.len() * columns];
        let y = Buffer::of(bytemuck::cast_slice(&y));
        let args = GemmGroupedArgs {
            packed: weights.address(),
            escape_heads: heads.address(),
            escapes: escapes.address(),
            y: y.address(),
            x_data: x.address(),
            x_row_bytes: 2 * self.k as u64,
            pairs: pairs.address(),
            items: items.address(),
            scale: packed.map_or(1.0, |packed| packed.window().scale()),
            escape_words: packed.map_or(0, |packed| packed.escapes().len() / 4) as u32,
            n: self.n as u32,
            k: self.k as u32,
            tile_cols: self.k as u32 / 64,
            pairs_per_row: if self.by_pair { 1 } else { self.routes.top_k },
            is_pairs: self.unsorted.into(),
            experts: if self.unsorted { self.routes.experts } else { 0 },
        };
        let buffers = [
            ("packed", &weights),
            ("escape_heads", &heads),
            ("escapes", &escapes),
            ("x", &x),
            ("pairs", &pairs),
            ("items", &items),
            ("y", &y),
        ];
        let count = if self.unsorted { self.routes.ids.len() } else { lists.items.len() };
        let problem = GemmShape { m: count as u32, n: self.n as u32, k: self.k as u32 };
        launch(kernel, spec, problem, &args, &buffers, seed)?;
        Ok(y.u16s())
    }

    /// Counts elements whose error exceeds one rounding plus fp32 accumulation, and elements of rows that must not be
    /// written.
    fn wrong(&self, y: &[u16], epilogue: Epilogue) -> usize {
        let columns = columns(epilogue, self.n);
        let row_of = |pair: usize| if self.by_pair { pair } else { pair / self.routes.top_k as usize };
        let mut wrong = 0;
        for (pair, (&id, y)) in self.routes.ids.iter().zip(y.chunks_exact(columns)).enumerate() {
            if id >= self.routes.experts {
                wrong += y.iter().filter(|bits| **bits != GUARD).count();
                continue;
            }
            let weights = &self.weights[id as usize * self.n * self.k..][..self.n * self.k];
            wrong += mismatches(y, y, &self.x[row_of(pair) * self.k..][..self.k], weights, self.k, epilogue);
        }
        wrong
    }

    /// Returns, for each element of Y of a `store` variant, the sum and the sum of the magnitudes of its terms. Rows of
    /// pairs without an expert keep the guard.
    fn exact(&self) -> Vec<(f64, f64)> {
        let pairs = self.routes.ids.iter().enumerate();
        let rows = pairs.flat_map(|(pair, &id)| (0..self.n).map(move |column| (pair, id, column)));
        let element = |(pair, id, column): (usize, u32, usize)| {
            if id >= self.routes.experts {
                return (bf16(GUARD), bf16(GUARD));
            }
            let row = if self.by_pair { pair } else { pair / self.routes.top_k as usize };
            let weights = &self.weights[(id as usize * self.n + column) * self.k..][..self.k];
            let terms = self.x[row * self.k..][..self.k].iter().zip(weights).map(|(x, w)| bf16(*x) * bf16(*w));
            terms.fold((0.0, 0.0), |(sum, size): (f64, f64), term| (sum + term, size + term.abs()))
        };
        rows.map(element).collect()
    }

    fn check(&self, kernel: &mut CpuKernel, spec: &VariantSpec, seed: u64) -> Result<(), String> {
        let Op::GemmGrouped(op) = spec.op else { panic!("{spec} is not a grouped product") };
        match self.wrong(&self.run(kernel, spec, seed)?, op.epilogue) {
            0 => Ok(()),
            wrong => Err(format!("{wrong} wrong elements")),
        }
    }
}

fn problems() -> Vec<Problem> {
    vec![
        Problem::random(Routes::random(3, 5, 2, 11), (128, 320), false, 1),
        Problem::random(Routes::random(23, 3, 2, 12), (192, 64), true, 2),
        Problem::random(Routes::single(37, 3, 2), (64, 192), false, 3),
        Problem::random(Routes::random(9, 8, 8, 14), (64, 128), false, 4),
        Problem::random(Routes::random(1, 12, 8, 15), (192, 64), false, 5).unsorted(),
        Problem::random(Routes::random(5, 4, 3, 16), (64, 192), true, 6).unsorted(),
    ]
}

#[test]
fn every_pair_is_multiplied_by_its_expert() {
    let specs = [
        "gemm_grouped_b8_r4w4p2_store",
        "gemm_grouped_b8_r3w2p1_pdl_silu_mul",
        "gemm_grouped_b16_r4w2p1_pdl_store",
        "gemm_grouped_b32_r2w3p2_silu_mul",
        "gemm_grouped_b64_r2w2p2_pdl_store",
        "gemm_grouped_b8_r4w4p2_bf16_store",
        "gemm_grouped_b8_r3w2p1_bf16_pdl_silu_mul",
        "gemm_grouped_b16_r5w2p3_bf16_pdl_store",
        "gemm_grouped_b32_r2w3p2_bf16_silu_mul",
        "gemm_grouped_b64_r1w2p2_bf16_pdl_store",
    ]
    .map(spec);
    let (mut kernel, problems) = (CpuKernel::all(&specs, &[]), problems());
    for spec in &specs {
        for (i, problem) in problems.iter().enumerate() {
            problem.check(&mut kernel, spec, i as u64).unwrap_or_else(|wrong| panic!("{spec}, problem {i}: {wrong}"));
        }
    }
}

/// Serving relies on this: a token's bits depend neither on the batch tile nor on other tokens.
#[test]
fn bits_of_a_pair_do_not_depend_on_the_batch() {
    let names = ["b8_r4w4p2", "b16_r4w4p1", "b32_r2w4p2", "b64_r2w4p1"];
    let specs = names.map(|name| spec(&format!("gemm_grouped_{name}_pdl_silu_mul")));
    let mut kernel = CpuKernel::all(&specs, &[]);
    let all = Problem::random(Routes::random(40, 3, 2, 21), (64, 448), false, 5);
    let expected = all.run(&mut kernel, &specs[0], 1).unwrap();
    for spec in &specs[1..] {
        assert!(all.run(&mut kernel, spec, 2).unwrap() == expected, "{spec} gives other bits than batch tile 8");
    }
    let alone = Problem {
        routes: Routes { ids: all.routes.ids[34..36].to_vec(), ..all.routes.clone() },
        x: all.x[17 * all.k..18 * all.k].to_vec(),
        ..all
    };
    assert!(
        alone.run(&mut kernel, &specs[0], 3).unwrap() == expected[34 * 32..36 * 32],
        "a token has other bits alone than in the batch"
    );
    assert!(
        alone.unsorted().run(&mut kernel, &specs[0], 4).unwrap() == expected[34 * 32..36 * 32],
        "a token has other bits if its pairs are not sorted"
    );
}

/// Operands of packed weights are the weights times a power of two, and both products add in the same order.
#[test]
fn packed_and_bf16_weights_give_the_same_bits() {
    let specs = ["b8_r4w4p2_pdl_silu_mul", "b8_r4w4p1_bf16_pdl_silu_mul", "b16_r3w4p1_bf16_pdl_silu_mul"];
    let specs = specs.map(|name| spec(&format!("gemm_grouped_{name}")));
    let mut kernel = CpuKernel::all(&specs, &[]);
    for (i, problem) in problems().iter().enumerate() {
        let packed = problem.run(&mut kernel, &specs[0], 1).unwrap();
        for spec in &specs[1..] {
            assert!(problem.run(&mut kernel, spec, 2).unwrap() == packed, "{spec}, problem {i}");
        }
    }
}

/// Experts that cannot be packed, with a name for each.
fn hostile() -> Vec<(&'static str, Problem)> {
    let (n, k) = (128, 192);
    let of = |seed: u64, weight: &dyn Fn(usize, &mut Random) -> u16| {
        Problem::of(Routes::random(9, 3, 2, 10 + seed), (n, k), false, seed, weight)
    };
    let usual = |random: &mut Random| (random.bits() as u16 & 0x807f) | (112 + random.below(8) as u16) << 7;
    vec![
        ("zeros in one expert", of(1, &|i, random| if i / (n * k) == 1 { 0 } else { usual(random) })),
        ("heavy tails", of(2, &|_, random| (random.bits() as u16 & 0x807f) | (60 + random.below(80) as u16) << 7)),
        ("1 % zeros", of(3, &|_, random| if random.below(100) == 0 { 0x8000 } else { usual(random) })),
        (
            "one Inf and 1 % subnormals",
            of(4, &|i, random| match random.below(100) {
                _ if i == n * k + 70 => 0x7f80,
                0 => random.bits() as u16 & 0x807f,
                _ => usual(random),
            }),
        ),
        ("random bits", of(5, &|_, random| random.bits() as u16)),
    ]
}

/// A product of a row is NaN or Inf if an exact sum of its terms is; other rows are not affected.
#[test]
fn experts_that_cannot_be_packed_are_multiplied_exactly() {
    let specs = ["b8_r4w4p1_bf16_store", "b64_r2w4p1_bf16_pdl_store"].map(|name| spec(&format!("gemm_grouped_{name}")));
    let mut kernel = CpuKernel::all(&specs, &[]);
    for (name, problem) in hostile() {
        assert!(problem.packed.is_none(), "{name}");
        let expected = problem.exact();
        for spec in &specs {
            let y = problem.run(&mut kernel, spec, 4).unwrap();
            assert!(y == problem.run(&mut kernel, spec, 5).unwrap(), "{name}: {spec} depends on the order of threads");
            for (at, (&got, &(sum, size))) in y.iter().zip(&expected).enumerate() {
                let (got, bound) = (bf16(got), sum.abs() / 256.0 + size * 1e-6);
                let largest = f64::from(f32::MAX) / 2.0;
                // Near the largest f32, sums may overflow.
                let right = match () {
                    () if sum.is_nan() => got.is_nan(),
                    () if sum.is_infinite() => got == sum,
                    () if size > largest => true,
                    () => (got - sum).abs() <= bound,
                };
                assert!(right, "{name}: {spec} [{}, {}] is {got} instead of {sum}", at / problem.n, at % problem.n);
            }
        }
    }
}

#[test]
fn planted_bugs_of_bf16_weights_are_caught() {
    let header = "unweight/kernels/gemm_mma.cuh";
    for (from, to) in [
        (
            "args.packed + u64(block) * packed::kBlockRows * w_row_bytes();",
            "args.packed + u64(block) * packed::kBlockBytes;",
        ),
        ("load_pieces.bytes[0] = left * kBlockBytes<Config>;", "load_pieces.bytes[0] = left * packed::kBlockBytes;"),
        (
            "u64(load_column) * (kTile * 2) + row * w_row_bytes() + chunk * 16;",
            "u64(load_column) * kTile + row * w_row_bytes() + chunk * 16;",
        ),
        ("lower + at, from + 4 * w_row_bytes());", "lower + at, from);"),
        ("from += 8 * w_row_bytes();", "from += 4 * w_row_bytes();"),
        ("Tile::offset(row + 4, chunk);", "Tile::offset(row, chunk) + 4 * smem::kSwizzleBytes;"),
        (
            "const u32 row = b * packed::kBlockRows + lane % 16, chunk = 2 * (2 * half + s) + lane / 16;",
            "const u32 row = b * packed::kBlockRows + lane % 8, chunk = 2 * (2 * half + s) + lane / 16;",
        ),
        ("chunk = 2 * (2 * half + s) + lane / 16;", "chunk = 2 * (2 * half + s);"),
        ("const u32 a[4] = {v.x, v.y, v.z, v.w};", "const u32 a[4] = {v.x, v.z, v.y, v.w};"),
        (
            "x[f][1][0] = v.z;\n                x[f][1][1] = v.w;",
            "x[f][1][0] = v.x;\n                x[f][1][1] = v.y;",
        ),
        (
            "        slots.release();\n        load_next();\n    }\n\n    // `turn`",
            "        load_next();\n    }\n\n    // `turn`",
        ),
    ] {
        let spec = spec("gemm_grouped_b8_r3w2p2_bf16_pdl_silu_mul");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = problems().iter().any(|problem| problem.check(&mut kernel, &spec, 3).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

#[test]
fn planted_bugs_of_the_product_are_caught() {
    let (matmul_header, kernel_header) = ("unweight/kernels/gemm_mma.cuh", "unweight/kernels/gemm_grouped.cuh");
    for (header, from, to) in [
        (matmul_header, "skipped = item.x * all;", "skipped = 0;"),
        (matmul_header, "(task_first(task) - (kItems ? share.skipped : 0))", "task_first(task)"),
        (
            matmul_header,
            "first = skipped + group * each + (group < more ? group : more);",
            "first = skipped + group * each;",
        ),
        (matmul_header, "ptx::shfl_sync_idx(listed[row / 32], r % 32)", "ptx::shfl_sync_idx(listed[0], r % 32)"),
        (matmul_header, "pair_of(entry) / a.pairs_per_row", "share.batch + entry"),
        (matmul_header, "if constexpr (kItems) return pair_of(b);", "if constexpr (kItems) return share.batch + b;"),
        (matmul_header, "args.is_pairs != 0 ? at : ptx::ld_global(args.pairs + at)", "ptx::ld_global(args.pairs + at)"),
        (
            matmul_header,
            "expert < a.experts ? U32x4{expert, index, 1, 0}",
            "expert != ~0u ? U32x4{expert, index, 1, 0}",
        ),
        (matmul_header, "U32x4{expert, index, 1, 0}", "U32x4{expert, 0, 1, 0}"),
        (matmul_header, "batch = item.y;\n                rows", "batch = 0;\n                rows"),
        (kernel_header, "kernel.run();", ""),
    ] {
        let spec = spec("gemm_grouped_b64_r3w2p2_pdl_silu_mul");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = problems().iter().any(|problem| problem.check(&mut kernel, &spec, 3).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

// ---- rows of tokens ----

fn check_combine(
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    routes: &Routes,
    n: usize,
    adds: bool,
) -> Result<(), String> {
    let (tokens, top_k, pitch) = (routes.tokens() as usize, routes.top_k as usize, n + GAP);
    let mut random = Random::new((n + tokens) as u64);
    let mut values = |count: usize| -> Vec<u16> {
        (0..count).map(|_| (random.bits() as u16 & 0x807f) | (120 + random.below(8) as u16) << 7).collect()
    };
    let (rows, before) = (values(routes.ids.len() * n), values(tokens * pitch));
    // Rows that were not written must not be read.
    let product =
        |pair: usize| if routes.ids[pair] < routes.experts { &rows[pair * n..][..n] } else { &[GUARD; 4096][..n] };
    let products: Vec<u16> = (0..routes.ids.len()).flat_map(|pair| product(pair).to_vec()).collect();
    let weights: Vec<f32> = (0..routes.ids.len()).map(|_| random.below(1000) as f32 / 999.0).collect();
    let (products_at, y) = (Buffer::of(bytemuck::cast_slice(&products)), Buffer::of(bytemuck::cast_slice(&before)));
    let (ids, weights_at) = (words(&routes.ids), Buffer::of(bytemuck::cast_slice(&weights)));
    let args = RouteArgs {
        ids: ids.address(),
        weights: weights_at.address(),
        products: products_at.address(),
        y: y.address(),
        y_pitch: pitch as u64,
        columns: n as u32,
        row_blocks: (n as u32).div_ceil(RouteSpec::BLOCK_COLUMNS),
        adds: adds.into(),
        ..routes.args()
    };
    let buffers = [("ids", &ids), ("weights", &weights_at), ("products", &products_at), ("y", &y)];
    launch(kernel, spec, GemmShape { m: tokens as u32, n: n as u32, k: 0 }, &args, &buffers, 1)?;
    for (at, got) in y.u16s().into_iter().enumerate() {
        let (token, column) = (at / pitch, at % pitch);
        if column >= n {
            if got != before[at] {
                return Err(format!("the gap after row {token} was written"));
            }
            continue;
        }
        let old = if adds { bf16(before[at]) } else { 0.0 };
        let (mut sum, mut size) = (old, old.abs());
        for pair in (token * top_k..(token + 1) * top_k).filter(|pair| routes.ids[*pair] < routes.experts) {
            let term = f64::from(weights[pair]) * bf16(products[pair * n + column]);
            (sum, size) = (sum + term, size + term.abs());
        }
        let error = (bf16(got) - sum).abs();
        if error.is_nan() || error > sum.abs() / 256.0 + size * 1e-6 {
            return Err(format!("[{token}, {column}] is {} instead of {sum}", bf16(got)));
        }
    }
    Ok(())
}

/// Returns shapes with columns, and whether the kernel adds to Y.
fn sums() -> Vec<(Routes, usize, bool)> {
    vec![
        (Routes::random(5, 8, 2, 31), 2048, false),
        (Routes::random(3, 60, 4, 32), 1032, true),
        (Routes::random(1, 128, 8, 33), 8, true),
        (Routes { experts: 4, top_k: 2, ids: vec![ELSEWHERE; 4] }, 72, false),
        (Routes::random(2, 60, 19, 34), 136, true),
    ]
}

#[test]
fn rows_of_pairs_become_rows_of_tokens() {
    let specs = [spec("route_combine"), spec("route_combine_pdl")];
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in &specs {
        for (i, (routes, n, adds)) in sums().iter().enumerate() {
            check_combine(&mut kernel, spec, routes, *n, *adds).unwrap_or_else(|wrong| panic!("{spec} {i}: {wrong}"));
        }
    }
}

#[test]
fn planted_bugs_of_sums_are_caught() {
    let header = "unweight/kernels/route.cuh";
    for (from, to) in [
        ("lane < args.top_k && id < args.experts", "lane < args.top_k"),
        ("if (!is_inside) return;", ""),
        ("ptx::shfl_sync_idx(weights, place + i)", "weights"),
        ("place += kRowsAtOnce", "place += 2 * kRowsAtOnce"),
        ("if (args.adds != 0)", "if (args.adds == 0)"),
        ("args.y + token * args.y_pitch + column", "args.y + token * args.columns + column"),
        ("(first + place + i) * args.columns + column", "u64(token) * args.columns + column"),
        (
            "sums[2 * i + 1] = ptx::fma(weight, activation::high_of(words[i]),",
            "sums[2 * i + 1] = ptx::fma(weight, activation::low_of(words[i]),",
        ),
    ] {
        let spec = spec("route_combine_pdl");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught =
            sums().iter().any(|(routes, n, adds)| check_combine(&mut kernel, &spec, routes, *n, *adds).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
