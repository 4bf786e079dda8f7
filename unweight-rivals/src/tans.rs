//! FP8 with tANS-coded pairs of exponents, as in the fused vector add of doublewordai (`docs/rivals.md`).
//!
//! ```text
//! E4M3 byte       sign | exponent (4 bits) | mantissa (3 bits)
//! codes           two exponents per symbol, e0 * 16 + e1; a table of 4096 states; streams of a fixed number of bytes
//! slabs           u32, [slab][stream] in a block of 128 streams; shorter streams have zeros before their slabs
//! states          u16 per stream    partial  u8 per stream: bits of its last slab, 0 for all
//! offsets         i32 per block, and the end: bytes
//! rest            sign and mantissa, two elements per byte: [tile][stream][8 bytes]
//! ```
//! A stream is encoded from its last pair to its first, from state 4096, into slabs from the least significant bit up.
//! So it is decoded from its last bit.

use rayon::prelude::*;

/// The number of states of the coder.
pub const STATES: u32 = 4096;
/// Streams of a block.
pub const BLOCK_STREAMS: usize = 128;
/// Bytes per stream are a multiple of this: the pairs of a tile, two bytes each.
pub const STEP: usize = 16;
/// Pairs of a tile.
const TILE: usize = STEP / 2;
/// Distance in the table between successive states of a symbol.
const STRIDE: usize = 2563;

/// Shares of the sixteen exponents in the FP8 weights of Qwen3-14B-FP8, as counted by its authors: 2.787 bits.
pub const QWEN3_14B: [f32; 16] = [
    0.0005, 0.0005, 0.0009, 0.0018, 0.0034, 0.0062, 0.0104, 0.0167, 0.0283, 0.0480, 0.0838, 0.1502, 0.2417, 0.2715,
    0.1273, 0.0088,
];

/// The reason why bytes cannot be encoded, or are damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes per stream are 0, or not a multiple of [`STEP`].
    #[error("{got} bytes per stream; expected a positive multiple of {STEP}")]
    Stream {
        /// Bytes per stream.
        got: usize,
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
    /// The slabs exceed the range of offsets.
    #[error("{bytes} bytes of slabs, above the limit of {}", i32::MAX)]
    Count {
        /// Bytes of the slabs.
        bytes: u64,
    },
    /// The shares are not a distribution.
    #[error("the share of exponent {exponent} is {share}; shares must be finite, 0 or more, and not all 0")]
    Share {
        /// Index of the exponent.
        exponent: usize,
        /// Its share, as text, so that errors with NaN compare equal.
        share: String,
    },
    /// An exponent occurs although its share is zero or close to it.
    #[error("exponent {exponent} occurs, but its share is 0 or too small")]
    Unknown {
        /// Index of the exponent.
        exponent: usize,
    },
    /// The frequencies do not fill the table.
    #[error("the frequencies sum to {got}, expected {STATES}")]
    Frequencies {
        /// Their sum.
        got: u64,
    },
    /// An offset is not after the one before it, or exceeds the slabs.
    #[error(
        "offsets, block {block}: {begin} to {end}, of {bytes} bytes; a block must have whole slabs of all its streams"
    )]
    Offset {
        /// Index of the block.
        block: usize,
        /// First byte.
        begin: i64,
        /// End of the block (exclusive).
        end: i64,
        /// Bytes of all slabs.
        bytes: u64,
    },
    /// A state is outside of the table.
    #[error("stream {stream}: state {got} is outside {STATES} to {}", 2 * STATES - 1)]
    State {
        /// Index of the stream.
        stream: usize,
        /// State found.
        got: u16,
    },
    /// The last slab of a stream has too many bits.
    #[error("stream {stream}: its last slab has {got} bits, or bits after them")]
    Partial {
        /// Index of the stream.
        stream: usize,
        /// Number of bits found.
        got: u8,
    },
    /// A stream does not end with its last pair.
    #[error(
        "stream {stream}: its bits end at pair {pair} of {pairs}, or the decoder does not end in the initial state"
    )]
    End {
        /// Index of the stream.
        stream: usize,
        /// Pair at which the bits end.
        pair: usize,
        /// Number of pairs of the stream.
        pairs: usize,
    },
}

