//! Predicts the size of an encoded tensor from a sample.

use super::Section;
use crate::{
    Code, CodeLimit, Float, Histogram, TileGrid,
    layout::{ROW_BITS_MAX, TILE},
};

/// Statistics of a sample of a tensor, from which [`Encoding::predict`](super::Encoding::predict) predicts its stored
/// size.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    float: Float,
    histogram: Histogram,
    limit: CodeLimit,
    /// Rows of 64 elements in the sample.
    rows: u64,
    /// Rows of these that are verbatim under the code of the sample.
    verbatim_rows: u64,
    /// Coded bits of the other rows.
    coded_bits: u64,
    /// Counts of magnitudes of BF16 elements; empty for other types.
    magnitudes: Vec<u64>,
}

/// Values of a magnitude of BF16: exponent and upper four mantissa bits.
pub(crate) const MAGNITUDES: usize = 1 << 12;

/// Counts the magnitudes of little-endian BF16 elements.
pub(crate) fn count_magnitudes<'a>(pieces: impl Iterator<Item = &'a [u8]>, counts: &mut [u64]) {
    // Adjacent elements use separate counters, because equal ones would wait for each other's store.
    let mut counters = vec![[0u64; 2]; MAGNITUDES];
    let counters: &mut [[u64; 2]; MAGNITUDES] = counters.as_mut_slice().try_into().expect("it has this length");
    let mut add = |element: [u8; 2], at: usize| {
        counters[usize::from(u16::from_le_bytes(element) >> 3) % MAGNITUDES][at] += 1;
    };
    for piece in pieces {
        let (pairs, last) = piece.as_chunks::<2>().0.as_chunks::<2>();
        pairs.iter().for_each(|pair| pair.iter().enumerate().for_each(|(at, &element)| add(element, at)));
        last.iter().for_each(|&element| add(element, 0));
    }
    for (count, counter) in counts.iter_mut().zip(counters) {
        *count += counter[0] + counter[1];
    }
}

impl Sample {
    /// Samples contiguous pieces of little-endian elements. Each piece is divided into rows of 64; an incomplete row at
    /// its end is not counted.
    pub fn of(float: Float, pieces: &[&[u8]], limit: CodeLimit) -> Self {
        let mut histogram = Histogram::default();
        pieces.iter().for_each(|piece| histogram.merge(&Histogram::of_float(float, piece)));
        let mut magnitudes = Vec::new();
        if float == Float::Bf16 {
            magnitudes.resize(MAGNITUDES, 0);
            count_magnitudes(pieces.iter().copied(), &mut magnitudes);
        }
        let mut sample = Self { float, histogram, limit, rows: 0, verbatim_rows: 0, coded_bits: 0, magnitudes };
        let Some(code) = Code::from_histogram(&sample.histogram, limit) else { return sample };
        let table = code.encode_table();
        for row in pieces.iter().flat_map(|piece| piece.chunks_exact(float.bytes() * TILE)) {
            let mut coded = true;
            let bits: u32 = row
                .chunks_exact(float.bytes())
                .map(|e| table[usize::from(float.exponent(float.read(e)))].1)
                .inspect(|&length| coded &= length > 0)
                .map(u32::from)
                .sum();
            sample.rows += 1;
            if coded && bits <= ROW_BITS_MAX {
                sample.coded_bits += u64::from(bits);
            } else {
                sample.verbatim_rows += 1;
            }
        }
        if sample.rows == 0 {
            // Less than one row: assume the mean code length.
            sample.rows = 1;
            sample.coded_bits = (code.mean_bits(&sample.histogram) * TILE as f64) as u64;
        }
        sample
    }

    /// Type of the sampled elements.
    pub fn float(&self) -> Float {
        self.float
    }

    /// Counts of the exponents of the sample.
    pub fn histogram(&self) -> &Histogram {
        &self.histogram
    }

    /// Counts of the magnitudes of the sample, if it is of BF16.
    pub(crate) fn magnitudes(&self) -> &[u64] {
        &self.magnitudes
    }

    /// The longest code that an encoder may use.
    pub fn limit(&self) -> CodeLimit {
        self.limit
    }

    /// Bytes of the verbatim rows of a matrix that is distributed like the sample.
    pub(crate) fn verbatim_bytes(&self, grid: TileGrid) -> f64 {
        self.share(grid, self.verbatim_rows) * TILE as f64
    }

    /// Bytes of the coded rows of a matrix that is distributed like the sample, including the fill at the end of tiles.
    pub(crate) fn coded_bytes(&self, grid: TileGrid) -> f64 {
        // A tile is filled up to a word: 16 bits on average.
        self.share(grid, self.coded_bits) / 8.0 + grid.tiles() as f64 * 2.0
    }

    fn share(&self, grid: TileGrid, part: u64) -> f64 {
        (grid.rows() * grid.tile_cols()) as f64 * part as f64 / self.rows.max(1) as f64
    }
}

/// Bytes of the sections whose size the grid alone determines.
pub fn fixed_bytes(sections: &[Section], grid: TileGrid) -> u64 {
    sections.iter().filter_map(|section| section.fixed_bytes(grid)).map(|bytes| bytes as u64).sum()
}
