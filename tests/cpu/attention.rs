//! Attention over paged KV caches in the simulator: results against float64, pages whose unused lines are NaN, hostile
//! tables, and planted bugs that must be caught.

use std::fmt::Display;

use unweight_bench::attention::{Chunk, ChunkProblem, Decode, PAD, Problem};
use unweight_codegen::{VariantSpec, abi::AttentionArgs, kv::PAGE_TOKENS, plan::GemmShape, spec::Op};

use crate::{
    attention_launch::{GAP, Outcome, launch, launch_on, rows_of},
    harness::{Buffer, CpuKernel, Edit, Run, bf16, spec},
};

fn check(kernel: &mut CpuKernel, spec: &VariantSpec, case: &Decode) {
    let problem = Problem::new(case);
    let outcome = launch(&problem, kernel, spec, case.seed).unwrap_or_else(|error| panic!("{spec} {case:?}: {error}"));
    assert_eq!(problem.mismatch(&outcome.out, &outcome.layer), None, "{spec} {case:?}");
    assert_eq!(outcome.fault, 0, "{spec} {case:?}");
}

/// Returns the variants of a family with these names, and their kernels in one library.
fn built(family: &str, names: &[impl Display]) -> (Vec<VariantSpec>, CpuKernel) {
    let specs: Vec<_> = names.iter().map(|name| spec(&format!("{family}_{name}"))).collect();
    let kernel = CpuKernel::all(&specs, &[]);
    (specs, kernel)
}

#[test]
fn lengths_at_the_edges_of_tiles_and_pages() {
    let (specs, mut kernel) =
        built("attention_decode", &["d128_w4p2c1_pdl", "d128_w4p2c1_async_pdl", "d128_w4p2c1_split_async_pdl"]);
    for spec in specs {
        check(&mut kernel, &spec, &Decode::new(128, 4, &[0, 14, 15, 16, PAD, 62, 63, 64, 126, 199]));
    }
}

#[test]
fn every_group_size() {
    let spec = spec("attention_decode_d64_w2p2c1");
    let mut kernel = CpuKernel::of(&spec, &[]);
    for group in 1..=16 {
        check(&mut kernel, &spec, &Decode { kv_heads: 1, seed: group as u64, ..Decode::new(64, group, &[77, 3]) });
    }
}

#[test]
fn clusters_share_the_tokens_of_a_row() {
    let (specs, mut kernel) =
        built("attention_decode", &["d64_w4p2c2_pdl", "d64_w2p3c4", "d64_w4p1c8_pdl", "d64_w2p3c2_async"]);
    for spec in specs {
        check(&mut kernel, &spec, &Decode::new(64, 3, &[0, 17, PAD, 500, 127, 128, 640]));
    }
}

/// Positions where a part starts to have tokens, where all parts have equally many, and where a part has more than it
/// sums at once; with copies by threads and by the copy engine.
#[test]
fn parts_share_the_tokens_of_a_row() {
    for (name, all) in [("d32_w1p2c1_split_async", &[1, 2, 5, 8, 9, 17][..]), ("d64_w2p2c1_split_pdl", &[1, 4])] {
        let spec = spec(&format!("attention_decode_{name}"));
        let Op::Attention(op) = spec.op else { panic!("{spec}") };
        let (mut kernel, tokens_at_once) = (CpuKernel::of(&spec, &[]), op.warps.get() * 16);
        for &parts in all {
            let last = [1, 2, parts, 2 * parts].map(|part| part * tokens_at_once);
            let positions: Vec<u32> = last.into_iter().flat_map(|last| [last - 1, last]).chain([PAD, 0]).collect();
            let case = Decode { kv_heads: 1, ..Decode::new(op.head_dim.get() as usize, 3, &positions) };
            let problem = Problem::new(&case);
            let outcome = launch_on(&problem, None, &mut kernel, &spec, u64::from(parts), parts);
            let outcome = outcome.unwrap_or_else(|error| panic!("{spec} x{parts}: {error}"));
            assert_eq!(problem.mismatch(&outcome.out, &outcome.layer), None, "{spec} x{parts} {case:?}");
            assert_eq!(outcome.fault, 0, "{spec} x{parts}");
        }
    }
}