/// FP8 bytes as the original program stores them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Bytes per stream.
    pub per_stream: usize,
    /// Frequency of each pair of exponents: its number of states.
    pub frequencies: Vec<u16>,
    /// Slabs of all blocks.
    pub slabs: Vec<u32>,
    /// The state from which each stream is decoded.
    pub states: Vec<u16>,
    /// Bits of each stream's last slab, 0 for all.
    pub partial: Vec<u8>,
    /// The first byte of each block.
    pub offsets: Vec<i32>,
    /// Signs and mantissas.
    pub rest: Vec<u8>,
}

/// Returns sign and mantissa of a byte.
fn sign_mantissa(byte: u8) -> u8 {
    byte >> 4 & 8 | byte & 7
}

/// Computes the frequency of each pair of exponents, its number of states, from the shares of single exponents.
///
/// # Errors
/// The shares are not a distribution.
pub fn frequencies(shares: &[f32; 16]) -> Result<Vec<u16>, Error> {
    let share_error = |exponent: usize| Err(Error::Share { exponent, share: shares[exponent].to_string() });
    if let Some(exponent) = shares.iter().position(|share| !share.is_finite() || *share < 0.0) {
        return share_error(exponent);
    }
    // The order of additions of the original program.
    let half_sums: [f32; 8] = std::array::from_fn(|i| shares[i] + shares[i + 8]);
    let sum = (half_sums[0] + half_sums[1] + (half_sums[2] + half_sums[3]))
        + (half_sums[4] + half_sums[5] + (half_sums[6] + half_sums[7]));
    if sum <= 0.0 || !sum.is_finite() {
        return share_error(0);
    }
    let normalized = shares.map(|share| share / sum);
    let exact: Vec<f64> =
        (0..256).map(|pair| f64::from(normalized[pair / 16] * normalized[pair % 16]) * f64::from(STATES)).collect();
    let mut rounded: Vec<i64> =
        exact.iter().map(|&w| if w == 0.0 { 0 } else { (w.round_ties_even() as i64).max(1) }).collect();
    loop {
        let missing = i64::from(STATES) - rounded.iter().sum::<i64>();
        let error = |pair: usize| match exact[pair] {
            0.0 => f64::NEG_INFINITY,
            _ if missing < 0 && rounded[pair] <= 1 => f64::NEG_INFINITY,
            exact => (exact - rounded[pair] as f64) * missing.signum() as f64,
        };
        if missing == 0 {
            // A frequency is at most 4096.
            return Ok(rounded.into_iter().map(|frequency| frequency as u16).collect());
        }
        // The first pair with the largest error.
        let largest = (0..256).rev().max_by(|&a, &b| error(a).total_cmp(&error(b))).unwrap_or(0);
        rounded[largest] += missing.signum();
    }
}

/// Returns the symbol of each slot of the table.
fn spread(frequencies: &[u16]) -> Result<Vec<u8>, Error> {
    let sum: u64 = frequencies.iter().map(|&frequency| u64::from(frequency)).sum();
    if frequencies.len() != 256 || sum != u64::from(STATES) {
        return Err(Error::Frequencies { got: sum });
    }
    let (mut slots, mut at) = (vec![0; STATES as usize], 0);
    for (symbol, &frequency) in frequencies.iter().enumerate() {
        for _ in 0..frequency {
            slots[at] = symbol as u8;
            at = (at + STRIDE) % STATES as usize;
        }
    }
    Ok(slots)
}

