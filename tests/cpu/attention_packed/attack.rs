//! Attention over packed pages of hostile values, with windows, parts and clusters: the bits equal those of bf16 pages,
//! including NaN and infinities.

use super::*;
use crate::kv_cache::attack::{hostile, rounds};

fn of<T: Copy>(random: &mut Random, all: &[T]) -> T {
    all[random.below(all.len() as u64) as usize]
}

/// Replaces all values of full pages and before windows by units of hostile values.
fn make_hostile(problem: &mut Problem, random: &mut Random, extreme: bool) {
    let (head_dim, heads) = (problem.case.head_dim, problem.case.kv_heads * 2);
    for (row, page) in full_pages(problem) {
        for head in 0..heads {
            let extreme = extreme && random.below(3) == 0;
            let values = hostile(random, head_dim as u32, extreme);
            for (at, value) in values.into_iter().enumerate() {
                let token = page as u32 * PAGE_TOKENS + (at / head_dim) as u32;
                let at = problem.element(row, token, head, at % head_dim);
                problem.layer[at] = value;
            }
        }
    }
}

#[test]
fn hostile_values_give_the_bits_of_bf16_pages() {
    let (mut all, mut rows, mut finite) = ([0; 3], 0, 0);
    for (packed, other) in [
        ("d16_w1p3c1_packed", "d16_w1p1c1"),
        ("d32_w2p3c1_split_packed_async", "d32_w2p2c1_split_async"),
        ("d48_w2p2c1_packed", "d48_w2p2c1"),
        ("d64_w4p2c2_packed_pdl", "d64_w4p2c2_pdl"),
        ("d80_w4p2c1_packed", "d80_w4p2c1"),
        ("d96_w2p2c1_packed_async", "d96_w2p2c1_async"),
        ("d112_w4p2c1_packed", "d112_w4p2c1"),
        ("d128_w4p2c1_packed_async_pdl", "d128_w4p2c1_async_pdl"),
    ] {
        let mut pair = Pair::new(packed, other);
        for seed in 0..rounds(5) {
            let random = &mut Random::new(seed * 131 + pair.head_dim() as u64);
            let count = 1 + random.below(4) as usize;
            let positions: Vec<u32> = (0..count)
                .map(|_| match random.below(4) {
                    0 => of(random, &[PAD, 0, 15, 16, 63, 64, 65, 127, 128]),
                    _ => random.below(400) as u32,
                })
                .collect();
            let window = if random.below(2) == 0 { 0 } else { 1 + random.below(200) as u32 };
            let case = Decode {
                kv_heads: 1 + random.below(2) as usize,
                window,
                seed,
                norm: random.below(2) == 0,
                ..Decode::new(pair.head_dim(), of(random, &[1, 2, 5, 16]), &positions)
            };
            let mut problem = Problem::new(&case);
            make_hostile(&mut problem, random, seed % 2 == 0);
            let pages = PackedPages::of(&problem);
            let expected = pair.over_bf16(&problem, seed);
            let outcome = pair.over_packed(&problem, &pages, seed + 9);
            assert!(same_results(&problem, &pages, &outcome, &expected), "{packed}, seed {seed}: {case:?}");
            assert_eq!((outcome.fault, expected.fault), (0, 0));
            pages.kinds().iter().zip(&mut all).for_each(|(count, total)| *total += count);
            rows += count;
            finite += usize::from(outcome.out.iter().all(|&v| bf16(v).is_finite()));
        }
    }
    eprintln!("{rows} rows, {finite} launches without Inf or NaN, units: {all:?} plain, with slots, bf16");
    assert!(all.iter().all(|kind| *kind > 10), "{all:?}");
}

/// Tables and records of random bytes: no access outside the cache, and the rows before and after are unaffected.
#[test]
fn caches_of_any_bytes_change_their_own_row_only() {
    for (packed, other) in [
        ("d32_w2p2c2_packed", "d32_w2p2c2"),
        ("d32_w2p3c1_packed_async", "d32_w2p3c1_async"),
        ("d32_w1p2c1_split_packed_async", "d32_w1p2c1_split_async"),
    ] {
        let mut pair = Pair::new(packed, other);
        let mut problem = Problem::new(&Decode { window: 170, ..Decode::new(32, 2, &[90, 250, 150]) });
        salt(&mut problem, 4);
        let right = PackedPages::of(&problem);
        let whole = pair.over_packed(&problem, &right, 1);
        for seed in 0..rounds(12) {
            let random = &mut Random::new(seed);
            let mut pages = right.clone();
            // Pages that only the second row uses.
            for page in 1..3 {
                let unit = problem.table[problem.table_pages + page] as usize * right.heads.page_units();
                for unit in unit..unit + right.heads.page_units() {
                    let record = pages.record(unit);
                    let bytes = random.bytes(record.len());
                    record.copy_from_slice(&bytes);
                    if random.below(6) > 0 {
                        record[RECORD_KIND] = of(random, &[KIND_PACKED, KIND_PACKED, KIND_BF16, KIND_LOST]);
                    }
                    if random.below(2) == 0 {
                        let index = random.below(2 * u64::from(right.units)) as u32;
                        record[RECORD_ENDS..RECORD_HEAD].copy_from_slice(&index.to_le_bytes());
                    }
                }
            }
            if random.below(3) == 0 {
                let entry = random.below(4) as usize;
                pages.table[problem.table_pages + entry] = of(random, &[problem.pages, u32::MAX, 1 << 31]);
            }
            if random.below(4) == 0 {
                pages.hot_table[1] = of(random, &[right.hot_pages, u32::MAX, 1 << 31]);
            }
            second_row(&mut pair, &problem, &pages, &whole);
        }
    }
}
