//! The three decoders on the GPU: bit-exact for every shape and code limit.

use crate::harness::{SHAPES, Weights, context, gpu, guard_is_intact, poison, refused, stream};
use unweight_bench::{halves, normal_bf16};
use unweight_codegen::{
    VariantSpec,
    spec::{Arch, DecodeHuffmanSpec, DecodeOutput, DecodeWarps, Op, SmemCopy},
};
use unweight_format::{
    CodeLimit, Matrix,
    raw::{bf16, huffman},
};
use unweight_rt::{
    DeviceBuffer, DeviceMatrix, KernelSet, LaunchError, MatrixMut,
    raw::{
        choose::graph,
        ops::decode_huffman::{Decoder, output_bytes},
        weight::DeviceHuffman,
    },
};

/// The kind of copy, and the warps of a block: as many as fit, which is 32 on this GPU, or as few as GPUs with less
/// shared memory have.
#[derive(Clone, Copy, Debug)]
struct Block(SmemCopy, u32);

const HOPPER: Block = Block(SmemCopy::Bulk, 0);
const BLOCKS: [Block; 6] = [
    HOPPER,
    Block(SmemCopy::Async, 0),
    Block(SmemCopy::Async, 16),
    Block(SmemCopy::Async, 8),
    Block(SmemCopy::Bulk, 16),
    Block(SmemCopy::Bulk, 8),
];

fn spec(output: DecodeOutput, bits: u32, Block(copy, warps): Block) -> VariantSpec {
    let spec = graph::decoder(Arch::Sm90a, output, bits).unwrap();
    let Op::DecodeHuffman(op) = spec.op else { unreachable!("a decoder") };
    let warps = DecodeWarps::new(warps).unwrap();
    VariantSpec { op: Op::DecodeHuffman(DecodeHuffmanSpec { copy, warps, ..op }), ..spec }
}

fn decoder(kernels: &KernelSet, output: DecodeOutput, bits: u32, block: Block) -> Decoder {
    let kernel = kernels.get(&spec(output, bits, block)).unwrap_or_else(|error| panic!("{error}"));
    Decoder::new(kernel).unwrap()
}

/// Checks all three decoders for codes of `bits` bits on one matrix, with and without the copy engine, and with fewer
/// warps.
fn exact(kernels: &KernelSet, bytes: &[u8], shape: (usize, usize), limit: CodeLimit, bits: Option<u32>, what: &str) {
    for block in BLOCKS {
        exact_by(kernels, bytes, shape, limit, bits, block, &format!("{what} {block:?}"));
    }
}

