//! The coder of a chunk with AVX-512: vectors of 16 states.

use std::arch::x86_64::*;

use super::{
    DecodeTables, EXTRA_BITS_AT, EXTRA_SHIFT, EncodeTables, FREQUENCY_AT, OFFSET_AT, RECIPROCAL, SHIFT_AT, STATES,
    Symbols, TOTAL, WHOLE_BITS,
};

/// States of a vector.
const WIDTH: usize = 16;
/// Bytes that a group of states reads at most.
const GROUP_BYTES: usize = 2 * STATES;

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load(states: &[u32; STATES]) -> [__m512i; 2] {
    // SAFETY: the vectors are the states; loads need no alignment.
    [0, WIDTH].map(|first| unsafe { _mm512_loadu_si512(states[first..].as_ptr().cast()) })
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn store(vectors: [__m512i; 2], states: &mut [u32; STATES]) {
    for (vector, states) in vectors.into_iter().zip(states.as_chunks_mut::<WIDTH>().0) {
        // SAFETY: 16 states; the store needs no alignment.
        unsafe { _mm512_storeu_si512(states.as_mut_ptr().cast(), vector) };
    }
}

/// Splits whole vectors of 32 elements into codes and nibbles. Returns the number of elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub fn split(symbols: Symbols, elements: &[u8], codes: &mut [u16], nibbles: &mut [u8]) -> usize {
    let word = |number: usize| _mm512_set1_epi16(number as i16);
    let (first, below) = (word(usize::from(symbols.first) << 4), word(usize::from(symbols.below) << 4));
    let head = word(usize::from(symbols.head) << 4);
    let below_and_head = word((usize::from(symbols.below) + usize::from(symbols.head)) << 4);
    let (vectors, _) = elements.as_chunks::<64>();
    let out = codes.as_chunks_mut::<32>().0.iter_mut().zip(nibbles.as_chunks_mut::<16>().0);
    let mut done = 0;
    for (elements, (codes, nibbles)) in vectors.iter().zip(out) {
        // SAFETY: 64 bytes; the load needs no alignment.
        let bits = unsafe { _mm512_loadu_si512(elements.as_ptr().cast()) };
        // As `Symbols::split`.
        let magnitude = _mm512_srli_epi16::<3>(_mm512_and_si512(bits, word(0x7fff)));
        let place = _mm512_sub_epi16(magnitude, first);
        let low = _mm512_min_epu16(place, below);
        let middle = _mm512_min_epu16(_mm512_subs_epu16(place, below), head);
        let high = _mm512_subs_epu16(place, below_and_head);
        let symbol = _mm512_add_epi16(_mm512_srli_epi16::<4>(low), _mm512_srli_epi16::<4>(high));
        let symbol = _mm512_add_epi16(symbol, middle);
        let extra = _mm512_and_si512(_mm512_add_epi16(low, high), word(15));
        let code = _mm512_or_si512(symbol, _mm512_slli_epi16::<EXTRA_SHIFT>(extra));
        // SAFETY: 32 codes; the store needs no alignment.
        unsafe { _mm512_storeu_si512(codes.as_mut_ptr().cast(), code) };
        let sign = _mm512_and_si512(_mm512_srli_epi16::<12>(bits), word(8));
        let nibble = _mm512_or_si512(_mm512_and_si512(bits, word(7)), sign);
        let pairs = _mm512_cvtepi32_epi8(_mm512_or_si512(nibble, _mm512_srli_epi32::<12>(nibble)));
        // SAFETY: 16 bytes; the store needs no alignment.
        unsafe { _mm_storeu_si128(nibbles.as_mut_ptr().cast(), pairs) };
        done += 32;
    }
    done
}

/// Decodes whole groups of states while enough words are left. Returns the number of decoded elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
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
    // A symbol is in the head if its number less `first` is below `head`, without a sign.
    let first = tables.symbols.below;
    let head = _mm512_set1_epi32(tables.symbols.head_end() as i32 - i32::from(first));
    let first = _mm512_set1_epi32(first.into());
    let (one, low_slot) = (_mm512_set1_epi32(1), _mm512_set1_epi32(TOTAL as i32 - 1));
    let (low_extra, low_byte) = (_mm512_set1_epi32((1 << WHOLE_BITS) - 1), _mm512_set1_epi32(0xff));
    let [mut a, mut b] = load(states);
    let (mut done, mut next) = (0, *at);
    // Advances a vector past its symbols and stores their codes.
    macro_rules! symbol {
        ($state:ident, $first:expr) => {{
            // SAFETY: the 16 bytes belong to this group, which is inside `ids`.
            let id = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(ids.as_ptr().add($first).cast()) });
            let index = _mm512_or_si512(_mm512_slli_epi32::<12>(id), _mm512_and_si512($state, low_slot));
            // SAFETY: `slots` has 4096 words per table.
            let slot = unsafe { _mm512_i32gather_epi32::<4>(index, slots) };
            let symbol = _mm512_and_si512(slot, low_byte);
            let less_one = _mm512_and_si512(_mm512_srli_epi32::<FREQUENCY_AT>(slot), low_slot);
            let above = _mm512_mullo_epi32(_mm512_add_epi32(less_one, one), _mm512_srli_epi32::<12>($state));
            let above = _mm512_add_epi32(above, _mm512_srli_epi32::<OFFSET_AT>(slot));
            let whole = _mm512_cmpge_epu32_mask(_mm512_sub_epi32(symbol, first), head);
            $state = _mm512_mask_srli_epi32::<WHOLE_BITS>(above, whole, above);
            let extra = _mm512_maskz_and_epi32(whole, above, low_extra);
            let code = _mm512_or_si512(symbol, _mm512_slli_epi32::<EXTRA_SHIFT>(extra));
            // SAFETY: 16 codes of this group, which is inside `codes`.
            unsafe { _mm256_storeu_si256(codes.as_mut_ptr().add($first).cast(), _mm512_cvtepi32_epi16(code)) };
        }};
    }
    macro_rules! refill {
        ($state:ident) => {{
            let empty = _mm512_cmplt_epu32_mask($state, _mm512_set1_epi32(1 << 16));
            // SAFETY: the loop's condition leaves two bytes per state of the group.
            let new = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(words.as_ptr().add(next).cast()) });
            let new = _mm512_maskz_expand_epi32(empty, new);
            $state = _mm512_or_si512(_mm512_mask_slli_epi32::<16>($state, empty, $state), new);
            next += 2 * empty.count_ones() as usize;
        }};
    }
    while done + STATES <= ids.len() && next + GROUP_BYTES <= words.len() {
        symbol!(a, done);
        symbol!(b, done + WIDTH);
        refill!(a);
        refill!(b);
        done += STATES;
    }
    store([a, b], states);
    *at = next;
    done
}

