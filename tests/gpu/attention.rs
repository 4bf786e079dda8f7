//! Attention over paged KV caches against float64: every shipped variant, fresh random rows in each run, NaN wherever
//! reads are forbidden, thousands of launches with the same bits, hostile tables, errors.

use unweight_bench::attention::{Chunk, ChunkProblem, Decode, DeviceProblem, PAD, Problem};
use unweight_codegen::{
    VariantSpec,
    spec::{Arch, AttentionSpec, AttentionStep, KvCache, Op, catalog},
};
use unweight_rt::{
    DeviceBuffer, DeviceError, LaunchError, MatrixMut, RowFault,
    raw::ops::attention::{Attention, PARTS_MAX},
};

use crate::harness::{Random, context, fresh, gpu, guard_is_intact, poison, refused, stream};

fn attention(spec: &VariantSpec) -> Attention {
    Attention::new(gpu().get(spec).unwrap_or_else(|error| panic!("{spec}: {error}"))).unwrap()
}

/// Returns the variants that ship for a BF16 cache, and those for GPUs without a copy engine. `kv_engine` compares
/// packed caches with these.
fn shipped(step: AttentionStep) -> Vec<(VariantSpec, AttentionSpec)> {
    let of = |spec: VariantSpec| match spec.op {
        Op::Attention(op) if op.step == step && op.cache == KvCache::Bf16 => Some((spec, op)),
        _ => None,
    };
    catalog::of::<AttentionSpec>().chain(catalog::asynchronous(Arch::Sm90a)).filter_map(of).collect()
}

/// Returns lengths at the edges of tiles and pages, random lengths, and rows without a token.
fn positions(random: &mut Random, rows: usize, longest: u64) -> Vec<u32> {
    (0..rows)
        .map(|_| match random.below(8) {
            0 => PAD,
            1 => random.below(4) as u32 * 16,
            2 => random.below(longest / 64).max(1) as u32 * 64 - 1 + random.below(3) as u32,
            _ => random.below(longest) as u32,
        })
        .collect()
}

