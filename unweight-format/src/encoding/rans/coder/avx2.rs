//! The coder of a chunk with AVX2: vectors of eight states.

use std::arch::x86_64::*;

use super::{
    ENTRIES, EXTRA_SHIFT, FREQUENCY_AT, OFFSET_AT, PROBABILITY_BITS, RECIPROCAL, SLACK, STATES, TOTAL, Tables,
    WHOLE_BITS,
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
    tables.check(ids);
    let entries = tables.entries.as_ptr().cast::<i32>();
    let low_slot = _mm256_set1_epi32(TOTAL as i32 - 1);
    let (one, total) = (_mm256_set1_epi32(1), _mm256_set1_epi32(TOTAL as i32));
    let [mut a, mut b, mut c, mut d] = load(states);
    let mut next = *at;
    macro_rules! step {
        ($state:ident, $first:expr) => {{
            // SAFETY: eight tables and eight codes of this group, which is inside both.
            let (id, code) = unsafe {
                (_mm_loadl_epi64(ids.as_ptr().add($first).cast()), _mm_loadu_si128(codes.as_ptr().add($first).cast()))
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
            let most_shift = _mm256_sub_epi32(_mm256_set1_epi32(32 - PROBABILITY_BITS as i32), extra_bits);
            let low = _mm256_cmpgt_epi32(frequency, _mm256_srlv_epi32($state, most_shift));
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
            // As `RECIPROCAL` says.
            let reciprocal = _mm256_div_ps(_mm256_set1_ps(RECIPROCAL), _mm256_cvtepi32_ps(frequency));
            let high = _mm256_cvtepi32_ps(_mm256_srli_epi32::<16>(above));
            let value = _mm256_cvtepi32_ps(_mm256_and_si256(above, _mm256_set1_epi32(0xffff)));
            let value = _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536.0)), value);
            let quotient = _mm256_cvttps_epi32(_mm256_mul_ps(value, reciprocal));
            let rest = _mm256_sub_epi32(above, _mm256_mullo_epi16(quotient, frequency));
            let rest = _mm256_and_si256(rest, _mm256_set1_epi32(0xffff));
            let correction = _mm256_and_si256(_mm256_cmpgt_epi32(rest, less_one), _mm256_sub_epi32(total, frequency));
            let sum = _mm256_add_epi32(_mm256_add_epi32(rest, start), _mm256_slli_epi32::<12>(quotient));
            $state = _mm256_add_epi32(sum, correction);
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
