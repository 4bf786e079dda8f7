//! ZipServ's kernels on the GPU.

use crate::harness::{Random, Weights, context, gpu, guard_is_intact, poison, refused, stream, value};
use unweight_rivals::{
    cuda::zipserv::{DeviceZip, FUSED_BEST, FUSED_MAX, ZipKernels},
    zipserv::{Encoded, encode},
};
use unweight_rt::{ContextSize, DeviceMatrix, ExecContext, LaunchError, Stream};

const SHAPES: [(usize, usize); 7] =
    [(64, 64), (64, 128), (192, 64), (128, 320), (64, 8192), (1984, 2112), (4096, 4096)];

fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|element| u16::from_le_bytes([element[0], element[1]])).collect()
}

/// Returns weights of which one in `every` is a random pattern.
fn sprinkled((rows, cols): (usize, usize), every: u64, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Weights::TRAINED.bytes(rows * cols, seed);
    for element in bytes.chunks_exact_mut(2) {
        if random.below(every) == 0 {
            element.copy_from_slice(&(random.bits() as u16).to_le_bytes());
        }
    }
    bytes
}

fn check(stream: &Stream, zip: &ZipKernels, bytes: &[u8], (rows, cols): (usize, usize), what: &str) {
    let matrix = DeviceZip::upload(stream, &encode(bytes, rows, cols).unwrap()).unwrap();
    let mut out = DeviceMatrix::zeroed(stream, rows as u32, cols as u32).unwrap();
    poison(stream, &mut out);
    zip.decompress(stream, &matrix, &mut out).unwrap();
    let got = out.to_host(stream).unwrap();
    let wrong = got.iter().zip(&halves(bytes)).position(|(got, expected)| got != expected);
    assert_eq!(wrong, None, "{what}: first element that differs");
    guard_is_intact(stream, &out, what);
}

#[test]
#[ignore = "needs a GPU"]
fn matrices_of_every_kind_round_trip() {
    let kernels = gpu();
    let stream = stream(kernels);
    let zip = ZipKernels::of(&stream, kernels, 64).unwrap();
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for weights in Weights::ALL {
            let bytes = weights.bytes(shape.0 * shape.1, seed as u64);
            check(&stream, &zip, &bytes, shape, &format!("{weights:?} {shape:?}"));
        }
        for every in [1, 2, 30, 1000] {
            let bytes = sprinkled(shape, every, seed as u64 * 7 + every);
            check(&stream, &zip, &bytes, shape, &format!("one in {every} {shape:?}"));
        }
    }
    assert_eq!(zip.faults(&stream).unwrap(), 0);
}

/// Many matrices in one process, thousands of launches: always the same bits.
#[test]
#[ignore = "needs a GPU"]
fn decoding_is_deterministic() {
    let kernels = gpu();
    let stream = stream(kernels);
    let zip = ZipKernels::of(&stream, kernels, 64).unwrap();
    for (seed, shape) in [(1, (1024, 1024)), (2, (64, 16384)), (3, (2048, 512)), (4, (192, 4096))] {
        let bytes = sprinkled(shape, 50, seed);
        let expected = halves(&bytes);
        let matrix = DeviceZip::upload(&stream, &encode(&bytes, shape.0, shape.1).unwrap()).unwrap();
        let mut out = DeviceMatrix::zeroed(&stream, shape.0 as u32, shape.1 as u32).unwrap();
        for launch in 0..2000 {
            if launch % 100 == 0 {
                poison(&stream, &mut out);
            }
            zip.decompress(&stream, &matrix, &mut out).unwrap();
            if launch % 100 == 99 {
                assert!(out.to_host(&stream).unwrap() == expected, "{shape:?}, launch {launch}");
            }
        }
    }
    assert_eq!(zip.faults(&stream).unwrap(), 0);
}

