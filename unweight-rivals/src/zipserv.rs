//! ZipServ's TCA-TBE: three-bit codes for seven consecutive exponents; all other elements are uncoded (ASPLOS 2026,
//! `docs/rivals.md`).
//!
//! ```text
//! bitmaps        3 x u64 per tile of 8 x 8  bit row * 8 + col of bitmap b: bit b of the code; 0: outside the window
//! sign_mantissa  u8                         sign << 7 | mantissa of elements in the window; zeros to 16 per block
//! full           BF16                       all other elements; zeros to 8 per block
//! blocks         2 x i32, one more than there are blocks   where a block of 64 x 64 begins in both
//! strips         2 x i32, 4 per block       where its strips of 16 rows begin in it
//! ```
//! Blocks are in row-major order. A block has four strips, a strip has tiles of 16 x 16 in column order, and each of
//! these has tiles of 8 x 8 in column-major order. The code of an exponent is its distance from the exponent before the
//! window.

use rayon::prelude::*;
use unweight_format::{Histogram, raw::bf16};

/// Number of exponents of the window.
pub const WINDOW: usize = 7;
/// Rows and columns of a block.
pub const BLOCK: usize = 64;
const TILE: usize = 8;
const TILES: usize = BLOCK * BLOCK / (TILE * TILE);
const STRIPS: usize = 4;

/// The reason why a matrix cannot be encoded, or is damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Rows or columns are 0, or not a multiple of [`BLOCK`].
    #[error("{rows}x{cols}: rows and columns must be positive multiples of {BLOCK}")]
    Shape {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// The matrix exceeds the range of offsets.
    #[error("{elements} elements, above the limit of its offsets, {}", i32::MAX)]
    Count {
        /// Number of elements.
        elements: u64,
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
    /// The window exceeds the largest exponent.
    #[error("a window of {WINDOW} exponents from {first} on exceeds 255")]
    Window {
        /// First exponent of the window.
        first: u8,
    },
    /// An offset does not match the bitmaps.
    #[error("{part}, entry {index}: {got:?}, but {expected:?} according to the bitmaps")]
    Offset {
        /// `blocks` or `strips`.
        part: &'static str,
        /// Index of the entry.
        index: usize,
        /// Offset according to the bitmaps.
        expected: [u32; 2],
        /// Offset found.
        got: [u32; 2],
    },
    /// Padding that is not zero.
    #[error("block {block}: its padding is not zero")]
    Padding {
        /// Index of the block.
        block: usize,
    },
}

/// A matrix as ZipServ stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub cols: usize,
    /// First exponent of the window.
    pub first: u8,
    /// Three maps of the codes.
    pub bitmaps: [Vec<u64>; 3],
    /// Signs and mantissas of the elements in the window.
    pub sign_mantissa: Vec<u8>,
    /// All other elements.
    pub full: Vec<u16>,
    /// Where blocks begin in `sign_mantissa` and in `full`.
    pub blocks: Vec<[u32; 2]>,
    /// Where strips begin, relative to their block.
    pub strips: Vec<[u32; 2]>,
}

/// Returns the first of the seven consecutive exponents that cover most elements; the lowest one of ties.
///
/// ZipServ's program starts at the lowest of the seven most frequent exponents, and takes the first run of seven that
/// occur. If the most frequent ones are consecutive, as in weights, the result is the same.
pub fn window(counts: &Histogram) -> u8 {
    let covered = |first: usize| counts.counts()[first..first + WINDOW].iter().sum::<u64>();
    // The first of ties.
    (0..=256 - WINDOW).rev().max_by_key(|&first| covered(first)).unwrap_or(0) as u8
}

/// Returns row and column of a tile in its block.
fn tile_origin(tile: usize) -> (usize, usize) {
    (tile / 16 * 16 + tile % 2 * TILE, tile / 4 % 4 * 16 + tile / 2 % 2 * TILE)
}

/// The encoded parts of a block.
#[derive(Default)]
struct Block {
    maps: [Vec<u64>; 3],
    sign_mantissa: Vec<u8>,
    full: Vec<u16>,
    strips: Vec<[u32; 2]>,
}

fn check_shape(rows: usize, cols: usize) -> Result<usize, Error> {
    let whole = |extent: usize| extent > 0 && extent.is_multiple_of(BLOCK);
    let elements = (rows as u64).saturating_mul(cols as u64);
    if !whole(rows) || !whole(cols) {
        return Err(Error::Shape { rows, cols });
    }
    // Includes padding.
    if elements > i32::MAX as u64 / 2 {
        return Err(Error::Count { elements });
    }
    Ok(rows * cols)
}

