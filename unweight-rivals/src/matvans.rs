//! MatVANS: int8 matrices with rANS, 32 coders per row or per 32 rows (`docs/rivals.md`).
//!
//! ```text
//! rows      one stream per row:      step t has columns 128 t .. 128 t + 128, coder c has 4 c .. 4 c + 4 of them
//! stripes   one stream per 32 rows:  step t has columns 4 t .. 4 t + 4, coder c has row c
//!
//! words     u32, groups of 32 lanes x 4: word n of a group is word n / 32 of lane n % 32
//!           first group: 64 words of the stream, the low words of the coders' states, their high words
//!           then the other words of the stream, and zeros to the end
//! offsets   u32, in units of 16 bytes: where each stream begins
//! tables    [128] for each 128th: the symbol that owns it, and that symbol's first 128th and count
//! ```
//! A coder's state has 64 bits. It decodes four symbols from its low 28 bits. Before that, if its high half is zero, it
//! reads the next word of the stream; coders do so in order. The encoder does the reverse and keeps its states from
//! stream to stream.
//!
//! The layout of MatVANS' WarpPerRow:
//!
//! ```text
//! lanes     one stream per row:      steps 4 c .. 4 c + 4 have columns 512 c .. 512 c + 512, coder l has 16 of them
//!                                    from 16 l on, four per step
//! words     groups of 32 lanes x 8 u16: each coder has its own words, of which the first two are its state, high half
//!           first
//! tables    [256] as above, in 256ths
//! ```
//! There a state has 32 bits and decodes one symbol from its low 8 bits. Before that, if its high half is zero, it
//! reads its next word. All states are 2^16 at the start and the end of a row.

use rayon::prelude::*;

/// Coders of a stream.
pub const CODERS: usize = 32;
/// Words of a group.
const GROUP: usize = 4 * CODERS;
/// Words of the stream in its first group; the other words of the group are states.
const BEFORE_STATES: usize = 2 * CODERS;
const QUAD: usize = 4;
/// 16-bit words of a [`Layout::Lanes`] coder in a group.
const LANE_WORDS: usize = 8;
/// Initial state of a [`Layout::Lanes`] coder.
const LANE_STATE: u32 = 1 << 16;

/// The reason why a matrix cannot be encoded, or is damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The shape is not a multiple of the layout's steps.
    #[error("{rows}x{cols}: rows must be a positive multiple of {row_step}, columns of {col_step}")]
    Shape {
        /// Number of rows.
        rows: usize,
        /// Number of columns.
        cols: usize,
        /// Rows must be a multiple of this.
        row_step: usize,
        /// Columns must be a multiple of this.
        col_step: usize,
    },
    /// The matrix has more values than tables can hold.
    #[error("{got} different values; tables hold 1 to {limit} values")]
    Values {
        /// Number of different values; for [`Layout::Lanes`] the length of the range from the smallest to the largest.
        got: usize,
        /// The maximum number that tables can hold.
        limit: usize,
    },
    /// The words exceed the range of offsets.
    #[error("{words} words, above the limit of 32-bit offsets in units of 16 bytes")]
    Count {
        /// Number of words.
        words: usize,
    },
    /// A part has the wrong size.
    #[error("{part}: {got} elements, expected {expected}")]
    Size {
        /// The part.
        part: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// The tables do not describe a distribution.
    #[error("tables, entry {entry}: does not match the share of its symbol")]
    Tables {
        /// Index of the entry.
        entry: usize,
    },
    /// An offset is not after the one before it, or exceeds the words.
    #[error("offsets, stream {stream}: words {begin} to {end} of {words} are not a whole stream")]
    Offset {
        /// Index of the stream.
        stream: usize,
        /// First word.
        begin: usize,
        /// End of the stream (exclusive).
        end: usize,
        /// Number of all words.
        words: usize,
    },
    /// A stream ends before its last symbol.
    #[error("stream {stream}: it ends early, in step {step}")]
    Short {
        /// Index of the stream.
        stream: usize,
        /// Step at which it ends.
        step: usize,
    },
    /// A coder does not end in its initial state.
    #[error("stream {stream}: coder {coder} ends in state {state:#x}, not in 0x10000")]
    State {
        /// Index of the stream.
        stream: usize,
        /// Index of the coder.
        coder: usize,
        /// Its state.
        state: u32,
    },
    /// Words after the end of a stream are not padding.
    #[error("stream {stream}: {words} words after its end, or words that are not zero")]
    Left {
        /// Index of the stream.
        stream: usize,
        /// Number of these words.
        words: usize,
    },
}

