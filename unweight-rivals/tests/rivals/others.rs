//! Compares ZipServ, MatVANS and tANS with fixtures (`fixtures/others/make.py`) and oracles, and damages their data.

use std::{collections::HashMap, fs, path::Path};

use proptest::prelude::*;
use unweight_format::{
    Histogram,
    safetensors::{Header, SOURCE_HEADER_MAX},
    testing::{Random, Weights},
};
use unweight_rivals::{
    matvans::{self, Layout},
    tans, zipserv,
};

/// Returns shapes and bytes of the tensors of a fixture.
fn fixture(name: &str) -> HashMap<String, (Vec<usize>, Vec<u8>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/others/{name}.safetensors"));
    let bytes = fs::read(path).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64, SOURCE_HEADER_MAX).unwrap();
    let of = |at: u64, count: u64| bytes[at as usize..(at + count) as usize].to_vec();
    header.tensors.iter().map(|t| (t.name.clone(), (t.shape.clone(), of(t.offset, t.bytes)))).collect()
}

fn u16s(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().unwrap())).collect()
}

fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn i8s(bytes: &[u8]) -> Vec<i8> {
    bytes.iter().map(|&byte| byte as i8).collect()
}

/// Changes one of the numbers, or their count.
fn damage<T: Copy + Default + std::ops::BitXorAssign>(
    random: &mut Random,
    numbers: &mut Vec<T>,
    bit: impl FnOnce(&mut Random) -> T,
) {
    match random.below(8) {
        0 => _ = numbers.pop(),
        1 => numbers.push(T::default()),
        _ if numbers.is_empty() => {}
        _ => {
            let at = random.below(numbers.len() as u64) as usize;
            numbers[at] ^= bit(random);
        }
    }
}

#[test]
fn zipserv_matches_its_description() {
    let all = fixture("zipserv");
    let (shape, weights) = &all["weights"];
    let encoded = zipserv::encode(weights, shape[0], shape[1]).unwrap();
    let tiles = encoded.bitmaps.iter().flatten().flat_map(|map| map.to_le_bytes());
    assert_eq!(tiles.collect::<Vec<u8>>(), all["bitmaps"].1);
    assert_eq!(encoded.first, all["first"].1[0]);
    assert_eq!(encoded.sign_mantissa, all["sign_mantissa"].1);
    assert_eq!(encoded.full, u16s(&all["full"].1));
    assert_eq!(encoded.blocks.concat(), u32s(&all["blocks"].1));
    assert_eq!(encoded.strips.concat(), u32s(&all["strips"].1));
    assert_eq!(&encoded.decode().unwrap(), weights);
}

#[test]
fn zipserv_round_trips_every_bit_pattern() {
    // All bit patterns, and weights that are mostly in the window.
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (weights, rows, cols) in [
        (all, 256, 256),
        (Weights::TRAINED.bytes(192 * 320, 3), 192, 320),
        (vec![0; 2 * 64 * 64], 64, 64),
        ([0xff; 2 * 64 * 128].to_vec(), 64, 128),
    ] {
        let encoded = zipserv::encode(&weights, rows, cols).unwrap();
        assert!(encoded.decode().unwrap() == weights);
        for (index, element) in u16s(&weights).into_iter().enumerate().step_by(7) {
            assert_eq!(zipserv::oracle::element(&encoded, index / cols, index % cols), Some(element));
        }
    }
    // The window that covers most elements, the lowest one of ties.
    let mut counts = Histogram::default();
    assert_eq!(zipserv::window(&counts), 0);
    counts.add(120, 5);
    assert_eq!(zipserv::window(&counts), 114);
    counts.add(255, 50);
    assert_eq!(zipserv::window(&counts), 249);
}