/// Encodes little-endian BF16 weights in row-major order, with the window that covers most of them.
///
/// # Errors
/// The shape is not supported, or `weights` has another size.
pub fn encode(weights: &[u8], rows: usize, cols: usize) -> Result<Encoded, Error> {
    let elements = check_shape(rows, cols)?;
    if weights.len() != 2 * elements {
        return Err(Error::Size { part: "weights", expected: 2 * elements, got: weights.len() });
    }
    let first = window(&Histogram::of(weights));
    let across = cols / BLOCK;
    let at = |row: usize, col: usize| {
        let index = 2 * (row * cols + col);
        u16::from_le_bytes([weights[index], weights[index + 1]])
    };
    let block = |index: usize| {
        let (top, left) = (index / across * BLOCK, index % across * BLOCK);
        let mut block = Block::default();
        for tile in 0..TILES {
            if tile.is_multiple_of(TILES / STRIPS) {
                block.strips.push([block.sign_mantissa.len() as u32, block.full.len() as u32]);
            }
            let (row, col) = tile_origin(tile);
            let mut maps = [0u64; 3];
            for bit in 0..TILE * TILE {
                let element = at(top + row + bit / TILE, left + col + bit % TILE);
                let code = usize::from(bf16::exponent(element)).wrapping_sub(usize::from(first));
                if code < WINDOW {
                    (0..3).for_each(|map| maps[map] |= ((code as u64 + 1) >> map & 1) << bit);
                    block.sign_mantissa.push(bf16::sign_mantissa(element));
                } else {
                    block.full.push(element);
                }
            }
            (0..3).for_each(|map| block.maps[map].push(maps[map]));
        }
        block.sign_mantissa.resize(block.sign_mantissa.len().next_multiple_of(16), 0);
        block.full.resize(block.full.len().next_multiple_of(8), 0);
        block
    };
    let blocks: Vec<Block> = (0..rows / BLOCK * across).into_par_iter().map(block).collect();
    let mut encoded = Encoded {
        rows,
        cols,
        first,
        bitmaps: Default::default(),
        sign_mantissa: Vec::new(),
        full: Vec::new(),
        blocks: vec![[0, 0]],
        strips: Vec::new(),
    };
    for block in blocks {
        (0..3).for_each(|map| encoded.bitmaps[map].extend_from_slice(&block.maps[map]));
        encoded.sign_mantissa.extend_from_slice(&block.sign_mantissa);
        encoded.full.extend_from_slice(&block.full);
        encoded.strips.extend_from_slice(&block.strips);
        encoded.blocks.push([encoded.sign_mantissa.len() as u32, encoded.full.len() as u32]);
    }
    Ok(encoded)
}

impl Encoded {
    /// Returns the bytes of all parts.
    pub fn bytes(&self) -> u64 {
        let [blocks, strips] = [&self.blocks, &self.strips].map(|offsets| 8 * offsets.len());
        let maps: usize = self.bitmaps.iter().map(|map| 8 * map.len()).sum();
        (blocks + strips + maps + self.sign_mantissa.len() + 2 * self.full.len()) as u64
    }

