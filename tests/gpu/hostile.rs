//! Corrupt sections in every decoder and the matmul: no driver error, no write outside an output, and a device that
//! still works. Also meant to run under `compute-sanitizer`.

use crate::harness::{OwnedCoded, Random, Weights, context, gpu, guard_is_intact, launch_error, poison, stream};
use unweight_bench::{halves, normal_bf16};
use unweight_codegen::spec::{Arch, DecodeOutput};
use unweight_format::{
    CodeLimit, Matrix, TileGrid,
    raw::{HuffmanTensor, TileMetadata, huffman, palette},
};
use unweight_rt::{
    DeviceBuffer, DeviceError, DeviceMatrix, KernelSet, Stream,
    raw::{
        choose::graph,
        ops::{
            decode_huffman::{Decoder, output_bytes},
            gemm_recon::Matmul,
        },
        weight::{DeviceHuffman, DevicePalette, HuffmanSections, PaletteSections},
    },
};

/// Owned sections, for tests that corrupt them.
#[derive(Clone)]
struct Sections {
    grid: TileGrid,
    sign_mantissa: Vec<u8>,
    coded: OwnedCoded,
}

impl Sections {
    fn of(tensor: &HuffmanTensor<Vec<u8>>) -> Self {
        Self {
            grid: tensor.grid(),
            sign_mantissa: tensor.sign_mantissa().to_vec(),
            coded: OwnedCoded::of(tensor.exponents()),
        }
    }

    fn upload(&self, stream: &Stream) -> DeviceHuffman {
        let sections = HuffmanSections { sign_mantissa: &self.sign_mantissa, exponents: self.coded.view() };
        DeviceHuffman::from_sections(stream, self.grid, &sections).unwrap()
    }
}

/// Runs one decoder over corrupt sections. Returns `Ok(true)` if it reported a fault.
fn survives(
    kernels: &KernelSet,
    stream: &Stream,
    sections: &Sections,
    output: DecodeOutput,
    bits: u32,
    what: &str,
) -> bool {
    let spec = graph::decoder(Arch::Sm90a, output, bits).unwrap();
    let decoder = Decoder::new(kernels.get(&spec).unwrap()).unwrap();
    let mut ctx = context(stream);
    let device = sections.upload(stream);
    let what = format!("{spec}: {what}");
    let refused = match output {
        DecodeOutput::Full => {
            let (rows, cols) = (sections.grid.rows() as u32, sections.grid.cols() as u32);
            let mut whole = DeviceMatrix::zeroed(stream, rows, cols).unwrap();
            poison(stream, &mut whole);
            let refused = launch_error(decoder.full(&mut ctx, &device, whole.view_mut()));
            guard_is_intact(stream, &whole, &what);
            refused
        }
        DecodeOutput::Exponent | DecodeOutput::Palette => {
            let mut bytes = DeviceBuffer::zeroed(stream, output_bytes(sections.grid, output)).unwrap();
            poison(stream, &mut bytes);
            let refused = launch_error(match output {
                DecodeOutput::Exponent => decoder.exponent(&mut ctx, &device, &mut bytes),
                _ => decoder.palette(&mut ctx, &device, &mut bytes),
            });
            guard_is_intact(stream, &bytes, &what);
            refused
        }
    };
    stream.synchronize().unwrap_or_else(|error| panic!("{what}: {error}"));
    match ctx.synchronize() {
        Ok(()) => refused.is_some(),
        Err(DeviceError::Fault { tile }) => {
            assert!((tile as usize) < sections.grid.tiles(), "{what}: fault in tile {tile}");
            true
        }
        Err(error) => panic!("{what}: {error}"),
    }
}

fn tensor(rows: usize, cols: usize, limit: u32) -> HuffmanTensor<Vec<u8>> {
    let bytes = Weights::HeavyTails.bytes(rows * cols, 5);
    huffman::encode(Matrix::new(&bytes, rows, cols).unwrap(), CodeLimit::new(limit).unwrap()).unwrap()
}

const LIMITS: [u32; 5] = [6, 7, 8, 11, 15];

