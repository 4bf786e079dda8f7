//! The coder of a chunk: 32 interleaved states that share one stream of 16-bit words (`docs/format.md` A.13).
//!
//! ```text elements --split--> codes (symbol, four bits) and nibbles --encode, last element first--> words words
//! --decode, first element first--> codes --join with nibbles--> elements ``` Element `i` of a chunk belongs to state
//! `i % 32`. A vector instruction therefore advances 8 or 16 states, whose words are adjacent. The portable functions
//! define the same bytes.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use super::model::{Model, PROBABILITY_BITS, Symbols, TOTAL};

/// States of a chunk.
pub(super) const STATES: usize = 32;
/// The lowest value of a state, and its value before the first element is coded.
pub(super) const STATE_MIN: u32 = 1 << 16;
/// Bits that follow a symbol of a whole exponent.
const WHOLE_BITS: u32 = super::model::TOP_BITS;
/// Dividend of the reciprocals by which the vector encoders divide: 1 less 2^-22.
///
/// A quotient is the product of a number and a reciprocal in single precision, rounded down. Each of the three has a
/// relative error of at most 2^-24, and AVX-512's reciprocal one of 2^-28 more: together less than what this constant
/// takes away; so the quotient is never too high. As it is below 2^20, it is too low by less than a half: one at
/// most, which the rest shows. The rest is below twice the frequency, so that its lower 16 bits determine it.
///
/// AVX2 converts half of the number, rounded down, and multiplies it by [`twice_reciprocal`]: the lost half takes
/// another `1 / frequency`, a half at most, from the quotient. With frequency 1 nothing else is lost: all is exact.
const RECIPROCAL: f32 = 1.0 - 1.0 / (1 << 22) as f32;
/// Free bytes that the vector encoder needs ahead of its words.
pub(super) const SLACK: usize = 16;
/// Symbols per table in `entries`.
const ENTRIES: usize = 256;
/// A code: the symbol, and above its eight bits those that follow it.
const EXTRA_SHIFT: u32 = 8;

/// What the decoder needs of a model.
#[derive(Debug)]
pub(super) struct DecodeTables {
    /// `[tables, 4096]`: for each value of a state's lower 12 bits the symbol (8 bits), its frequency less 1 (12 bits)
    /// and by how much the value exceeds the sum of the earlier frequencies (12 bits).
    slots: Vec<u32>,
    symbols: Symbols,
}

/// What the encoder needs of a model.
#[derive(Debug)]
pub(super) struct EncodeTables {
    /// `[tables, 256]`: per symbol an [`entry`], and the bits of [`twice_reciprocal`].
    entries: Vec<[u32; 2]>,
}

/// Position of the frequency in an element of `slots`, which is above the symbol.
const FREQUENCY_AT: u32 = 8;
/// Position of the offset in an element of `slots`.
const OFFSET_AT: u32 = FREQUENCY_AT + PROBABILITY_BITS;

/// Frequency less 1 (12 bits), sum of the earlier frequencies (12 bits), the number of bits that follow the symbol
/// (3 bits) and 20 less this number (5 bits), so that vectors get both shifts by a constant one.
const fn entry(frequency: u32, start: u32, extra_bits: u32) -> u32 {
    let shift = 32 - PROBABILITY_BITS - extra_bits;
    (frequency - 1) | start << PROBABILITY_BITS | extra_bits << EXTRA_BITS_AT | shift << SHIFT_AT
}

/// Position of the number of bits that follow a symbol in an entry.
const EXTRA_BITS_AT: u32 = 2 * PROBABILITY_BITS;
/// Position of 20 less this number.
const SHIFT_AT: u32 = 27;

/// The fields of an entry: frequency, sum of the earlier ones, bits that follow.
const fn fields(entry: u32) -> (u32, u32, u32) {
    ((entry & (TOTAL - 1)) + 1, entry >> PROBABILITY_BITS & (TOTAL - 1), entry >> EXTRA_BITS_AT & WHOLE_BITS)
}

/// Twice the reciprocal of a frequency, a little too low.
fn twice_reciprocal(frequency: u32) -> f32 {
    2.0 * if frequency == 1 { 1.0 } else { RECIPROCAL / frequency as f32 }
}

