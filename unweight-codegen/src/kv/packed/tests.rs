use proptest::prelude::*;

use super::*;
use crate::kv::element;

mod attack;

const HALVES: [KvHalf; 2] = [KvHalf::Key, KvHalf::Value];

fn head_dims() -> impl Iterator<Item = u32> {
    (16..=HEAD_DIM_MAX).step_by(16)
}

fn bf16(exponent: u32, rest: u32) -> u16 {
    (rest << 8 & 0x8000 | exponent << 7 | rest & 0x7f) as u16
}

/// Encodes and decodes values; panics unless every bit is restored and the parts have their sizes.
fn restored(head_dim: u32, half: KvHalf, values: &[u16]) -> EncodedUnit {
    let unit = encode_unit(head_dim, half, values);
    assert_eq!(unit.record.len(), record_bytes(head_dim) as usize);
    assert!(unit.tiles.iter().all(|tile| tile.len() == tile_bytes(head_dim) as usize));
    let decoded = decode_unit(head_dim, half, &unit.tiles, &unit.record, unit.bf16.as_deref()).unwrap();
    let wrong = decoded.iter().zip(values).position(|(got, want)| got != want);
    assert_eq!(wrong, None, "head_dim {head_dim}, {half:?}, record {:?}", unit.record);
    match Record::parse(head_dim, &unit.record).unwrap() {
        Record::Packed { bases, escapes } => {
            assert_eq!(unit.bf16, None);
            assert_eq!(choose_bases(head_dim, values), Some(bases));
            let below = (0..).zip(values).filter(|(at, value)| {
                let base = bases[(at % head_dim / 16) as usize];
                assert!(exponent(**value) <= u32::from(base) + 15, "no value is above the window");
                exponent(**value) < base.into()
            });
            assert_eq!(escapes.iter().map(Vec::len).sum::<usize>(), below.count());
        }
        record => {
            assert_eq!(record, Record::Bf16 { index: 0 });
            assert_eq!(unit.bf16.as_ref().unwrap().len(), unit_bytes(head_dim) as usize);
            assert_eq!(choose_bases(head_dim, values), None);
        }
    }
    unit
}

/// Returns a page whose values cycle through these exponents, with all signs and mantissas.
fn page(head_dim: u32, exponents: &[u32]) -> Vec<u16> {
    (0..PAGE_TOKENS * head_dim).map(|i| bf16(exponents[i as usize % exponents.len()], i * 37)).collect()
}

/// Returns the bases of the steps of a packed unit, and its number of escapes.
fn bases_of(head_dim: u32, unit: &EncodedUnit) -> Option<(Vec<u8>, u8)> {
    let bases = unit.record[..(head_dim / 16) as usize].to_vec();
    (unit.record[RECORD_KIND] == KIND_PACKED).then_some((bases, unit.record[RECORD_ENDS + 3]))
}

/// Like [`bases_of`], for a unit whose steps have the same base.
fn base_of(head_dim: u32, unit: &EncodedUnit) -> Option<(u8, u8)> {
    let (bases, escapes) = bases_of(head_dim, unit)?;
    assert!(bases.iter().all(|base| *base == bases[0]), "{bases:?}");
    Some((bases[0], escapes))
}

#[test]
fn sizes_are_those_of_the_format() {
    for head_dim in head_dims() {
        assert!(takes(head_dim));
        assert_eq!(4 * tile_bytes(head_dim), 12 * 64 * head_dim / 8, "12 bits per value");
        assert_eq!(page_head_bytes(head_dim), 192 * head_dim);
        assert_eq!(unit_bytes(head_dim), 128 * head_dim);
        assert_eq!((record_bytes(head_dim), slots(head_dim)), if head_dim <= 80 { (32, 8) } else { (48, 16) });
    }
    assert!([0, 8, 24, 129, 144, u32::MAX].iter().all(|head_dim| !takes(*head_dim)));
}

#[test]
fn every_word_of_a_tile_has_one_place() {
    for head_dim in head_dims() {
        let mut used = vec![false; tile_bytes(head_dim) as usize / 4];
        for q in 0..3 * head_dim / 16 {
            for lane in 0..32 {
                let offset = word_offset(head_dim, q, lane);
                assert_eq!(offset % 4, 0);
                assert!(!std::mem::replace(&mut used[offset as usize / 4], true), "{head_dim}: {q}, {lane}");
            }
        }
        assert!(used.iter().all(|used| *used));
    }
}

