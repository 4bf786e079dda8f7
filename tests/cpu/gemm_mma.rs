//! The packed small-batch matmul in the simulator: operands against the format's oracle bit by bit, results against
//! float64, hostile escapes, and planted bugs that must be caught.

use crate::harness::{CpuKernel, Edit, spec};
use crate::packed_problem::Problem;

type Shape = (usize, usize, usize);

/// Checks variants on one SM, where a group takes as much as it can, and on more SMs than there is work for.
fn check(cases: &[(&str, &[Shape])]) {
    let specs: Vec<_> = cases.iter().map(|(name, _)| spec(name)).collect();
    let mut kernel = CpuKernel::all(&specs, &[]);
    for (spec, (_, shapes)) in specs.iter().zip(cases) {
        for (i, &shape) in shapes.iter().enumerate() {
            for problem in Problem::random(spec, shape, 31 + i as u64).each_addend() {
                for sms in [1, 7] {
                    let outcome = problem
                        .run(&mut kernel, spec, sms, 1000 * u64::from(sms) + i as u64)
                        .unwrap_or_else(|e| panic!("{spec} {shape:?} on {sms} multiprocessors: {e}"));
                    assert_eq!(problem.mismatches(&outcome), 0, "{spec} {shape:?} on {sms} multiprocessors");
                }
            }
        }
    }
}

#[test]
fn batch_tile_8() {
    check(&[("gemm_mma_b8_r4w4p2c1_esc_pdl_store", &[(1, 128, 320), (8, 64, 128), (9, 192, 64)])]);
}

#[test]
fn batch_tile_16_row_blocks_across_tiles() {
    check(&[("gemm_mma_b16_r3w2p3c1_esc_pdl_store", &[(7, 128, 192), (16, 192, 128), (17, 64, 64)])]);
}

#[test]
fn batch_tile_32() {
    check(&[("gemm_mma_b32_r2w3p2c1_esc_pdl_store", &[(31, 64, 256), (33, 128, 64)])]);
}

#[test]
fn seven_row_blocks() {
    check(&[("gemm_mma_b8_r7w2p1c1_esc_pdl_store", &[(5, 256, 192)])]);
}

#[test]
fn cluster_splits_k_and_adds() {
    check(&[("gemm_mma_b8_r4w2p2c2_esc_pdl_store_add", &[(3, 128, 448), (8, 64, 64)])]);
}

#[test]
fn several_tasks_per_block() {
    check(&[("gemm_mma_b8_r2w2p2c1_persistent_esc_pdl_store", &[(8, 192, 192), (10, 128, 64)])]);
}

#[test]
fn gate_and_up_become_one() {
    check(&[
        ("gemm_mma_b8_r4w2p2c1_esc_pdl_silu_mul", &[(3, 128, 320), (9, 320, 64)]),
        ("gemm_mma_b16_r2w3p2c2_esc_pdl_silu_mul", &[(16, 128, 448)]),
        ("gemm_mma_b8_r4w2p2c1_persistent_esc_pdl_silu_mul", &[(8, 320, 128)]),
        // Odd numbers of row blocks: alone, across tiles, and with fewer pairs of rows than blocks in a cluster.
        ("gemm_mma_b8_r7w2p1c1_esc_pdl_silu_mul", &[(5, 192, 192)]),
        ("gemm_mma_b8_r1w1p1c8_esc_pdl_silu_mul", &[(8, 64, 512)]),
        ("gemm_mma_b32_r3w2p2c8_persistent_esc_pdl_silu_mul", &[(30, 128, 1024)]),
    ]);
}

/// Copies by threads give the same results in every other respect.
#[test]
fn without_a_copy_engine() {
    check(&[
        ("gemm_mma_b8_r4w4p2c1_async_esc_store", &[(1, 128, 320), (8, 64, 128), (9, 192, 64)]),
        ("gemm_mma_b16_r3w2p3c1_async_esc_pdl_store_add", &[(7, 128, 192), (16, 192, 128), (17, 64, 64)]),
        ("gemm_mma_b32_r2w3p2c1_async_esc_silu_mul", &[(31, 64, 256), (33, 128, 64)]),
        ("gemm_mma_b8_r7w2p1c1_async_esc_store", &[(5, 256, 192)]),
        ("gemm_mma_b64_r2w2p2c1_async_esc_store", &[(64, 64, 128), (65, 128, 64), (3, 64, 320)]),
        ("gemm_mma_b8_r4w2p2c2_async_esc_store", &[(3, 128, 448)]),
        ("gemm_mma_b8_r2w2p2c1_async_persistent_esc_store", &[(8, 192, 192), (10, 128, 64)]),
    ]);
}

