//! Families `pack` and `unpack` on the GPU, compared with the CPU's: equal bytes, equal errors, and weights that are
//! restored bit for bit.

use crate::harness::{GUARD, Random, Weights, gpu, guard_is_intact, poison, refused, stream};
use unweight_codegen::spec::DecodeOutput;
use unweight_format::{
    CodeLimit, Histogram, Matrix, TileGrid,
    raw::{
        PackedTensor, huffman,
        packed::{self, TILE_BYTES, Unpackable, Window},
    },
};
use unweight_rt::{
    DeviceBuffer, DeviceMatrix, DevicePacked, KernelSet, LaunchError, Stream,
    raw::{
        choose::graph::decoder,
        ops::{
            decode_huffman::Decoder,
            pack::{PackError, Packer},
        },
        weight::DeviceHuffman,
    },
};

/// Multiples of 64 with one tile, a row and a column of tiles, full and partial groups of lists, and more row blocks
/// than the GPU holds at once.
const SHAPES: [(usize, usize); 10] = [
    (64, 64),
    (64, 128),
    (192, 64),
    (128, 320),
    (704, 192),
    (64, 64 * 17),
    (64 * 33, 64),
    (320, 1024),
    (64, 8192),
    (1984, 2112),
];

/// Zeros, subnormals, infinities, NaNs with payloads, both signs, and numbers far from the others.
const SPECIAL: [u16; 14] =
    [0x0000, 0x8000, 0x0001, 0x807f, 0x0040, 0x7f80, 0xff80, 0x7fc1, 0xffff, 0x7f81, 0x0080, 0x4640, 0xc640, 0x3000];

fn pack_on_cpu(bytes: &[u8], shape: (usize, usize)) -> Result<PackedTensor<Vec<u8>>, Unpackable> {
    packed::pack(Matrix::new(bytes, shape.0, shape.1).unwrap(), &Histogram::of(bytes))
}

/// Packs on the GPU. Checks the bytes against the CPU's and unpacks the weights, or checks that the CPU reports the
/// same error.
fn check(
    stream: &Stream,
    packer: &mut Packer,
    bytes: &[u8],
    shape: (usize, usize),
    what: &str,
) -> Result<DevicePacked, Unpackable> {
    let weights = DeviceMatrix::upload(stream, Matrix::new(bytes, shape.0, shape.1).unwrap()).unwrap();
    let expected = pack_on_cpu(bytes, shape);
    let packed = match packer.pack(weights.view()) {
        Ok(packed) => packed,
        Err(PackError::Unpackable(why)) => {
            assert_eq!(expected.err(), Some(why), "{what}");
            return Err(why);
        }
        Err(error) => panic!("{what}: {error}"),
    };
    same(stream, &packed, &expected.unwrap_or_else(|why| panic!("{what}: the CPU packer refuses: {why}")), what);
    let mut back = DeviceMatrix::zeroed(stream, shape.0 as u32, shape.1 as u32).unwrap();
    poison(stream, &mut back);
    packer.unpack(&packed, back.view_mut()).unwrap();
    let back_bytes: Vec<u8> = back.to_host(stream).unwrap().iter().flat_map(|w| w.to_le_bytes()).collect();
    let wrong = back_bytes.iter().zip(bytes).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "{what}: first wrong byte of the unpacked weights");
    guard_is_intact(stream, &back, what);
    Ok(packed)
}

fn same(stream: &Stream, got: &DevicePacked, expected: &PackedTensor<Vec<u8>>, what: &str) {
    let got = got.download(stream).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(got.window(), expected.window(), "{what}");
    for (section, got, expected) in [
        ("packed", got.packed(), expected.packed()),
        ("escape_heads", got.escape_heads(), expected.escape_heads()),
        ("escapes", got.escapes(), expected.escapes()),
    ] {
        assert_eq!(got.len(), expected.len(), "{what}: bytes of {section}");
        let wrong = got.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "{what}: first byte of {section} that differs");
    }
}

