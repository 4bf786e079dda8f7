//! The matmul that joins weights in registers, in the simulator: both sources and both epilogues against a float64
//! reference, bit-exact weights, hostile metadata, and planted bugs that must be caught.

use crate::gemm_recon::{
    GUARD, Problem, Symptom, check_caught_by, check_hostile_metadata, check_on, check_weights_are_exact,
};
use crate::harness::{CpuKernel, Edit, spec};

/// The grid does not depend on the number of SMs.
const SMS: [u32; 2] = [1, 7];

#[test]
fn exponent_source_matches_the_reference() {
    check_on("gemm_join_exponent_b8_r4w4p2c1_store", &[(1, 128, 320), (8, 64, 128), (9, 192, 64)], SMS);
    // Row blocks across tiles, and tasks with fewer than others.
    check_on("gemm_join_exponent_b16_r3w2p3c1_store_add", &[(7, 128, 192), (16, 192, 128), (17, 64, 64)], SMS);
    check_on("gemm_join_exponent_b64_r2w2p2c1_store", &[(64, 64, 128), (65, 128, 64), (3, 64, 320)], SMS);
}

#[test]
fn palette_source_matches_the_reference() {
    check_on("gemm_join_palette_b8_r4w4p2c1_store_add", &[(1, 128, 320), (8, 64, 128), (9, 192, 64)], SMS);
    check_on("gemm_join_palette_b16_r3w2p3c1_store", &[(7, 128, 192), (16, 192, 128), (17, 64, 64)], SMS);
    check_on("gemm_join_palette_b32_r2w3p2c1_store", &[(31, 64, 256), (33, 128, 64)], SMS);
    check_on("gemm_join_palette_b8_r7w2p1c1_store", &[(5, 256, 192)], SMS);
}

/// A warp has more tile columns than one batch of metadata covers.
#[test]
fn metadata_of_many_tiles() {
    check_on("gemm_join_palette_b8_r1w1p4c1_store", &[(2, 64, 33 * 64)], SMS);
}

#[test]
fn clusters_split_k_and_add() {
    check_on("gemm_join_palette_b8_r4w2p2c2_store_add", &[(3, 128, 448), (8, 64, 128)], SMS);
    check_on("gemm_join_exponent_b8_r1w1p1c8_store", &[(8, 64, 512)], SMS);
    check_on("gemm_join_palette_b32_r3w2p2c4_store", &[(30, 192, 1024)], SMS);
}

/// Sums depend neither on the interleaving of warps nor on the grid nor on the rows of the batch.
#[test]
fn the_order_of_sums_is_fixed() {
    for name in ["gemm_join_palette_b8_r3w3p2c1_store", "gemm_join_exponent_b16_r2w2p2c2_store"] {
        let spec = spec(name);
        let mut kernel = CpuKernel::of(&spec, &[]);
        let problem = Problem::random(&spec, 19, 128, 576, 12);
        let first = problem.run(&spec, &mut kernel, 132, 1).unwrap();
        for seed in 2..8 {
            assert!(problem.run(&spec, &mut kernel, seed as u32, seed).unwrap() == first, "{spec}: seed {seed}");
        }
        let n = 128;
        let short = Problem { m: 5, x: problem.x[..5 * 576].to_vec(), y: vec![GUARD; 5 * n], ..problem };
        assert!(short.run(&spec, &mut kernel, 132, 9).unwrap() == first[..5 * n], "{spec}: fewer rows");
    }
}

#[test]
fn weights_are_exact() {
    check_weights_are_exact("gemm_join_exponent_b64_r2w2p1c1_store");
    check_weights_are_exact("gemm_join_palette_b64_r2w2p1c1_store");
}

#[test]
fn hostile_metadata_stays_in_bounds() {
    check_hostile_metadata("gemm_join_palette_b8_r3w2p2c1_store", 7);
}

const HEADER: &str = "unweight/kernels/gemm_join.cuh";

fn wrong(from: &'static str, to: &'static str) -> (Edit, Symptom) {
    (Edit { header: HEADER, from, to }, Symptom::Wrong)
}

#[test]
fn planted_bugs_are_caught() {
    let ring = "unweight/pipeline/warp_ring.cuh";
    let spec = spec("gemm_join_palette_b8_r3w2p3c1_store");
    let bugs = vec![
        wrong("p[6 + kHalf] = w.low.w;", "p[6 + kHalf] = w.high.w;"),
        wrong("p[10 + kHalf] = w.high.y;", "p[11 - kHalf] = w.high.y;"),
        wrong("chunk = lane % 4 * 2 + half;", "chunk = lane % 4 + half * 4;"),
        wrong("upper = place % kTileBlocks >= 2", "upper = place % kTileBlocks >= 3"),
        wrong("+ (odd ? ptx::popc(word & 0xffffu) : 0)", ""),
        wrong(
            "const u32 row = lane / 4 + half * 8;\n            const u32 index",
            "const u32 row = lane / 4;\n            const u32 index",
        ),
        wrong("bits & ((1u << row) - 1)", "bits & ((2u << row) - 1)"),
        wrong("if (place / kTileBlocks == i) f", "if (place / kTileBlocks > i) f"),
        wrong("if (turn == kMetadataBatch) {", "if (turn == 2 * kMetadataBatch) {"),
        (
            Edit {
                header: HEADER,
                from: "S::kSignBytes + share.blocks * S::kExponentBlockBytes);",
                to: "S::kSignBytes + share.blocks * S::kExponentBlockBytes + 16);",
            },
            Symptom::Error("deadlock"),
        ),
        (
            Edit { header: HEADER, from: "parity ^= slot == 0;", to: "parity ^= 1;" },
            Symptom::Error("more than 1 arrivals"),
        ),
        // The slot is refilled while its loads are in flight.
        (
            Edit {
                header: ring,
                from: "            release_to_copy_engine();",
                to: "            ptx::bar_warp_sync();",
            },
            Symptom::Error("no thread has released"),
        ),
    ];
    check_caught_by(&Problem::random(&spec, 8, 128, 640, 3), &spec, bugs, 1);
}

/// Synchronization between the blocks of a cluster.
#[test]
fn planted_bugs_of_clusters_are_caught() {
    let spec = spec("gemm_join_exponent_b8_r2w2p2c2_store");
    let bugs = vec![
        wrong("? ptx::cluster_ctarank() * Config::kWarps + warp : warp;", "? warp : warp;"),
        wrong("r = (rank * kUnits + unit % kUnits) * 2;", "r = unit % kUnits * 2;"),
        wrong(
            "        store_sums(valid);\n        sync_cluster();",
            "        store_sums(valid);\n        ptx::bar_sync();",
        ),
    ];
    check_caught_by(&Problem::random(&spec, 8, 128, 640, 3), &spec, bugs, 2);
}
