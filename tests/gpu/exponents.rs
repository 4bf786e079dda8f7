//! Decoders of the encoding `exponents` on the GPU for FP8, F16 and F32: the original bytes are restored, and corrupt
//! sections cause no access outside the buffers. Also meant to run under `compute-sanitizer`.

use crate::harness::{
    OwnedCoded, Random, SHAPES, context, gpu, guard_is_intact, launch_error, poison, refused, stream,
};
use unweight_codegen::{
    VariantSpec,
    spec::{self, Arch, DecodeElement, DecodeHuffmanSpec, DecodeOutput, DecodeWarps, Op, SmemCopy},
};
use unweight_format::{
    CodeLimit, Float, FloatMatrix, Matrix, TileGrid,
    raw::{ExponentsTensor, exponents, huffman},
    testing::float_weights,
};
use unweight_rt::{
    DeviceBuffer, DeviceError, DeviceMatrix, KernelSet, LaunchError, Stream,
    raw::{
        choose::graph,
        ops::decode_huffman::Decoder,
        weight::{DeviceExponents, DeviceHuffman, ExponentsSections},
    },
};

const CODED: [Float; 4] = [Float::E4M3, Float::E5M2, Float::F16, Float::F32];

/// The kind of copy, and the warps of a block; 0: as many as fit.
const BLOCKS: [(SmemCopy, u32); 4] =
    [(SmemCopy::Bulk, 0), (SmemCopy::Async, 0), (SmemCopy::Async, 16), (SmemCopy::Async, 8)];

fn spec(float: Float, bits: u32, (copy, warps): (SmemCopy, u32)) -> VariantSpec {
    let limit = spec::CodeLimit::new(bits).unwrap();
    let spec = VariantSpec::decode_elements(Arch::Sm90a, DecodeElement::of(float), limit);
    let Op::DecodeHuffman(op) = spec.op else { unreachable!("a decoder") };
    VariantSpec {
        op: Op::DecodeHuffman(DecodeHuffmanSpec { copy, warps: DecodeWarps::new(warps).unwrap(), ..op }),
        ..spec
    }
}

fn decoder(kernels: &KernelSet, spec: &VariantSpec) -> Decoder {
    Decoder::new(kernels.get(spec).unwrap_or_else(|error| panic!("{error}"))).unwrap()
}

/// Returns the shipped decoder that the runtime selects.
fn shipped(kernels: &KernelSet, float: Float, bits: u32) -> Decoder {
    decoder(kernels, &graph::element_decoder(kernels.device().info().arch, float, bits).unwrap())
}

/// Returns weights of which one in `one_in` has random bits; 1: all of them.
fn weights(float: Float, elements: usize, one_in: u64, seed: u64) -> Vec<u8> {
    let (mut bytes, mut random) = (float_weights(float, elements, seed), Random::new(seed ^ 1));
    for element in bytes.chunks_exact_mut(float.bytes()) {
        if random.below(one_in) == 0 {
            element.copy_from_slice(&(random.bits() as u32).to_le_bytes()[..float.bytes()]);
        }
    }
    bytes
}

fn encode(float: Float, bytes: &[u8], (rows, cols): (usize, usize), limit: u32) -> ExponentsTensor<Vec<u8>> {
    let matrix = FloatMatrix::new(float, bytes, rows, cols).unwrap();
    exponents::encode(matrix, CodeLimit::new(limit).unwrap()).unwrap()
}