/// Covers the remainders of words per lane: 3, 2, 1 and 0.
#[test]
fn words_of_a_lane_are_where_the_format_says() {
    let offsets =
        |head_dim, first| -> Vec<u32> { (first..3 * head_dim / 16).map(|q| word_offset(head_dim, q, 3)).collect() };
    assert_eq!(offsets(16, 0), [24, 28, 256 + 12]);
    assert_eq!(offsets(32, 2), [48 + 8, 48 + 12, 512 + 24, 512 + 28]);
    assert_eq!(offsets(48, 7), [512 + 48 + 12, 1024 + 12]);
    assert_eq!(offsets(64, 10), [1024 + 48 + 8, 1024 + 48 + 12]);
    assert_eq!(offsets(80, 12), [1536 + 24, 1536 + 28, 1536 + 256 + 12]);
}

/// For K, token 9 of tile 2 is row 1 of P2 and P3, and element 27 is pair 1 of P3 in step 1: lane 5, register 3, the
/// high half. For V, token 11 of tile 2 is pair 1 of P1 and P3, and element 25 is row 1 of P3.
#[test]
fn slots_and_bf16_units_number_values_as_the_format_says() {
    for (half, token, element) in [(KvHalf::Key, 41, 27), (KvHalf::Value, 43, 25)] {
        let mut values = page(32, &[100, 115]);
        // Step 1 has another base.
        (0..64 * 32).filter(|at| at % 32 >= 16).for_each(|at| values[at] += 3 << 7);
        values[token * 32 + element] = bf16(97, 0xd5);
        let unit = restored(32, half, &values);
        assert_eq!(unit.record[..8], [100, 103, 0, 0, 0, 0, 0, 0]);
        assert_eq!(unit.record[8..16], [0, 0, 0, 0, 0, 0, 1, 1]);
        let number = (32 + 5) * 8 + 3 * 2 + 1;
        assert_eq!(unit.record[16..18], (25u16 << 11 | number).to_le_bytes());
        assert_eq!(unit.record[18..], [0; 14]);

        let mut values = page(32, &[1, 240]);
        values[token * 32 + element] = 0xabcd;
        let unit = restored(32, half, &values).bf16.unwrap();
        let word = ((2 * 2 + 1) * 32 + 5) * 4 + 3;
        assert_eq!(unit[4 * word + 2..][..2], [0xcd, 0xab], "{half:?}");
    }
}

#[test]
fn every_value_of_a_tile_has_one_place() {
    for (head_dim, half) in head_dims().flat_map(|head_dim| HALVES.map(|half| (head_dim, half))) {
        let mut used = vec![false; (PAGE_TOKENS * head_dim) as usize];
        for (tile, position) in positions(head_dim) {
            let (token, element) = place(half, position.0, position.1, position.2, position.3);
            assert!(token < TILE_TOKENS && element < head_dim);
            let at = index(head_dim, half, tile, position);
            assert!(!std::mem::replace(&mut used[at], true), "{head_dim}, {half:?}: {tile}, {position:?}");
        }
        assert!(used.iter().all(|used| *used));
    }
}

/// The result of `ldmatrix.m8n8.x4` for each lane. The address of lane `8 * i + r` is row `r` of matrix `i`. Lane `l`
/// receives elements `2 * (l % 4)` and the next of row `l / 4`, or with `.trans` these rows of column `l / 4`.
fn ldmatrix(memory: &[u16], row_of: impl Fn(u32) -> u32, trans: bool) -> Vec<[[u16; 2]; 4]> {
    let element = |matrix: u32, row: u32, column: u32| memory[(row_of(8 * matrix + row) + column) as usize];
    let lane = |lane: u32| {
        std::array::from_fn(|matrix| {
            let matrix = matrix as u32;
            let pair = [lane % 4 * 2, lane % 4 * 2 + 1];
            pair.map(|k| if trans { element(matrix, k, lane / 4) } else { element(matrix, lane / 4, k) })
        })
    };
    (0..32).map(lane).collect()
}

/// The registers of an unpacked tile equal those that `attention/softmax.cuh` (`Lines`) loads from a bf16 page.
#[test]
fn quads_are_the_fragments_of_the_attention_kernels() {
    for head_dim in head_dims() {
        let mut memory = vec![0; (PAGE_TOKENS * head_dim) as usize];
        for (token, index) in (0..PAGE_TOKENS).flat_map(|token| (0..head_dim).map(move |index| (token, index))) {
            memory[element(head_dim, token, index) as usize] = (token * head_dim + index) as u16;
        }
        for (tile, step) in (0..PAGE_TILES).flat_map(|tile| (0..head_dim / 16).map(move |step| (tile, step))) {
            let address = |row: u32, odd: u32| element(head_dim, tile * 16 + row, (2 * step + odd) * 8);
            let keys = ldmatrix(&memory, |lane| address(lane % 8 + lane / 16 * 8, lane / 8 % 2), false);
            let values = ldmatrix(&memory, |lane| address(lane % 16, lane / 16), true);
            for (half, loaded) in HALVES.into_iter().zip([keys, values]) {
                for (lane, register) in (0..32).flat_map(|lane| (0..4).map(move |register| (lane, register))) {
                    let expected =
                        [false, true].map(|high| index(head_dim, half, tile, (step, lane, register, high)) as u16);
                    assert_eq!(
                        loaded[lane as usize][register as usize], expected,
                        "{head_dim}, {half:?}: {step}, {lane}"
                    );
                }
            }
        }
    }
}

