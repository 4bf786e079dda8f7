//! The encoder of the compact encoding on the GPU, compared with the CPU's: equal bytes and equal errors.

use crate::{
    decode_compact::sprinkled,
    harness::{Weights, gpu, stream},
};
use unweight_format::{Histogram, Matrix, raw::compact};
use unweight_rt::{
    DeviceMatrix, Stream,
    raw::ops::{
        encode_compact::{EncodeCompact, EncodeCompactError},
        pack::Packer,
    },
};

/// Multiples of 64 with one tile, a row and a column of tiles, blocks with idle warps, and more tiles than the GPU
/// holds at once.
const SHAPES: [(usize, usize); 9] =
    [(64, 64), (64, 128), (192, 64), (128, 320), (704, 192), (64, 64 * 17), (64, 8192), (1984, 2112), (4096, 4096)];

/// Returns whether the matrix has a compact encoding, and checks its bytes against the CPU's.
fn check(
    stream: &Stream,
    (compressor, packer): (&EncodeCompact, &mut Packer),
    bytes: &[u8],
    shape: (usize, usize),
    what: &str,
) -> bool {
    let matrix = Matrix::new(bytes, shape.0, shape.1).unwrap();
    let expected = compact::encode(matrix, &Histogram::of(bytes));
    let weights = DeviceMatrix::upload(stream, matrix).unwrap();
    let made = match compressor.encode(packer, weights.view()) {
        Ok(made) => made,
        Err(EncodeCompactError::Uncompact(why)) => {
            assert_eq!(expected.err(), Some(why), "{what}");
            return false;
        }
        Err(EncodeCompactError::Device(error)) => panic!("{what}: {error}"),
    };
    let expected = expected.unwrap_or_else(|why| panic!("{what}: the CPU encoder refuses: {why}"));
    let got = made.download(stream).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!((got.window(), got.book()), (expected.window(), expected.book()), "{what}");
    for (section, got, expected) in [
        ("tiles", got.tiles(), expected.tiles()),
        ("escapes", got.escapes(), expected.escapes()),
        ("streams", got.streams(), expected.streams()),
        ("dense", got.dense(), expected.dense()),
    ] {
        assert_eq!(got.len(), expected.len(), "{what}: bytes of {section}");
        let wrong = got.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "{what}: first byte of {section} that differs");
    }
    assert_eq!(made.tensor.table().to_host(stream).unwrap(), expected.book().kernel_table(), "{what}");
    true
}

#[test]
#[ignore = "needs a GPU"]
fn every_kind_of_weight_in_every_shape() {
    let kernels = gpu();
    let stream = stream(kernels);
    let (compressor, mut packer) = (EncodeCompact::of(kernels).unwrap(), Packer::new(&stream, kernels).unwrap());
    let (mut encoded_count, mut refused) = (0, 0);
    for weights in Weights::ALL {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let bytes = weights.bytes(shape.0 * shape.1, seed as u64);
            let what = format!("{weights:?} {shape:?}");
            match check(&stream, (&compressor, &mut packer), &bytes, shape, &what) {
                true => encoded_count += 1,
                false => refused += 1,
            }
        }
    }
    assert!(
        encoded_count >= 24 && refused >= 9,
        "too few weights of a kind: {encoded_count} encoded, {refused} refused"
    );
}

#[test]
#[ignore = "needs a GPU"]
fn escapes_of_every_kind() {
    let kernels = gpu();
    let stream = stream(kernels);
    let (compressor, mut packer) = (EncodeCompact::of(kernels).unwrap(), Packer::new(&stream, kernels).unwrap());
    let mut encoded_count = 0;
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for every in [400, 1000, 20_000] {
            let bytes = sprinkled(shape, every, seed as u64 * 7 + every);
            let what = format!("one in {every} {shape:?}");
            encoded_count += u32::from(check(&stream, (&compressor, &mut packer), &bytes, shape, &what));
        }
    }
    // Small matrices may exceed the limit of escapes by chance.
    assert!(encoded_count >= 20, "{encoded_count}");
    // Both report the same element that cannot be packed.
    for positions in [vec![70usize], vec![9000, 8191, 8256]] {
        let bytes: Vec<u8> = (0..64 * 192)
            .flat_map(|i| (if positions.contains(&i) { 1 } else { (128 + i as u16 % 32) << 7 }).to_le_bytes())
            .collect();
        assert!(!check(&stream, (&compressor, &mut packer), &bytes, (64, 192), "no operand"));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn repeated_compression_gives_the_same_bytes() {
    let kernels = gpu();
    let stream = stream(kernels);
    let (compressor, mut packer) = (EncodeCompact::of(kernels).unwrap(), Packer::new(&stream, kernels).unwrap());
    for shape in [(64, 64), (192, 576)] {
        let bytes = Weights::TRAINED.bytes(shape.0 * shape.1, 5);
        for turn in 0..1500 {
            assert!(check(&stream, (&compressor, &mut packer), &bytes, shape, &format!("turn {turn}")));
        }
    }
}
