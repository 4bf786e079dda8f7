//! Types other than BF16: fast codec against the oracle, hostile sections, and whole models.

use std::fs;

use proptest::prelude::*;
use unweight_format::{
    CodeLimit, CodecError, EncodingId, Float, FloatMatrix, Matrix, StoredTensor,
    bundle::{Bundle, CompressOptions, DecompressOptions, Profile, Silent, compress, decompress, plan, verify},
    raw::{ExponentsTensor, Section, exponents, huffman, oracle},
    testing::{Random, float_weights},
};

use crate::common::{self, Scratch, chain, read_tree, safetensors_file, tensor};

const CODED: [Float; 4] = [Float::E4M3, Float::E5M2, Float::F16, Float::F32];

fn check(float: Float, bytes: &[u8], rows: usize, cols: usize, limit: CodeLimit) -> ExponentsTensor<Vec<u8>> {
    let matrix = FloatMatrix::new(float, bytes, rows, cols).unwrap();
    let fast = exponents::encode(matrix, limit).unwrap();
    let slow = oracle::encode_exponents(matrix, limit).unwrap();
    for &section in EncodingId::EXPONENTS.encoding().sections() {
        assert!(fast.section(section) == slow.section(section), "encoders differ in {section:?}: {fast:?} {slow:?}");
    }
    let stored = ExponentsTensor::from_sections(fast.grid(), |s| fast.section(s).unwrap().into_owned()).unwrap();
    assert!(stored == fast, "stored sections read back");
    assert!(oracle::decode_exponents(&fast).unwrap() == bytes, "oracle decoder");
    let mut out = vec![0xaa; bytes.len()];
    exponents::decode_into(&fast, &mut out).unwrap();
    assert!(out == bytes, "fast decoder");
    fast
}

/// Every bit pattern of up to 16 bits, starting at a random one; for F32, random patterns.
fn patterns(float: Float, elements: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let first = random.bits() as u32;
    let element = |i: usize, random: &mut Random| match float {
        Float::F32 => random.bits() as u32,
        _ => first.wrapping_add(i as u32),
    };
    (0..elements).flat_map(|i| element(i, &mut random).to_le_bytes()[..float.bytes()].to_vec()).collect()
}

#[test]
fn every_bit_pattern_of_every_dtype_round_trips() {
    for float in CODED {
        let bytes = patterns(float, 260 * 256, 1);
        for limit in [6, 7, 15] {
            check(float, &bytes, 260, 256, CodeLimit::new(limit).unwrap());
        }
    }
}