impl EncodeTables {
    pub fn new(model: &Model) -> Self {
        let mut entries = vec![[0; 2]; model.tables.len() * ENTRIES];
        for (table, entries) in model.tables.iter().zip(entries.chunks_exact_mut(ENTRIES)) {
            let mut start = 0;
            for (symbol, &frequency) in table.iter().enumerate().filter(|(_, frequency)| **frequency > 0) {
                let extra_bits = if model.symbols.is_whole(symbol) { WHOLE_BITS } else { 0 };
                let frequency = u32::from(frequency);
                entries[symbol] = [entry(frequency, start, extra_bits), twice_reciprocal(frequency).to_bits()];
                start += frequency;
            }
        }
        Self { entries }
    }

    /// Checks that all tables exist, so that vectors may gather from them.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn check(&self, ids: &[u8]) {
        assert!(highest(ids) < self.entries.len() / ENTRIES);
    }
}

impl DecodeTables {
    pub fn new(model: &Model) -> Self {
        let mut slots = Vec::with_capacity(model.tables.len() * TOTAL as usize);
        for table in &model.tables {
            for (symbol, &frequency) in table.iter().enumerate().filter(|(_, frequency)| **frequency > 0) {
                let slot = symbol as u32 | u32::from(frequency - 1) << FREQUENCY_AT;
                slots.extend((0..u32::from(frequency)).map(|offset| slot | offset << OFFSET_AT));
            }
        }
        Self { slots, symbols: model.symbols }
    }

    /// As [`EncodeTables::check`].
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn check(&self, ids: &[u8]) {
        assert!(highest(ids) < self.slots.len() / TOTAL as usize);
    }
}

/// The highest of some tables.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn highest(ids: &[u8]) -> usize {
    ids.iter().fold(0, |most, &id| most.max(id)).into()
}

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt")
}

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("popcnt")
}

/// Calls a function, compiled for the vectors of this processor.
macro_rules! vectorised {
    ($function:ident($($name:ident: $type:ty),*) $(-> $result:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        if $crate::encoding::rans::coder::has_avx512() {
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            fn with_avx512($($name: $type),*) $(-> $result)? {
                $function($($name),*)
            }
            // SAFETY: the processor has the instructions.
            return unsafe { with_avx512($($name),*) };
        } else if $crate::encoding::rans::coder::has_avx2() {
            #[target_feature(enable = "avx2")]
            fn with_avx2($($name: $type),*) $(-> $result)? {
                $function($($name),*)
            }
            // SAFETY: the processor has the instructions.
            return unsafe { with_avx2($($name),*) };
        }
        $function($($name),*)
    }};
}
pub(super) use vectorised;

