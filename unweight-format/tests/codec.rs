//! The fast codec against the oracle: same bytes out of the encoders, same weights out of the decoders.

mod common;

use common::Rng;
use proptest::prelude::*;
use unweight_format::{
    CodeLimit, CodecError, Grid, HuffmanTensor, Matrix, PaletteTensor, Section, TileMetadata, decode, encode, oracle,
};

#[derive(Debug, Clone, Copy)]
enum Weights {
    Normal,
    HeavyTailed,
    AnyBits,
    OneExponent,
    FewExponents,
    /// Sixteen exponents, the rare ones in runs: rows above 319 bits.
    LongRows,
}

fn weights(kind: Weights, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng(seed);
    let bf16 = |x: f64| half::bf16::from_f64(x).to_bits();
    (0..rows * cols)
        .flat_map(|i| {
            let bits = match kind {
                Weights::Normal => bf16(rng.normal() * 0.02),
                Weights::HeavyTailed => bf16(rng.normal() * 0.02 / rng.uniform().max(1e-9).powi(2)),
                Weights::AnyBits => rng.next() as u16,
                Weights::OneExponent => 0x3f00 | (rng.next() as u16 & 0x807f),
                Weights::FewExponents => (rng.next() as u16 & 0x807f) | ((120 + rng.next() as u16 % 3) << 7),
                Weights::LongRows => {
                    let rare = i / cols % 64 == 5;
                    let exponent = if rare { 100 + rng.next() % 16 } else { 100 + rng.next() % 2 };
                    (rng.next() as u16 & 0x807f) | (exponent as u16) << 7
                }
            };
            bits.to_le_bytes()
        })
        .collect()
}

fn check(bytes: &[u8], rows: usize, cols: usize, limit: CodeLimit) {
    let matrix = Matrix::new(bytes, rows, cols).unwrap();
    let fast = encode::huffman(matrix, limit).unwrap();
    let slow = oracle::encode_huffman(matrix, limit).unwrap();
    for section in Section::HUFFMAN {
        assert!(fast.section(section) == slow.section(section), "encoders differ in {section:?}: {fast:?} {slow:?}");
    }
    assert_eq!(fast, slow, "encoders differ");
    let stored =
        HuffmanTensor::from_sections(fast.grid(), |s| fast.section(s).expect("a Huffman section").into_owned())
            .unwrap();
    assert_eq!(stored, fast, "stored sections read back");
    assert!(oracle::decode_huffman(&fast).unwrap() == bytes, "oracle decoder");
    assert!(decode::to_vec(&fast).unwrap() == bytes, "fast decoder");

    let fast_palette = encode::palette(matrix, limit).unwrap();
    assert_eq!(fast_palette, oracle::encode_palette(matrix, limit).unwrap(), "palette encoders differ");
    assert_eq!(decode::transcode(&fast).unwrap(), fast_palette, "transcoding gives the same bytes");
    assert!(oracle::decode_palette(&fast_palette) == bytes);
    let mut out = vec![0xaa; bytes.len()];
    decode::palette(&fast_palette, &mut out).unwrap();
    assert!(out == bytes);
    let stored = PaletteTensor::from_sections(fast.grid(), |s| fast_palette.section(s).unwrap().into_owned()).unwrap();
    assert_eq!(stored, fast_palette);
}

