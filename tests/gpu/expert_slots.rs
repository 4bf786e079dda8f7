//! What fetches of experts leave in slots: the bytes of the packed tensor, whether host memory has compact or packed
//! experts.

use unweight_format::{
    Histogram, Matrix,
    raw::{
        PackedTensor,
        compact::{Uncompact, encode},
        packed::pack,
    },
};
use unweight_rt::experts::{ExpertWeights, ExpertsShape, Fetcher, HostEncoding};

use crate::harness::{Random, bf16, gpu, stream};
use crate::moe::{Case, Routing, assert_fetched, run_offloaded};

/// Packed, because compact would be larger.
const LARGER: HostEncoding = HostEncoding::Packed { why: None };
/// The expert of zeros.
const ODD: u32 = 123;

/// Fetches every expert into slots full of other bytes, compact and packed: the slot has the bytes of the packed
/// tensor. Expects the encodings of gate and up, and of down, in host memory.
fn check_slots(case: &Case, name: &str, encodings: [HostEncoding; 2]) {
    let kernels = gpu();
    let stream = stream(kernels);
    let (shape, slots) = (case.shape, 3.min(case.shape.experts));
    let oracles = [(&case.gate_up, shape.gate_up()), (&case.down, shape.down())].map(|(weights, [n, k])| {
        let bytes: &[u8] = bytemuck::cast_slice(weights);
        pack(Matrix::new(bytes, n as usize, k as usize).unwrap(), &Histogram::of(bytes)).unwrap()
    });
    for is_compact in [true, false] {
        let mut experts = case.offload_as(is_compact, kernels, &stream, slots);
        let packed = [HostEncoding::Packed { why: None }; 2];
        assert_eq!(experts.host_encodings(), if is_compact { encodings } else { packed }, "{name}");
        let mut fetcher = Fetcher::new(&stream, shape, 8, 1).unwrap();
        let (mut fetches, step) = (0, shape.experts.div_ceil(40));
        for byte in [0xa5, 0xff, 0] {
            experts.poison(&stream, byte).unwrap();
            for expert in (0..shape.experts).rev().filter(|expert| expert % step == 0 || *expert == ODD) {
                run_offloaded(case, (&experts, &mut fetcher), &stream, &Routing::single(3, expert), None);
                fetches += 1;
                let slot = experts.slot_of(expert).unwrap_or_else(|| panic!("{name}: expert {expert} has no slot"));
                for (part, (oracle, weights)) in oracles.iter().zip(experts.slot_weights()).enumerate() {
                    let ExpertWeights::Packed(weights) = weights else { panic!("{name}: slots are BF16") };
                    let same = |what: &str, got: &[u8], expected: &[u8]| {
                        let each = expected.len() / shape.experts as usize;
                        let expected = &expected[expert as usize * each..][..each];
                        let wrong = got.iter().zip(expected).position(|(got, expected)| got != expected);
                        assert_eq!((got.len(), wrong), (each, None), "{name}, expert {expert}, product {part}: {what}");
                    };
                    let tiles = oracle.packed().len() / shape.experts as usize;
                    let got = weights.packed().read(&stream, slot as usize * tiles, tiles).unwrap();
                    same("tiles", &got, oracle.packed());
                    let heads = oracle.escape_heads().len() / 4 / shape.experts as usize;
                    let got = weights.escape_heads().read(&stream, slot as usize * heads, heads).unwrap();
                    same("heads", bytemuck::cast_slice(&got), oracle.escape_heads());
                }
            }
        }
        let traffic = fetcher.traffic().unwrap();
        assert_eq!(traffic.misses, fetches, "{name}");
        assert_fetched(&experts, fetches, traffic.bytes);
        assert!(
            !is_compact || encodings != [HostEncoding::Compact; 2] || experts.host_bytes() < packed_bytes(&oracles)
        );
    }
}

fn packed_bytes(tensors: &[PackedTensor<Vec<u8>>; 2]) -> u64 {
    tensors.iter().map(|tensor| (tensor.packed().len() + tensor.escape_heads().len()) as u64).sum()
}

