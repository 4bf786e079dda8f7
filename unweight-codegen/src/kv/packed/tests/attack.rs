//! Compares units of hostile values with a second encoder and decoder, which follow docs/kv-cache.md alone.
//!
//! `KV_ATTACK_UNITS` sets the number of units; the default is 2000.

use super::*;

/// A deterministic random number generator.
struct Draw(u64);

impl Draw {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (shifted, turn) = ((self.0 >> 18 ^ self.0) >> 27, self.0 >> 59);
        (shifted as u32).rotate_right(turn as u32)
    }

    fn below(&mut self, end: u32) -> u32 {
        ((u64::from(self.bits()) * u64::from(end)) >> 32) as u32
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u32) as usize]
    }
}

/// Zeros, subnormals, the smallest and largest numbers, infinities, quiet and signalling NaN.
const SPECIAL: [u16; 20] = [
    0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x807f, 0x0080, 0x8080, 0x00ff, 0x7f00, 0x7f7f, 0xff7f, 0x7f80, 0xff80,
    0x7f81, 0xff81, 0x7fbf, 0x7fc0, 0xffc1, 0xffff,
];

/// Returns a unit `[64][head_dim]` of a random kind.
fn hostile(draw: &mut Draw, head_dim: u32) -> Vec<u16> {
    let (steps, count) = (head_dim / 16, (64 * head_dim) as usize);
    let kind = draw.below(10);
    if kind == 0 {
        return (0..count).map(|_| draw.of(&SPECIAL)).collect();
    }
    if kind == 1 {
        return (0..count).map(|_| draw.bits() as u16).collect();
    }
    // All values are in the window of their step, and the first token has its last exponent.
    let base_kind = draw.below(4);
    let bases: Vec<u32> = (0..steps)
        .map(|_| match base_kind {
            0 => draw.of(&[0, 1, 2, 30, 31, 32, 238, 239, 240]),
            1 => 240,
            _ => draw.below(241),
        })
        .collect();
    let width = draw.of(&[1, 2, 16, 16]);
    let mut values: Vec<u16> = (0..count)
        .map(|at| {
            let base = bases[at % head_dim as usize / 16];
            let above = if at < head_dim as usize { 15 } else { draw.below(width) };
            bf16(base + above, draw.bits())
        })
        .collect();
    // The number of escapes, and where they are.
    let slots = slots(head_dim);
    let escapes = match kind {
        2 => 0,
        3 => 1,
        4 => slots - 1,
        5 | 6 => slots,
        7 => slots + 1,
        _ => draw.below(2 * slots),
    };
    let pattern = draw.below(5);
    let (tile, column) = (draw.below(4), draw.below(head_dim));
    let mut used = std::collections::BTreeSet::new();
    for _ in 0..1000 {
        if used.len() as u32 == escapes {
            break;
        }
        let (token, index) = match pattern {
            // In one tile, in one channel, in the corners, in one lane, or anywhere.
            0 => (tile * 16 + draw.below(16), draw.below(head_dim)),
            1 => (draw.below(64), column),
            2 => (draw.of(&[0, 1, 15, 16, 47, 48, 62, 63]), draw.of(&[0, 1, head_dim - 2, head_dim - 1])),
            3 => (tile * 16 + draw.of(&[3, 11]), column / 16 * 16 + draw.of(&[2, 3, 10, 11])),
            _ => (draw.below(64), draw.below(head_dim)),
        };
        // The first token has the largest exponents.
        let at = (token * head_dim + index) as usize;
        let base = bases[index as usize / 16];
        if base == 0 || !used.insert(at) {
            continue;
        }
        let below = draw.of(&[1, 2, 15, 16, 30, 31, 31, base, base]);
        let below = if draw.below(40) == 0 { 32 } else { below };
        values[at] = bf16(base.saturating_sub(below), draw.bits());
    }
    values
}

/// Returns the token of the tile and the element for half `h` of register `r` of lane `4g + t` in step `s`, according
/// to docs/kv-cache.md.
fn document_place(half: KvHalf, s: u32, lane: u32, r: u32, h: u32) -> (u32, u32) {
    let (g, t) = (lane / 4, lane % 4);
    match half {
        KvHalf::Key => (g + 8 * (r / 2), 16 * s + 8 * (r % 2) + 2 * t + h),
        KvHalf::Value => (2 * t + h + 8 * (r % 2), 16 * s + 8 * (r / 2) + g),
    }
}

fn document_byte(head_dim: u32, q: u32, l: u32) -> u32 {
    let q3 = 3 * (head_dim / 16);
    let w = q3 / 4 * 4;
    let (r, i) = (w * 128, q.wrapping_sub(w));
    match q3 % 4 {
        _ if q < w => q / 4 * 512 + l * 16 + q % 4 * 4,
        1 => r + l * 4,
        2 => r + l * 8 + i * 4,
        _ if i < 2 => r + l * 8 + i * 4,
        _ => r + 256 + l * 4,
    }
}