#[test]
fn operands_equal_the_weights() {
    for name in [
        "gemm_mma_b8_r4w2p2c1_async_esc_store_dump",
        "gemm_mma_b8_r4w2p2c1_esc_pdl_store_dump",
        "gemm_mma_b8_r3w2p1c1_esc_pdl_store_dump",
    ] {
        let spec = spec(name);
        let mut kernel = CpuKernel::of(&spec, &[]);
        let problem = Problem::random(&spec, (2, 128, 192), 5);
        problem.assert_operands(&problem.run(&mut kernel, &spec, 1, 3).unwrap());
    }
}

#[test]
fn hostile_escapes_stay_in_bounds() {
    for name in ["gemm_mma_b8_r4w2p2c1_esc_pdl_store", "gemm_mma_b8_r4w2p2c1_async_esc_store"] {
        let spec = spec(name);
        let problem = Problem::random(&spec, (3, 128, 128), 9);
        problem.survives_hostile_escapes(&mut CpuKernel::of(&spec, &[]), &spec, 1);
    }
}

/// A missing barrier after a wait is not among these bugs: here the lanes meet at the `ldmatrix` that follows.
#[test]
fn planted_bugs_of_threads_that_copy_are_caught() {
    let (kernel, ring) = ("unweight/kernels/gemm_mma.cuh", "unweight/pipeline/warp_ring.cuh");
    let released = "release() {\n        if constexpr (kAsync) {\n            ptx::bar_warp_sync();";
    for (header, from, to) in [
        (ring, "ptx::cp_async_wait_group<kSlots - 1>();", "ptx::cp_async_wait_group<kSlots>();"),
        (ring, released, "release() {\n        if constexpr (kAsync) {"),
        (kernel, "if constexpr (kAsync<Config>) ptx::cp_async_commit_group();\n    }", "}"),
        (kernel, "share.batch + r < args.m;", "true;"),
        (kernel, "::offset(r, chunk), from, inside", "::offset(r, chunk ^ 1), from, inside"),
        (kernel, "if (at < load_pieces.bytes[i]) ptx::cp_async", "if (at + 512 < load_pieces.bytes[i]) ptx::cp_async"),
        (kernel, "if (at < load_pieces.bytes[i]) ptx::cp_async", "ptx::cp_async"),
        (kernel, "column * (kTile * 2) + chunk * 16;", "column * kTile + chunk * 16;"),
    ] {
        let spec = spec("gemm_mma_b8_r3w2p3c1_async_esc_store");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let problem = Problem::random(&spec, (7, 128, 640), 3);
        let caught = (1..=4).any(|seed| match problem.run(&mut kernel, &spec, 1, seed) {
            Err(_) => true,
            Ok(outcome) => problem.mismatches(&outcome) > 0,
        });
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

#[test]
fn planted_bugs_are_caught() {
    let (kernel, ring) = ("unweight/kernels/gemm_mma.cuh", "unweight/pipeline/warp_ring.cuh");
    for (header, from, to) in [
        ("unweight/encoding/packed.cuh", "0x00780078u", "0x00700070u"),
        ("unweight/encoding/escapes.cuh", "? 0x5410 : 0x3254", "? 0x3254 : 0x5410"),
        (kernel, "parity ^= slot == 0;", "parity ^= 1;"),
        (kernel, "load_pieces.slot_bytes = S::kXBytes +", "load_pieces.slot_bytes = 0 *"),
        (kernel, "left -= here;", "left = 0;"),
        (kernel, "gate + packed::kGateRows, up_low", "gate, up_low"),
        (
            kernel,
            "++half) {\n                const u32 row = f * kBatchFragment + lane % 8, \
             chunk = half * 4 + lane / 8;",
            "++half) {\n                const u32 row = f * kBatchFragment + lane % 8, \
             chunk = half * 4 + lane / 8 % 2;",
        ),
        // A race that shows in a few of a hundred launches, and only under load: the slot is refilled while its loads
        // are in flight.
        (ring, "            release_to_copy_engine();", "            ptx::bar_warp_sync();"),
    ] {
        let shape = if to.contains("gate") { "r2w2p3c1_esc_pdl_silu_mul" } else { "r3w2p3c1_esc_pdl_store" };
        let spec = spec(&format!("gemm_mma_b8_{shape}"));
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let problem = Problem::random(&spec, (8, 128, 640), 3);
        let caught = (1..=4).any(|seed| match problem.run(&mut kernel, &spec, 1, seed) {
            Err(_) => true,
            Ok(outcome) => problem.mismatches(&outcome) > 0,
        });
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