/// Products of every batch against sums in f64 of the same numbers, and the same bits every time.
#[test]
#[ignore = "needs a GPU"]
fn products_match_the_weights() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = ExecContext::new(&stream, ContextSize::default().with_cublas()).unwrap();
    let zip = ZipKernels::of(&stream, kernels, 2112).unwrap();
    for (seed, (rows, cols)) in [(64, 64), (192, 320), (2112, 1984), (320, 4096)].into_iter().enumerate() {
        let bytes = Weights::TRAINED.bytes(rows * cols, seed as u64 + 9);
        let matrix = DeviceZip::upload(&stream, &encode(&bytes, rows, cols).unwrap()).unwrap();
        let mut scratch = DeviceMatrix::zeroed(&stream, rows as u32, cols as u32).unwrap();
        let w = halves(&bytes);
        let batches = [1, 2, 7, 8, 9, 16, 31, 32, 33, 64, 65, 100, 128, 200];
        // The fused kernel, and the choice of `multiply` where it is another.
        let fused = batches.iter().filter(|batch| **batch <= FUSED_MAX as usize).map(|batch| (*batch, true));
        let chosen = batches.iter().filter(|batch| **batch > FUSED_BEST as usize).map(|batch| (*batch, false));
        for (batch, fused) in fused.chain(chosen) {
            let x = halves(&Weights::TRAINED.bytes(batch * cols, batch as u64));
            let on_device = DeviceMatrix::from_host(&stream, batch as u32, cols as u32, &x).unwrap();
            let mut y = DeviceMatrix::zeroed(&stream, batch as u32, rows as u32).unwrap();
            let mut first = None;
            for _ in 0..40 {
                poison(&stream, &mut y);
                if fused {
                    zip.gemm(&stream, &on_device, &matrix, &mut y).unwrap();
                } else {
                    zip.multiply(&mut ctx, &on_device, &matrix, &mut scratch, &mut y).unwrap();
                }
                let got = y.to_host(&stream).unwrap();
                assert!(
                    *first.get_or_insert_with(|| got.clone()) == got,
                    "{rows}x{cols} batch {batch}: two runs differ"
                );
            }
            guard_is_intact(&stream, &y, "y");
            let got = first.unwrap();
            // Some of the elements: every row of x and every eighth row of w.
            for m in 0..batch {
                for row in (m % 8..rows).step_by(8) {
                    let terms = || (0..cols).map(|k| value(x[m * cols + k]) * value(w[row * cols + k]));
                    let (expected, scale) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                    let off = (value(got[m * rows + row]) - expected).abs();
                    assert!(off <= expected.abs() / 200.0 + scale * 1e-5, "{rows}x{cols} batch {batch} y[{m}, {row}]");
                }
            }
        }
    }
    assert_eq!(zip.faults(&stream).unwrap(), 0);
}

#[test]
#[ignore = "needs a GPU"]
fn any_bytes_stay_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    let ctx = context(&stream);
    let zip = ZipKernels::of(&stream, kernels, 512).unwrap();
    let bytes = sprinkled((512, 512), 30, 4);
    let sound = encode(&bytes, 512, 512).unwrap();
    let x = DeviceMatrix::from_host(&stream, 5, 512, &halves(&Weights::TRAINED.bytes(5 * 512, 3))).unwrap();
    let mut random = Random::new(43);
    let mut before = 0;
    for turn in 0..50 {
        let mut matrix = sound.clone();
        let Encoded { bitmaps, blocks, strips, .. } = &mut matrix;
        match turn % 5 {
            0 => bitmaps[1].iter_mut().for_each(|map| *map = random.bits()),
            1 => blocks.iter_mut().for_each(|entry| *entry = [random.bits() as u32, random.bits() as u32]),
            2 => strips.iter_mut().for_each(|entry| *entry = [random.bits() as u32 & 0x1fff, random.bits() as u32]),
            3 => bitmaps.iter_mut().flatten().for_each(|map| *map = 0),
            _ => strips.iter_mut().for_each(|entry| *entry = [u32::MAX; 2]),
        }
        let matrix = DeviceZip::upload_any(&stream, &matrix).unwrap();
        let mut out = DeviceMatrix::zeroed(&stream, 512, 512).unwrap();
        poison(&stream, &mut out);
        zip.decompress(&stream, &matrix, &mut out).unwrap();
        guard_is_intact(&stream, &out, "the weights");
        let mut y = DeviceMatrix::zeroed(&stream, 5, 512).unwrap();
        poison(&stream, &mut y);
        zip.gemm(ctx.stream(), &x, &matrix, &mut y).unwrap();
        guard_is_intact(&stream, &y, "y");
        let faults = zip.faults(&stream).unwrap();
        assert!(faults > before, "turn {turn}: the damage was not counted as a fault");
        before = faults;
    }
    check(&stream, &zip, &bytes, (512, 512), "the sound matrix");
    let matrix = DeviceZip::upload(&stream, &sound).unwrap();
    let mut other = DeviceMatrix::zeroed(&stream, 512, 576).unwrap();
    let refusal = refused(zip.decompress(&stream, &matrix, &mut other));
    assert!(matches!(refusal, LaunchError::Output { .. }), "{refusal:?}");
    let many = DeviceMatrix::zeroed(&stream, 129, 512).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, 129, 512).unwrap();
    let refusal = refused(zip.gemm(&stream, &many, &matrix, &mut y));
    assert!(matches!(refusal, LaunchError::TooLarge { .. }), "{refusal:?}");
}