fn kind() -> impl Strategy<Value = Weights> {
    prop_oneof![
        Just(Weights::Normal),
        Just(Weights::HeavyTailed),
        Just(Weights::AnyBits),
        Just(Weights::OneExponent),
        Just(Weights::FewExponents),
        Just(Weights::LongRows),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn fast_equals_oracle(kind in kind(), rows in 1usize..=200, cols in 1usize..=200, limit in 6u32..=15, seed: u64) {
        check(&weights(kind, rows, cols, seed), rows, cols, CodeLimit::new(limit).unwrap());
    }
}

#[test]
fn every_bit_pattern_survives() {
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (rows, cols) in [(256, 256), (1024, 64), (64, 1024), (1, 65536), (65536, 1)] {
        check(&bytes, rows, cols, CodeLimit::DEFAULT);
    }
}

#[test]
fn a_palette_may_end_with_exponent_zero() {
    let exponents = [130u16, 130, 130, 129, 129, 0];
    let bytes: Vec<u8> = exponents.iter().flat_map(|e| (e << 7 | 5).to_le_bytes()).collect();
    check(&bytes, 2, 3, CodeLimit::DEFAULT);
}

#[test]
fn every_edge_remainder_survives() {
    for edge in [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129] {
        check(&weights(Weights::Normal, edge, 70, 1), edge, 70, CodeLimit::DEFAULT);
        check(&weights(Weights::HeavyTailed, 70, edge, 2), 70, edge, CodeLimit::DEFAULT);
    }
}

/// `docs/format.md` A.10.
#[test]
fn the_specification_s_worked_example() {
    let weights = [0x3f80u16, 0xbfc0, 0x3f00, 0x3e80, 0x3f80, 0x3f40];
    let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    check(&bytes, 2, 3, CodeLimit::DEFAULT);
    let matrix = Matrix::new(&bytes, 2, 3).unwrap();
    let tensor = encode::huffman(matrix, CodeLimit::DEFAULT).unwrap();
    let padded = |start: &[u8], len: usize| [start, &vec![0; len - start.len()]].concat();
    let expected = |section| match section {
        Section::Palette => padded(&[0x7f, 0x7e, 0x7d], 16),
        Section::CodeLengths => padded(&[1, 2, 2], 16),
        Section::TileMetadata => padded(&[], 16),
        Section::RowLengths => padded(&[1, 2], 64),
        Section::EncodedExp => padded(&[4, 0, 0, 0, 0, 0, 0, 0, 0x16], 32),
        Section::SignMantissa => vec![0, 0xc0, 0, 0, 0, 0x40],
        _ => vec![],
    };
    for section in Section::HUFFMAN {
        assert_eq!(tensor.section(section).unwrap().as_ref(), expected(section), "{section:?}");
    }
    assert_eq!(tensor.row_end_offsets(0)[..3], [65, 131, 131]);
    let palette = encode::palette(matrix, CodeLimit::DEFAULT).unwrap();
    assert_eq!(palette.palette_index()[..2], [0, 1]);
    assert_eq!(palette.palette_index()[32..34], [2, 1]);
    assert_eq!(palette.palette_index().iter().filter(|&&byte| byte != 0).count(), 3);
}

#[test]
fn rows_longer_than_319_bits_are_verbatim() {
    let bytes = weights(Weights::LongRows, 128, 128, 3);
    check(&bytes, 128, 128, CodeLimit::new(15).unwrap());
    let tensor = encode::huffman(Matrix::new(&bytes, 128, 128).unwrap(), CodeLimit::new(15).unwrap()).unwrap();
    assert_eq!(tensor.metadata(0).bitmask(), 1 << 5, "its exponents are all in the palette, it is long");
    assert_eq!(tensor.max_verbatim_rows(), 1);
}

#[test]
fn the_bytes_do_not_depend_on_the_number_of_threads() {
    let bytes = weights(Weights::Normal, 640, 1030, 4);
    let encode = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| encode::huffman(Matrix::new(&bytes, 640, 1030).unwrap(), CodeLimit::DEFAULT).unwrap())
    };
    let one = encode(1);
    assert_eq!(one, encode(2));
    assert_eq!(one, encode(7));
}

#[test]
fn a_survey_counts_and_digests() {
    let bytes = weights(Weights::Normal, 1500, 1100, 5);
    let survey = encode::survey(&bytes);
    assert_eq!(survey.digest, unweight_format::Digest::of(&bytes));
    assert_eq!(survey.histogram, unweight_format::Histogram::of(&bytes));
}

/// Sections of a valid tensor with one of them changed.
fn tampered(change: impl Fn(Section, &mut Vec<u8>)) -> Result<HuffmanTensor<Vec<u8>>, CodecError> {
    let bytes = weights(Weights::HeavyTailed, 130, 192, 6);
    let tensor = encode::huffman(Matrix::new(&bytes, 130, 192).unwrap(), CodeLimit::DEFAULT).unwrap();
    HuffmanTensor::from_sections(tensor.grid(), |s| {
        let mut section = tensor.section(s).unwrap().into_owned();
        change(s, &mut section);
        section
    })
}