/// The kernels use the addresses that the test above assumes.
#[test]
fn the_attention_kernels_address_rows_as_assumed() {
    for name in ["decode", "prefill"] {
        let source = unweight_templates::header(&format!("unweight/kernels/attention/{name}.cuh")).unwrap();
        assert!(source.contains("(lane % 8 + lane / 16 * 8, lane / 8 % 2)"), "K");
        assert!(source.contains("(lane % 16, lane / 16)") && source.contains("ldmatrix_x4_trans("), "V");
    }
}

#[test]
fn words_have_the_bits_of_the_format() {
    // For each of P0..P3, in both halves: all bits of one, and none of the others.
    let mask = 0x87ff_87ff;
    assert_eq!(weave([mask, 0, 0, 0]), [mask, 0, 0]);
    assert_eq!(weave([0, mask, 0, 0]), [0, mask, 0]);
    assert_eq!(weave([0, 0, mask, 0]), [0, 0, mask]);
    assert_eq!(weave([0, 0, 0, 0x0780_0000]), [0x7800_0000, 0, 0]);
    assert_eq!(weave([0, 0, 0, 0x0000_0078]), [0, 0x0000_7800, 0]);
    // The low three bits of P3's high half, and the sign of its low half, are in the low half of w2.
    assert_eq!(weave([0, 0, 0, 0x0007_8000]), [0, 0, 0x0000_7800]);
    assert_eq!(weave([0, 0, 0, 0x8000_0007]), [0, 0, 0x7800_0000]);
    for bit in (0..128).filter(|bit| mask >> (bit % 32) & 1 == 1) {
        let mut quad = [0; 4];
        quad[bit / 32] = 1 << (bit % 32);
        assert_eq!(unweave(weave(quad)), quad);
    }
}

#[test]
fn every_pattern_is_restored_inside_the_window() {
    for exponent in 0..256 {
        for half in HALVES {
            let unit = restored(16, half, &page(16, &[exponent]));
            let base = exponent.max(15) - 15;
            assert_eq!(base_of(16, &unit), Some((base as u8, 0)), "{exponent}");
        }
    }
}

/// All 256 signs and mantissas of every exponent as escapes, with as many escapes as a record holds.
#[test]
fn every_pattern_is_restored_as_an_escape() {
    for exponent in 0..240u32 {
        // The first and the last code. A base is at least 1 above an escape's exponent, and at most 240.
        let bases = if exponent == 0 { vec![1, 32, 240] } else { vec![exponent + 1, (exponent + 31).min(240)] };
        for (chunk, first) in (0..256).step_by(8).enumerate() {
            let base = bases[chunk % bases.len()];
            let mut values = page(16, &[base, base + 15]);
            for i in 0..8 {
                // `bf16` uses bit 7 as the sign and the bits below as the mantissa.
                values[(i * 125 + 3) as usize] = bf16(exponent, first + i);
            }
            let unit = restored(16, HALVES[chunk / bases.len() % 2], &values);
            assert_eq!(base_of(16, &unit), Some((base as u8, 8)), "{exponent}");
        }
    }
}

#[test]
fn every_pattern_is_restored_in_a_bf16_unit() {
    for (head_dim, half) in [(16, KvHalf::Key), (80, KvHalf::Value), (128, KvHalf::Key)] {
        let values: Vec<u16> = (0..=u16::MAX).map(|value| value.wrapping_mul(40503)).collect();
        let whole = (PAGE_TOKENS * head_dim) as usize;
        for start in (0..values.len()).step_by(whole) {
            let page: Vec<u16> = values.iter().copied().cycle().skip(start).take(whole).collect();
            assert_eq!(base_of(head_dim, &restored(head_dim, half, &page)), None);
        }
    }
}

