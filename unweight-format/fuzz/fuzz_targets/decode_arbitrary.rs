#![no_main]
//! Arbitrary stored sections, and valid ones with changed bytes.

use libfuzzer_sys::fuzz_target;
use unweight_format::{
    CodeLimit, CodecError, EncodingId, Float, FloatMatrix, Histogram, Matrix, StoredTensor, Survey, TileGrid,
    raw::{
        CompactTensor, ExponentsTensor, HuffmanTensor, PackedTensor, PaletteTensor, RansTensor, Section, compact,
        exponents, huffman, oracle, packed, palette, rans,
    },
};

/// The sections of the encodings with verbatim rows, in the numbering of inputs.
const NUMBERED: [Section; 8] = [
    Section::SIGN_MANTISSA,
    Section::ENCODED_EXP,
    Section::ROW_LENGTHS,
    Section::TILE_METADATA,
    Section::VERBATIM_EXPONENTS,
    Section::PALETTE,
    Section::CODE_LENGTHS,
    Section::PALETTE_INDEX,
];

fn check_huffman(tensor: &HuffmanTensor<Vec<u8>>) {
    let (fast, slow) = (huffman::decode(tensor), oracle::decode_huffman(tensor));
    match (&fast, &slow) {
        (Ok(fast), Ok(slow)) => assert!(fast == slow, "the decoders differ"),
        (Err(error), Ok(_)) => panic!("only the fast decoder fails: {error}"),
        _ => {}
    }
    _ = huffman::transcode(tensor);
}

fn check_palette(tensor: &PaletteTensor<Vec<u8>>) {
    let mut out = vec![0; tensor.grid().elements() * 2];
    palette::decode_into(tensor, &mut out).expect("a checked palette tensor decodes");
    assert!(out == oracle::decode_palette(tensor));
}

fn check_packed(tensor: &PackedTensor<Vec<u8>>) {
    let weights = tensor.unpack();
    assert!(weights == oracle::unpack(tensor));
    // The encoding is canonical: the same window and weights result in the same bytes.
    let matrix = Matrix::new(&weights, tensor.grid().rows(), tensor.grid().cols()).expect("the shape is right");
    if let Ok(again) = packed::pack(matrix, &Histogram::of(&weights)) {
        assert!(again.window() != tensor.window() || again == *tensor, "two encodings of the same weights");
    }
    (0..tensor.grid().tiles()).for_each(|tile| drop(tensor.operands(tile)));
}

fn check_compact(tensor: &CompactTensor<Vec<u8>>) {
    match (tensor.decode(), oracle::decode_compact(tensor)) {
        (Ok(fast), Ok(slow)) => assert!(fast == slow, "the decoders differ"),
        (Err(fast), Err(slow)) => assert!(fast == slow, "the decoders fail for different reasons"),
        (fast, slow) => panic!("one decoder fails: {:?} {:?}", fast.err(), slow.err()),
    }
    (0..tensor.grid().tiles()).for_each(|tile| drop(tensor.operands(tile)));
}

fn check_exponents(tensor: &ExponentsTensor<Vec<u8>>) {
    let (fast, slow) = (exponents::decode(tensor), oracle::decode_exponents(tensor));
    match (&fast, &slow) {
        (Ok(fast), Ok(slow)) => assert!(fast == slow, "the decoders differ"),
        (Err(error), Ok(_)) => panic!("only the fast decoder fails: {error}"),
        _ => {}
    }
}

fn check_rans(tensor: &RansTensor<Vec<u8>>) {
    assert!(rans::decode(tensor) == oracle::decode_rans(tensor), "the decoders differ");
}

