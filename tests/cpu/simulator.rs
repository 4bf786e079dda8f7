//! Tests the simulator itself: its matrix instructions, swizzled copies, clusters and stores, and that it reports every
//! kind of error that `tests/simulator/README.md` promises to detect.

use crate::harness::{CpuKernel, Launch, MapSpec};
use bytemuck::{Pod, Zeroable};
use unweight_codegen::abi::TensorMap;

/// Two maps, two inputs, two outputs: enough for every kernel here.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    a: TensorMap,
    b: TensorMap,
    input: u64,
    output: u64,
    second: u64,
    padding: [u64; 5],
}

const HEAD: &str = r#"
#include "unweight/mma/descriptor.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"
#include "unweight/ptx/memory.cuh"
#include "unweight/ptx/mma.cuh"
#include "unweight/ptx/wgmma.cuh"
#include "unweight/smem/tile.cuh"
using namespace uw;
using namespace uw::ptx;
struct Args { TensorMap a, b; void* input; float* output; float* second; u64 padding[5]; };
static_assert(sizeof(Args) == 320);
extern "C" __global__ void test(const __grid_constant__ Args args) {
    const u32 shared = cvta_to_shared(dynamic_smem());
    const u32 thread = tid(), lane = laneid();
    (void)shared, (void)thread, (void)lane;
"#;

fn build(body: &str) -> CpuKernel {
    CpuKernel::source(&format!("{HEAD}{body}\n}}\n"), "test", "Args")
}

fn launch(block: u32, cluster: u32, seed: u64) -> Launch {
    Launch { grid: cluster, block, smem_bytes: 32 * 1024, cluster, seed }
}

fn bf16(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// Small integers are exact in bf16, and so are their sums in fp32.
fn matrix(rows: usize, columns: usize, seed: usize) -> (Vec<f32>, Vec<u16>) {
    let values: Vec<f32> = (0..rows * columns).map(|i| ((i * 7919 + seed * 31) % 17) as f32 - 8.0).collect();
    let bits = values.iter().map(|&v| bf16(v)).collect();
    (values, bits)
}

fn product(a: &[f32], b: &[f32], m: usize, n: usize, k: usize) -> Vec<f32> {
    let mut d = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            d[i * n + j] = (0..k).map(|x| a[i * k + x] * b[j * k + x]).sum();
        }
    }
    d
}

#[test]
fn wgmma_from_descriptors_and_from_registers() {
    let mut kernel = build(
        r#"
    const u32 bar = shared + 16384;
    if (thread == 0) mbarrier_init(bar, 1);
    bar_sync();
    if (thread == 0) {
        mbarrier_arrive_expect_tx(bar, 16384);
        tma_load_2d(shared, args.a, 0, 0, bar);
        tma_load_2d(shared + 8192, args.b, 0, 0, bar);
    }
    mbarrier_wait_parity(bar, 0);
    float d[32] = {}, e[32] = {};
    wgmma_fence();
    for (u32 s = 0; s < 4; ++s) wgmma(d, mma::k_major_descriptor(shared + 32 * s), mma::k_major_descriptor(shared + 8192 + 32 * s));
    wgmma_commit_group();
    const smem::Bf16Tile<64> x{shared};
    u32 a[4][4];
    for (u32 s = 0; s < 4; ++s) {
        const U32x4 f = ldmatrix_x4(x.chunk(thread / 32 * 16 + lane % 16, s * 2 + lane / 16));
        a[s][0] = f.x, a[s][1] = f.y, a[s][2] = f.z, a[s][3] = f.w;
    }
    wgmma_fence();
    for (u32 s = 0; s < 4; ++s) wgmma(e, a[s], mma::k_major_descriptor(shared + 8192 + 32 * s));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    for (u32 i = 0; i < 32; ++i) {
        const u32 row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        args.output[row * 64 + column] = d[i];
        args.second[row * 64 + column] = e[i];
    }"#,
    );
    let ((a, a_bits), (b, b_bits)) = (matrix(60, 64, 1), matrix(64, 64, 2));
    let map = |kernel: &mut CpuKernel, bits: &[u16], rows| {
        kernel.tensor_map(&MapSpec {
            data: bytemuck::cast_slice(bits),
            element_bytes: 2,
            columns: 64,
            rows,
            box_columns: 64,
            box_rows: 64,
            swizzle_bytes: 128,
        })
    };
    // Four rows of A are outside the tensor and must read as zero.
    let expected = [product(&a, &b, 60, 64, 64), vec![0.0; 4 * 64]].concat();
    for seed in 0..4 {
        let (mut d, mut e) = (vec![f32::NAN; 64 * 64], vec![f32::NAN; 64 * 64]);
        let args = Args {
            a: map(&mut kernel, &a_bits, 60),
            b: map(&mut kernel, &b_bits, 64),
            input: 0,
            output: d.as_mut_ptr() as u64,
            second: e.as_mut_ptr() as u64,
            padding: [0; 5],
        };
        // SAFETY: `d` and `e` hold the 64 x 64 floats that the kernel writes.
        unsafe { kernel.launch(&launch(128, 1, seed), &args).unwrap() };
        assert_eq!(d, expected);
        assert_eq!(e, expected);
    }
}

