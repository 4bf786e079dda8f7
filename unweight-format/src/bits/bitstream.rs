//! LSB-first bit streams, one bit at a time: the readable definition of a stream, used by the oracle.

/// Appends bits from bit 0 upwards.
#[derive(Debug, Default, Clone)]
pub struct BitWriter {
    words: Vec<u32>,
    bits: u64,
}

impl BitWriter {
    /// Appends the lowest `length` bits of `value`, lowest first.
    pub fn push(&mut self, value: u32, length: u32) {
        for i in 0..length {
            if self.bits.is_multiple_of(32) {
                self.words.push(0);
            }
            if value >> i & 1 == 1 {
                *self.words.last_mut().expect("a word was pushed") |= 1 << (self.bits % 32);
            }
            self.bits += 1;
        }
    }

    /// Fills the current word with zeros.
    pub fn align_to_word(&mut self) {
        self.bits = self.words.len() as u64 * 32;
    }

    /// The number of bits written.
    pub fn bits(&self) -> u64 {
        self.bits
    }

    /// The words; zeros fill the last one.
    pub fn into_words(self) -> Vec<u32> {
        self.words
    }
}

/// Reads bits from little-endian words stored as bytes.
#[derive(Debug, Clone, Copy)]
pub struct BitReader<'a> {
    bytes: &'a [u8],
    position: u64,
}

impl<'a> BitReader<'a> {
    /// Starts at bit `position` of `bytes`.
    pub fn new(bytes: &'a [u8], position: u64) -> Self {
        Self { bytes, position }
    }

    /// The next bit, or `None` at the end.
    pub fn bit(&mut self) -> Option<u32> {
        let byte = *self.bytes.get(usize::try_from(self.position / 8).ok()?)?;
        let bit = byte >> (self.position % 8) & 1;
        self.position += 1;
        Some(bit.into())
    }

    /// The position of the next bit, counted from bit 0 of `bytes`.
    pub fn position(&self) -> u64 {
        self.position
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bit_is_bit_zero_of_word_zero() {
        let mut writer = BitWriter::default();
        writer.push(0b1, 1);
        writer.push(0b01, 2);
        assert_eq!(writer.bits(), 3);
        assert_eq!(writer.into_words(), [0b011]);
    }

    #[test]
    fn reader_crosses_words_and_ends() {
        let mut writer = BitWriter::default();
        writer.push(0x7fff_ffff, 31);
        writer.push(0b10, 2);
        let bytes: Vec<u8> = writer.into_words().iter().flat_map(|w| w.to_le_bytes()).collect();
        let mut reader = BitReader::new(&bytes, 30);
        assert_eq!([reader.bit(), reader.bit(), reader.bit()], [Some(1), Some(0), Some(1)]);
        let mut end = BitReader::new(&bytes, 64);
        assert_eq!(end.bit(), None);
    }
}
