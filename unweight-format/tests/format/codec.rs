//! The fast codec against the oracle: the encoders produce the same bytes, the decoders the same weights.

use std::ops::Range;

use proptest::prelude::*;
use unweight_format::{
    CodeLimit, CodecError, EncodingId, Float, Histogram, Matrix, StoredTensor, Survey, TileGrid,
    raw::{
        CompactTensor, HuffmanTensor, PackedTensor, PaletteTensor, Section, TileMetadata,
        compact::{self, ClassWindow, Uncompact},
        huffman, oracle,
        packed::{self, Unpackable, Window},
        palette,
    },
    testing::{Random, Weights},
};

fn check(bytes: &[u8], rows: usize, cols: usize, limit: CodeLimit) {
    let matrix = Matrix::new(bytes, rows, cols).unwrap();
    let fast = huffman::encode(matrix, limit).unwrap();
    let slow = oracle::encode_huffman(matrix, limit).unwrap();
    for &section in EncodingId::HUFFMAN.encoding().sections() {
        assert!(fast.section(section) == slow.section(section), "encoders differ in {section:?}: {fast:?} {slow:?}");
    }
    assert_eq!(fast, slow, "encoders differ");
    let stored =
        HuffmanTensor::from_sections(fast.grid(), |s| fast.section(s).expect("a Huffman section").into_owned())
            .unwrap();
    assert_eq!(stored, fast, "stored sections read back");
    assert!(oracle::decode_huffman(&fast).unwrap() == bytes, "oracle decoder");
    assert!(huffman::decode(&fast).unwrap() == bytes, "fast decoder");

    let fast_palette = palette::encode(matrix, limit).unwrap();
    assert_eq!(fast_palette, oracle::encode_palette(matrix, limit).unwrap(), "palette encoders differ");
    assert_eq!(huffman::transcode(&fast).unwrap(), fast_palette, "transcoding gives the same bytes");
    assert!(oracle::decode_palette(&fast_palette) == bytes);
    let mut out = vec![0xaa; bytes.len()];
    palette::decode_into(&fast_palette, &mut out).unwrap();
    assert!(out == bytes);
    let stored = PaletteTensor::from_sections(fast.grid(), |s| fast_palette.section(s).unwrap().into_owned()).unwrap();
    assert_eq!(stored, fast_palette);
}

fn kind() -> impl Strategy<Value = Weights> {
    prop::sample::select(Weights::ALL.to_vec())
}

/// Normal weights with one element in `one_in` replaced.
fn sprinkled(rows: usize, cols: usize, one_in: u64, seed: u64, other: impl Fn(u64) -> u16) -> Vec<u8> {
    let mut rng = Random::new(seed);
    let mut bytes = Weights::TRAINED.bytes(rows * cols, seed ^ 1);
    for element in bytes.chunks_exact_mut(2) {
        if rng.bits().is_multiple_of(one_in) {
            element.copy_from_slice(&other(rng.bits()).to_le_bytes());
        }
    }
    bytes
}

/// Fast and slow packer agree in the tensor or the reason, and every decoder restores the weights.
fn check_packed(bytes: &[u8], rows: usize, cols: usize) -> Result<PackedTensor<Vec<u8>>, Unpackable> {
    let matrix = Matrix::new(bytes, rows, cols).unwrap();
    let fast = packed::pack(matrix, &Histogram::of(bytes));
    assert_eq!(fast, oracle::pack(matrix), "packers differ");
    if let Ok(tensor) = &fast {
        assert!(oracle::unpack(tensor) == bytes, "oracle");
        assert!(tensor.unpack() == bytes, "fast");
        let mut out = vec![0xaa; bytes.len()];
        packed::decode_into(tensor, &mut out).unwrap();
        assert!(out == bytes);
        let all = EncodingId::PACKED.encoding().sections();
        let sections = |s| tensor.section(s).unwrap().into_owned();
        let stored = PackedTensor::from_sections(tensor.grid(), sections).unwrap();
        assert_eq!(&stored, tensor);
        assert_eq!(stored.stored_bytes(), all.iter().map(|&s| sections(s).len() as u64).sum::<u64>());
        assert!(all.iter().all(|&s| sections(s).len().is_multiple_of(16)), "aligned in a shard");
    }
    fast
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_fast_packer_equals_the_oracle(
        kind in kind(), tile_rows in 1usize..=3, tile_cols in 1usize..=3, one_in in 60u64..2000,
        mask in prop_oneof![Just(0xffffu16), Just(0xbfff), Just(0x807f)], seed: u64,
    ) {
        let (rows, cols) = (64 * tile_rows, 64 * tile_cols);
        _ = check_packed(&kind.bytes(rows * cols, seed), rows, cols);
        // Any bits (the largest have no operand), bits below 2, zeros and subnormals.
        _ = check_packed(&sprinkled(rows, cols, one_in, seed, |bits| bits as u16 & mask), rows, cols);
    }
}

/// Rows and columns of a row-major BF16 matrix.
fn part_of(bytes: &[u8], columns: usize, rows: Range<usize>, cols: Range<usize>) -> Vec<u8> {
    rows.flat_map(|row| bytes[2 * (row * columns + cols.start)..2 * (row * columns + cols.end)].to_vec()).collect()
}

