//! MatVANS: int8 matrices by rANS, 32 coders a row or 32 rows (`docs/rivals.md`).
//!
//! ```text
//! rows      a stream a row:     step t has columns 128 t .. 128 t + 128, coder c has 4 c .. 4 c + 4 of them
//! stripes   a stream 32 rows:   step t has columns 4 t .. 4 t + 4, coder c has row c
//!
//! words     u32, groups of 32 lanes x 4: word n of a group is lane n % 32, place n / 32
//!           first group: 64 words of the stream, the coders' low words, their high words
//!           then the stream's other words, zeros to the end
//! offsets   u32, in 16 bytes: where each stream begins
//! tables    [128] symbol, first and count of the 128ths of a symbol
//! ```
//! A coder's state has 64 bits. It decodes four symbols from its low 28 bits; before that, it takes a word of the
//! stream, coder by coder, if its high half is zero. The encoder goes the other way and continues with its states from
//! stream to stream.
//!
//! MatVANS' WarpPerRow is
//!
//! ```text
//! lanes     a stream a row:     steps 4 c .. 4 c + 4 have columns 512 c .. 512 c + 512, coder l has 16 of them from
//!                               16 l on, four a step
//! words     groups of 32 lanes x 8 u16: each coder has words of its own, the first two its state, high half first
//! tables    [256] of the 256ths of a symbol
//! ```
//! There a state has 32 bits, and decodes a symbol from its low 8; before that, it takes a word of its own if its high
//! half is zero. All begin and end a row with 2^16.

use rayon::prelude::*;

/// Coders of a stream.
pub const CODERS: usize = 32;
/// Words of a group.
const GROUP: usize = 4 * CODERS;
/// Words of the stream in its first group; the rest of it is states.
const BEFORE_STATES: usize = 2 * CODERS;
const QUAD: usize = 4;
/// Words of 16 bits that a coder of [`Layout::Lanes`] has in a group.
const LANE_WORDS: usize = 8;
/// State that its coders begin with.
const LANE_STATE: u32 = 1 << 16;

/// Why a matrix cannot be stored so, or is damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape that streams do not fill.
    #[error("{rows}x{cols}: rows are multiples of {row_step}, columns of {col_step}, and neither is 0")]
    Shape {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// What rows must be a multiple of.
        row_step: usize,
        /// What columns must be a multiple of.
        col_step: usize,
    },
    /// More values than tables hold.
    #[error("{got} different values; tables hold 1 to {limit}")]
    Values {
        /// Values that occur; of [`Layout::Lanes`] those from the least to the largest.
        got: usize,
        /// How many tables hold.
        limit: usize,
    },
    /// More words than offsets count.
    #[error("{words} words; offsets of 32 bits count 16 bytes each")]
    Count {
        /// Words.
        words: usize,
    },
    /// A part of another size.
    #[error("{part}: {got} elements, expected {expected}")]
    Size {
        /// The part.
        part: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// Tables that are of no distribution.
    #[error("tables, entry {entry}: not a symbol's share")]
    Tables {
        /// Entry.
        entry: usize,
    },
    /// An offset that is not behind the one before it, or not in the words.
    #[error("offsets, stream {stream}: it begins at word {begin} and ends at {end}, of {words}")]
    Offset {
        /// Stream.
        stream: usize,
        /// First word.
        begin: usize,
        /// Word behind the last.
        end: usize,
        /// All words.
        words: usize,
    },
    /// A stream that ends before its last symbol.
    #[error("stream {stream}: it ends in step {step}")]
    Short {
        /// Stream.
        stream: usize,
        /// Step.
        step: usize,
    },
    /// A coder that does not end as it began.
    #[error("stream {stream}: coder {coder} ends in state {state:#x}, not in 0x10000")]
    State {
        /// Stream.
        stream: usize,
        /// Coder.
        coder: usize,
        /// Its state.
        state: u32,
    },
    /// Words behind the end that are not padding.
    #[error("stream {stream}: {words} words are left, or are not zero")]
    Left {
        /// Stream.
        stream: usize,
        /// How many.
        words: usize,
    },
}

/// The elements that share a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A stream codes one row.
    Rows,
    /// Thirty-two rows.
    Stripes,
    /// One row, of which each coder has words of its own: WarpPerRow.
    Lanes,
}

