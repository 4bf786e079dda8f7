//! A unit: concatenated weights with coded exponents. It is decoded by blocks, so that only a few of them need to be in
//! memory.
//!
//! ```text
//! bits of encoded_exponent  |  window 0     |  window 1     | ...           T windows per block
//! |gap>c c c c c c|c>c c c c c c c|c              a code belongs to the window in which it begins
//! ```

use std::ops::Range;

use rayon::prelude::*;
use unweight_format::{Histogram, raw::bf16};

use super::{CODE_BITS_MAX, COUNT_MAX, Code, NotEncodable, THREADS, THREADS_MAX, UnitError, WINDOW_BYTES};

/// Bits of a window.
const WINDOW_BITS: u64 = 8 * WINDOW_BYTES as u64;
/// Bits of a gap.
const GAP_BITS: usize = 5;
/// Elements that one task encodes.
const CHUNK: usize = 1 << 16;
/// Codes of up to this many bits are decoded with a lookup table, longer ones with a search.
const LOOKUP_BITS: u32 = 12;

/// A unit in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// The decoding tables (`luts`).
    pub luts: Vec<u8>,
    /// The codewords of all exponents.
    pub encoded_exponent: Vec<u8>,
    /// Signs and mantissas.
    pub sign_mantissa: Vec<u8>,
    /// First element of each block, then the number of elements.
    pub output_positions: Vec<u8>,
    /// Where the first code of each window begins.
    pub gaps: Vec<u8>,
    /// Threads per block.
    pub threads: usize,
}

impl Unit {
    /// Encodes little-endian BF16 weights as the package does. An odd last byte is ignored.
    ///
    /// # Errors
    /// The format cannot hold the weights.
    pub fn encode(weights: &[u8], threads: usize) -> Result<Self, NotEncodable> {
        let counts = Histogram::of(weights);
        let code = Code::of(&counts)?;
        let luts = code.luts()?;
        let sizes = Sizes::of(&code, &counts, threads)?;
        let mut encoder = Encoder::new(&code, threads);
        let mut encoded_exponent = Vec::with_capacity(sizes.encoded_exponent as usize);
        let mut sign_mantissa = Vec::with_capacity(sizes.elements as usize);
        encoder.push(weights, &mut encoded_exponent, &mut sign_mantissa);
        let (output_positions, gaps) = encoder.finish(&mut encoded_exponent);
        Ok(Self { luts, encoded_exponent, sign_mantissa, output_positions, gaps, threads })
    }

    /// Returns the small sections, and the sizes of the large ones.
    pub fn sections(&self) -> Sections<'_> {
        Sections {
            luts: &self.luts,
            output_positions: &self.output_positions,
            gaps: &self.gaps,
            encoded_bytes: self.encoded_exponent.len() as u64,
            elements: self.sign_mantissa.len() as u64,
            threads: self.threads as u64,
        }
    }

    /// Decodes the weights to little-endian BF16.
    ///
    /// # Errors
    /// The unit is damaged.
    pub fn decode(&self) -> Result<Vec<u8>, UnitError> {
        let decoder = Decoder::new(&self.sections())?;
        let mut out = vec![0; 2 * self.sign_mantissa.len()];
        decoder.decode(0..decoder.blocks(), &self.encoded_exponent, &self.sign_mantissa, &mut out)?;
        Ok(out)
    }
}

/// Bytes of the sections of a unit, known before it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Number of elements, which is also the number of bytes of `sign_mantissa`.
    pub elements: u64,
    /// Bytes of `encoded_exponent`.
    pub encoded_exponent: u64,
    /// Bytes of `output_positions`.
    pub output_positions: u64,
    /// Bytes of `gaps`.
    pub gaps: u64,
}

