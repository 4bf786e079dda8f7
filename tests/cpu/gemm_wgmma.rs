//! The packed large-batch matmul in the simulator: operands against the format's oracle bit by bit, results against
//! float64, shares of k in every position, hostile escapes, and planted bugs that must be caught.

use crate::harness::{CpuKernel, Edit, spec};
use crate::packed_problem::Problem;

/// m, n, k and SMs.
type Shape = (usize, usize, usize, u32);

/// Checks variants on these shapes.
fn check(cases: &[(&str, &[Shape])]) {
    let specs: Vec<_> = cases.iter().map(|(name, _)| spec(name)).collect();
    let mut kernel = CpuKernel::all(&specs, &[]);
    for (spec, (_, shapes)) in specs.iter().zip(cases) {
        for (i, &(m, n, k, sms)) in shapes.iter().enumerate() {
            for problem in Problem::random(spec, (m, n, k), 31 + i as u64).each_addend() {
                let outcome = problem
                    .run(&mut kernel, spec, sms, i as u64)
                    .unwrap_or_else(|e| panic!("{spec} m={m} n={n} k={k} multiprocessors={sms}: {e}"));
                assert_eq!(problem.mismatches(&outcome), 0, "{spec} m={m} n={n} k={k} multiprocessors={sms}");
            }
        }
    }
}

#[test]
fn whole_tiles() {
    check(&[("gemm_wgmma_b64_g2p3_esc_pdl_store", &[(1, 128, 64, 8), (64, 64, 192, 8), (65, 192, 128, 2)])]);
}

#[test]
fn batch_tile_128_stages_fewer_than_steps() {
    check(&[("gemm_wgmma_b128_g2p3_esc_pdl_store", &[(127, 128, 320, 4), (129, 64, 128, 1)])]);
}

#[test]
fn batch_tile_256_one_warpgroup() {
    check(&[("gemm_wgmma_b256_g1p3_esc_pdl_store", &[(250, 64, 128, 4)])]);
}

#[test]
fn late_weights() {
    check(&[
        // A ring that wraps within a tile, and between tiles.
        ("gemm_wgmma_b256_g2p3_esc_pdl_store", &[(250, 128, 320, 1), (257, 192, 256, 1)]),
        ("gemm_wgmma_b256_g2p4_esc_pdl_silu_mul", &[(130, 128, 64, 1)]),
        ("gemm_wgmma_b256_g2p4_streamk_esc_store_add", &[(225, 320, 256, 4), (33, 128, 448, 3)]),
        ("gemm_wgmma_b256_g2p3c2_esc_pdl_store", &[(129, 128, 576, 1)]),
    ]);
}

#[test]
fn batch_tile_of_three_boxes() {
    check(&[("gemm_wgmma_b192_g3p3_esc_pdl_store", &[(191, 192, 128, 4), (193, 256, 64, 4)])]);
}

#[test]
fn batch_tiles_of_an_odd_number_of_boxes() {
    check(&[
        ("gemm_wgmma_b96_g2p3_esc_pdl_store", &[(97, 192, 128, 2)]),
        ("gemm_wgmma_b160_g3p3_esc_pdl_silu_mul", &[(130, 128, 64, 1)]),
        ("gemm_wgmma_b224_g1p3_streamk_esc_pdl_store_add", &[(225, 64, 192, 4)]),
    ]);
}

#[test]
fn shares_of_k() {
    check(&[
        // Several shares of one tile, shares with the end of one tile and the beginning of the next, whole tiles before
        // them, and shares of a single step.
        (
            "gemm_wgmma_b32_g1p3_streamk_esc_pdl_store",
            &[(20, 64, 448, 3), (32, 192, 320, 5), (40, 256, 192, 3), (5, 64, 128, 8), (33, 192, 64, 4)],
        ),
    ]);
}

#[test]
fn shares_of_k_that_add() {
    check(&[("gemm_wgmma_b64_g2p3_streamk_esc_pdl_store_add", &[(64, 320, 256, 4), (70, 128, 128, 3)])]);
}