/// A slice contains that part of the weights, and its sections pass all checks of stored ones.
fn check_slice(tensor: &PackedTensor<Vec<u8>>, bytes: &[u8], rows: Range<usize>, cols: Range<usize>) -> u64 {
    let expected = part_of(bytes, tensor.grid().cols(), rows.clone(), cols.clone());
    let part = tensor.slice(rows.clone(), cols.clone()).unwrap();
    assert_eq!((part.grid().rows(), part.grid().cols()), (rows.len(), cols.len()));
    assert!(part.unpack() == expected && oracle::unpack(&part) == expected, "{rows:?} {cols:?}");
    assert_eq!(part.window(), tensor.window());
    // The padded sections can be read back. Window and weights determine every byte, so they equal the oracle's if it
    // chooses this window.
    let sections = |section| part.section(section).unwrap().into_owned();
    let stored = PackedTensor::from_sections(part.grid(), sections).unwrap();
    assert_eq!(stored, part);
    let matrix = Matrix::new(&expected, rows.len(), cols.len()).unwrap();
    if let Ok(packed) = oracle::pack(matrix)
        && packed.window() == part.window()
    {
        assert_eq!(packed, part);
    }
    part.escape_count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn slicing_a_packed_tensor_slices_the_weights(
        tile_rows in 1usize..=4, tile_cols in 1usize..=4, one_in in 300u64..3000, at_borders: bool,
        mask in prop_oneof![Just(0xbfffu16), Just(0x807f), Just(0)], pick in any::<[usize; 6]>(), seed: u64,
    ) {
        let (rows, cols) = (64 * tile_rows, 64 * tile_cols);
        let mut bytes = sprinkled(rows, cols, one_in, seed, |bits| bits as u16 & mask);
        if at_borders {
            // Escapes in the corners of every tile, and lists across its last rows.
            bytes = Weights::TRAINED.bytes(rows * cols, seed);
            for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                if matches!((row % 64, col % 64), (0 | 63, 0 | 63) | (50, 63)) {
                    bytes[2 * (row * cols + col)..][..2].copy_from_slice(&(seed as u16 & mask).to_le_bytes());
                }
            }
        }
        // By chance there may be more escapes than the limit.
        let Ok(tensor) = packed::pack(Matrix::new(&bytes, rows, cols).unwrap(), &Histogram::of(&bytes)) else {
            return Ok(());
        };
        prop_assert!(tensor.slice(0..rows, 0..cols).unwrap() == tensor);
        let range = |start: usize, len: usize, tiles: usize| {
            let start = start % tiles;
            64 * start..64 * (start + 1 + len % (tiles - start))
        };
        let (r, c) = (range(pick[0], pick[1], tile_rows), range(pick[2], pick[3], tile_cols));
        check_slice(&tensor, &bytes, r.clone(), c.clone());
        // A slice of a slice.
        let part = tensor.slice(r.clone(), c.clone()).unwrap();
        let (inner_r, inner_c) = (range(pick[4], 0, r.len() / 64), range(pick[5], 0, c.len() / 64));
        let whole = |outer: &Range<usize>, inner: &Range<usize>| outer.start + inner.start..outer.start + inner.end;
        prop_assert!(
            part.slice(inner_r.clone(), inner_c.clone()).unwrap()
                == tensor.slice(whole(&r, &inner_r), whole(&c, &inner_c)).unwrap()
        );
        // The ranks of a split along either axis share all escapes.
        let along_n: u64 = (0..tile_rows).map(|t| check_slice(&tensor, &bytes, 64 * t..64 * (t + 1), 0..cols)).sum();
        let along_k: u64 = (0..tile_cols).map(|t| check_slice(&tensor, &bytes, 0..rows, 64 * t..64 * (t + 1))).sum();
        prop_assert_eq!((along_n, along_k), (tensor.escape_count(), tensor.escape_count()));
    }
}

#[test]
fn unaligned_slices_are_rejected() {
    let bytes = sprinkled(128, 192, 300, 5, |_| 0);
    let tensor = packed::pack(Matrix::new(&bytes, 128, 192).unwrap(), &Histogram::of(&bytes)).unwrap();
    assert!(tensor.escape_count() > 0);
    let backwards = Range { start: 64, end: 0 };
    for range in [0..0, 64..64, 192..192, 0..63, 1..64, 32..96, 0..256, 256..320, 0..usize::MAX - 63, backwards] {
        let rows = tensor.slice(range.clone(), 0..192).unwrap_err();
        let (start, end) = (range.start, range.end);
        assert_eq!(rows, CodecError::Slice { axis: "rows", start, end, of: 128 });
        let columns = tensor.slice(0..128, range).unwrap_err();
        assert_eq!(columns, CodecError::Slice { axis: "columns", start, end, of: 192 });
    }
    let error = tensor.slice(0..128, 0..65).unwrap_err().to_string();
    assert!(error.starts_with("cannot slice columns 0..65 of 192:") && error.contains("unpack"), "{error}");
}