fn each_decoder(mut body: impl FnMut(DecodeOutput, u32)) {
    for &output in DecodeOutput::ALL {
        for bits in LIMITS {
            body(output, bits);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn metadata_that_leave_their_section_are_reported() {
    let kernels = gpu();
    let stream = stream(kernels);
    each_decoder(|output, bits| {
        // The last tile row and column are partial.
        let good = Sections::of(&tensor(200, 150, bits));
        let (tiles, words) = (good.grid.tiles(), (good.coded.encoded_exp.len() / 4) as u32);
        assert!(!survives(kernels, &stream, &good, output, bits, "undamaged"));
        for tile in [0, tiles / 2, tiles - 1] {
            for start in [words, words - 1, words + 1, u32::MAX, u32::MAX - 100, 1 << 31] {
                let mut bad = good.clone();
                bad.coded.metadata(tile, |m| {
                    m.start_word = start;
                    // A start matters only if some row is coded.
                    (m.verbatim_low, m.verbatim_high) = (0, 0);
                });
                let what = format!("tile {tile} starts at word {start} of {words}");
                assert!(survives(kernels, &stream, &bad, output, bits, &what), "no fault: {what}");
            }
            let rows = (good.coded.verbatim_exponents.len() / 64) as u32;
            for offset in [rows, u32::MAX, u32::MAX - 3, 1 << 31] {
                let mut bad = good.clone();
                bad.coded.metadata(tile, |m| {
                    m.verbatim_row_offset = offset;
                    m.verbatim_low |= 1;
                });
                let what = format!("tile {tile}: verbatim row {offset} of {rows}");
                let fault = survives(kernels, &stream, &bad, output, bits, &what);
                // The decoder to palette indices does not read verbatim rows, so it may or may not check their offset.
                assert!(fault || output == DecodeOutput::Palette, "no fault: {what}");
            }
        }
        let mut bad = good.clone();
        bad.coded.metadata(tiles - 1, |m| m.verbatim_high = u32::MAX);
        survives(kernels, &stream, &bad, output, bits, "pad rows are verbatim");
    });
}

#[test]
#[ignore = "needs a GPU"]
fn hostile_lengths_and_codes_stay_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    each_decoder(|output, bits| {
        let good = Sections::of(&tensor(200, 150, bits));
        let run = |bad: &Sections, what: &str| survives(kernels, &stream, bad, output, bits, what);
        for length in [0, 1, 254, 255] {
            let mut bad = good.clone();
            bad.coded.row_lengths.fill(length);
            run(&bad, &format!("all row lengths {length}"));
        }
        for byte in [0x00, 0xff, 0x55] {
            let mut bad = good.clone();
            bad.coded.encoded_exp.fill(byte);
            run(&bad, &format!("all bits {byte:#04x}"));
        }
        for lengths in [[0u8; 16], [1; 16], [bits as u8; 16], std::array::from_fn(|i| 15 - i as u8), [255; 16]] {
            let mut bad = good.clone();
            bad.coded.code_lengths = lengths;
            run(&bad, &format!("code lengths {lengths:?}"));
        }
        let mut bad = good.clone();
        bad.coded.palette = [255; 16];
        run(&bad, "palette of one exponent, sixteen times");
        let mut bad = good.clone();
        bad.coded.encoded_exp.clear();
        assert!(run(&bad, "no bits at all"), "no fault without any bits");
        let mut bad = good.clone();
        bad.coded.encoded_exp.truncate(bad.coded.encoded_exp.len() / 2 / 16 * 16);
        assert!(run(&bad, "half of the bits"), "no fault with half of the bits");
        let mut bad = good.clone();
        bad.coded.verbatim_exponents.clear();
        for tile in 0..bad.grid.tiles() {
            bad.coded.metadata(tile, |m| (m.verbatim_low, m.verbatim_high) = (u32::MAX, u32::MAX));
        }
        run(&bad, "every row verbatim, no verbatim rows");
    });
}

#[test]
#[ignore = "needs a GPU"]
fn random_damage_stays_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    each_decoder(|output, bits| {
        let good = Sections::of(&tensor(190, 130, bits));
        for seed in 0..24 {
            let mut rng = Random::new(seed);
            let mut bad = good.clone();
            for _ in 0..1 + (rng.below(20) as usize) {
                let value = rng.bits() as u8;
                let target: &mut [u8] = match rng.below(6) as usize {
                    0 | 1 => &mut bad.coded.tile_metadata,
                    2 => &mut bad.coded.row_lengths,
                    3 => &mut bad.coded.encoded_exp,
                    4 => &mut bad.coded.palette,
                    _ => &mut bad.coded.code_lengths,
                };
                let at = rng.below(target.len() as u64) as usize;
                target[at] = value;
            }
            survives(kernels, &stream, &bad, output, bits, &format!("random damage {seed}"));
        }
        // The device still works after the faults.
        assert!(!survives(kernels, &stream, &good, output, bits, "undamaged, afterwards"));
    });
}

#[test]
#[ignore = "needs a GPU"]
fn hostile_palette_source_stays_in_bounds() {
    let kernels = gpu();
    let stream = stream(kernels);
    let (n, k, m) = (256usize, 256usize, 70u32);
    let bytes = Weights::HeavyTails.bytes(n * k, 6);
    let tensor = palette::encode(Matrix::new(&bytes, n, k).unwrap(), CodeLimit::DEFAULT).unwrap();
    let x = DeviceMatrix::from_host(&stream, m, k as u32, &halves(&normal_bf16(m as usize * k, 1.0, 8))).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, m, n as u32).unwrap();
    let mut ctx = context(&stream);
    let rows = tensor.verbatim_exponents().len() / 64;
    let tiles = tensor.grid().tiles();
    let record = |offset: u32, mask: u64| TileMetadata::new(0, offset, mask).to_bytes();
    let false_metadata: Vec<(String, Vec<u8>)> = [0, 1, rows as u32, u32::MAX, u32::MAX - 63, 1 << 31]
        .into_iter()
        .flat_map(|offset| {
            [1u64, 1 << 63, 0xffff, u64::MAX].map(|mask| {
                let metadata: Vec<u8> = (0..tiles).flat_map(|_| record(offset, mask)).collect();
                (format!("verbatim rows {mask:#x} from {offset} of {rows}"), metadata)
            })
        })
        .collect();
    for name in [
        "recon_palette_n2p4_v64_store",
        "recon_palette_n4p2_v64_store",
        "recon_palette_n1p2_v64_store_add",
        "recon_palette_n2p4_v16_store",
        "join_palette_b8_r2w16p2c1_store",
        "join_palette_b8_r7w8p1c1_store_add",
        "join_palette_b32_r1w8p2c2_store",
    ] {
        let spec = format!("uw_sm90a_gemm_{name}").parse().unwrap();
        let matmul = Matmul::new(kernels.get(&spec).unwrap()).unwrap();
        for (what, metadata) in &false_metadata {
            for verbatim in [tensor.verbatim_exponents(), &[]] {
                let sections = PaletteSections {
                    sign_mantissa: tensor.sign_mantissa(),
                    palette_index: tensor.palette_index(),
                    tile_metadata: metadata,
                    verbatim_exponents: verbatim,
                    palette: tensor.palette(),
                };
                let device = DevicePalette::from_sections(&stream, tensor.grid(), &sections).unwrap();
                poison(&stream, &mut y);
                // More rows than the budget is an error; the kernel must tolerate wrong offsets.
                launch_error(matmul.palette(&mut ctx, x.view(), device.view(), y.view_mut()));
                stream.synchronize().unwrap_or_else(|error| panic!("{spec}: {what}: {error}"));
                guard_is_intact(&stream, &y, what);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn oversized_allocation_is_reported_with_its_bytes() {
    let kernels = gpu();
    let stream = stream(kernels);
    let requested = 1 << 50;
    for _ in 0..3 {
        let refused = DeviceBuffer::<u8>::zeroed(&stream, requested).expect_err("a petabyte must not be allocated");
        let DeviceError::Room { bytes, free } = refused else { panic!("{refused}") };
        assert!(bytes >= requested as u64 && free > 0, "{bytes} {free}");
        assert!(refused.to_string().contains("a smaller batch"), "{refused}");
    }
    // The context is still usable.
    assert!(DeviceBuffer::<u8>::zeroed(&stream, 1 << 20).is_ok());
}
