//! A single pass over a tensor before it is encoded.

use crate::{Digest, Float, Histogram, digest::LEAF_BYTES, histogram::Counter, parallel};

/// Histogram and digest of a tensor, computed in one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// Exponent counts.
    pub histogram: Histogram,
    /// Digest of the bytes.
    pub digest: Digest,
}

impl Survey {
    /// Surveys little-endian elements in one pass.
    pub fn of(float: Float, bytes: &[u8]) -> Self {
        const SPAN: usize = 16;
        let mut leaves = vec![Digest::leaf(&[]); bytes.len().div_ceil(LEAF_BYTES)];
        let spans = leaves.chunks_mut(SPAN).zip(bytes.chunks(SPAN * LEAF_BYTES));
        let histograms = parallel::map(spans, |(digests, span)| {
            let mut counter = Counter::default();
            for (digest, leaf) in digests.iter_mut().zip(span.chunks(LEAF_BYTES)) {
                // A leaf contains whole elements.
                counter.add_float(float, leaf);
                *digest = Digest::leaf(leaf);
            }
            counter.finish()
        });
        let mut histogram = Histogram::default();
        histograms.iter().for_each(|part| histogram.merge(part));
        Survey { histogram, digest: Digest::of_leaves(&leaves) }
    }
}
