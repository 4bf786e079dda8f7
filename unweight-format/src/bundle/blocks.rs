//! Digests of blocks of a packed matrix, so that parts can be read and verified (`docs/format.md` B.4).
//!
//! A block is 8 x 8 tiles, that is 512 x 512 weights, or less at the edges. Its tiles occupy up to 8 runs of the
//! section, one per row of tiles; its digest is that of the concatenated runs. In either direction of a split, the rows
//! or columns of a tensor-parallel rank are whole blocks except at the edges.

use std::ops::Range;

use crate::{
    Digest, TileGrid,
    layout::{PACKED_TILE_BYTES, TILE},
    parallel,
};

/// Rows and columns of tiles in a block.
pub const BLOCK_TILES: usize = 8;

/// The blocks of a packed matrix, in row-major order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks {
    grid: TileGrid,
}

impl Blocks {
    /// The blocks of a matrix; `None` if there is only one, which the section's digest covers.
    pub(crate) fn of(grid: TileGrid) -> Option<Self> {
        let blocks = Self { grid };
        (blocks.count() > 1).then_some(blocks)
    }

    /// The shape and tiling of the matrix.
    pub(crate) fn grid(self) -> TileGrid {
        self.grid
    }

    fn cols(self) -> usize {
        self.grid.tile_cols().div_ceil(BLOCK_TILES)
    }

    /// The number of blocks.
    pub(crate) fn count(self) -> usize {
        self.grid.tile_rows().div_ceil(BLOCK_TILES) * self.cols()
    }

    /// The digests of all blocks, computed from the whole section.
    pub(crate) fn digests(self, packed: &[u8]) -> Vec<Digest> {
        let width = self.grid.tile_cols() * PACKED_TILE_BYTES;
        let of_band =
            |band| -> Vec<Digest> { (0..self.cols()).map(|col| digest(band, width, self.run(col))).collect() };
        parallel::map(packed.chunks(BLOCK_TILES * width), of_band).concat()
    }

    /// The byte range of the tiles of a column of blocks in a row of tiles.
    fn run(self, col: usize) -> Range<usize> {
        let end = ((col + 1) * BLOCK_TILES).min(self.grid.tile_cols());
        col * BLOCK_TILES * PACKED_TILE_BYTES..end * PACKED_TILE_BYTES
    }

    /// The blocks that contain these rows and columns.
    pub(crate) fn bands(self, rows: &Range<usize>, cols: &Range<usize>) -> Bands {
        let block = BLOCK_TILES * TILE;
        Bands {
            blocks: self,
            rows: rows.start / block..rows.end.div_ceil(block),
            cols: cols.start / block..cols.end.div_ceil(block),
        }
    }
}

/// Whole blocks that cover a part of a matrix, by rows of blocks.
#[derive(Debug, Clone)]
pub(crate) struct Bands {
    blocks: Blocks,
    rows: Range<usize>,
    cols: Range<usize>,
}

/// A contiguous piece of the section.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    /// Offset in the section.
    pub(crate) offset: u64,
    /// Size in bytes.
    pub(crate) bytes: usize,
}

impl Bands {
    /// Rows of blocks.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The byte range that is read of a row of tiles.
    fn run(&self) -> Range<usize> {
        self.blocks.run(self.cols.start).start..self.blocks.run(self.cols.end - 1).end
    }

    /// Rows of tiles in a row of blocks.
    fn tile_rows(&self, row: usize) -> Range<usize> {
        row * BLOCK_TILES..((row + 1) * BLOCK_TILES).min(self.blocks.grid.tile_rows())
    }

    /// Bytes that are read for a row of blocks.
    pub(crate) fn bytes_of(&self, row: usize) -> usize {
        self.tile_rows(row).len() * self.run().len()
    }

    /// Bytes that are read for all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.rows().map(|row| self.bytes_of(row) as u64).sum()
    }

    /// The pieces of the section to read for a row of blocks. In order they fill a buffer of [`Bands::bytes_of`] bytes.
    pub(crate) fn runs(&self, row: usize) -> Vec<Run> {
        let (width, run, rows) = (self.blocks.grid.tile_cols() * PACKED_TILE_BYTES, self.run(), self.tile_rows(row));
        if run.len() == width {
            // Whole rows are contiguous.
            return vec![Run { offset: (rows.start * width) as u64, bytes: rows.len() * width }];
        }
        rows.map(|row| Run { offset: (row * width + run.start) as u64, bytes: run.len() }).collect()
    }

    /// The first block of a row of blocks whose digest differs from `expected`: its index and its actual digest.
    pub(crate) fn first_mismatch(&self, row: usize, read: &[u8], expected: &[Digest]) -> Option<(usize, Digest)> {
        let from = self.run().start;
        self.cols.clone().find_map(|col| {
            let (run, index) = (self.blocks.run(col), row * self.blocks.cols() + col);
            let got = digest(read, self.run().len(), run.start - from..run.end - from);
            (expected.get(index) != Some(&got)).then_some((index, got))
        })
    }

    /// Copies the tiles of `rows` and `cols` from the bytes of a row of blocks: one run per row of tiles.
    pub(crate) fn tiles<'a>(
        &self,
        row: usize,
        read: &'a [u8],
        rows: &Range<usize>,
        cols: &Range<usize>,
    ) -> Vec<&'a [u8]> {
        let (run, tiles) = (self.run(), self.tile_rows(row));
        let tile_rows = tiles.start.max(rows.start / TILE)..tiles.end.min(rows.end / TILE);
        let part = cols.start / TILE * PACKED_TILE_BYTES - run.start..cols.end / TILE * PACKED_TILE_BYTES - run.start;
        tile_rows.map(|row| &read[(row - tiles.start) * run.len()..][part.clone()]).collect()
    }
}

