//! Attention over packed pages in the simulator: the same bits as over bf16 pages, hostile tables and records, and
//! planted bugs that must be caught.

use unweight_bench::{
    attention::{Decode, PAD, Problem},
    kv::{PackedPages, full_pages, salt, with_exponent},
};
use unweight_codegen::{
    VariantSpec,
    kv::{
        PAGE_TOKENS,
        packed::{KIND_BF16, KIND_LOST, KIND_PACKED, RECORD_ENDS, RECORD_HEAD, RECORD_KIND},
    },
    spec::Op,
};
use unweight_format::testing::Random;

use crate::{
    attention::of_one_sequence,
    attention_launch::{Outcome, launch, launch_on, parts_of},
    harness::{CpuKernel, Edit, bf16, spec},
};

mod attack;

/// A variant over packed pages, and the variant over bf16 pages that sums in the same order.
struct Pair {
    bf16: VariantSpec,
    packed: VariantSpec,
    kernels: CpuKernel,
}

impl Pair {
    /// The number of stages of the bf16 variant does not matter.
    fn new(packed: &str, bf16: &str) -> Self {
        let [packed, bf16] = [packed, bf16].map(|name| spec(&format!("attention_decode_{name}")));
        let order = |spec: &VariantSpec| match spec.op {
            Op::Attention(op) => (op.head_dim, op.warps, op.cluster, op.split),
            _ => panic!("{spec}"),
        };
        assert_eq!(order(&packed), order(&bf16));
        Self { packed, bf16, kernels: CpuKernel::all(&[packed, bf16], &[]) }
    }

    fn head_dim(&self) -> usize {
        let Op::Attention(op) = self.packed.op else { panic!("{}", self.packed) };
        op.head_dim.get() as usize
    }

    fn over_bf16(&mut self, problem: &Problem, seed: u64) -> Outcome {
        let outcome = launch(problem, &mut self.kernels, &self.bf16, seed);
        outcome.unwrap_or_else(|error| panic!("{} {:?}: {error}", self.bf16, problem.case))
    }

    fn over_packed(&mut self, problem: &Problem, pages: &PackedPages, seed: u64) -> Outcome {
        let parts = parts_of(&self.packed);
        let outcome = launch_on(problem, Some(pages), &mut self.kernels, &self.packed, seed, parts);
        outcome.unwrap_or_else(|error| panic!("{} {:?}: {error}", self.packed, problem.case))
    }

    /// Runs both. Returns the numbers of units read, by kind.
    fn check(&mut self, problem: &Problem, seed: u64) -> [usize; 3] {
        let pages = PackedPages::of(problem);
        let expected = self.over_bf16(problem, seed);
        let outcome = self.over_packed(problem, &pages, seed + 50);
        let what = format!("{} {:?}", self.packed, problem.case);
        assert!(same_results(problem, &pages, &outcome, &expected), "{what}");
        assert!(outcome.out.iter().all(|&v| !bf16(v).is_nan()), "{what}");
        assert_eq!((outcome.fault, expected.fault), (0, 0), "{what}");
        pages.kinds()
    }

    /// Checks problems with and without values outside the windows.
    fn check_salted(&mut self, case: &Decode) {
        let mut problem = Problem::new(case);
        self.check(&problem, case.seed);
        salt(&mut problem, case.seed);
        self.check(&problem, case.seed + 1);
    }
}

/// Returns whether A and the hot pages equal those of bf16 pages.
fn same_results(problem: &Problem, pages: &PackedPages, outcome: &Outcome, expected: &Outcome) -> bool {
    outcome.out == expected.out && outcome.layer == pages.hot_from(problem, &expected.layer)
}