/// How elements are assigned to streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Each row has a stream of its own.
    Rows,
    /// Each 32 rows share a stream.
    Stripes,
    /// One stream per row, in which each coder has its own words: WarpPerRow.
    Lanes,
}

/// A distribution of values in 128ths; for [`Layout::Lanes`] in 256ths. Each 128th or 256th is a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    /// The value of each part.
    pub symbols: Vec<i8>,
    /// First part of the value that owns this part.
    pub firsts: Vec<u8>,
    /// Number of parts of that value.
    pub counts: Vec<u8>,
}

/// A matrix as MatVANS stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub cols: usize,
    /// How elements are assigned to streams.
    pub layout: Layout,
    /// The distribution of the values.
    pub tables: Tables,
    /// Where streams begin, in units of 16 bytes.
    pub offsets: Vec<u32>,
    /// Words of all streams, in order.
    pub words: Vec<u32>,
}

impl Layout {
    /// Returns the number of parts of a distribution.
    pub const fn parts(self) -> usize {
        match self {
            Self::Rows | Self::Stripes => 128,
            Self::Lanes => 256,
        }
    }

    /// Returns the numbers that rows and columns must be multiples of.
    pub const fn steps(self) -> (usize, usize) {
        match self {
            Self::Rows => (1, QUAD * CODERS),
            Self::Stripes => (CODERS, QUAD),
            Self::Lanes => (1, 4 * QUAD * CODERS),
        }
    }

    /// Returns the number of streams, and the steps of each.
    fn extents(self, rows: usize, cols: usize) -> Result<(usize, usize), Error> {
        let (row_step, col_step) = self.steps();
        let whole = |extent: usize, step: usize| extent > 0 && extent.is_multiple_of(step);
        if !whole(rows, row_step) || !whole(cols, col_step) || rows.checked_mul(cols).is_none() {
            return Err(Error::Shape { rows, cols, row_step, col_step });
        }
        Ok((rows / row_step, cols * row_step / (QUAD * CODERS)))
    }

    /// Returns the first of the four elements of a coder in a step, relative to the stream's first element.
    fn quad(self, cols: usize, step: usize, coder: usize) -> usize {
        match self {
            Self::Rows => (step * CODERS + coder) * QUAD,
            Self::Stripes => coder * cols + step * QUAD,
            Self::Lanes => (step / 4 * CODERS + coder) * 4 * QUAD + step % 4 * QUAD,
        }
    }
}

impl Tables {
    /// Fits a distribution to values, as the original program does.
    ///
    /// # Errors
    /// There are too many different values, or none.
    pub fn fit(values: &[i8], layout: Layout) -> Result<Self, Error> {
        let mut counts = [0u64; 256];
        values.iter().for_each(|&value| counts[(i16::from(value) + 128) as usize] += 1);
        let mut occurring: Vec<usize> = (0..256).filter(|&value| counts[value] > 0).collect();
        let (&[smallest, ..], &[.., largest]) = (&occurring[..], &occurring[..]) else {
            return Err(Error::Values { got: 0, limit: layout.parts() });
        };
        // The table of WarpPerRow has all values in this range, and its length is a byte.
        let (got, limit) = match layout {
            Layout::Rows | Layout::Stripes => (occurring.len(), 128),
            Layout::Lanes => (largest - smallest + 1, 255),
        };
        if got > limit {
            return Err(Error::Values { got, limit });
        }
        let parts = match layout {
            Layout::Rows | Layout::Stripes => shares_of_128(&counts, &occurring, values.len()),
            // A share is a byte, so a single value must leave one part to another.
            Layout::Lanes if smallest == largest => {
                occurring.push((smallest + 1) % 256);
                vec![255, 1]
            }
            Layout::Lanes => shares_of_256(&counts, &occurring, values.len()),
        };
        let (mut symbols, mut firsts, mut counts_by_part) = (Vec::new(), Vec::new(), Vec::new());
        for (value, count) in occurring.into_iter().zip(parts) {
            let first = symbols.len();
            for _ in 0..count {
                symbols.push((value as i16 - 128) as i8);
                firsts.push(first as u8);
                counts_by_part.push(count as u8);
            }
        }
        Ok(Self { symbols, firsts, counts: counts_by_part })
    }