/// The digest of the byte range `run` in all rows of `band`, which have `width` bytes each.
fn digest(band: &[u8], width: usize, run: Range<usize>) -> Digest {
    let mut bytes = Vec::with_capacity(band.len() / width * run.len());
    band.chunks_exact(width).for_each(|row| bytes.extend_from_slice(&row[run.clone()]));
    // At most 64 tiles: one leaf.
    Digest::leaf(&bytes)
}

/// Serialises a list of digests as one string of their digits, as in a manifest.
pub(crate) mod digits {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::Digest;

    const DIGITS: usize = 32;

    pub(crate) fn serialize<S: Serializer>(digests: &[Digest], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&digests.iter().map(Digest::to_string).collect::<String>())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Digest>, D::Error> {
        let text = String::deserialize(deserializer)?;
        let whole = text.as_bytes().chunks_exact(DIGITS);
        if !whole.remainder().is_empty() {
            return Err(D::Error::custom(format!("{} characters are not a list of digests of 32 digits", text.len())));
        }
        whole.map(|digits| std::str::from_utf8(digits).unwrap_or_default().parse().map_err(D::Error::custom)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A section whose bytes depend on tile and position.
    fn section(grid: TileGrid) -> Vec<u8> {
        (0..grid.tiles()).flat_map(|tile| (0..PACKED_TILE_BYTES).map(move |at| (tile * 31 + at * 7) as u8)).collect()
    }

    #[test]
    fn a_part_is_read_in_whole_blocks_and_cut_to_its_tiles() {
        for (tile_rows, tile_cols) in [(1, 9), (9, 1), (8, 16), (17, 11), (20, 8), (3, 25)] {
            let grid = TileGrid::new(tile_rows * TILE, tile_cols * TILE).unwrap();
            let blocks = Blocks::of(grid).unwrap();
            let packed = section(grid);
            let digests = blocks.digests(&packed);
            assert_eq!(digests.len(), blocks.count());
            let cuts = |of: usize| [0..of, 0..1, of - 1..of, of / 3..of / 3 + of.div_ceil(2)];
            for rows in cuts(tile_rows) {
                for cols in cuts(tile_cols) {
                    let expected: Vec<u8> = rows
                        .clone()
                        .flat_map(|row| {
                            &packed[(row * tile_cols + cols.start) * PACKED_TILE_BYTES..]
                                [..cols.len() * PACKED_TILE_BYTES]
                        })
                        .copied()
                        .collect();
                    let scale = |range: &Range<usize>| range.start * TILE..range.end * TILE;
                    let (rows, cols) = (scale(&rows), scale(&cols));
                    let bands = blocks.bands(&rows, &cols);
                    let (mut got, mut bytes) = (Vec::new(), 0);
                    for row in bands.rows() {
                        let runs = bands.runs(row);
                        let mut read: Vec<u8> =
                            runs.iter().flat_map(|run| &packed[run.offset as usize..][..run.bytes]).copied().collect();
                        assert_eq!(read.len(), bands.bytes_of(row));
                        bytes += read.len() as u64;
                        assert_eq!(bands.first_mismatch(row, &read, &digests), None);
                        bands.tiles(row, &read, &rows, &cols).iter().for_each(|run| got.extend_from_slice(run));
                        // The digests cover every byte that is read.
                        for at in [0, read.len() / 2, read.len() - 1] {
                            read[at] ^= 1;
                            assert!(bands.first_mismatch(row, &read, &digests).is_some());
                            read[at] ^= 1;
                        }
                    }
                    assert!(got == expected, "{rows:?} {cols:?}");
                    assert_eq!(bytes, bands.bytes());
                }
            }
        }
    }

    #[test]
    fn one_block_has_no_digest_of_its_own() {
        for (tile_rows, tile_cols) in [(1, 1), (8, 8), (3, 8)] {
            assert!(Blocks::of(TileGrid::new(tile_rows * TILE, tile_cols * TILE).unwrap()).is_none());
        }
    }
}