/// Returns for each slot its symbol, the number of bits to read, and the next state without them.
fn slots(frequencies: &[u16]) -> Result<Vec<(u8, u32, u32)>, Error> {
    let spread = spread(frequencies)?;
    let mut ranks = frequencies.to_vec();
    let slot = |symbol: u8| {
        let rank = &mut ranks[usize::from(symbol)];
        let before = u32::from(*rank);
        *rank += 1;
        let bits = before.leading_zeros() - STATES.leading_zeros();
        (symbol, bits, before << bits)
    };
    Ok(spread.into_iter().map(slot).collect())
}

/// Returns the table that kernels decode with, by slot: symbol, bits << 8, next state without the bits << 16.
///
/// # Errors
/// The frequencies do not fill the table.
pub fn table(frequencies: &[u16]) -> Result<Vec<u32>, Error> {
    Ok(slots(frequencies)?
        .into_iter()
        .map(|(symbol, bits, state)| u32::from(symbol) | bits << 8 | state << 16)
        .collect())
}

/// Encodes FP8 bytes in streams of `per_stream` bytes, with these shares of exponents.
///
/// # Errors
/// The bytes are not whole streams, or contain an exponent whose share is 0.
pub fn encode(bytes: &[u8], per_stream: usize, shares: &[f32; 16]) -> Result<Encoded, Error> {
    if per_stream == 0 || !per_stream.is_multiple_of(STEP) {
        return Err(Error::Stream { got: per_stream });
    }
    if !bytes.len().is_multiple_of(per_stream) {
        let expected = bytes.len().next_multiple_of(per_stream);
        return Err(Error::Size { part: "bytes", expected, got: bytes.len() });
    }
    let frequencies = frequencies(shares)?;
    let mut slots: Vec<Vec<u32>> = vec![Vec::new(); 256];
    spread(&frequencies)?.iter().zip(STATES..).for_each(|(&symbol, slot)| slots[usize::from(symbol)].push(slot));
    let pair_of = |pair: &[u8]| usize::from((pair[0] >> 3 & 15) << 4 | pair[1] >> 3 & 15);
    if let Some(pair) = bytes.chunks_exact(2).map(pair_of).find(|&pair| frequencies[pair] == 0) {
        let exponent = if shares[pair / 16] <= shares[pair % 16] { pair / 16 } else { pair % 16 };
        return Err(Error::Unknown { exponent });
    }
    let stream = |stream: &[u8]| {
        let (mut state, mut slabs, mut slab, mut bits) = (STATES, Vec::new(), 0u32, 0);
        for pair in stream.rchunks_exact(2) {
            let slots = &slots[pair_of(pair)];
            while state >= 2 * slots.len() as u32 {
                slab |= (state & 1) << bits;
                (bits, state) = (bits + 1, state >> 1);
                if bits == 32 {
                    slabs.push(slab);
                    (slab, bits) = (0, 0);
                }
            }
            state = slots[state as usize - slots.len()];
        }
        if bits > 0 {
            slabs.push(slab);
        }
        (slabs, state as u16, bits as u8)
    };
    let coded: Vec<_> = bytes.par_chunks(per_stream).map(stream).collect();
    let count = coded.len();
    let (mut slabs, mut offsets) = (Vec::new(), vec![0]);
    for block in coded.chunks(BLOCK_STREAMS) {
        let max_slabs = block.iter().map(|(slabs, ..)| slabs.len()).max().unwrap_or(0).max(1);
        let begin = slabs.len();
        slabs.resize(begin + max_slabs * BLOCK_STREAMS, 0);
        for (index, (stream_slabs, ..)) in block.iter().enumerate() {
            for (at, &slab) in (max_slabs - stream_slabs.len()..).zip(stream_slabs) {
                slabs[begin + at * BLOCK_STREAMS + index] = slab;
            }
        }
        let bytes = 4 * slabs.len() as u64;
        offsets.push(i32::try_from(bytes).map_err(|_| Error::Count { bytes })?);
    }
    let mut rest = vec![0; bytes.len() / 2];
    for (index, pair) in bytes.chunks_exact(2).enumerate() {
        rest[rest_index(index, per_stream / 2, count)] = sign_mantissa(pair[0]) | sign_mantissa(pair[1]) << 4;
    }
    Ok(Encoded {
        per_stream,
        frequencies,
        slabs,
        states: coded.iter().map(|&(_, state, _)| state).collect(),
        partial: coded.iter().map(|&(.., partial)| partial).collect(),
        offsets,
        rest,
    })
}