    /// Checks that each value's parts are consecutive and have its first part and count.
    fn check(&self, parts: usize) -> Result<(), Error> {
        for (part, got) in
            [("symbols", self.symbols.len()), ("firsts", self.firsts.len()), ("counts", self.counts.len())]
        {
            if got != parts {
                return Err(Error::Size { part, expected: parts, got });
            }
        }
        let mut part = 0;
        while part < parts {
            let (symbol, count) = (self.symbols[part], usize::from(self.counts[part]));
            let entries = part..part + count;
            let matches = |entry: &usize| {
                (self.symbols[*entry], usize::from(self.firsts[*entry]), usize::from(self.counts[*entry]))
                    == (symbol, part, count)
            };
            if count == 0 || entries.end > parts || !entries.clone().all(|entry| matches(&entry)) {
                return Err(Error::Tables { entry: part });
            }
            part = entries.end;
        }
        Ok(())
    }

    /// Returns first part and number of parts of each value that has any.
    fn shares(&self) -> [Option<(u64, u64)>; 256] {
        let mut shares = [None; 256];
        for part in 0..self.symbols.len() {
            let value = (i16::from(self.symbols[part]) + 128) as usize;
            shares[value] = Some((u64::from(self.firsts[part]), u64::from(self.counts[part])));
        }
        shares
    }
}

/// Computes shares of values in 128ths, as `buffered/encoder.py` does.
fn shares_of_128(counts: &[u64; 256], occurring: &[usize], total: usize) -> Vec<u32> {
    // In single precision, as in the original.
    let share = |value: &usize| (counts[*value] as f32 * 128.0 / total as f32).round_ties_even();
    let mut parts: Vec<u32> = occurring.iter().map(|value| (share(value) as u32).max(1)).collect();
    loop {
        let sum: u32 = parts.iter().sum();
        // The first of the largest shares.
        let largest = (0..parts.len()).rev().max_by_key(|&index| parts[index]).unwrap_or(0);
        match sum.cmp(&128) {
            std::cmp::Ordering::Less => parts[largest] += 1,
            std::cmp::Ordering::Equal => return parts,
            std::cmp::Ordering::Greater => parts[largest] -= 1,
        }
    }
}

/// Computes shares of two or more values in 256ths, as `matvansWarpPerRow` does. Surplus parts are taken from the most
/// frequent values, missing ones given to the rarest, one each. NumPy's order of equally frequent values is undefined;
/// here the larger value counts as more frequent.
fn shares_of_256(counts: &[u64; 256], occurring: &[usize], total: usize) -> Vec<u32> {
    let share = |value: &usize| (counts[*value] as f64 * (256.0 / total as f64)).round_ties_even();
    let mut parts: Vec<u32> = occurring.iter().map(|value| (share(value) as u32).max(1)).collect();
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse((counts[occurring[index]], index)));
    let mut excess = i64::from(parts.iter().sum::<u32>()) - 256;
    while excess > 0 {
        // One part from each of the most frequent values; those with more than one part come first in `order`.
        let reducible = parts.iter().filter(|&&part| part > 1).count().min(excess as usize);
        order[..reducible].iter().for_each(|&index| parts[index] -= 1);
        excess -= reducible as i64;
    }
    // Rounding takes at most half a part from each value.
    order.iter().rev().take(excess.unsigned_abs() as usize).for_each(|&index| parts[index] += 1);
    parts
}