/// Returns weights with exponents of a window, and every `every`-th element from `SPECIAL`.
fn sprinkled(shape: (usize, usize), every: usize, seed: u64) -> Vec<u8> {
    let mut rng = Random::new(seed);
    (0..shape.0 * shape.1)
        .flat_map(|_| {
            let bits = rng.bits() as u16;
            let special = (rng.below(every as u64) as usize) == 0;
            let exponent = 106 + rng.below(16) as u16;
            (if special { SPECIAL[rng.below(SPECIAL.len() as u64) as usize] } else { bits & 0x807f | exponent << 7 })
                .to_le_bytes()
        })
        .collect()
}

fn packer(kernels: &KernelSet, stream: &Stream) -> Packer {
    Packer::new(stream, kernels).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn every_kind_of_weight_in_every_shape() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut packer = packer(kernels, &stream);
    let (mut packed_count, mut refused) = (0, 0);
    for weights in Weights::ALL {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let bytes = weights.bytes(shape.0 * shape.1, seed as u64);
            match check(&stream, &mut packer, &bytes, shape, &format!("{weights:?} {shape:?}")) {
                Ok(_) => packed_count += 1,
                Err(_) => refused += 1,
            }
        }
    }
    assert!(packed_count >= 20 && refused >= 20, "too few weights of a kind: {packed_count} packed, {refused} refused");
}

#[test]
#[ignore = "needs a GPU"]
fn escapes_of_every_kind_alone_and_in_lists() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut packer = packer(kernels, &stream);
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for every in [270, 300, 1000, 20_000] {
            let bytes = sprinkled(shape, every, seed as u64 * 7 + every as u64);
            let what = format!("one in {every} {shape:?}");
            let packed = check(&stream, &mut packer, &bytes, shape, &what);
            // Small matrices may exceed the limit of escapes by chance.
            assert!(packed.is_ok() || every < 1000, "{what}");
        }
    }
    // A row block with as many escapes as elements.
    let shape = (1024, 1024);
    let bytes: Vec<u8> = sprinkled(shape, 1 << 30, 5)
        .chunks_exact(2)
        .enumerate()
        .flat_map(|(i, w)| {
            let (row, col) = (i / 1024, i % 1024);
            let whole = (512..528).contains(&row) && (640..704).contains(&col);
            if whole { SPECIAL[i % SPECIAL.len()].to_le_bytes() } else { [w[0], w[1]] }
        })
        .collect();
    let packed = check(&stream, &mut packer, &bytes, shape, "a row block of escapes").unwrap();
    assert_eq!(packed.escapes().len(), 1025);
}

