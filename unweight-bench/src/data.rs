//! Random inputs of the benchmarks, and the distance between results.

use unweight_format::testing::Weights;

/// Converts little-endian bytes to 16-bit values.
pub fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

/// Converts 16-bit values to little-endian bytes.
pub(crate) fn bytes_of(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns `|a - b| / |b|` of bf16 bit patterns, computed in f64. NaN in `a` or `b` gives NaN.
pub fn relative_error(a: &[u16], b: &[u16]) -> f64 {
    let value = |bits: &u16| f64::from(f32::from_bits(u32::from(*bits) << 16));
    let (difference, norm) = a.iter().zip(b).fold((0.0, 0.0), |(difference, norm), (a, b)| {
        let (a, b) = (value(a), value(b));
        (difference + (a - b) * (a - b), norm + b * b)
    });
    if norm == 0.0 { f64::sqrt(difference) } else { f64::sqrt(difference / norm) }
}

/// Returns `count` bf16 elements drawn from N(0, sigma^2), as bytes. The same seed gives the same bytes.
pub fn normal_bf16(count: usize, sigma: f64, seed: u64) -> Vec<u8> {
    Weights::Gaussian { sigma }.bytes(count, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_normal_and_deterministic() {
        let bytes = normal_bf16(40_001, 0.02, 1);
        assert_eq!(bytes.len(), 80_002);
        assert_eq!(bytes, normal_bf16(40_001, 0.02, 1));
        assert_ne!(bytes, normal_bf16(40_001, 0.02, 2));
        let values: Vec<f64> = bytes
            .chunks_exact(2)
            .map(|b| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)))
            .collect();
        let count = values.len() as f64;
        let (mean, square) = (values.iter().sum::<f64>() / count, values.iter().map(|x| x * x).sum::<f64>() / count);
        assert!(mean.abs() < 5e-4 && (square.sqrt() - 0.02).abs() < 5e-4, "{mean} {square}");
    }

    #[test]
    fn errors_are_relative_and_nan_propagates() {
        let one = 0x3f80;
        assert_eq!(relative_error(&[one, one], &[one, one]), 0.0);
        assert_eq!(relative_error(&[0x4000, one], &[one, 0]), f64::sqrt(2.0));
        assert!(relative_error(&[0xffff], &[one]).is_nan());
    }
}
