//! The code of a unit: from how often exponents occur, to tables, and back.

use std::{cmp::Reverse, collections::BinaryHeap};

use unweight_format::Histogram;

use super::{CODE_BITS_MAX, FIRST_JUMP, NotEncodable, UnitError};

/// Rows of tables at most: a jump names rows 1 to 16.
const ROWS_MAX: usize = 17;

/// Bits of a code, the first one the most significant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Codeword {
    /// How many; 0 for what has no code.
    pub bits: u8,
    /// The bits of the codeword.
    pub value: u32,
}

impl Codeword {
    /// With the first bit at the top of 32.
    pub(super) fn aligned(self) -> u32 {
        self.value.checked_shl(u32::from(CODE_BITS_MAX - self.bits)).unwrap_or(0)
    }
}

/// A prefix code of exponents, and of the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    words: Box<[Codeword; 256]>,
    /// Its beginning fills the last byte. Tables do not hold it.
    end: Option<Codeword>,
}

/// A node of Huffman's tree.
enum Node {
    Exponent(u8),
    End,
    Both(usize, usize),
}

impl Code {
    /// The code that the package makes of these frequencies.
    ///
    /// Huffman's, by the frequency and then by the smallest first symbol of what is joined, where the end occurs once
    /// and comes before all exponents; the smaller half has bit 0. While a code is above 32 bits, the 2, 3, ... rarest
    /// exponents are taken to occur once.
    ///
    /// # Errors
    /// The format has no place for these exponents.
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
        for most in 2..rarest.len() {
            let (within, without) = (counts[rarest[most - 1]], counts[rarest[most]]);
            // Among those that occur once anyway it does not matter.
            if within == without && within > 1 {
                return Err(NotEncodable::Tie { count: within });
            }
            let mut fewer = *counts;
            rarest[..most].iter().for_each(|&exponent| fewer[exponent] = 1);
            if let Some(code) = huffman(&fewer) {
                return Ok(code);
            }
        }
        Err(NotEncodable::Long)
    }

    /// The code of an exponent.
    pub fn word(&self, exponent: u8) -> Codeword {
        self.words[usize::from(exponent)]
    }

    /// The code of the end; `None` of a code that was read from tables.
    pub fn end(&self) -> Option<Codeword> {
        self.end
    }

    /// Bits of all codes of so many exponents.
    pub fn bits(&self, counts: &Histogram) -> u64 {
        self.words.iter().zip(counts.counts()).map(|(word, count)| u64::from(word.bits) * count).sum()
    }

    /// Exponents in the order of their codes.
    fn ordered(&self) -> Vec<u8> {
        let mut ordered: Vec<u8> = (0..=255).filter(|&exponent| self.word(exponent).bits > 0).collect();
        ordered.sort_by_key(|&exponent| self.word(exponent).aligned());
        ordered
    }

    /// The tables, rows and lengths, that the package makes: an entry that no code begins with repeats the entry before
    /// it, also across rows.
    ///
    /// # Errors
    /// They have more rows than jumps can name, or the package itself cannot make them.
    pub fn luts(&self) -> Result<Vec<u8>, NotEncodable> {
        let ordered = self.ordered();
        // Prefixes of whole bytes, with their bytes at the top: shortest first, then in order.
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
                    // 17 rows at most.
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

    /// The code that tables hold.
    ///
    /// An exponent's or a jump's entries are where it first occurs. Whatever repeats it elsewhere only fills, and no
    /// code begins there.
    ///
    /// # Errors
    /// They are not those of a prefix code, or a row is reached twice or not at all.
    pub fn parse(luts: &[u8]) -> Result<Self, UnitError> {
        let rows = (luts.len() / 256).saturating_sub(1);
        if !luts.len().is_multiple_of(256) || !(1..=ROWS_MAX).contains(&rows) {
            let expected = (rows.clamp(1, ROWS_MAX) as u64 + 1) * 256;
            return Err(UnitError::Size { section: "luts", expected, got: luts.len() as u64 });
        }
        let lengths = &luts[rows * 256..];
        let mut words = Box::new([Codeword::default(); 256]);
        // Depth and prefix of each row, once a jump to it is seen.
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
                        return fail(entry, "a jump to a row that is not there");
                    }
                    if to <= row {
                        // A jump that was taken before only fills here.
                        entry = next;
                        continue;
                    }
                    if reached[to].is_none() {
                        if depth == 3 {
                            return fail(entry, "a jump behind four bytes; codes have 32 bits at most");
                        }
                        reached[to] = Some((depth + 1, aligned));
                    }
                } else if words[usize::from(value)].bits == 0 && lengths[usize::from(value)] > 0 {
                    let bits = lengths[usize::from(value)];
                    if bits <= 8 * depth || bits > 8 * depth + 8 {
                        return fail(entry, "an exponent whose length is not that of its row");
                    }
                    let span = 1usize << (8 * depth + 8 - bits);
                    if !entry.is_multiple_of(span) || entries[entry..entry + span].iter().any(|&other| other != value) {
                        return fail(entry, "an exponent that does not have all entries of its code");
                    }
                    next = entry + span;
                    words[usize::from(value)] = Codeword { bits, value: aligned >> (CODE_BITS_MAX - bits) };
                }
                entry = next;
            }
        }
        if let Some(entry) = (0..256).find(|&exponent| lengths[exponent] > 0 && words[exponent].bits == 0) {
            return Err(UnitError::Luts { row: rows, entry, reason: "a length of an exponent that no row has" });
        }
        Ok(Self { words, end: None })
    }
}

/// The first bytes of a code, the rest zero.
fn top_bytes(aligned: u32, bytes: u8) -> u32 {
    aligned & !(u64::from(u32::MAX) >> (8 * bytes)) as u32
}

/// Huffman's code; `None` if one of its codes is above 32 bits.
fn huffman(counts: &[u64; 256]) -> Option<Code> {
    let mut nodes = vec![Node::End];
    // Frequency, first symbol (the end is 0), node.
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
                let with = |bit| Codeword { bits: word.bits + 1, value: word.value << 1 | bit };
                open.extend([(small, with(0)), (large, with(1))]);
            }
        }
    }
    Some(code)
}