impl Sizes {
    /// Returns the section sizes of a unit with these exponents.
    ///
    /// # Errors
    /// The counts exceed the kernel's limit ([`COUNT_MAX`]).
    pub fn of(code: &Code, counts: &Histogram, threads: usize) -> Result<Self, NotEncodable> {
        let (elements, encoded_exponent) = (counts.total(), code.bits(counts).div_ceil(8));
        for (what, got) in [("elements", elements), ("bytes of codes", encoded_exponent)] {
            if got > COUNT_MAX {
                return Err(NotEncodable::Count { what, got });
            }
        }
        let BlockLayout { blocks, gaps } = BlockLayout::of(encoded_exponent, threads);
        Ok(Self { elements, encoded_exponent, output_positions: 4 * (blocks + 1), gaps })
    }
}

/// How the codes of a unit are divided into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockLayout {
    blocks: u64,
    /// Bytes of `gaps`.
    gaps: u64,
}

impl BlockLayout {
    /// Divides `encoded_bytes` bytes of codes, for `threads` threads per block.
    pub(super) fn of(encoded_bytes: u64, threads: usize) -> Self {
        let blocks = encoded_bytes.div_ceil((threads * WINDOW_BYTES) as u64);
        Self { blocks, gaps: (blocks * (threads * GAP_BITS) as u64).div_ceil(8) }
    }

    /// Returns whether sections of these sizes match. Positions are one entry short if no code begins in the last block
    /// (see [`Encoder::finish`]).
    pub(super) fn matches_sizes(self, gaps: u64, output_positions: u64) -> bool {
        self.gaps == gaps && [self.blocks, self.blocks + 1].contains(&(output_positions / 4))
    }
}

/// Encodes a unit piece by piece.
#[derive(Debug)]
pub struct Encoder<'a> {
    code: &'a Code,
    threads: usize,
    /// The number of bits of all codes so far; `tail` holds those of the last, incomplete byte.
    bits: u64,
    tail: u8,
    elements: u64,
    /// The first bit of the last code.
    last: Option<u64>,
    gaps: Vec<u8>,
    positions: Vec<u32>,
}

/// The encoded elements of one task.
struct Piece {
    bytes: Vec<u8>,
    /// Each window with the first bit of its first code.
    gaps: Vec<(u64, u8)>,
    /// First elements of the blocks that begin in this piece.
    positions: Vec<u32>,
}

impl<'a> Encoder<'a> {
    /// Starts a unit.
    pub fn new(code: &'a Code, threads: usize) -> Self {
        Self { code, threads, bits: 0, tail: 0, elements: 0, last: None, gaps: Vec::new(), positions: Vec::new() }
    }

    /// Appends little-endian BF16 weights, whose exponents must be in the code; an odd last byte is ignored. Complete
    /// bytes are appended to `encoded`.
    pub fn push(&mut self, weights: &[u8], encoded: &mut Vec<u8>, sign_mantissa: &mut Vec<u8>) {
        let weights = &weights[..weights.len() / 2 * 2];
        let chunks = || weights.par_chunks(2 * CHUNK);
        let of = |element: &[u8]| self.code.word(bf16::exponent(u16::from_le_bytes([element[0], element[1]])));
        let lengths: Vec<u64> =
            chunks().map(|chunk| chunk.chunks_exact(2).map(|element| u64::from(of(element).bits)).sum()).collect();
        // For each chunk: its first bit, the first bit of the code before it, and its first element.
        let (mut at, mut last, mut first) = (self.bits, self.last, self.elements);
        let mut starts = Vec::with_capacity(lengths.len());
        for (chunk, bits) in weights.chunks(2 * CHUNK).zip(&lengths) {
            starts.push((at, last, first));
            at += bits;
            last = chunk.rchunks_exact(2).next().map(|element| at - u64::from(of(element).bits));
            first += (chunk.len() / 2) as u64;
        }
        let pieces: Vec<Piece> =
            chunks().zip(&starts).map(|(chunk, &(at, last, first))| self.piece(chunk, at, last, first)).collect();
        let ends = starts.iter().skip(1).map(|&(start, ..)| start).chain([at]);
        for ((piece, &(start, ..)), end) in pieces.iter().zip(&starts).zip(ends) {
            let mut bytes = piece.bytes.as_slice();
            // The byte that the previous piece began.
            if !start.is_multiple_of(8)
                && let Some((shared, rest)) = bytes.split_first()
            {
                self.tail |= shared;
                bytes = rest;
                if !rest.is_empty() {
                    encoded.push(self.tail);
                }
            }
            if let Some((tail, whole)) = bytes.split_last() {
                encoded.extend_from_slice(whole);
                self.tail = *tail;
            }
            if end.is_multiple_of(8) {
                encoded.push(self.tail);
                self.tail = 0;
            }
            piece.gaps.iter().for_each(|&(window, gap)| self.gap(window, gap));
            self.positions.extend(&piece.positions);
        }
        (self.bits, self.last, self.elements) = (at, last, first);
        sign_mantissa.extend(weights.chunks_exact(2).map(|e| bf16::sign_mantissa(u16::from_le_bytes([e[0], e[1]]))));
    }

