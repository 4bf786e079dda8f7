//! Concurrent streams: launches whose blocks wait for each other do not hang, and their bits do not change.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use crate::{
    gemm_packed::{context, weights},
    harness::{GUARD, Random, bf16, gpu, guard_is_intact, poison, refused, stream},
};
use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{GemmWgmmaSpec, catalog},
};
use unweight_format::{Histogram, Matrix, raw::packed::pack};
use unweight_rt::{
    DeviceBuffer, DeviceMatrix, DevicePacked, ExecContext, KernelSet, LaunchError, Stream,
    raw::{
        device::{Staging, Upload},
        ops::gemm_packed::PackedGemm,
    },
};

/// Ends the process unless dropped in time, because blocks that wait for each other forever cannot be interrupted.
struct Deadline(Option<std::sync::mpsc::Sender<()>>);

impl Deadline {
    fn seconds(seconds: u64, what: &'static str) -> Self {
        let (done, wait) = channel::<()>();
        thread::spawn(move || {
            if wait.recv_timeout(Duration::from_secs(seconds)) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{what}: not finished after {seconds} s; blocks wait for blocks that never run");
                std::process::abort();
            }
        });
        Self(Some(done))
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        self.0.take();
    }
}

/// Returns every catalogued variant whose blocks wait for each other at this problem.
fn waiting(problem: GemmShape, sms: u32) -> Vec<VariantSpec> {
    let waits = |spec: &VariantSpec| {
        let plan = Plan::new(spec).unwrap();
        plan.launch.grid.blocks(problem, sms).is_some_and(|blocks| plan.launch.blocks_wait(problem, blocks))
    };
    catalog::of::<GemmWgmmaSpec>().filter(waits).collect()
}

/// A product with its own stream, context and output.
struct Runner {
    matmul: PackedGemm,
    stream: Stream,
    ctx: ExecContext,
    y: DeviceMatrix,
}

impl Runner {
    fn new(kernels: &KernelSet, spec: &VariantSpec, problem: GemmShape) -> Self {
        let stream = stream(kernels);
        let matmul = PackedGemm::new(kernels.get(spec).unwrap_or_else(|error| panic!("{error}"))).unwrap();
        let mut y = DeviceMatrix::zeroed(&stream, problem.m, problem.n).unwrap();
        poison(&stream, &mut y);
        Self { matmul, ctx: context(&stream, spec, problem), y, stream }
    }

    fn enqueue(&mut self, x: &DeviceMatrix, w: &DevicePacked) {
        self.matmul.enqueue(&mut self.ctx, x.view(), w, self.y.view_mut()).unwrap_or_else(|error| panic!("{error}"));
    }