/// Requests memory that will be read soon, in whole lines.
pub(super) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.as_chunks::<64>().0 {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every processor of this architecture has the instruction, which changes no data and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// The place of each element's symbol in a table of counters: above its eight bits the element's context.
pub(super) fn places(symbols: Symbols, elements: &[u8], contexts: &[u8], places: &mut [u16]) {
    vectorised!(places_any(symbols: Symbols, elements: &[u8], contexts: &[u8], places: &mut [u16]));
}

#[inline(always)]
fn places_any(symbols: Symbols, elements: &[u8], contexts: &[u8], places: &mut [u16]) {
    for ((element, &context), place) in elements.as_chunks::<2>().0.iter().zip(contexts).zip(places) {
        *place = u16::from(context) << 8 | symbols.split((u16::from_le_bytes(*element) & 0x7fff) >> 3).0;
    }
}

/// Splits elements into codes and nibbles (two per byte). An odd last element gets a byte of its own.
pub(super) fn split(symbols: Symbols, elements: &[u8], codes: &mut [u16], nibbles: &mut [u8]) {
    let done = 0;
    #[cfg(target_arch = "x86_64")]
    let done = if has_avx512() {
        // SAFETY: the processor has the instructions.
        unsafe { avx512::split(symbols, elements, codes, nibbles) }
    } else if has_avx2() {
        // SAFETY: the processor has the instructions.
        unsafe { avx2::split(symbols, elements, codes, nibbles) }
    } else {
        done
    };
    split_any(symbols, &elements[2 * done..], &mut codes[done..], &mut nibbles[done / 2..]);
}

#[inline(always)]
fn split_any(symbols: Symbols, elements: &[u8], codes: &mut [u16], nibbles: &mut [u8]) {
    for (element, code) in elements.as_chunks::<2>().0.iter().zip(codes.iter_mut()) {
        let (symbol, extra) = symbols.split((u16::from_le_bytes(*element) & 0x7fff) >> 3);
        *code = symbol | extra << EXTRA_SHIFT;
    }
    let (pairs, rest) = elements.as_chunks::<4>();
    for (pair, nibbles) in pairs.iter().zip(nibbles.iter_mut()) {
        let pair = u32::from_le_bytes(*pair);
        let both = pair & 0x0007_0007 | pair >> 12 & 0x0008_0008;
        *nibbles = (both | both >> 12) as u8;
    }
    if let &[low, high] = rest {
        nibbles[pairs.len()] = low & 7 | high >> 4 & 8;
    }
}

/// Joins codes, which it replaces by magnitudes, and nibbles to elements.
pub(super) fn join(symbols: Symbols, codes: &mut [u16], nibbles: &[u8], elements: &mut [u8]) {
    vectorised!(join_any(symbols: Symbols, codes: &mut [u16], nibbles: &[u8], elements: &mut [u8]));
}

#[inline(always)]
fn join_any(symbols: Symbols, codes: &mut [u16], nibbles: &[u8], elements: &mut [u8]) {
    codes.iter_mut().for_each(|code| *code = symbols.join(*code & 0xff, *code >> EXTRA_SHIFT));
    let (pairs, rest) = codes.as_chunks::<2>();
    let (out, last) = elements.as_chunks_mut::<4>();
    for ((pair, &nibbles), out) in pairs.iter().zip(nibbles).zip(out) {
        let magnitudes = u32::from(pair[0]) | u32::from(pair[1]) << 16;
        let nibbles = u32::from(nibbles) & 0x0f | (u32::from(nibbles) & 0xf0) << 12;
        *out = (magnitudes << 3 | nibbles & 0x0007_0007 | (nibbles & 0x0008_0008) << 12).to_le_bytes();
    }
    if let &[magnitude] = rest {
        let nibble = u16::from(nibbles[pairs.len()]);
        last.copy_from_slice(&(magnitude << 3 | nibble & 7 | (nibble & 8) << 12).to_le_bytes());
    }
}

/// Encodes a block, its last element first. The words are written in front of `words[*at..]`, which has at least two
/// bytes per element and [`SLACK`] in front of `at`.
pub(super) fn encode(
    tables: &EncodeTables,
    states: &mut [u32; STATES],
    (words, at): (&mut [u8], &mut usize),
    ids: &[u8],
    codes: &[u16],
) {
    // The states of a last, incomplete group come first.
    let whole = codes.len() / STATES * STATES;
    encode_any(tables, states, (words, at), &ids[whole..], &codes[whole..]);
    let (ids, codes) = (&ids[..whole], &codes[..whole]);
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        // SAFETY: the processor has the instructions.
        return unsafe { avx512::encode(tables, states, (words, at), ids, codes) };
    } else if has_avx2() {
        // SAFETY: the processor has the instructions.
        return unsafe { avx2::encode(tables, states, (words, at), ids, codes) };
    }
    encode_any(tables, states, (words, at), ids, codes);
}

fn encode_any(
    tables: &EncodeTables,
    states: &mut [u32; STATES],
    (words, at): (&mut [u8], &mut usize),
    ids: &[u8],
    codes: &[u16],
) {
    for (i, (&id, &code)) in ids.iter().zip(codes).enumerate().rev() {
        let state = &mut states[i % STATES];
        let (frequency, start, extra_bits) =
            fields(tables.entries[usize::from(id) * ENTRIES + usize::from(code & 0xff)][0]);
        // The state after this symbol must stay below 2^32.
        if u64::from(*state) >= u64::from(frequency) << (32 - PROBABILITY_BITS - extra_bits) {
            *at -= 2;
            words[*at..*at + 2].copy_from_slice(&(*state as u16).to_le_bytes());
            *state >>= 16;
        }
        let above = *state << extra_bits | u32::from(code >> EXTRA_SHIFT);
        *state = ((above / frequency) << PROBABILITY_BITS) + above % frequency + start;
    }
}

/// Decodes a block from `words[*at..]`. `false` if it needs more words.
pub(super) fn decode(
    tables: &DecodeTables,
    states: &mut [u32; STATES],
    (words, at): (&[u8], &mut usize),
    ids: &[u8],
    codes: &mut [u16],
) -> bool {
    let done = 0;
    #[cfg(target_arch = "x86_64")]
    let done = if has_avx512() {
        // SAFETY: the processor has the instructions.
        unsafe { avx512::decode(tables, states, (words, at), ids, codes) }
    } else if has_avx2() {
        // SAFETY: the processor has the instructions.
        unsafe { avx2::decode(tables, states, (words, at), ids, codes) }
    } else {
        done
    };
    decode_any(tables, states, (words, at), &ids[done..], &mut codes[done..])
}