#[test]
fn edge_shapes() {
    let shapes = [(1, 1), (1, 7), (7, 1), (3, 5), (1, 64), (64, 1), (64, 64), (65, 66), (70, 130), (5, 1100), (200, 3)];
    for float in CODED {
        for (rows, cols) in shapes {
            check(float, &float_weights(float, rows * cols, 2), rows, cols, CodeLimit::DEFAULT);
            check(float, &patterns(float, rows * cols, 3), rows, cols, CodeLimit::DEFAULT);
            check(float, &vec![0; rows * cols * float.bytes()], rows, cols, CodeLimit::DEFAULT);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn fast_and_slow_agree(
        float in prop::sample::select(CODED.to_vec()),
        rows in 1usize..150,
        cols in 1usize..200,
        limit in 6u32..=15,
        one_in in 1u64..500,
        seed: u64,
    ) {
        let mut bytes = float_weights(float, rows * cols, seed);
        let mut random = Random::new(seed ^ 1);
        for element in bytes.chunks_exact_mut(float.bytes()) {
            if random.below(one_in) == 0 {
                element.copy_from_slice(&(random.bits() as u32).to_le_bytes()[..float.bytes()]);
            }
        }
        check(float, &bytes, rows, cols, CodeLimit::new(limit).unwrap());
    }
}

#[test]
fn the_bytes_do_not_depend_on_the_number_of_threads() {
    for float in CODED {
        let bytes = float_weights(float, 400 * 1030, 4);
        let encode = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let matrix = FloatMatrix::new(float, &bytes, 400, 1030).unwrap();
            pool.install(|| exponents::encode(matrix, CodeLimit::DEFAULT).unwrap())
        };
        assert!(encode(1) == encode(5));
    }
}

/// The exponents of another type have the same layout as those of BF16 weights with the same exponents.
#[test]
fn exponents_have_the_layout_of_huffman() {
    for float in CODED {
        let (rows, cols) = (70, 200);
        let bytes = float_weights(float, rows * cols, 5);
        let halves = bytes
            .chunks_exact(float.bytes())
            .flat_map(|element| (u16::from(float.exponent(float.read(element))) << 7).to_le_bytes());
        let halves: Vec<u8> = halves.collect();
        let huffman = huffman::encode(Matrix::new(&halves, rows, cols).unwrap(), CodeLimit::DEFAULT).unwrap();
        let matrix = FloatMatrix::new(float, &bytes, rows, cols).unwrap();
        let tensor = exponents::encode(matrix, CodeLimit::DEFAULT).unwrap();
        for &section in EncodingId::HUFFMAN.encoding().sections().iter().filter(|s| **s != Section::SIGN_MANTISSA) {
            assert!(tensor.section(section) == huffman.section(section), "{section:?}");
        }
    }
}

/// The example of `docs/format.md` A.12.
#[test]
fn worked_example() {
    // 1.0 -1.5 0.5 / 0.25 1.0 0.75 in E4M3.
    let bytes = [0x38, 0xbc, 0x30, 0x28, 0x38, 0x34];
    let tensor = check(Float::E4M3, &bytes, 2, 3, CodeLimit::DEFAULT);
    let padded = |bytes: &[u8], len: usize| [bytes, &vec![0; len - bytes.len()]].concat();
    for (section, expected) in [
        (Section::FLOAT_FORMAT, padded(&[4, 3], 16)),
        (Section::PALETTE, padded(&[7, 6, 5], 16)),
        (Section::CODE_LENGTHS, padded(&[1, 2, 2], 16)),
        (Section::ROW_LENGTHS, padded(&[1, 2], 64)),
        (Section::ENCODED_EXP, padded(&[4, 0, 0, 0, 0, 0, 0, 0, 0x16], 32)),
        (Section::FRACTION_BYTES, vec![]),
        (Section::FRACTION_BITS, padded(&[0xc0, 0x00, 0x40, 0], 16)),
    ] {
        assert_eq!(tensor.section(section).unwrap().as_ref(), expected, "{section:?}");
    }
    // -1.5 in F16: sign and fraction are 11000000000, whose lower 8 bits are 0.
    let tensor = check(Float::F16, &0xbe00u16.to_le_bytes(), 1, 1, CodeLimit::DEFAULT);
    assert_eq!(tensor.fraction_bytes(), padded(&[0], 16));
    assert_eq!(tensor.fraction_bits(), padded(&[6], 16));
}

#[test]
fn bf16_and_wrong_buffers_are_refused() {
    let bytes = common::weights(64 * 64, 6);
    let matrix = Matrix::new(&bytes, 64, 64).unwrap();
    let error = exponents::encode(matrix.into(), CodeLimit::DEFAULT).unwrap_err();
    assert_eq!(error, CodecError::Type { float: Float::Bf16 });
    assert!(FloatMatrix::new(Float::F16, &bytes, 64, 64).unwrap().bf16().is_err());
    assert!(matches!(
        FloatMatrix::new(Float::F32, &bytes, 64, 64),
        Err(CodecError::MatrixBytes { float: Float::F32, expected: 16384, got: 8192, .. })
    ));
    let half = float_weights(Float::F16, 64 * 64, 7);
    let tensor = exponents::encode(FloatMatrix::new(Float::F16, &half, 64, 64).unwrap(), CodeLimit::DEFAULT).unwrap();
    assert!(matches!(exponents::decode_into(&tensor, &mut [0; 8191]), Err(CodecError::MatrixBytes { .. })));
}

/// The sections of a valid tensor with one of them changed.
fn tampered(float: Float, change: impl Fn(Section, &mut Vec<u8>)) -> Result<ExponentsTensor<Vec<u8>>, CodecError> {
    // 130 * 193 elements are not a multiple of eight. Some rows are verbatim, except for E4M3, which has only 16
    // exponents.
    let mut bytes = float_weights(float, 130 * 193, 8);
    bytes[..640].fill(0);
    bytes[640..1280].copy_from_slice(&Random::new(9).bytes(640));
    let matrix = FloatMatrix::new(float, &bytes, 130, 193).unwrap();
    let tensor = exponents::encode(matrix, CodeLimit::DEFAULT).unwrap();
    ExponentsTensor::from_sections(tensor.grid(), |s| {
        let mut section = tensor.section(s).unwrap().into_owned();
        change(s, &mut section);
        section
    })
}

#[test]
fn each_broken_invariant_has_its_own_error() {
    for float in CODED {
        assert!(tampered(float, |_, _| {}).is_ok());
        let code = |section: Section, at: usize, value: u8| {
            let result = tampered(float, |s, bytes| {
                if s == section {
                    let at = if at == usize::MAX { bytes.len() - 1 } else { at };
                    bytes[at] = value;
                }
            });
            assert!(
                matches!(result, Err(CodecError::Code { section: named, .. }) if named == section.name()),
                "{float:?} {section:?}: {result:?}"
            );
        };
        for &section in EncodingId::EXPONENTS.encoding().sections() {
            for longer in [true, false] {
                let result = tampered(float, |s, bytes| {
                    if s == section && (longer || !bytes.is_empty()) {
                        bytes.resize(if longer { bytes.len() + 1 } else { bytes.len() - 1 }, 0);
                    }
                });
                let untouched = !longer && tampered(float, |_, _| {}).unwrap().section(section).unwrap().is_empty();
                let is_error = matches!(result, Err(CodecError::SectionBytes { .. }));
                assert!(is_error || untouched, "{float:?} {section:?}: {result:?}");
            }
        }
        code(Section::FLOAT_FORMAT, 0, 9);
        code(Section::FLOAT_FORMAT, 1, 7);
        code(Section::FLOAT_FORMAT, 15, 1);
        if float != Float::E4M3 && float != Float::E5M2 {
            code(Section::FRACTION_BYTES, usize::MAX, 1);
        }
        if float != Float::F32 {
            // The fill of the section, and the bits after the last of 25,090 elements, two of which are in its group.
            code(Section::FRACTION_BITS, usize::MAX, 1);
            let bits = (1 + float.fraction_bits() as usize) % 8;
            let last_group = 25_090 / 8 * bits;
            code(Section::FRACTION_BITS, last_group + bits - 1, 0x80);
            code(Section::PALETTE, 0, 1 << float.exponent_bits());
        }
        if float == Float::F16 {
            code(Section::VERBATIM_EXPONENTS, 3, 32);
        }
    }
}

/// For any bytes, the fast decoder terminates, stays within its buffers, and is not stricter than the oracle.
#[test]
fn damaged_sections_never_panic() {
    let (mut errors, mut decoded) = (0, 0);
    for float in CODED {
        let mut random = Random::new(10);
        for _ in 0..150 {
            let (at, bit) = (random.bits() as usize, random.below(8));
            let section = EncodingId::EXPONENTS.encoding().sections()[random.below(9) as usize];
            let result = tampered(float, |s, bytes| {
                if s == section && !bytes.is_empty() {
                    let at = at % bytes.len();
                    bytes[at] ^= 1 << bit;
                }
            });
            let Ok(tensor) = result else {
                errors += 1;
                continue;
            };
            let (fast, slow) = (exponents::decode(&tensor), oracle::decode_exponents(&tensor));
            assert!(fast.is_ok() || slow.is_err());
            if let (Ok(fast), Ok(slow)) = (&fast, &slow) {
                assert!(fast == slow);
                decoded += 1;
            }
        }
    }
    assert!(errors > 50 && decoded > 50, "{errors} {decoded}");
}

/// An FP8 checkpoint: weights with scales, norms in BF16, a head in F16, a router in F32.
fn fp8_model(dir: &std::path::Path) {
    fs::create_dir_all(dir).unwrap();
    let mut tensors = Vec::new();
    for (i, name) in ["gate_proj", "up_proj", "down_proj"].into_iter().enumerate() {
        let name = format!("model.layers.0.mlp.{name}.weight");
        tensors.push(tensor(&name, "F8_E4M3", &[384, 256], &float_weights(Float::E4M3, 384 * 256, i as u64)));
        let scales = float_weights(Float::F32, 6, 20 + i as u64);
        tensors.push(tensor(&format!("{name}_scale_inv"), "F32", &[3, 2], &scales));
    }
    tensors.push(tensor("a.weight", "F8_E5M2", &[130, 257], &float_weights(Float::E5M2, 130 * 257, 4)));
    tensors.push(tensor("model.layers.0.mlp.gate.weight", "F32", &[64, 256], &float_weights(Float::F32, 64 * 256, 5)));
    tensors.push(tensor("conv", "F16", &[128, 32, 3, 3], &float_weights(Float::F16, 128 * 32 * 9, 6)));
    tensors.push(tensor("vector", "F16", &[40_000], &float_weights(Float::F16, 40_000, 7)));
    tensors.push(tensor("noise", "F8_E4M3", &[128, 256], &common::noise(128 * 256)));
    tensors.push(tensor("bf16", "BF16", &[128, 256], &common::weights(128 * 256, 8)));
    tensors.push(tensor("double", "F64", &[64, 64], &common::noise(64 * 64 * 8)));
    fs::write(dir.join("model.safetensors"), safetensors_file(&[("format", "pt")], &tensors)).unwrap();
    fs::write(dir.join("config.json"), "{}").unwrap();
}

#[test]
fn models_of_many_dtypes_shrink_and_round_trip() {
    let scratch = Scratch::new();
    let source = scratch.path("model");
    fp8_model(&source);
    for &profile in Profile::ALL {
        let options = CompressOptions::new(profile);
        let bundle = scratch.path(&format!("{profile}"));
        let planned = plan(&source, &options).unwrap();
        let report = compress(&source, &bundle, &options, &Silent).unwrap();
        for (planned, made) in planned.tensors.iter().zip(&report.tensors) {
            assert_eq!((planned.encoding, &planned.reason), (made.encoding, &made.reason), "{profile}: {}", made.name);
            // For a matrix of 257 columns a fifth of the codes are padding, which a sample does not contain.
            let off = planned.stored_bytes.abs_diff(made.stored_bytes);
            assert!(
                off * 100 <= made.stored_bytes * if made.name == "a.weight" { 4 } else { 1 },
                "{profile}: {}: {planned:?} {made:?}",
                made.name
            );
        }
        let of = |name: &str| report.tensors.iter().find(|t| t.name == name).unwrap();
        if profile != Profile::Inference {
            for name in ["model.layers.0.mlp.down_proj.weight", "a.weight", "conv", "model.layers.0.mlp.gate.weight"] {
                assert_eq!(of(name).encoding, EncodingId::EXPONENTS, "{profile}: {name}");
                assert!(of(name).stored_bytes * 100 < of(name).original_bytes * 92, "{profile}: {:?}", of(name));
            }
            for (name, reason) in [
                ("vector", "rank 1"),
                ("double", "F64 is not coded"),
                ("noise", "coded it would save less than 2048 bytes"),
                ("model.layers.0.mlp.up_proj.weight_scale_inv", "coded it would save less than 2048 bytes"),
            ] {
                assert_eq!(
                    (of(name).encoding, of(name).reason.as_deref()),
                    (EncodingId::RAW, Some(reason)),
                    "{profile}"
                );
            }
            assert_ne!(of("bf16").encoding, EncodingId::EXPONENTS);
        }
        assert!(verify(&bundle, Some(&source), &Silent).unwrap().is_ok());
        let back = scratch.path(&format!("{profile}-back"));
        decompress(&bundle, &back, &DecompressOptions::default(), &Silent).unwrap();
        assert!(read_tree(&back) == read_tree(&source), "{profile}");
    }
    // Decode every tensor by name, and parts of them, as a tensor-parallel rank does.
    let open = Bundle::open(&scratch.path("distribution")).unwrap();
    assert_eq!(open.manifest().version.to_string(), "1.0");
    for t in open.tensors() {
        let (name, whole) = (t.name(), t.decode().unwrap());
        let &[rows, cols] = t.shape() else { continue };
        let width = whole.len() / rows / cols;
        let (some_rows, some_cols) = (rows / 3..rows, cols / 2..cols);
        let part = t.decode_part(some_rows.clone(), some_cols.clone()).unwrap();
        let expected = some_rows.flat_map(|row| {
            whole[(row * cols + some_cols.start) * width..(row * cols + some_cols.end) * width].to_vec()
        });
        assert!(part.bytes == expected.collect::<Vec<u8>>(), "{name}");
    }
}

/// The section records the type for readers without a manifest; a manifest with another type was forged.
#[test]
fn wrong_dtype_is_rejected() {
    let scratch = Scratch::new();
    let (source, bundle) = (scratch.path("model"), scratch.path("bundle"));
    fs::create_dir_all(&source).unwrap();
    let bytes = float_weights(Float::E4M3, 256 * 256, 11);
    let file = safetensors_file(&[], &[tensor("t", "F8_E4M3", &[256, 256], &bytes)]);
    fs::write(source.join("t.safetensors"), file).unwrap();
    compress(&source, &bundle, &CompressOptions::default(), &Silent).unwrap();
    let stored = Bundle::open(&bundle).unwrap().tensor("t").unwrap().stored().unwrap();
    assert_eq!(ExponentsTensor::of(stored.borrowed()).unwrap().float(), Float::E4M3);
    assert_eq!(StoredTensor::from(ExponentsTensor::of(stored.clone()).unwrap()), stored);
    let with_dtype = |dtype: &str| {
        let path = bundle.join("unweight.json");
        let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        json["files"][0]["tensors"][0]["dtype"] = dtype.into();
        json["manifest_digest"] = "0".repeat(32).into();
        let text = json.to_string();
        let digest = unweight_format::Digest::of(text.as_bytes()).to_string();
        let key = |digits: &str| format!("\"manifest_digest\":\"{digits}\"");
        fs::write(&path, text.replace(&key(&"0".repeat(32)), &key(&digest))).unwrap();
        Bundle::open(&bundle).and_then(|open| open.tensor("t")?.decode())
    };
    let error = chain(&with_dtype("F8_E5M2").unwrap_err());
    assert!(error.contains("float_format: it is not that of the tensor's type"), "{error}");
    let error = chain(&with_dtype("U8").unwrap_err());
    assert!(error.contains("U8 cannot be exponents"), "{error}");
    // The same bits with another type name.
    assert!(with_dtype("F8_E4M3FNUZ").unwrap() == bytes);
    assert!(with_dtype("F8_E4M3").unwrap() == bytes);
}