/// Returns the index of a pair's signs and mantissas.
fn rest_index(pair: usize, pairs: usize, streams: usize) -> usize {
    let (stream, pair) = (pair / pairs, pair % pairs);
    (pair / TILE * streams + stream) * TILE + pair % TILE
}

impl Encoded {
    /// Returns the bytes of all stored parts. The table is built from the frequencies.
    pub fn bytes(&self) -> u64 {
        (4 * (self.slabs.len() + self.offsets.len()) + 3 * self.states.len() + self.rest.len() + 512) as u64
    }

    /// Decodes the FP8 bytes.
    ///
    /// # Errors
    /// The parts are damaged.
    pub fn decode(&self) -> Result<Vec<u8>, Error> {
        if self.per_stream == 0 || !self.per_stream.is_multiple_of(STEP) {
            return Err(Error::Stream { got: self.per_stream });
        }
        let count = self.states.len();
        let size =
            |part, expected, got| if got == expected { Ok(()) } else { Err(Error::Size { part, expected, got }) };
        size("partial", count, self.partial.len())?;
        size("offsets", count.div_ceil(BLOCK_STREAMS) + 1, self.offsets.len())?;
        size("rest", count.saturating_mul(self.per_stream / 2), self.rest.len())?;
        let bytes = 4 * self.slabs.len() as u64;
        for (block, pair) in self.offsets.windows(2).enumerate() {
            let (begin, end) = (i64::from(pair[0]), i64::from(pair[1]));
            let whole = begin >= 0 && end > begin && (end - begin) % (4 * BLOCK_STREAMS as i64) == 0 && begin % 4 == 0;
            if !whole || end as u64 > bytes || block == 0 && begin != 0 {
                return Err(Error::Offset { block, begin, end, bytes });
            }
        }
        let table = slots(&self.frequencies)?;
        let mut out = vec![0; count * self.per_stream];
        let tasks = out.par_chunks_mut(self.per_stream).enumerate();
        let failed = tasks.map(|(stream, out)| self.stream(stream, &table, out)).find_map_first(Result::err);
        failed.map_or(Ok(out), Err)
    }

    fn stream(&self, stream: usize, table: &[(u8, u32, u32)], out: &mut [u8]) -> Result<(), Error> {
        let (block, index) = (stream / BLOCK_STREAMS, stream % BLOCK_STREAMS);
        let [begin, end] = [self.offsets[block], self.offsets[block + 1]].map(|offset| offset as usize / 4);
        let slab = |at: usize| self.slabs[begin + at * BLOCK_STREAMS + index];
        let partial = self.partial[stream];
        if partial > 31 {
            return Err(Error::Partial { stream, got: partial });
        }
        let state = self.states[stream];
        if !(STATES..2 * STATES).contains(&u32::from(state)) {
            return Err(Error::State { stream, got: state });
        }
        // The number of remaining bits, including the zeros before the stream.
        let slabs = (end - begin) / BLOCK_STREAMS;
        let mut bits_left = 32 * slabs - if partial > 0 { 32 - usize::from(partial) } else { 0 };
        // Unused bits of the last slab must be zero.
        if partial > 0 && slab(slabs - 1) >> partial != 0 {
            return Err(Error::Partial { stream, got: partial });
        }
        let (mut state, pairs) = (u32::from(state), out.len() / 2);
        for pair in 0..pairs {
            let (symbol, bits, base) = table[(state - STATES) as usize];
            let Some(rest) = bits_left.checked_sub(bits as usize) else {
                return Err(Error::End { stream, pair, pairs });
            };
            let (at, shift) = (rest / 32, rest % 32);
            // Up to 12 bits, from at most two slabs.
            let low = if bits > 0 { u64::from(slab(at)) } else { 0 };
            let high = if shift + bits as usize > 32 { u64::from(slab(at + 1)) } else { 0 };
            let value = (high << 32 | low) >> shift & ((1 << bits) - 1);
            (bits_left, state) = (rest, base | value as u32);
            let index_in_rest = rest_index(stream * pairs + pair, pairs, self.states.len());
            let byte = |exponent: u8, rest: u8| (rest & 8) << 4 | exponent << 3 | rest & 7;
            out[2 * pair] = byte(symbol >> 4, self.rest[index_in_rest] & 15);
            out[2 * pair + 1] = byte(symbol & 15, self.rest[index_in_rest] >> 4);
        }
        let is_padding = (0..bits_left.div_ceil(32)).all(|at| match bits_left - 32 * at {
            32.. => slab(at) == 0,
            bits => slab(at) & ((1 << bits) - 1) == 0,
        });
        if state == STATES && is_padding { Ok(()) } else { Err(Error::End { stream, pair: pairs, pairs }) }
    }
}

