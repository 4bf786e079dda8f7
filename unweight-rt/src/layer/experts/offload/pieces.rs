//! Where compact experts are in host memory. Pure host logic, without a device.
//!
//! The tiles of an expert are one range of the compact tensor (`docs/format.md` A.11) of all experts, and so are their
//! dense part and their streams. They are cut into *pieces* of at most [`TILES_MAX`] tiles. A piece is one range of
//! host memory with all that its tiles do not share with other tiles, so one copy fetches it:
//!
//! ```text
//! offset          bytes                  contents, of T tiles
//! 0               5120 * T               their part of `dense`
//! 5120 * T        16 * T                 their part of `escape_heads` of the packed tensor (A.9)
//! 5136 * T        8 * T + 8, up to 16    their part of `class_tiles` and the next offset, from the first word below
//! streams_at      16 * units             their part of `class_streams`, in whole units of 16 bytes
//! ```
//! Kernels read 16 bytes at once, so parts begin at multiples of 16. Units at the ends may contain words of neighbours.

use std::ops::Range;

use unweight_format::raw::{
    layout::{DENSE_TILE_BYTES, STREAM_TILE_BYTES_MAX},
    packed::ROW_BLOCKS,
};

use crate::device::LaunchError;

/// The maximum number of tiles of a piece: about 5.5 MB, which a link of 50 GB/s copies in 110 us. Bounds the staging
/// buffers; smaller pieces would add the latency of more copies.
pub const TILES_MAX: usize = 1024;
/// The alignment of the parts of a piece.
const UNIT_BYTES: usize = 16;
const UNIT_WORDS: usize = UNIT_BYTES / WORD;
/// The alignment of a piece in host memory.
const PIECE_ALIGN: usize = 256;
const WORD: usize = size_of::<u32>();
/// Bytes of a tile's escape heads in the packed tensor.
const HEAD_BYTES: usize = ROW_BLOCKS * WORD;
/// Words of a tile in `class_tiles`.
const ENTRY_WORDS: usize = 2;
/// The maximum number of bytes of a piece.
pub const BYTES_MAX: usize = streams_at(TILES_MAX) + TILES_MAX * STREAM_TILE_BYTES_MAX + 2 * UNIT_BYTES;

const fn streams_at(tiles: usize) -> usize {
    (tiles * (DENSE_TILE_BYTES + HEAD_BYTES) + (tiles + 1) * ENTRY_WORDS * WORD).next_multiple_of(UNIT_BYTES)
}

/// Adjacent tiles of one expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The tiles, counted over all experts.
    pub tiles: Range<usize>,
    /// Words of `class_streams` with their streams, in whole units.
    pub words: Range<usize>,
    /// The offset in host memory in bytes.
    pub at: usize,
}

impl Piece {
    /// Returns the offset of the escape heads within the piece in bytes; the dense part begins at 0.
    pub fn heads_at(&self) -> usize {
        self.tiles.len() * DENSE_TILE_BYTES
    }

    /// Returns the offset of the table of streams within the piece in bytes.
    pub fn table_at(&self) -> usize {
        self.heads_at() + self.tiles.len() * HEAD_BYTES
    }

    /// Returns the offset of the streams within the piece in bytes.
    pub fn streams_at(&self) -> usize {
        streams_at(self.tiles.len())
    }

    /// Returns the size of the piece in bytes.
    pub fn bytes(&self) -> usize {
        self.streams_at() + self.words.len() * WORD
    }

    /// Returns the table of streams: the entries of these tiles in `class_tiles` and the next one, with the offsets of
    /// streams counted from the first word of the piece.
    pub fn table(&self, class_tiles: &[u32]) -> Vec<u32> {
        let entries = class_tiles.chunks_exact(ENTRY_WORDS).take(self.tiles.end + 1).skip(self.tiles.start);
        // Words are counted in 32 bits: `words` begins at an entry of the table, rounded down.
        let first = self.words.start as u32;
        entries.flat_map(|entry| [entry[0].saturating_sub(first), entry[1]]).collect()
    }
}

/// The pieces of all experts, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces {
    pieces: Vec<Piece>,
    per_expert: usize,
}

impl Pieces {
    /// Cuts a tensor with this table of streams, u32 `[tiles + 1, 2]` and maybe filling, into pieces of at most
    /// `tiles_max` tiles; an expert has `each` tiles.
    ///
    /// # Errors
    /// The table is shorter, or its offsets decrease.
    pub fn new(class_tiles: &[u32], (experts, each): (usize, usize), tiles_max: usize) -> Result<Self, LaunchError> {
        // Pieces of one expert have about the same size.
        let size = each.div_ceil(each.div_ceil(tiles_max.max(1)).max(1)).max(1);
        let per_expert = each.div_ceil(size);
        let word = |tile: usize| match class_tiles.get(tile * ENTRY_WORDS) {
            Some(word) => Ok(*word as usize),
            None => {
                let (got, expected) = (class_tiles.len() as u64, ((experts * each + 1) * ENTRY_WORDS) as u64);
                Err(LaunchError::Elements { buffer: "class_tiles", got, expected })
            }
        };
        let (mut pieces, mut at) = (Vec::with_capacity(experts * per_expert), 0);
        for first in (0..experts).map(|expert| expert * each) {
            for begin in (first..first + each).step_by(size) {
                let tiles = begin..(begin + size).min(first + each);
                let (start, end) = (word(tiles.start)?, word(tiles.end)?);
                if end < start {
                    return Err(LaunchError::Range { at: start as u64, len: 0, have: end as u64 });
                }
                let words = start / UNIT_WORDS * UNIT_WORDS..end.next_multiple_of(UNIT_WORDS);
                let piece = Piece { tiles, words, at };
                at = (at + piece.bytes()).next_multiple_of(PIECE_ALIGN);
                pieces.push(piece);
            }
        }
        Ok(Self { pieces, per_expert })
    }