#[test]
fn special_values_are_packed_exactly() {
    const SPECIAL: [u16; 13] =
        [0, 0x8000, 1, 0x8001, 0x007f, 0x7f80, 0xff80, 0x7f81, 0x7fc1, 0xffff, 0x0080, 0x7f7f, 0x4000];
    type RandomBits = fn(u64) -> u16;
    let cases: [(&str, RandomBits); 4] = [
        ("exact zeros", |_| 0),
        ("subnormals", |bits| bits as u16 & 0x807f),
        ("inf and nan", |bits| 0x7f80 | bits as u16 & 0x807f),
        ("all of them", |bits| SPECIAL[bits as usize % SPECIAL.len()]),
    ];
    for (name, other) in cases {
        // 0x7f7f has no operand after scaling; windows of such weights have bases of at most 112.
        let bytes = sprinkled(128, 192, 400, 5, other);
        match check_packed(&bytes, 128, 192) {
            Ok(tensor) => assert!(tensor.escape_count() > 20 && tensor.max_escapes() > 1, "{name}"),
            Err(why) => assert!(name == "all of them" && matches!(why, Unpackable::Operand { .. }), "{name}: {why}"),
        }
    }
    // All bit patterns together have too many escapes for any window.
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    assert!(matches!(check_packed(&all, 256, 256), Err(Unpackable::Escapes { elements: 65536, .. })));
}

#[test]
fn escape_limit_is_one_in_256() {
    let with_zeros = |zeros: usize| {
        let mut bytes = Weights::OneExponent.bytes(64 * 64, 8);
        bytes.chunks_exact_mut(2).step_by(97).take(zeros).for_each(|element| element.fill(0));
        check_packed(&bytes, 64, 64)
    };
    assert_eq!(with_zeros(16).unwrap().escape_count(), 16);
    let why = with_zeros(17).unwrap_err();
    assert_eq!(why, Unpackable::Escapes { outside: 17, elements: 4096 });
    let text = "0.42 % of the elements lie outside the best window of 16 exponents, the limit is 0.39 %";
    assert_eq!(why.to_string(), text);
}

#[test]
fn first_element_without_exact_operand_is_named() {
    // Weights around 2^10: subnormals have no operand. The first in row-major order is not the first in tile order.
    let mut bytes: Vec<u8> = (0..192 * 192).flat_map(|_| 0x4480u16.to_le_bytes()).collect();
    for (row, col) in [(70, 3), (40, 190)] {
        bytes[(row * 192 + col) * 2..][..2].copy_from_slice(&[1, 0]);
    }
    assert_eq!(check_packed(&bytes, 192, 192), Err(Unpackable::Operand { row: 40, col: 190 }));
}

#[test]
fn packing_does_not_depend_on_the_number_of_threads() {
    let (rows, cols) = (1024, 1088);
    let bytes = sprinkled(rows, cols, 300, 6, |bits| bits as u16 & 0xbfff);
    let bytes_of = |bytes: &[u8]| packed::pack(Matrix::new(bytes, rows, cols).unwrap(), &Histogram::of(bytes)).unwrap();
    let pack = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| bytes_of(&bytes))
    };
    let one = pack(1);
    assert_eq!(one, pack(2));
    assert_eq!(one, pack(7));
    assert!(one.unpack() == bytes, "several bands");
}

/// The sections of a packed tensor with one of them changed.
fn tampered_packed(change: impl Fn(Section, &mut Vec<u8>)) -> Result<PackedTensor<Vec<u8>>, CodecError> {
    let bytes = sprinkled(128, 128, 300, 9, |_| 0);
    let tensor = packed::pack(Matrix::new(&bytes, 128, 128).unwrap(), &Histogram::of(&bytes)).unwrap();
    PackedTensor::from_sections(tensor.grid(), |s| {
        let mut section = tensor.section(s).unwrap().into_owned();
        change(s, &mut section);
        section
    })
}

