//! The coder of a chunk with AVX2: vectors of eight states.

use std::arch::x86_64::*;

use super::{
    DecodeTables, ENTRIES, EXTRA_BITS_AT, EXTRA_SHIFT, EncodeTables, FREQUENCY_AT, OFFSET_AT, SHIFT_AT, SLACK, STATES,
    Symbols, TOTAL, WHOLE_BITS,
};

/// States of a vector.
const WIDTH: usize = 8;
const VECTORS: usize = STATES / WIDTH;
/// Bytes that a group of states reads at most, and by which its last load exceeds them.
const GROUP_BYTES: usize = 2 * STATES + 16;

/// Per set of states, for each state the position of its word among theirs.
static EXPAND: [[u8; WIDTH]; 256] = {
    let mut all = [[0; WIDTH]; 256];
    let mut set = 0;
    while set < 256 {
        let (mut state, mut position) = (0, 0);
        while state < WIDTH {
            if set >> state & 1 == 1 {
                all[set][state] = position;
                position += 1;
            }
            state += 1;
        }
        set += 1;
    }
    all
};

/// Per set of states, the bytes of eight words in the order that moves those of the set's states to the end.
static COMPRESS: [[u8; 2 * WIDTH]; 256] = {
    let mut all = [[0; 2 * WIDTH]; 256];
    let mut set = 0;
    while set < 256 {
        let (mut state, mut byte) = (0, 2 * (WIDTH - (set as u32).count_ones() as usize));
        while state < WIDTH {
            if set >> state & 1 == 1 {
                (all[set][byte], all[set][byte + 1]) = (2 * state as u8, 2 * state as u8 + 1);
                byte += 2;
            }
            state += 1;
        }
        set += 1;
    }
    all
};

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

/// Splits whole vectors of 16 elements into codes and nibbles. Returns the number of elements.
#[target_feature(enable = "avx2")]
pub fn split(symbols: Symbols, elements: &[u8], codes: &mut [u16], nibbles: &mut [u8]) -> usize {
    let word = |number: usize| _mm256_set1_epi16(number as i16);
    let (first, below) = (word(usize::from(symbols.first) << 4), word(usize::from(symbols.below) << 4));
    let head = word(usize::from(symbols.head) << 4);
    let below_and_head = word((usize::from(symbols.below) + usize::from(symbols.head)) << 4);
    let (vectors, _) = elements.as_chunks::<32>();
    let out = codes.as_chunks_mut::<16>().0.iter_mut().zip(nibbles.as_chunks_mut::<8>().0);
    let mut done = 0;
    for (elements, (codes, nibbles)) in vectors.iter().zip(out) {
        // SAFETY: 32 bytes; the load needs no alignment.
        let bits = unsafe { _mm256_loadu_si256(elements.as_ptr().cast()) };
        // As `Symbols::split`.
        let magnitude = _mm256_srli_epi16::<3>(_mm256_and_si256(bits, word(0x7fff)));
        let place = _mm256_sub_epi16(magnitude, first);
        let low = _mm256_min_epu16(place, below);
        let middle = _mm256_min_epu16(_mm256_subs_epu16(place, below), head);
        let high = _mm256_subs_epu16(place, below_and_head);
        let symbol = _mm256_add_epi16(_mm256_srli_epi16::<4>(low), _mm256_srli_epi16::<4>(high));
        let symbol = _mm256_add_epi16(symbol, middle);
        let extra = _mm256_and_si256(_mm256_add_epi16(low, high), word(15));
        let code = _mm256_or_si256(symbol, _mm256_slli_epi16::<{ EXTRA_SHIFT as i32 }>(extra));
        // SAFETY: 16 codes; the store needs no alignment.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), code) };
        let sign = _mm256_and_si256(_mm256_srli_epi16::<12>(bits), word(8));
        let nibble = _mm256_or_si256(_mm256_and_si256(bits, word(7)), sign);
        // The first of two nibbles once, the second 16 times.
        let pairs = _mm256_madd_epi16(nibble, _mm256_set1_epi32(1 | 16 << 16));
        let pairs = _mm_packus_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
        // SAFETY: eight bytes; the store needs no alignment.
        unsafe { _mm_storel_epi64(nibbles.as_mut_ptr().cast(), _mm_packus_epi16(pairs, pairs)) };
        done += 16;
    }
    done
}