#[test]
fn special_values_are_exact_for_all_head_sizes() {
    for (head_dim, half) in head_dims().flat_map(|head_dim| HALVES.map(|half| (head_dim, half))) {
        let count = (PAGE_TOKENS * head_dim) as usize;
        let packs = |values: &[u16], expected: Option<(u8, u8)>| {
            assert_eq!(
                base_of(head_dim, &restored(head_dim, half, values)),
                expected,
                "{head_dim}, {half:?}, {:04x?}",
                &values[..8]
            );
        };
        for (value, base) in
            [(0, 0), (0x8000, 0), (0x0001, 0), (0x807f, 0), (0x3f80, 112), (0x7f80, 240), (0xffff, 240)]
        {
            packs(&vec![value; count], Some((base, 0)));
        }
        // Subnormals and zeros, with and without the smallest normal numbers.
        packs(&page(head_dim, &[0]), Some((0, 0)));
        packs(&page(head_dim, &[0, 1, 15]), Some((0, 0)));
        // A zero next to common numbers needs a slot. Inf or NaN leaves its step without codes.
        for (special, fits) in [(0x7f80, false), (0xffc1, false), (0x0000, true), (0x8001, true)] {
            let mut values = page(head_dim, &[112, 127]);
            values[5] = special;
            packs(&values, fits.then_some((112, 1)));
        }
        let mut values = page(head_dim, &[240, 248]);
        values[7] = 0xff81;
        let mut bases = vec![233; head_dim as usize / 16];
        bases[0] = 240;
        assert_eq!(bases_of(head_dim, &restored(head_dim, half, &values)), Some((bases, 0)));
        // Alternating extremes.
        packs(&page(head_dim, &[0, 255]), None);
        packs(&page(head_dim, &[1, 254]), None);
        packs(&page(head_dim, &[0, 16]), None);
    }
}

/// Returns an approximately normally distributed number from a generator.
fn normal(state: &mut u64) -> f32 {
    let sum: f32 = (0..12)
        .map(|_| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (*state >> 40) as f32 / (1u32 << 24) as f32
        })
        .sum();
    sum - 6.0
}

