//! The fused FP8 addition on the GPU.

use crate::harness::{Random, gpu, guard_is_intact, poison, stream};
use unweight_rivals::{
    cuda::tans::{DeviceTans, TansKernels, place},
    tans::{QWEN3_14B, encode, oracle::is_sum},
};
use unweight_rt::DeviceBuffer;

/// Returns FP8 bytes with the exponents of real weights.
fn vector(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut byte = || {
        let bits = random.bits();
        let mut left = (bits >> 32) as f32 / 4_294_967_296.0;
        let found = QWEN3_14B.iter().position(|share| {
            left -= share;
            left < 0.0
        });
        bits as u8 & 0x87 | (found.unwrap_or(13) as u8) << 3
    };
    (0..bytes).map(|_| byte()).collect()
}

/// The sum of coded vectors equals that of plain ones byte for byte, every time.
#[test]
#[ignore = "needs a GPU"]
fn coded_sums_are_the_plain_ones() {
    let kernels = gpu();
    let stream = stream(kernels);
    let tans_kernels = TansKernels::of(&stream, kernels).unwrap();
    for (bytes, per_stream) in [(16, 16), (48 * 130, 48), (128 * 1000, 128), (512 * 3000, 512), (1024 * 4097, 1024)] {
        let (a, b) = (vector(bytes, 1), vector(bytes, 2));
        let coded = |bytes| DeviceTans::upload(&stream, &encode(bytes, per_stream, &QWEN3_14B).unwrap()).unwrap();
        let (coded_a, coded_b) = (coded(&a), coded(&b));
        let (plain_a, plain_b) =
            (DeviceBuffer::from_host(&stream, &a).unwrap(), DeviceBuffer::from_host(&stream, &b).unwrap());
        let mut out = DeviceBuffer::zeroed(&stream, bytes).unwrap();
        poison(&stream, &mut out);
        tans_kernels.add_plain(&stream, &plain_a, &plain_b, &mut out).unwrap();
        guard_is_intact(&stream, &out, "the plain sum");
        let plain = out.to_host(&stream).unwrap();
        let mut expected = vec![0; bytes];
        (0..bytes).for_each(|i| expected[place(i, per_stream, bytes / per_stream)] = plain[i]);
        for launch in 0..1000 {
            if launch % 100 == 0 {
                poison(&stream, &mut out);
            }
            tans_kernels.add(&stream, &coded_a, &coded_b, &mut out).unwrap();
            if launch % 100 == 99 {
                assert!(out.to_host(&stream).unwrap() == expected, "{bytes} bytes, {per_stream} a stream, {launch}");
            }
        }
        guard_is_intact(&stream, &out, "the sum");
    }
    assert_eq!(tans_kernels.faults(&stream).unwrap(), 0);
}

/// Every pair of bytes gives the nearest E4M3 number, ties to even.
#[test]
#[ignore = "needs a GPU"]
fn every_sum_is_rounded_once() {
    let kernels = gpu();
    let stream = stream(kernels);
    let tans_kernels = TansKernels::of(&stream, kernels).unwrap();
    let a: Vec<u8> = (0..=0xffff_u32).map(|i| (i >> 8) as u8).collect();
    let b: Vec<u8> = (0..=0xffff_u32).map(|i| i as u8).collect();
    let [on_a, on_b] = [&a, &b].map(|bytes| DeviceBuffer::from_host(&stream, bytes).unwrap());
    let mut out = DeviceBuffer::zeroed(&stream, a.len()).unwrap();
    tans_kernels.add_plain(&stream, &on_a, &on_b, &mut out).unwrap();
    for (i, got) in out.to_host(&stream).unwrap().into_iter().enumerate() {
        assert!(is_sum(got, a[i], b[i]), "{:#x} + {:#x} = {got:#x}", a[i], b[i]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn any_bytes_stay_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    let tans_kernels = TansKernels::of(&stream, kernels).unwrap();
    let bytes = 48 * 1000;
    let sound = encode(&vector(bytes, 5), 48, &QWEN3_14B).unwrap();
    let other = DeviceTans::upload(&stream, &sound).unwrap();
    let mut random = Random::new(73);
    let mut out = DeviceBuffer::zeroed(&stream, bytes).unwrap();
    let mut before = 0;
    for turn in 0..40 {
        let mut vector = sound.clone();
        match turn % 4 {
            0 => vector.slabs.iter_mut().for_each(|slab| *slab = random.bits() as u32),
            1 => vector.states.iter_mut().for_each(|state| *state = random.bits() as u16),
            2 => vector.partial.iter_mut().for_each(|partial| *partial = random.bits() as u8),
            _ => vector.offsets.iter_mut().for_each(|offset| *offset = random.bits() as i32),
        }
        let vector = DeviceTans::upload(&stream, &vector).unwrap();
        poison(&stream, &mut out);
        tans_kernels.add(&stream, &vector, &other, &mut out).unwrap();
        tans_kernels.add(&stream, &other, &vector, &mut out).unwrap();
        guard_is_intact(&stream, &out, "the sum");
        let faults = tans_kernels.faults(&stream).unwrap();
        assert!(faults > before || turn % 2 == 0, "turn {turn}: the damage was not counted as a fault");
        before = faults;
    }
}