    /// Returns all pieces.
    pub fn all(&self) -> &[Piece] {
        &self.pieces
    }

    /// Returns the pieces of an expert; none if it does not exist.
    pub fn of(&self, expert: u32) -> &[Piece] {
        let first = (expert as usize).saturating_mul(self.per_expert);
        self.pieces.get(first..first.saturating_add(self.per_expert)).unwrap_or_default()
    }

    /// Returns the bytes of host memory.
    pub fn bytes(&self) -> usize {
        self.pieces.last().map_or(0, |last| last.at + last.bytes())
    }
}

#[cfg(test)]
mod tests {
    use unweight_format::testing::Random;

    use super::*;

    /// The table of tiles with random streams, as long as an encoder pads it, and the number of words.
    fn table(random: &mut Random, tiles: usize) -> (Vec<u32>, usize) {
        let (mut table, mut word) = (Vec::new(), 0);
        for tile in 0..tiles as u32 {
            table.extend([word, tile | 1 << 31]);
            word += (8 + random.below(STREAM_TILE_BYTES_MAX as u64 / 4 - 7)) as u32;
        }
        table.extend([word, 0]);
        table.resize(table.len().next_multiple_of(UNIT_WORDS), 0);
        (table, word as usize)
    }

    #[test]
    fn pieces_cover_every_tile_of_every_expert() {
        let mut random = Random::new(9);
        for (experts, each) in [(1, 1), (3, 5), (7, 1024), (2, 1025), (5, 2500), (1, 0)] {
            let (class_tiles, words) = table(&mut random, experts * each);
            let pieces = Pieces::new(&class_tiles, (experts, each), TILES_MAX).unwrap();
            let (mut tile, mut end) = (0, 0);
            for expert in 0..experts {
                for piece in pieces.of(expert as u32) {
                    assert_eq!(piece.tiles.start, tile, "no tile is missing");
                    assert!((1..=TILES_MAX).contains(&piece.tiles.len()), "{piece:?}");
                    assert!(piece.at >= end && piece.at.is_multiple_of(PIECE_ALIGN), "{piece:?} overlaps another");
                    assert!(piece.bytes() <= BYTES_MAX, "{piece:?} exceeds a staging buffer");
                    (tile, end) = (piece.tiles.end, piece.at + piece.bytes());
                }
                assert_eq!(tile, (expert + 1) * each, "pieces end with their expert");
            }
            assert_eq!(end, pieces.bytes());
            assert!(pieces.of(experts as u32).is_empty() && pieces.of(u32::MAX).is_empty());
            let read = pieces.all().iter().map(|piece| piece.words.end).max().unwrap_or(0);
            assert_eq!(read, if each == 0 { 0 } else { words.next_multiple_of(UNIT_WORDS) });
        }
    }

    #[test]
    fn parts_of_a_piece_are_aligned_and_apart() {
        let (class_tiles, _) = table(&mut Random::new(4), 3 * 77);
        for piece in Pieces::new(&class_tiles, (3, 77), 20).unwrap().all() {
            let table = piece.table(&class_tiles);
            assert_eq!(table.len(), 2 * (piece.tiles.len() + 1));
            assert!(piece.heads_at() >= piece.tiles.len() * DENSE_TILE_BYTES);
            assert!(piece.table_at() >= piece.heads_at() + piece.tiles.len() * HEAD_BYTES);
            assert!(piece.streams_at() >= piece.table_at() + table.len() * WORD);
            let parts = [piece.heads_at(), piece.table_at(), piece.streams_at(), piece.bytes()];
            assert!(parts.iter().all(|part| part.is_multiple_of(UNIT_BYTES)), "{parts:?}");
            assert!(piece.words.start.is_multiple_of(UNIT_WORDS) && piece.words.end.is_multiple_of(UNIT_WORDS));
            for (at, tile) in piece.tiles.clone().enumerate() {
                let (offset, head) = (table[2 * at] as usize, table[2 * at + 1]);
                assert_eq!(offset + piece.words.start, class_tiles[2 * tile] as usize, "tile {tile}");
                assert_eq!(head, class_tiles[2 * tile + 1], "tile {tile}");
            }
            let end = table[2 * piece.tiles.len()] as usize;
            assert!(end <= piece.words.len() && end + UNIT_WORDS > piece.words.len());
        }
    }

    #[test]
    fn tables_that_do_not_fit_are_rejected() {
        let (class_tiles, _) = table(&mut Random::new(4), 6);
        assert!(Pieces::new(&class_tiles, (2, 3), TILES_MAX).is_ok());
        let missing = Pieces::new(&class_tiles[..12], (2, 3), TILES_MAX);
        assert_eq!(missing, Err(LaunchError::Elements { buffer: "class_tiles", got: 12, expected: 14 }));
        let mut decreasing = class_tiles;
        decreasing[6] = u32::MAX;
        assert!(matches!(Pieces::new(&decreasing, (2, 3), TILES_MAX), Err(LaunchError::Range { .. })));
    }
}