fn round(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[test]
fn channels_with_outliers_are_exact() {
    let mut state = 1;
    for (head_dim, half) in head_dims().flat_map(|head_dim| HALVES.map(|half| (head_dim, half))) {
        for (scale, channels) in [(1.0, 0), (30.0, 1), (100.0, 1), (100.0, 4), (1e4, 2), (1e30, 1)] {
            let values = (0..PAGE_TOKENS * head_dim).map(|at| {
                let value = normal(&mut state);
                round(if at % head_dim < channels { value * scale } else { value })
            });
            let unit = restored(head_dim, half, &values.collect::<Vec<_>>());
            if let Some((bases, _)) = bases_of(head_dim, &unit) {
                // The window of a step does not depend on the channels of other steps.
                assert!(bases[1..].iter().all(|base| (110..=115).contains(base)), "{scale}: {bases:?}");
            }
        }
    }
}

#[test]
fn a_unit_packs_up_to_the_number_of_slots() {
    for (head_dim, half) in head_dims().flat_map(|head_dim| HALVES.map(|half| (head_dim, half))) {
        for exponent in [0, 69, 80, 99] {
            let slots = slots(head_dim);
            for escapes in [1, slots, slots + 1] {
                let mut values = page(head_dim, &[100, 115]);
                let stride = PAGE_TOKENS * head_dim / escapes;
                (0..escapes).for_each(|i| values[(i * stride) as usize] = bf16(exponent, i));
                let fits = (escapes <= slots).then_some((100, escapes as u8));
                let found = base_of(head_dim, &restored(head_dim, half, &values));
                assert_eq!(found, fits, "{head_dim}: {escapes} of {exponent}");
            }
        }
    }
}

#[test]
fn escapes_are_in_order_wherever_they_stand() {
    for (head_dim, half) in head_dims().flat_map(|head_dim| HALVES.map(|half| (head_dim, half))) {
        // All escapes in the first tile, all in the last, and the first and last element of each tile.
        let corners = (0..4).flat_map(|tile| [tile * 16 * head_dim, (tile + 1) * 16 * head_dim - 1]);
        let last = (0..8).map(|i| 64 * head_dim - 1 - 3 * i);
        for indices in [(0..8).collect::<Vec<u32>>(), last.collect(), corners.collect()] {
            let mut values = page(head_dim, &[100, 115]);
            for (i, at) in (0..).zip(&indices) {
                values[*at as usize] = bf16(if i % 2 == 0 { 0 } else { 97 }, i);
            }
            let unit = restored(head_dim, half, &values);
            assert_eq!(base_of(head_dim, &unit), Some((100, indices.len() as u8)));
            let ends = (1..=4).map(|tile| indices.iter().filter(|at| **at < tile * 16 * head_dim).count() as u8);
            assert!(ends.eq(unit.record[12..16].iter().copied()), "{:?}", unit.record);
        }
    }
}

/// Returns a unit whose step `s` has `count` values of each exponent, in token order. A step has 1024 values.
fn of_steps(steps: &[Vec<(u32, u32)>]) -> Vec<u16> {
    let of = |runs: &Vec<(u32, u32)>| -> Vec<u16> {
        let values: Vec<u16> = runs.iter().flat_map(|(e, count)| (0..*count).map(|i| bf16(*e, i))).collect();
        assert_eq!(values.len(), 1024, "{runs:?}");
        values
    };
    let steps: Vec<Vec<u16>> = steps.iter().map(of).collect();
    (0..64).flat_map(|token| steps.iter().flat_map(move |step| step[token * 16..][..16].to_vec())).collect()
}

#[test]
fn the_window_of_each_step_ends_with_its_largest_exponent() {
    let choose = |steps: &[Vec<(u32, u32)>]| choose_bases(16 * steps.len() as u32, &of_steps(steps));
    let one = |runs: &[(u32, u32)]| choose(&[runs.to_vec()]).map(|bases| bases[0]);
    assert_eq!(one(&[(100, 1024)]), Some(85));
    // No base is below 0 or above 240.
    assert_eq!([0, 3, 15, 16].map(|e| one(&[(e, 1024)])), [Some(0), Some(0), Some(0), Some(1)]);
    assert_eq!(one(&[(255, 1016), (0, 8)]), Some(240));
    // As many escapes as slots, and one more.
    assert_eq!(one(&[(100, 1016), (84, 8)]), Some(85));
    assert_eq!(one(&[(100, 1015), (84, 9)]), None);
    // The lowest code is 31 below the base. Exponent 0 always has a code.
    assert_eq!(one(&[(100, 1023), (54, 1)]), Some(85));
    assert_eq!(one(&[(100, 1023), (53, 1)]), None);
    assert_eq!(one(&[(100, 1023), (0, 1)]), Some(85));
    // One large value moves the window of its own step only.
    assert_eq!(one(&[(90, 1023), (106, 1)]), None);
    let typical = vec![(100, 1020), (90, 4)];
    let bases = choose(&[typical.clone(), vec![(200, 1024)], typical.clone(), vec![(3, 1024)], vec![(16, 1024)]]);
    assert_eq!(bases, Some([85, 185, 85, 0, 1, 0, 0, 0]));
    // All steps share the slots of the record.
    let with_escapes = vec![(100, 1020), (80, 4)];
    assert_eq!(choose(&[with_escapes.clone(), with_escapes.clone()]), Some([85, 85, 0, 0, 0, 0, 0, 0]));
    assert_eq!(choose(&[with_escapes.clone(), with_escapes.clone(), vec![(100, 1023), (80, 1)]]), None);
    // A record of 48 bytes has 16 slots.
    let eight_steps = |last: u32| {
        choose(
            &[vec![with_escapes.clone(); 4], vec![typical.clone(); 3], vec![vec![(100, 1024 - last), (80, last)]]]
                .concat(),
        )
    };
    assert_eq!(eight_steps(0), Some([85; 8]));
    assert_eq!(eight_steps(1), None);
}

fn parts(unit: EncodedUnit) -> ([Vec<u8>; 4], Vec<u8>) {
    (unit.tiles, unit.record)
}

#[test]
fn records_that_no_encoder_writes_are_rejected() {
    let mut values = page(16, &[100, 115]);
    (0..3).for_each(|i| values[i * 300] = bf16(0, 1));
    let (tiles, record) = parts(restored(16, KvHalf::Key, &values));
    let decode = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut record = record.clone();
        change(&mut record);
        decode_unit(16, KvHalf::Key, &tiles, &record, None).unwrap_err()
    };
    let field = |change: &dyn Fn(&mut Vec<u8>)| match decode(change) {
        KvPageError::Record { what, value, limit } => (what, value, limit),
        error => panic!("{error}"),
    };
    assert_eq!(record[..16], [100, 0, 0, 0, 0, 0, 0, 0, KIND_PACKED, 0, 0, 0, 1, 2, 3, 3]);
    assert_eq!(field(&|r| r[0] = 241), ("base of a step", 241, 240));
    // A head of 16 has one step.
    assert_eq!(field(&|r| r[1] = 1), ("base of a step", 1, 0));
    assert_eq!(field(&|r| r[7] = 9), ("base of a step", 9, 0));
    assert_eq!(field(&|r| r[8] = KIND_BF16), ("base of a step", 100, 0));
    assert_eq!(field(&|r| r[8] = 3), ("kind", 3, 2));
    assert_eq!(field(&|r| r[9] = 1), ("a byte after the kind", 1, 0));
    assert_eq!(field(&|r| r[11] = 9), ("a byte after the kind", 9, 0));
    assert_eq!(field(&|r| r[15] = 9), ("escapes up to a tile", 9, 8));
    assert_eq!(field(&|r| r[13] = 0), ("escapes up to the tile before", 1, 0));
    assert_eq!(field(&|r| r[15] = 255).0, "escapes up to a tile");
    assert_eq!(field(&|r| r[17] |= 1), ("element of an escape", 256 + u32::from(record[16]), 255));
    assert_eq!(field(&|r| r[31] = 1), ("an unused slot", 256, 0));
    // Code 0 means 31 below the base.
    assert_eq!(field(&|r| (r[0], r[17]) = (31, 0)), ("distance of an escape below the base", 31, 30));
    // The escapes of a tile must be in ascending order.
    let before = u32::from(record[16]);
    let error = decode(&|r| {
        r[12] = 2;
        r.copy_within(16..18, 18);
    });
    assert_eq!((&error, error.code()), (&KvPageError::Order { before, element: before }, "kv-page-invalid"));
    // Units whose tiles are unused.
    for kind in [KIND_BF16, KIND_LOST] {
        assert_eq!(field(&|r| (r[0], r[8]) = (0, kind)).0, "a byte of an unused slot");
    }
}