/// `bits` is the code limit of the kernel.
fn exact(kernels: &KernelSet, tensor: &ExponentsTensor<Vec<u8>>, bytes: &[u8], bits: u32, what: &str) {
    let stream = stream(kernels);
    let device = DeviceExponents::upload(&stream, tensor).unwrap();
    let mut ctx = context(&stream);
    let mut output = DeviceBuffer::zeroed(&stream, bytes.len()).unwrap();
    for block in BLOCKS {
        let decoder = decoder(kernels, &spec(tensor.float(), bits, block));
        poison(&stream, &mut output);
        decoder.elements(&mut ctx, &device, &mut output).unwrap();
        let what = format!("{:?} {what} {block:?}", tensor.float());
        ctx.synchronize().unwrap_or_else(|error| panic!("{what}: {error}"));
        let got = output.to_host(&stream).unwrap();
        let wrong = got.iter().zip(bytes).position(|(got, expected)| got != expected);
        assert_eq!(wrong, None, "{what}: first wrong byte");
        guard_is_intact(&stream, &output, &what);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_type_in_every_shape() {
    let kernels = gpu();
    for float in CODED {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let elements = shape.0 * shape.1;
            for (one_in, what) in [(u64::MAX, "weights"), (300, "outliers"), (1, "any bits")] {
                let bytes = weights(float, elements, one_in, seed as u64);
                exact(kernels, &encode(float, &bytes, shape, 7), &bytes, 7, &format!("{what} {shape:?}"));
            }
            let bytes = vec![0; elements * float.bytes()];
            exact(kernels, &encode(float, &bytes, shape, 7), &bytes, 7, &format!("zeros {shape:?}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_edge_remainder() {
    let kernels = gpu();
    for float in CODED {
        for edge in 1..=130 {
            for shape in [(edge, 72), (70, edge)] {
                let bytes = weights(float, shape.0 * shape.1, 90, edge as u64);
                exact(kernels, &encode(float, &bytes, shape, 7), &bytes, 7, &format!("{shape:?}"));
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_code_limit() {
    let kernels = gpu();
    let of = |bits| CODED.iter().flat_map(move |float| BLOCKS.map(|block| spec(*float, bits, block)));
    let specs: Vec<VariantSpec> = [7, 9, 12, 15].into_iter().flat_map(of).collect();
    kernels.prepare(&specs, &|_| {}).unwrap();
    for float in CODED {
        for bits in [7, 9, 12, 15] {
            for shape in [(190, 264), (190, 257)] {
                let bytes = weights(float, shape.0 * shape.1, 200, u64::from(bits));
                for limit in [6, bits] {
                    let tensor = encode(float, &bytes, shape, limit);
                    exact(kernels, &tensor, &bytes, bits, &format!("{shape:?} limit {limit} through {bits}"));
                }
            }
        }
    }
}

/// 2000 launches for each type, with new weights every 100.
#[test]
#[ignore = "needs a GPU"]
fn repeated_launches_decode_the_same_bytes() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    for float in CODED {
        for seed in 0..20 {
            // Rows that end inside a tile.
            let shape = (1000 + 37 * seed as usize, 1032);
            let bytes = weights(float, shape.0 * shape.1, 1000, 0x5eed + seed);
            let tensor = encode(float, &bytes, shape, if seed % 4 == 3 { 15 } else { 7 });
            let device = DeviceExponents::upload(&stream, &tensor).unwrap();
            let decoder = shipped(kernels, float, device.code_bits());
            let mut output = DeviceBuffer::zeroed(&stream, bytes.len()).unwrap();
            for launch in 0..100 {
                poison(&stream, &mut output);
                decoder.elements(&mut ctx, &device, &mut output).unwrap();
                ctx.synchronize().unwrap();
                assert!(output.to_host(&stream).unwrap() == bytes, "{float:?}, seed {seed}, launch {launch}");
            }
            guard_is_intact(&stream, &output, "a decoder");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_matrix_of_more_tiles_than_warps_of_each_type() {
    let kernels = gpu();
    let shape = (4160, 8192);
    let warps = kernels.device().info().sms as usize * 32;
    assert!(shape.0 * shape.1 / 4096 > warps * 3 / 2, "no second round on {warps} warps");
    for float in CODED {
        let bytes = weights(float, shape.0 * shape.1, 5000, 9);
        exact(kernels, &encode(float, &bytes, shape, 7), &bytes, 7, &format!("{shape:?}"));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn mismatched_operands_are_rejected_before_the_launch() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    let bytes = weights(Float::F16, 64 * 64, 20, 1);
    let tensor = encode(Float::F16, &bytes, (64, 64), 15);
    let device = DeviceExponents::upload(&stream, &tensor).unwrap();
    let bits = device.code_bits();
    assert!(bits > 7, "{bits}");
    let mut output = DeviceBuffer::zeroed(&stream, bytes.len()).unwrap();
    let short = shipped(kernels, Float::F16, 7);
    assert_eq!(refused(short.elements(&mut ctx, &device, &mut output)), LaunchError::CodeBits { limit: 7, bits });
    let other = shipped(kernels, Float::E5M2, 15);
    let element = LaunchError::DecodesElement { writes: DecodeElement::E5M2, tensor: DecodeElement::F16 };
    assert_eq!(refused(other.elements(&mut ctx, &device, &mut output)), element);
    let right = shipped(kernels, Float::F16, bits);
    let mut small = DeviceBuffer::zeroed(&stream, bytes.len() - 1).unwrap();
    let elements = LaunchError::Elements { buffer: "the output", got: 8191, expected: 8192 };
    assert_eq!(refused(right.elements(&mut ctx, &device, &mut small)), elements);
    // A decoder of F16 with BF16, and a decoder of indices with F16.
    let huffman = huffman::encode(Matrix::new(&bytes, 64, 64).unwrap(), CodeLimit::DEFAULT).unwrap();
    let huffman = DeviceHuffman::upload(&stream, &huffman).unwrap();
    let mut whole = DeviceMatrix::zeroed(&stream, 64, 64).unwrap();
    let element = LaunchError::DecodesElement { writes: DecodeElement::F16, tensor: DecodeElement::Bf16 };
    assert_eq!(refused(right.full(&mut ctx, &huffman, whole.view_mut())), element);
    let indices = decoder(kernels, &graph::decoder(Arch::Sm90a, DecodeOutput::Palette, 15).unwrap());
    let writes = LaunchError::Decodes { writes: DecodeOutput::Palette, asked: DecodeOutput::Full };
    assert_eq!(refused(indices.elements(&mut ctx, &device, &mut output)), writes);
    // Sections of another type.
    let sections = Sections::of(&tensor);
    let e4m3 = ExponentsSections { float: Float::E4M3, ..sections.view() };
    let elements = LaunchError::Elements { buffer: "fraction_bytes", got: 4096, expected: 0 };
    assert_eq!(refused(DeviceExponents::from_sections(&stream, tensor.grid(), &e4m3)), elements);
    let bf16 = ExponentsSections { float: Float::Bf16, ..sections.view() };
    let refusal = refused(DeviceExponents::from_sections(&stream, tensor.grid(), &bf16));
    assert_eq!(refusal, LaunchError::NotExponents { float: Float::Bf16 });
    ctx.synchronize().unwrap();
}

/// Owned sections, for tests that corrupt them.
#[derive(Clone)]
struct Sections {
    float: Float,
    grid: TileGrid,
    fractions: [Vec<u8>; 2],
    coded: OwnedCoded,
}

impl Sections {
    fn of(tensor: &ExponentsTensor<Vec<u8>>) -> Self {
        Self {
            float: tensor.float(),
            grid: tensor.grid(),
            fractions: [tensor.fraction_bytes().to_vec(), tensor.fraction_bits().to_vec()],
            coded: OwnedCoded::of(tensor.exponents()),
        }
    }

    fn view(&self) -> ExponentsSections<'_> {
        ExponentsSections {
            float: self.float,
            fraction_bytes: &self.fractions[0],
            fraction_bits: &self.fractions[1],
            exponents: self.coded.view(),
        }
    }

    /// Decodes sections that may be corrupt. Returns the bytes, and whether a fault was reported.
    fn survive(&self, kernels: &KernelSet, stream: &Stream, bits: u32, what: &str) -> (Vec<u8>, bool) {
        let decoder = shipped(kernels, self.float, bits);
        let mut ctx = context(stream);
        let device = DeviceExponents::from_sections(stream, self.grid, &self.view()).unwrap();
        let mut output = DeviceBuffer::zeroed(stream, device.decoded_bytes()).unwrap();
        poison(stream, &mut output);
        let refused = launch_error(decoder.elements(&mut ctx, &device, &mut output)).is_some();
        stream.synchronize().unwrap_or_else(|error| panic!("{:?}: {what}: {error}", self.float));
        guard_is_intact(stream, &output, what);
        let fault = match ctx.synchronize() {
            Ok(()) => refused,
            Err(DeviceError::Fault { tile }) => {
                assert!((tile as usize) < self.grid.tiles(), "{what}: fault in tile {tile}");
                true
            }
            Err(error) => panic!("{what}: {error}"),
        };
        (output.to_host(stream).unwrap(), fault)
    }
}

#[test]
#[ignore = "needs a GPU"]
fn hostile_sections_stay_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    for (float, bits) in CODED.into_iter().flat_map(|float| [(float, 7), (float, 15)]) {
        // Groups of eight elements, and single elements. The last tile row and column are partial.
        for shape in [(200, 152), (190, 131)] {
            let bytes = weights(float, shape.0 * shape.1, 100, 5);
            let good = Sections::of(&encode(float, &bytes, shape, bits));
            let survive = |sections: &Sections, what: &str| sections.survive(kernels, &stream, bits, what);
            assert!(survive(&good, "undamaged") == (bytes.clone(), false));
            let words = (good.coded.encoded_exp.len() / 4) as u32;
            for tile in [0, good.grid.tiles() - 1] {
                for start in [words, words + 1, u32::MAX, u32::MAX - 100, 1 << 31] {
                    let mut bad = good.clone();
                    bad.coded.metadata(tile, |m| {
                        m.start_word = start;
                        // A start matters only if some row is coded.
                        (m.verbatim_low, m.verbatim_high) = (0, 0);
                    });
                    let what = format!("tile {tile} starts at word {start} of {words}");
                    let (got, fault) = survive(&bad, &what);
                    assert!(fault, "no fault: {what}");
                    // The tile is skipped.
                    let (row, col) = (tile / good.grid.tile_cols() * 64, tile % good.grid.tile_cols() * 64);
                    let first = (row * shape.1 + col) * float.bytes();
                    assert!(got[first..first + float.bytes()].iter().all(|byte| *byte == 0xff), "{what}");
                }
                for offset in [u32::MAX, u32::MAX - 3, 1 << 31] {
                    let mut bad = good.clone();
                    bad.coded.metadata(tile, |m| {
                        m.verbatim_row_offset = offset;
                        m.verbatim_low |= 1;
                    });
                    assert!(survive(&bad, "verbatim rows elsewhere").1, "tile {tile}: no fault at row {offset}");
                }
            }
            for lengths in [[0u8; 16], [1; 16], std::array::from_fn(|i| 15 - i as u8), [255; 16]] {
                let mut bad = good.clone();
                (bad.coded.code_lengths, bad.coded.palette) = (lengths, [255; 16]);
                survive(&bad, &format!("code lengths {lengths:?}"));
            }
            for seed in 0..16 {
                let mut random = Random::new(seed);
                let mut bad = good.clone();
                for _ in 0..1 + random.below(20) {
                    let target: &mut [u8] = match random.below(6) {
                        0 | 1 => &mut bad.coded.tile_metadata,
                        2 => &mut bad.coded.row_lengths,
                        3 => &mut bad.coded.encoded_exp,
                        4 => &mut bad.coded.palette,
                        _ => &mut bad.coded.code_lengths,
                    };
                    let at = random.below(target.len() as u64) as usize;
                    target[at] = random.bits() as u8;
                }
                survive(&bad, &format!("random damage {seed}"));
            }
            // The device still works after the faults.
            assert!(survive(&good, "undamaged, afterwards") == (bytes.clone(), false));
        }
    }
}
