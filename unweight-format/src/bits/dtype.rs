//! Element types of safetensors.

use super::named::named;

named! {
    /// Element types of safetensors 0.8.
    Dtype, "dtype" {
        /// Boolean of one byte.
        Bool = "BOOL",
        /// 4-bit float.
        F4 = "F4",
        /// 6-bit float: 2 exponent bits, 3 fraction bits.
        F6E2M3 = "F6_E2M3",
        /// 6-bit float: 3 exponent bits, 2 fraction bits.
        F6E3M2 = "F6_E3M2",
        /// Unsigned byte.
        U8 = "U8",
        /// Signed byte.
        I8 = "I8",
        /// 8-bit float: 5 exponent bits, 2 fraction bits.
        F8E5M2 = "F8_E5M2",
        /// 8-bit float: 4 exponent bits, 3 fraction bits.
        F8E4M3 = "F8_E4M3",
        /// 8 exponent bits without sign and fraction.
        F8E8M0 = "F8_E8M0",
        /// `F8_E4M3` without infinities and negative zero.
        F8E4M3Fnuz = "F8_E4M3FNUZ",
        /// `F8_E5M2` without infinities and negative zero.
        F8E5M2Fnuz = "F8_E5M2FNUZ",
        /// 16-bit integer.
        I16 = "I16",
        /// Unsigned 16-bit integer.
        U16 = "U16",
        /// IEEE half.
        F16 = "F16",
        /// Brain float, the main type that Unweight compresses.
        Bf16 = "BF16",
        /// 32-bit integer.
        I32 = "I32",
        /// Unsigned 32-bit integer.
        U32 = "U32",
        /// IEEE single.
        F32 = "F32",
        /// Complex of two singles.
        C64 = "C64",
        /// IEEE double.
        F64 = "F64",
        /// 64-bit integer.
        I64 = "I64",
        /// Unsigned 64-bit integer.
        U64 = "U64",
    }
}

impl Dtype {
    /// Bits of an element.
    pub const fn bits(self) -> u64 {
        match self {
            Self::F4 => 4,
            Self::F6E2M3 | Self::F6E3M2 => 6,
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::F8E5M2
            | Self::F8E4M3
            | Self::F8E8M0
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 64,
        }
    }

    /// Bytes of a tensor; `None` if they overflow 64 bits or are not a whole number of bytes.
    pub fn tensor_bytes(self, shape: &[usize]) -> Option<u64> {
        // Zeros first: a shape with a zero has no elements, even if the product of its other dimensions overflows.
        if shape.contains(&0) {
            return Some(0);
        }
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?))?;
        let bits = elements.checked_mul(self.bits())?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}
