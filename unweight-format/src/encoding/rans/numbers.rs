//! Lists of signed numbers as Elias gamma codes (`docs/format.md` A.13): small numbers have short codes.
//!
//! The number `v` is coded as `u = zigzag(v) + 1` (1, 2, 3, ... for 0, -1, 1, ...). With `b` bits in `u`, its code is
//! `b - 1` zeros, a one, and the lower `b - 1` bits of `u`, lowest first, from bit 0 of a byte upwards.

/// Maximum number of bits in `u`: the largest number is a frequency, at most 2^12.
const BITS_MAX: u32 = 14;

/// Appends numbers to a list.
#[derive(Debug, Default)]
pub(super) struct NumberWriter {
    bytes: Vec<u8>,
    partial: u64,
    filled: u32,
}

impl NumberWriter {
    /// Appends a number.
    pub fn push(&mut self, value: i32) {
        let u = zigzag(value) + 1;
        let lower = u.ilog2();
        debug_assert!(lower < BITS_MAX);
        let code = 1 << lower | u64::from(u & ((1 << lower) - 1)) << (lower + 1);
        self.partial |= code << self.filled;
        self.filled += 2 * lower + 1;
        while self.filled >= 8 {
            self.bytes.push(self.partial as u8);
            (self.partial, self.filled) = (self.partial >> 8, self.filled - 8);
        }
    }

    /// The bytes of the list; zeros fill the last one.
    pub fn finish(mut self) -> Vec<u8> {
        if self.filled > 0 {
            self.bytes.push(self.partial as u8);
        }
        self.bytes
    }
}

/// Bits of a number's code.
pub(super) fn code_bits(value: i32) -> u32 {
    2 * (zigzag(value) + 1).ilog2() + 1
}

fn zigzag(value: i32) -> u32 {
    (value << 1 ^ value >> 31) as u32
}

/// Reads numbers of a list.
#[derive(Debug)]
pub(super) struct NumberReader<'a> {
    bytes: &'a [u8],
    /// The next bit.
    at: usize,
}

impl<'a> NumberReader<'a> {
    /// Reads from bit 0 of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the next number, or `None` if no code is left or the code is too long.
    pub fn next(&mut self) -> Option<i32> {
        let from = self.bytes.get(self.at / 8..)?;
        let mut window = [0; 8];
        let available = from.len().min(8);
        window[..available].copy_from_slice(&from[..available]);
        let bits = u64::from_le_bytes(window) >> (self.at % 8);
        let lower = bits.trailing_zeros();
        if lower >= BITS_MAX || self.at + 2 * lower as usize + 1 > self.bytes.len() * 8 {
            return None;
        }
        let u = 1 << lower | (bits >> (lower + 1)) as u32 & ((1 << lower) - 1);
        self.at += 2 * lower as usize + 1;
        let zigzag = u - 1;
        Some((zigzag >> 1) as i32 ^ -((zigzag & 1) as i32))
    }

    /// Whether only zero bits are left.
    pub fn rest_is_zero(&self) -> bool {
        let Some((first, rest)) = self.bytes.get(self.at / 8..).and_then(<[u8]>::split_first) else { return true };
        first >> (self.at % 8) == 0 && rest.iter().all(|&byte| byte == 0)
    }

    /// Bytes that the numbers read so far occupy.
    pub fn used_bytes(&self) -> usize {
        self.at.div_ceil(8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        let numbers: Vec<i32> = (-300..300).chain([4096, -4096, 0, 0, 1]).collect();
        let mut writer = NumberWriter::default();
        numbers.iter().for_each(|&number| writer.push(number));
        let bytes = writer.finish();
        assert_eq!(bytes.len(), numbers.iter().map(|&number| code_bits(number) as usize).sum::<usize>().div_ceil(8));
        let mut reader = NumberReader::new(&bytes);
        assert!(numbers.iter().all(|&number| reader.next() == Some(number)));
        assert!(reader.rest_is_zero() && reader.used_bytes() == bytes.len());
        assert_eq!(reader.next(), None);
    }

    #[test]
    fn codes_are_those_of_the_specification() {
        let mut writer = NumberWriter::default();
        // u = 1, 2, 3, 5: 1, 010, 011, 00110 (lowest bit of the lower bits first).
        [0, -1, 1, 2].iter().for_each(|&number| writer.push(number));
        assert_eq!(writer.finish(), [0b0110_0101, 0b0_0110]);
    }

    #[test]
    fn long_and_cut_codes_are_refused() {
        assert_eq!(NumberReader::new(&[0; 8]).next(), None);
        assert_eq!(NumberReader::new(&[]).next(), None);
        assert_eq!(NumberReader::new(&[0, 1]).next(), None, "8 zeros, a one, and 7 of 8 bits");
    }
}