fuzz_target!(|data: &[u8]| {
    let [mode, rows, cols, data @ ..] = data else { return };
    if mode & 0xcc == 0xcc {
        return planes_sections(*mode, usize::from(*rows) + 1, usize::from(*cols) + 1, data);
    }
    if mode & 0x8c == 0x88 {
        return rans_sections(*mode, usize::from(*rows) + 1, usize::from(*cols) + 1, data);
    }
    if mode & 12 == 8 {
        return exponents_sections(*mode, usize::from(*rows) + 1, usize::from(*cols) + 1, data);
    }
    if mode & 4 != 0 {
        if mode & 8 != 0 {
            return compact_sections(*mode, usize::from(rows % 3), usize::from(cols % 3), data);
        }
        return packed_sections(*mode, usize::from(rows % 3), usize::from(cols % 3), data);
    }
    let Ok(grid) = TileGrid::new(usize::from(*rows) + 1, usize::from(*cols) + 1) else { return };
    if mode & 1 == 0 {
        // Sections cut from the input, with the sizes that the grid requires where it determines them.
        let mut rest = data;
        let mut cut = |section: Section| {
            let bytes = section.fixed_bytes(grid).unwrap_or_else(|| {
                let (&n, tail) = rest.split_first().unwrap_or((&0, &[]));
                rest = tail;
                usize::from(n) * if section == Section::ENCODED_EXP { 16 } else { 64 }
            });
            let mut out = vec![0; bytes];
            let n = rest.len().min(bytes);
            out[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
            out
        };
        if mode & 2 == 0 {
            HuffmanTensor::from_sections(grid, &mut cut).iter().for_each(check_huffman);
        } else {
            PaletteTensor::from_sections(grid, &mut cut).iter().for_each(check_palette);
        }
        return;
    }
    // A valid tensor, changed by (section, offset, xor) triples from the input.
    let weights: Vec<u8> = (0..grid.elements() as u32)
        .flat_map(|i| {
            let mixed = i.wrapping_mul(0x9e37_79b9) ^ u32::from(*mode) << 8;
            let exponent = 120 + (mixed >> 20).trailing_zeros().min(12) as u16;
            ((mixed as u16 & 0x807f) | exponent << 7).to_le_bytes()
        })
        .collect();
    let matrix = Matrix::new(&weights, grid.rows(), grid.cols()).expect("the shape is right");
    let limit = CodeLimit::new(6 + u32::from(mode >> 4) % 10).expect("6..=15");
    let tensor = huffman::encode(matrix, limit).expect("small");
    let damaged = |section: Section, mut bytes: Vec<u8>| {
        for change in data.chunks_exact(4).filter(|c| NUMBERED[usize::from(c[0]) % 8] == section) {
            if !bytes.is_empty() {
                let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % bytes.len();
                bytes[at] ^= change[3];
            }
        }
        bytes
    };
    if mode & 2 == 0 {
        let section = |s| damaged(s, tensor.section(s).map(|b| b.into_owned()).unwrap_or_default());
        HuffmanTensor::from_sections(grid, section).iter().for_each(check_huffman);
    } else {
        let palette = huffman::transcode(&tensor).expect("valid");
        let section = |s| damaged(s, palette.section(s).map(|b| b.into_owned()).unwrap_or_default());
        PaletteTensor::from_sections(grid, section).iter().for_each(check_palette);
    }
});

/// Other types: sections cut from the input, or valid ones changed by (section, offset, xor) triples.
fn exponents_sections(mode: u8, rows: usize, cols: usize, data: &[u8]) {
    let grid = TileGrid::new(rows, cols).expect("small");
    let float = [Float::E4M3, Float::E5M2, Float::F16, Float::F32][usize::from(mode >> 4 & 3)];
    let format = [float.exponent_bits() as u8, float.fraction_bits() as u8];
    if mode & 1 == 0 {
        let mut rest = data;
        let cut = |section: Section| {
            let bytes = section.fixed_bytes(grid).unwrap_or_else(|| {
                let fraction = 1 + float.fraction_bits() as usize;
                let (&n, tail) = rest.split_first().unwrap_or((&0, &[]));
                rest = tail;
                match section {
                    Section::FRACTION_BYTES => (grid.elements() * (fraction / 8)).next_multiple_of(16),
                    Section::FRACTION_BITS => (grid.elements().div_ceil(8) * (fraction % 8)).next_multiple_of(16),
                    Section::ENCODED_EXP => usize::from(n) * 16,
                    _ => usize::from(n) * 64,
                }
            });
            let mut out = vec![0; bytes];
            if section == Section::FLOAT_FORMAT {
                out[..2].copy_from_slice(&format);
                return out;
            }
            let n = rest.len().min(bytes);
            out[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
            out
        };
        ExponentsTensor::from_sections(grid, cut).iter().for_each(check_exponents);
        return;
    }
    let element = |i: u32| {
        let mixed = i.wrapping_mul(0x9e37_79b9) ^ u32::from(mode) << 8;
        let exponent = (1 << (float.exponent_bits() - 1)) - 1 - (mixed >> 20).trailing_zeros().min(12) as u8 / 2;
        float.join(mixed & ((2 << float.fraction_bits()) - 1), exponent)
    };
    let weights: Vec<u8> =
        (0..grid.elements() as u32).flat_map(|i| element(i).to_le_bytes().into_iter().take(float.bytes())).collect();
    let matrix = FloatMatrix::new(float, &weights, rows, cols).expect("the shape is right");
    let tensor = exponents::encode(matrix, CodeLimit::DEFAULT).expect("small");
    check_exponents(&tensor);
    let damaged = |section: Section| {
        let mut bytes = tensor.section(section).map(|bytes| bytes.into_owned()).unwrap_or_default();
        let own = |change: &&[u8]| EncodingId::EXPONENTS.encoding().sections()[usize::from(change[0]) % 9] == section;
        for change in data.chunks_exact(4).filter(own) {
            if !bytes.is_empty() {
                let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % bytes.len();
                bytes[at] ^= change[3];
            }
        }
        bytes
    };
    ExponentsTensor::from_sections(grid, damaged).iter().for_each(check_exponents);
}

/// Packed tensors of up to 2 x 2 tiles. With 0 tile rows or columns the shape cannot be packed.
fn packed_sections(mode: u8, tile_rows: usize, tile_cols: usize, data: &[u8]) {
    let extent = |tiles: usize| if tiles == 0 { 65 } else { 64 * tiles };
    let grid = TileGrid::new(extent(tile_rows), extent(tile_cols)).expect("small");
    if mode & 1 == 0 {
        let (&words, mut rest) = data.split_first().unwrap_or((&0, &[]));
        let cut = |section: Section| {
            let mut out = vec![0; section.fixed_bytes(grid).unwrap_or(usize::from(words) * 16)];
            let n = rest.len().min(out.len());
            out[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
            out
        };
        PackedTensor::from_sections(grid, cut).iter().for_each(check_packed);
        return;
    }
    // A valid tensor with some escapes, changed by (section, offset, xor) triples from the input.
    let weights: Vec<u8> = (0..grid.elements() as u32)
        .flat_map(|i| {
            let mixed = i.wrapping_mul(0x9e37_79b9) ^ u32::from(mode) << 8;
            let exponent = 120 + (mixed >> 20).trailing_zeros().min(12) as u16;
            let is_outlier = mixed.is_multiple_of(300);
            let bits = if is_outlier { mixed as u16 & 0x9fff } else { mixed as u16 & 0x807f | exponent << 7 };
            bits.to_le_bytes()
        })
        .collect();
    let matrix = Matrix::new(&weights, grid.rows(), grid.cols()).expect("the shape is right");
    let Ok(tensor) = packed::pack(matrix, &Histogram::of(&weights)) else { return };
    let damaged = |section: Section| {
        let mut bytes = tensor.section(section).map(|b| b.into_owned()).unwrap_or_default();
        for change in
            data.chunks_exact(4).filter(|c| EncodingId::PACKED.encoding().sections()[usize::from(c[0]) % 4] == section)
        {
            if !bytes.is_empty() {
                let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % bytes.len();
                bytes[at] ^= change[3];
            }
        }
        bytes
    };
    PackedTensor::from_sections(grid, damaged).iter().for_each(check_packed);
}

/// Compact tensors, as in [`packed_sections`].
fn compact_sections(mode: u8, tile_rows: usize, tile_cols: usize, data: &[u8]) {
    let extent = |tiles: usize| if tiles == 0 { 65 } else { 64 * tiles };
    let grid = TileGrid::new(extent(tile_rows), extent(tile_cols)).expect("small");
    if mode & 1 == 0 {
        let mut rest = data;
        let cut = |section: Section| {
            let bytes = section.fixed_bytes(grid).unwrap_or_else(|| {
                let (&words, tail) = rest.split_first().unwrap_or((&0, &[]));
                rest = tail;
                usize::from(words) * 16
            });
            let mut out = vec![0; bytes];
            let n = rest.len().min(out.len());
            out[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
            out
        };
        CompactTensor::from_sections(grid, cut).iter().for_each(check_compact);
        return;
    }
    // A valid tensor with some escapes, changed by (section, offset, xor) triples from the input.
    let weights: Vec<u8> = (0..grid.elements() as u32)
        .flat_map(|i| {
            let mixed = i.wrapping_mul(0x9e37_79b9) ^ u32::from(mode) << 8;
            let exponent = 110 + (mixed >> 20).trailing_zeros().min(12) as u16;
            let is_outlier = mixed.is_multiple_of(300);
            let bits = if is_outlier { mixed as u16 & 0x9fff } else { mixed as u16 & 0x807f | exponent << 7 };
            bits.to_le_bytes()
        })
        .collect();
    let matrix = Matrix::new(&weights, grid.rows(), grid.cols()).expect("the shape is right");
    let Ok(tensor) = compact::encode(matrix, &Histogram::of(&weights)) else { return };
    let damaged = |section: Section| {
        let mut bytes = tensor.section(section).map(|b| b.into_owned()).unwrap_or_default();
        for change in
            data.chunks_exact(4).filter(|c| EncodingId::COMPACT.encoding().sections()[usize::from(c[0]) % 6] == section)
        {
            if !bytes.is_empty() {
                let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % bytes.len();
                bytes[at] ^= change[3];
            }
        }
        bytes
    };
    CompactTensor::from_sections(grid, damaged).iter().for_each(check_compact);
}

/// Planes: tables and streams cut from the input, or valid ones changed by (section, offset, xor) triples.
fn planes_sections(mode: u8, rows: usize, cols: usize, data: &[u8]) {
    let grid = TileGrid::new(rows, cols).expect("small");
    let float = [Float::E4M3, Float::E5M2, Float::Bf16, Float::F32][usize::from(mode >> 4 & 3)];
    let bytes = grid.elements() * float.bytes();
    let sections: Vec<Vec<u8>> = if mode & 1 == 0 {
        let (&blocks, rest) = data.split_first().unwrap_or((&0, &[]));
        let (tables, streams) = rest.split_at(rest.len().min(16 * usize::from(blocks)));
        [tables, streams].map(|part| part[..part.len() / 16 * 16].to_vec()).into()
    } else {
        // Differences: lower bytes near 0, upper bytes mostly 0.
        let weights: Vec<u8> = (0..bytes as u32)
            .map(|i| (i.wrapping_mul(0x9e37_79b9) >> 20).trailing_zeros() as u8 * u8::from(i % 3 == 0))
            .collect();
        let matrix = FloatMatrix::new(float, &weights, rows, cols).expect("the shape is right");
        let survey = Survey::of(float, &weights);
        let tensor = StoredTensor::encode(EncodingId::PLANES, matrix, &survey, CodeLimit::DEFAULT).expect("any matrix");
        let damaged = |(number, (_, bytes)): (usize, (Section, &[u8]))| {
            let mut bytes = bytes.to_vec();
            for change in data.chunks_exact(4).filter(|change| usize::from(change[0]) % 2 == number) {
                let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % bytes.len();
                bytes[at] ^= change[3];
            }
            bytes
        };
        tensor.sections().enumerate().map(damaged).collect()
    };
    let Ok(tensor) = StoredTensor::new(EncodingId::PLANES, grid, sections) else { return };
    let mut fast = vec![0; bytes];
    match (tensor.decode(&mut fast), oracle::decode_planes(&tensor).expect("planes")) {
        (Ok(()), Ok(slow)) => assert!(fast == slow, "the decoders differ"),
        // The sections may be those of a type of another size.
        (Err(CodecError::TensorBytes { .. }), _) => {}
        (fast, slow) => assert!(fast.err() == slow.err(), "the decoders fail for different reasons"),
    }
}

/// rANS: sections cut from the input, or valid ones changed by (section, offset, xor) triples.
fn rans_sections(mode: u8, rows: usize, cols: usize, data: &[u8]) {
    let grid = TileGrid::new(rows, cols).expect("small");
    if mode & 1 == 0 {
        let mut rest = data;
        let cut = |section: Section| {
            let bytes = match section {
                Section::SIGN_MANTISSA_LOW => grid.elements().div_ceil(2).next_multiple_of(16),
                _ => {
                    let (&n, tail) = rest.split_first().unwrap_or((&0, &[]));
                    rest = tail;
                    usize::from(n) * 16
                }
            };
            let mut out = vec![0; bytes];
            let n = rest.len().min(bytes);
            out[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
            out
        };
        RansTensor::from_sections(grid, cut).iter().for_each(check_rans);
        return;
    }
    // Rows and columns of different scale, and some elements outside the usual range.
    let weights: Vec<u8> = (0..grid.elements())
        .flat_map(|i| {
            let mixed = (i as u32).wrapping_mul(0x9e37_79b9) ^ u32::from(mode) << 8;
            let scale = (i / cols % 4 + i % cols % 3) as u16;
            let exponent = 115 + scale - (mixed >> 20).trailing_zeros().min(12) as u16;
            let bits = if mixed.is_multiple_of(300) { mixed as u16 } else { mixed as u16 & 0x807f | exponent << 7 };
            bits.to_le_bytes()
        })
        .collect();
    let matrix = Matrix::new(&weights, rows, cols).expect("the shape is right");
    let tensor = rans::encode(matrix, &Histogram::of(&weights));
    assert!(rans::decode(&tensor).as_ref() == Ok(&weights));
    let damaged = |section: Section| {
        let mut bytes = tensor.section(section).map(|b| b.into_owned()).unwrap_or_default();
        let own = |change: &&[u8]| EncodingId::RANS.encoding().sections()[usize::from(change[0]) % 3] == section;
        for change in data.chunks_exact(4).filter(own) {
            if !bytes.is_empty() {
                let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % bytes.len();
                bytes[at] ^= change[3];
            }
        }
        bytes
    };
    RansTensor::from_sections(grid, damaged).iter().for_each(check_rans);
}