#[test]
fn the_bits_at_the_edges_of_tiles_and_pages() {
    for (packed, other) in [
        ("d128_w4p2c1_packed_pdl", "d128_w4p2c1_pdl"),
        ("d128_w4p2c1_packed_async_pdl", "d128_w4p2c1_async_pdl"),
        ("d64_w4p3c1_split_packed_async_pdl", "d64_w4p2c1_split_async_pdl"),
    ] {
        let mut pair = Pair::new(packed, other);
        let positions = [0, 14, 15, 16, PAD, 62, 63, 64, 79, 80, 126, 127, 128, 199];
        pair.check_salted(&Decode { kv_heads: 1, ..Decode::new(pair.head_dim(), 4, &positions) });
    }
}

/// The tokens of a draft share a hot page and are stored before they are read.
#[test]
fn the_bits_of_rows_of_one_sequence() {
    for (packed, other) in [
        ("d128_w4p2c1_packed_pdl", "d128_w4p2c1_pdl"),
        ("d64_w4p3c1_split_packed_async_pdl", "d64_w4p2c1_split_async_pdl"),
    ] {
        let mut pair = Pair::new(packed, other);
        let problem =
            of_one_sequence(&Decode { kv_heads: 1, ..Decode::new(pair.head_dim(), 4, &[144, 143, 142, 141, 140]) });
        let mut stores = problem.clone();
        stores.case.window = 1;
        let mut pages = PackedPages::of(&problem);
        let hot = pages.hot_table[0];
        pages.hot_table.fill(hot);
        let stored = pair.over_packed(&stores, &pages, 1);
        pages.hot = stored.layer;
        let outcome = pair.over_packed(&problem, &pages, 2);
        let layer = pair.over_bf16(&stores, 3).layer;
        let expected = pair.over_bf16(&Problem { layer, ..problem.clone() }, 4);
        assert!(outcome.out == expected.out && outcome.fault == 0, "{}", pair.packed);
        let differs = (1..=20).any(|seed| pair.over_bf16(&problem, seed).out != expected.out);
        // With parts, `launch` runs twice.
        assert!(
            differs || parts_of(&pair.bf16) > 1,
            "one launch over all rows gives the same bits, so the test shows nothing"
        );
    }
}

#[test]
fn the_bits_of_every_head_size() {
    for (head_dim, axes) in [
        (16, "w4p2c1"),
        (32, "w4p3c1"),
        (48, "w2p2c1"),
        (64, "w4p2c1"),
        (80, "w4p2c1"),
        (96, "w2p2c1"),
        (112, "w4p2c1"),
    ] {
        let copy = if head_dim % 32 == 0 { "_async" } else { "" };
        let mut pair = Pair::new(&format!("d{head_dim}_{axes}_packed{copy}"), &format!("d{head_dim}_{axes}{copy}"));
        let case = Decode { bias: true, norm: true, ..Decode::new(head_dim, 2, &[0, 19, 80, 150, 270]) };
        let mut kinds = [0; 3];
        for seed in 1..=3 {
            let mut problem = Problem::new(&Decode { seed, ..case.clone() });
            salt(&mut problem, seed);
            pair.check(&problem, seed).iter().zip(&mut kinds).for_each(|(count, total)| *total += count);
        }
        assert!(kinds.iter().all(|kind| *kind > 0), "d{head_dim}: {kinds:?} plain, with slots, bf16");
    }
}

#[test]
fn the_bits_of_groups_and_clusters() {
    for (packed, other) in [
        ("d64_w4p2c2_packed_pdl", "d64_w4p2c2_pdl"),
        ("d64_w2p2c4_packed_async", "d64_w2p3c4_async"),
        ("d32_w1p5c8_packed_pdl", "d32_w1p1c8_pdl"),
    ] {
        let mut pair = Pair::new(packed, other);
        for group in [1, 3, 16] {
            let positions = [0, 17, PAD, 500, 127, 128, 640];
            let case = Decode { kv_heads: 1, seed: group as u64, ..Decode::new(pair.head_dim(), group, &positions) };
            pair.check_salted(&case);
        }
    }
}