fn check(attention: &Attention, case: &Decode, parts: u32) {
    let what = format!("{} x{parts} {case:?}", attention.kernel().spec());
    let (stream, problem) = (stream(gpu()), Problem::new(case));
    let mut ctx = context(&stream);
    let on_device = DeviceProblem::new(&stream, &problem).unwrap();
    let mut on_device = on_device.in_parts(attention, &mut ctx, parts).unwrap();
    let (m, columns) = (case.positions.len(), case.out_columns());
    let mut out = DeviceBuffer::<u16>::zeroed(&stream, m * columns).unwrap();
    poison(&stream, &mut out);
    let view = MatrixMut::new(&mut out, m as u32, columns as u32, columns as u64).unwrap();
    on_device.decode(attention, &mut ctx, view).unwrap_or_else(|error| panic!("{what}: {error}"));
    ctx.synchronize().unwrap_or_else(|error| panic!("{what}: {error}"));
    guard_is_intact(&stream, &out, &what);
    let (out, layer) = (out.to_host(&stream).unwrap(), on_device.layer(&stream).unwrap());
    assert_eq!(problem.mismatch(&out, &layer), None, "{what}");
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_attends_as_float64() {
    let mut random = Random::new(fresh());
    for (spec, op) in shipped(AttentionStep::Decode) {
        let attention = attention(&spec);
        let head_dim = op.head_dim.get() as usize;
        for group in [1, 4, 7, 8, 16] {
            let rows = 1 + random.below(20) as usize;
            let window = if random.below(2) == 0 { 0 } else { 1 + random.below(400) as u32 };
            let (bias, norm) = (random.below(2) == 0, random.below(2) == 0);
            let rope_dim = if random.below(4) == 0 { head_dim / 2 } else { head_dim };
            let kv_heads = 1 + random.below(4) as usize;
            let positions = positions(&mut random, rows, 700);
            let seed = random.bits();
            let case =
                Decode { kv_heads, window, bias, norm, rope_dim, seed, ..Decode::new(head_dim, group, &positions) };
            let parts = if op.split { 1 + random.below(PARTS_MAX.into()) as u32 } else { 1 };
            check(&attention, &case, parts);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn adjacent_elements_are_rotated_together() {
    for (name, head_dim) in [("d128_w8p2c1", 128), ("d128_w4p2c8", 128), ("d64_w4p4c2", 64), ("d96_w4p2c1", 96)] {
        let attention = attention(&format!("uw_sm90a_attention_decode_{name}_adjacent_pdl").parse().unwrap());
        for (rope_dim, bias) in [(head_dim, false), (head_dim / 2, true), (0, false)] {
            let positions = [0, 17, PAD, 500, 127, 128, 640];
            check(&attention, &Decode { rope_dim, bias, adjacent: true, ..Decode::new(head_dim, 4, &positions) }, 1);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn long_rows_and_large_batches() {
    let mut random = Random::new(fresh());
    for (spec, op) in shipped(AttentionStep::Decode).into_iter().filter(|(_, op)| op.head_dim.get() >= 64) {
        let attention = attention(&spec);
        let head_dim = op.head_dim.get() as usize;
        let long = Decode { seed: random.bits(), ..Decode::new(head_dim, 4, &[9_000 + random.below(500) as u32, 5]) };
        check(&attention, &long, 1);
        if op.split {
            check(&attention, &long, 16);
            check(&attention, &long, PARTS_MAX);
        }
        if op.cluster.get() <= 2 && [64, 128].contains(&head_dim) {
            let positions = positions(&mut random, 200, 300);
            let large = Decode { kv_heads: 4, seed: random.bits(), ..Decode::new(head_dim, 4, &positions) };
            check(&attention, &large, if op.split { 3 } else { 1 });
        }
    }
}

/// Lengths where the number of parts with tokens changes, and the tile of the newest token moves from part to part.
#[test]
#[ignore = "needs a GPU"]
fn parts_at_every_edge() {
    for name in ["d128_w4p2c1_split_async_pdl", "d64_w4p4c1_split_async", "d80_w4p2c1_split_async_pdl"] {
        let spec: VariantSpec = format!("uw_sm90a_attention_decode_{name}").parse().unwrap();
        let Op::Attention(op) = spec.op else { unreachable!("filtered above") };
        let (attention, head_dim) = (attention(&spec), op.head_dim.get() as usize);
        for parts in [1, 2, 8, 9, PARTS_MAX] {
            // A part takes 64 tokens before the next part has any; then each round gives every part as many again.
            let edges = [1, 2, parts - 1, parts, 2 * parts].map(|part| part * 64).into_iter();
            let edges = edges.flat_map(|edge| [edge.saturating_sub(17), edge.saturating_sub(1), edge, edge + 16]);
            let positions: Vec<u32> = edges.chain([0, 15, 16, PAD]).collect();
            for window in [0, 100] {
                let seed = fresh();
                check(&attention, &Decode { window, seed, ..Decode::new(head_dim, 4, &positions) }, parts);
            }
        }
    }
}

/// As in an engine: recorded once for one row, and replayed while the row grows from part to part, next to others. The
/// counters are restored, and a row has the same bits in any batch.
#[test]
#[ignore = "needs a GPU"]
fn a_recorded_launch_in_parts_replays_at_every_length() {
    let stream = stream(gpu());
    let spec: VariantSpec = "uw_sm90a_attention_decode_d128_w4p2c1_split_async_pdl".parse().unwrap();
    let attention = attention(&spec);
    for parts in [2, 13, PARTS_MAX] {
        let seed = fresh();
        let lengths = [0, 63, 64, 127, 128, 700, 64 * parts, 64 * parts - 1, 2500];
        let case = |positions: &[u32]| Decode { seed, ..Decode::new(128, 4, positions) };
        let problem = Problem::new(&case(&lengths));
        let columns = problem.case.out_columns();
        let mut ctx = context(&stream);
        let batch = DeviceProblem::new(&stream, &problem).unwrap();
        let mut batch = batch.in_parts(&attention, &mut ctx, parts).unwrap();
        let mut together = DeviceBuffer::<u16>::zeroed(&stream, lengths.len() * columns).unwrap();
        let view = MatrixMut::new(&mut together, lengths.len() as u32, columns as u32, columns as u64).unwrap();
        batch.decode(&attention, &mut ctx, view).unwrap();
        let together = together.to_host(&stream).unwrap();

        // A row alone, whose position, table, queries and pages are set to those of each row.
        let alone = problem.row(0);
        let mut one = DeviceProblem::new(&stream, &alone).unwrap().in_parts(&attention, &mut ctx, parts).unwrap();
        let mut out = DeviceBuffer::<u16>::zeroed(&stream, columns).unwrap();
        let graph = stream
            .capture(|| {
                let view = MatrixMut::new(&mut out, 1, columns as u32, columns as u64)?;
                one.decode(&attention, &mut ctx, view)
            })
            .unwrap();
        for run in 0..3 {
            for row in 0..lengths.len() {
                one.set(&stream, &problem.row(row)).unwrap();
                poison(&stream, &mut out);
                // SAFETY: everything that the launch uses lives until the read below.
                unsafe { graph.launch() }.unwrap();
                let got = out.to_host(&stream).unwrap();
                let expected = &together[row * columns..][..columns];
                assert!(got == expected, "x{parts}, seed {seed}, run {run}: row {row} of {} tokens", lengths[row] + 1);
            }
        }
        ctx.synchronize().unwrap();
    }
}

/// As many launches in one graph as the device runs at once, repeatedly.
#[test]
#[ignore = "needs a GPU"]
fn repeated_launches_give_the_same_bits() {
    const RUNS: usize = 50;
    let stream = stream(gpu());
    for (name, parts) in [
        ("d128_w4p2c1_pdl", 1),
        ("d128_w8p2c1_pdl", 1),
        ("d128_w8p1c2_pdl", 1),
        ("d128_w4p2c8_pdl", 1),
        ("d128_w4p3c1_pdl", 1),
        ("d128_w4p3c8_pdl", 1),
        ("d128_w8p2c2_pdl", 1),
        ("d64_w4p6c8_pdl", 1),
        ("d64_w4p4c2_pdl", 1),
        ("d64_w4p4c1", 1),
        ("d128_w4p2c1_split_async_pdl", 5),
        ("d128_w4p2c1_split_async", 16),
        ("d64_w4p4c1_split_async_pdl", 32),
    ] {
        let spec: VariantSpec = format!("uw_sm90a_attention_decode_{name}").parse().unwrap();
        let Op::Attention(op) = spec.op else { unreachable!("filtered above") };
        let attention = attention(&spec);
        let mut random = Random::new(fresh());
        let positions = positions(&mut random, 64, 1500);
        let seed = random.bits();
        let case = Decode { kv_heads: 4, norm: true, seed, ..Decode::new(op.head_dim.get() as usize, 4, &positions) };
        let (m, columns) = (case.positions.len(), case.out_columns());
        let mut ctx = context(&stream);
        let on_device = DeviceProblem::new(&stream, &Problem::new(&case)).unwrap();
        let mut on_device = on_device.in_parts(&attention, &mut ctx, parts).unwrap();
        let mut outs: Vec<_> = (0..RUNS).map(|_| DeviceBuffer::<u16>::zeroed(&stream, m * columns).unwrap()).collect();
        let graph = stream
            .capture(|| {
                outs.iter_mut().try_for_each(|out| {
                    let view = MatrixMut::new(out, m as u32, columns as u32, columns as u64)?;
                    on_device.decode(&attention, &mut ctx, view)
                })
            })
            .unwrap();
        let mut first: Option<Vec<u16>> = None;
        for _ in 0..40 {
            outs.iter_mut().for_each(|out| poison(&stream, out));
            // SAFETY: everything that the launches use lives until the reads below.
            unsafe { graph.launch() }.unwrap();
            for (run, out) in outs.iter().enumerate() {
                let got = out.to_host(&stream).unwrap();
                let first = first.get_or_insert_with(|| got.clone());
                assert!(*first == got, "{spec}, seed {seed}: launch {run} gave other bits");
            }
        }
        ctx.synchronize().unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn missing_pages_are_reported() {
    let stream = stream(gpu());
    for (name, parts) in [("d128_w4p2c1", 1), ("d64_w4p4c4_pdl", 1), ("d128_w4p2c1_split_async_pdl", 4)] {
        let spec: VariantSpec = format!("uw_sm90a_attention_decode_{name}").parse().unwrap();
        let Op::Attention(op) = spec.op else { unreachable!("filtered above") };
        let attention = attention(&spec);
        let case = Decode::new(op.head_dim.get() as usize, 4, &[100, 300, 200]);
        let problem = Problem::new(&case);
        let columns = case.out_columns();
        let mut ctx = context(&stream);
        let mut run = |entries: &[(usize, u32)]| {
            let on_device = DeviceProblem::new(&stream, &problem).unwrap();
            let mut on_device = on_device.in_parts(&attention, &mut ctx, parts).unwrap();
            for (entry, page) in entries {
                on_device.table().write(&stream, *entry, &[*page]).unwrap();
            }
            let mut out = DeviceBuffer::<u16>::zeroed(&stream, 3 * columns).unwrap();
            poison(&stream, &mut out);
            let view = MatrixMut::new(&mut out, 3, columns as u32, columns as u64).unwrap();
            on_device.decode(&attention, &mut ctx, view).unwrap();
            (ctx.synchronize(), out.to_host(&stream).unwrap())
        };
        let (fault, right) = run(&[]);
        fault.unwrap();
        for page in [problem.pages, u32::MAX, 1 << 31] {
            for entry in 0..problem.table_pages {
                let (fault, out) = run(&[(problem.table_pages + entry, page)]);
                let fault = fault.expect_err("the layer does not have the page");
                assert!(matches!(fault, DeviceError::Row { row: 1, what: RowFault::Page }), "{fault}");
                assert!(out[..columns] == right[..columns] && out[2 * columns..] == right[2 * columns..]);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn operands_that_do_not_agree_are_refused() {
    let stream = stream(gpu());
    let spec: VariantSpec = "uw_sm90a_attention_decode_d128_w4p2c1".parse().unwrap();
    let attention = attention(&spec);
    let mut ctx = context(&stream);
    let mut out = DeviceBuffer::<u16>::zeroed(&stream, 3 * 1024).unwrap();
    let case = Decode::new(64, 4, &[1, 2]);
    let mut other = DeviceProblem::new(&stream, &Problem::new(&case)).unwrap();
    let view = MatrixMut::new(&mut out, 2, 512, 512).unwrap();
    assert_eq!(refused(other.decode(&attention, &mut ctx, view)), LaunchError::HeadDimOf { takes: 128, cache: 64 });
    let prefill = Chunk { head_dim: 64, kv_heads: 2, group: 4, start: 0, tokens: 1, window: 0, softcap: None, seed: 1 };
    let view = MatrixMut::new(&mut out, 1, 512, 512).unwrap();
    let step = refused(other.prefill(&attention, &mut ctx, &prefill, view));
    assert_eq!(step, LaunchError::Step { takes: "decode", asked: "prefill" });
    let case = Decode::new(128, 4, &[1, 2]);
    let mut right = DeviceProblem::new(&stream, &Problem::new(&case)).unwrap();
    for (rows, columns) in [(3, 1024), (2, 1000), (2, 512)] {
        let view = MatrixMut::new(&mut out, rows, columns, columns.into()).unwrap();
        assert!(matches!(refused(right.decode(&attention, &mut ctx, view)), LaunchError::AttentionHeads { .. }));
    }
    // Parts: too many, for a kernel without parts, and for an execution context that is too small.
    assert_eq!(refused(attention.context_size(2, 2, 2)), LaunchError::Parts { parts: 2, limit: 1 });
    let spec: VariantSpec = "uw_sm90a_attention_decode_d128_w4p2c1_split_async".parse().unwrap();
    let split = self::attention(&spec);
    assert_eq!(refused(split.context_size(2, 2, 0)), LaunchError::Parts { parts: 0, limit: PARTS_MAX });
    assert_eq!(refused(split.context_size(2, 2, PARTS_MAX + 1)), LaunchError::Parts { parts: 33, limit: PARTS_MAX });
    let problem = DeviceProblem::new(&stream, &Problem::new(&case)).unwrap();
    let mut other = context(&stream);
    let mut problem = problem.in_parts(&split, &mut other, 2).unwrap();
    let view = MatrixMut::new(&mut out, 2, 1024, 1024).unwrap();
    assert!(matches!(refused(problem.decode(&split, &mut ctx, view)), LaunchError::ContextTooSmall { .. }));
}

fn check_chunk(attention: &Attention, chunk: &Chunk) -> Vec<u16> {
    let what = format!("{} {chunk:?}", attention.kernel().spec());
    let (stream, problem) = (stream(gpu()), ChunkProblem::new(chunk));
    let mut ctx = context(&stream);
    let mut on_device = DeviceProblem::new(&stream, &problem.sequence).unwrap();
    let (m, columns) = (chunk.tokens, problem.sequence.case.out_columns());
    let mut first: Option<Vec<u16>> = None;
    for _ in 0..3 {
        let mut out = DeviceBuffer::<u16>::zeroed(&stream, m as usize * columns).unwrap();
        poison(&stream, &mut out);
        let view = MatrixMut::new(&mut out, m, columns as u32, columns as u64).unwrap();
        on_device.prefill(attention, &mut ctx, chunk, view).unwrap_or_else(|error| panic!("{what}: {error}"));
        ctx.synchronize().unwrap_or_else(|error| panic!("{what}: {error}"));
        guard_is_intact(&stream, &out, &what);
        let out = out.to_host(&stream).unwrap();
        let first = first.get_or_insert_with(|| out.clone());
        assert!(*first == out, "{what}: other bits");
    }
    let out = first.unwrap();
    assert_eq!(problem.mismatch(&out, &on_device.layer(&stream).unwrap()), None, "{what}");
    out
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_attends_to_chunks_as_float64() {
    let mut random = Random::new(fresh());
    for (spec, op) in shipped(AttentionStep::Prefill) {
        let attention = attention(&spec);
        for group in [1, 4, 7, 16] {
            let (start, tokens) = (random.below(300) as u32, 1 + random.below(300) as u32);
            let window = if random.below(2) == 0 { 0 } else { 1 + random.below(200) as u32 };
            let (head_dim, kv_heads) = (op.head_dim.get() as usize, 1 + random.below(3) as usize);
            let seed = random.bits();
            check_chunk(&attention, &Chunk { head_dim, kv_heads, group, start, tokens, window, softcap: None, seed });
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn long_chunks() {
    let mut random = Random::new(fresh());
    let spec: VariantSpec = "uw_sm90a_attention_prefill_d128_w4p2c1_pdl".parse().unwrap();
    let attention = attention(&spec);
    for (start, tokens) in [(0, 2048), (1500, 700)] {
        let seed = random.bits();
        let chunk = Chunk { head_dim: 128, kv_heads: 2, group: 4, start, tokens, window: 0, softcap: None, seed };
        check_chunk(&attention, &chunk);
    }
}

/// Features of Gemma 2 and Gemma 3: soft caps, and norms that multiply by one plus the weight.
#[test]
#[ignore = "needs a GPU"]
fn scores_have_soft_caps_and_norms_one_plus_their_weight() {
    let mut random = Random::new(fresh());
    let of = |name: &str| attention(&format!("uw_sm90a_attention_{name}").parse().unwrap());
    for (name, head_dim) in [
        ("decode_d256_w4p1c8", 256),
        ("decode_d256_w4p1c1", 256),
        ("decode_d256_w4p1c1_split_async", 256),
        ("decode_d128_w8p2c1", 128),
    ] {
        let parts = if name.contains("split") { 3 } else { 1 };
        let positions = positions(&mut random, 20, 900);
        let capped = of(&format!("{name}_softcap_pdl"));
        for (window, cap) in [(0, 1.0), (100, 3.0)] {
            let seed = random.bits();
            let case = Decode { window, softcap: Some(cap), seed, ..Decode::new(head_dim, 2, &positions) };
            check(&capped, &case, parts);
        }
        let case = Decode { norm: true, plus_one: true, seed: random.bits(), ..Decode::new(head_dim, 4, &positions) };
        check(&of(&format!("{name}_plus_one_pdl")), &case, parts);
    }
    for (name, head_dim) in [
        ("prefill_d256_w4p2c1_softcap_pdl", 256),
        ("prefill_d256_w4p2c1_async_softcap", 256),
        ("prefill_d128_w4p2c1_softcap_pdl", 128),
    ] {
        for (start, tokens, window) in [(0, 300, 0), (77, 129, 50)] {
            let (softcap, seed) = (Some(1.5), random.bits());
            check_chunk(&of(name), &Chunk { head_dim, kv_heads: 2, group: 4, start, tokens, window, softcap, seed });
        }
    }
}