/// The slow reference of the decoder, bit by bit.
pub mod oracle {
    use super::{BLOCK_STREAMS, Encoded, STATES, spread};

    /// Returns the value of an E4M3 byte.
    pub fn value(byte: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
        let size = match exponent {
            15 if byte & 7 == 7 => f64::NAN,
            0 => mantissa / 512.0,
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if byte > 127 { -size } else { size }
    }

    /// Returns whether `got` is the sum of two E4M3 bytes, rounded to nearest even and saturated.
    pub fn is_sum(got: u8, a: u8, b: u8) -> bool {
        let sum = value(a) + value(b);
        if sum.is_nan() {
            return value(got).is_nan();
        }
        let error = |byte: u8| (value(byte) - sum).abs();
        let nearest = (0..=255u8).filter(|&byte| !value(byte).is_nan()).map(error).fold(f64::INFINITY, f64::min);
        let ties = (0..=255u8).filter(|&byte| error(byte) == nearest && value(byte) != value(got)).count();
        error(got) == nearest && (ties == 0 || got.is_multiple_of(2))
    }

    /// Decodes the FP8 bytes; `None` if the bits end early.
    pub fn decode(encoded: &Encoded) -> Option<Vec<u8>> {
        let slots = spread(&encoded.frequencies).ok()?;
        let (streams, pairs) = (encoded.states.len(), encoded.per_stream / 2);
        let mut out = Vec::new();
        for stream in 0..streams {
            let block = stream / BLOCK_STREAMS;
            let slabs =
                encoded.slabs.get(encoded.offsets[block] as usize / 4..encoded.offsets[block + 1] as usize / 4)?;
            let stream_slabs = slabs.iter().skip(stream % BLOCK_STREAMS).step_by(BLOCK_STREAMS);
            let mut bits: Vec<bool> =
                stream_slabs.flat_map(|slab| (0..32).map(move |bit| slab >> bit & 1 == 1)).collect();
            if encoded.partial[stream] > 0 {
                bits.truncate(bits.len() - 32 + usize::from(encoded.partial[stream]));
            }
            let mut state = u32::from(encoded.states[stream]);
            for pair in 0..pairs {
                let slot = (state - STATES) as usize;
                let symbol = slots[slot];
                let rank = slots[..slot].iter().filter(|&&other| other == symbol).count() as u32;
                state = u32::from(encoded.frequencies[usize::from(symbol)]) + rank;
                while state < STATES {
                    state = state << 1 | u32::from(bits.pop()?);
                }
                let rest = encoded.rest[(pair / 8 * streams + stream) * 8 + pair % 8];
                out.extend(
                    [(symbol >> 4, rest & 15), (symbol & 15, rest >> 4)].map(|(e, r)| (r >> 3) << 7 | e << 3 | r & 7),
                );
            }
        }
        Some(out)
    }
}