    /// Checks every size and offset against the bitmaps.
    ///
    /// # Errors
    /// A size or an offset does not match, or padding is not zero.
    pub fn check(&self) -> Result<(), Error> {
        let blocks = check_shape(self.rows, self.cols)? / (BLOCK * BLOCK);
        if usize::from(self.first) + WINDOW > 256 {
            return Err(Error::Window { first: self.first });
        }
        let size =
            |part, expected, got| if got == expected { Ok(()) } else { Err(Error::Size { part, expected, got }) };
        self.bitmaps.iter().try_for_each(|map| size("bitmaps", TILES * blocks, map.len()))?;
        size("blocks", blocks + 1, self.blocks.len())?;
        size("strips", STRIPS * blocks, self.strips.len())?;
        let mut begin = [0u32; 2];
        for block in 0..blocks {
            let offset = |part, index, expected, got| {
                if got == expected { Ok(()) } else { Err(Error::Offset { part, index, expected, got }) }
            };
            offset("blocks", block, begin, self.blocks[block])?;
            let mut within = [0u32; 2];
            for tile in 0..TILES {
                let index = block * TILES + tile;
                if tile.is_multiple_of(TILES / STRIPS) {
                    let strip = index / (TILES / STRIPS);
                    offset("strips", strip, within, self.strips[strip])?;
                }
                let coded = self.coded(index).count_ones();
                within = [within[0] + coded, within[1] + 64 - coded];
            }
            // At most half the range of a u32.
            begin = [begin[0] + within[0].next_multiple_of(16), begin[1] + within[1].next_multiple_of(8)];
            offset("blocks", block + 1, begin, self.blocks[block + 1])?;
        }
        size("sign_mantissa", begin[0] as usize, self.sign_mantissa.len())?;
        size("full", begin[1] as usize, self.full.len())?;
        let padded = |block: &usize| {
            let coded: u32 = (0..TILES).map(|tile| self.coded(block * TILES + tile).count_ones()).sum();
            let [high, full] = self.blocks[*block];
            let [next_high, next_full] = self.blocks[block + 1];
            let high = &self.sign_mantissa[(high + coded) as usize..next_high as usize];
            let full = &self.full[(full + 4096 - coded) as usize..next_full as usize];
            high.iter().any(|&byte| byte != 0) || full.iter().any(|&element| element != 0)
        };
        (0..blocks).find(padded).map_or(Ok(()), |block| Err(Error::Padding { block }))
    }

    /// Returns a bit mask of the elements of a tile that are in the window.
    fn coded(&self, tile: usize) -> u64 {
        self.bitmaps.iter().fold(0, |coded, map| coded | map[tile])
    }

    /// Decodes the weights to little-endian BF16, row-major.
    ///
    /// # Errors
    /// Those of [`Encoded::check`].
    pub fn decode(&self) -> Result<Vec<u8>, Error> {
        self.check()?;
        let across = self.cols / BLOCK;
        let mut out = vec![0; 2 * self.rows * self.cols];
        out.par_chunks_mut(2 * BLOCK * self.cols).enumerate().for_each(|(down, rows)| {
            for block in 0..across {
                let [mut high, mut full] = self.blocks[down * across + block].map(|offset| offset as usize);
                for tile in 0..TILES {
                    let index = (down * across + block) * TILES + tile;
                    let (row, col) = tile_origin(tile);
                    let maps = [0, 1, 2].map(|map| self.bitmaps[map][index]);
                    for bit in 0..TILE * TILE {
                        let code = (0..3).fold(0, |code, map| code | (maps[map] >> bit & 1) << map) as u8;
                        let element = if code > 0 {
                            high += 1;
                            bf16::join(self.sign_mantissa[high - 1], self.first + (code - 1))
                        } else {
                            full += 1;
                            self.full[full - 1]
                        };
                        let at = 2 * ((row + bit / TILE) * self.cols + block * BLOCK + col + bit % TILE);
                        rows[at..at + 2].copy_from_slice(&element.to_le_bytes());
                    }
                }
            }
        });
        Ok(out)
    }
}

/// The slow reference of the decoder, element by element.
pub mod oracle {
    use super::Encoded;

    /// Returns an element. Its position follows from the number of elements before it in its block.
    pub fn element(encoded: &Encoded, row: usize, col: usize) -> Option<u16> {
        let block = row / 64 * (encoded.cols / 64) + col / 64;
        let (row, col) = (row % 64, col % 64);
        // Strip, tile of 16 x 16, column of 8 x 8 tiles, row of these.
        let tile = row / 16 * 16 + col / 16 * 4 + col % 16 / 8 * 2 + row % 16 / 8;
        let code = |position: usize| -> Option<u8> {
            let bit = |map: usize| Some((encoded.bitmaps[map].get(position / 64)? >> (position % 64) & 1) as u8);
            Some(bit(0)? | bit(1)? << 1 | bit(2)? << 2)
        };
        let start = block * 4096;
        let target = start + tile * 64 + row % 8 * 8 + col % 8;
        let mut offsets = encoded.blocks.get(block)?.map(|offset| offset as usize);
        for position in start..target {
            offsets[usize::from(code(position)? == 0)] += 1;
        }
        match code(target)? {
            0 => encoded.full.get(offsets[1]).copied(),
            code => {
                let rest = u16::from(*encoded.sign_mantissa.get(offsets[0])?);
                Some((rest & 0x80) << 8 | (u16::from(encoded.first) + u16::from(code) - 1) << 7 | rest & 0x7f)
            }
        }
    }
}