#[test]
fn clusters_of_2() {
    check(&[
        ("gemm_wgmma_b64_g2p3c2_esc_pdl_store", &[(1, 128, 128, 1), (65, 192, 448, 1)]),
        ("gemm_wgmma_b128_g1p5c2_esc_pdl_store_add", &[(128, 64, 192, 1)]),
    ]);
}

#[test]
fn clusters_of_4() {
    check(&[
        ("gemm_wgmma_b64_g2p4c4_esc_pdl_store", &[(64, 128, 256, 1), (33, 192, 576, 1)]),
        ("gemm_wgmma_b192_g2p4c4_esc_pdl_store_add", &[(97, 128, 448, 1)]),
    ]);
}

#[test]
fn gate_and_up_become_one() {
    check(&[
        ("gemm_wgmma_b64_g2p3_esc_pdl_silu_mul", &[(1, 128, 64, 8), (65, 192, 192, 2)]),
        // Pieces of 64 batch rows, two stores each.
        ("gemm_wgmma_b128_g1p3_esc_pdl_silu_mul", &[(97, 128, 128, 1)]),
        ("gemm_wgmma_b192_g3p3_esc_pdl_silu_mul", &[(191, 256, 64, 4)]),
        ("gemm_wgmma_b32_g1p3_streamk_esc_pdl_silu_mul", &[(20, 64, 448, 3), (32, 192, 320, 5), (33, 192, 64, 4)]),
        ("gemm_wgmma_b64_g2p3c2_esc_pdl_silu_mul", &[(65, 192, 448, 1)]),
        ("gemm_wgmma_b192_g2p4c4_esc_pdl_silu_mul", &[(97, 128, 448, 1)]),
    ]);
}

#[test]
fn operands_equal_the_weights() {
    let spec = spec("gemm_wgmma_b64_g2p4_esc_pdl_store_dump");
    let problem = Problem::random(&spec, (2, 192, 192), 5);
    problem.assert_operands(&problem.run(&mut CpuKernel::of(&spec, &[]), &spec, 3, 3).unwrap());
}

#[test]
fn hostile_escapes_stay_in_bounds() {
    let spec = spec("gemm_wgmma_b32_g2p3_esc_pdl_store");
    let problem = Problem::random(&spec, (3, 128, 128), 9);
    problem.survives_hostile_escapes(&mut CpuKernel::of(&spec, &[]), &spec, 2);
}