    fn gap(&mut self, window: u64, gap: u8) {
        self.gaps.resize(window as usize, 0);
        self.gaps.push(gap);
    }

    /// Encodes a chunk that begins at bit `at`. The bytes extend from the byte with that bit to the byte with the last
    /// bit.
    fn piece(&self, chunk: &[u8], mut at: u64, mut last: Option<u64>, mut element: u64) -> Piece {
        let block_bits = WINDOW_BITS * self.threads as u64;
        let mut piece = Piece { bytes: Vec::with_capacity(chunk.len() / 2), gaps: Vec::new(), positions: Vec::new() };
        let mut buffer = 0u64;
        let mut buffer_bits = (at % 8) as u32;
        for bytes in chunk.chunks_exact(2) {
            let is_first = |bits: u64| last.is_none_or(|last| last / bits != at / bits);
            if is_first(WINDOW_BITS) {
                piece.gaps.push((at / WINDOW_BITS, (at % WINDOW_BITS) as u8));
                if is_first(block_bits) {
                    piece.positions.push(element as u32);
                }
            }
            let word = self.code.word(bf16::exponent(u16::from_le_bytes([bytes[0], bytes[1]])));
            (last, element) = (Some(at), element + 1);
            // The buffer holds at most 31 bits here.
            buffer = buffer << word.bits | u64::from(word.value);
            buffer_bits += u32::from(word.bits);
            at += u64::from(word.bits);
            if buffer_bits >= 32 {
                buffer_bits -= 32;
                piece.bytes.extend_from_slice(&((buffer >> buffer_bits) as u32).to_be_bytes());
            }
        }
        let last_bytes = (buffer << (64 - buffer_bits).min(63) << u32::from(buffer_bits == 0)).to_be_bytes();
        piece.bytes.extend_from_slice(&last_bytes[..buffer_bits.div_ceil(8) as usize]);
        piece
    }

    /// Ends the unit: appends its last byte to `encoded`, and returns `output_positions` and `gaps`.
    ///
    /// If no code begins in the last block, because the last code of the previous block ends in it at a byte boundary,
    /// the package's positions are one entry short, and its kernel reads beyond them. The positions returned here are
    /// complete.
    pub fn finish(mut self, encoded: &mut Vec<u8>) -> (Vec<u8>, Vec<u8>) {
        let used = (self.bits % 8) as u8;
        let block_bits = WINDOW_BITS * self.threads as u64;
        if used > 0 {
            let is_first = |bits: u64| self.last.is_none_or(|last| last / bits != self.bits / bits);
            if is_first(block_bits) {
                self.positions.push(self.elements as u32);
            }
            if is_first(WINDOW_BITS) {
                self.gap(self.bits / WINDOW_BITS, (self.bits % WINDOW_BITS) as u8);
            }
            // As many bits of the end code as fit in the byte.
            let end = self.code.end().map_or(0, |end| end.aligned() >> 24) as u8;
            encoded.push(self.tail | end >> used);
        }
        let windows = self.bits.div_ceil(8).div_ceil((self.threads * WINDOW_BYTES) as u64) as usize * self.threads;
        self.positions.resize(windows / self.threads, self.elements as u32);
        self.positions.push(self.elements as u32);
        let positions = self.positions.iter().flat_map(|position| position.to_le_bytes()).collect();
        self.gaps.resize(windows, 0);
        let mut gaps = vec![0; (windows * GAP_BITS).div_ceil(8)];
        for (window, gap) in self.gaps.iter().enumerate() {
            let (byte, shift) = (window * GAP_BITS / 8, window * GAP_BITS % 8);
            let [high, low] = (u16::from(*gap) << (11 - shift)).to_be_bytes();
            gaps[byte] |= high;
            if low > 0 {
                gaps[byte + 1] |= low;
            }
        }
        (positions, gaps)
    }
}