/// Decodes whole groups of states while enough words are left. Returns the number of decoded elements.
#[target_feature(enable = "avx2,popcnt")]
pub fn decode(
    tables: &DecodeTables,
    states: &mut [u32; STATES],
    (words, at): (&[u8], &mut usize),
    ids: &[u8],
    codes: &mut [u16],
) -> usize {
    assert!(ids.len() == codes.len() && *at <= words.len());
    tables.check(ids);
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

/// A value for each of two vectors.
#[inline(always)]
fn both<T>(value: impl FnMut(usize) -> T) -> [T; 2] {
    std::array::from_fn(value)
}

/// Elements whose places in a table are computed at once.
const PLACES: usize = 512;

/// Encodes whole groups of states.
#[target_feature(enable = "avx2,popcnt")]
pub fn encode(
    tables: &EncodeTables,
    states: &mut [u32; STATES],
    (words, at): (&mut [u8], &mut usize),
    ids: &[u8],
    codes: &[u16],
) {
    assert!(ids.len() == codes.len() && ids.len().is_multiple_of(STATES));
    assert!(*at <= words.len() && *at >= 2 * ids.len() + SLACK, "room for all words");
    tables.check(ids);
    let low_slot = _mm256_set1_epi32(TOTAL as i32 - 1);
    let (low_word, whole_bits) = (_mm256_set1_epi32(0xffff), _mm256_set1_epi32(WHOLE_BITS as i32));
    let [mut a, mut b, mut c, mut d] = load(states);
    let (mut next, mut places) = (*at, [0u16; PLACES]);
    for (ids, codes) in ids.chunks(PLACES).zip(codes.chunks(PLACES)).rev() {
        for ((place, &id), &code) in places.iter_mut().zip(ids).zip(codes) {
            *place = u16::from(id) << 8 | code & 0xff;
        }
        for group in (0..ids.len()).step_by(STATES).rev() {
            // The last state of a group first. Two vectors at once, as the operations on each wait for one another.
            for upper in [true, false] {
                let firsts = if upper { [group + 3 * WIDTH, group + 2 * WIDTH] } else { [group + WIDTH, group] };
                let state = if upper { [d, c] } else { [b, a] };
                // Loading single pairs is faster than to gather entries and divide.
                let pairs = firsts.map(|first| {
                    let pair = |i: usize| {
                        // SAFETY: the element belongs to this group, which is inside `places`. `entries` has 256 pairs
                        // per table, and the tables were checked.
                        unsafe {
                            let place = *places.as_ptr().add(first + i);
                            tables.entries.as_ptr().add(place.into()).cast::<f64>()
                        }
                    };
                    // SAFETY: each of the loads is of 64 bits, the size of a pair, and needs no alignment.
                    let two = |i: usize| unsafe { _mm_loadh_pd(_mm_load_sd(pair(i)), pair(i + 1)) };
                    [0, 2].map(|i| _mm256_castpd_ps(_mm256_set_m128d(two(i + 4), two(i))))
                });
                let entry = pairs.map(|[even, odd]| _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(even, odd)));
                let reciprocal = pairs.map(|[even, odd]| _mm256_shuffle_ps::<0b11_01_11_01>(even, odd));
                // SAFETY: eight codes of this group, which is inside `codes`.
                let code = firsts.map(|first| unsafe { _mm_loadu_si128(codes.as_ptr().add(first).cast()) });
                let less_one = entry.map(|entry| _mm256_and_si256(entry, low_slot));
                let start = entry.map(|entry| _mm256_and_si256(_mm256_srli_epi32::<12>(entry), low_slot));
                // The compiler sees that both shifts are below 32.
                let extra_bits = entry
                    .map(|entry| _mm256_and_si256(_mm256_srli_epi32::<{ EXTRA_BITS_AT as i32 }>(entry), whole_bits));
                let most_shift = entry.map(|entry| _mm256_srli_epi32::<{ SHIFT_AT as i32 }>(entry));
                let full = both(|i| _mm256_cmpgt_epi32(_mm256_srlv_epi32(state[i], most_shift[i]), less_one[i]));
                for i in 0..2 {
                    let set = _mm256_movemask_ps(_mm256_castsi256_ps(full[i])) as usize & 255;
                    let emitted = _mm256_and_si256(state[i], low_word);
                    let emitted =
                        _mm_packus_epi32(_mm256_castsi256_si128(emitted), _mm256_extracti128_si256::<1>(emitted));
                    // SAFETY: a row of the table has 16 bytes; the load needs no alignment.
                    let order = unsafe { _mm_loadu_si128(COMPRESS[set].as_ptr().cast()) };
                    // SAFETY: `next` was at least 16 bytes plus two per element above the start, and falls by at most
                    // two bytes per element. The bytes below the emitted words are written later.
                    unsafe {
                        _mm_storeu_si128(words.as_mut_ptr().add(next - SLACK).cast(), _mm_shuffle_epi8(emitted, order));
                    }
                    next -= 2 * set.count_ones() as usize;
                }
                let shorter = both(|i| _mm256_blendv_epi8(state[i], _mm256_srli_epi32::<16>(state[i]), full[i]));
                let extra = code.map(|code| _mm256_srli_epi32::<{ EXTRA_SHIFT as i32 }>(_mm256_cvtepu16_epi32(code)));
                let above = both(|i| _mm256_or_si256(_mm256_sllv_epi32(shorter[i], extra_bits[i]), extra[i]));
                // As `RECIPROCAL` says.
                let half = above.map(|above| _mm256_cvtepi32_ps(_mm256_srli_epi32::<1>(above)));
                let quotient = both(|i| _mm256_cvttps_epi32(_mm256_mul_ps(half[i], reciprocal[i])));
                // The new state is the quotient, times the other frequencies, above the number.
                let others = less_one.map(|less_one| _mm256_xor_si256(less_one, low_slot));
                let result = both(|i| _mm256_add_epi32(above[i], _mm256_mullo_epi32(quotient[i], others[i])));
                let rest = both(|i| _mm256_sub_epi32(result[i], _mm256_slli_epi32::<12>(quotient[i])));
                let correction = both(|i| _mm256_and_si256(_mm256_cmpgt_epi32(rest[i], less_one[i]), others[i]));
                let state = both(|i| _mm256_add_epi32(_mm256_add_epi32(result[i], start[i]), correction[i]));
                if upper {
                    [d, c] = state;
                } else {
                    [b, a] = state;
                }
            }
        }
    }
    store([a, b, c, d], states);
    *at = next;
}