#[test]
fn each_broken_rule_of_the_packed_encoding_has_its_error() {
    assert!(tampered_packed(|_, _| {}).is_ok());
    for &section in EncodingId::PACKED.encoding().sections() {
        for change in [|bytes: &mut Vec<u8>| bytes.push(0), |bytes: &mut Vec<u8>| bytes.clear()] {
            let wrong = tampered_packed(|s, bytes| {
                if s == section {
                    change(bytes)
                }
            });
            let is_right = match section {
                // Without lists, the first head that refers to one is wrong.
                Section::ESCAPES => matches!(wrong, Err(CodecError::SectionBytes { .. } | CodecError::Row { .. })),
                _ => matches!(wrong, Err(CodecError::SectionBytes { .. })),
            };
            assert!(is_right, "{section:?}: {wrong:?}");
        }
    }
    type Change = fn(Section, &mut Vec<u8>);
    let cases: [(&str, Change); 8] = [
        ("from 1 to 239", |s, b| {
            if s == Section::PACKED_WINDOW {
                b[0] = 0
            }
        }),
        ("from 1 to 239", |s, b| {
            if s == Section::PACKED_WINDOW {
                b[0] = 240
            }
        }),
        ("must be 0", |s, b| {
            if s == Section::PACKED_WINDOW {
                b[15] = 1
            }
        }),
        ("do not follow the previous", |s, b| {
            if s == Section::ESCAPE_HEADS {
                let list = b.chunks_exact(4).position(|head| head[3] & 0x80 != 0).unwrap();
                b[4 * list] ^= 1
            }
        }),
        ("not 0, one record", |s, b| {
            if s == Section::ESCAPE_HEADS {
                b[0..4].copy_from_slice(&[1, 0, 0, 0])
            }
        }),
        ("wrong length", |s, b| {
            if s == Section::ESCAPES {
                b[0..4].fill(0xff)
            }
        }),
        ("not in order", |s, b| {
            if s == Section::ESCAPES {
                b.copy_within(4..8, 8)
            }
        }),
        ("section escapes", |s, b| {
            if s == Section::ESCAPES {
                b.extend([0; 16])
            }
        }),
    ];
    for (message, change) in cases {
        let error = tampered_packed(change).unwrap_err().to_string();
        assert!(error.contains(message), "{message}: {error}");
    }
    // An operand without a weight: scaled back, it would exceed the largest bf16.
    let bytes: Vec<u8> = (0..4096).flat_map(|_| 0x7e80u16.to_le_bytes()).collect();
    let tensor = packed::pack(Matrix::new(&bytes, 64, 64).unwrap(), &Histogram::of(&bytes)).unwrap();
    assert!(tensor.window().base() > 112);
    let mut heads = tensor.escape_heads().to_vec();
    heads[..4].copy_from_slice(&(1u32 << 30 | 0x7f00).to_le_bytes());
    let hostile = PackedTensor::from_parts(tensor.grid(), tensor.window(), tensor.packed().to_vec(), heads, Vec::new());
    assert!(hostile.unwrap_err().to_string().contains("operand has no weight"));
    let odd = TileGrid::new(64, 65).unwrap();
    let result = PackedTensor::from_parts(odd, Window::new(100).unwrap(), vec![0; 12288], vec![0; 32], Vec::new());
    assert!(matches!(result, Err(CodecError::PackedShape { rows: 64, cols: 65 })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn fast_equals_oracle(kind in kind(), rows in 1usize..=200, cols in 1usize..=200, limit in 6u32..=15, seed: u64) {
        check(&kind.bytes(rows * cols, seed), rows, cols, CodeLimit::new(limit).unwrap());
    }
}

#[test]
fn every_bit_pattern_round_trips() {
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
fn every_edge_remainder_round_trips() {
    for edge in [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129] {
        check(&Weights::TRAINED.bytes(edge * 70, 1), edge, 70, CodeLimit::DEFAULT);
        check(&Weights::HeavyTails.bytes(70 * edge, 2), 70, edge, CodeLimit::DEFAULT);
    }
}

/// `docs/format.md` A.10.
#[test]
fn worked_example_of_the_format_document() {
    let weights = [0x3f80u16, 0xbfc0, 0x3f00, 0x3e80, 0x3f80, 0x3f40];
    let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    check(&bytes, 2, 3, CodeLimit::DEFAULT);
    let matrix = Matrix::new(&bytes, 2, 3).unwrap();
    let tensor = huffman::encode(matrix, CodeLimit::DEFAULT).unwrap();
    let padded = |start: &[u8], len: usize| [start, &vec![0; len - start.len()]].concat();
    let expected = |section| match section {
        Section::PALETTE => padded(&[0x7f, 0x7e, 0x7d], 16),
        Section::CODE_LENGTHS => padded(&[1, 2, 2], 16),
        Section::TILE_METADATA => padded(&[], 16),
        Section::ROW_LENGTHS => padded(&[1, 2], 64),
        Section::ENCODED_EXP => padded(&[4, 0, 0, 0, 0, 0, 0, 0, 0x16], 32),
        Section::SIGN_MANTISSA => vec![0, 0xc0, 0, 0, 0, 0x40],
        _ => vec![],
    };
    for &section in EncodingId::HUFFMAN.encoding().sections() {
        assert_eq!(tensor.section(section).unwrap().as_ref(), expected(section), "{section:?}");
    }
    assert_eq!(tensor.row_end_offsets(0)[..3], [65, 131, 131]);
    let palette = palette::encode(matrix, CodeLimit::DEFAULT).unwrap();
    assert_eq!(palette.palette_index()[..2], [0, 1]);
    assert_eq!(palette.palette_index()[32..34], [2, 1]);
    assert_eq!(palette.palette_index().iter().filter(|&&byte| byte != 0).count(), 3);
}

#[test]
fn rows_longer_than_319_bits_are_verbatim() {
    let bytes = Weights::LongRows { cols: 128 }.bytes(128 * 128, 3);
    check(&bytes, 128, 128, CodeLimit::new(15).unwrap());
    let tensor = huffman::encode(Matrix::new(&bytes, 128, 128).unwrap(), CodeLimit::new(15).unwrap()).unwrap();
    assert_eq!(tensor.metadata(0).bitmask(), 1 << 5, "its exponents are all in the palette, it is long");
    assert_eq!(tensor.max_verbatim_rows(), 1);
}

#[test]
fn the_bytes_do_not_depend_on_the_number_of_threads() {
    let bytes = Weights::TRAINED.bytes(640 * 1030, 4);
    let encode = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| huffman::encode(Matrix::new(&bytes, 640, 1030).unwrap(), CodeLimit::DEFAULT).unwrap())
    };
    let one = encode(1);
    assert_eq!(one, encode(2));
    assert_eq!(one, encode(7));
}

#[test]
fn a_survey_counts_and_digests() {
    let bytes = Weights::TRAINED.bytes(1500 * 1100, 5);
    let survey = Survey::of(Float::Bf16, &bytes);
    assert_eq!(survey.digest, unweight_format::Digest::of(&bytes));
    assert_eq!(survey.histogram, Histogram::of(&bytes));
}

/// The sections of a valid tensor with one of them changed.
fn tampered(change: impl Fn(Section, &mut Vec<u8>)) -> Result<HuffmanTensor<Vec<u8>>, CodecError> {
    let bytes = Weights::HeavyTails.bytes(130 * 192, 6);
    let tensor = huffman::encode(Matrix::new(&bytes, 130, 192).unwrap(), CodeLimit::DEFAULT).unwrap();
    HuffmanTensor::from_sections(tensor.grid(), |s| {
        let mut section = tensor.section(s).unwrap().into_owned();
        change(s, &mut section);
        section
    })
}

#[test]
fn each_broken_invariant_has_its_own_error() {
    assert!(tampered(|_, _| {}).is_ok());
    for &section in EncodingId::HUFFMAN.encoding().sections() {
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
        if s == Section::TILE_METADATA {
            bytes[TileMetadata::BYTES] ^= 1
        }
    });
    assert!(matches!(start, Err(CodecError::TileMetadata { tile: 1, field: "start_word", .. })), "{start:?}");
    let offset = tampered(|s, bytes| {
        if s == Section::TILE_METADATA {
            bytes[TileMetadata::BYTES + 4] ^= 1
        }
    });
    assert!(
        matches!(offset, Err(CodecError::TileMetadata { tile: 1, field: "verbatim_row_offset", .. })),
        "{offset:?}"
    );
    // Tiles 6..9 have two matrix rows, so row 5 is a pad row.
    let pad = tampered(|s, bytes| {
        if s == Section::TILE_METADATA {
            bytes[6 * TileMetadata::BYTES + 8] |= 1 << 5
        }
    });
    assert!(matches!(pad, Err(CodecError::Row { tile: 6, row: 5, .. })), "{pad:?}");
    let pad = tampered(|s, bytes| {
        if s == Section::ROW_LENGTHS {
            bytes[6 * 64 + 63] = 1
        }
    });
    assert!(matches!(pad, Err(CodecError::Row { tile: 6, row: 63, .. })), "{pad:?}");
    let longer = tampered(|s, bytes| {
        if s == Section::ENCODED_EXP {
            bytes.extend([0; 16])
        }
    });
    assert!(matches!(longer, Err(CodecError::SectionBytes { section: "encoded_exp", .. })), "{longer:?}");
    let twice = tampered(|s, bytes| {
        if s == Section::PALETTE {
            bytes[1] = bytes[0]
        }
    });
    assert!(matches!(twice, Err(CodecError::Code { section: "palette", .. })), "{twice:?}");
    let kraft = tampered(|s, bytes| {
        if s == Section::CODE_LENGTHS {
            bytes[0] += 1
        }
    });
    assert!(matches!(kraft, Err(CodecError::Code { section: "code_lengths", .. })), "{kraft:?}");
}