/// The small sections of a unit, and the sizes of the large ones.
#[derive(Debug, Clone, Copy)]
pub struct Sections<'a> {
    /// The decoding tables (`luts`).
    pub luts: &'a [u8],
    /// First element of each block, then the number of elements.
    pub output_positions: &'a [u8],
    /// Where the first code of each window begins.
    pub gaps: &'a [u8],
    /// Bytes of `encoded_exponent`.
    pub encoded_bytes: u64,
    /// Bytes of `sign_mantissa`.
    pub elements: u64,
    /// Threads per block, as configured.
    pub threads: u64,
}

/// Decodes blocks of a unit. Trusts no input: every code, gap and position is checked against its neighbours.
#[derive(Debug)]
pub struct Decoder {
    /// Indexed by the first bits of a code: length << 8 | exponent; 0 for longer codes and invalid bits.
    lookup: Vec<u16>,
    /// Longer codes, in order: the bits aligned to the top, length, exponent.
    long: Vec<(u32, u8, u8)>,
    positions: Vec<u64>,
    gaps: Vec<u8>,
    encoded_bytes: u64,
    elements: u64,
    threads: usize,
}

impl Decoder {
    /// Checks the small sections, and the sizes of all sections.
    ///
    /// # Errors
    /// The sections do not match, or are not sections of DFloat11.
    pub fn new(sections: &Sections<'_>) -> Result<Self, UnitError> {
        let &Sections { encoded_bytes, elements, .. } = sections;
        let threads = usize::try_from(sections.threads).ok().filter(|threads| (1..=THREADS_MAX).contains(threads));
        let threads = threads.ok_or(UnitError::Threads { got: sections.threads })?;
        for (section, got) in [("encoded_exponent", encoded_bytes), ("sign_mantissa", elements)] {
            if got == 0 || got > COUNT_MAX {
                return Err(UnitError::Count { section, got });
            }
        }
        let BlockLayout { blocks, gaps } = BlockLayout::of(encoded_bytes, threads);
        let size = |section, expected: u64, bytes: &[u8]| match bytes.len() as u64 {
            got if got == expected => Ok(()),
            got => Err(UnitError::Size { section, expected, got }),
        };
        size("gaps", gaps, sections.gaps)?;
        let mut positions: Vec<u64> = sections
            .output_positions
            .chunks_exact(4)
            .map(|position| u64::from(u32::from_le_bytes([position[0], position[1], position[2], position[3]])))
            .collect();
        // One entry short if no code begins in the last block (see `Encoder::finish`).
        if sections.output_positions.len() as u64 == 4 * blocks {
            positions.push(elements);
        } else {
            size("output_positions", 4 * (blocks + 1), sections.output_positions)?;
        }
        // A code has at least one bit.
        let (max_codes, mut previous) = ((threads * WINDOW_BYTES * 8) as u64, 0);
        for (block, &got) in positions.iter().enumerate() {
            let bounds = match block as u64 {
                0 => (0, 0),
                last if last == blocks => (elements, elements.min(previous + max_codes)),
                // Only the last block can have no codes.
                _ => (elements.min(previous + 1), elements.min(previous + max_codes)),
            };
            if got < bounds.0 || got > bounds.1 {
                return Err(UnitError::Position { block, got, least: bounds.0, most: bounds.1 });
            }
            previous = got;
        }
        let code = Code::parse(sections.luts)?;
        let (mut lookup, mut long) = (vec![0u16; 1 << LOOKUP_BITS], Vec::new());
        for exponent in 0..=255 {
            let word = code.word(exponent);
            let first = word.aligned();
            if u32::from(word.bits) > LOOKUP_BITS {
                long.push((first, word.bits, exponent));
            } else if word.bits > 0 {
                let at = (first >> (32 - LOOKUP_BITS)) as usize;
                lookup[at..][..1 << (LOOKUP_BITS - u32::from(word.bits))]
                    .fill(u16::from(word.bits) << 8 | u16::from(exponent));
            }
        }
        long.sort_unstable();
        Ok(Self { lookup, long, positions, gaps: sections.gaps.to_vec(), encoded_bytes, elements, threads })
    }