#[test]
fn units_elsewhere_and_buffers_of_other_sizes_are_errors() {
    let (tiles, record) = parts(restored(32, KvHalf::Value, &page(32, &[1, 254])));
    let decode = |tiles: &[Vec<u8>; 4], record: &[u8], bf16: Option<&[u8]>| {
        decode_unit(32, KvHalf::Value, tiles, record, bf16).unwrap_err()
    };
    let mut lost_index = record.clone();
    lost_index[12..16].copy_from_slice(&7u32.to_le_bytes());
    assert_eq!(decode(&tiles, &lost_index, None), KvPageError::UnitMissing { index: 7 });
    let size = |what, bytes, expected| KvPageError::Size { what, bytes, expected };
    assert_eq!(decode(&tiles, &record, Some(&[0; 8])), size("BF16 unit", 8, 4096));
    assert_eq!(decode(&tiles, &record[..31], None), size("record", 31, 32));
    let mut short = tiles.clone();
    short[2].pop();
    assert_eq!(decode(&short, &record, None), size("tile", 767, 768));
    let mut lost = vec![0; 32];
    lost[8] = KIND_LOST;
    assert_eq!(decode(&tiles, &lost, None), KvPageError::Lost);
    lost[12] = 1;
    assert!(matches!(decode(&tiles, &lost, None), KvPageError::Record { what: "index of a lost unit", .. }));
    for head_dim in [0, 8, 144, u32::MAX] {
        let error = decode_unit(head_dim, KvHalf::Key, &tiles, &record, None).unwrap_err();
        assert_eq!(error, KvPageError::HeadDim { head_dim });
    }
}