/// Encodes a row-major matrix.
///
/// # Errors
/// The shape does not fit the layout, `values` has another size, or there are too many different values.
pub fn encode(values: &[i8], rows: usize, cols: usize, layout: Layout) -> Result<Encoded, Error> {
    let (streams, steps) = layout.extents(rows, cols)?;
    if values.len() != rows * cols {
        return Err(Error::Size { part: "values", expected: rows * cols, got: values.len() });
    }
    let tables = Tables::fit(values, layout)?;
    let shares = tables.shares();
    let mut states = [0u64; CODERS];
    let (mut offsets, mut words) = (Vec::with_capacity(streams), Vec::new());
    for stream in values.chunks(values.len() / streams) {
        offsets.push(u32::try_from(words.len() / 4).map_err(|_| Error::Count { words: words.len() })?);
        if layout == Layout::Lanes {
            encode_lanes(stream, steps, &shares, &mut words);
            continue;
        }
        let mut pushed = Vec::new();
        for step in (0..steps).rev() {
            for coder in (0..CODERS).rev() {
                let at = layout.quad(cols, step, coder);
                // Every value that occurs has a share.
                let quad = [0, 1, 2, 3].map(|i| shares[(i16::from(stream[at + i]) + 128) as usize].unwrap_or((0, 1)));
                let product: u64 = quad.iter().map(|(_, count)| count).product();
                let state = &mut states[coder];
                if *state >> 36 >= product {
                    pushed.push(*state as u32);
                    *state >>= 32;
                } else if *state == 0 {
                    *state = product << 4;
                }
                let mut quantiles = 0;
                for (i, (first, count)) in quad.into_iter().enumerate() {
                    quantiles |= (first + *state % count) << (7 * i);
                    *state /= count;
                }
                *state = *state << 28 | quantiles;
            }
        }
        pushed.reverse();
        while pushed.len() % GROUP != BEFORE_STATES {
            pushed.push(0);
        }
        let halves = states.iter().map(|state| *state as u32).chain(states.iter().map(|state| (state >> 32) as u32));
        let rest = pushed.split_off(BEFORE_STATES);
        pushed.extend(halves);
        pushed.extend(rest);
        for group in pushed.chunks_exact(GROUP) {
            words.extend((0..GROUP).map(|index| group[index % 4 * CODERS + index / 4]));
        }
    }
    Ok(Encoded { rows, cols, layout, tables, offsets, words })
}

/// Encodes a row of [`Layout::Lanes`].
fn encode_lanes(row: &[i8], steps: usize, shares: &[Option<(u64, u64)>; 256], words: &mut Vec<u32>) {
    let lane = |lane: usize| {
        let (mut state, mut pushed) = (LANE_STATE, Vec::new());
        for at in (0..steps).rev().map(|step| Layout::Lanes.quad(row.len(), step, lane)) {
            for value in row[at..at + QUAD].iter().rev() {
                // Every value that occurs has a share, of at most 255.
                let (first, count) = shares[(i16::from(*value) + 128) as usize].unwrap_or((0, 1));
                let (first, count) = (first as u32, count as u32);
                if state >> 24 >= count {
                    pushed.push(state as u16);
                    state >>= 16;
                }
                state = ((state / count) << 8) | (first + state % count);
            }
        }
        pushed.extend([state as u16, (state >> 16) as u16]);
        pushed.reverse();
        pushed
    };
    let lanes: Vec<Vec<u16>> = (0..CODERS).map(lane).collect();
    let longest = lanes.iter().map(Vec::len).max().unwrap_or(0);
    for group in 0..longest.div_ceil(LANE_WORDS) {
        for lane in &lanes {
            let word = |n: usize| u32::from(lane.get(group * LANE_WORDS + n).copied().unwrap_or(0));
            words.extend((0..QUAD).map(|pair| word(2 * pair) | word(2 * pair + 1) << 16));
        }
    }
}

impl Encoded {
    /// Returns the bytes of words, offsets and tables.
    pub fn bytes(&self) -> u64 {
        (4 * (self.words.len() + self.offsets.len()) + 3 * self.tables.symbols.len()) as u64
    }