/// More tiles than a warp loads page indices for at once, and rings in which hot tiles occupy each slot.
#[test]
fn the_bits_of_long_rows() {
    for (packed, other) in [
        ("d16_w1p2c1_packed", "d16_w1p1c1"),
        ("d16_w1p3c1_packed", "d16_w1p1c1"),
        ("d16_w1p3c1_packed_async", "d16_w1p2c1_async"),
        ("d16_w1p8c1_packed", "d16_w1p1c1"),
    ] {
        let mut pair = Pair::new(packed, other);
        for (window, position) in [(0, 16 * 32 - 1), (0, 16 * 32), (0, 16 * 64), (0, 1500), (900, 2000), (0, 560)] {
            pair.check_salted(&Decode { kv_heads: 1, window, ..Decode::new(16, 1, &[position]) });
        }
    }
}

/// Tokens before a window are NaN, and their page consists of bf16 units.
#[test]
fn the_bits_of_windows() {
    for (packed, other) in
        [("d32_w2p2c2_packed", "d32_w2p2c2"), ("d32_w2p3c1_split_packed_async", "d32_w2p2c1_split_async")]
    {
        let mut pair = Pair::new(packed, other);
        for window in [1, 7, 16, 17, 64, 100, 1000] {
            let positions = [0, 6, 15, 16, 63, 64, 65, 99, 100, 230];
            pair.check_salted(&Decode { window, seed: window.into(), ..Decode::new(32, 4, &positions) });
        }
    }
}

/// Values so large that infinities and NaN are inside the window of exponents.
#[test]
fn infinities_before_a_window_do_not_count() {
    let mut pair = Pair::new("d32_w2p2c1_packed", "d32_w2p2c1");
    let mut async_pair = Pair::new("d32_w2p2c1_packed_async", "d32_w2p2c1_async");
    for (window, seed) in [(100, 1), (69, 2), (90, 3), (77, 4), (8, 5), (64, 6)] {
        let case = Decode { kv_heads: 1, window, seed, ..Decode::new(32, 5, &[150, 187, 130, 135]) };
        let mut problem = Problem::new(&case);
        let random = &mut Random::new(seed);
        for (row, page) in full_pages(&problem) {
            let first = case.first_token(case.positions[row]);
            for token in page as u32 * PAGE_TOKENS..(page as u32 + 1) * PAGE_TOKENS {
                for (head, i) in (0..2).flat_map(|head| (0..32).map(move |i| (head, i))) {
                    // Products of keys must stay finite.
                    let exponent = if token < first { 240 + random.below(16) } else { 240 + random.below(4) };
                    let at = problem.element(row, token, head, i);
                    problem.layer[at] = with_exponent(random, exponent as u32);
                }
            }
        }
        let kinds = pair.check(&problem, seed);
        assert!(window == 8 || kinds[0] > 0 && kinds[2] == 0, "{kinds:?}");
        async_pair.check(&problem, seed);
    }
}

/// Tiles of a page whose K or V was lost are skipped, as if the page did not exist; no fault is reported.
#[test]
fn lost_units_are_left_out() {
    for (packed, other) in
        [("d32_w2p2c2_packed", "d32_w2p2c2"), ("d32_w2p2c1_split_packed_async", "d32_w2p2c1_split_async")]
    {
        let mut pair = Pair::new(packed, other);
        let mut problem = Problem::new(&Decode { kv_heads: 1, ..Decode::new(32, 4, &[90, 200, 150, 63]) });
        salt(&mut problem, 3);
        for (row, page) in [(0, 0), (1, 0), (1, 2), (2, 1)] {
            for lost in [&[0][..], &[1], &[0, 1]] {
                let mut pages = PackedPages::of(&problem);
                let number = &mut problem.clone().table[row * problem.table_pages + page];
                for half in lost {
                    let record = pages.heads.lost_record();
                    pages.record(*number as usize * 2 + half).copy_from_slice(&record);
                }
                let mut without = problem.clone();
                without.table[row * problem.table_pages + page] = u32::MAX;
                let expected = pair.over_bf16(&without, 1);
                let outcome = pair.over_packed(&problem, &pages, 2);
                assert!(same_results(&problem, &pages, &outcome, &expected), "row {row}, page {page}, {lost:?}");
                assert_eq!((outcome.fault, expected.fault), (0, 1 + row as u32));
            }
        }
    }
}

