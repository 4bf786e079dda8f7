//! MatVANS's kernels on the GPU.

use crate::harness::{Random, gpu, guard_is_intact, poison, refused, stream};
use unweight_rivals::{
    cuda::matvans::{DeviceMatvans, MatvansKernels, round},
    matvans::{Layout, encode},
};
use unweight_rt::{DeviceBuffer, LaunchError};

/// Returns values around 0 with up to 64 distinct values.
fn values(count: usize, random: &mut Random) -> Vec<i8> {
    let mut value = || {
        let bits = random.bits();
        let size = (bits & 0xffff).leading_zeros() - 48;
        let value = ((bits >> 16) & 0xffff) as i32 % (60 >> size.min(4)).max(2);
        (if bits >> 60 & 1 == 1 { -value } else { value }) as i8
    };
    (0..count).map(|_| value()).collect()
}

fn products(values: &[i8], x: &[i8], scale: f32) -> Vec<i8> {
    let product = |row: &[i8]| row.iter().zip(x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
    values.chunks(x.len()).map(|row| round(product(row), scale)).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn products_are_exact_and_deterministic() {
    let kernels = gpu();
    let stream = stream(kernels);
    let matvans_kernels = MatvansKernels::of(&stream, kernels).unwrap();
    let mut random = Random::new(71);
    for (rows, cols, layout) in [
        (1, 128, Layout::Rows),
        (7, 384, Layout::Rows),
        (1000, 4096, Layout::Rows),
        (4096, 1024, Layout::Rows),
        (32, 4, Layout::Stripes),
        (160, 516, Layout::Stripes),
        (4096, 1024, Layout::Stripes),
        (1, 512, Layout::Lanes),
        (1000, 4096, Layout::Lanes),
        (4096, 1024, Layout::Lanes),
    ] {
        let (dense, x) = (values(rows * cols, &mut random), values(cols, &mut random));
        let matrix = DeviceMatvans::upload(&stream, &encode(&dense, rows, cols, layout).unwrap()).unwrap();
        let raw = DeviceBuffer::from_host(&stream, &dense).unwrap();
        let on_device = DeviceBuffer::from_host(&stream, &x).unwrap();
        let mut y = DeviceBuffer::zeroed(&stream, rows).unwrap();
        let expected = products(&dense, &x, 0.01);
        for launch in 0..1000 {
            poison(&stream, &mut y);
            matvans_kernels.multiply(&stream, &matrix, &on_device, 0.01, &mut y).unwrap();
            if launch % 50 == 0 {
                assert_eq!(y.to_host(&stream).unwrap(), expected, "{rows}x{cols} {layout:?}, launch {launch}");
            }
        }
        guard_is_intact(&stream, &y, "y");
        if cols % 16 == 0 {
            poison(&stream, &mut y);
            matvans_kernels.multiply_dense(&stream, &raw, &on_device, 0.01, &mut y).unwrap();
            assert_eq!(y.to_host(&stream).unwrap(), expected, "{rows}x{cols} dense");
            guard_is_intact(&stream, &y, "y");
        }
    }
    assert_eq!(matvans_kernels.faults(&stream).unwrap(), 0);
}

#[test]
#[ignore = "needs a GPU"]
fn any_bytes_stay_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    let matvans_kernels = MatvansKernels::of(&stream, kernels).unwrap();
    let mut random = Random::new(72);
    let mut before = 0;
    for layout in [Layout::Rows, Layout::Stripes, Layout::Lanes] {
        let sound = encode(&values(256 * 512, &mut random), 256, 512, layout).unwrap();
        let x = DeviceBuffer::from_host(&stream, &values(512, &mut random)).unwrap();
        let mut y = DeviceBuffer::zeroed(&stream, 256).unwrap();
        for turn in 0..30 {
            let mut matrix = sound.clone();
            match turn % 3 {
                0 => matrix.words.iter_mut().for_each(|word| *word = random.bits() as u32),
                1 => matrix.offsets.iter_mut().for_each(|offset| *offset = random.bits() as u32),
                _ => {
                    matrix.words.fill(0);
                    matrix.tables.counts.fill(0);
                }
            }
            let matrix = DeviceMatvans::upload(&stream, &matrix).unwrap();
            poison(&stream, &mut y);
            matvans_kernels.multiply(&stream, &matrix, &x, 0.01, &mut y).unwrap();
            guard_is_intact(&stream, &y, "y");
            let faults = matvans_kernels.faults(&stream).unwrap();
            assert!(faults > before || turn % 3 != 1, "{layout:?}, turn {turn}: the damage was not counted as a fault");
            before = faults;
        }
        let mut short = DeviceBuffer::zeroed(&stream, 255).unwrap();
        let matrix = DeviceMatvans::upload(&stream, &sound).unwrap();
        let refusal = refused(matvans_kernels.multiply(&stream, &matrix, &x, 0.01, &mut short));
        assert!(matches!(refusal, LaunchError::Elements { .. }), "{refusal:?}");
    }
}
