//! The 12-bit container of a tile: the order of its words, and conversion between words and a row-major tile.
//!
//! ```text
//! two rows, g and g + 8, of a row block: 2 x 64 bf16 = 4 registers x 4 steps x 4 lanes x 2 halves
//!   split by 8 columns     -> P0..P3, each 4 steps x 4 lanes
//!   sign, nibble, mantissa -> 12 bits of each half; escapes are searched only where one was detected
//!   P3 into the free bits  -> 3 words per step and lane
//!   12 words per lane      -> 3 runs of 64 bytes, 512 bytes apart
//! ```
//! Every step is a `for` loop over arrays of fixed size, which the compiler turns into permutations of the target's
//! instruction set. They must not be `array::from_fn` or `map`: without link-time optimisation these remain calls to
//! code that is compiled for the baseline processor.

use super::Window;
use crate::{
    Matrix, bf16,
    layout::{PACKED_BLOCK_BYTES as BLOCK_BYTES, PACKED_TILE_BYTES as TILE_BYTES, ROW_BLOCKS, TILE},
};

pub(crate) const LANES: usize = 32;
pub(crate) const STEPS: usize = 4;
/// The bits of two halves that a container word leaves free: 14..11 in each.
pub(crate) const FREE: u32 = 0x7800_7800;

/// Stands for the record of an escape that has no operand.
pub(super) const NO_OPERAND: u32 = u32::MAX;
/// Halves of one register in four steps and four lanes.
const HALVES: usize = 32;

/// Compiles the same code for another instruction set.
macro_rules! compile_for {
    ($best:ident, $any:ident, $name:ident, ($($argument:ident: $type:ty),*) $(-> $result:ty)?) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,bmi1,bmi2,lzcnt,popcnt")]
        fn $name($($argument: $type),*) $(-> $result)? {
            $any($($argument),*)
        }

        pub(super) fn $best($($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512dq") {
                // SAFETY: the processor has the instructions; those with bit manipulation are older.
                return unsafe { $name($($argument),*) };
            }
            $any($($argument),*)
        }
    };
}
compile_for!(
    pack_tile,
    pack_tile_any,
    pack_tile_avx512,
    (
        matrix: Matrix<'_>,
        window: Window,
        tile: usize,
        bytes: &mut [u8; TILE_BYTES],
        records: &mut [Vec<u32>; ROW_BLOCKS]
    ) -> bool
);
compile_for!(
    unpack_block,
    unpack_block_any,
    unpack_block_avx512,
    (bytes: &[u8; BLOCK_BYTES], base: u8, out: &mut [u8], stride: usize)
);

/// Packs a tile and appends the escapes of each row block, unsorted. Returns whether there are any.
#[inline(always)]
fn pack_tile_any(
    matrix: Matrix<'_>,
    window: Window,
    tile: usize,
    bytes: &mut [u8; TILE_BYTES],
    records: &mut [Vec<u32>; ROW_BLOCKS],
) -> bool {
    let grid = matrix.grid();
    let (top, left) = (tile / grid.tile_cols() * TILE, tile % grid.tile_cols() * TILE);
    let row = |row: usize| -> &[u8; 2 * TILE] {
        let at = ((top + row) * grid.cols() + left) * 2;
        matrix.bytes()[at..at + 2 * TILE].try_into().expect("64 elements")
    };
    let base = u16::from(window.base) << 7;
    let mut escaped = false;
    for (block, records) in records.iter_mut().enumerate() {
        for group in 0..8 {
            let rows = [row(16 * block + group), row(16 * block + group + 8)];
            let mut weights = [[0u16; HALVES]; 4];
            for (register, weights) in weights.iter_mut().enumerate() {
                let row = rows[register % 2];
                for (i, weight) in weights.iter_mut().enumerate() {
                    let column = 16 * (i / 8) + 8 * (register / 2) + i % 8;
                    *weight = u16::from_le_bytes([row[2 * column], row[2 * column + 1]]);
                }
            }
            let mut outside = [0u16; 4];
            let mut registers = [[0u32; 16]; 4];
            for register in 0..4 {
                let mut halves = [0u16; HALVES];
                let mut any = 0;
                for (half, &weight) in halves.iter_mut().zip(&weights[register]) {
                    let nibble = (weight & 0x7f80).wrapping_sub(base);
                    let inside = nibble < 16 << 7;
                    any |= u16::from(!inside);
                    *half = weight & 0x807f | if inside { nibble } else { 0 };
                }
                outside[register] = any;
                registers[register] = pairs(halves);
            }
            if outside.iter().any(|&any| any != 0) {
                escaped = true;
                add_escapes(window, group, &weights, outside, records);
            }
            let words = words_from(registers);
            for j in 0..3 {
                let mut run = [0u32; 16];
                for (i, word) in run.iter_mut().enumerate() {
                    let (lane, q) = (i / 4, 4 * j + i % 4);
                    *word = words[q % 3][4 * (q / 3) + lane].to_le();
                }
                let at = BLOCK_BYTES * block + 512 * j + 64 * group;
                bytes[at..at + 64].copy_from_slice(bytemuck::bytes_of(&run));
            }
        }
    }
    escaped
}

