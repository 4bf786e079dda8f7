#![no_main]
//! Stored sections from anywhere: arbitrary ones, and valid ones with bytes changed.

use libfuzzer_sys::fuzz_target;
use unweight_format::{CodeLimit, Grid, HuffmanTensor, Matrix, PaletteTensor, Section, decode, encode, oracle};

fn check_huffman(tensor: &HuffmanTensor<Vec<u8>>) {
    let (fast, slow) = (decode::to_vec(tensor), oracle::decode_huffman(tensor));
    match (&fast, &slow) {
        (Ok(fast), Ok(slow)) => assert!(fast == slow, "both accept, and differ"),
        (Err(error), Ok(_)) => panic!("only the fast decoder refuses: {error}"),
        _ => {}
    }
    _ = decode::transcode(tensor);
}

fn check_palette(tensor: &PaletteTensor<Vec<u8>>) {
    let mut out = vec![0; tensor.grid().elements() * 2];
    decode::palette(tensor, &mut out).expect("a palette tensor has nothing left to fail on");
    assert!(out == oracle::decode_palette(tensor));
}

fuzz_target!(|data: &[u8]| {
    let [mode, rows, cols, data @ ..] = data else { return };
    let Ok(grid) = Grid::new(usize::from(*rows) + 1, usize::from(*cols) + 1) else { return };
    if mode & 1 == 0 {
        // Sections cut from the input, sizes as the grid asks for where it does.
        let mut rest = data;
        let mut cut = |section: Section| {
            let bytes = section.fixed_bytes(grid).unwrap_or_else(|| {
                let (&n, tail) = rest.split_first().unwrap_or((&0, &[]));
                rest = tail;
                usize::from(n) * if section == Section::EncodedExp { 16 } else { 64 }
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
    // A valid tensor; then (section, offset, xor) triples from the input.
    let weights: Vec<u8> = (0..grid.elements() as u32)
        .flat_map(|i| {
            let mixed = i.wrapping_mul(0x9e37_79b9) ^ u32::from(*mode) << 8;
            let exponent = 120 + (mixed >> 20).trailing_zeros().min(12) as u16;
            ((mixed as u16 & 0x807f) | exponent << 7).to_le_bytes()
        })
        .collect();
    let matrix = Matrix::new(&weights, grid.rows(), grid.cols()).expect("the shape is right");
    let limit = CodeLimit::new(6 + u32::from(mode >> 4) % 10).expect("6..=15");
    let tensor = encode::huffman(matrix, limit).expect("small");
    let damaged = |section: Section, mut bytes: Vec<u8>| {
        for change in data.chunks_exact(4).filter(|c| usize::from(c[0]) % 8 == section as usize) {
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
        let palette = decode::transcode(&tensor).expect("valid");
        let section = |s| damaged(s, palette.section(s).map(|b| b.into_owned()).unwrap_or_default());
        PaletteTensor::from_sections(grid, section).iter().for_each(check_palette);
    }
});