fn exact_by(
    kernels: &KernelSet,
    bytes: &[u8],
    (rows, cols): (usize, usize),
    limit: CodeLimit,
    bits: Option<u32>,
    block: Block,
    what: &str,
) {
    let stream = stream(kernels);
    let tensor = huffman::encode(Matrix::new(bytes, rows, cols).unwrap(), limit).unwrap();
    let device = DeviceHuffman::upload(&stream, &tensor).unwrap();
    let bits = bits.unwrap_or(device.code_bits());
    let grid = tensor.grid();
    let mut ctx = context(&stream);

    let full = decoder(kernels, DecodeOutput::Full, bits, block);
    let mut whole = DeviceMatrix::zeroed(&stream, rows as u32, cols as u32).unwrap();
    poison(&stream, &mut whole);
    full.full(&mut ctx, &device, whole.view_mut()).unwrap();
    ctx.synchronize().unwrap_or_else(|error| panic!("{what}: {error}"));
    let got = whole.to_host(&stream).unwrap();
    let wrong = got.iter().zip(halves(bytes)).position(|(got, want)| *got != want);
    assert_eq!(wrong, None, "{what}: first wrong element of the full output");
    guard_is_intact(&stream, &whole, what);

    let exponent = decoder(kernels, DecodeOutput::Exponent, bits, block);
    let mut exponents = DeviceBuffer::zeroed(&stream, output_bytes(grid, DecodeOutput::Exponent)).unwrap();
    poison(&stream, &mut exponents);
    exponent.exponent(&mut ctx, &device, &mut exponents).unwrap();
    ctx.synchronize().unwrap_or_else(|error| panic!("{what}: {error}"));
    let got = exponents.to_host(&stream).unwrap();
    for row in 0..rows {
        for col in 0..cols {
            let tile = row / 64 * grid.tile_cols() + col / 64;
            let at = (row * cols + col) * 2;
            let expected = bf16::exponent(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
            assert_eq!(got[tile * 4096 + row % 64 * 64 + col % 64], expected, "{what}: exponent ({row}, {col})");
        }
    }
    guard_is_intact(&stream, &exponents, what);

    let palette = decoder(kernels, DecodeOutput::Palette, bits, block);
    let mut indices = DeviceBuffer::zeroed(&stream, output_bytes(grid, DecodeOutput::Palette)).unwrap();
    poison(&stream, &mut indices);
    palette.palette(&mut ctx, &device, &mut indices).unwrap();
    ctx.synchronize().unwrap_or_else(|error| panic!("{what}: {error}"));
    let expected = huffman::transcode(&tensor).unwrap();
    let wrong = indices
        .to_host(&stream)
        .unwrap()
        .iter()
        .zip(expected.palette_index())
        .position(|(got, expected)| got != expected);
    assert_eq!(wrong, None, "{what}: first wrong byte of the palette indices");
    guard_is_intact(&stream, &indices, what);
}

#[test]
#[ignore = "needs a GPU"]
fn every_kind_of_weight_in_every_shape() {
    let kernels = gpu();
    for weights in Weights::ALL {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let bytes = weights.bytes(shape.0 * shape.1, 100 + seed as u64);
            exact(kernels, &bytes, shape, CodeLimit::DEFAULT, None, &format!("{weights:?} {shape:?}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_code_limit() {
    let kernels = gpu();
    let of = |bits| DecodeOutput::ALL.iter().flat_map(move |output| BLOCKS.map(|block| spec(*output, bits, block)));
    let specs: Vec<VariantSpec> = (6..=15).flat_map(of).collect();
    kernels.prepare(&specs, &|_| {}).unwrap();
    for bits in 6..=15 {
        let limit = CodeLimit::new(bits).unwrap();
        for weights in [Weights::TRAINED, Weights::HeavyTails, Weights::LongRows { cols: 257 }, Weights::Noise] {
            let bytes = weights.bytes(190 * 257, u64::from(bits));
            exact(kernels, &bytes, (190, 257), limit, Some(bits), &format!("{weights:?} limit {bits}"));
        }
        // A decoder for longer codes accepts shorter ones.
        let bytes = Weights::TRAINED.bytes(130 * 66, u64::from(bits));
        let six = CodeLimit::new(6).unwrap();
        exact(kernels, &bytes, (130, 66), six, Some(bits), &format!("limit 6 through {bits}"));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn all_bit_patterns_in_every_arrangement() {
    let kernels = gpu();
    let bytes = Weights::AllPatterns.bytes(256 * 256, 0);
    for shape in [(256, 256), (1024, 64), (64, 1024), (1, 65536), (65536, 1), (2048, 32)] {
        exact(kernels, &bytes, shape, CodeLimit::DEFAULT, None, &format!("all patterns {shape:?}"));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_edge_remainder() {
    let kernels = gpu();
    for edge in 1..=130 {
        let bytes = Weights::HeavyTails.bytes(edge * 70, edge as u64);
        exact(kernels, &bytes, (edge, 70), CodeLimit::DEFAULT, None, &format!("{edge} x 70"));
        exact(kernels, &bytes, (70, edge), CodeLimit::DEFAULT, None, &format!("70 x {edge}"));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_large_matrix_decodes_the_same_again_and_again() {
    let kernels = gpu();
    let shape = (4096, 4096);
    let bytes = normal_bf16(shape.0 * shape.1, 0.02, 3);
    exact(kernels, &bytes, shape, CodeLimit::DEFAULT, None, "4096 x 4096");
    let stream = stream(kernels);
    let tensor = huffman::encode(Matrix::new(&bytes, shape.0, shape.1).unwrap(), CodeLimit::DEFAULT).unwrap();
    let device = DeviceHuffman::upload(&stream, &tensor).unwrap();
    let full = decoder(kernels, DecodeOutput::Full, device.code_bits(), HOPPER);
    let mut whole = DeviceMatrix::zeroed(&stream, 4096, 4096).unwrap();
    let mut ctx = context(&stream);
    for _ in 0..20 {
        poison(&stream, &mut whole);
        full.full(&mut ctx, &device, whole.view_mut()).unwrap();
        ctx.synchronize().unwrap();
        assert!(whole.to_host(&stream).unwrap() == halves(&bytes));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn mismatched_operands_are_rejected_before_the_launch() {
    let kernels = gpu();
    let stream = stream(kernels);
    let bytes = Weights::TRAINED.bytes(64 * 64, 1);
    let tensor = huffman::encode(Matrix::new(&bytes, 64, 64).unwrap(), CodeLimit::new(15).unwrap()).unwrap();
    let device = DeviceHuffman::upload(&stream, &tensor).unwrap();
    assert!(device.code_bits() > 6);
    let mut whole = DeviceMatrix::zeroed(&stream, 64, 64).unwrap();
    let mut ctx = context(&stream);
    let short = decoder(kernels, DecodeOutput::Full, 6, HOPPER);
    let bits = device.code_bits();
    assert_eq!(refused(short.full(&mut ctx, &device, whole.view_mut())), LaunchError::CodeBits { limit: 6, bits });
    let full = decoder(kernels, DecodeOutput::Full, 15, HOPPER);
    let mut small = DeviceMatrix::zeroed(&stream, 64, 63).unwrap();
    let shape = LaunchError::Output { output: [64, 63], tensor: [64, 64] };
    assert_eq!(refused(full.full(&mut ctx, &device, small.view_mut())), shape);
    // Rows with a gap in between.
    let mut wide = DeviceBuffer::zeroed(&stream, 64 * 72).unwrap();
    let apart = MatrixMut::new(&mut wide, 64, 64, 72).unwrap();
    assert!(matches!(refused(full.full(&mut ctx, &device, apart)), LaunchError::Pitch { pitch: 72, .. }));
    let mut bytes = DeviceBuffer::zeroed(&stream, 4096).unwrap();
    let other = LaunchError::Decodes { writes: DecodeOutput::Full, asked: DecodeOutput::Exponent };
    assert_eq!(refused(full.exponent(&mut ctx, &device, &mut bytes)), other);
    let mut few = DeviceBuffer::zeroed(&stream, 2047).unwrap();
    let palette = decoder(kernels, DecodeOutput::Palette, 15, HOPPER);
    let elements = LaunchError::Elements { buffer: "the output", got: 2047, expected: 2048 };
    assert_eq!(refused(palette.palette(&mut ctx, &device, &mut few)), elements);
    ctx.synchronize().unwrap();
}
