use proptest::prelude::*;

use super::*;
use crate::kv::element;

const HALVES: [KvHalf; 2] = [KvHalf::Key, KvHalf::Value];

fn head_dims() -> impl Iterator<Item = u32> {
    (16..=HEAD_DIM_MAX).step_by(16)
}

fn bf16(exponent: u32, rest: u32) -> u16 {
    (rest << 8 & 0x8000 | exponent << 7 | rest & 0x7f) as u16
}

/// Encodes and decodes; panics unless every bit comes back and the parts have their sizes.
fn restored(head_dim: u32, half: KvHalf, values: &[u16]) -> EncodedUnit {
    let unit = encode_unit(head_dim, half, values);
    assert_eq!(unit.record.len(), record_bytes(head_dim) as usize);
    assert!(unit.tiles.iter().all(|tile| tile.len() == tile_bytes(head_dim) as usize));
    let decoded = decode_unit(head_dim, half, &unit.tiles, &unit.record, unit.bf16.as_deref()).unwrap();
    let wrong = decoded.iter().zip(values).position(|(got, want)| got != want);
    assert_eq!(wrong, None, "head_dim {head_dim}, {half:?}, record {:?}", unit.record);
    match Record::parse(head_dim, &unit.record).unwrap() {
        Record::Packed { base, escapes } => {
            assert_eq!(unit.bf16, None);
            assert_eq!(choose_base(values, slots(head_dim)), Some(base));
            let outside =
                values.iter().filter(|value| !(u32::from(base)..=u32::from(base) + 15).contains(&exponent(**value)));
            assert_eq!(escapes.iter().map(Vec::len).sum::<usize>(), outside.count());
        }
        record => {
            assert_eq!(record, Record::Bf16 { index: 0 });
            assert_eq!(unit.bf16.as_ref().unwrap().len(), unit_bytes(head_dim) as usize);
            assert_eq!(choose_base(values, slots(head_dim)), None);
        }
    }
    unit
}

/// A page of values of these exponents, in turn, with all signs and mantissas.
fn page(head_dim: u32, exponents: &[u32]) -> Vec<u16> {
    (0..PAGE_TOKENS * head_dim).map(|i| bf16(exponents[i as usize % exponents.len()], i * 37)).collect()
}

fn base_of(unit: &EncodedUnit) -> Option<(u8, u8)> {
    (unit.record[1] == KIND_PACKED).then_some((unit.record[0], unit.record[7]))
}

#[test]
fn sizes_are_those_of_the_format() {
    for head_dim in head_dims() {
        assert!(takes(head_dim));
        assert_eq!(4 * tile_bytes(head_dim), 12 * 64 * head_dim / 8, "12 bits per value");
        assert_eq!(page_head_bytes(head_dim), 192 * head_dim);
        assert_eq!(unit_bytes(head_dim), 128 * head_dim);
        assert_eq!((record_bytes(head_dim), slots(head_dim)), if head_dim <= 80 { (32, 12) } else { (48, 20) });
    }
    assert!([0, 8, 24, 129, 144, u32::MAX].iter().all(|head_dim| !takes(*head_dim)));
}

#[test]
fn every_word_of_a_tile_has_one_place() {
    for head_dim in head_dims() {
        let mut taken = vec![false; tile_bytes(head_dim) as usize / 4];
        for q in 0..3 * head_dim / 16 {
            for lane in 0..32 {
                let offset = word_offset(head_dim, q, lane);
                assert_eq!(offset % 4, 0);
                assert!(!std::mem::replace(&mut taken[offset as usize / 4], true), "{head_dim}: {q}, {lane}");
            }
        }
        assert!(taken.iter().all(|taken| *taken));
    }
}

/// The remainders of words per lane: 3, 2, 1 and 0.
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