    /// Decodes the row-major matrix.
    ///
    /// # Errors
    /// The matrix is damaged.
    pub fn decode(&self) -> Result<Vec<i8>, Error> {
        let (streams, steps) = self.layout.extents(self.rows, self.cols)?;
        self.tables.check(self.layout.parts())?;
        if self.offsets.len() != streams {
            return Err(Error::Size { part: "offsets", expected: streams, got: self.offsets.len() });
        }
        let bounds = |stream: usize| {
            let begin = self.offsets[stream] as usize * 4;
            let end = self.offsets.get(stream + 1).map_or(self.words.len(), |&next| next as usize * 4);
            let words = self.words.len();
            let whole = end <= words && begin < end && (end - begin).is_multiple_of(GROUP);
            let first = stream > 0 || begin == 0;
            if whole && first { Ok(begin..end) } else { Err(Error::Offset { stream, begin, end, words }) }
        };
        let ranges = (0..streams).map(bounds).collect::<Result<Vec<_>, _>>()?;
        let mut out = Vec::new();
        out.try_reserve_exact(self.rows * self.cols).map_err(|_| Error::Size {
            part: "values",
            expected: self.rows * self.cols,
            got: 0,
        })?;
        out.resize(self.rows * self.cols, 0);
        let size = out.len() / streams;
        let failed = out.par_chunks_mut(size).zip(ranges).enumerate().map(|(index, (out, range))| match self.layout {
            Layout::Lanes => self.lanes(index, steps, &self.words[range], out),
            Layout::Rows | Layout::Stripes => self.stream(index, steps, &self.words[range], out),
        });
        failed.find_map_first(Result::err).map_or(Ok(out), Err)
    }

    fn lanes(&self, stream: usize, steps: usize, words: &[u32], out: &mut [i8]) -> Result<(), Error> {
        let total = words.len() / GROUP * LANE_WORDS;
        let mut longest = 0;
        for coder in 0..CODERS {
            let mut words_read = 0;
            let mut word = |step| {
                let n = words_read % LANE_WORDS;
                let pair = words.get(words_read / LANE_WORDS * GROUP + coder * QUAD + n / 2);
                words_read += 1;
                pair.map(|pair| pair >> (16 * (n % 2)) & 0xffff).ok_or(Error::Short { stream, step })
            };
            let mut state = word(0)? << 16 | word(0)?;
            for step in 0..steps {
                let at = self.layout.quad(self.cols, step, coder);
                for out in &mut out[at..at + QUAD] {
                    if state >> 16 == 0 {
                        state = state << 16 | word(step)?;
                    }
                    let part = state as usize % 256;
                    // The product has at most 24 + 8 bits.
                    state = (state >> 8) * u32::from(self.tables.counts[part]) + part as u32
                        - u32::from(self.tables.firsts[part]);
                    *out = self.tables.symbols[part];
                }
            }
            // The encoder may have pushed a word when it encoded the first value.
            if state >> 16 == 0 {
                state = state << 16 | word(steps)?;
            }
            if state != LANE_STATE {
                return Err(Error::State { stream, coder, state });
            }
            longest = longest.max(words_read);
        }
        // Words after a coder's last one are undefined: the original program leaves uninitialised memory there.
        let left = total - longest;
        if left >= LANE_WORDS { Err(Error::Left { stream, words: left }) } else { Ok(()) }
    }

    fn stream(&self, stream: usize, steps: usize, words: &[u32], out: &mut [i8]) -> Result<(), Error> {
        let word = |n: usize| words[n / GROUP * GROUP + n % CODERS * 4 + n % GROUP / CODERS];
        let state =
            |coder| u64::from(word(BEFORE_STATES + coder)) | u64::from(word(BEFORE_STATES + CODERS + coder)) << 32;
        let mut states: [u64; CODERS] = std::array::from_fn(state);
        let mut words_read = 0;
        let total = words.len() - BEFORE_STATES;
        // The states follow these words in the first group.
        let word_index = |n: usize| if n < BEFORE_STATES { n } else { n + BEFORE_STATES };
        for step in 0..steps {
            for (coder, state) in states.iter_mut().enumerate() {
                if *state >> 32 == 0 {
                    if words_read == total {
                        return Err(Error::Short { stream, step });
                    }
                    *state = *state << 32 | u64::from(word(word_index(words_read)));
                    words_read += 1;
                }
                let at = self.layout.quad(self.cols, step, coder);
                let parts = [0, 1, 2, 3].map(|i| (*state >> (7 * i)) as usize % 128);
                *state >>= 28;
                for (i, part) in parts.into_iter().enumerate().rev() {
                    // The product has at most 36 + 4 * 7 bits.
                    *state = *state * u64::from(self.tables.counts[part]) + part as u64
                        - u64::from(self.tables.firsts[part]);
                    out[at + i] = self.tables.symbols[part];
                }
            }
        }
        // Skips words that restore a coder's state from before the stream: the encoder carried it over from the
        // previous one.
        words_read = total.min(words_read + states.iter().filter(|state| **state >> 32 == 0).count());
        let left = total - words_read;
        if left >= GROUP || (words_read..total).any(|n| word(word_index(n)) != 0) {
            return Err(Error::Left { stream, words: left });
        }
        Ok(())
    }
}