/// The inverse of [`pack_tile`] for one row block, without escapes. Rows of `out` are `stride` bytes apart.
#[inline(always)]
fn unpack_block_any(bytes: &[u8; BLOCK_BYTES], base: u8, out: &mut [u8], stride: usize) {
    let base = u16::from(base) << 7;
    for group in 0..8 {
        let mut runs = [[0u32; 16]; 3];
        for (j, run) in runs.iter_mut().enumerate() {
            let source: [u8; 64] = bytes[512 * j + 64 * group..][..64].try_into().expect("64 bytes");
            for (word, source) in run.iter_mut().zip(bytemuck::cast::<_, [u32; 16]>(source)) {
                *word = u32::from_le(source);
            }
        }
        // Word i of step s is lane word q = 3s + i.
        let mut words = [[0u32; 16]; 3];
        for (word, words) in words.iter_mut().enumerate() {
            for step in 0..STEPS {
                let q = 3 * step + word;
                for lane in 0..4 {
                    words[4 * step + lane] = runs[q / 4][4 * lane + q % 4];
                }
            }
        }
        let mut weights = [[0u16; HALVES]; 4];
        for (weights, pairs) in weights.iter_mut().zip(registers_from(words)) {
            for (i, pair) in pairs.into_iter().enumerate() {
                weights[2 * i] = (pair as u16).wrapping_add(base);
                weights[2 * i + 1] = ((pair >> 16) as u16).wrapping_add(base);
            }
        }
        for half in 0..2 {
            let mut row = [0u16; TILE];
            for (i, run) in row.chunks_exact_mut(8).enumerate() {
                run.copy_from_slice(&weights[half + 2 * (i % 2)][8 * (i / 2)..][..8]);
            }
            let at = (group + 8 * half) * stride;
            for value in &mut row {
                *value = value.to_le();
            }
            out[at..at + 2 * TILE].copy_from_slice(bytemuck::bytes_of(&row));
        }
    }
}

/// Appends the escapes of a row group; `outside` is 0 for registers without escapes.
#[cold]
fn add_escapes(window: Window, group: usize, weights: &[[u16; HALVES]; 4], outside: [u16; 4], records: &mut Vec<u32>) {
    for (register, weights) in weights.iter().enumerate().filter(|&(register, _)| outside[register] != 0) {
        for (i, &weight) in weights.iter().enumerate() {
            if window.nibble(bf16::exponent(weight)).is_some() {
                continue;
            }
            let (step, lane, half) = (i / 8, 4 * group + i % 8 / 2, i % 2);
            records.push(window.operand(weight).map_or(NO_OPERAND, |bits| record(bits, lane, step, register, half)));
        }
    }
}

/// Joins two halves per word, the first one low.
#[inline(always)]
fn pairs(halves: [u16; HALVES]) -> [u32; 16] {
    let mut words = [0; 16];
    for (i, word) in words.iter_mut().enumerate() {
        *word = u32::from(halves[2 * i]) | u32::from(halves[2 * i + 1]) << 16;
    }
    words
}

/// The words w0, w1, w2 of 16 places.
#[inline(always)]
fn words_from([p0, p1, p2, p3]: [[u32; 16]; 4]) -> [[u32; 16]; 3] {
    let mut words = [[0; 16]; 3];
    for i in 0..16 {
        words[0][i] = p0[i] | p3[i] << 4 & FREE;
        words[1][i] = p1[i] | p3[i] << 8 & FREE;
        words[2][i] = p2[i] | p3[i].rotate_right(4) & FREE;
    }
    words
}

/// The registers P0..P3 of 16 places, without an exponent base.
#[inline(always)]
pub(super) fn registers_from([w0, w1, w2]: [[u32; 16]; 3]) -> [[u32; 16]; 4] {
    let mut registers = [[0; 16]; 4];
    for i in 0..16 {
        registers[0][i] = w0[i] & !FREE;
        registers[1][i] = w1[i] & !FREE;
        registers[2][i] = w2[i] & !FREE;
        registers[3][i] = (w0[i] & FREE) >> 4 | (w1[i] & FREE) >> 8 | (w2[i] & FREE).rotate_left(4);
    }
    registers
}

/// Row and column of an operand in its tile.
pub(crate) fn element_at(block: usize, step: usize, lane: usize, register: usize, half: usize) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    (16 * block + group + 8 * (register % 2), 16 * step + 2 * thread + 8 * (register / 2) + half)
}

/// Byte offset of lane word `q` in a tile.
pub(crate) fn word_offset(block: usize, q: usize, lane: usize) -> usize {
    BLOCK_BYTES * block + 512 * (q / 4) + 16 * lane + 4 * (q % 4)
}

pub(super) fn words_of(tile: &[u8], block: usize, step: usize, lane: usize) -> [u32; 3] {
    std::array::from_fn(|i| word(tile, word_offset(block, 3 * step + i, lane) / 4).expect("inside the tile"))
}

fn record(operand: u16, lane: usize, step: usize, register: usize, half: usize) -> u32 {
    u32::from(operand) | (lane as u32) << 16 | ((4 * step + register) as u32) << 21 | (half as u32) << 25
}

/// Lane, step, register and half of a record.
pub(crate) fn fields(record: u32) -> (usize, usize, usize, usize) {
    let at = (record >> 21 & 15) as usize;
    ((record >> 16 & 31) as usize, at / 4, at % 4, (record >> 25 & 1) as usize)
}

/// The sort key of the records of a row block: step, register, lane, half.
pub(super) fn sort_key(record: u32) -> u32 {
    (record >> 21 & 15) << 6 | (record >> 16 & 31) << 1 | record >> 25 & 1
}

pub(super) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(4 * at..4 * at + 4)?.try_into().expect("4 bytes")))
}