/// Values of a unit: in each step most exponents are in one range, and some are arbitrary.
fn units() -> impl Strategy<Value = (u32, KvHalf, Vec<u16>)> {
    let firsts = prop::collection::vec(0..=255u32, 8);
    let shape = (1..=8u32, prop::bool::ANY, firsts, 1..=18u32, 0..=18usize);
    shape.prop_flat_map(|(steps, value, firsts, width, others)| {
        let count = (PAGE_TOKENS * 16 * steps) as usize;
        let typical = prop::collection::vec((0..width, prop::num::u16::ANY), count);
        let others =
            prop::collection::vec((prop::sample::select(vec![0, 1, 5, 31, 40]), 0..count, prop::num::u16::ANY), others);
        (typical, others).prop_map(move |(typical, others)| {
            let first = |at: usize| firsts[at / 16 % steps as usize];
            let typical = typical.into_iter().enumerate();
            let mut values: Vec<u16> =
                typical.map(|(at, (e, rest))| bf16((first(at) + e).min(255), rest.into())).collect();
            for (below, at, rest) in others {
                // Zeros, values near the window, and any pattern.
                values[at] = match below {
                    0 => rest & 0x807f,
                    40 => rest,
                    _ => bf16(first(at).saturating_sub(below), rest.into()),
                };
            }
            (16 * steps, HALVES[usize::from(value)], values)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_unit_is_restored((head_dim, half, values) in units()) {
        restored(head_dim, half, &values);
    }

    #[test]
    fn units_of_any_bits_are_restored(steps in 1..=8u32, values in prop::collection::vec(prop::num::u16::ANY, 8192)) {
        restored(16 * steps, KvHalf::Value, &values[..(PAGE_TOKENS * 16 * steps) as usize]);
    }

    /// Any bytes decode or are an error; decoded bytes have as many values as a page.
    #[test]
    fn any_bytes_decode_or_are_refused(
        head_dim in prop::sample::select(vec![0, 16, 24, 48, 80, 96, 128, 256, u32::MAX]),
        kind in 0..=3u8,
        typical in prop::bool::ANY,
        record in prop::collection::vec(prop::num::u8::ANY, 0..=64),
        bytes in prop::collection::vec(prop::num::u8::ANY, 3072),
    ) {
        let mut record = record;
        let mut tiles = [(); 4].map(|()| bytes.clone());
        if typical && takes(head_dim) {
            record.resize(record_bytes(head_dim) as usize, 0);
            record[RECORD_KIND..RECORD_ENDS].copy_from_slice(&[kind, 0, 0, 0]);
            record[(head_dim / 16) as usize..RECORD_KIND].fill(0);
            tiles.iter_mut().for_each(|tile| tile.truncate(tile_bytes(head_dim) as usize));
        }
        let unit: Vec<u8> = bytes.iter().copied().cycle().take(head_dim.min(1024) as usize * 128).collect();
        for half in HALVES {
            if let Ok(values) = decode_unit(head_dim, half, &tiles, &record, Some(&unit)) {
                prop_assert_eq!(values.len() as u32, PAGE_TOKENS * head_dim);
            }
        }
    }

    /// A damaged record of a valid unit never causes an out-of-bounds read, and only changes the values that it refers
    /// to.
    #[test]
    fn damaged_records_decode_or_are_refused(
        (head_dim, half, values) in units(),
        at in 0..48usize,
        to in prop::num::u8::ANY,
    ) {
        let unit = encode_unit(head_dim, half, &values);
        let mut record = unit.record.clone();
        let at = at % record.len();
        record[at] = to;
        if let Ok(decoded) = decode_unit(head_dim, half, &unit.tiles, &record, unit.bf16.as_deref()) {
            let differ = decoded.iter().zip(&values).filter(|(a, b)| a != b).count();
            // A base affects all values of its step, the kind all values.
            let max_differ = match at {
                0..RECORD_KIND => 1024,
                RECORD_KIND => values.len(),
                _ => 2 * slots(head_dim) as usize,
            };
            prop_assert!(differ <= max_differ, "byte {at}: {differ} values differ");
            let same = |(a, b): (&u16, &u16)| a & 0x807f == b & 0x807f;
            prop_assert!(at == RECORD_KIND || decoded.iter().zip(&values).all(same));
        }
    }
}

fn xorshift(mut state: u32) -> u32 {
    state ^= state << 13;
    state ^= state >> 17;
    state ^ state << 5
}

/// The name of a case, and for each step its exponents with their number of values.
type Case = (&'static str, Vec<Vec<(u32, u32)>>);

fn golden_cases() -> Vec<Case> {
    let mut state = 28;
    let mut draw = |below: u32| {
        state = xorshift(state);
        state % below
    };
    let typical = || vec![(120, 700), (115, 320), (100, 4)];
    let mut cases: Vec<Case> = vec![
        ("zeros", vec![vec![(0, 1024)]; 4]),
        ("subnormals and the smallest numbers", vec![vec![(0, 500), (1, 500), (15, 24)]]),
        ("the largest exponent", vec![vec![(255, 900), (240, 116), (0, 8)]]),
        ("one zero too many", vec![vec![(255, 900), (240, 115), (0, 9)]]),
        ("the lowest code", vec![vec![(100, 1023), (54, 1)]]),
        ("no code", vec![vec![(100, 1023), (53, 1)]]),
        ("a base of 0", vec![vec![(15, 1000), (2, 8), (1, 4), (0, 12)]]),
        ("a base of 1", vec![vec![(16, 1000), (2, 8), (1, 8), (0, 8)]]),
        ("a step of large channels", vec![typical(), vec![(140, 512), (130, 512)]]),
        ("a large value among usual ones", vec![typical(), vec![(140, 1), (120, 1023)]]),
        ("as many escapes as 8 steps share", vec![typical(), typical(), typical(), typical(), vec![(100, 1024)]]),
    ];
    for _ in 0..200 {
        let steps = 1 + draw(8);
        let outliers = draw(3) * 2;
        let mut step = || {
            let (first, width) = (draw(240), 1 + draw(16));
            let mut runs: Vec<(u32, u32)> =
                (0..1 + draw(6)).map(|_| ((first + draw(width)).min(255), 1 + draw(150))).collect();
            let others = (0..outliers).map(|_| ((first + 16).saturating_sub(draw(50)).min(255), 1 + draw(2)));
            runs.extend(others);
            let rest = 1024 - runs.iter().map(|(_, count)| count).sum::<u32>();
            runs.push((first.min(255), rest));
            runs
        };
        cases.push(("drawn", (0..steps).map(|_| step()).collect()));
    }
    cases
}

/// The cases of `tests/parity/kv_golden.json`. `kv_coverage.py` compares its own choice of bases with this file.
///
/// `UPDATE_DOCS=1` writes it.
#[test]
fn golden_choices_are_those_of_this_encoder() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/kv_golden.json");
    let cases = golden_cases();
    let lines = cases.iter().map(|(name, steps)| {
        let (head_dim, values) = (16 * steps.len() as u32, of_steps(steps));
        let choice = choose_bases(head_dim, &values).map(|bases| {
            let base = |at: u32| u32::from(bases[(at % head_dim / 16) as usize]);
            let escapes = (0..).zip(&values).filter(|(at, value)| exponent(**value) < base(*at)).count();
            serde_json::json!({"bases": bases[..steps.len()], "escapes": escapes})
        });
        let runs = |step: &Vec<(u32, u32)>| -> Vec<[u32; 2]> { step.iter().map(|(e, n)| [e << 7, *n]).collect() };
        let steps: Vec<_> = steps.iter().map(runs).collect();
        // Keys in alphabetical order, whatever order serde_json keeps in this build.
        serde_json::json!({"choice": choice, "name": name, "slots": slots(head_dim), "steps": steps}).to_string()
    });
    let text = format!("{{\"cases\": [\n{}\n]}}\n", lines.collect::<Vec<_>>().join(",\n"));
    let packed = text.matches("\"choice\":{").count();
    assert!((60..180).contains(&packed), "{packed} cases of {} pack", cases.len());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, text).unwrap();
    } else {
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "UPDATE_DOCS=1 writes {}", path.display());
    }
}

/// The worked example of docs/kv-cache.md. `UPDATE_DOCS=1` writes it.
#[test]
fn the_document_shows_this_encoder() {
    const BEGIN: &str = "<!-- Written by `UPDATE_DOCS=1 cargo test -p unweight-codegen --lib -- kv::packed`. -->\n";
    const END: &str = "<!-- End of what is written. -->\n";
    let mut values = vec![0x3f80; 64 * 16];
    for (token, element, value) in [(0, 0, 0x0000), (8, 9, 0x3f40), (9, 1, 0xc040)] {
        values[token * 16 + element] = value;
    }
    let unit = restored(16, KvHalf::Key, &values);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ");
    let slot = u16::from_le_bytes([unit.record[16], unit.record[17]]);
    let mut text = format!(
        "```text\nrecord   {} and 14 zeros\n         base {}, 1 escape, slot {slot:04x}: element {}, code {}\n",
        hex(&unit.record[..18]),
        unit.record[0],
        slot & 0x7ff,
        slot >> 11
    );
    assert!(unit.record[18..].iter().all(|byte| *byte == 0));
    for lane in [0, 4] {
        let offsets = [0, 1, 2].map(|q| word_offset(16, q, lane));
        let words = offsets.map(|offset| get(&unit.tiles[0], offset));
        let base = u32::from(unit.record[0]);
        let registers = unweave(words).map(|f| format!("{:08x}", f + (base << 7 | base << 23)));
        let words = words.map(|word| format!("{word:08x}"));
        text += &format!("lane {lane}   bytes {offsets:?}: w0..w2 = {}, ", words.join(" "));
        text += &format!("P0..P3 = {}\n", registers.join(" "));
    }
    assert_eq!(unit.record[0], 113);
    text += "```\n\nThe low half of P0 in lane 0 is `3880`: exponent 113, since an escape has nibble 0. ";
    text += "The slot makes the exponent 0.\n";
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/kv-cache.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = document.split_once(BEGIN).expect("the first comment");
    let (_, after) = rest.split_once(END).expect("the second comment");
    assert!(text.lines().all(|line| line.len() <= 120), "{text}");
    let renewed = [before, BEGIN, &text, END, after].concat();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, renewed).unwrap();
    } else {
        assert_eq!(document, renewed, "UPDATE_DOCS=1 writes docs/kv-cache.md");
    }
}