/// A distribution of values: 128 parts of a whole, or 256 of [`Layout::Lanes`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    /// The value of each part.
    pub symbols: Vec<i8>,
    /// First part of that value.
    pub firsts: Vec<u8>,
    /// Parts of that value.
    pub counts: Vec<u8>,
}

/// A matrix as MatVANS stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub cols: usize,
    /// The elements that share a stream.
    pub layout: Layout,
    /// The tables of the symbols' distribution.
    pub tables: Tables,
    /// Where streams begin, in 16 bytes.
    pub offsets: Vec<u32>,
    /// Words of all streams, one stream after the other.
    pub words: Vec<u32>,
}

impl Layout {
    /// Parts of a whole.
    pub const fn parts(self) -> usize {
        match self {
            Self::Rows | Self::Stripes => 128,
            Self::Lanes => 256,
        }
    }

    /// What rows and columns must be multiples of.
    pub const fn steps(self) -> (usize, usize) {
        match self {
            Self::Rows => (1, QUAD * CODERS),
            Self::Stripes => (CODERS, QUAD),
            Self::Lanes => (1, 4 * QUAD * CODERS),
        }
    }

    /// Streams, and steps of each.
    fn extents(self, rows: usize, cols: usize) -> Result<(usize, usize), Error> {
        let (row_step, col_step) = self.steps();
        let whole = |extent: usize, step: usize| extent > 0 && extent.is_multiple_of(step);
        if !whole(rows, row_step) || !whole(cols, col_step) || rows.checked_mul(cols).is_none() {
            return Err(Error::Shape { rows, cols, row_step, col_step });
        }
        Ok((rows / row_step, cols * row_step / (QUAD * CODERS)))
    }

    /// First of the four elements of a coder in a step, from the stream's first.
    fn quad(self, cols: usize, step: usize, coder: usize) -> usize {
        match self {
            Self::Rows => (step * CODERS + coder) * QUAD,
            Self::Stripes => coder * cols + step * QUAD,
            Self::Lanes => (step / 4 * CODERS + coder) * 4 * QUAD + step % 4 * QUAD,
        }
    }
}

impl Tables {
    /// The distribution that the program fits to values.
    ///
    /// # Errors
    /// There are too many different ones, or none.
    pub fn fit(values: &[i8], layout: Layout) -> Result<Self, Error> {
        let mut counts = [0u64; 256];
        values.iter().for_each(|&value| counts[(i16::from(value) + 128) as usize] += 1);
        let mut occurring: Vec<usize> = (0..256).filter(|&value| counts[value] > 0).collect();
        let (&[least, ..], &[.., largest]) = (&occurring[..], &occurring[..]) else {
            return Err(Error::Values { got: 0, limit: layout.parts() });
        };
        // WarpPerRow has a table of all values in between, whose length is a byte.
        let (got, limit) = match layout {
            Layout::Rows | Layout::Stripes => (occurring.len(), 128),
            Layout::Lanes => (largest - least + 1, 255),
        };
        if got > limit {
            return Err(Error::Values { got, limit });
        }
        let parts = match layout {
            Layout::Rows | Layout::Stripes => shares_of_128(&counts, &occurring, values.len()),
            // A share is a byte: one value leaves a part to another.
            Layout::Lanes if least == largest => {
                occurring.push((least + 1) % 256);
                vec![255, 1]
            }
            Layout::Lanes => shares_of_256(&counts, &occurring, values.len()),
        };
        let (mut symbols, mut firsts, mut tabled) = (Vec::new(), Vec::new(), Vec::new());
        for (value, count) in occurring.into_iter().zip(parts) {
            let first = symbols.len();
            for _ in 0..count {
                symbols.push((value as i16 - 128) as i8);
                firsts.push(first as u8);
                tabled.push(count as u8);
            }
        }
        Ok(Self { symbols, firsts, counts: tabled })
    }