#[test]
fn damaged_codes_never_panic() {
    let bytes = Weights::TRAINED.bytes(130 * 192, 7);
    let tensor = huffman::encode(Matrix::new(&bytes, 130, 192).unwrap(), CodeLimit::new(15).unwrap()).unwrap();
    let words = tensor.encoded_exp().len();
    let mut errors = 0;
    for at in (0..words).step_by(7) {
        let damaged = HuffmanTensor::from_sections(tensor.grid(), |s| {
            let mut section = tensor.section(s).unwrap().into_owned();
            if s == Section::ENCODED_EXP {
                section[at] ^= 0x10;
            }
            section
        })
        .unwrap();
        let (fast, slow) = (huffman::decode(&damaged), oracle::decode_huffman(&damaged));
        match &fast {
            Err(_) => errors += 1,
            Ok(decoded) => {
                assert!(*decoded != bytes || at + 4 >= words || slow.is_err(), "a flipped code bit changes something")
            }
        }
        // The oracle also checks single rows and the bits between tiles.
        assert!(fast.is_ok() || slow.is_err(), "the fast decoder may not be the stricter one");
        let _ = huffman::transcode(&damaged);
    }
    assert!(errors > 0);
}

#[test]
fn wrong_buffers_are_refused() {
    assert!(matches!(Matrix::new(&[0; 8], 2, 3), Err(CodecError::MatrixBytes { expected: 12, got: 8, .. })));
    assert!(matches!(Matrix::new(&[], 0, 3), Err(CodecError::MatrixShape { .. })));
    let bytes = Weights::TRAINED.bytes(4 * 4, 8);
    let tensor = huffman::encode(Matrix::new(&bytes, 4, 4).unwrap(), CodeLimit::DEFAULT).unwrap();
    assert!(matches!(
        huffman::decode_into(&tensor, &mut [0; 31]),
        Err(CodecError::MatrixBytes { expected: 32, got: 31, .. })
    ));
    assert!(matches!(CodeLimit::new(5), Err(CodecError::CodeLimit { got: 5 })));
    assert!(TileGrid::new(usize::MAX, 2).is_err());
}