/// Encodes whole groups of states.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
pub fn encode(
    tables: &EncodeTables,
    states: &mut [u32; STATES],
    (words, at): (&mut [u8], &mut usize),
    ids: &[u8],
    codes: &[u16],
) {
    assert!(ids.len() == codes.len() && ids.len().is_multiple_of(STATES));
    assert!(*at <= words.len() && *at >= 2 * ids.len(), "room for all words");
    tables.check(ids);
    let entries = tables.entries.as_ptr().cast::<i32>();
    let (low_slot, total) = (_mm512_set1_epi32(TOTAL as i32 - 1), _mm512_set1_epi32(TOTAL as i32));
    let (one, low_word, low_byte) = (_mm512_set1_epi32(1), _mm512_set1_epi32(0xffff), _mm512_set1_epi32(0xff));
    let whole_bits = _mm512_set1_epi32(WHOLE_BITS as i32);
    let [mut a, mut b] = load(states);
    let mut next = *at;
    macro_rules! step {
        ($state:ident, $first:expr) => {{
            // SAFETY: 16 tables and 16 codes of this group, which is inside both.
            let (id, code) = unsafe {
                (
                    _mm_loadu_si128(ids.as_ptr().add($first).cast()),
                    _mm256_loadu_si256(codes.as_ptr().add($first).cast()),
                )
            };
            let (id, code) = (_mm512_cvtepu8_epi32(id), _mm512_cvtepu16_epi32(code));
            let index = _mm512_or_si512(_mm512_slli_epi32::<8>(id), _mm512_and_si512(code, low_byte));
            // SAFETY: `entries` has 256 pairs of words per table.
            let entry = unsafe { _mm512_i32gather_epi32::<8>(index, entries) };
            let frequency = _mm512_add_epi32(_mm512_and_si512(entry, low_slot), one);
            let start = _mm512_and_si512(_mm512_srli_epi32::<12>(entry), low_slot);
            // The compiler sees that both are below 32.
            let extra_bits = _mm512_and_si512(_mm512_srli_epi32::<EXTRA_BITS_AT>(entry), whole_bits);
            let most_shift = _mm512_srli_epi32::<SHIFT_AT>(entry);
            let full = _mm512_cmpge_epu32_mask(_mm512_srlv_epi32($state, most_shift), frequency);
            let emitted = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, $state));
            let count = full.count_ones();
            next -= 2 * count as usize;
            let store = ((1u32 << count) - 1) as u16;
            // SAFETY: `next` was at least two bytes per element above the start, and falls by at most that; the mask
            // ends the store where `next` was.
            unsafe { _mm256_mask_storeu_epi16(words.as_mut_ptr().add(next).cast(), store, emitted) };
            let shorter = _mm512_mask_srli_epi32::<16>($state, full, $state);
            let extra = _mm512_srli_epi32::<EXTRA_SHIFT>(code);
            let above = _mm512_or_si512(_mm512_sllv_epi32(shorter, extra_bits), extra);
            // As `RECIPROCAL` says, by an estimate with an error of 2^-14, and a step that squares it: a division takes
            // longer.
            let divisor = _mm512_cvtepi32_ps(frequency);
            let estimate = _mm512_rcp14_ps(divisor);
            let missing = _mm512_fnmadd_ps(divisor, estimate, _mm512_set1_ps(RECIPROCAL));
            let reciprocal = _mm512_fmadd_ps(estimate, missing, estimate);
            let quotient = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepu32_ps(above), reciprocal));
            let rest = _mm512_sub_epi32(above, _mm512_mullo_epi16(quotient, frequency));
            let rest = _mm512_and_si512(rest, low_word);
            let short = _mm512_cmpge_epu32_mask(rest, frequency);
            let sum = _mm512_add_epi32(_mm512_add_epi32(rest, start), _mm512_slli_epi32::<12>(quotient));
            $state = _mm512_mask_add_epi32(sum, short, sum, _mm512_sub_epi32(total, frequency));
        }};
    }
    for group in (0..ids.len()).step_by(STATES).rev() {
        // The last state of a group first.
        step!(b, group + WIDTH);
        step!(a, group);
    }
    store([a, b], states);
    *at = next;
}
