#![no_main]
//! Packed KV pages: arbitrary bytes, units of arbitrary values, and units with changed bytes in their record.

use libfuzzer_sys::fuzz_target;
use unweight_codegen::kv::{
    KvHalf, PAGE_TOKENS,
    packed::{KvPageError, Record, decode_unit, encode_unit, record_bytes, slots, tile_bytes, unit_bytes},
};

/// Bytes of the input, repeated.
fn filled(data: &[u8], len: u32) -> Vec<u8> {
    let data = if data.is_empty() { &[0] } else { data };
    data.iter().copied().cycle().take(len as usize).collect()
}

/// Accepted bytes decode to the values of a unit, which encode to a unit with the same values.
fn check(head_dim: u32, half: KvHalf, tiles: &[Vec<u8>; 4], record: &[u8], bf16: Option<&[u8]>) {
    let parsed = Record::parse(head_dim, record);
    let values = match decode_unit(head_dim, half, tiles, record, bf16) {
        Ok(values) => values,
        Err(error) => {
            assert!(!error.code().is_empty() && !error.to_string().is_empty());
            let stored = matches!(parsed, Ok(Record::Packed { .. }));
            assert!(!stored || matches!(error, KvPageError::Size { .. }), "a valid record is rejected: {error}");
            return;
        }
    };
    assert!(values.len() as u32 == PAGE_TOKENS * head_dim);
    round_trip(head_dim, half, &values);
}

/// Every bit is restored, and the record contains exactly the escapes of the values.
fn round_trip(head_dim: u32, half: KvHalf, values: &[u16]) {
    let unit = encode_unit(head_dim, half, values);
    let decoded = decode_unit(head_dim, half, &unit.tiles, &unit.record, unit.bf16.as_deref()).expect("just encoded");
    assert!(decoded == values, "the decoded values differ");
    match Record::parse(head_dim, &unit.record).expect("just encoded") {
        Record::Packed { bases, escapes } => {
            let of = |at: usize| u16::from(bases[at % head_dim as usize / 16]);
            let outside = |(at, value): &(usize, &u16)| (**value >> 7 & 0xff).wrapping_sub(of(*at)) > 15;
            let outside = values.iter().enumerate().filter(outside).count();
            assert!(unit.bf16.is_none() && outside == escapes.iter().map(Vec::len).sum::<usize>());
            assert!(outside <= slots(head_dim) as usize);
        }
        record => assert!(record == Record::Bf16 { index: 0 } && unit.bf16.is_some()),
    }
}

fuzz_target!(|data: &[u8]| {
    let [mode, size, first, data @ ..] = data else { return };
    let (head_dim, half) = (16 * (u32::from(size % 8) + 1), [KvHalf::Key, KvHalf::Value][usize::from(size >> 7)]);
    let elements = PAGE_TOKENS * head_dim;
    // Values: the input itself, or values with the exponents of one window except where the input has 0xff.
    let words = filled(data, 2 * elements);
    let raw = words.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    let values: Vec<u16> = if mode & 1 == 0 {
        raw.collect()
    } else {
        let near = |value: u16| value & 0x807f | u16::from(first.saturating_add((value >> 7 & 15) as u8)) << 7;
        let mut values: Vec<u16> = raw.map(near).collect();
        for change in data.chunks_exact(4).take(24).filter(|change| change[0] == 0xff) {
            let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % values.len();
            values[at] = values[at] & 0x807f | u16::from(change[3]) << 7;
        }
        values
    };
    if mode & 2 == 0 {
        round_trip(head_dim, half, &values);
        // The record with changed bytes.
        let unit = encode_unit(head_dim, half, &values);
        let mut record = unit.record.clone();
        for change in data.chunks_exact(2).take(8) {
            let at = usize::from(change[0]) % record.len();
            record[at] = change[1];
        }
        check(head_dim, half, &unit.tiles, &record, unit.bf16.as_deref());
        return;
    }
    // Arbitrary bytes; at most one size is wrong.
    let short = u32::from(mode >> 2 & 3);
    let record = filled(data, record_bytes(head_dim) - u32::from(short == 1));
    let rest = data.get(record.len()..).unwrap_or_default();
    let tiles = [(); 4].map(|()| filled(rest, tile_bytes(head_dim) - u32::from(short == 2)));
    let bf16 = filled(rest, unit_bytes(head_dim) - u32::from(short == 3));
    check(head_dim, half, &tiles, &record, (mode & 16 == 0).then_some(&bf16[..]));
});
