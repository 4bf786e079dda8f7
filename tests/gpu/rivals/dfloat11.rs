//! DFloat11's kernel on the GPU.

use crate::harness::{Random, Weights, gpu, guard_is_intact, poison, refused, stream};
use unweight_rivals::{
    cuda::dfloat11::{DeviceUnit, Tables, UnitDecoder},
    dfloat11::{Code, Unit},
};
use unweight_rt::{DeviceBuffer, LaunchError, Stream};

fn weights(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|element| u16::from_le_bytes([element[0], element[1]])).collect()
}

fn decode(stream: &Stream, decoder: &UnitDecoder, unit: &DeviceUnit, what: &str) -> Vec<u16> {
    let mut out = DeviceBuffer::zeroed(stream, unit.elements()).unwrap();
    poison(stream, &mut out);
    decoder.decode(stream, unit, &mut out).unwrap();
    guard_is_intact(stream, &out, what);
    out.to_host(stream).unwrap()
}

/// Each exponent is half as frequent as the one before: codes of 1 to 30 bits.
fn skewed(count: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut element = || {
        let bits = random.bits();
        (bits as u16 & 0x807f | (130 - ((bits >> 16).trailing_zeros() as u16).min(28)) << 7).to_le_bytes()
    };
    (0..count).flat_map(|_| element()).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn units_of_every_kind_round_trip() {
    let kernels = gpu();
    let stream = stream(kernels);
    let decoder = UnitDecoder::of(&stream, kernels).unwrap();
    let mut encoded = 0;
    let sizes = [1, 2, 63, 4096, 30_011, 262_144, 1_000_003];
    for (seed, count) in sizes.into_iter().enumerate() {
        let kinds = Weights::ALL.iter().map(|kind| kind.bytes(count, seed as u64)).chain([skewed(count, seed as u64)]);
        for (kind, bytes) in kinds.enumerate() {
            for threads in [512, 256, 1024, 37] {
                // The format supports neither infinities nor units with a single exponent.
                let Ok(unit) = Unit::encode(&bytes, threads) else { continue };
                let what = format!("kind {kind}, {count} elements, {threads} threads");
                let unit = DeviceUnit::upload(&stream, &unit).unwrap();
                let got = decode(&stream, &decoder, &unit, &what);
                let wrong = got.iter().zip(&weights(&bytes)).position(|(got, expected)| got != expected);
                assert_eq!(wrong, None, "{what}: first element that differs");
                encoded += 1;
            }
        }
    }
    assert!(encoded > 60, "{encoded}");
    assert_eq!(decoder.faults(&stream).unwrap(), 0);
}

/// Ten thousand launches, with fresh data now and then: always the same bits.
#[test]
#[ignore = "needs a GPU"]
fn decoding_a_unit_is_deterministic() {
    let kernels = gpu();
    let stream = stream(kernels);
    let decoder = UnitDecoder::of(&stream, kernels).unwrap();
    for seed in 0..5 {
        let bytes = Weights::TRAINED.bytes(1_500_007, seed + 100);
        let expected = weights(&bytes);
        let unit = DeviceUnit::upload(&stream, &Unit::encode(&bytes, 512).unwrap()).unwrap();
        let mut out = DeviceBuffer::zeroed(&stream, unit.elements()).unwrap();
        for launch in 0..2000 {
            if launch % 100 == 0 {
                poison(&stream, &mut out);
            }
            decoder.decode(&stream, &unit, &mut out).unwrap();
            if launch % 100 == 99 {
                assert!(out.to_host(&stream).unwrap() == expected, "seed {seed}, launch {launch}");
            }
        }
        guard_is_intact(&stream, &out, "a unit");
    }
    assert_eq!(decoder.faults(&stream).unwrap(), 0);
}

/// Corrupt files cause no access outside the buffers, and blocks that cannot be right are counted.
#[test]
#[ignore = "needs a GPU"]
fn any_bytes_stay_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    let decoder = UnitDecoder::of(&stream, kernels).unwrap();
    let sound = Unit::encode(&Weights::TRAINED.bytes(700_001, 3), 512).unwrap();
    let tables = Tables::of(&Code::parse(&sound.luts).unwrap());
    let mut random = Random::new(41);
    let mut before = 0;
    for turn in 0..50 {
        let mut unit = sound.clone();
        let section = match turn % 5 {
            0 => &mut unit.encoded_exponent,
            1 => &mut unit.gaps,
            2 => &mut unit.output_positions,
            3 => {
                unit.encoded_exponent.fill(if turn % 2 == 0 { 0xff } else { 0 });
                &mut unit.luts
            }
            _ => {
                unit.luts.fill(0xff);
                &mut unit.encoded_exponent
            }
        };
        let noise = random.bytes(section.len());
        section.copy_from_slice(&noise);
        let unit = DeviceUnit::upload_any(&stream, &unit, &tables).unwrap();
        decode(&stream, &decoder, &unit, &format!("turn {turn}"));
        let faults = decoder.faults(&stream).unwrap();
        assert!(faults > before || turn % 5 == 3, "turn {turn}: the damage was not counted as a fault");
        before = faults;
    }
    // The device still works.
    let unit = DeviceUnit::upload(&stream, &sound).unwrap();
    assert_eq!(decode(&stream, &decoder, &unit, "the undamaged unit"), weights(&sound.decode().unwrap()));
    let mut short = DeviceBuffer::zeroed(&stream, unit.elements() - 1).unwrap();
    let refusal = refused(decoder.decode(&stream, &unit, &mut short));
    assert!(matches!(refusal, LaunchError::Elements { .. }), "{refusal:?}");
}