/// Encodes to the compact encoding, and checks that both decoders restore the weights, also from stored sections.
/// Returns the reason of a refusal.
fn check_compact(bytes: &[u8], rows: usize, cols: usize) -> Result<CompactTensor<Vec<u8>>, Uncompact> {
    let matrix = Matrix::new(bytes, rows, cols).unwrap();
    let tensor = compact::encode(matrix, &Histogram::of(bytes))?;
    assert!(oracle::decode_compact(&tensor).unwrap() == bytes, "oracle");
    assert!(tensor.decode().unwrap() == bytes, "fast");
    let all = EncodingId::COMPACT.encoding().sections();
    let sections = |s| tensor.section(s).unwrap().into_owned();
    let stored = CompactTensor::from_sections(tensor.grid(), sections).unwrap();
    assert!(stored == tensor, "stored sections read back");
    assert_eq!(tensor.stored_bytes(), all.iter().map(|&s| sections(s).len() as u64).sum::<u64>());
    assert!(all.iter().all(|&s| sections(s).len().is_multiple_of(16)), "aligned in a shard");
    check_operands(&tensor, matrix);
    Ok(tensor)
}

/// By the definition of the fragment, operands times the scale are the weights.
fn check_operands(tensor: &CompactTensor<Vec<u8>>, matrix: Matrix<'_>) {
    let grid = tensor.grid();
    for tile in 0..grid.tiles() {
        for (i, registers) in tensor.operands(tile).unwrap().into_iter().enumerate() {
            let (block, step, group, thread) = (i / 128, i / 32 % 4, i % 32 / 4, i % 4);
            for (register, half) in (0..4).flat_map(|register| [(register, 0), (register, 1)]) {
                let row = tile / grid.tile_cols() * 64 + 16 * block + group + 8 * (register % 2);
                let col = tile % grid.tile_cols() * 64 + 16 * step + 2 * thread + 8 * (register / 2) + half;
                let operand = half::bf16::from_bits((registers[register] >> (16 * half)) as u16);
                let weight = half::bf16::from_bits(matrix.get(row, col));
                let product = operand.to_f64() * f64::from(tensor.window().scale());
                assert!(product == weight.to_f64() || operand.is_nan() && weight.is_nan(), "{row}, {col}");
                assert_eq!(product.is_sign_negative(), weight.is_sign_negative());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn compact_round_trips(
        kind in kind(), tile_rows in 1usize..=3, tile_cols in 1usize..=3, one_in in 260u64..4000,
        mask in prop_oneof![Just(0xffffu16), Just(0xbfff), Just(0x807f)], seed: u64,
    ) {
        let (rows, cols) = (64 * tile_rows, 64 * tile_cols);
        _ = check_compact(&kind.bytes(rows * cols, seed), rows, cols);
        _ = check_compact(&sprinkled(rows, cols, one_in, seed, |bits| bits as u16 & mask), rows, cols);
    }

    /// Exponents with any frequencies, including very rare ones: long codes, quads without a code, escapes inside and
    /// outside the window.
    #[test]
    fn compact_round_trips_with_any_exponents(
        base in 1u8..=223, halvings in 1u32..=12, one_in in 300u64..3000, tiles in 1usize..=6, seed: u64,
    ) {
        let mut random = Random::new(seed);
        let bytes: Vec<u8> = (0..4096 * tiles).flat_map(|_| {
            let bits = random.bits();
            let deep = (bits >> 20).trailing_zeros().min(43) * halvings / 4;
            let inside = u64::from(base) + u64::from(deep.min(31));
            let exponent = if bits.is_multiple_of(one_in) { bits >> 50 & 255 } else { inside };
            (bits as u16 & 0x807f | (exponent as u16) << 7).to_le_bytes()
        }).collect();
        _ = check_compact(&bytes, 64, 64 * tiles);
    }
}

#[test]
fn trained_weights_take_less_than_10_85_bits() {
    let bytes = Weights::TRAINED.bytes(1024 * 1024, 3);
    let tensor = check_compact(&bytes, 1024, 1024).unwrap();
    let bits = tensor.stored_bytes() as f64 * 8.0 / (1024.0 * 1024.0);
    assert!(bits <= 10.85 && bits > 10.6, "{bits}");
    // On average a kernel patches less than one element per tile.
    assert!(tensor.escape_count() < tensor.grid().tiles() as u64, "{}", tensor.escape_count());
    let stream_bytes = (0..tensor.grid().tiles()).map(|tile| tensor.stream(tile).len()).max().unwrap();
    assert!(stream_bytes < 640, "{stream_bytes}");
}

#[test]
fn compact_round_trips_every_bit_pattern() {
    let special = [0x0000, 0x8000, 1, 0x8001, 0x007f, 0x7f80, 0xff80, 0x7f81, 0x7fc1, 0xffff, 0x0080, 0x0180];
    let bytes = sprinkled(256, 192, 400, 5, |bits| special[bits as usize % special.len()]);
    let tensor = check_compact(&bytes, 256, 192).unwrap();
    assert!(tensor.escape_count() > 80, "{}", tensor.escape_count());
    // Each of the 65,536 patterns once, among enough other weights that so many escapes are allowed.
    let every = |i: usize| i.is_multiple_of(300).then_some((i / 300) as u16);
    let mut bytes = Weights::TRAINED.bytes(4800 * 4096, 6);
    let mut with_operand = 0usize;
    for (i, element) in bytes.chunks_exact_mut(2).enumerate() {
        // The largest have no operand if the base is below 96, the smallest subnormals if it is above.
        if let Some(bits) = every(i).filter(|bits| bits >> 7 & 255 <= 220 || bits >> 7 & 255 == 255) {
            element.copy_from_slice(&bits.to_le_bytes());
            with_operand += 1;
        }
    }
    assert!(with_operand > 56_000);
    let matrix = Matrix::new(&bytes, 4800, 4096).unwrap();
    let tensor = compact::encode(matrix, &Histogram::of(&bytes)).unwrap();
    assert!(tensor.decode().unwrap() == bytes && oracle::decode_compact(&tensor).unwrap() == bytes);
}

#[test]
fn uncompactable_matrices_name_the_reason() {
    let encode = |bytes: &[u8], rows, cols| {
        compact::encode(Matrix::new(bytes, rows, cols).unwrap(), &Histogram::of(bytes)).unwrap_err()
    };
    assert_eq!(encode(&Weights::TRAINED.bytes(64 * 65, 1), 64, 65), Uncompact::Shape);
    let noise = Weights::Noise.bytes(64 * 64, 1);
    assert!(matches!(encode(&noise, 64, 64), Uncompact::Escapes { elements: 4096, .. }));
    // Weights around 2^10: subnormals have no operand. The first in row-major order is not the first in tile order.
    let mut bytes: Vec<u8> = (0..192 * 192).flat_map(|_| 0x4480u16.to_le_bytes()).collect();
    for (row, col) in [(70, 3), (40, 190)] {
        bytes[(row * 192 + col) * 2..][..2].copy_from_slice(&[1, 0]);
    }
    assert_eq!(encode(&bytes, 192, 192), Uncompact::Operand { row: 40, col: 190 });
    // Two exponents of equal frequency: the Huffman encoding needs one bit per element, the dense part alone two.
    let two: Vec<u8> = (0..256 * 256u32)
        .flat_map(|i| ((120 + (i.wrapping_mul(0x9e37_79b9) >> 31) as u16) << 7).to_le_bytes())
        .collect();
    let matrix = Matrix::new(&two, 256, 256).unwrap();
    let encoding = EncodingId::COMPACT.encoding();
    let why = encoding.encode(matrix.into(), &Survey::of(Float::Bf16, &two), CodeLimit::DEFAULT).unwrap_err();
    assert!(matches!(why.reason(), Some(Uncompact::Larger { .. })), "{why}");
    assert_eq!(encoding.fallback(), EncodingId::HUFFMAN);
}

#[test]
fn compact_bytes_do_not_depend_on_the_number_of_threads() {
    let (rows, cols) = (1024, 1088);
    let bytes = sprinkled(rows, cols, 300, 6, |bits| bits as u16 & 0xbfff);
    let encode = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| compact::encode(Matrix::new(&bytes, rows, cols).unwrap(), &Histogram::of(&bytes)).unwrap())
    };
    let one = encode(1);
    assert!(one == encode(2) && one == encode(7));
    assert!(one.decode().unwrap() == bytes, "several bands");
    let lists = one.tiles().chunks_exact(8).filter(|tile| tile[7] & 0x80 != 0).count();
    assert!(lists > 256, "lists in several bands: {lists}");
}

#[test]
fn predicted_compact_size_is_close() {
    let bytes = Weights::TRAINED.bytes(512 * 512, 4);
    let (grid, encoding) = (TileGrid::new(512, 512).unwrap(), EncodingId::COMPACT.encoding());
    let sample = unweight_format::Sample::of(Float::Bf16, &[&bytes[..1 << 17]], CodeLimit::DEFAULT);
    let predicted = encoding.predict(grid, &sample).unwrap() as f64;
    let stored =
        compact::encode(Matrix::new(&bytes, 512, 512).unwrap(), &Histogram::of(&bytes)).unwrap().stored_bytes();
    assert!((predicted / stored as f64 - 1.0).abs() < 0.002, "{predicted} {stored}");
}

/// The sections of a compact tensor with one of them changed.
fn tampered_compact(change: impl Fn(Section, &mut Vec<u8>)) -> Result<(), CodecError> {
    let bytes = sprinkled(128, 128, 300, 9, |_| 0);
    let tensor = compact::encode(Matrix::new(&bytes, 128, 128).unwrap(), &Histogram::of(&bytes)).unwrap();
    let sections = EncodingId::COMPACT.encoding().sections().iter().map(|&s| {
        let mut section = tensor.section(s).unwrap().into_owned();
        change(s, &mut section);
        section
    });
    let tensor = StoredTensor::new(EncodingId::COMPACT, tensor.grid(), sections.collect())?;
    let mut out = vec![0; bytes.len()];
    let decoded = tensor.decode(&mut out);
    // The slow decoder refuses the same sections as the fast one.
    let slow = oracle::decode_compact(&CompactTensor::of(tensor.borrowed()).unwrap());
    assert_eq!(decoded.is_err(), slow.is_err());
    decoded
}

#[test]
fn each_broken_rule_of_the_compact_encoding_has_its_error() {
    assert!(tampered_compact(|_, _| {}).is_ok());
    for &section in EncodingId::COMPACT.encoding().sections() {
        for change in [|bytes: &mut Vec<u8>| bytes.push(0), |bytes: &mut Vec<u8>| bytes.clear()] {
            let wrong = tampered_compact(|s, bytes| {
                if s == section {
                    change(bytes)
                }
            });
            assert!(wrong.is_err(), "{section:?}");
        }
    }
    type Change = fn(&mut Vec<u8>);
    let cases: [(&str, Section, Change); 17] = [
        ("from 1 to 223", Section::CLASS_WINDOW, |b| b[0] = 0),
        ("from 1 to 223", Section::CLASS_WINDOW, |b| b[0] = 224),
        ("must be 0", Section::CLASS_WINDOW, |b| b[15] = 1),
        ("Kraft", Section::CLASS_BOOK, |b| b.drain(..16).for_each(drop)),
        ("ascend", Section::CLASS_BOOK, |b| b[..4].rotate_left(2)),
        ("start is", Section::CLASS_TILES, |b| b[8] ^= 1),
        ("start is", Section::CLASS_TILES, |b| b[0] ^= 1),
        ("is not the end", Section::CLASS_TILES, |b| b[32] ^= 1),
        ("is not the end", Section::CLASS_TILES, |b| b[44] ^= 1),
        ("do not follow the previous", Section::CLASS_TILES, |b| b[12] ^= 1),
        ("not 0, one record", Section::CLASS_TILES, |b| b[4..8].copy_from_slice(&[1, 0, 0, 0])),
        ("wrong length", Section::CLASS_ESCAPES, |b| b[0..4].fill(0xff)),
        ("not in order", Section::CLASS_ESCAPES, |b| b.copy_within(4..8, 8)),
        ("section class_escapes", Section::CLASS_ESCAPES, |b| b.extend([0; 16])),
        ("section class_streams", Section::CLASS_STREAMS, |b| b.extend([0; 16])),
        ("fewer or more bits", Section::CLASS_STREAMS, |b| b[0] = 161),
        ("sign and mantissa", Section::DENSE, |b| b.iter_mut().for_each(|byte| *byte = !*byte)),
    ];
    for (message, section, change) in cases {
        let error = tampered_compact(|s, b| {
            if s == section {
                change(b)
            }
        })
        .expect_err(message)
        .to_string();
        assert!(error.contains(message), "{message}: {error}");
    }
    // A flipped bit in a stream decodes to another quad, or a lane ends at the wrong bit; it never panics.
    let mut errors = 0;
    for at in 32..400 {
        let changed = tampered_compact(|s, b| {
            if s == Section::CLASS_STREAMS {
                b[at] ^= 0x10
            }
        });
        errors += usize::from(changed.is_err());
    }
    assert!(errors > 100, "{errors}");
    // The lengths of two lanes change in opposite directions, so the tile still ends at the right bit.
    let moved = (0..31).filter(|&lane| {
        let moved = tampered_compact(|s, b| {
            if s == Section::CLASS_STREAMS {
                b[lane] += 1;
                b[lane + 1] -= 1;
            }
        });
        moved.is_err_and(|error| error.to_string().contains("do not use its stored bits"))
    });
    assert!(moved.count() > 20);
    assert!(ClassWindow::new(0).is_err() && ClassWindow::new(224).is_err());
}

#[test]
fn compact_example_of_the_format_document() {
    let bytes: Vec<u8> = (0..4096).flat_map(|i| if i == 0 { [0x80, 0x3e] } else { [0x80, 0x3f] }).collect();
    let tensor = check_compact(&bytes, 64, 64).unwrap();
    let followed_by_zeros = |start: &[u8]| [start, &vec![0; 16 - start.len()]].concat();
    let section = |section| tensor.section(section).unwrap().into_owned();
    assert_eq!(section(Section::CLASS_WINDOW), followed_by_zeros(&[0x60]));
    assert_eq!(section(Section::CLASS_BOOK), followed_by_zeros(&[0xfe, 0x1f, 0xff, 0x1f]));
    assert_eq!(section(Section::CLASS_TILES), [0, 0, 0, 0, 0, 0, 0, 0, 0x28, 0, 0, 0, 0, 0, 0, 0]);
    assert!(section(Section::CLASS_ESCAPES).is_empty());
    assert_eq!(section(Section::CLASS_STREAMS), [vec![0x10; 32], vec![0xff; 128]].concat());
    let dense = section(Section::DENSE);
    let lane_word = |lane: usize, q: usize| {
        let at = 512 * (q / 4) + 16 * lane + 4 * (q % 4);
        u32::from_le_bytes(dense[at..at + 4].try_into().unwrap())
    };
    assert_eq!(lane_word(0, 0), 0x0180_0080);
    let words = [0x0180_0180, 0x6780_6780, 0x0180_0180, 0x6180_6180, 0x0180_0180];
    let others = (0..32).flat_map(|lane| (0..40).map(move |q| (lane, q))).skip(1);
    assert!(others.into_iter().all(|(lane, q)| lane_word(lane, q) == words[q % 5]));
}