/// Token 9 of tile 2 is row 1 of P2 and P3, element 27 is pair 1 of P3 in step 1: lane 5, register 3, the high half. Of
/// V, token 11 of tile 2 is pair 1 of P1 and P3, element 25 is row 1 of P3.
#[test]
fn slots_and_bf16_units_number_values_as_the_format_says() {
    for (half, token, element) in [(KvHalf::Key, 41, 27), (KvHalf::Value, 43, 25)] {
        let mut values = page(32, &[100, 115]);
        values[token * 32 + element] = bf16(117, 0xd5);
        let unit = restored(32, half, &values);
        assert_eq!(unit.record[..8], [100, 0, 0, 0, 0, 0, 1, 1]);
        let number = (32 + 5) * 8 + 3 * 2 + 1;
        assert_eq!(unit.record[8..10], (25u16 << 11 | number).to_le_bytes());
        assert_eq!(unit.record[10..], [0; 22]);

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
        let mut taken = vec![false; (PAGE_TOKENS * head_dim) as usize];
        for (tile, position) in positions(head_dim) {
            let (token, element) = place(half, position.0, position.1, position.2, position.3);
            assert!(token < TILE_TOKENS && element < head_dim);
            let at = index(head_dim, half, tile, position);
            assert!(!std::mem::replace(&mut taken[at], true), "{head_dim}, {half:?}: {tile}, {position:?}");
        }
        assert!(taken.iter().all(|taken| *taken));
    }
}

/// What `ldmatrix.m8n8.x4` gives each lane: of matrix `i`, the row of lane `8 * i + r` is at its address, and lane `l`
/// receives elements 2 * (l % 4) and the next of row l / 4, or with `.trans` those rows of column l / 4.
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

/// The registers of an unpacked tile are those that `attention/softmax.cuh` (`Lines`) loads from a bf16 page.
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
                    let own =
                        [false, true].map(|high| index(head_dim, half, tile, (step, lane, register, high)) as u16);
                    assert_eq!(loaded[lane as usize][register as usize], own, "{head_dim}, {half:?}: {step}, {lane}");
                }
            }
        }
    }
}

/// The source of what the test above repeats.
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
    // Of P0..P3, in both halves: all bits of one, and none of the others.
    let own = 0x87ff_87ff;
    assert_eq!(weave([own, 0, 0, 0]), [own, 0, 0]);
    assert_eq!(weave([0, own, 0, 0]), [0, own, 0]);
    assert_eq!(weave([0, 0, own, 0]), [0, 0, own]);
    assert_eq!(weave([0, 0, 0, 0x0780_0000]), [0x7800_0000, 0, 0]);
    assert_eq!(weave([0, 0, 0, 0x0000_0078]), [0, 0x0000_7800, 0]);
    // The low three bits of the high half, and the sign of the low one, are in the low half of w2.
    assert_eq!(weave([0, 0, 0, 0x0007_8000]), [0, 0, 0x0000_7800]);
    assert_eq!(weave([0, 0, 0, 0x8000_0007]), [0, 0, 0x7800_0000]);
    for bit in (0..128).filter(|bit| own >> (bit % 32) & 1 == 1) {
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
            assert_eq!(base_of(&unit), Some((base as u8, 0)), "{exponent}");
        }
    }
}

/// All 256 signs and mantissas of every exponent as escapes, as many as a record holds.
#[test]
fn every_pattern_is_restored_as_an_escape() {
    for exponent in 0..256u32 {
        // The ends of the codes of a base. Half of the page is at each end of its window, so no other base will do.
        let below = [1, 24].map(|below| exponent + below).into_iter().filter(|base| exponent > 0 && *base <= 240);
        let above = [16, 22].into_iter().filter_map(|above| exponent.checked_sub(above));
        let zero = [1, 100, 240].into_iter().filter(|_| exponent == 0);
        let bases: Vec<u32> = below.chain(above).chain(zero).collect();
        for (chunk, first) in (0..256).step_by(12).enumerate() {
            let base = bases[chunk % bases.len()];
            let mut values = page(16, &[base, base + 15]);
            let escapes = 12.min(256 - first);
            for i in 0..escapes {
                // `bf16` takes the sign from bit 7 and the mantissa from the bits below.
                values[(i * 85 + 3) as usize] = bf16(exponent, first + i);
            }
            let unit = restored(16, HALVES[chunk / bases.len() % 2], &values);
            assert_eq!(base_of(&unit), Some((base as u8, escapes as u8)), "{exponent}");
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
            assert_eq!(base_of(&restored(head_dim, half, &page)), None);
        }
    }
}