#[test]
fn planted_bugs_are_caught() {
    let streaming = "gemm_wgmma_b128_g1p3_streamk_esc_pdl_store";
    let clustered = "gemm_wgmma_b64_g2p3c2_esc_pdl_store";
    let gated = "gemm_wgmma_b64_g2p3_esc_pdl_silu_mul";
    let adding = "gemm_wgmma_b64_g2p3_streamk_esc_pdl_store_add";
    let late = "gemm_wgmma_b256_g2p3_esc_pdl_store";
    for (file, name, from, to) in [
        // The bias of another row block, of the other half of a fragment.
        ("epilogue", adding, "p.warp * packed::kBlockRows + p.lane / 4;", "p.lane / 4;"),
        ("epilogue", adding, "j / 2 % 2 == 0 ? low : high", "j % 2 == 0 ? low : high"),
        // The ring: a slot released while it is read, sums read too early, a wrong byte count, a box of X loaded twice,
        // a box left out, another warp's weights.
        ("mainloop", streaming, "p.lane == 0 && exists", "p.lane == 0"),
        ("mainloop", streaming, "ptx::wgmma_wait_group<0>();", "ptx::wgmma_wait_group<4>();"),
        ("mainloop", streaming, "            f = fetch(p, has_landed);", "            f = fetch(p, true);"),
        ("load", streaming, "x_bytes + S::kWBytes);", "x_bytes);"),
        ("load", streaming, "from.row + i * S::kXBoxRows", "from.row"),
        ("load", streaming, "args.m - from.row + S::kXBoxRows - 1", "args.m - from.row - 1"),
        ("mainloop", streaming, "p.warp * packed::kBlockBytes", "0 * packed::kBlockBytes"),
        // Late weights: released before they are loaded, released by X's barrier, not waited for; X not waited
        // for, waited for in the phase before or by the weights' barrier; X copied when W is released, W before it is.
        (
            "mainloop",
            late,
            "f = fetch(p, has_landed);
        decode(following, f);
        patch(following, f, s, step + 1, p);
        if constexpr (kLateWeights<Config>) {
            release_weights(slots, p);
        }",
            "release_weights(slots, p), f = fetch(p, has_landed);
        decode(following, f);
        patch(following, f, s, step + 1, p);
        if constexpr (kLateWeights<Config>) {
        }",
        ),
        ("mainloop", late, "w_ring.release(slots.multiply);", "x_ring.release(slots.multiply);"),
        ("mainloop", late, "kLateWeights<Config>) f = fetch(p, has_landed);", "true) f = fetch(p, true);"),
        ("mainloop", late, "if constexpr (kLateWeights<Config>) x_ring", "if constexpr (false) x_ring"),
        ("mainloop", late, "cursor.parity ^ (cursor.slot == 0)", "cursor.parity"),
        ("mainloop", late, "cursor.parity ^ (cursor.slot == 0)", "cursor.parity ^ (cursor.slot != 0)"),
        ("mainloop", late, "x_ring.wait_full(", "w_ring.wait_full("),
        ("load", late, "x_ring.wait_empty(cursor);", "w_ring.wait_empty(cursor);"),
        ("load", late, "w_ring.wait_empty(cursor);", "w_ring.wait_empty({cursor.slot, cursor.parity ^ 1});"),
        // Another row block's escapes.
        ("mainloop", streaming, "p.warp * kBlockRecordBytes", "0 * kBlockRecordBytes"),
        // Stream-K: a peer left out, a counter not reset.
        ("reduce", streaming, "first + j <= peers.last", "first + j < peers.last"),
        ("reduce", streaming, "if (waits) ptx::red_add_global(flag, ~0u);", "if (waits) ptx::red_add_global(flag, 0);"),
        // The store: the wrong half of a fragment.
        ("epilogue", streaming, "p.warp * 2 + p.lane / 8 % 2", "p.warp * 2 + p.lane / 16"),
        // A gate and its up: the next batch row for the up, another warp's columns.
        ("epilogue", gated, "gated(d[4 * j], d[4 * j + 2])", "gated(d[4 * j], d[4 * j + 1])"),
        (
            "epilogue",
            gated,
            "GatedTile::offset(g * 32 + p.lane, p.warp)",
            "GatedTile::offset(g * 32 + p.lane, 3 - p.warp)",
        ),
        // A cluster: sums written over X that another warpgroup reads, a peer's sums left out, steps taken twice.
        (
            "reduce",
            clustered,
            "ptx::bar_sync(NamedBarrier::kConsumers, Config::kWarpgroups * kWarpgroupThreads);",
            "sync_warpgroup(p);",
        ),
        ("reduce", clustered, "j + (j >= schedule.unit)", "j"),
        ("schedule", clustered, "unit * steps / Config::kCluster", "0"),
    ] {
        let header = format!("unweight/kernels/gemm_wgmma/{file}.cuh").leak();
        let spec = spec(name);
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let problem = Problem::random(&spec, (128, 128, 320), 3).each_addend().pop().unwrap();
        let caught = (1..=4).any(|seed| {
            // Alternates between all tiles in one block, whose ring and buffers wrap around, and tiles shared by
            // several blocks.
            let sms = if seed % 2 == 1 { 1 } else { 5 };
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| problem.run(&mut kernel, &spec, sms, seed)));
            !matches!(outcome, Ok(Ok(outcome)) if problem.mismatches(&outcome) == 0)
        });
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