    /// Whether each part belongs to the value that it names.
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
            let own = part..part + count;
            let same = |entry: &usize| {
                (self.symbols[*entry], usize::from(self.firsts[*entry]), usize::from(self.counts[*entry]))
                    == (symbol, part, count)
            };
            if count == 0 || own.end > parts || !own.clone().all(|entry| same(&entry)) {
                return Err(Error::Tables { entry: part });
            }
            part = own.end;
        }
        Ok(())
    }

    /// First part and parts of each value that has any.
    fn shares(&self) -> [Option<(u64, u64)>; 256] {
        let mut shares = [None; 256];
        for part in 0..self.symbols.len() {
            let value = (i16::from(self.symbols[part]) + 128) as usize;
            shares[value] = Some((u64::from(self.firsts[part]), u64::from(self.counts[part])));
        }
        shares
    }
}

/// Shares of values in 128ths, as `buffered/encoder.py` finds them.
fn shares_of_128(counts: &[u64; 256], occurring: &[usize], total: usize) -> Vec<u32> {
    // In single precision, as there.
    let share = |value: &usize| (counts[*value] as f32 * 128.0 / total as f32).round_ties_even();
    let mut parts: Vec<u32> = occurring.iter().map(|value| (share(value) as u32).max(1)).collect();
    loop {
        let sum: u32 = parts.iter().sum();
        // The first of the largest.
        let largest = (0..parts.len()).rev().max_by_key(|&index| parts[index]).unwrap_or(0);
        match sum.cmp(&128) {
            std::cmp::Ordering::Less => parts[largest] += 1,
            std::cmp::Ordering::Equal => return parts,
            std::cmp::Ordering::Greater => parts[largest] -= 1,
        }
    }
}

/// Shares of two values or more in 256ths, as `matvansWarpPerRow` finds them: too many are taken from the most
/// frequent, too few given to the rarest, one each. Of values as frequent as each other, of which NumPy's order is not
/// defined, the larger counts as the more frequent.
fn shares_of_256(counts: &[u64; 256], occurring: &[usize], total: usize) -> Vec<u32> {
    let share = |value: &usize| (counts[*value] as f64 * (256.0 / total as f64)).round_ties_even();
    let mut parts: Vec<u32> = occurring.iter().map(|value| (share(value) as u32).max(1)).collect();
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse((counts[occurring[index]], index)));
    let mut excess = i64::from(parts.iter().sum::<u32>()) - 256;
    while excess > 0 {
        // As many as could give one, from the most frequent on: all that could are first.
        let reducible = parts.iter().filter(|&&part| part > 1).count().min(excess as usize);
        order[..reducible].iter().for_each(|&index| parts[index] -= 1);
        excess -= reducible as i64;
    }
    // Rounding takes half a part of a value at most.
    order.iter().rev().take(excess.unsigned_abs() as usize).for_each(|&index| parts[index] += 1);
    parts
}

/// Encodes a matrix, row by row.
///
/// # Errors
/// The shape does not fit the layout, `values` has another size, or more than 128 different values.
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
            words.extend((0..GROUP).map(|place| group[place % 4 * CODERS + place / 4]));
        }
    }
    Ok(Encoded { rows, cols, layout, tables, offsets, words })
}