#[test]
fn zipserv_rejects_damage() {
    for (rows, cols) in [(0, 64), (64, 0), (63, 64), (64, 65), (usize::MAX - 63, 64)] {
        let error = zipserv::encode(&[], rows, cols).unwrap_err();
        assert!(matches!(error, zipserv::Error::Shape { .. } | zipserv::Error::Count { .. }), "{error}");
    }
    let weights = Weights::TRAINED.bytes(128 * 128, 9);
    assert!(matches!(zipserv::encode(&weights[1..], 128, 128), Err(zipserv::Error::Size { part: "weights", .. })));
    let encoded = zipserv::encode(&weights, 128, 128).unwrap();
    let mut random = Random::new(4);
    let mut errors = 0;
    for round in 0..3000 {
        let mut damaged = encoded.clone();
        let offset = |random: &mut Random, offsets: &mut Vec<[u32; 2]>| {
            let at = random.below(offsets.len() as u64) as usize;
            offsets[at][random.below(2) as usize] ^= 1u32 << random.below(31);
        };
        match round % 7 {
            0 => offset(&mut random, &mut damaged.blocks),
            1 => offset(&mut random, &mut damaged.strips),
            2 => damage(&mut random, &mut damaged.bitmaps[round % 3], |random| 1 << random.below(64)),
            3 => damage(&mut random, &mut damaged.full, |random| 1 << random.below(16)),
            4 => damaged.rows = random.below(400) as usize,
            5 => damaged.first = random.below(256) as u8,
            _ => damage(&mut random, &mut damaged.sign_mantissa, |random| 1 << random.below(8)),
        }
        match damaged.decode() {
            Ok(got) => {
                let at = random.below(128 * 128) as usize;
                let element = zipserv::oracle::element(&damaged, at / 128, at % 128).unwrap();
                assert_eq!(got[2 * at..][..2], element.to_le_bytes());
            }
            Err(_) => {
                assert!(round % 7 != 5 || damaged.first > 249);
                errors += 1;
            }
        }
    }
    assert!(errors > 1500, "{errors}");
}

#[test]
fn matvans_equals_its_reference_encoder() {
    let all = fixture("matvans");
    let (shape, values) = (&all["values"].0, i8s(&all["values"].1));
    for (name, layout) in [("rows", Layout::Rows), ("stripes", Layout::Stripes)] {
        let encoded = matvans::encode(&values, shape[0], shape[1], layout).unwrap();
        assert_eq!(encoded.tables.symbols.to_vec(), i8s(&all["symbols"].1));
        assert_eq!(encoded.tables.firsts.to_vec(), all["firsts"].1);
        assert_eq!(encoded.tables.counts.to_vec(), all["counts"].1);
        assert_eq!(encoded.offsets, u32s(&all[&format!("{name}.offsets")].1));
        assert_eq!(encoded.words, u32s(&all[&format!("{name}.words")].1));
        assert_eq!(encoded.decode().unwrap(), values);
    }
}

#[test]
fn matvans_warp_per_row_equals_its_reference_encoder() {
    let all = fixture("matvans");
    let (shape, values) = (&all["lanes.values"].0, i8s(&all["lanes.values"].1));
    let encoded = matvans::encode(&values, shape[0], shape[1], Layout::Lanes).unwrap();
    // The original's tables: the value of each 256th, starting with the smallest, and where the parts of each value
    // begin.
    let (smallest, ends, value) = (i8s(&all["lanes.least"].1)[0], &all["lanes.cdf"].1, &all["lanes.ppf"].1);
    for (part, &value) in value.iter().enumerate() {
        let value = usize::from(value);
        assert_eq!(encoded.tables.symbols[part], smallest + value as i8);
        assert_eq!(encoded.tables.firsts[part], ends[value]);
        assert_eq!(encoded.tables.counts[part], ends[value + 1].wrapping_sub(ends[value]));
    }
    // The original counts 16-bit words.
    let offsets: Vec<u32> = encoded.offsets.iter().map(|offset| 8 * offset).collect();
    assert_eq!(offsets, u32s(&all["lanes.offsets"].1));
    assert_eq!(encoded.words, u32s(&all["lanes.words"].1));
    assert_eq!(encoded.decode().unwrap(), values);
}

/// Returns normally distributed values.
fn values(seed: u64, count: usize, deviation: f64) -> Vec<i8> {
    let mut random = Random::new(seed);
    (0..count).map(|_| (random.normal() * deviation).round().clamp(-60.0, 60.0) as i8).collect()
}