#[test]
fn special_values_are_exact_for_all_head_sizes() {
    for (head_dim, half) in head_dims().flat_map(|head_dim| HALVES.map(|half| (head_dim, half))) {
        let count = (PAGE_TOKENS * head_dim) as usize;
        let packs = |values: &[u16], expected: Option<(u8, u8)>| {
            assert_eq!(
                base_of(&restored(head_dim, half, values)),
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
        // Inf and NaN next to usual numbers: as many as there are slots.
        for (special, fits) in [(0x7f80, false), (0xffc1, false), (0x0000, true), (0x8001, true)] {
            let mut values = page(head_dim, &[112, 127]);
            values[5] = special;
            packs(&values, fits.then_some((112, 1)));
        }
        let mut values = page(head_dim, &[240, 248]);
        values[7] = 0xff81;
        packs(&values, Some((240, 0)));
        // Alternating extremes.
        packs(&page(head_dim, &[0, 255]), None);
        packs(&page(head_dim, &[1, 254]), None);
        packs(&page(head_dim, &[0, 16]), None);
    }
}

/// Numbers that are normally distributed, roughly, from a generator with a state.
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
            restored(head_dim, half, &values.collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_unit_packs_up_to_the_number_of_slots() {
    for (head_dim, half) in head_dims().flat_map(|head_dim| HALVES.map(|half| (head_dim, half))) {
        for exponent in [0, 76, 99, 116, 122] {
            let slots = slots(head_dim);
            for escapes in [1, slots, slots + 1] {
                let mut values = page(head_dim, &[100, 115]);
                let stride = PAGE_TOKENS * head_dim / escapes;
                (0..escapes).for_each(|i| values[(i * stride) as usize] = bf16(exponent, i));
                let fits = (escapes <= slots).then_some((100, escapes as u8));
                assert_eq!(base_of(&restored(head_dim, half, &values)), fits, "{head_dim}: {escapes} of {exponent}");
            }
        }
    }
}

#[test]
fn escapes_are_in_order_wherever_they_stand() {
    for (head_dim, half) in head_dims().flat_map(|head_dim| HALVES.map(|half| (head_dim, half))) {
        // All in the first tile, all in the last, the first and last element of each.
        let corners = (0..4).flat_map(|tile| [tile * 16 * head_dim, (tile + 1) * 16 * head_dim - 1]);
        let last = (0..12).map(|i| 64 * head_dim - 1 - 3 * i);
        for places in [(0..12).collect::<Vec<u32>>(), last.collect(), corners.collect()] {
            let mut values = page(head_dim, &[100, 115]);
            for (i, at) in (0..).zip(&places) {
                values[*at as usize] = bf16(if i % 2 == 0 { 0 } else { 117 }, i);
            }
            let unit = restored(head_dim, half, &values);
            assert_eq!(base_of(&unit), Some((100, places.len() as u8)));
            let ends = (1..=4).map(|tile| places.iter().filter(|at| **at < tile * 16 * head_dim).count() as u8);
            assert!(ends.eq(unit.record[4..8].iter().copied()), "{:?}", unit.record);
        }
    }
}

#[test]
fn the_base_with_the_fewest_escapes_is_taken_and_of_equal_ones_the_largest() {
    let base = |exponents: &[(u32, usize)]| {
        let values: Vec<u16> = exponents.iter().flat_map(|(e, count)| vec![bf16(*e, 1); *count]).collect();
        choose_base(&values, 12)
    };
    assert_eq!(base(&[(100, 64)]), Some(85));
    // 85 and 84 leave one value out each; a second value below decides.
    assert_eq!(base(&[(100, 1), (85, 64), (84, 1)]), Some(85));
    assert_eq!(base(&[(100, 1), (85, 64), (84, 2)]), Some(84));
    assert_eq!(base(&[(100, 1), (85, 64), (84, 1), (83, 1)]), Some(83));
    // The lowest candidate, and one below.
    assert_eq!(base(&[(100, 1), (78, 64)]), Some(78));
    assert_eq!(base(&[(101, 1), (78, 64)]), None);
    // Codes end 24 below a base: where 85 has none for a value, a lower base has, and leaves the largest out.
    assert_eq!(base(&[(100, 1), (90, 64), (61, 1)]), Some(85));
    assert_eq!(base(&[(100, 1), (90, 64), (60, 1)]), Some(84));
    assert_eq!(base(&[(100, 1), (90, 64), (54, 1)]), Some(78));
    assert_eq!(base(&[(100, 1), (90, 64), (53, 1)]), None);
    assert_eq!(base(&[(100, 12), (90, 64), (60, 1)]), None);
    assert_eq!(base(&[(100, 11), (90, 64), (60, 1)]), Some(84));
    // Zeros always have a code.
    assert_eq!(base(&[(255, 64), (0, 12)]), Some(240));
    assert_eq!(base(&[(255, 64), (0, 13)]), None);
    assert_eq!(base(&[]), Some(0));
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
    assert_eq!(record[..8], [100, 0, 0, 0, 1, 2, 3, 3]);
    assert_eq!(field(&|r| r[0] = 241), ("base", 241, 240));
    assert_eq!(field(&|r| r[1] = 1), ("base", 100, 0));
    assert_eq!(field(&|r| r[..2].copy_from_slice(&[0, 3])), ("kind", 3, 2));
    assert_eq!(field(&|r| r[2] = 1), ("byte 2", 1, 0));
    assert_eq!(field(&|r| r[3] = 9), ("byte 3", 9, 0));
    assert_eq!(field(&|r| r[7] = 13), ("escapes up to a tile", 13, 12));
    assert_eq!(field(&|r| r[5] = 0), ("escapes up to the tile before", 1, 0));
    assert_eq!(field(&|r| r[7] = 255).0, "escapes up to a tile");
    assert_eq!(field(&|r| r[9] |= 1), ("element of an escape", 256 + u32::from(record[8]), 255));
    assert_eq!(field(&|r| r[31] = 1), ("an unused slot", 256, 0));
    // Codes: 99 below a base of 99, 256 above one of 240.
    assert_eq!(field(&|r| (r[0], r[9]) = (20, 0)), ("distance of an escape below the base", 24, 19));
    assert_eq!(field(&|r| (r[0], r[9]) = (240, 24 << 3)), ("exponent of an escape", 256, 255));
    // Two escapes of one tile must ascend.
    let before = u32::from(record[8]);
    let error = decode(&|r| {
        r[4] = 2;
        r.copy_within(8..10, 10);
    });
    assert_eq!((&error, error.code()), (&KvPageError::Order { before, element: before }, "kv-page-invalid"));
    // Units without tiles.
    assert_eq!(field(&|r| r[..2].copy_from_slice(&[0, 1])).0, "a byte of an unused slot");
    assert_eq!(field(&|r| (r[0], r[1]) = (0, 2)).0, "a byte of an unused slot");
}

#[test]
fn units_elsewhere_and_buffers_of_other_sizes_are_errors() {
    let (tiles, record) = parts(restored(32, KvHalf::Value, &page(32, &[1, 254])));
    let decode = |tiles: &[Vec<u8>; 4], record: &[u8], bf16: Option<&[u8]>| {
        decode_unit(32, KvHalf::Value, tiles, record, bf16).unwrap_err()
    };
    let mut named = record.clone();
    named[4..8].copy_from_slice(&7u32.to_le_bytes());
    assert_eq!(decode(&tiles, &named, None), KvPageError::UnitMissing { index: 7 });
    let size = |what, bytes, expected| KvPageError::Size { what, bytes, expected };
    assert_eq!(decode(&tiles, &record, Some(&[0; 8])), size("BF16 unit", 8, 4096));
    assert_eq!(decode(&tiles, &record[..31], None), size("record", 31, 32));
    let mut short = tiles.clone();
    short[2].pop();
    assert_eq!(decode(&short, &record, None), size("tile", 767, 768));
    let mut lost = vec![0; 32];
    lost[1] = KIND_LOST;
    assert_eq!(decode(&tiles, &lost, None), KvPageError::Lost);
    lost[4] = 1;
    assert!(matches!(decode(&tiles, &lost, None), KvPageError::Record { what: "index of a lost unit", .. }));
    for head_dim in [0, 8, 144, u32::MAX] {
        let error = decode_unit(head_dim, KvHalf::Key, &tiles, &record, None).unwrap_err();
        assert_eq!(error, KvPageError::HeadDim { head_dim });
    }
}

/// Values of a unit: most exponents in a range, some anywhere.
fn units() -> impl Strategy<Value = (u32, KvHalf, Vec<u16>)> {
    let shape = (1..=8u32, prop::bool::ANY, 0..=255u32, 1..=24u32, 0..=24usize);
    shape.prop_flat_map(|(steps, value, first, width, others)| {
        let count = (PAGE_TOKENS * 16 * steps) as usize;
        let usual = prop::collection::vec((0..width, prop::num::u16::ANY), count);
        let others =
            prop::collection::vec((prop::sample::select(vec![0, 1, 5, 24, 40]), 0..count, prop::num::u16::ANY), others);
        (usual, others).prop_map(move |(usual, others)| {
            let mut values: Vec<u16> =
                usual.into_iter().map(|(e, rest)| bf16((first + e).min(255), rest.into())).collect();
            for (below, at, rest) in others {
                // Zeros, values near the window, and any pattern.
                values[at] = match below {
                    0 => rest & 0x807f,
                    40 => rest,
                    _ => bf16(first.saturating_sub(below), rest.into()),
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

    /// Any bytes decode or are an error; what decodes has as many values as a page.
    #[test]
    fn any_bytes_decode_or_are_refused(
        head_dim in prop::sample::select(vec![0, 16, 24, 48, 80, 96, 128, 256, u32::MAX]),
        kind in 0..=3u8,
        usual in prop::bool::ANY,
        record in prop::collection::vec(prop::num::u8::ANY, 0..=64),
        bytes in prop::collection::vec(prop::num::u8::ANY, 3072),
    ) {
        let mut record = record;
        let mut tiles = [(); 4].map(|()| bytes.clone());
        if usual && takes(head_dim) {
            record.resize(record_bytes(head_dim) as usize, 0);
            record[1..4].copy_from_slice(&[kind, 0, 0]);
            tiles.iter_mut().for_each(|tile| tile.truncate(tile_bytes(head_dim) as usize));
        }
        let unit: Vec<u8> = bytes.iter().copied().cycle().take(head_dim.min(1024) as usize * 128).collect();
        for half in HALVES {
            if let Ok(values) = decode_unit(head_dim, half, &tiles, &record, Some(&unit)) {
                prop_assert_eq!(values.len() as u32, PAGE_TOKENS * head_dim);
            }
        }
    }

    /// A damaged record of a real unit never reads out of bounds, and changes values of no more than it names.
    #[test]
    fn damaged_records_decode_or_are_refused((head_dim, half, values) in units(), at in 0..48usize, to in prop::num::u8::ANY) {
        let unit = encode_unit(head_dim, half, &values);
        let mut record = unit.record.clone();
        let at = at % record.len();
        record[at] = to;
        if let Ok(decoded) = decode_unit(head_dim, half, &unit.tiles, &record, unit.bf16.as_deref()) {
            let differ = decoded.iter().zip(&values).filter(|(a, b)| a != b).count();
            // The base and the kind are of all values.
            prop_assert!(at < 2 || differ <= 2 * slots(head_dim) as usize, "byte {at}: {differ} values differ");
            prop_assert!(decoded.iter().zip(&values).all(|(a, b)| a & 0x807f == b & 0x807f) || at == 1);
        }
    }
}

fn xorshift(mut state: u32) -> u32 {
    state ^= state << 13;
    state ^= state >> 17;
    state ^ state << 5
}

/// A name, the slots of a record, exponents and how many values have each.
type Case = (&'static str, u32, Vec<(u32, u32)>);

/// `tests/parity/kv_golden.json`, which `kv_coverage.py` holds its own choice of bases against.
///
/// `UPDATE_DOCS=1` writes it.
#[test]
fn golden_choices_are_those_of_this_encoder() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/kv_golden.json");
    let mut state = 28;
    let mut draw = |below: u32| {
        state = xorshift(state);
        state % below
    };
    let mut cases: Vec<Case> = vec![
        ("zeros", 12, vec![(0, 1024)]),
        ("subnormals and the smallest numbers", 12, vec![(0, 500), (1, 500), (15, 24)]),
        ("the largest exponent", 20, vec![(255, 100), (240, 100), (0, 20)]),
        ("one zero too many", 20, vec![(255, 100), (240, 100), (0, 21)]),
        ("a tie", 12, vec![(100, 1), (85, 64), (84, 1)]),
        ("a lower base", 12, vec![(100, 1), (85, 64), (84, 2)]),
        ("the lowest candidate", 12, vec![(100, 1), (78, 64)]),
        ("below the lowest candidate", 12, vec![(101, 1), (78, 64)]),
        ("the lowest code", 12, vec![(100, 1), (90, 64), (61, 1)]),
        ("no code at the highest base", 12, vec![(100, 1), (90, 64), (60, 1)]),
        ("no code", 12, vec![(100, 1), (90, 64), (53, 1)]),
        ("bases from 0", 12, vec![(18, 3), (15, 40), (2, 8), (1, 4), (0, 1)]),
    ];
    for _ in 0..200 {
        let (first, width) = (draw(240), 1 + draw(18));
        let usual = (0..1 + draw(6)).map(|_| ((first + draw(width)).min(255), 1 + draw(300)));
        let mut runs: Vec<(u32, u32)> = usual.collect();
        runs.extend((0..draw(4)).map(|_| ((first + 30).saturating_sub(draw(60)).min(255), 1 + draw(8))));
        cases.push(("drawn", if draw(2) == 0 { 12 } else { 20 }, runs));
    }
    let lines = cases.iter().map(|(name, slots, runs)| {
        let values: Vec<u16> = runs.iter().flat_map(|(e, count)| (0..*count).map(|i| bf16(*e, i))).collect();
        let choice = choose_base(&values, *slots).map(|base| {
            let inside = u32::from(base)..=u32::from(base) + 15;
            [usize::from(base), values.iter().filter(|value| !inside.contains(&exponent(**value))).count()]
        });
        let runs: Vec<[u32; 2]> = runs.iter().map(|(e, count)| [e << 7, *count]).collect();
        serde_json::json!({"name": name, "slots": slots, "runs": runs, "choice": choice}).to_string()
    });
    let text = format!("{{\"cases\": [\n{}\n]}}\n", lines.collect::<Vec<_>>().join(",\n"));
    let packed = text.matches("\"choice\":[").count();
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
    let slot = u16::from_le_bytes([unit.record[8], unit.record[9]]);
    let mut text = format!(
        "```text\nrecord   {} and 22 zeros: base {}, 1 escape, slot {slot:04x}: element {}, code {}\n",
        hex(&unit.record[..10]),
        unit.record[0],
        slot & 0x7ff,
        slot >> 11
    );
    assert!(unit.record[10..].iter().all(|byte| *byte == 0));
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
    let own = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = own.split_once(BEGIN).expect("the first comment");
    let (_, after) = rest.split_once(END).expect("the second comment");
    assert!(text.lines().all(|line| line.len() <= 120), "{text}");
    let renewed = [before, BEGIN, &text, END, after].concat();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, renewed).unwrap();
    } else {
        assert_eq!(own, renewed, "UPDATE_DOCS=1 writes docs/kv-cache.md");
    }
}
