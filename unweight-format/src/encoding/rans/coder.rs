//! The coder of a chunk: 32 interleaved states that share one stream of 16-bit words (`docs/format.md` A.13).
//!
//! ```text
//! elements --split--> codes (symbol, four bits) and nibbles --encode, last element first--> words
//! words --decode, first element first--> codes --join with nibbles--> elements
//! ```
//! Element `i` of a chunk belongs to state `i % 32`. A vector instruction therefore advances eight states, whose words
//! are adjacent. The portable functions define the same bytes.

use super::model::{Model, PROBABILITY_BITS, Symbols, TOTAL};

/// States of a chunk.
pub(super) const STATES: usize = 32;
/// The lowest value of a state, and its value before the first element is coded.
pub(super) const STATE_MIN: u32 = 1 << 16;
/// Bits that follow a symbol of a whole exponent.
const WHOLE_BITS: u32 = super::model::TOP_BITS;
/// Free bytes that the vector encoder needs ahead of its words.
pub(super) const SLACK: usize = 16;
/// Symbols per table in `entries`.
const ENTRIES: usize = 256;
/// A code: the symbol, and above its eight bits those that follow it.
const EXTRA_SHIFT: u32 = 8;

/// Lookup tables of a model.
#[derive(Debug)]
pub(super) struct Tables {
    /// `[tables, 4096]`: for each value of a state's lower 12 bits the symbol (8 bits), its frequency less 1 (12 bits)
    /// and by how much the value exceeds the sum of the earlier frequencies (12 bits).
    slots: Vec<u32>,
    /// `[tables, 256]`: an [`entry`] per symbol.
    entries: Vec<u32>,
    symbols: Symbols,
}

/// Position of the frequency in an element of `slots`, which is above the symbol.
const FREQUENCY_AT: u32 = 8;
/// Position of the offset in an element of `slots`.
const OFFSET_AT: u32 = FREQUENCY_AT + PROBABILITY_BITS;

/// Frequency less 1 (12 bits), sum of the earlier frequencies (12 bits), and the number of bits that follow the symbol.
const fn entry(frequency: u32, start: u32, extra_bits: u32) -> u32 {
    (frequency - 1) | start << PROBABILITY_BITS | extra_bits << (2 * PROBABILITY_BITS)
}

/// The fields of an entry.
const fn fields(entry: u32) -> (u32, u32, u32) {
    ((entry & (TOTAL - 1)) + 1, entry >> PROBABILITY_BITS & (TOTAL - 1), entry >> (2 * PROBABILITY_BITS))
}

impl Tables {
    pub fn new(model: &Model) -> Self {
        let mut slots = Vec::with_capacity(model.tables.len() * TOTAL as usize);
        let mut entries = vec![0; model.tables.len() * ENTRIES];
        for (table, entries) in model.tables.iter().zip(entries.chunks_exact_mut(ENTRIES)) {
            let mut start = 0;
            for (symbol, &frequency) in table.iter().enumerate().filter(|(_, frequency)| **frequency > 0) {
                let extra_bits = if model.symbols.is_whole(symbol) { WHOLE_BITS } else { 0 };
                entries[symbol] = entry(frequency.into(), start, extra_bits);
                let slot = symbol as u32 | u32::from(frequency - 1) << FREQUENCY_AT;
                slots.extend((0..u32::from(frequency)).map(|offset| slot | offset << OFFSET_AT));
                start += u32::from(frequency);
            }
        }
        Self { slots, entries, symbols: model.symbols }
    }
}

/// Splits elements into codes and nibbles (two per byte). An odd last element gets a byte of its own.
pub(super) fn split(symbols: Symbols, elements: &[u8], codes: &mut [u16], nibbles: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions.
        return unsafe { split_avx2(symbols, elements, codes, nibbles) };
    }
    split_any(symbols, elements, codes, nibbles);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn split_avx2(symbols: Symbols, elements: &[u8], codes: &mut [u16], nibbles: &mut [u8]) {
    split_any(symbols, elements, codes, nibbles);
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
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions.
        return unsafe { join_avx2(symbols, codes, nibbles, elements) };
    }
    join_any(symbols, codes, nibbles, elements);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn join_avx2(symbols: Symbols, codes: &mut [u16], nibbles: &[u8], elements: &mut [u8]) {
    join_any(symbols, codes, nibbles, elements);
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
    tables: &Tables,
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
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt") {
        // SAFETY: the processor has the instructions.
        return unsafe { avx2::encode(tables, states, (words, at), ids, codes) };
    }
    encode_any(tables, states, (words, at), ids, codes);
}

