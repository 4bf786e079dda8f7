//! The conversions of the compact encoding on the GPU, compared with the CPU's: weights are restored bit for bit.

use crate::harness::{Random, Weights, gpu, guard_is_intact, poison, refused, stream};
use unweight_format::{
    Histogram, Matrix, TileGrid,
    raw::{CompactTensor, compact},
};
use unweight_rt::{
    DeviceMatrix, LaunchError, Stream,
    raw::{ops::decode_compact::CompactDecoder, weight::DeviceCompact},
};

/// Multiples of 64 with one tile, a row and a column of tiles, blocks with idle warps, and more tiles than the GPU
/// holds at once.
const SHAPES: [(usize, usize); 8] =
    [(64, 64), (64, 128), (192, 64), (128, 320), (704, 192), (64, 8192), (1984, 2112), (4096, 4096)];

/// Zeros, infinities, NaNs with payloads, subnormals, and numbers far from the others.
const SPECIAL: [u16; 12] =
    [0x0000, 0x8000, 0x0001, 0x807f, 0x0040, 0x7f80, 0xff80, 0x7fc1, 0xffff, 0x0080, 0x3000, 0xb001];

fn encoded(bytes: &[u8], (n, k): (usize, usize)) -> Result<CompactTensor<Vec<u8>>, compact::Uncompact> {
    compact::encode(Matrix::new(bytes, n, k).unwrap(), &Histogram::of(bytes))
}

fn check(stream: &Stream, transcoder: &CompactDecoder, bytes: &[u8], shape: (usize, usize), what: &str) -> bool {
    let Ok(host) = encoded(bytes, shape) else { return false };
    let tensor = DeviceCompact::upload(stream, &host).unwrap();
    let mut back = DeviceMatrix::zeroed(stream, shape.0 as u32, shape.1 as u32).unwrap();
    poison(stream, &mut back);
    transcoder.full(stream, &tensor, back.view_mut()).unwrap();
    let got: Vec<u8> = back.to_host(stream).unwrap().iter().flat_map(|w| w.to_le_bytes()).collect();
    let wrong = got.iter().zip(bytes).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "{what}: first wrong byte of the decoded weights");
    guard_is_intact(stream, &back, what);
    true
}

/// Returns trained weights with every `every`-th element from `SPECIAL`.
pub fn sprinkled(shape: (usize, usize), every: u64, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Weights::TRAINED.bytes(shape.0 * shape.1, seed);
    for element in bytes.chunks_exact_mut(2) {
        if random.below(every) == 0 {
            element.copy_from_slice(&SPECIAL[random.below(SPECIAL.len() as u64) as usize].to_le_bytes());
        }
    }
    bytes
}

#[test]
#[ignore = "needs a GPU"]
fn every_kind_of_weight_in_every_shape_round_trips() {
    let kernels = gpu();
    let stream = stream(kernels);
    let transcoder = CompactDecoder::of(kernels).unwrap();
    let mut encoded_count = 0;
    for weights in Weights::ALL {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let bytes = weights.bytes(shape.0 * shape.1, seed as u64);
            encoded_count += u32::from(check(&stream, &transcoder, &bytes, shape, &format!("{weights:?} {shape:?}")));
        }
    }
    assert!(encoded_count >= 24, "{encoded_count}");
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for every in [400, 1000, 20_000] {
            let bytes = sprinkled(shape, every, seed as u64 * 7 + every);
            let what = format!("one in {every} {shape:?}");
            // Small matrices may exceed the limit of escapes by chance.
            assert!(check(&stream, &transcoder, &bytes, shape, &what) || shape.0 * shape.1 < 1 << 16, "{what}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn mismatched_operands_are_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let transcoder = CompactDecoder::of(kernels).unwrap();
    let bytes = Weights::TRAINED.bytes(128 * 128, 1);
    let tensor = DeviceCompact::upload(&stream, &encoded(&bytes, (128, 128)).unwrap()).unwrap();
    assert_eq!(tensor.grid(), TileGrid::new(128, 128).unwrap());
    let mut other = DeviceMatrix::zeroed(&stream, 128, 192).unwrap();
    let refusal = refused(transcoder.full(&stream, &tensor, other.view_mut()));
    assert!(matches!(refusal, LaunchError::Output { output: [128, 192], tensor: [128, 128] }), "{refusal:?}");
}
