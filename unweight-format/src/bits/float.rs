//! Binary floating-point types: sign, exponent bits and fraction bits, from the highest bit down.

use super::dtype::Dtype;

/// A type whose exponents can be coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float {
    /// 8 bits with 4 exponent bits.
    E4M3,
    /// 8 bits with 5 exponent bits.
    E5M2,
    /// IEEE half.
    F16,
    /// Brain float.
    Bf16,
    /// IEEE single.
    F32,
}

impl Float {
    /// All types, by size.
    pub const ALL: [Self; 5] = [Self::E4M3, Self::E5M2, Self::F16, Self::Bf16, Self::F32];

    /// The type of a safetensors dtype; `None` for integers, and for floats whose exponents are not coded. The `FNUZ`
    /// variants of FP8 have the same fields as the others.
    pub const fn of(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::F8E4M3 | Dtype::F8E4M3Fnuz => Self::E4M3,
            Dtype::F8E5M2 | Dtype::F8E5M2Fnuz => Self::E5M2,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F32 => Self::F32,
            _ => return None,
        })
    }

    /// The name in messages, such as `BF16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4M3 => "E4M3",
            Self::E5M2 => "E5M2",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
        }
    }

    /// Bits of the exponent field.
    pub const fn exponent_bits(self) -> u32 {
        match self {
            Self::E4M3 => 4,
            Self::E5M2 | Self::F16 => 5,
            Self::Bf16 | Self::F32 => 8,
        }
    }

    /// Bits of the fraction: the mantissa without its implicit leading bit.
    pub const fn fraction_bits(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
            Self::F16 => 10,
            Self::Bf16 => 7,
            Self::F32 => 23,
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        (1 + self.exponent_bits() + self.fraction_bits()) as usize / 8
    }

    /// The exponent field of an element's bits.
    #[inline(always)]
    pub const fn exponent(self, bits: u32) -> u8 {
        (bits >> self.fraction_bits() & ((1 << self.exponent_bits()) - 1)) as u8
    }

    /// Sign and fraction of an element's bits, adjacent: `1 + fraction_bits` bits, the sign highest.
    #[inline(always)]
    pub(crate) const fn sign_fraction(self, bits: u32) -> u32 {
        let fraction = self.fraction_bits();
        bits >> (fraction + self.exponent_bits()) << fraction | bits & ((1 << fraction) - 1)
    }

    /// The bits of an element from its exponent and its adjacent sign and fraction: `1 + fraction_bits` bits, the sign
    /// highest.
    #[inline(always)]
    pub const fn join(self, sign_fraction: u32, exponent: u8) -> u32 {
        let fraction = self.fraction_bits();
        sign_fraction >> fraction << (fraction + self.exponent_bits())
            | (exponent as u32) << fraction
            | sign_fraction & ((1 << fraction) - 1)
    }

    /// The bits of one little-endian element.
    ///
    /// # Panics
    /// `element` is longer or shorter than [`Float::bytes`].
    #[inline(always)]
    pub fn read(self, element: &[u8]) -> u32 {
        let mut bits = [0; 4];
        bits[..self.bytes()].copy_from_slice(element);
        u32::from_le_bytes(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_pattern_survives_the_split() {
        for float in Float::ALL {
            let (bits, split) = (8 * float.bytes() as u32, 1 + float.fraction_bits());
            assert_eq!(bits, split + float.exponent_bits());
            // For F32, every exponent with every sign, and a sample of fractions.
            let step = if bits == 32 { 65_521 } else { 1 };
            for pattern in (0..1u64 << bits).step_by(step).map(|pattern| pattern as u32) {
                let (sign_fraction, exponent) = (float.sign_fraction(pattern), float.exponent(pattern));
                assert!(sign_fraction >> split == 0 && u32::from(exponent) >> float.exponent_bits() == 0);
                assert_eq!(float.join(sign_fraction, exponent), pattern, "{}", float.name());
            }
        }
    }

    #[test]
    fn known_values() {
        assert_eq!(
            (Float::F32.exponent(1.5f32.to_bits()), Float::F32.sign_fraction((-1.5f32).to_bits())),
            (127, 3 << 22)
        );
        let half = u32::from(half::f16::from_f32(-0.25).to_bits());
        assert_eq!((Float::F16.exponent(half), Float::F16.sign_fraction(half)), (13, 1 << 10));
        let brain = half::bf16::from_f32(-0.25).to_bits();
        assert_eq!(Float::Bf16.exponent(brain.into()), crate::bf16::exponent(brain));
        assert_eq!(Float::Bf16.sign_fraction(brain.into()), u32::from(crate::bf16::sign_mantissa(brain)));
        // -448, the lowest value of E4M3; 0x7f is its NaN.
        assert_eq!((Float::E4M3.exponent(0xfe), Float::E4M3.sign_fraction(0xfe)), (15, 0xe));
    }
}