#[test]
fn windows_leave_tokens_out() {
    let (specs, mut kernel) = built("attention_decode", &["d32_w2p2c2", "d32_w2p2c1_split_async"]);
    for spec in specs {
        for window in [1, 7, 16, 17, 64, 100, 1000] {
            let positions = [0, 6, 15, 16, 63, 64, 65, 99, 100, 230];
            check(&mut kernel, &spec, &Decode { window, ..Decode::new(32, 4, &positions) });
        }
    }
}

#[test]
fn heads_get_bias_norm_and_rotation() {
    let spec = spec("attention_decode_d64_w4p2c1_pdl");
    let mut kernel = CpuKernel::of(&spec, &[]);
    for (bias, norm, rope_dim) in [(true, false, 64), (false, true, 64), (true, true, 16), (true, true, 0)] {
        check(&mut kernel, &spec, &Decode { bias, norm, rope_dim, ..Decode::new(64, 5, &[0, 40, 81]) });
    }
}

/// Pairs of adjacent elements, of a whole head or of a part of it, for both kinds of copy and kernels of both caches.
#[test]
fn adjacent_elements_are_rotated_together() {
    let (specs, mut kernel) =
        built("attention_decode", &["d64_w4p2c1_adjacent_pdl", "d64_w4p2c1_split_async_adjacent_pdl"]);
    for spec in specs {
        for (bias, norm, rope_dim) in [(false, false, 64), (true, false, 32), (true, true, 12), (false, false, 0)] {
            let case = Decode { bias, norm, rope_dim, adjacent: true, ..Decode::new(64, 5, &[0, 40, 81]) };
            check(&mut kernel, &spec, &case);
        }
    }
}

/// Heads of 256: several words per lane, and queries in shared memory; with clusters, parts, and copies by threads.
#[test]
fn large_heads() {
    let (specs, mut kernel) = built(
        "attention_decode",
        &["d256_w4p1c1_pdl", "d256_w4p1c4", "d256_w4p1c1_async_pdl", "d256_w4p1c1_split_async"],
    );
    for spec in specs {
        let whole = Decode { bias: true, norm: true, ..Decode::new(256, 2, &[0, 15, 64, PAD, 199]) };
        check(&mut kernel, &spec, &whole);
        check(&mut kernel, &spec, &Decode { window: 40, rope_dim: 64, ..Decode::new(256, 4, &[3, 40, 130]) });
        check(&mut kernel, &spec, &Decode { rope_dim: 0, ..Decode::new(256, 1, &[16]) });
    }
}

/// Soft-capped scores, in every encoding of a tile.
#[test]
fn scores_have_a_soft_cap() {
    let (specs, mut kernel) =
        built("attention_decode", &["d64_w4p2c1_softcap_pdl", "d256_w4p1c2_softcap", "d32_w1p2c1_split_async_softcap"]);
    for spec in specs {
        let Op::Attention(op) = spec.op else { panic!("{spec}") };
        for (window, cap) in [(0, 0.5), (20, 2.0)] {
            let case = Decode::new(op.head_dim.get() as usize, 4, &[0, 17, PAD, 130]);
            check(&mut kernel, &spec, &Decode { window, softcap: Some(cap), ..case });
        }
    }
    let (specs, mut kernel) =
        built("attention_prefill", &["d64_w2p2c1_softcap_pdl", "d256_w4p2c1_softcap", "d32_w4p2c1_async_softcap"]);
    for spec in specs {
        let Op::Attention(op) = spec.op else { panic!("{spec}") };
        let problem = Chunk { softcap: Some(1.0), ..chunk(op.head_dim.get() as usize, 3, (50, 40, 30)) };
        let problem = ChunkProblem::new(&problem);
        let outcome = launch_chunk(&problem, &mut kernel, &spec, 5).unwrap_or_else(|e| panic!("{spec}: {e}"));
        assert_eq!(problem.mismatch(&outcome.out, &outcome.layer), None, "{spec}");
    }
}