#[test]
fn warp_mma_with_matrix_loads() {
    let mut kernel = build(
        r#"
    // input: A[16,16] then B[8,16]; staged row by row, 32 bytes each.
    for (u32 i = lane; i < 48; i += 32) st_shared_x4(shared + i * 16, ld_global_x4(static_cast<u8*>(args.input) + i * 16));
    bar_warp_sync();
    const U32x4 f = ldmatrix_x4(shared + lane % 16 * 32 + lane / 16 * 16);
    const U32x4 g = ldmatrix_x4(shared + 512 + lane % 8 * 32 + lane / 8 % 2 * 16);
    float d[4] = {};
    const u32 a[4] = {f.x, f.y, f.z, f.w}, b[2] = {g.x, g.y};
    mma_m16n8k16(d, a, b);
    for (u32 i = 0; i < 4; ++i) args.output[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
    // Store the A fragment transposed and load it back transposed.
    stmatrix_x4_trans(shared + 1024 + lane * 16, f);
    bar_warp_sync();
    const U32x4 h = ldmatrix_x4_trans(shared + 1024 + lane * 16);
    args.second[lane] = h.x == f.x && h.y == f.y && h.z == f.z && h.w == f.w;"#,
    );
    let ((a, a_bits), (b, b_bits)) = (matrix(16, 16, 3), matrix(8, 16, 4));
    let input = [a_bits, b_bits].concat();
    let mut aligned = vec![0u128; input.len() / 8];
    bytemuck::cast_slice_mut::<_, u16>(&mut aligned).copy_from_slice(&input);
    let (mut d, mut same) = (vec![f32::NAN; 128], vec![0f32; 32]);
    let args = Args {
        input: aligned.as_ptr() as u64,
        output: d.as_mut_ptr() as u64,
        second: same.as_mut_ptr() as u64,
        ..Args::zeroed()
    };
    // SAFETY: the buffers have the sizes that the kernel reads and writes.
    unsafe { kernel.launch(&launch(32, 1, 1), &args).unwrap() };
    assert_eq!(d, product(&a, &b, 16, 8, 16));
    assert_eq!(same, vec![1.0; 32]);
}

#[test]
fn blocks_of_a_cluster_reach_each_other() {
    let mut kernel = build(
        r#"
    const u32 rank = cluster_ctarank(), peer = rank ^ 1, bar = shared + 1024;
    if (thread == 0) mbarrier_init(bar, 32);
    bar_sync();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    st_shared_cluster_x4(mapa(shared + thread * 16, peer), {rank, thread, 7, 8});
    mbarrier_arrive_cluster(mapa(bar, peer));
    mbarrier_wait_parity_cluster(bar, 0);
    const U32x4 v = ld_shared_x4(shared + thread * 16);
    args.output[rank * 32 + thread] = v.x * 100 + v.y;
    barrier_cluster_arrive();
    barrier_cluster_wait();"#,
    );
    let mut out = vec![f32::NAN; 64];
    let args = Args { output: out.as_mut_ptr() as u64, ..Args::zeroed() };
    // SAFETY: the output holds 2 x 32 floats.
    unsafe { kernel.launch(&launch(32, 2, 9), &args).unwrap() };
    let expected: Vec<f32> = (0..64).map(|i| if i < 32 { 100.0 + i as f32 } else { (i - 32) as f32 }).collect();
    assert_eq!(out, expected);
}

#[test]
fn tensor_stores_clip_and_add() {
    let mut kernel = build(
        r#"
    // An 8x8 box of floats at column 4, row 6 of a 12x10 matrix: 6 by 6 elements are inside.
    for (u32 i = thread; i < 64; i += 32) st_shared(shared + i * 4, bits_from_float(float(i)));
    fence_proxy_async_shared();
    bar_sync();
    if (thread == 0) {
        tma_store_2d(args.a, 4, 6, shared);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
        tma_reduce_add_2d(args.a, 4, 6, shared);
        cp_async_bulk_store(args.output, shared, 256);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }"#,
    );
    let target = vec![-1f32; 12 * 10];
    let linear = vec![0u128; 16];
    let a = kernel.tensor_map(&MapSpec {
        data: bytemuck::cast_slice(&target),
        element_bytes: 4,
        columns: 10,
        rows: 12,
        box_columns: 8,
        box_rows: 8,
        swizzle_bytes: 0,
    });
    let args = Args { a, output: linear.as_ptr() as u64, ..Args::zeroed() };
    // SAFETY: the map covers `target`, and `linear` holds 256 bytes.
    unsafe { kernel.launch(&launch(32, 1, 4), &args).unwrap() };
    // The compiler does not know of these writes, so read through the pointers again.
    let (target, linear) = (std::hint::black_box(target), std::hint::black_box(linear));
    for row in 0..12 {
        for column in 0..10 {
            let inside = row >= 6 && column >= 4;
            let expected = if inside { 2.0 * ((row - 6) * 8 + column - 4) as f32 } else { -1.0 };
            assert_eq!(target[row * 10 + column], expected, "({row}, {column})");
        }
    }
    let linear: &[f32] = bytemuck::cast_slice(&linear);
    assert!(linear.iter().enumerate().all(|(i, &v)| v == i as f32));
}

/// Every lane of the first warp has loaded bytes that a bulk copy wrote.
const LOADED: &str = "if (thread == 0) { mbarrier_init(shared, 1); mbarrier_init(shared + 8, 1); \
     mbarrier_arrive_expect_tx(shared, 64); cp_async_bulk_load(shared + 128, args.input, 64, shared); } bar_sync(); \
     if (thread >= 32) break; mbarrier_wait_parity(shared, 0); ld_shared_x4(shared + 128 + lane % 4 * 16); ";
/// A bulk copy that overwrites these bytes.
const REFILL: &str = "if (thread == 0) { mbarrier_arrive_expect_tx(shared, 64); cp_async_bulk_load(shared + 128, args.input, 64, shared); } \
     mbarrier_wait_parity(shared, 1);";

#[test]
fn released_memory_may_be_refilled() {
    let releases = [
        "fence_proxy_async_shared(); bar_warp_sync(); REFILL",
        "bar_warp_sync(); if (lane == 0) mbarrier_arrive(shared + 8); mbarrier_wait_parity(shared + 8, 0); REFILL",
    ];
    let arms: String = releases
        .iter()
        .enumerate()
        .map(|(i, release)| format!("case {i}: {{ {LOADED} {} break; }}\n", release.replace("REFILL", REFILL)))
        .collect();
    let mut kernel = build(&format!("switch (args.padding[0]) {{\n{arms}}}"));
    let input = [0u128; 4];
    for (i, release) in releases.iter().enumerate() {
        let args = Args { input: input.as_ptr() as u64, padding: [i as u64, 0, 0, 0, 0], ..Args::zeroed() };
        // SAFETY: the copies read 64 bytes of `input`; everything else is shared memory.
        unsafe { kernel.launch(&launch(128, 1, 1), &args) }.unwrap_or_else(|error| panic!("{release}: {error}"));
    }
}

/// Each thread of two blocks writes a word; the block with the second ticket reads the other's words.
const LAST: &str = "u32* parts = (u32*)args.output; u32* counter = (u32*)args.second; const u32 own = ctaid(); \
    st_global(parts + own * 64 + thread, 7); MEET \
    if (thread == 0) { RELEASE const u32 ticket = atom_add_global(counter, 1); ACQUIRE st_shared(shared, ticket); } \
    TELL if (ld_shared(shared) == 1 && ld_global(parts + (own ^ 1) * 64 + thread) != 7) trap();";
/// Block 0 writes the words, and block 1 waits for a flag.
const FLAG: &str = "u32* parts = (u32*)args.output; u32* flag = (u32*)args.second; \
    if (ctaid() == 0) { st_global(parts + thread, 7); MEET if (thread == 0) st_release_global(flag, 1); } \
    else { if (thread == 0) while (LOAD == 0) poll(); TELL if (ld_global(parts + thread) != 7) trap(); }";

#[test]
fn stream_k_partial_sums_are_handed_over() {
    let right = [
        ("MEET", "bar_sync();"),
        ("RELEASE", "fence_acq_rel_gpu();"),
        ("ACQUIRE", "fence_acq_rel_gpu();"),
        ("TELL", "bar_sync();"),
        ("LOAD", "ld_acquire_global(flag)"),
    ];
    let with = |text: &str, wrong: Option<(&str, &str)>| {
        let replace = |text: String, (from, to): (&str, &str)| text.replace(from, to);
        right.into_iter().fold(wrong.into_iter().fold(text.to_owned(), replace), replace)
    };
    // Broken synchronization: only half of the block meets, a fence is missing, a thread fences that has not met the
    // others, a load does not acquire. A block that does not even wait may read unwritten words.
    let unread = "load of `partials`";
    let half = "if (thread < 32) bar_warp_sync();";
    let cases = [
        (with(LAST, None), None),
        (with(FLAG, None), None),
        (with(LAST, Some(("MEET", half))), Some(unread)),
        (with(LAST, Some(("RELEASE", ""))), Some(unread)),
        (with(LAST, Some(("ACQUIRE", ""))), Some(unread)),
        (
            with(
                LAST,
                Some(("MEET if (thread == 0) {", "if (thread == 32) fence_acq_rel_gpu(); MEET if (thread == 0) {")),
            ),
            None,
        ),
        (
            with(&LAST.replace("RELEASE", ""), Some(("MEET", "if (thread == 0) fence_acq_rel_gpu(); MEET"))),
            Some(unread),
        ),
        (
            with(&LAST.replace("ACQUIRE", ""), Some(("TELL", "TELL if (thread == 32) fence_acq_rel_gpu();"))),
            Some(unread),
        ),
        (with(LAST, Some(("own ^ 1) * 64", "own) * 64 + 128"))), Some("no thread has written in this launch")),
        (with(LAST, Some(("parts + own * 64 + thread, 7", "parts + thread, 7"))), Some("store of `partials`")),
        (with(FLAG, Some(("LOAD", "ld_global(flag)"))), Some(unread)),
        (with(FLAG, Some(("MEET", half))), Some(unread)),
        (with(FLAG, Some(("TELL", half))), Some(unread)),
    ];
    let arms: String =
        cases.iter().enumerate().map(|(i, (body, _))| format!("case {i}: {{ {body} break; }}\n")).collect();
    let mut kernel = build(&format!("using cpu::poll;\nswitch (args.padding[0]) {{\n{arms}}}"));
    for (i, (body, report)) in cases.iter().enumerate() {
        for seed in 1..=8 {
            let (parts, counter) = ([0u32; 256], [0u32; 4]);
            kernel.clear_registered();
            kernel.register(bytemuck::bytes_of(&parts), "partials");
            kernel.register(bytemuck::bytes_of(&counter), "counter");
            let (output, second) = (parts.as_ptr() as u64, counter.as_ptr() as u64);
            let args = Args { output, second, padding: [i as u64, 0, 0, 0, 0], ..Args::zeroed() };
            // SAFETY: the wrappers check every access against the two buffers, which live through the launch.
            let result = unsafe { kernel.launch(&launch(64, 2, seed), &args) };
            match report {
                None => assert_eq!(result, Ok(()), "{body}"),
                Some(report) => {
                    let error = result.expect_err(body);
                    assert!(error.contains(report), "{body}\nexpected a report of `{report}`, got: {error}");
                }
            }
        }
    }
}

/// A warp may run ahead of the others or behind them as far as barriers permit, whatever other operations it passes.
#[test]
fn missing_barriers_are_detected() {
    // Each warp writes a number and adds up all of them, round by round.
    const SUMS: &str = "u32 sum = 0; for (u32 round = 0; round < 4; ++round) { \
        for (u32 i = 0; i < 6; ++i) bar_warp_sync(); \
        if (lane == 31) st_shared(shared + thread / 32 * 4, round * 10 + thread / 32); WRITTEN \
        for (u32 w = 0; w < 4; ++w) sum += ld_shared(shared + 4 * w); READ } args.output[thread] = sum;";
    // Three warps produce a number together, which the last warp reads.
    const MADE: &str = "float sum = 0; for (u32 round = 0; round < 4; ++round) { \
        if (thread < 96) { for (u32 i = 0; i < 6; ++i) bar_sync(1, 96); \
            if (thread == 0) st_shared(shared, round + 1); } WRITTEN \
        if (thread >= 96) sum += ld_shared(shared); READ } args.output[thread] = sum;";
    let (barrier, cases) = ("bar_sync();", [("SUMS", SUMS), ("MADE", MADE)]);
    let (mut bodies, mut names) = (Vec::new(), Vec::new());
    for (name, text) in cases {
        for (written, read) in [(barrier, barrier), ("", barrier), (barrier, "")] {
            bodies.push(text.replace("WRITTEN", written).replace("READ", read));
            names.push((name, written.is_empty(), read.is_empty()));
        }
    }
    let arms: String = bodies.iter().enumerate().map(|(i, body)| format!("case {i}: {{ {body} break; }}\n")).collect();
    let mut kernel = build(&format!("switch (args.padding[0]) {{\n{arms}}}"));
    for (i, &(name, unwritten, unread)) in names.iter().enumerate() {
        let wrong = (1..=8).filter(|&seed| {
            let out = vec![f32::NAN; 128];
            let args = Args { output: out.as_ptr() as u64, padding: [i as u64, 0, 0, 0, 0], ..Args::zeroed() };
            // SAFETY: `out` holds one number per thread; everything else is shared memory.
            unsafe { kernel.launch(&launch(128, 1, seed), &args) }.unwrap();
            let out = std::hint::black_box(out);
            let expected = |thread: usize| match name {
                // 0 to 3, plus tens of the round, four times each.
                "SUMS" => 4.0 * 6.0 + 40.0 * 6.0,
                _ => {
                    if thread < 96 {
                        0.0
                    } else {
                        10.0
                    }
                }
            };
            out.iter().enumerate().any(|(thread, &sum)| sum != expected(thread))
        });
        let (wrong, right) = (wrong.count(), !unwritten && !unread);
        assert!(
            if right { wrong == 0 } else { wrong >= 6 },
            "{name}, {unwritten} {unread}: wrong by {wrong} of 8 seeds"
        );
    }
}

#[test]
fn simulator_reports_mistakes() {
    // (body, expected part of the report)
    let cases = [
        (
            "if (thread == 0) mbarrier_init(shared, 2); bar_sync(); if (thread == 0) mbarrier_arrive(shared); mbarrier_wait_parity(shared, 0);",
            "1 of 2 arrivals",
        ),
        ("if (thread < 32) bar_sync(3, 64);", "named barrier 3"),
        ("mbarrier_arrive(shared);", "never initialised"),
        ("st_shared_x4(shared + 8, {0, 0, 0, 0});", "not 16-byte aligned"),
        ("st_shared(shared + 32 * 1024, 1);", "outside the block's 32768 bytes"),
        ("ld_global(static_cast<u8*>(args.input) + 64);", "outside its 64 bytes"),
        (
            "if (thread == 0) { mbarrier_init(shared, 1); cp_async_bulk_load(shared + 128, static_cast<u8*>(args.input) + 16, 64, shared); }",
            "outside its 64 bytes",
        ),
        (
            "if (thread == 0) { mbarrier_init(shared, 1); mbarrier_arrive_expect_tx(shared, 64); cp_async_bulk_load(shared + 128, args.input, 64, shared); }",
            "in flight",
        ),
        (
            "if (thread == 0) { st_shared(shared, 1); cp_async_bulk_store(args.input, shared, 16); }",
            "without fence.proxy.async",
        ),
        ("if (thread == 0) { cp_async_bulk_load(shared, args.input, 20, shared); }", "multiple of 16"),
        ("if (lane == 0) bar_warp_sync(); else shfl_sync_idx(1, 2);", "not converged"),
        (
            "if (thread == 0) mbarrier_init(shared, 1); bar_sync(); while (!mbarrier_try_wait_parity(shared, 0)) {}",
            "livelock",
        ),
        (
            "float d[4] = {}; wgmma(d, mma::k_major_descriptor(shared), mma::k_major_descriptor(shared)); wgmma_commit_group();",
            "no thread waited for",
        ),
        ("trap();", "trap"),
        // The copy engine must not overwrite what ordinary loads have read ...
        ("LOADED bar_warp_sync(); REFILL", "no thread has released"),
        ("LOADED bar_sync(1, 32); REFILL", "no thread has released"),
        // ... unless every reader has fenced.
        ("LOADED if (lane < 31) fence_proxy_async_shared(); bar_warp_sync(); REFILL", "no thread has released"),
        ("LOADED fence_proxy_async_shared(); ld_shared(shared + 128); bar_warp_sync(); REFILL", "no thread has released"),
        // An arrival covers only threads that have met before it, and only for threads that wait for it.
        ("LOADED bar_warp_sync(); if (lane == 0) mbarrier_arrive(shared + 8); REFILL", "no thread has released"),
        (
            "if (thread == 0) { mbarrier_init(shared, 1); mbarrier_init(shared + 8, 1); } bar_sync(); \
             if (thread < 32) { ld_shared_x4(shared + 128); bar_sync(1, 32); } \
             else if (thread == 32) { mbarrier_arrive(shared + 8); } \
             else if (thread == 64) { mbarrier_wait_parity(shared + 8, 0); while (!mbarrier_try_wait_parity(shared, 1)) {} \
             for (u32 i = 0; i < 64; ++i) cpu::poll(); cp_async_bulk_load(shared + 128, args.input, 64, shared); }",
            "no thread has released",
        ),
        (
            "ld_shared_x4(shared + 128); bar_sync(); if (thread == 0) { mbarrier_init(shared, 1); \
             mbarrier_arrive_expect_tx(shared, 64); cp_async_bulk_load(shared + 128, args.input, 64, shared); }",
            "no thread has released",
        ),
        (
            "if (thread == 0) { mbarrier_init(shared, 1); fence_proxy_async_shared(); cp_async_bulk_store(args.input, shared + 128, 64); \
             cp_async_bulk_commit_group(); mbarrier_arrive_expect_tx(shared, 64); cp_async_bulk_load(shared + 128, args.input, 64, shared); }",
            "still reading",
        ),
        ("LOADED if (lane == 0) mbarrier_arrive(shared + 8); bar_warp_sync(); REFILL", "no thread has released"),
        (
            "if (thread == 0) { mbarrier_init(shared, 1); st_shared(shared + 128, 1); cp_async_bulk_load(shared + 128, args.input, 64, shared); }",
            "written by an ordinary store",
        ),
    ]
    .map(|(body, report)| (body.replace("LOADED", LOADED).replace("REFILL", REFILL), report));
    // One library for all cases, because compiling takes most of the time.
    let arms: String =
        cases.iter().enumerate().map(|(i, (body, _))| format!("case {i}: {{ {body} break; }}\n")).collect();
    let mut kernel = build(&format!("switch (args.padding[0]) {{\n{arms}}}"));
    let input = vec![0u128; 4];
    kernel.register(bytemuck::cast_slice(&input), "input");
    for (i, (body, report)) in cases.iter().enumerate() {
        let args = Args { input: input.as_ptr() as u64, padding: [i as u64, 0, 0, 0, 0], ..Args::zeroed() };
        // SAFETY: the wrappers check every access against `input`; nothing is accessed through plain pointers.
        let error = unsafe { kernel.launch(&launch(128, 1, 1), &args) }.expect_err(body);
        assert!(error.contains(report), "{body}\nexpected a report of `{report}`, got: {error}");
    }
}