#[test]
fn matvans_rejects_unsupported_values() {
    assert!(matches!(matvans::encode(&[], 1, 0, Layout::Rows), Err(matvans::Error::Shape { .. })));
    assert!(matches!(matvans::encode(&[0; 64], 1, 64, Layout::Rows), Err(matvans::Error::Shape { .. })));
    assert!(matches!(matvans::encode(&[0; 128], 1, 128, Layout::Lanes), Err(matvans::Error::Shape { .. })));
    assert!(matches!(matvans::encode(&[0; 124], 31, 4, Layout::Stripes), Err(matvans::Error::Shape { .. })));
    assert!(matches!(matvans::encode(&[0; 64], 1, 128, Layout::Rows), Err(matvans::Error::Size { .. })));
    let many: Vec<i8> = (0..256).map(|i| (i - 128) as i8).collect();
    assert_eq!(matvans::encode(&many, 2, 128, Layout::Rows), Err(matvans::Error::Values { got: 256, limit: 128 }));
    let wide = [many.clone(), many.clone()].concat();
    assert_eq!(matvans::encode(&wide, 1, 512, Layout::Lanes), Err(matvans::Error::Values { got: 256, limit: 255 }));
    for values in [[&wide[1..256], &wide[..1 + 256]].concat().iter().map(|&v| v.max(-127)).collect(), vec![127; 512]] {
        let encoded = matvans::encode(&values, 1, 512, Layout::Lanes).unwrap();
        assert_eq!(encoded.decode().unwrap(), values);
        assert_eq!(matvans::oracle::decode(&encoded).unwrap(), values);
    }
    // As many values as there are parts, and a single value.
    for values in [many[..128].to_vec(), vec![-7; 128]] {
        let encoded = matvans::encode(&values, 1, 128, Layout::Rows).unwrap();
        assert_eq!(encoded.decode().unwrap(), values);
        assert_eq!(matvans::oracle::decode(&encoded).unwrap(), values);
    }
}

#[test]
fn matvans_rejects_damage() {
    let values = values(1, 64 * 256, 9.0);
    let mut random = Random::new(2);
    for (layout, rows, cols) in [(Layout::Rows, 64, 256), (Layout::Stripes, 64, 256), (Layout::Lanes, 32, 512)] {
        let encoded = matvans::encode(&values, rows, cols, layout).unwrap();
        let (mut errors, mut same) = (0, 0);
        for round in 0..2000 {
            let mut damaged = encoded.clone();
            let at = random.below(128) as usize;
            match round % 7 {
                0 => damage(&mut random, &mut damaged.offsets, |random| 1 << random.below(31)),
                1 => damaged.tables.counts[at] ^= 1 << random.below(8),
                2 => damaged.tables.firsts[at] ^= 1 << random.below(8),
                3 => damaged.tables.symbols[at] ^= 1 << random.below(7),
                4 => damaged.rows = random.below(100) as usize,
                5 => damaged.cols = random.below(1000) as usize,
                _ => damage(&mut random, &mut damaged.words, |random| 1 << random.below(32)),
            }
            match damaged.decode() {
                Ok(got) => {
                    assert_eq!(matvans::oracle::decode(&damaged), Some(got));
                    same += 1;
                }
                Err(_) => errors += 1,
            }
        }
        assert!(errors > 1200 && same > 20, "{errors} {same}");
    }
}

#[test]
fn tans_matches_its_description() {
    let all = fixture("tans");
    let (shape, data) = &all["data"];
    let encoded = tans::encode(data, shape[1], &tans::QWEN3_14B).unwrap();
    assert_eq!(encoded.frequencies, u16s(&all["frequencies"].1));
    assert_eq!(encoded.slabs, u32s(&all["slabs"].1));
    assert_eq!(encoded.states, u16s(&all["states"].1));
    assert_eq!(encoded.partial, all["partial"].1);
    assert_eq!(encoded.offsets.iter().map(|&offset| offset as u32).collect::<Vec<_>>(), u32s(&all["offsets"].1));
    assert_eq!(encoded.rest, all["rest"].1);
    assert_eq!(&encoded.decode().unwrap(), data);
    assert_eq!(&tans::oracle::decode(&encoded).unwrap(), data);
}

/// Returns FP8 bytes whose exponents have these shares.
fn fp8(seed: u64, count: usize, shares: &[f32; 16]) -> Vec<u8> {
    let mut random = Random::new(seed);
    let sum: f64 = shares.iter().map(|&share| f64::from(share)).sum();
    let byte = |random: &mut Random| {
        let mut left = random.uniform() * sum;
        let exponent = shares.iter().position(|&share| {
            left -= f64::from(share);
            left < 0.0 && share > 0.0
        });
        let exponent = exponent.unwrap_or(13) as u8;
        (random.below(2) as u8) << 7 | exponent << 3 | random.below(8) as u8
    };
    (0..count).map(|_| byte(&mut random)).collect()
}