fn decode_any(
    tables: &DecodeTables,
    states: &mut [u32; STATES],
    (words, at): (&[u8], &mut usize),
    ids: &[u8],
    codes: &mut [u16],
) -> bool {
    for (i, (&id, code)) in ids.iter().zip(codes).enumerate() {
        let state = &mut states[i % STATES];
        let slot = tables.slots[usize::from(id) * TOTAL as usize + (*state & (TOTAL - 1)) as usize];
        let symbol = slot & 0xff;
        let frequency = (slot >> FREQUENCY_AT & (TOTAL - 1)) + 1;
        let extra_bits = if tables.symbols.is_whole(symbol as usize) { WHOLE_BITS } else { 0 };
        let above = frequency * (*state >> PROBABILITY_BITS) + (slot >> OFFSET_AT);
        let extra = above & ((1 << extra_bits) - 1);
        *code = (symbol | extra << EXTRA_SHIFT) as u16;
        *state = above >> extra_bits;
        if *state < STATE_MIN {
            let Some(word) = words.get(*at..*at + 2) else { return false };
            *state = *state << 16 | u32::from(u16::from_le_bytes([word[0], word[1]]));
            *at += 2;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        encoding::rans::model::Contexts,
        testing::{Random, Weights},
    };

    /// A model in which every symbol of some tables has a frequency, some of them the highest possible.
    fn model(random: &mut Random) -> Model {
        let symbols = Symbols { first: 0, below: 100, head: 4, above: 92 };
        let mut tables = vec![];
        for skew in [1, 4, 40] {
            let mut table = vec![1u16; symbols.count()];
            while table.iter().map(|&f| u32::from(f)).sum::<u32>() < TOTAL {
                table[random.below(symbols.count() as u64) as usize / skew] += 1;
            }
            tables.push(table);
        }
        let mut sure = vec![0; symbols.count()];
        sure[120] = TOTAL as u16;
        tables.push(sure);
        Model { symbols, contexts: Contexts { starts: 0b1111, rows: None, cols: None }, tables }
    }

    type Encode = fn(&EncodeTables, &mut [u32; STATES], (&mut [u8], &mut usize), &[u8], &[u16]);
    type Decode = fn(&DecodeTables, &mut [u32; STATES], (&[u8], &mut usize), &[u8], &mut [u16]) -> bool;

    /// The encoder for processors without AVX-512.
    #[cfg(target_arch = "x86_64")]
    fn encode_avx2(
        tables: &EncodeTables,
        states: &mut [u32; STATES],
        (words, at): (&mut [u8], &mut usize),
        ids: &[u8],
        codes: &[u16],
    ) {
        let whole = codes.len() / STATES * STATES;
        encode_any(tables, states, (words, at), &ids[whole..], &codes[whole..]);
        // SAFETY: the caller checked that the processor has the instructions.
        unsafe { avx2::encode(tables, states, (words, at), &ids[..whole], &codes[..whole]) };
    }

    /// The decoder for processors without AVX-512.
    #[cfg(target_arch = "x86_64")]
    fn decode_avx2(
        tables: &DecodeTables,
        states: &mut [u32; STATES],
        (words, at): (&[u8], &mut usize),
        ids: &[u8],
        codes: &mut [u16],
    ) -> bool {
        // SAFETY: the caller checked that the processor has the instructions.
        let done = unsafe { avx2::decode(tables, states, (words, at), ids, codes) };
        decode_any(tables, states, (words, at), &ids[done..], &mut codes[done..])
    }

    #[test]
    fn vectors_code_like_the_portable_functions() {
        #[cfg(target_arch = "x86_64")]
        for (name, has) in [("AVX2", has_avx2()), ("AVX-512", has_avx512())] {
            if !has {
                eprintln!("skipped: this processor has no {name}");
            }
        }
        let mut random = Random::new(1);
        let model = model(&mut random);
        let (tables, decode_tables) = (EncodeTables::new(&model), DecodeTables::new(&model));
        for len in [1, 31, 32, 33, 64, 1000, 4096, 4095] {
            let ids: Vec<u8> = (0..len).map(|_| random.below(4) as u8).collect();
            let codes: Vec<u16> = ids
                .iter()
                .map(|&id| {
                    let symbol = if id == 3 { 120 } else { random.below(model.symbols.count() as u64) as u16 };
                    let whole = model.symbols.is_whole(symbol.into());
                    symbol | if whole { random.below(16) as u16 } else { 0 } << EXTRA_SHIFT
                })
                .collect();
            let run = |encode: Encode| {
                let (mut states, mut words) = ([STATE_MIN; STATES], vec![0; 2 * len + SLACK]);
                let mut at = words.len();
                encode(&tables, &mut states, (&mut words, &mut at), &ids, &codes);
                assert!(states.iter().all(|&state| state >= STATE_MIN));
                (states, words[at..].to_vec())
            };
            let (states, words) = run(encode_any);
            assert!((states, words.clone()) == run(encode), "{len}");
            #[cfg(target_arch = "x86_64")]
            if has_avx2() {
                assert!((states, words.clone()) == run(encode_avx2), "{len}");
            }
            #[cfg(not(target_arch = "x86_64"))]
            let decoders = [decode as Decode, decode_any];
            #[cfg(target_arch = "x86_64")]
            let decoders =
                [decode as Decode, decode_any as Decode, if has_avx2() { decode_avx2 as Decode } else { decode_any }];
            for decode in decoders {
                let (mut states, mut at, mut back) = (states, 0, vec![0; len]);
                assert!(decode(&decode_tables, &mut states, (&words, &mut at), &ids, &mut back));
                assert!(back == codes && at == words.len() && states == [STATE_MIN; STATES]);
            }
            // Without its last word, the block cannot be decoded.
            if let Some(cut) = words.len().checked_sub(2) {
                let (mut states, mut at, mut back) = (states, 0, vec![0; len]);
                assert!(!decode(&decode_tables, &mut states, (&words[..cut], &mut at), &ids, &mut back));
            }
        }
    }

    /// States next to multiples of each frequency, where a quotient that is too high or too low by two would show.
    #[test]
    fn quotients_are_exact_at_their_edges() {
        let mut random = Random::new(5);
        let symbols = Symbols { first: 0, below: 0, head: 16, above: 0 };
        for frequency in 1..TOTAL {
            let mut table = vec![0; symbols.count()];
            (table[0], table[1]) = (frequency as u16, (TOTAL - frequency) as u16);
            let contexts = Contexts { starts: 1, rows: None, cols: None };
            let tables = EncodeTables::new(&Model { symbols, contexts, tables: vec![table] });
            let most = u64::from(frequency) << (32 - PROBABILITY_BITS);
            let states: [u32; STATES] = std::array::from_fn(|i| {
                let shift = i / 8 * 2 + random.below(2) as usize;
                let multiple = (most >> shift) / u64::from(frequency) - random.below(3);
                let state = multiple * u64::from(frequency) - 1 + i as u64 % 2;
                state.clamp(STATE_MIN.into(), most - 1) as u32
            });
            let run = |encode: Encode| {
                let (mut states, mut words, mut at) = (states, [0; 2 * STATES + SLACK], 2 * STATES + SLACK);
                encode(&tables, &mut states, (&mut words, &mut at), &[0; STATES], &[0; STATES]);
                (states, at)
            };
            let expected = run(encode_any);
            assert_eq!(run(encode), expected, "{frequency}");
            #[cfg(target_arch = "x86_64")]
            if has_avx2() {
                assert_eq!(run(encode_avx2), expected, "{frequency}");
            }
        }
    }

    #[test]
    fn elements_split_and_join() {
        let all = Symbols { first: 0, below: 255, head: 0, above: 1 };
        let some = Symbols { first: 100, below: 10, head: 6, above: 20 };
        for (symbols, elements) in [(all, 1 << 16), (all, 1), (all, 2), (some, 31), (some, 33), (some, 40_000)] {
            let mut weights = Weights::AllPatterns.bytes(elements, 2);
            if symbols == some {
                let of = |pattern: u16| pattern & 0x807f | (100 + (pattern >> 7 & 0xff) % 36) << 7;
                weights.as_chunks_mut::<2>().0.iter_mut().for_each(|w| *w = of(u16::from_le_bytes(*w)).to_le_bytes());
            }
            let (mut codes, mut nibbles) = (vec![0; elements], vec![0; elements.div_ceil(2)]);
            split(symbols, &weights, &mut codes, &mut nibbles);
            let (mut codes_any, mut nibbles_any) = (vec![0; elements], vec![0; elements.div_ceil(2)]);
            split_any(symbols, &weights, &mut codes_any, &mut nibbles_any);
            assert!(codes == codes_any && nibbles == nibbles_any);
            let mut back = vec![0; weights.len()];
            join(symbols, &mut codes, &nibbles, &mut back);
            assert!(back == weights);
            join_any(symbols, &mut codes_any, &nibbles, &mut back);
            assert!(back == weights);
        }
    }
}
