//! The code of a unit: from frequencies of exponents to a code, to tables, and back.

use std::{cmp::Reverse, collections::BinaryHeap};

use unweight_format::Histogram;

use super::{CODE_BITS_MAX, FIRST_JUMP, NotEncodable, UnitError};

/// The maximum number of table rows: jumps address rows 1 to 16.
const ROWS_MAX: usize = 17;

/// A code word.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Codeword {
    /// Number of bits; 0 for a symbol without a code.
    pub bits: u8,
    /// The bits, right-aligned; the first one is the most significant.
    pub value: u32,
}

impl Codeword {
    /// Returns the bits aligned to the top of 32 bits.
    pub(super) fn aligned(self) -> u32 {
        self.value.checked_shl(u32::from(CODE_BITS_MAX - self.bits)).unwrap_or(0)
    }
}

/// A prefix code of the exponents and of an end symbol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    words: Box<[Codeword; 256]>,
    /// The code of the end symbol, whose first bits fill the last byte. Tables do not contain it.
    end: Option<Codeword>,
}

/// A node of Huffman's tree.
enum Node {
    Exponent(u8),
    End,
    Both(usize, usize),
}

impl Code {
    /// Returns the code that the package makes from these frequencies.
    ///
    /// A Huffman code. Nodes are joined in order of frequency, then of their smallest first symbol; the smaller one has
    /// bit 0. The end symbol has frequency 1 and precedes all exponents. While a code is above 32 bits, the frequencies
    /// of the 2, 3, ... rarest exponents are set to 1.
    ///
    /// # Errors
    /// The format cannot hold these exponents.
    pub fn of(counts: &Histogram) -> Result<Self, NotEncodable> {
        let counts = counts.counts();
        let Some(last) = counts.iter().rposition(|&count| count > 0) else { return Err(NotEncodable::Empty) };
        if last >= usize::from(FIRST_JUMP) {
            return Err(NotEncodable::Exponent { exponent: last as u8, count: counts[last] });
        }
        if let Some(code) = huffman(counts) {
            return Ok(code);
        }
        let mut rarest: Vec<usize> = (0..256).filter(|&exponent| counts[exponent] > 0).collect();
        rarest.sort_by_key(|&exponent| counts[exponent]);
        for count in 2..rarest.len() {
            let (last_lowered, next) = (counts[rarest[count - 1]], counts[rarest[count]]);
            // The choice does not matter among exponents that have frequency 1 anyway.
            if last_lowered == next && last_lowered > 1 {
                return Err(NotEncodable::Tie { count: last_lowered });
            }
            let mut lowered = *counts;
            rarest[..count].iter().for_each(|&exponent| lowered[exponent] = 1);
            if let Some(code) = huffman(&lowered) {
                return Ok(code);
            }
        }
        Err(NotEncodable::Long)
    }

    /// Returns the code of an exponent.
    pub fn word(&self, exponent: u8) -> Codeword {
        self.words[usize::from(exponent)]
    }

    /// Returns the code of the end symbol; `None` for a code that was parsed from tables.
    pub fn end(&self) -> Option<Codeword> {
        self.end
    }

    /// Returns the total bits of the codes for these counts.
    pub fn bits(&self, counts: &Histogram) -> u64 {
        self.words.iter().zip(counts.counts()).map(|(word, count)| u64::from(word.bits) * count).sum()
    }

    /// Returns the exponents in the order of their codes.
    fn ordered(&self) -> Vec<u8> {
        let mut ordered: Vec<u8> = (0..=255).filter(|&exponent| self.word(exponent).bits > 0).collect();
        ordered.sort_by_key(|&exponent| self.word(exponent).aligned());
        ordered
    }

    /// Returns the tables, rows and lengths, that the package makes. An entry that no code begins with repeats the
    /// previous entry, also across rows.
    ///
    /// # Errors
    /// The tables have more rows than jumps can address, or the package itself cannot make them.
    pub fn luts(&self) -> Result<Vec<u8>, NotEncodable> {
        let ordered = self.ordered();
        // Prefixes of whole bytes, aligned to the top: shortest first, then in order.
        let mut prefixes: Vec<(u8, u32)> = vec![(0, 0)];
        prefixes.extend(ordered.iter().map(|&exponent| {
            let word = self.word(exponent);
            let depth = (word.bits - 1) / 8;
            (depth, top_bytes(word.aligned(), depth))
        }));
        prefixes.sort_unstable();
        prefixes.dedup();
        if prefixes.len() > ROWS_MAX {
            return Err(NotEncodable::Rows { got: prefixes.len(), limit: ROWS_MAX });
        }
        let mut luts = vec![0; (prefixes.len() + 1) * 256];
        let mut before = None;
        for (row, &(depth, prefix)) in prefixes.iter().enumerate() {
            let mut begins = [None; 256];
            for &exponent in &ordered {
                let word = self.word(exponent);
                let at = (word.bits - 1) / 8;
                if at < depth || top_bytes(word.aligned(), depth) != prefix {
                    continue;
                }
                let entry = word.aligned() >> (24 - 8 * depth) & 0xff;
                begins[entry as usize] = Some(if at == depth {
                    exponent
                } else {
                    let next = (depth + 1, top_bytes(word.aligned(), depth + 1));
                    let row = prefixes.binary_search(&next);
                    let row = row.map_err(|_| NotEncodable::NoRow { exponent, bits: 8 * (depth + 1) })?;
                    // There are at most 17 rows.
                    (256 - row) as u8
                });
            }
            for (entry, begins) in begins.into_iter().enumerate() {
                before = begins.or(before);
                luts[row * 256 + entry] = before.ok_or(NotEncodable::NoFirst)?;
            }
        }
        let lengths = prefixes.len() * 256;
        (0..256).for_each(|exponent| luts[lengths + exponent] = self.words[exponent].bits);
        Ok(luts)
    }

