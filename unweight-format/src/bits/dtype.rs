//! Element types of safetensors.

use super::named::named;

named! {
    /// Element types of safetensors 0.8.
    Dtype, "dtype" {
        /// Boolean of one byte.
        Bool = "BOOL",
        /// 4-bit float.
        F4 = "F4",
        /// 6-bit float.
        F6E2M3 = "F6_E2M3",
        /// 6-bit float.
        F6E3M2 = "F6_E3M2",
        /// Unsigned byte.
        U8 = "U8",
        /// Signed byte.
        I8 = "I8",
        /// 8-bit float.
        F8E5M2 = "F8_E5M2",
        /// 8-bit float.
        F8E4M3 = "F8_E4M3",
        /// 8-bit exponent.
        F8E8M0 = "F8_E8M0",
        /// 8-bit float.
        F8E4M3Fnuz = "F8_E4M3FNUZ",
        /// 8-bit float.
        F8E5M2Fnuz = "F8_E5M2FNUZ",
        /// 16-bit integer.
        I16 = "I16",
        /// Unsigned 16-bit integer.
        U16 = "U16",
        /// IEEE half.
        F16 = "F16",
        /// Brain float: what Unweight compresses.
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

    /// Bytes of a tensor; `None` if they cannot be counted or do not end on a byte.
    pub fn tensor_bytes(self, shape: &[usize]) -> Option<u64> {
        // Zeros first: a shape with one has no elements, whatever the other dimensions would multiply to.
        if shape.contains(&0) {
            return Some(0);
        }
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?))?;
        let bits = elements.checked_mul(self.bits())?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}