#[test]
fn norms_multiply_by_one_plus_the_weight() {
    for (name, head_dim) in [("d64_w4p2c1_plus_one_pdl", 64), ("d256_w4p1c1_async_plus_one", 256)] {
        let spec = spec(&format!("attention_decode_{name}"));
        let mut kernel = CpuKernel::of(&spec, &[]);
        check(&mut kernel, &spec, &Decode { norm: true, plus_one: true, ..Decode::new(head_dim, 3, &[0, 40, 81]) });
    }
}

#[test]
fn planted_bugs_of_large_heads_and_caps_are_caught() {
    let (prepare, softmax) = ("unweight/kernels/attention/prepare.cuh", "unweight/kernels/attention/softmax.cuh");
    let (element, rope) = ("unweight/activation/element.cuh", "unweight/kernels/rope.cuh");
    let case = |head_dim| Decode { window: 50, bias: true, ..Decode::new(head_dim, 3, &[0, 40, 100]) };
    let (capped, normed) =
        (Decode { softcap: Some(1.0), ..case(32) }, Decode { norm: true, plus_one: true, ..case(256) });
    for (name, case, header, from, to) in [
        ("d32_w2p2c1_softcap", &capped, softmax, "ptx::mul(scores[c][i], factor)", "scores[c][i]"),
        ("d32_w2p2c1_softcap", &capped, element, "ptx::mul(x, 2.88539008f)", "ptx::mul(x, 1.44269504f)"),
        ("d256_w2p1c1_plus_one", &normed, element, "ptx::add(1.0f, high_of(gamma))", "high_of(gamma)"),
        ("d256_w2p1c1_plus_one", &normed, rope, "lane + piece * 32", "lane + piece * 31"),
        ("d256_w2p1c1_plus_one", &normed, prepare, "if (rotate) {", "{"),
        ("d256_w2p1c1_plus_one", &normed, prepare, "own.add_bias(x, args.bias + at)", "own.add_bias(x, args.bias)"),
    ] {
        let spec = spec(&format!("attention_decode_{name}"));
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let problem = Problem::new(case);
        let outcome = launch(&problem, &mut kernel, &spec, 1);
        let caught = outcome.is_err() || outcome.is_ok_and(|o| problem.mismatch(&o.out, &o.layer).is_some());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

#[test]
fn small_and_odd_head_sizes() {
    let sizes = [16, 32, 48, 80, 96, 112];
    let (specs, mut kernel) = built("attention", &sizes.map(|head_dim| format!("decode_d{head_dim}_w4p2c1")));
    for (spec, head_dim) in specs.into_iter().zip(sizes) {
        check(&mut kernel, &spec, &Decode { bias: true, norm: true, ..Decode::new(head_dim, 2, &[0, 19, 80, 150]) });
    }
}

/// More tiles than a warp loads page indices for at once.
#[test]
fn long_rows() {
    let (specs, mut kernel) = built("attention_decode", &["d16_w1p1c1", "d16_w1p1c1_async", "d16_w1p3c1_async"]);
    for spec in specs {
        for (window, position) in [(0, 16 * 32 - 1), (0, 16 * 32), (0, 16 * 64), (0, 1500), (900, 2000)] {
            check(&mut kernel, &spec, &Decode { kv_heads: 1, window, ..Decode::new(16, 1, &[position]) });
        }
    }
}

/// A row has the same bits alone, in any batch, and in any order of events.
#[test]
fn a_row_does_not_depend_on_its_batch() {
    for name in ["d64_w4p2c2_pdl", "d64_w2p2c1_split_async_pdl"] {
        alone_and_together(&spec(&format!("attention_decode_{name}")));
    }
}

fn alone_and_together(spec: &VariantSpec) {
    let mut kernel = CpuKernel::of(spec, &[]);
    let batch = Problem::new(&Decode { bias: true, norm: true, ..Decode::new(64, 4, &[100, 3, PAD, 64, 200]) });
    let together = launch(&batch, &mut kernel, spec, 1).unwrap();
    for seed in 2..5 {
        let again = launch(&batch, &mut kernel, spec, seed).unwrap();
        assert!(again.out == together.out && again.layer == together.layer);
    }
    let output = batch.case.out_columns();
    for row in 0..batch.case.positions.len() {
        let outcome = launch(&batch.row(row), &mut kernel, spec, 9).unwrap();
        assert_eq!(outcome.out, together.out[row * output..][..output], "row {row}");
    }
}

/// The tokens of a draft are rows of one sequence. A launch with a window of one token stores their keys and values,
/// and the next launch reads them. The bits equal those of one launch per token.
#[test]
fn rows_of_one_sequence_follow_each_other() {
    let (specs, mut kernel) =
        built("attention_decode", &["d64_w4p2c2_pdl", "d64_w2p2c1_split_async_pdl", "d128_w4p2c1_async_pdl"]);
    for spec in specs {
        let Op::Attention(op) = spec.op else { panic!("{spec}") };
        for window in [0, 20] {
            // Across the end of a page, newest token first: rows run in any order.
            let positions = [65, 64, 63, 62, 61];
            let case = Decode::new(op.head_dim.get() as usize, 3, &positions);
            let problem = of_one_sequence(&Decode { bias: true, norm: true, window, ..case });
            let (mut out, mut layer) = (Vec::new(), problem.layer.clone());
            for row in (0..positions.len()).rev() {
                let step = Problem { layer, ..problem.row(row) };
                let outcome = launch(&step, &mut kernel, &spec, 1).unwrap();
                out.splice(0..0, outcome.out);
                layer = outcome.layer;
            }
            let mut stores = problem.clone();
            stores.case.window = 1;
            for seed in 2..5 {
                let stored = launch(&stores, &mut kernel, &spec, seed).unwrap();
                let reads = Problem { layer: stored.layer, ..problem.clone() };
                let verified = launch(&reads, &mut kernel, &spec, seed).unwrap();
                assert!(verified.out == out && verified.layer == layer, "{spec}, window {window}");
                assert_eq!((stored.fault, verified.fault), (0, 0));
            }
            let differs = (1..=20).any(|seed| launch(&problem, &mut kernel, &spec, seed).unwrap().out != out);
            // With parts, `launch` runs twice.
            assert!(
                differs || op.split,
                "{spec}: one launch over all rows gives the same bits, so the test shows nothing"
            );
        }
    }
}

/// Gives all rows the pages of the first row, which is the last token.
pub fn of_one_sequence(case: &Decode) -> Problem {
    let mut problem = Problem::new(case);
    problem.table.truncate(problem.table_pages);
    problem.table = problem.table.repeat(case.positions.len());
    problem
}

/// No entry of a table leads outside the cache, and other rows are unaffected.
#[test]
fn hostile_tables_are_reported() {
    for name in ["d32_w2p2c2", "d32_w2p2c2_async", "d32_w2p2c1_split_async"] {
        hostile_tables(&spec(&format!("attention_decode_{name}")));
    }
}

fn hostile_tables(spec: &VariantSpec) {
    let mut kernel = CpuKernel::of(spec, &[]);
    let right = Problem::new(&Decode::new(32, 2, &[90, 200, 150]));
    let columns = right.case.out_columns();
    let whole = launch(&right, &mut kernel, spec, 1).unwrap();
    for (entry, page) in [(0, right.pages), (1, u32::MAX), (2, u32::MAX), (3, 1 << 31)] {
        let mut hostile = Problem::new(&right.case);
        hostile.table[hostile.table_pages + entry] = page;
        let outcome = launch(&hostile, &mut kernel, spec, 2).unwrap();
        assert_eq!(outcome.fault, 2, "entry {entry}");
        for other in [0, 2] {
            assert_eq!(outcome.out[other * columns..][..columns], whole.out[other * columns..][..columns]);
        }
        assert!(outcome.out[columns..][..columns].iter().all(|&v| !bf16(v).is_nan()), "a page of another row was read");
    }
    // All pages are invalid, a position is after the table, or a position is after the angles.
    let mut hostile = Problem::new(&right.case);
    let pages = hostile.table_pages;
    hostile.table[pages..][..pages].fill(u32::MAX);
    let none = launch(&hostile, &mut kernel, spec, 3).unwrap();
    let mut beyond_the_table = Problem::new(&right.case);
    beyond_the_table.max_positions = u32::MAX;
    beyond_the_table.case.positions[1] = beyond_the_table.table_pages as u32 * PAGE_TOKENS;
    let table = launch(&beyond_the_table, &mut kernel, spec, 4).unwrap();
    beyond_the_table.case.positions[1] = PAD - 1;
    let far = launch(&beyond_the_table, &mut kernel, spec, 4).unwrap();
    let mut beyond_the_table = Problem::new(&right.case);
    beyond_the_table.max_positions = 200;
    let angles = launch(&beyond_the_table, &mut kernel, spec, 5).unwrap();
    for outcome in [none, table, far, angles] {
        assert_eq!(outcome.fault, 2);
        assert!(outcome.out[columns..][..columns].iter().all(|&v| v == 0));
        assert_eq!(outcome.out[..columns], whole.out[..columns]);
    }
}

fn launch_chunk(
    problem: &ChunkProblem,
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    seed: u64,
) -> Result<Outcome, String> {
    let (chunk, sequence) = (&problem.chunk, &problem.sequence);
    let Op::Attention(op) = spec.op else { panic!("{spec}") };
    let (columns, out_columns) = (sequence.case.columns(), sequence.case.out_columns());
    let of = |values: &[u16]| Buffer::of(bytemuck::cast_slice(values));
    let apart: Vec<u16> =
        sequence.qkv.chunks(columns).flat_map(|row| row.iter().copied().chain([0x7fc1; GAP])).collect();
    let (qkv, layer) = (of(&apart), of(&sequence.layer));
    let table = Buffer::of(bytemuck::cast_slice(&sequence.table));
    let out = Buffer::new(chunk.tokens as usize * (out_columns + GAP) * 2);
    let fault = Buffer::zeroed(4);
    let (scale, eps) = sequence.scales();
    let args = AttentionArgs {
        qkv: qkv.address(),
        out: out.address(),
        layer: layer.address(),
        page_table: table.address(),
        fault: fault.address(),
        qkv_pitch: (columns + GAP) as u64,
        out_pitch: (out_columns + GAP) as u64,
        m: chunk.tokens,
        kv_heads: chunk.kv_heads as u32,
        group: chunk.group as u32,
        pages: sequence.pages,
        table_pages: sequence.table_pages as u32,
        window: chunk.window,
        start: chunk.start,
        scale,
        eps,
        ..AttentionArgs::default()
    };
    let buffers = [
        ("qkv", qkv.slice()),
        ("layer", layer.slice()),
        ("page_table", table.slice()),
        ("out", out.slice()),
        ("fault", fault.slice()),
    ];
    let tokens = op.warps.get() * 16 / chunk.group as u32;
    let shape = GemmShape::rows(chunk.tokens.div_ceil(tokens) * chunk.kv_heads as u32);
    // SAFETY: as in `launch`.
    unsafe { kernel.run(spec, Run { problem: shape, sms: 132, seed }, &args, &buffers)? };
    Ok(Outcome { out: rows_of(&out, out_columns), layer: layer.u16s(), fault: fault.u32s()[0] })
}

fn chunk(head_dim: usize, group: usize, (start, tokens, window): (u32, u32, u32)) -> Chunk {
    let seed = u64::from(start * 7 + tokens + window);
    Chunk { head_dim, kv_heads: 2, group, start, tokens, window, softcap: None, seed }
}

#[test]
fn chunks_attend_to_earlier_tokens() {
    let (specs, mut kernel) = built(
        "attention_prefill",
        &[
            "d128_w4p2c1_pdl",
            "d64_w2p2c1_pdl",
            "d48_w4p2c1",
            "d16_w1p2c1_pdl",
            "d64_w2p2c1_async_pdl",
            "d16_w4p3c1_async",
            "d256_w4p2c1_pdl",
            "d256_w4p2c1_async",
        ],
    );
    for spec in specs {
        let Op::Attention(op) = spec.op else { panic!("{spec}") };
        let head_dim = op.head_dim.get() as usize;
        for (group, run) in [(4, (0, 1, 0)), (1, (0, 70, 0)), (7, (61, 5, 0)), (16, (130, 20, 0)), (3, (0, 64, 0))] {
            let problem = ChunkProblem::new(&chunk(head_dim, group, run));
            let outcome = launch_chunk(&problem, &mut kernel, &spec, 5).unwrap_or_else(|e| panic!("{spec}: {e}"));
            assert_eq!(problem.mismatch(&outcome.out, &outcome.layer), None, "{spec} {:?}", problem.chunk);
            assert_eq!(outcome.fault, 0);
        }
    }
}

#[test]
fn windows_of_chunks_leave_tokens_out() {
    for (name, head_dim) in [("d32_w4p3c1", 32), ("d32_w4p2c1_async", 32), ("d256_w4p3c1", 256)] {
        let spec = spec(&format!("attention_prefill_{name}"));
        let mut kernel = CpuKernel::of(&spec, &[]);
        for run in [(0, 100, 1), (0, 200, 17), (300, 90, 64), (500, 33, 130), (190, 70, 1000)] {
            let problem = ChunkProblem::new(&chunk(head_dim, 4, run));
            let outcome = launch_chunk(&problem, &mut kernel, &spec, 6);
            let outcome = outcome.unwrap_or_else(|e| panic!("{spec} {run:?}: {e}"));
            assert_eq!(problem.mismatch(&outcome.out, &outcome.layer), None, "{spec} {run:?}");
        }
    }
}

/// One chunk and several chunks give the same bits.
#[test]
fn rows_do_not_depend_on_how_a_sequence_is_cut() {
    let spec = spec("attention_prefill_d64_w4p2c1_pdl");
    let mut kernel = CpuKernel::of(&spec, &[]);
    for window in [0, 50] {
        let whole = ChunkProblem::new(&chunk(64, 4, (0, 150, window)));
        let together = launch_chunk(&whole, &mut kernel, &spec, 1).unwrap().out;
        let (columns, out_columns) = (whole.sequence.case.columns(), whole.sequence.case.out_columns());
        for (first, last) in [(0, 64), (64, 150), (37, 38), (100, 131)] {
            let mut part = whole.clone();
            (part.chunk.start, part.chunk.tokens) = (first, last - first);
            part.sequence.qkv = whole.sequence.qkv[first as usize * columns..last as usize * columns].to_vec();
            let out = launch_chunk(&part, &mut kernel, &spec, 2).unwrap().out;
            assert!(out == together[first as usize * out_columns..][..out.len()], "{first}..{last}");
        }
    }
}

#[test]
fn hostile_pages_of_a_chunk_are_reported() {
    let (specs, mut kernel) = built("attention_prefill", &["d32_w2p2c1", "d32_w2p2c1_async"]);
    for spec in specs {
        for entry in 0..5 {
            let mut problem = ChunkProblem::new(&chunk(32, 4, (200, 100, 0)));
            problem.sequence.table[entry] = [problem.sequence.pages, u32::MAX][entry % 2];
            let outcome = launch_chunk(&problem, &mut kernel, &spec, 1).unwrap();
            assert!(outcome.fault != 0, "{spec}, entry {entry}");
            assert!(outcome.out.iter().all(|&v| !bf16(v).is_nan()), "{spec}, entry {entry}");
        }
    }
}

#[test]
fn planted_bugs_of_chunks_are_caught() {
    let prefill = "unweight/kernels/attention/prefill.cuh";
    let bulk = [
        ("ring.wait_empty(load);", ""),
        ("if constexpr (!kAsync<Config>) {\n                ptx::bar_warp_sync();", "if constexpr (!kAsync<Config>) {"),
        ("ptx::fence_proxy_async_shared();", ""),
        ("|| token > position) scores", "|| token >= position) scores"),
        ("if (token < from || token > position)", "if (token > position)"),
        ("first + S::kTokens - 1 > last_token)) clear", "false)) clear"),
        (
            "const u32 of = warp * kRows + lane / 4 + 8 * r, token = of / args.group;",
            "const u32 of = warp * kRows + lane / 4 + 8 * r, token = of / 4;",
        ),
        ("(warp * kRows + lane / 4 + 8 * r) % args.group", "(warp * kRows + lane / 4 + 8 * r) % 4"),
    ];
    let copied = [
        ("ptx::cp_async_wait_group<Config::kStages - 2>();", ""),
        (
            "ptx::cp_async_wait_group<Config::kStages - 2>();\n            ptx::bar_sync();",
            "ptx::cp_async_wait_group<Config::kStages - 2>();",
        ),
        ("ptx::cp_async_commit_group();", ";"),
        ("at += kThreads<Config> * 16", "at += kThreads<Config> * 32"),
        (
            "for (u32 s = 0; s < Config::kStages - 1; ++s) copy_next();",
            "for (u32 s = 0; s < Config::kStages; ++s) copy_next();",
        ),
    ];
    let all = bulk.into_iter().map(|edit| ("", edit)).chain(copied.into_iter().map(|edit| ("_async", edit)));
    for (copy, (from, to)) in all {
        let spec = spec(&format!("attention_prefill_d32_w2p2c1{copy}"));
        let Some(edit) = Edit::planted(prefill, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let problem = ChunkProblem::new(&chunk(32, 3, (300, 50, 100)));
        let caught = (1..=6).any(|seed| match launch_chunk(&problem, &mut kernel, &spec, seed) {
            Err(_) => true,
            Ok(outcome) => problem.mismatch(&outcome.out, &outcome.layer).is_some(),
        });
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

#[test]
fn planted_bugs_are_caught() {
    let (decode, softmax) = ("unweight/kernels/attention/decode.cuh", "unweight/kernels/attention/softmax.cuh");
    let ring = "unweight/pipeline/warp_ring.cuh";
    let bulk = [
        // Refills the slot while its loads are in flight.
        (ring, "            release_to_copy_engine();", "            ptx::bar_warp_sync();"),
        (decode, "parity ^= slot == 0;", "parity ^= 1;"),
        // Masks.
        (decode, "token > position) scores", "token >= position) scores"),
        (decode, "if (token < first_token || token > position) scores", "if (token > position) scores"),
        (decode, "clear_values(tile * kTileTokens, copy_address);", ""),
        (decode, "position - a.window + 1 : 0", "position - a.window : 0"),
        // The new token.
        (decode, "if (tile == last_tile) append(kKey, key_slot(slot));", ""),
        (decode, "if (tile == last_tile) append(kValue, copy_address);", ""),
        (decode, "half == kKey, cosines", "half == kValue, cosines"),
        (decode, "const u32 line = position % kTileTokens;", "const u32 line = position % kTileTokens / 2;"),
        // Sums.
        (decode, "mapa(address, w / Config::kWarps)", "mapa(address, 0)"),
        (decode, "store_sums();\n        sync_cluster();", "store_sums();"),
        (decode, "prepare_heads(cosines, sines);\n        ptx::bar_sync();", "prepare_heads(cosines, sines);"),
        (softmax, "sum[r] += shfl_sync_bfly(sum[r], 2);", ""),
        (softmax, "sum[r] *= factor[r];", ""),
        (softmax, "shfl_sync_bfly(top, 2)", "shfl_sync_bfly(top, 1)"),
    ];
    let copied = [
        (ring, "ptx::cp_async_wait_group<kSlots - 1>();", ""),
        (
            ring,
            "ptx::cp_async_wait_group<kSlots - 1>();\n            ptx::bar_warp_sync();",
            "ptx::cp_async_wait_group<kSlots - 1>();",
        ),
        (
            ring,
            "release() {\n        if constexpr (kAsync) {\n            ptx::bar_warp_sync();",
            "release() {\n        if constexpr (kAsync) {",
        ),
        (decode, "ptx::cp_async_commit_group();", ";"),
        (decode, "keys + at / 2)", "keys + at)"),
    ];
    let all = bulk.into_iter().map(|edit| ("", edit)).chain(copied.into_iter().map(|edit| ("_async", edit)));
    for (copy, (header, from, to)) in all {
        let spec = spec(&format!("attention_decode_d32_w2p2c2{copy}"));
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let case = Decode { window: 150, ..Decode::new(32, 4, &[0, 40, 100, 177, 333]) };
        let problem = Problem::new(&case);
        let caught = (1..=4).any(|seed| match launch(&problem, &mut kernel, &spec, seed) {
            Err(_) => true,
            Ok(outcome) => problem.mismatch(&outcome.out, &outcome.layer).is_some(),
        });
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

#[test]
fn planted_bugs_of_parts_are_caught() {
    let header = "unweight/kernels/attention/decode.cuh";
    let plants = [
        // The summing block must see the partial sums: each synchronization step from one block's threads to the
        // other's.
        ("ptx::bar_sync();\n        if (warp == 0 && ptx::elect_sync()) {", "if (warp == 0 && ptx::elect_sync()) {"),
        ("/ args.parts;\n            ptx::fence_acq_rel_gpu();", "/ args.parts;"),
        ("== live - 1;\n            ptx::fence_acq_rel_gpu();", "== live - 1;"),
        ("ptx::bar_sync();\n        return ptx::ld_shared", "return ptx::ld_shared"),
        // Tickets that are not reset, waited for from parts that never arrive, or taken by such parts.
        ("if (last) ptx::st_global(counter, 0);", ""),
        ("== live - 1;", "== args.parts - 1;"),
        ("if (Config::kSplit && rank >= live) return;", ""),
        // Parts: one too few, one counted several times, another row's, and summation in order of arrival.
        ("least(a.parts, (last_tile - first_tile + Config::kWarps) /", "least(a.parts, (last_tile - first_tile) /"),
        ("if (first + i >= live || states[i].y == 0) continue;", "if (states[i].y == 0) continue;"),
        ("u64(ptx::ctaid() - rank + of)", "u64(ptx::ctaid() - rank + of / 2)"),
        ("least(first + i, live - 1);", "(rank + first + i) % live;"),
        // More parts than are read at once.
        ("sum *= moved;", ""),
    ];
    let spec = spec("attention_decode_d32_w2p2c1_split_async");
    let case = Decode { window: 300, kv_heads: 1, ..Decode::new(32, 16, &[40, 177, 333, 334]) };
    let problems = [Problem::new(&case), opposed()];
    let run = |edits: &[Edit]| {
        let mut kernel = CpuKernel::of(&spec, edits);
        problems.iter().find_map(|problem| {
            let mut first = None;
            (1..=8).find_map(|seed| match launch_on(problem, None, &mut kernel, &spec, seed, 10) {
                Err(error) => Some(error),
                Ok(outcome) => {
                    let other = *first.get_or_insert_with(|| outcome.out.clone()) != outcome.out;
                    let other = other.then(|| "other bits".to_owned());
                    problem.mismatch(&outcome.out, &outcome.layer).or(other)
                }
            })
        })
    };
    assert_eq!(run(&[]), None);
    for (from, to) in plants {
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        assert!(run(&[edit]).is_some(), "the planted bug was not caught: `{to}` for `{from}`");
    }
}

/// Returns ten parts of 32 tokens with equal weights. The values of every second part are large and the negatives of
/// the part before. Only summation in the order of parts gives exactly the sum of the last two.
fn opposed() -> Problem {
    let mut problem = Problem::new(&Decode { kv_heads: 1, ..Decode::new(32, 8, &[319]) });
    problem.qkv.fill(0);
    for token in (0..256).filter(|token| token / 32 % 2 == 0) {
        for i in 0..32 {
            let (at, opposite) = (problem.element(0, token, 1, i), problem.element(0, token + 32, 1, i));
            // 2^20 times as large, and its negative.
            problem.layer[at] += 20 << 7;
            problem.layer[opposite] = problem.layer[at] ^ 0x8000;
        }
    }
    problem
}