fn encode_any(
    tables: &Tables,
    states: &mut [u32; STATES],
    (words, at): (&mut [u8], &mut usize),
    ids: &[u8],
    codes: &[u16],
) {
    for (i, (&id, &code)) in ids.iter().zip(codes).enumerate().rev() {
        let state = &mut states[i % STATES];
        let (frequency, start, extra_bits) =
            fields(tables.entries[usize::from(id) * ENTRIES + usize::from(code & 0xff)]);
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
    tables: &Tables,
    states: &mut [u32; STATES],
    (words, at): (&[u8], &mut usize),
    ids: &[u8],
    codes: &mut [u16],
) -> bool {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt") {
        // SAFETY: the processor has the instructions.
        done = unsafe { avx2::decode(tables, states, (words, at), ids, codes) };
    }
    decode_any(tables, states, (words, at), &ids[done..], &mut codes[done..])
}

fn decode_any(
    tables: &Tables,
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

/// The same with vectors of eight states.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{
        ENTRIES, EXTRA_SHIFT, FREQUENCY_AT, OFFSET_AT, PROBABILITY_BITS, SLACK, STATES, TOTAL, Tables, WHOLE_BITS,
    };

    /// States of a vector.
    const WIDTH: usize = 8;
    const VECTORS: usize = STATES / WIDTH;
    /// Bytes that a group of states reads at most, and by which its last load exceeds them.
    const GROUP_BYTES: usize = 2 * STATES + 16;

    /// Per set of states, for each state the position of its word among theirs.
    static EXPAND: [[u8; WIDTH]; 256] = positions(false);
    /// Per set of states, for each position its state; the states of the set fill the last positions.
    static COMPRESS: [[u8; WIDTH]; 256] = positions(true);

    const fn positions(compress: bool) -> [[u8; WIDTH]; 256] {
        let mut all = [[0; WIDTH]; 256];
        let mut set = 0;
        while set < 256 {
            let mut position = if compress { WIDTH - (set as u32).count_ones() as usize } else { 0 };
            let mut state = 0;
            while state < WIDTH {
                if set >> state & 1 == 1 {
                    if compress {
                        all[set][position] = state as u8;
                    } else {
                        all[set][state] = position as u8;
                    }
                    position += 1;
                }
                state += 1;
            }
            set += 1;
        }
        all
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn indices(table: &[[u8; WIDTH]; 256], set: usize) -> __m256i {
        // SAFETY: eight bytes are loaded, from a row of the table.
        _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(table[set & 255].as_ptr().cast()) })
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn load(states: &[u32; STATES]) -> [__m256i; VECTORS] {
        // SAFETY: vector `v` has states 8v to 8v + 7; the load needs no alignment.
        std::array::from_fn(|v| unsafe { _mm256_loadu_si256(states[WIDTH * v..].as_ptr().cast()) })
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn store(vectors: [__m256i; VECTORS], states: &mut [u32; STATES]) {
        for (vector, states) in vectors.into_iter().zip(states.as_chunks_mut::<WIDTH>().0) {
            // SAFETY: eight states; the store needs no alignment.
            unsafe { _mm256_storeu_si256(states.as_mut_ptr().cast(), vector) };
        }
    }

    /// Checks that all tables exist.
    #[inline(always)]
    fn check_ids(tables: &Tables, ids: &[u8]) {
        let most = ids.iter().fold(0, |most, &id| most.max(id));
        assert!(usize::from(most) < tables.entries.len() / ENTRIES);
    }

    /// Decodes whole groups of states while enough words are left. Returns the number of decoded elements.
    #[target_feature(enable = "avx2,popcnt")]
    pub fn decode(
        tables: &Tables,
        states: &mut [u32; STATES],
        (words, at): (&[u8], &mut usize),
        ids: &[u8],
        codes: &mut [u16],
    ) -> usize {
        assert!(ids.len() == codes.len() && *at <= words.len());
        check_ids(tables, ids);
        let slots = tables.slots.as_ptr().cast::<i32>();
        // A symbol is in the head if its number less `first` is at most `last`, without a sign. Without a head, no
        // symbol's number less 256 is at most 0.
        let (first, last) = match (tables.symbols.below, tables.symbols.head_end()) {
            (below, end) if usize::from(below) < end => (below.into(), end as i32 - i32::from(below) - 1),
            _ => (ENTRIES as i32, 0),
        };
        let (first, last) = (_mm256_set1_epi32(first), _mm256_set1_epi32(last));
        let one = _mm256_set1_epi32(1);
        let low_slot = _mm256_set1_epi32(TOTAL as i32 - 1);
        let [mut a, mut b, mut c, mut d] = load(states);
        let (mut done, mut next) = (0, *at);
        // Per vector: the state after its symbol, and the code.
        macro_rules! symbol {
            ($state:ident, $v:literal) => {{
                // SAFETY: the eight bytes belong to this group, which is inside `ids`.
                let id = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(ids.as_ptr().add(done + WIDTH * $v).cast()) });
                let index = _mm256_or_si256(_mm256_slli_epi32::<12>(id), _mm256_and_si256($state, low_slot));
                // SAFETY: `slots` has 4096 words per table.
                let slot = unsafe { _mm256_i32gather_epi32::<4>(slots, index) };
                let symbol = _mm256_and_si256(slot, _mm256_set1_epi32(0xff));
                let less_one = _mm256_and_si256(_mm256_srli_epi32::<{ FREQUENCY_AT as i32 }>(slot), low_slot);
                let above = _mm256_mullo_epi32(_mm256_add_epi32(less_one, one), _mm256_srli_epi32::<12>($state));
                let above = _mm256_add_epi32(above, _mm256_srli_epi32::<{ OFFSET_AT as i32 }>(slot));
                let place = _mm256_sub_epi32(symbol, first);
                let in_head = _mm256_cmpeq_epi32(_mm256_min_epu32(place, last), place);
                let extra_bits = _mm256_andnot_si256(in_head, _mm256_set1_epi32(WHOLE_BITS as i32));
                $state = _mm256_srlv_epi32(above, extra_bits);
                let extra = _mm256_andnot_si256(_mm256_sllv_epi32(_mm256_set1_epi32(-1), extra_bits), above);
                _mm256_or_si256(symbol, _mm256_slli_epi32::<{ EXTRA_SHIFT as i32 }>(extra))
            }};
        }
        macro_rules! refill {
            ($state:ident) => {{
                let empty = _mm256_cmpeq_epi32(_mm256_srli_epi32::<16>($state), _mm256_setzero_si256());
                let set = _mm256_movemask_ps(_mm256_castsi256_ps(empty)) as usize;
                // SAFETY: the loop's condition leaves two bytes per state of the group and 16 more.
                let new = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(words.as_ptr().add(next).cast()) });
                let new = _mm256_permutevar8x32_epi32(new, indices(&EXPAND, set));
                let filled = _mm256_or_si256(_mm256_slli_epi32::<16>($state), new);
                $state = _mm256_blendv_epi8($state, filled, empty);
                next += 2 * set.count_ones() as usize;
            }};
        }
        while done + STATES <= ids.len() && next + GROUP_BYTES <= words.len() {
            let symbols = [symbol!(a, 0), symbol!(b, 1), symbol!(c, 2), symbol!(d, 3)];
            refill!(a);
            refill!(b);
            refill!(c);
            refill!(d);
            for (i, pair) in symbols.as_chunks::<2>().0.iter().enumerate() {
                let packed = _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi32(pair[0], pair[1]));
                // SAFETY: 16 codes of this group, which is inside `codes`.
                unsafe { _mm256_storeu_si256(codes.as_mut_ptr().add(done + 2 * WIDTH * i).cast(), packed) };
            }
            done += STATES;
        }
        store([a, b, c, d], states);
        *at = next;
        done
    }

    /// Encodes whole groups of states.
    #[target_feature(enable = "avx2,popcnt")]
    pub fn encode(
        tables: &Tables,
        states: &mut [u32; STATES],
        (words, at): (&mut [u8], &mut usize),
        ids: &[u8],
        codes: &[u16],
    ) {
        assert!(ids.len() == codes.len() && ids.len().is_multiple_of(STATES));
        assert!(*at <= words.len() && *at >= 2 * ids.len() + SLACK, "room for all words");
        check_ids(tables, ids);
        let entries = tables.entries.as_ptr().cast::<i32>();
        let low_slot = _mm256_set1_epi32(TOTAL as i32 - 1);
        let one = _mm256_set1_epi32(1);
        let [mut a, mut b, mut c, mut d] = load(states);
        let mut next = *at;
        macro_rules! step {
            ($state:ident, $first:expr) => {{
                // SAFETY: eight tables and eight codes of this group, which is inside both.
                let (id, code) = unsafe {
                    (
                        _mm_loadl_epi64(ids.as_ptr().add($first).cast()),
                        _mm_loadu_si128(codes.as_ptr().add($first).cast()),
                    )
                };
                let (id, code) = (_mm256_cvtepu8_epi32(id), _mm256_cvtepu16_epi32(code));
                let symbol = _mm256_and_si256(code, _mm256_set1_epi32(0xff));
                let index = _mm256_or_si256(_mm256_slli_epi32::<8>(id), symbol);
                // SAFETY: `entries` has 256 words per table.
                let entry = unsafe { _mm256_i32gather_epi32::<4>(entries, index) };
                let less_one = _mm256_and_si256(entry, low_slot);
                let frequency = _mm256_add_epi32(less_one, one);
                let start = _mm256_and_si256(_mm256_srli_epi32::<12>(entry), low_slot);
                let extra_bits = _mm256_srli_epi32::<24>(entry);
                // 2^32 less 1 if all states are low enough, as the lower bits of 2^32 are 0.
                let shift = _mm256_sub_epi32(_mm256_set1_epi32(32 - PROBABILITY_BITS as i32), extra_bits);
                let most = _mm256_sub_epi32(_mm256_sllv_epi32(frequency, shift), one);
                let low = _mm256_cmpeq_epi32(_mm256_min_epu32($state, most), $state);
                let set = !_mm256_movemask_ps(_mm256_castsi256_ps(low)) as usize & 255;
                let emitted = _mm256_and_si256($state, _mm256_set1_epi32(0xffff));
                let emitted = _mm256_permutevar8x32_epi32(emitted, indices(&COMPRESS, set));
                let emitted = _mm256_permute4x64_epi64::<0x08>(_mm256_packus_epi32(emitted, emitted));
                let emitted = _mm256_castsi256_si128(emitted);
                // SAFETY: `next` was at least 16 bytes plus two per element above the start, and falls by at most two
                // bytes per element. The bytes below the emitted words are written later.
                unsafe { _mm_storeu_si128(words.as_mut_ptr().add(next - SLACK).cast(), emitted) };
                next -= 2 * set.count_ones() as usize;
                let shorter = _mm256_blendv_epi8(_mm256_srli_epi32::<16>($state), $state, low);
                let extra = _mm256_srli_epi32::<{ EXTRA_SHIFT as i32 }>(code);
                let above = _mm256_or_si256(_mm256_sllv_epi32(shorter, extra_bits), extra);
                let (quotient, rest) = divide(above, frequency, less_one);
                $state = _mm256_add_epi32(_mm256_slli_epi32::<12>(quotient), _mm256_add_epi32(rest, start));
            }};
        }
        for group in (0..ids.len()).step_by(STATES).rev() {
            // The last state of a group first.
            step!(d, group + 3 * WIDTH);
            step!(c, group + 2 * WIDTH);
            step!(b, group + WIDTH);
            step!(a, group);
        }
        store([a, b, c, d], states);
        *at = next;
    }

    /// Quotient and rest of a division whose quotient is below 2^20.
    ///
    /// In single precision the dividend has a relative error of 2^-24, and so has the quotient, which is therefore less
    /// than 1/4 off before it is rounded down: the integer is at most one too high or too low, which the rest shows.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn divide(dividend: __m256i, divisor: __m256i, less_one: __m256i) -> (__m256i, __m256i) {
        let high = _mm256_cvtepi32_ps(_mm256_srli_epi32::<16>(dividend));
        let low = _mm256_cvtepi32_ps(_mm256_and_si256(dividend, _mm256_set1_epi32(0xffff)));
        let value = _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536.0)), low);
        let quotient = _mm256_cvttps_epi32(_mm256_div_ps(value, _mm256_cvtepi32_ps(divisor)));
        let rest = _mm256_sub_epi32(dividend, _mm256_mullo_epi32(quotient, divisor));
        let negative = _mm256_srai_epi32::<31>(rest);
        let (quotient, rest) =
            (_mm256_add_epi32(quotient, negative), _mm256_add_epi32(rest, _mm256_and_si256(negative, divisor)));
        let high = _mm256_cmpgt_epi32(rest, less_one);
        (_mm256_sub_epi32(quotient, high), _mm256_sub_epi32(rest, _mm256_and_si256(high, divisor)))
    }
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

    type Encode = fn(&Tables, &mut [u32; STATES], (&mut [u8], &mut usize), &[u8], &[u16]);
    type Decode = fn(&Tables, &mut [u32; STATES], (&[u8], &mut usize), &[u8], &mut [u16]) -> bool;

    #[test]
    fn vectors_code_like_the_portable_functions() {
        let mut random = Random::new(1);
        let model = model(&mut random);
        let tables = Tables::new(&model);
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
            for decode in [decode as Decode, decode_any] {
                let (mut states, mut at, mut back) = (states, 0, vec![0; len]);
                assert!(decode(&tables, &mut states, (&words, &mut at), &ids, &mut back));
                assert!(back == codes && at == words.len() && states == [STATE_MIN; STATES]);
            }
            // Without its last word, the block cannot be decoded.
            if let Some(cut) = words.len().checked_sub(2) {
                let (mut states, mut at, mut back) = (states, 0, vec![0; len]);
                assert!(!decode(&tables, &mut states, (&words[..cut], &mut at), &ids, &mut back));
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