#[test]
#[ignore = "needs a GPU"]
fn windows_at_both_ends_and_elements_without_operand() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut packer = packer(kernels, &stream);
    let shape = (128, 256);
    let mut refused = 0;
    for base in (1..=239u16).step_by(7).chain([2, 111, 112, 113, 120, 239]) {
        for odd in [0x8000u16, 0x0001, 0x0040, 0x7f00, 0xffc3] {
            let mut rng = Random::new(u64::from(base));
            let bytes: Vec<u8> = (0..shape.0 * shape.1)
                .flat_map(|i| {
                    let ordinary = (rng.bits() as u16 & 0x807f) | (base + rng.below(16) as u16) << 7;
                    (if i % 700 == 300 { odd } else { ordinary }).to_le_bytes()
                })
                .collect();
            match check(&stream, &mut packer, &bytes, shape, &format!("base {base}, {odd:#06x}")) {
                Ok(packed) => assert_eq!(u16::from(packed.window().base()), base),
                Err(why) => {
                    assert_eq!(why, Unpackable::Operand { row: 1, col: 44 });
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 10, "{refused}");
}

#[test]
#[ignore = "needs a GPU"]
fn shapes_not_multiples_of_64_are_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut packer = packer(kernels, &stream);
    for shape in [(1, 64), (64, 1), (65, 64), (64, 100)] {
        let bytes = sprinkled(shape, 1000, 1);
        assert_eq!(check(&stream, &mut packer, &bytes, shape, "odd shape").err(), Some(Unpackable::Shape));
    }
    let packed = check(&stream, &mut packer, &sprinkled((64, 128), 1000, 1), (64, 128), "64 x 128").unwrap();
    let mut other = DeviceMatrix::zeroed(&stream, 128, 64).unwrap();
    let shape = LaunchError::Output { output: [128, 64], tensor: [64, 128] };
    assert_eq!(refused(packer.unpack(&packed, other.view_mut())), shape);
}

#[test]
#[ignore = "needs a GPU"]
fn decoded_huffman_tensors_are_packed_in_any_order_of_sizes() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut packer = packer(kernels, &stream);
    let arch = kernels.device().info().arch;
    for limit in [6, 8, 12] {
        let limit = CodeLimit::new(limit).unwrap();
        let spec = decoder(arch, DecodeOutput::Full, limit.bits()).unwrap();
        let decoder = Decoder::new(kernels.get(&spec).unwrap()).unwrap();
        for (seed, shape) in [(320, 1024), (64, 64), (1984, 2112), (704, 192)].into_iter().enumerate() {
            let bytes = sprinkled(shape, 300 + 900 * seed, seed as u64);
            let huffman = huffman::encode(Matrix::new(&bytes, shape.0, shape.1).unwrap(), limit).unwrap();
            let huffman = DeviceHuffman::upload(&stream, &huffman).unwrap();
            let what = format!("limit {} {shape:?}", limit.bits());
            let mut weights = DeviceMatrix::zeroed(&stream, shape.0 as u32, shape.1 as u32).unwrap();
            packer.decode(&decoder, &huffman, weights.view_mut()).unwrap();
            match (packer.pack(weights.view()), pack_on_cpu(&bytes, shape)) {
                (Ok(packed), Ok(expected)) => same(&stream, &packed, &expected, &what),
                (Err(PackError::Unpackable(why)), expected) => assert_eq!(expected.err(), Some(why), "{what}"),
                (got, expected) => panic!("{what}: {:?}, the CPU says {:?}", got.err(), expected.err()),
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_large_matrix() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut packer = packer(kernels, &stream);
    let shape = (14336, 4096);
    let bytes = sprinkled(shape, 2000, 9);
    let packed = check(&stream, &mut packer, &bytes, shape, "14336 x 4096").unwrap();
    assert!(packed.escapes().len() > 1000);
}

#[test]
#[ignore = "needs a GPU"]
fn unpacking_any_bytes_stays_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    let packer = packer(kernels, &stream);
    let grid = TileGrid::new(256, 320).unwrap();
    let mut rng = Random::new(3);
    for round in 0..60 {
        let words = [0, 1, 2, 31, 1000][round % 5];
        let mut noise = |count: usize| -> Vec<u32> { (0..count).map(|_| rng.bits() as u32).collect() };
        let containers: Vec<u8> = noise(grid.tiles() * TILE_BYTES / 4).iter().flat_map(|w| w.to_le_bytes()).collect();
        let mut lists = noise(words);
        for count in lists.iter_mut().step_by(7) {
            *count %= 2000;
        }
        // Half of the indices are near the section, so that both sides of the bound are tested.
        let heads: Vec<u32> = noise(grid.tiles() * 4)
            .iter()
            .map(|head| head << 31 | if head & 2 == 0 { head >> 1 } else { (head >> 4) % (words as u32 + 2) })
            .collect();
        let tensor = DevicePacked::new(
            grid,
            Window::new([1, 106, 239][round % 3]).unwrap(),
            DeviceBuffer::from_host(&stream, &containers).unwrap(),
            DeviceBuffer::from_host(&stream, &heads).unwrap(),
            DeviceBuffer::from_host(&stream, &lists).unwrap(),
        )
        .unwrap();
        let mut output = DeviceMatrix::zeroed(&stream, 256, 320).unwrap();
        output.fill_padding(&stream, GUARD).unwrap();
        packer.unpack(&tensor, output.view_mut()).unwrap();
        stream.synchronize().unwrap();
        guard_is_intact(&stream, &output, "unpack of noise");
    }
}
