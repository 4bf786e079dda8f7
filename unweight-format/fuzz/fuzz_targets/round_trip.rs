#![no_main]
//! Arbitrary weights of any small shape are restored, and both encoders agree.

use libfuzzer_sys::fuzz_target;
use unweight_format::{
    CodeLimit, EncodingId, Float, FloatMatrix, Histogram, Matrix, StoredTensor, Survey,
    raw::{compact, exponents, huffman, oracle, packed, palette, rans},
};

fuzz_target!(|data: &[u8]| {
    let [cols, limit, weights @ ..] = data else { return };
    let cols = usize::from(*cols) + 1;
    let rows = weights.len() / 2 / cols;
    let weights = &weights[..rows * cols * 2];
    let Ok(matrix) = Matrix::new(weights, rows, cols) else { return };
    let limit = CodeLimit::new(6 + u32::from(*limit) % 10).expect("6..=15");
    let fast = huffman::encode(matrix, limit).expect("small");
    let slow = oracle::encode_huffman(matrix, limit).expect("small");
    assert!(fast == slow, "encoders differ");
    assert!(huffman::decode(&fast).expect("valid") == weights);
    assert!(oracle::decode_huffman(&fast).expect("valid") == weights);
    let palette = palette::encode(matrix, limit).expect("small");
    assert!(huffman::transcode(&fast).expect("valid") == palette);
    let mut out = vec![0; weights.len()];
    palette::decode_into(&palette, &mut out).expect("valid");
    assert!(out == weights);
    let tensor = rans::encode(matrix, &Histogram::of(weights));
    assert!(tensor == oracle::encode_rans(matrix, &tensor), "encoders differ");
    assert!(rans::decode(&tensor).expect("valid") == weights);
    assert!(oracle::decode_rans(&tensor).expect("valid") == weights);
    // The same bytes as other types: rows of the same length, without the remainder.
    for float in [Float::E4M3, Float::E5M2, Float::F16, Float::F32] {
        let rows = weights.len() / float.bytes() / cols;
        let weights = &weights[..rows * cols * float.bytes()];
        let Ok(matrix) = FloatMatrix::new(float, weights, rows, cols) else { continue };
        let fast = exponents::encode(matrix, limit).expect("small");
        assert!(fast == oracle::encode_exponents(matrix, limit).expect("small"), "encoders differ");
        assert!(exponents::decode(&fast).expect("valid") == weights);
        assert!(oracle::decode_exponents(&fast).expect("valid") == weights);
    }
    for float in Float::ALL {
        let rows = weights.len() / float.bytes() / cols;
        let weights = &weights[..rows * cols * float.bytes()];
        let Ok(matrix) = FloatMatrix::new(float, weights, rows, cols) else { continue };
        let survey = Survey::of(float, weights);
        let planes = StoredTensor::encode(EncodingId::PLANES, matrix, &survey, limit).expect("any matrix");
        let mut out = vec![0; weights.len()];
        planes.decode(&mut out).expect("valid");
        assert!(out == weights && oracle::decode_planes(&planes).expect("planes").expect("valid") == weights);
    }
    // Whole tiles of the same weights, repeated as needed.
    let whole: Vec<u8> = weights.iter().copied().cycle().take(64 * 128 * 2).collect();
    let matrix = Matrix::new(&whole, 64, 128).expect("the shape is right");
    let tensor = packed::pack(matrix, &Histogram::of(&whole));
    assert!(tensor == oracle::pack(matrix), "packers differ");
    if let Ok(tensor) = tensor {
        assert!(tensor.unpack() == whole && oracle::unpack(&tensor) == whole);
    }
    if let Ok(tensor) = compact::encode(matrix, &Histogram::of(&whole)) {
        assert!(tensor.decode().expect("valid") == whole && oracle::decode_compact(&tensor).expect("valid") == whole);
    }
});