/// No table or record leads outside the cache, and other rows are unaffected.
#[test]
fn hostile_caches_are_reported() {
    for (packed, other) in [
        ("d32_w2p2c2_packed", "d32_w2p2c2"),
        ("d32_w2p3c1_packed_async", "d32_w2p3c1_async"),
        ("d32_w1p2c1_split_packed_async", "d32_w1p2c1_split_async"),
    ] {
        let mut pair = Pair::new(packed, other);
        let mut problem = Problem::new(&Decode::new(32, 2, &[90, 200, 150]));
        salt(&mut problem, 4);
        let right = PackedPages::of(&problem);
        let whole = pair.over_packed(&problem, &right, 1);
        hostile_tables(&mut pair, &problem, &right, &whole);
        hostile_records(&mut pair, &problem, &right, &whole);
    }
}

/// Runs a cache whose second row is hostile. Returns the output of this row.
fn second_row(pair: &mut Pair, problem: &Problem, pages: &PackedPages, whole: &Outcome) -> (Vec<u16>, u32) {
    let outcome = pair.over_packed(problem, pages, 2);
    let columns = problem.case.out_columns();
    for other in [0, 2] {
        assert_eq!(
            outcome.out[other * columns..][..columns],
            whole.out[other * columns..][..columns],
            "{}",
            pair.packed
        );
    }
    (outcome.out[columns..][..columns].to_vec(), outcome.fault)
}

fn hostile_tables(pair: &mut Pair, problem: &Problem, right: &PackedPages, whole: &Outcome) {
    for (entry, page) in [(0, problem.pages), (1, u32::MAX), (2, 1 << 31)] {
        let mut pages = right.clone();
        pages.table[problem.table_pages + entry] = page;
        let (row, fault) = second_row(pair, problem, &pages, whole);
        let mut without = problem.clone();
        without.table[problem.table_pages + entry] = u32::MAX;
        let columns = problem.case.out_columns();
        assert_eq!(row, pair.over_bf16(&without, 3).out[columns..][..columns], "entry {entry}");
        assert_eq!(fault, 2, "entry {entry}");
    }
    // The index of the hot page, which contains the newest token.
    for page in [right.hot_pages, 1 << 31, u32::MAX] {
        let mut pages = right.clone();
        pages.hot_table[1] = page;
        let (row, fault) = second_row(pair, problem, &pages, whole);
        let mut without = problem.clone();
        without.table[problem.table_pages + 3] = u32::MAX;
        let columns = problem.case.out_columns();
        assert_eq!(row, pair.over_bf16(&without, 3).out[columns..][..columns], "hot page {page}");
        assert_eq!(fault, 2, "hot page {page}");
    }
    // All entries.
    let mut pages = right.clone();
    pages.table[problem.table_pages..][..problem.table_pages].fill(u32::MAX);
    pages.hot_table[1] = u32::MAX;
    let (row, fault) = second_row(pair, problem, &pages, whole);
    assert!(fault == 2 && row.iter().all(|v| *v == 0), "{row:?}");
    // Positions after the table and after the angles.
    for position in [problem.table_pages as u32 * PAGE_TOKENS, PAD - 1, PAD - PAGE_TOKENS] {
        let mut beyond_the_table = problem.clone();
        (beyond_the_table.max_positions, beyond_the_table.case.positions[1]) = (u32::MAX, position);
        let (row, fault) = second_row(pair, &beyond_the_table, right, whole);
        assert!(fault == 2 && row.iter().all(|v| *v == 0), "{position}: {row:?}");
    }
}