/// A row of [`Layout::Lanes`].
fn encode_lanes(row: &[i8], steps: usize, shares: &[Option<(u64, u64)>; 256], words: &mut Vec<u32>) {
    let lane = |lane: usize| {
        let (mut state, mut pushed) = (LANE_STATE, Vec::new());
        for at in (0..steps).rev().map(|step| Layout::Lanes.quad(row.len(), step, lane)) {
            for value in row[at..at + QUAD].iter().rev() {
                // Every value that occurs has a share, of 255 at most.
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
    /// Bytes of words, offsets and tables.
    pub fn bytes(&self) -> u64 {
        (4 * (self.words.len() + self.offsets.len()) + 3 * self.tables.symbols.len()) as u64
    }

    /// The matrix, row by row.
    ///
    /// # Errors
    /// It is damaged.
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
        let places = (0..streams).map(bounds).collect::<Result<Vec<_>, _>>()?;
        let mut out = Vec::new();
        out.try_reserve_exact(self.rows * self.cols).map_err(|_| Error::Size {
            part: "values",
            expected: self.rows * self.cols,
            got: 0,
        })?;
        out.resize(self.rows * self.cols, 0);
        let size = out.len() / streams;
        let failed = out.par_chunks_mut(size).zip(places).enumerate().map(|(index, (out, place))| match self.layout {
            Layout::Lanes => self.lanes(index, steps, &self.words[place], out),
            Layout::Rows | Layout::Stripes => self.stream(index, steps, &self.words[place], out),
        });
        failed.find_map_first(Result::err).map_or(Ok(out), Err)
    }

    fn lanes(&self, stream: usize, steps: usize, words: &[u32], out: &mut [i8]) -> Result<(), Error> {
        let total = words.len() / GROUP * LANE_WORDS;
        let mut longest = 0;
        for coder in 0..CODERS {
            let mut taken = 0;
            let mut word = |step| {
                let n = taken % LANE_WORDS;
                let pair = words.get(taken / LANE_WORDS * GROUP + coder * QUAD + n / 2);
                taken += 1;
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
                    // 24 bits and 8 at most.
                    state = (state >> 8) * u32::from(self.tables.counts[part]) + part as u32
                        - u32::from(self.tables.firsts[part]);
                    *out = self.tables.symbols[part];
                }
            }
            // Where the first value was pushed out of the state that it began with.
            if state >> 16 == 0 {
                state = state << 16 | word(steps)?;
            }
            if state != LANE_STATE {
                return Err(Error::State { stream, coder, state });
            }
            longest = longest.max(taken);
        }
        // What is behind a coder's last word is nobody's: the program leaves there what was in memory.
        let left = total - longest;
        if left >= LANE_WORDS { Err(Error::Left { stream, words: left }) } else { Ok(()) }
    }

    fn stream(&self, stream: usize, steps: usize, words: &[u32], out: &mut [i8]) -> Result<(), Error> {
        let word = |n: usize| words[n / GROUP * GROUP + n % CODERS * 4 + n % GROUP / CODERS];
        let state =
            |coder| u64::from(word(BEFORE_STATES + coder)) | u64::from(word(BEFORE_STATES + CODERS + coder)) << 32;
        let mut states: [u64; CODERS] = std::array::from_fn(state);
        let mut taken = 0;
        let total = words.len() - BEFORE_STATES;
        // Behind the states of the first group.
        let place = |n: usize| if n < BEFORE_STATES { n } else { n + BEFORE_STATES };
        for step in 0..steps {
            for (coder, state) in states.iter_mut().enumerate() {
                if *state >> 32 == 0 {
                    if taken == total {
                        return Err(Error::Short { stream, step });
                    }
                    *state = *state << 32 | u64::from(word(place(taken)));
                    taken += 1;
                }
                let at = self.layout.quad(self.cols, step, coder);
                let parts = [0, 1, 2, 3].map(|i| (*state >> (7 * i)) as usize % 128);
                *state >>= 28;
                for (i, part) in parts.into_iter().enumerate().rev() {
                    // 36 bits and 4 times 7 at most.
                    *state = *state * u64::from(self.tables.counts[part]) + part as u64
                        - u64::from(self.tables.firsts[part]);
                    out[at + i] = self.tables.symbols[part];
                }
            }
        }
        // What a coder pushed before the stream's first symbol is not needed: it went on with its state.
        taken = total.min(taken + states.iter().filter(|state| **state >> 32 == 0).count());
        let left = total - taken;
        if left >= GROUP || (taken..total).any(|n| word(place(n)) != 0) {
            return Err(Error::Left { stream, words: left });
        }
        Ok(())
    }
}

/// The same, symbol by symbol and with whole numbers for words: the judge of the above.
pub mod oracle {
    use std::collections::VecDeque;

    use super::{CODERS, Encoded, Layout};

    /// The matrix; `None` where the words end.
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
            let mut seen = [0; CODERS];
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
                        Layout::Stripes => (stream * CODERS + coder) * encoded.cols + seen[coder] * 4 + i,
                    };
                    out[at] = encoded.tables.symbols[part];
                }
                states[coder] = high;
                seen[coder] += 1;
            }
        }
        Some(out)
    }

    /// A row of [`Layout::Lanes`]: all of a coder's words, then all of its values.
    fn lanes(encoded: &Encoded, words: &[u32], row: &mut [i8]) -> Option<()> {
        for lane in 0..CODERS {
            let own = words.chunks_exact(128).flat_map(|group| &group[4 * lane..4 * lane + 4]);
            let mut queue: VecDeque<u128> = own.flat_map(|word| [word % 65536, word / 65536]).map(u128::from).collect();
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