#[test]
fn each_broken_invariant_has_its_error() {
    assert!(tampered(|_, _| {}).is_ok());
    for section in Section::HUFFMAN {
        let longer = tampered(|s, bytes| {
            if s == section {
                bytes.push(0)
            }
        });
        assert!(matches!(longer, Err(CodecError::SectionBytes { .. })), "{section:?}: {longer:?}");
        let empty = tampered(|s, bytes| {
            if s == section {
                bytes.clear()
            }
        });
        assert!(matches!(empty, Err(CodecError::SectionBytes { .. })), "{section:?}: {empty:?}");
    }
    let start = tampered(|s, bytes| {
        if s == Section::TileMetadata {
            bytes[TileMetadata::BYTES] ^= 1
        }
    });
    assert!(matches!(start, Err(CodecError::TileMetadata { tile: 1, field: "start_word", .. })), "{start:?}");
    let offset = tampered(|s, bytes| {
        if s == Section::TileMetadata {
            bytes[TileMetadata::BYTES + 4] ^= 1
        }
    });
    assert!(
        matches!(offset, Err(CodecError::TileMetadata { tile: 1, field: "verbatim_row_offset", .. })),
        "{offset:?}"
    );
    // Tiles 6..9 have two rows of the matrix: row 5 is padding.
    let pad = tampered(|s, bytes| {
        if s == Section::TileMetadata {
            bytes[6 * TileMetadata::BYTES + 8] |= 1 << 5
        }
    });
    assert!(matches!(pad, Err(CodecError::Row { tile: 6, row: 5, .. })), "{pad:?}");
    let pad = tampered(|s, bytes| {
        if s == Section::RowLengths {
            bytes[6 * 64 + 63] = 1
        }
    });
    assert!(matches!(pad, Err(CodecError::Row { tile: 6, row: 63, .. })), "{pad:?}");
    let longer = tampered(|s, bytes| {
        if s == Section::EncodedExp {
            bytes.extend([0; 16])
        }
    });
    assert!(matches!(longer, Err(CodecError::SectionBytes { section: "encoded_exp", .. })), "{longer:?}");
    let twice = tampered(|s, bytes| {
        if s == Section::Palette {
            bytes[1] = bytes[0]
        }
    });
    assert!(matches!(twice, Err(CodecError::Code { section: "palette", .. })), "{twice:?}");
    let kraft = tampered(|s, bytes| {
        if s == Section::CodeLengths {
            bytes[0] += 1
        }
    });
    assert!(matches!(kraft, Err(CodecError::Code { section: "code_lengths", .. })), "{kraft:?}");
}

#[test]
fn damaged_codes_are_noticed_or_decode_to_other_weights_but_never_panic() {
    let bytes = weights(Weights::Normal, 130, 192, 7);
    let tensor = encode::huffman(Matrix::new(&bytes, 130, 192).unwrap(), CodeLimit::new(15).unwrap()).unwrap();
    let words = tensor.encoded_exp().len();
    let mut noticed = 0;
    for at in (0..words).step_by(7) {
        let damaged = HuffmanTensor::from_sections(tensor.grid(), |s| {
            let mut section = tensor.section(s).unwrap().into_owned();
            if s == Section::EncodedExp {
                section[at] ^= 0x10;
            }
            section
        })
        .unwrap();
        let (fast, slow) = (decode::to_vec(&damaged), oracle::decode_huffman(&damaged));
        match &fast {
            Err(_) => noticed += 1,
            Ok(decoded) => {
                assert!(*decoded != bytes || at + 4 >= words || slow.is_err(), "a flipped code bit changes something")
            }
        }
        // The oracle also looks at single rows and at the bits between tiles.
        assert!(fast.is_ok() || slow.is_err(), "the fast decoder may not be the stricter one");
        let _ = decode::transcode(&damaged);
    }
    assert!(noticed > 0);
}

#[test]
fn wrong_buffers_are_refused() {
    assert!(matches!(Matrix::new(&[0; 8], 2, 3), Err(CodecError::MatrixBytes { expected: 12, got: 8, .. })));
    assert!(matches!(Matrix::new(&[], 0, 3), Err(CodecError::MatrixShape { .. })));
    let bytes = weights(Weights::Normal, 4, 4, 8);
    let tensor = encode::huffman(Matrix::new(&bytes, 4, 4).unwrap(), CodeLimit::DEFAULT).unwrap();
    assert!(matches!(
        decode::huffman(&tensor, &mut [0; 31]),
        Err(CodecError::MatrixBytes { expected: 32, got: 31, .. })
    ));
    assert!(matches!(CodeLimit::new(5), Err(CodecError::CodeLimit { got: 5 })));
    assert!(Grid::new(usize::MAX, 2).is_err());
}