fn hostile_records(pair: &mut Pair, problem: &Problem, right: &PackedPages, whole: &Outcome) {
    let unit = problem.table[problem.table_pages + 1] as usize * right.heads.page_units();
    for half in [0, 1] {
        let mut lost = right.clone();
        let record = lost.heads.lost_record();
        lost.record(unit + half).copy_from_slice(&record);
        let (without, fault) = second_row(pair, problem, &lost, whole);
        assert_eq!(fault, 0);
        let numbers = [right.units, 1 << 31, u32::MAX].map(|number| (KIND_BF16, number));
        for (kind, number) in [KIND_LOST + 1, 4, 128, 255].map(|kind| (kind, 7)).into_iter().chain(numbers) {
            let mut pages = right.clone();
            let record = pages.record(unit + half);
            record[RECORD_KIND] = kind;
            record[RECORD_ENDS..RECORD_HEAD].copy_from_slice(&number.to_le_bytes());
            let (row, fault) = second_row(pair, problem, &pages, whole);
            assert!(row == without && fault == 2, "kind {kind}, unit {number}: fault {fault}");
        }
        for seed in 0..20 {
            let mut pages = right.clone();
            let record = pages.record(unit + half);
            let bytes = Random::new(seed).bytes(record.len());
            record.copy_from_slice(&bytes);
            record[RECORD_KIND] = KIND_PACKED;
            if seed % 2 == 0 {
                record[RECORD_ENDS..RECORD_HEAD].copy_from_slice(&[seed as u8, 255, 3, 255]);
            }
            let (_, fault) = second_row(pair, problem, &pages, whole);
            assert_eq!(fault, 0, "seed {seed}");
        }
    }
}

#[test]
fn planted_bugs_of_packed_attention_are_caught() {
    let (decode, pages) = ("unweight/kernels/attention/decode.cuh", "unweight/encoding/kv_packed.cuh");
    let both = [
        (decode, "P::quad(k, keys, s, key.pair(s));", "P::quad(k, keys, s, key.pair(0));"),
        (decode, "P::quad(v, values, s, value.pair(s));", "P::quad(v, values, s, key.pair(s));"),
        (decode, "P::quad(p, words, step, record.pair(step));", "P::quad(p, words, step, record.pair(0));"),
        (pages, "record.exponent(own) - record.base_of(own)", "record.exponent(own) - record.base(0)"),
        (pages, "(base_of(slot) - kBelow + code) & 255", "(base(0) - kBelow + code) & 255"),
        (decode, "next_slot();\n            slots.wait(slot, parity);", "next_slot();"),
        (decode, "P::load(words, key_slot(slot) + P::kOperandBytes, lane);", "P::load(words, key_slot(slot), lane);"),
        (
            decode,
            "special_quad(v, words, s, value, kValue, inside);",
            "special_quad(v, words, s, value, kKey, inside);",
        ),
        (decode, "if (edge) kv::clear_values_before(v, first_token - first, lane);", ""),
        (pages, "if (own < token) v[r] &= 0xffff0000u;", "if (own < token) v[r] &= 0x0000ffffu;"),
        // Escapes: which tiles have some, their step and half, and several in one lane.
        (decode, "(key.changes() | value.changes()) >> (8 * inside)", "key.changes() >> (8 * inside)"),
        (decode, "(key.changes() | value.changes()) >> (8 * inside)", "(key.changes() | value.changes()) >> 8"),
        (pages, "escapes.steps |= 1u << (element >> 8);", "escapes.steps |= 1u;"),
        (pages, "(element >> 8 & 255) == step ? element >> 1 & 3 : 4", "element >> 1 & 3"),
        (pages, "record.base_of(own) << (7 + (own & 1) * 16)", "record.base_of(own) << 7"),
        (pages, "clash |= escapes.element != ~0u;", ""),
        (decode, "record.kind() == kv::kBf16Unit && record.unit() < args.units", "record.kind() == kv::kBf16Unit"),
        (decode, "position / kv::kPageTokens * kPageTiles : 0", "(position + 1) / kv::kPageTokens * kPageTiles : 0"),
        (pages, "tile * kUnitTileBytes", "tile / 2 * kUnitTileBytes"),
        (pages, "ends >> (8 * tile - 8) & 255", "ends >> (8 * tile) & 255"),
        (pages, "code == kZeroCode ? 0 : ", ""),
        (pages, "(w1 >> 8) & 0x00780078u", "(w1 >> 8) & 0x00700078u"),
    ];
    let bulk = [
        // Refills a slot while its loads are in flight: a packed tile, a tile with slots, and a hot tile's keys.
        (
            decode,
            "slots.release();\n        load_next();\n        if constexpr (Config::kSoftcap)",
            "ptx::bar_warp_sync();\n        load_next();\n        if constexpr (Config::kSoftcap)",
        ),
        (decode, "v[3]);\n        }\n        slots.release();", "v[3]);\n        }\n        ptx::bar_warp_sync();"),
        (
            decode,
            "slots.release();\n            load_next();\n            next_slot();\n            slots.wait",
            "ptx::bar_warp_sync();\n            load_next();\n            next_slot();\n            slots.wait",
        ),
        (
            decode,
            "mbarrier_arrive_expect_tx(barrier, S::kPackedBytes)",
            "mbarrier_arrive_expect_tx(barrier, S::kSlotBytes)",
        ),
        (
            decode,
            "mbarrier_arrive_expect_tx(barrier, S::kTileBytes)",
            "mbarrier_arrive_expect_tx(barrier, 2 * S::kTileBytes)",
        ),
    ];
    let copied = [(decode, "copy(slot_address + P::kTileBytes, records, 2 * P::kRecordBytes);", "")];
    let all = both.iter().chain(&bulk).map(|edit| ("", edit)).chain(copied.iter().map(|edit| ("_async", edit)));
    let expected = reference_results();
    for copy in ["", "_async"] {
        assert_eq!(failure(copy, &expected, &[]), None);
    }
    let missed: Vec<_> = all
        .filter(|(copy, (header, from, to))| {
            Edit::planted(header, from, to).is_some_and(|edit| failure(copy, &expected, &[edit]).is_none())
        })
        .collect();
    assert!(missed.is_empty(), "planted bugs that were not caught: {missed:#?}");
}