/// The slow reference of the decoder: one symbol at a time, with large integers as states.
pub mod oracle {
    use std::collections::VecDeque;

    use super::{CODERS, Encoded, Layout};

    /// Decodes the matrix; `None` if the words end early.
    pub fn decode(encoded: &Encoded) -> Option<Vec<i8>> {
        let mut out = vec![0; encoded.rows * encoded.cols];
        let ends = encoded.offsets.iter().skip(1).copied().chain([(encoded.words.len() / 4) as u32]);
        for (stream, (&begin, end)) in encoded.offsets.iter().zip(ends).enumerate() {
            let words = encoded.words.get(begin as usize * 4..end as usize * 4)?;
            if encoded.layout == Layout::Lanes {
                lanes(encoded, words, &mut out[stream * encoded.cols..][..encoded.cols])?;
                continue;
            }
            let mut queue = VecDeque::new();
            for group in words.chunks_exact(128) {
                for place in 0..4 {
                    queue.extend(group.iter().skip(place).step_by(4));
                }
            }
            let states: Vec<u32> = queue.drain(64..128).copied().collect();
            let mut states: Vec<u128> = (0..CODERS)
                .map(|coder| u128::from(states[coder]) + (u128::from(states[CODERS + coder]) << 32))
                .collect();
            let mut quads_decoded = [0; CODERS];
            let rows = if encoded.layout == Layout::Rows { 1 } else { CODERS };
            for quad in 0..encoded.cols * rows / 4 {
                let coder = quad % CODERS;
                if states[coder] < 1 << 32 {
                    states[coder] = (states[coder] << 32) + u128::from(*queue.pop_front()?);
                }
                let (low, mut high) = (states[coder] % (1 << 28), states[coder] >> 28);
                for i in (0..4).rev() {
                    let part = (low >> (7 * i)) as usize % 128;
                    let (first, count) = (encoded.tables.firsts[part], encoded.tables.counts[part]);
                    high = high * u128::from(count) + (part as u128 - u128::from(first));
                    let at = match encoded.layout {
                        Layout::Rows | Layout::Lanes => stream * encoded.cols + quad * 4 + i,
                        Layout::Stripes => (stream * CODERS + coder) * encoded.cols + quads_decoded[coder] * 4 + i,
                    };
                    out[at] = encoded.tables.symbols[part];
                }
                states[coder] = high;
                quads_decoded[coder] += 1;
            }
        }
        Some(out)
    }

    /// Decodes a row of [`Layout::Lanes`], coder by coder.
    fn lanes(encoded: &Encoded, words: &[u32], row: &mut [i8]) -> Option<()> {
        for lane in 0..CODERS {
            let lane_words = words.chunks_exact(128).flat_map(|group| &group[4 * lane..4 * lane + 4]);
            let mut queue: VecDeque<u128> =
                lane_words.flat_map(|word| [word % 65536, word / 65536]).map(u128::from).collect();
            let mut state = queue.pop_front()? * 65536 + queue.pop_front()?;
            for piece in 0..encoded.cols / 512 {
                for column in 0..16 {
                    if state < 65536 {
                        state = state * 65536 + queue.pop_front()?;
                    }
                    let part = (state % 256) as usize;
                    let (first, count) = (encoded.tables.firsts[part], encoded.tables.counts[part]);
                    state = state / 256 * u128::from(count) + (part as u128 - u128::from(first));
                    row[512 * piece + 16 * lane + column] = encoded.tables.symbols[part];
                }
            }
        }
        Some(())
    }
}