    /// Parses the code from tables.
    ///
    /// The valid entries of an exponent or a jump are those where it first occurs. Later repetitions are filler, and no
    /// code begins there.
    ///
    /// # Errors
    /// The tables are not those of a prefix code, or a row is reached twice or not at all.
    pub fn parse(luts: &[u8]) -> Result<Self, UnitError> {
        let rows = (luts.len() / 256).saturating_sub(1);
        if !luts.len().is_multiple_of(256) || !(1..=ROWS_MAX).contains(&rows) {
            let expected = (rows.clamp(1, ROWS_MAX) as u64 + 1) * 256;
            return Err(UnitError::Size { section: "luts", expected, got: luts.len() as u64 });
        }
        let lengths = &luts[rows * 256..];
        let mut words = Box::new([Codeword::default(); 256]);
        // Depth and prefix of each row; `None` until a jump to the row is found.
        let mut reached: Vec<Option<(u8, u32)>> = vec![None; rows];
        reached[0] = Some((0, 0));
        for row in 0..rows {
            let fail = |entry, reason| Err(UnitError::Luts { row, entry, reason });
            let Some((depth, prefix)) = reached[row] else { return fail(0, "no jump leads to this row") };
            let entries = &luts[row * 256..][..256];
            let mut entry = 0;
            while entry < 256 {
                let value = entries[entry];
                let aligned = prefix | (entry as u32) << (24 - 8 * depth);
                let mut next = entry + 1;
                if value >= FIRST_JUMP {
                    let to = 256 - usize::from(value);
                    if to >= rows {
                        return fail(entry, "a jump to a missing row");
                    }
                    if to <= row {
                        // A repeated jump is filler.
                        entry = next;
                        continue;
                    }
                    if reached[to].is_none() {
                        if depth == 3 {
                            return fail(entry, "a jump after four bytes; codes have at most 32 bits");
                        }
                        reached[to] = Some((depth + 1, aligned));
                    }
                } else if words[usize::from(value)].bits == 0 && lengths[usize::from(value)] > 0 {
                    let bits = lengths[usize::from(value)];
                    if bits <= 8 * depth || bits > 8 * depth + 8 {
                        return fail(entry, "an exponent whose code length does not match its row");
                    }
                    let span = 1usize << (8 * depth + 8 - bits);
                    if !entry.is_multiple_of(span) || entries[entry..entry + span].iter().any(|&other| other != value) {
                        return fail(entry, "an exponent without all entries of its code");
                    }
                    next = entry + span;
                    words[usize::from(value)] = Codeword { bits, value: aligned >> (CODE_BITS_MAX - bits) };
                }
                entry = next;
            }
        }
        if let Some(entry) = (0..256).find(|&exponent| lengths[exponent] > 0 && words[exponent].bits == 0) {
            return Err(UnitError::Luts {
                row: rows,
                entry,
                reason: "an exponent with a code length, but without a row",
            });
        }
        Ok(Self { words, end: None })
    }
}

/// Returns the first bytes of a code, with the other bytes zero.
fn top_bytes(aligned: u32, bytes: u8) -> u32 {
    aligned & !(u64::from(u32::MAX) >> (8 * bytes)) as u32
}

/// Returns the Huffman code; `None` if a code is above 32 bits.
fn huffman(counts: &[u64; 256]) -> Option<Code> {
    let mut nodes = vec![Node::End];
    // Frequency, first symbol (the end symbol is 0), index of the node.
    let mut heap = BinaryHeap::from([Reverse((1u64, 0u16, 0usize))]);
    for (exponent, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        heap.push(Reverse((count, exponent as u16 + 1, nodes.len())));
        nodes.push(Node::Exponent(exponent as u8));
    }
    while let (Some(Reverse(small)), Some(Reverse(large))) = (heap.pop(), heap.pop()) {
        heap.push(Reverse((small.0 + large.0, small.1, nodes.len())));
        nodes.push(Node::Both(small.2, large.2));
    }
    let mut code = Code { words: Box::new([Codeword::default(); 256]), end: None };
    let mut open = vec![(nodes.len() - 1, Codeword::default())];
    while let Some((node, word)) = open.pop() {
        match nodes[node] {
            Node::Exponent(exponent) => code.words[usize::from(exponent)] = word,
            Node::End => code.end = Some(word),
            Node::Both(..) if word.bits == CODE_BITS_MAX => return None,
            Node::Both(small, large) => {
                let append = |bit| Codeword { bits: word.bits + 1, value: word.value << 1 | bit };
                open.extend([(small, append(0)), (large, append(1))]);
            }
        }
    }
    Some(code)
}
