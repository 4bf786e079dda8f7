//! Splits a BF16 value into two bytes and joins them (report section 3.1).

/// Returns the sign bit and the seven mantissa bits.
#[inline(always)]
pub const fn sign_mantissa(bits: u16) -> u8 {
    (bits >> 8 & 0x80) as u8 | (bits & 0x7f) as u8
}

/// Returns the eight exponent bits.
#[inline(always)]
pub const fn exponent(bits: u16) -> u8 {
    (bits >> 7) as u8
}

/// Joins what [`sign_mantissa`] and [`exponent`] return.
#[inline(always)]
pub const fn join(sign_mantissa: u8, exponent: u8) -> u16 {
    (sign_mantissa as u16 & 0x80) << 8 | (exponent as u16) << 7 | (sign_mantissa as u16 & 0x7f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bit_patterns_survive_the_split() {
        for bits in 0..=u16::MAX {
            assert_eq!(join(sign_mantissa(bits), exponent(bits)), bits);
        }
    }

    #[test]
    fn known_values() {
        let one = half::bf16::from_f32(1.0).to_bits();
        assert_eq!((sign_mantissa(one), exponent(one)), (0, 127));
        let minus_zero = half::bf16::from_f32(-0.0).to_bits();
        assert_eq!((sign_mantissa(minus_zero), exponent(minus_zero)), (0x80, 0));
    }
}