#[test]
fn tans_rejects_unsupported_values() {
    let shares = tans::QWEN3_14B;
    assert_eq!(tans::encode(&[0; 24], 24, &shares), Err(tans::Error::Stream { got: 24 }));
    assert_eq!(tans::encode(&[0; 16], 0, &shares), Err(tans::Error::Stream { got: 0 }));
    assert!(matches!(tans::encode(&[0; 24], 16, &shares), Err(tans::Error::Size { part: "bytes", .. })));
    for bad in [[0.0; 16], [f32::NAN; 16], [-1.0; 16], [f32::INFINITY; 16]] {
        assert!(matches!(tans::encode(&[0; 16], 16, &bad), Err(tans::Error::Share { exponent: 0, .. })));
    }
    let mut none = [0.0; 16];
    none[3] = 1.0;
    assert_eq!(tans::encode(&[4 << 3; 16], 16, &none), Err(tans::Error::Unknown { exponent: 4 }));
    let only = tans::encode(&[3 << 3; 160], 16, &none).unwrap();
    assert_eq!(only.decode().unwrap(), [3 << 3; 160]);
    // Shares whose product underflows.
    none[5] = 1e-30;
    assert_eq!(tans::encode(&[5 << 3; 16], 16, &none), Err(tans::Error::Unknown { exponent: 5 }));
    assert_eq!(tans::encode(&[], 16, &shares).unwrap().decode().unwrap(), [0u8; 0]);
}

#[test]
fn tans_rejects_damage() {
    let data = fp8(3, 200 * 64, &tans::QWEN3_14B);
    let encoded = tans::encode(&data, 64, &tans::QWEN3_14B).unwrap();
    let mut random = Random::new(5);
    let (mut errors, mut same) = (0, 0);
    for round in 0..2000 {
        let mut damaged = encoded.clone();
        match round % 7 {
            0 => damage(&mut random, &mut damaged.frequencies, |random| 1 << random.below(13)),
            1 => damage(&mut random, &mut damaged.slabs, |random| 1 << random.below(32)),
            2 => damage(&mut random, &mut damaged.states, |random| 1 << random.below(16)),
            3 => damage(&mut random, &mut damaged.partial, |random| 1 << random.below(8)),
            4 => damage(&mut random, &mut damaged.offsets, |random| 1 << random.below(31)),
            5 => damaged.per_stream = 16 * random.below(9) as usize,
            _ => damage(&mut random, &mut damaged.rest, |random| 1 << random.below(8)),
        }
        match damaged.decode() {
            Ok(got) => {
                assert_eq!(tans::oracle::decode(&damaged), Some(got));
                same += 1;
            }
            Err(_) => errors += 1,
        }
    }
    assert!(errors > 1200 && same > 100, "{errors} {same}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn zipserv_round_trips(seed: u64, down in 1usize..4, across in 1usize..4, deviation in 0.0001f64..100.0) {
        let weights = (Weights::Gaussian { sigma: deviation }).bytes(down * across * 4096, seed);
        let encoded = zipserv::encode(&weights, 64 * down, 64 * across).unwrap();
        prop_assert!(encoded.decode().unwrap() == weights);
    }

    #[test]
    fn matvans_round_trips(seed: u64, down in 1usize..4, across in 1usize..5, deviation in 0.01f64..40.0) {
        for layout in [Layout::Rows, Layout::Stripes, Layout::Lanes] {
            let (row_step, col_step) = layout.steps();
            let (rows, cols) = (row_step * down, col_step * across);
            let values = values(seed, rows * cols, deviation);
            let encoded = matvans::encode(&values, rows, cols, layout).unwrap();
            prop_assert_eq!(&encoded.decode().unwrap(), &values);
            prop_assert_eq!(&matvans::oracle::decode(&encoded).unwrap(), &values);
        }
    }

    #[test]
    fn tans_round_trips(
        seed: u64, streams in 1usize..300, tiles in 1usize..9, shares in prop::array::uniform16(0.0f32..1.0),
    ) {
        prop_assume!(shares.iter().all(|&share| share > 1e-3));
        let data = fp8(seed, streams * tiles * 16, &shares);
        let encoded = tans::encode(&data, tiles * 16, &shares).unwrap();
        prop_assert!(encoded.decode().unwrap() == data);
        prop_assert_eq!(encoded.frequencies.iter().map(|&f| u32::from(f)).sum::<u32>(), 4096);
    }
}