/// Returns the record and the tiles of a unit; `None` if it needs a BF16 unit.
fn document_encode(head_dim: u32, half: KvHalf, values: &[u16]) -> Option<(Vec<u8>, Vec<Vec<u8>>)> {
    let exponent = |value: u16| i32::from(value >> 7 & 255);
    let mut base = [0i32; 8];
    for s in 0..head_dim / 16 {
        let exponents = (0..64 * head_dim).filter(|at| at % head_dim / 16 == s).map(|at| exponent(values[at as usize]));
        base[s as usize] = exponents.max().unwrap_or(0).max(15) - 15;
    }
    let mut record = vec![0u8; if head_dim <= 80 { 32 } else { 48 }];
    (0..8).for_each(|s| record[s] = base[s] as u8);
    let (mut slot, record_end) = (16, record.len());
    let mut tiles = Vec::new();
    for tile in 0..4 {
        let mut bytes = vec![0u8; 24 * head_dim as usize];
        for (s, lane) in (0..head_dim / 16).flat_map(|s| (0..32).map(move |lane| (s, lane))) {
            let mut f = [0u32; 4];
            for (r, h) in (0..4).flat_map(|r| (0..2).map(move |h| (r, h))) {
                let (token, element) = document_place(half, s, lane, r, h);
                let value = values[((tile * 16 + token) * head_dim + element) as usize];
                let (e, base) = (exponent(value), base[s as usize]);
                let nibble = if e >= base {
                    e - base
                } else {
                    let code = if e == 0 { 31 } else { e - (base - 31) };
                    if code < 0 || slot == record_end {
                        return None;
                    }
                    let element = (s * 32 + lane) * 8 + r * 2 + h;
                    record[slot..slot + 2].copy_from_slice(&((code as u16) << 11 | element as u16).to_le_bytes());
                    slot += 2;
                    0
                };
                let packed_value = u32::from(value >> 15) << 15 | (nibble as u32) << 7 | u32::from(value & 0x7f);
                f[r as usize] |= packed_value << (16 * h);
            }
            let words = [
                f[0] | (f[3] << 4) & 0x7800_7800,
                f[1] | (f[3] << 8) & 0x7800_7800,
                f[2] | f[3].rotate_right(4) & 0x7800_7800,
            ];
            for (i, word) in (0..).zip(words) {
                let at = document_byte(head_dim, 3 * s + i, lane) as usize;
                bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
        }
        record[12 + tile as usize] = ((slot - 16) / 2) as u8;
        tiles.push(bytes);
    }
    Some((record, tiles))
}

fn document_decode(head_dim: u32, half: KvHalf, record: &[u8], tiles: &[Vec<u8>]) -> Vec<u16> {
    let mut values = vec![0u16; 64 * head_dim as usize];
    for (tile, bytes) in (0..4u32).zip(tiles) {
        let word = |q: u32, lane: u32| {
            let at = document_byte(head_dim, q, lane) as usize;
            u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
        };
        let at = |element: u32| {
            let (s, lane) = (element / 256, element / 8 % 32);
            let (token, channel) = document_place(half, s, lane, element / 2 % 4, element % 2);
            ((tile * 16 + token) * head_dim + channel) as usize
        };
        for (s, lane) in (0..head_dim / 16).flat_map(|s| (0..32).map(move |lane| (s, lane))) {
            let b = u32::from(record[s as usize]) * 0x0080_0080;
            let w: [u32; 3] = std::array::from_fn(|i| word(3 * s + i as u32, lane));
            let last = (w[0] >> 4) & 0x0780_0780 | (w[1] >> 8) & 0x0078_0078 | w[2].rotate_left(4) & 0x8007_8007;
            let p = [(w[0] & 0x87ff_87ff) + b, (w[1] & 0x87ff_87ff) + b, (w[2] & 0x87ff_87ff) + b, last + b];
            for i in 0..8 {
                values[at((s * 32 + lane) * 8 + i)] = (p[i as usize / 2] >> (16 * (i % 2))) as u16;
            }
        }
        let first = if tile == 0 { 0 } else { record[11 + tile as usize] };
        for slot in first..record[12 + tile as usize] {
            let slot = u16::from_le_bytes(record[16 + 2 * usize::from(slot)..][..2].try_into().unwrap());
            let (element, code) = (u32::from(slot & 0x7ff), u32::from(slot >> 11));
            let base = u32::from(record[(element / 256) as usize]);
            let exponent = if code == 31 { 0 } else { base + code - 31 };
            let value = &mut values[at(element)];
            *value = *value & 0x807f | (exponent << 7) as u16;
        }
    }
    values
}

#[test]
fn hostile_units_are_restored_as_the_document_says() {
    let count = std::env::var("KV_ATTACK_UNITS").ok().and_then(|count| count.parse().ok()).unwrap_or(2000u64);
    let (mut packed, mut full, mut bf16_units) = (0u64, 0u64, 0u64);
    for seed in 0..count {
        let draw = &mut Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        // Mostly small heads, because they are fast.
        let head_dim = 16 * (1 + if draw.below(3) == 0 { draw.below(8) } else { seed as u32 % 2 });
        let half = HALVES[draw.below(2) as usize];
        let values = hostile(draw, head_dim);
        let unit = encode_unit(head_dim, half, &values);
        let what = || format!("seed {seed}, head_dim {head_dim}, {half:?}");
        let decoded = decode_unit(head_dim, half, &unit.tiles, &unit.record, unit.bf16.as_deref());
        assert!(decoded.as_ref() == Ok(&values), "{}", what());
        match document_encode(head_dim, half, &values) {
            Some((record, tiles)) => {
                assert!(unit.bf16.is_none() && unit.record == record && unit.tiles[..] == tiles, "{}", what());
                assert!(document_decode(head_dim, half, &record, &tiles) == values, "{}", what());
                (packed, full) = (packed + 1, full + u64::from(u32::from(record[15]) == slots(head_dim)));
            }
            None => {
                assert!(unit.bf16.is_some(), "{}", what());
                bf16_units += 1;
            }
        }
    }
    eprintln!("{packed} packed, {full} of them with all slots; {bf16_units} in BF16 units");
    assert!(packed > count / 4 && full > count / 20 && bf16_units > count / 10);
}