    /// The number of thread blocks.
    pub fn blocks(&self) -> usize {
        self.positions.len() - 1
    }

    /// Returns the blocks from `first` on that hold up to `elements` elements, at least one block.
    pub fn blocks_from(&self, first: usize, elements: u64) -> Range<usize> {
        let element_limit = self.positions[first].saturating_add(elements);
        let end = self.positions.partition_point(|&position| position <= element_limit).saturating_sub(1);
        first..end.max(first + 1).min(self.blocks())
    }

    /// Returns the elements of some blocks.
    pub fn elements(&self, blocks: Range<usize>) -> Range<u64> {
        self.positions[blocks.start]..self.positions[blocks.end]
    }

    /// Returns the bytes of `encoded_exponent` that decoding some blocks needs: their own, and the end of the last
    /// code.
    pub fn encoded(&self, blocks: Range<usize>) -> Range<u64> {
        let of = |block: usize| (block * self.threads * WINDOW_BYTES) as u64;
        of(blocks.start)..(of(blocks.end) + u64::from(CODE_BITS_MAX) / 8).min(self.encoded_bytes)
    }

    /// Decodes some blocks to little-endian BF16. `encoded` are the bytes of [`Decoder::encoded`], `sign_mantissa`
    /// those of [`Decoder::elements`], and `out` has two bytes per element.
    ///
    /// # Errors
    /// The unit is damaged, or a slice has another size.
    pub fn decode(
        &self,
        blocks: Range<usize>,
        encoded: &[u8],
        sign_mantissa: &[u8],
        out: &mut [u8],
    ) -> Result<(), UnitError> {
        let (bytes, elements) = (self.encoded(blocks.clone()), self.elements(blocks.clone()));
        let count = elements.end - elements.start;
        for (section, expected, got) in [
            ("encoded_exponent", bytes.end - bytes.start, encoded.len()),
            ("sign_mantissa", count, sign_mantissa.len()),
            ("weights", 2 * count, out.len()),
        ] {
            if got as u64 != expected {
                return Err(UnitError::Size { section, expected, got: got as u64 });
            }
        }
        let (mut rest, mut tasks) = (out, Vec::with_capacity(blocks.len()));
        for block in blocks.clone() {
            let block_elements = self.elements(block..block + 1);
            let bytes_of_block = 2 * (block_elements.end - block_elements.start) as usize;
            let (piece, tail) = std::mem::take(&mut rest).split_at_mut(bytes_of_block);
            rest = tail;
            let codes = self.encoded(block..block + 1);
            let codes = &encoded[(codes.start - bytes.start) as usize..(codes.end - bytes.start) as usize];
            let first = (block_elements.start - elements.start) as usize;
            tasks.push((block, codes, &sign_mantissa[first..first + piece.len() / 2], piece));
        }
        // Reports the first error by position, not by time.
        let failed = tasks.into_par_iter().map(|(block, codes, signs, out)| self.block(block, codes, signs, out));
        failed.find_map_first(Result::err).map_or(Ok(()), Err)
    }