/// Returns problems and their results over bf16 pages.
fn reference_results() -> Vec<(Problem, Outcome)> {
    let spec = spec("attention_decode_d32_w2p2c1");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let cases = [(0, 1), (150, 2), (100, 3)].map(|(window, seed)| {
        let case = Decode { window, seed, ..Decode::new(32, 4, &[0, 40, 63, 100, 177, 250, 290, 333]) };
        let mut problem = Problem::new(&case);
        salt(&mut problem, seed);
        let outcome = launch(&problem, &mut kernel, &spec, seed).unwrap();
        (problem, outcome)
    });
    cases.into()
}

/// Returns how a kernel over packed pages fails on valid or on hostile problems.
fn failure(copy: &str, expected: &[(Problem, Outcome)], edits: &[Edit]) -> Option<String> {
    let spec = spec(&format!("attention_decode_d32_w2p3c1_packed{copy}"));
    let mut kernel = CpuKernel::of(&spec, edits);
    let right = expected.iter().find_map(|(problem, expected)| {
        let pages = PackedPages::of(problem);
        (1..=4).find_map(|seed| match launch_on(problem, Some(&pages), &mut kernel, &spec, seed, 1) {
            Err(error) => Some(error),
            Ok(outcome) => (!same_results(problem, &pages, &outcome, expected)).then(|| "other bits".to_owned()),
        })
    });
    right.or_else(|| {
        // Counts beyond the slots, units beyond the pool, and a hot page that does not exist.
        let problem = &expected[0].0;
        let mut pages = PackedPages::of(problem);
        let bytes = pages.heads.record_bytes();
        for (i, record) in pages.records.chunks_mut(bytes).enumerate() {
            match record[RECORD_KIND] {
                KIND_PACKED => record[RECORD_ENDS..RECORD_HEAD].fill(255),
                KIND_BF16 if i.is_multiple_of(2) => record[RECORD_ENDS..RECORD_HEAD].fill(255),
                _ => (),
            }
        }
        pages.hot_table[3] = u32::MAX;
        launch_on(problem, Some(&pages), &mut kernel, &spec, 5, 1).err()
    })
}
