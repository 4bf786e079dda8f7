//! The window of exponents of a packed matrix, and exact scaling by powers of two.

use super::{ESCAPES_ONE_IN, Unpackable};
use crate::{
    CodecError, Histogram, bf16,
    layout::{OPERAND_EXPONENT, PACKED_WINDOW_BYTES as WINDOW_BYTES, WINDOW_BASE_MAX, WINDOW_BASE_MIN},
};

/// The window of 16 consecutive exponents of a packed tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub(super) base: u8,
}

impl Window {
    /// The window that covers most elements, the lowest of equal ones, with the number of elements outside.
    pub fn best(histogram: &Histogram) -> (Self, u64) {
        let covered = |base: u8| (base..base + 16).map(|e| histogram.count(e)).sum::<u64>();
        let base = (WINDOW_BASE_MIN..=WINDOW_BASE_MAX).rev().max_by_key(|&base| covered(base)).expect("239 windows");
        (Self { base }, histogram.total() - covered(base))
    }

    /// The window that a matrix with this histogram is packed with: [`Window::best`], if few enough elements are
    /// outside.
    ///
    /// # Errors
    /// [`Unpackable::Escapes`].
    pub fn covering(histogram: &Histogram) -> Result<Self, Unpackable> {
        let (window, outside) = Self::best(histogram);
        let elements = histogram.total();
        if u128::from(outside) * u128::from(ESCAPES_ONE_IN) <= u128::from(elements) {
            Ok(window)
        } else {
            Err(Unpackable::Escapes { outside, elements })
        }
    }

    /// Reads `packed_window`.
    ///
    /// # Errors
    /// The base is not in 1..=239, or a byte after it is not 0.
    pub fn from_stored(bytes: [u8; WINDOW_BYTES]) -> Result<Self, CodecError> {
        if bytes[1..].iter().any(|&byte| byte != 0) {
            return Err(CodecError::Code { section: "packed_window", reason: "the bytes after the base must be 0" });
        }
        Self::new(bytes[0])
    }

    /// Returns the section `packed_window`.
    pub fn stored(self) -> [u8; WINDOW_BYTES] {
        std::array::from_fn(|i| if i == 0 { self.base } else { 0 })
    }

    /// A window with this lowest exponent.
    ///
    /// # Errors
    /// `base` is not in 1..=239.
    pub fn new(base: u8) -> Result<Self, CodecError> {
        if (WINDOW_BASE_MIN..=WINDOW_BASE_MAX).contains(&base) {
            Ok(Self { base })
        } else {
            Err(CodecError::Code { section: "packed_window", reason: "the base must be from 1 to 239" })
        }
    }

    /// Lowest exponent of the window.
    pub fn base(self) -> u8 {
        self.base
    }

    /// `2^(base - 112)`: the factor that converts a product with operands to a product with weights.
    pub fn scale(self) -> f32 {
        f32::from_bits(((127 + i32::from(self.base) - i32::from(OPERAND_EXPONENT)) as u32) << 23)
    }

    /// The exponent less the base, if it is in the window.
    pub fn nibble(self, exponent: u8) -> Option<u8> {
        exponent.checked_sub(self.base).filter(|&nibble| nibble < 16)
    }

    /// The operand of a weight: `weight * 2^(112 - base)`, if it is exact.
    pub fn operand(self, weight: u16) -> Option<u16> {
        times_power_of_two(weight, i32::from(OPERAND_EXPONENT) - i32::from(self.base))
    }

    /// The weight of an operand: `operand * 2^(base - 112)`, if it is exact.
    pub fn weight(self, operand: u16) -> Option<u16> {
        times_power_of_two(operand, i32::from(self.base) - i32::from(OPERAND_EXPONENT))
    }
}

/// `value * 2^shift` in bf16, if it is exact; zeros, Inf and NaN do not change.
pub(in crate::encoding) fn times_power_of_two(value: u16, shift: i32) -> Option<u16> {
    let (sign, exponent, mantissa) = (value & 0x8000, i32::from(bf16::exponent(value)), value & 0x7f);
    if exponent == 255 || value & 0x7fff == 0 {
        return Some(value);
    }
    // value = significand * 2^(exponent - 134), with a leading one of weight 2^7 if it is normal.
    let (mut significand, mut exponent) =
        if exponent == 0 { (u32::from(mantissa), 1) } else { (u32::from(mantissa) | 0x80, exponent) };
    exponent += shift;
    while significand < 0x80 && exponent > 1 {
        significand <<= 1;
        exponent -= 1;
    }
    while exponent < 1 {
        if significand & 1 == 1 {
            return None;
        }
        significand >>= 1;
        exponent += 1;
    }
    if exponent > 254 || significand == 0 {
        return None;
    }
    let field = if significand < 0x80 { 0 } else { exponent as u16 };
    Some(sign | field << 7 | (significand & 0x7f) as u16)
}