    /// Returns the first bit of the first code of a window, relative to the window.
    fn gap(&self, window: usize) -> u64 {
        let (byte, shift) = (window * GAP_BITS / 8, window * GAP_BITS % 8);
        let next = self.gaps.get(byte + 1).copied().unwrap_or(0);
        u64::from(u16::from_be_bytes([self.gaps[byte], next]) >> (11 - shift) & 0x1f)
    }

    fn block(&self, block: usize, encoded: &[u8], sign_mantissa: &[u8], out: &mut [u8]) -> Result<(), UnitError> {
        let (bits, first) = (WINDOW_BITS * self.threads as u64, self.positions[block]);
        let begin = bits * block as u64;
        // Bits beyond the end read as zeros.
        let codes = [encoded, &[0; 8]].concat();
        let (mut at, mut decoded) = (self.gap(block * self.threads), 0);
        if block == 0 && at != 0 {
            return Err(UnitError::Gap { window: 0, got: at, expected: 0 });
        }
        let (outputs, _) = out.as_chunks_mut::<2>();
        for index in 0..self.threads {
            let window = block * self.threads + index;
            let (start, gap) = (WINDOW_BITS * index as u64, self.gap(window));
            if decoded == outputs.len() {
                // The end code may begin here. In a block without codes, its position is not known.
                let is_end = at >= start && at - start == gap && !at.is_multiple_of(8);
                if gap != 0 && !is_end && !outputs.is_empty() {
                    return Err(UnitError::Gap { window: window as u64, got: gap, expected: 0 });
                }
                continue;
            }
            // A code has at most 32 bits, so the last one began before this window.
            if start + gap != at {
                return Err(UnitError::Gap { window: window as u64, got: gap, expected: at.saturating_sub(start) });
            }
            let end = start + WINDOW_BITS;
            while at < end && decoded < outputs.len() {
                let byte = (at / 8) as usize;
                let no_code = || UnitError::NoCode { bit: begin + at, element: first + decoded as u64 };
                let next: [u8; 8] =
                    codes.get(byte..byte + 8).and_then(|bytes| bytes.try_into().ok()).ok_or_else(no_code)?;
                let next = (u64::from_be_bytes(next) << (at % 8) >> 32) as u32;
                let (length, exponent) = match self.lookup[(next >> (32 - LOOKUP_BITS)) as usize] {
                    0 => self.search(next).ok_or_else(no_code)?,
                    entry => ((entry >> 8) as u8, entry as u8),
                };
                outputs[decoded] = bf16::join(sign_mantissa[decoded], exponent).to_le_bytes();
                decoded += 1;
                at += u64::from(length);
            }
        }
        let last = first + decoded as u64;
        if decoded < outputs.len() {
            return Err(UnitError::Position {
                block: block + 1,
                got: self.positions[block + 1],
                least: first,
                most: last,
            });
        }
        if outputs.is_empty() {
            return Ok(());
        }
        if last < self.elements {
            let next = (block + 1) * self.threads;
            // The first code of the next block begins where the last one of this block ends.
            let expected = at.wrapping_sub(bits);
            if expected != self.gap(next) {
                return Err(if at < bits {
                    UnitError::Position { block: block + 1, got: last, least: last + 1, most: self.elements }
                } else {
                    UnitError::Gap { window: next as u64, got: self.gap(next), expected }
                });
            }
        } else if (begin + at).div_ceil(8) != self.encoded_bytes {
            let (elements, expected) = (self.elements, (begin + at).div_ceil(8));
            return Err(UnitError::End { elements, expected, got: self.encoded_bytes });
        }
        Ok(())
    }

    /// Finds a code longer than [`LOOKUP_BITS`].
    fn search(&self, bits: u32) -> Option<(u8, u8)> {
        let after = self.long.partition_point(|&(first, ..)| first <= bits);
        let &(first, length, exponent) = self.long.get(after.checked_sub(1)?)?;
        ((bits ^ first) >> (CODE_BITS_MAX - length) == 0).then_some((length, exponent))
    }
}

const _: () = assert!(THREADS <= THREADS_MAX);