    fn bits(&self) -> Vec<u16> {
        self.y.to_host(&self.stream).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Fills all SMs, and splits tiles of Y at every batch tile.
const PROBLEM: GemmShape = GemmShape { m: 300, n: 1088, k: 4096 };
const LAUNCHES: usize = 1000;
const ROUNDS: usize = 10;

#[test]
#[ignore = "needs a GPU"]
fn stream_k_on_two_streams_gives_the_same_bits() {
    let _deadline = Deadline::seconds(300, "stream-K on two streams");
    let kernels = gpu();
    let specs: Vec<VariantSpec> = waiting(PROBLEM, kernels.device().info().sms)
        .into_iter()
        // Variants that add to Y would not give the same bits twice.
        .filter(|spec| spec.to_string().ends_with("_store"))
        .collect();
    assert!(specs.len() >= 4, "{specs:?}");
    kernels.prepare(&specs, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    let setup = stream(kernels);
    let GemmShape { m, n, k } = PROBLEM;
    let bits = weights(n as usize, k as usize, 1000, 4);
    let bytes: &[u8] = bytemuck::cast_slice(&bits);
    let tensor = pack(Matrix::new(bytes, n as usize, k as usize).unwrap(), &Histogram::of(bytes)).unwrap();
    let w = DevicePacked::upload(&setup, &tensor).unwrap();
    let mut rng = Random::new(6);
    let x: Vec<u16> = (0..m * k).map(|_| bf16(rng.normal())).collect();
    let x = DeviceMatrix::from_host(&setup, m, k, &x).unwrap();
    setup.synchronize().unwrap();

    for (index, spec) in specs.iter().enumerate() {
        let mut one = Runner::new(kernels, spec, PROBLEM);
        let mut other = Runner::new(kernels, &specs[(index + 1) % specs.len()], PROBLEM);
        let alone = [&mut one, &mut other].map(|runner| {
            runner.enqueue(&x, &w);
            runner.bits()
        });
        for _ in 0..ROUNDS {
            for _ in 0..LAUNCHES / ROUNDS {
                one.enqueue(&x, &w);
                other.enqueue(&x, &w);
            }
            for (runner, alone) in [&one, &other].into_iter().zip(&alone) {
                assert!(runner.bits() == *alone, "{spec} next to another: other bits than alone");
            }
        }
        // The same as graphs, which the driver schedules itself.
        let graphs = [&mut one, &mut other].map(|runner| {
            let Runner { matmul, stream, ctx, y } = runner;
            stream
                .capture(|| (0..20).try_for_each(|_| matmul.enqueue(ctx, x.view(), &w, y.view_mut())))
                .unwrap_or_else(|error| panic!("{spec}: {error}"))
        });
        for _ in 0..LAUNCHES / 20 {
            for graph in &graphs {
                // SAFETY: operands, outputs and contexts are alive, and each context's work stays on its stream.
                unsafe { graph.launch() }.unwrap_or_else(|error| panic!("{spec}: {error}"));
            }
        }
        for (runner, alone) in [&one, &other].into_iter().zip(&alone) {
            assert!(runner.bits() == *alone, "{spec} in a graph next to another: other bits than alone");
            guard_is_intact(&runner.stream, &runner.y, &spec.to_string());
        }
    }
}

/// More than both pieces of pinned memory hold, and lengths that are not multiples of a piece.
#[test]
#[ignore = "needs a GPU"]
fn staged_uploads_arrive_complete_and_in_order() {
    let stream = stream(gpu());
    let mut staging = Staging::new(&stream);
    let mut rng = Random::new(31);
    // 210 MB: four pieces, the last one partial.
    let (rows, cols) = (1001u32, 104_896u32);
    let bytes: Vec<u8> = (0..rows as usize * cols as usize * 2 / 8).flat_map(|_| rng.bits().to_le_bytes()).collect();
    let mut matrix = DeviceMatrix::zeroed(&stream, rows, cols).unwrap();
    matrix.fill_padding(&stream, GUARD).unwrap();
    for _ in 0..2 {
        matrix.fill_bytes(&stream, 0).unwrap();
        staging.write(&mut matrix.view_mut(), &bytes).unwrap();
        let back = matrix.to_host(&stream).unwrap();
        assert!(bytemuck::cast_slice::<u16, u8>(&back) == bytes, "bytes are missing or in the wrong order");
        guard_is_intact(&stream, &matrix, "staging");
    }
    for length in [0, 1, 3, (1 << 20) + 1, (64 << 20) - 1, 64 << 20, (64 << 20) + 5] {
        let mut upload = &mut staging;
        let buffer: DeviceBuffer<u8> = upload.section(&bytes[..length]).unwrap();
        upload.finish().unwrap();
        assert!(buffer.to_host(&stream).unwrap() == bytes[..length], "{length} bytes");
    }
    let mut upload = &mut staging;
    let odd: Result<DeviceBuffer<u32>, _> = upload.section(&bytes[..6]);
    assert!(matches!(refused(odd), LaunchError::Partial { bytes: 6, unit: 4, .. }));
    let few = refused(staging.write(&mut matrix.view_mut(), &bytes[..6]));
    assert!(matches!(few, LaunchError::Elements { got: 6, .. }), "{few}");
}

#[test]
#[ignore = "needs a GPU"]
fn failed_capture_leaves_the_stream_usable() {
    let stream = stream(gpu());
    let mut bytes = DeviceBuffer::<u8>::zeroed(&stream, 64).unwrap();
    let panicked = panic::catch_unwind(AssertUnwindSafe(|| {
        stream.capture(|| {
            bytes.fill_bytes(&stream, 1)?;
            panic!("on purpose")
        })
    }));
    assert!(panicked.is_err() && !stream.is_capturing().unwrap());
    // Synchronizing during a capture is not allowed, and invalidates the capture.
    assert!(stream.capture(|| stream.synchronize()).is_err() && !stream.is_capturing().unwrap());
    assert_eq!(bytes.to_host(&stream).unwrap(), [0; 64], "a failed capture must not run its launches");
    let graph = stream.capture(|| bytes.fill_bytes(&stream, 2)).unwrap();
    // SAFETY: the buffer is alive until the work is read back, on this stream.
    unsafe { graph.launch() }.unwrap();
    assert_eq!(bytes.to_host(&stream).unwrap(), [2; 64]);
}