/// Experts with lists of escapes in the first and last tiles, one of zeros among many, and experts of several pieces.
fn compact_cases() -> [(&'static str, Case); 4] {
    const SPECIAL: [u16; 9] = [0, 0x8000, 0x7f80, 0xff80, 0x7fc1, 0x0001, 0x807f, 0x3081, 0xb17e];
    let usual = |rng: &mut Random| bf16(rng.normal() / 16.0);
    let mut ends = Case::of(ExpertsShape { experts: 7, hidden: 192, intermediate: 128 }, 61, &|_, rng| usual(rng));
    let mut rng = Random::new(62);
    for (weights, rows, cols) in [(&mut ends.gate_up, 256, 192), (&mut ends.down, 192, 128)] {
        for (at, weight) in weights.iter_mut().enumerate() {
            let (row, col) = (at / cols % rows, at % cols);
            let first_or_last = row < 64 && col < 64 || row >= rows - 64 && col >= cols - 64;
            if first_or_last && rng.below(120) == 0 {
                *weight = SPECIAL[rng.below(9) as usize];
            }
        }
    }
    let shape = ExpertsShape { experts: 320, hidden: 64, intermediate: 64 };
    let zeros = Case::of(shape, 63, &|at, rng| if (at * 320.0) as u32 == ODD { 0 } else { usual(rng) });
    let shape = ExpertsShape { experts: 3, hidden: 2048, intermediate: 1088 };
    let large = Case::of(shape, 64, &|_, rng| if rng.below(900) == 0 { 0 } else { usual(rng) });
    [
        ("escapes at the ends", ends),
        ("an expert of zeros", zeros),
        ("experts of several pieces", large),
        ("one expert", Case::new(1, 64, 64, 65)),
    ]
}

/// Compact experts become the packed tiles that a slot has if packed experts are fetched.
#[test]
#[ignore = "needs a GPU"]
fn slots_of_compact_experts_have_the_packed_bytes() {
    for (name, case) in compact_cases() {
        check_slots(&case, name, [HostEncoding::Compact; 2]);
    }
}

/// A matrix that cannot be compact, or that is larger then, stays packed in host memory.
#[test]
#[ignore = "needs a GPU"]
fn experts_that_are_not_compact_are_fetched_packed() {
    let shape = ExpertsShape { experts: 9, hidden: 128, intermediate: 192 };
    let wide = Case::of(shape, 71, &|_, rng| bf16(rng.normal() / 4.0));
    // All sixteen exponents of the packed window, equally often.
    let flat = |rng: &mut Random| rng.below(1 << 16) as u16 & 0x807f | (110 + rng.below(16) as u16) << 7;
    let flat = Case::of(shape, 72, &|_, rng| flat(rng));
    // A subnormal weight that is scaled up in the packed encoding, and down in the compact one.
    let mut subnormal = wide.gate_up.clone();
    subnormal[128 * 64 + 3] = 0x0001;
    let [up, down] = [shape.gate_up(), shape.down()];
    let inexact = encoding(&subnormal, up);
    assert!(matches!(inexact, HostEncoding::Packed { why: Some(Uncompact::Operand { row: 64, col: 3 }) }));
    assert_eq!((encoding(&flat.gate_up, up), encoding(&flat.down, down)), (LARGER, LARGER));
    let of =
        |gate_up: &[u16], down: &[u16]| Case { shape, gate_up: gate_up.into(), down: down.into(), x: wide.x.clone() };
    check_slots(&of(&flat.gate_up, &flat.down), "both larger", [LARGER, LARGER]);
    check_slots(&of(&flat.gate_up, &wide.down), "gate and up larger", [LARGER, HostEncoding::Compact]);
    check_slots(&of(&wide.gate_up, &flat.down), "down larger", [HostEncoding::Compact, LARGER]);
    check_slots(&of(&subnormal, &wide.down), "an inexact element", [inexact, HostEncoding::Compact]);
}

/// The expected encoding in host memory of packed weights `[n, k]`.
fn encoding(weights: &[u16], [n, k]: [u64; 2]) -> HostEncoding {
    let bytes: &[u8] = bytemuck::cast_slice(weights);
    match encode(Matrix::new(bytes, n as usize, k as usize).unwrap(), &Histogram::of(bytes)) {
        // Without tables and heads.
        Ok(tensor) if tensor.dense().len() + tensor.streams().len() >= weights.len() / 2 * 3 => LARGER,
        Ok(_) => HostEncoding::Compact,
        Err(why) => HostEncoding::Packed { why: Some(why) },
    }
}
