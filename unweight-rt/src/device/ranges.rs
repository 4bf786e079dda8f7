//! Ranges of a memory of fixed size: free and lent ones, pieces of a copy, places of sections.

use std::{collections::BTreeMap, ops::Range};

/// The free ranges of a memory. Neighbouring free ranges are joined.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// The end of each free range, by its start.
    free: BTreeMap<usize, usize>,
}

impl Ranges {
    /// Ranges begin and end at multiples of this number of bytes: a page, so that a copy never shares one with another.
    const UNIT: usize = 4096;

    /// Ranges of a memory of `bytes` bytes, all free.
    pub(crate) fn new(bytes: usize) -> Self {
        let end = bytes / Self::UNIT * Self::UNIT;
        Self { free: (end > 0).then_some((0, end)).into_iter().collect() }
    }

    /// The bytes that a range of `bytes` bytes takes up; `None` if they exceed the address space.
    pub(crate) fn rounded(bytes: usize) -> Option<usize> {
        bytes.max(1).checked_next_multiple_of(Self::UNIT)
    }

    /// Takes a range of at least `bytes` bytes from the smallest free range that has them.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let bytes = Self::rounded(bytes)?;
        let fitting = self.free.iter().filter(|(start, end)| *end - *start >= bytes);
        let (start, end) = fitting.min_by_key(|(start, end)| *end - *start).map(|(start, end)| (*start, *end))?;
        self.free.remove(&start);
        if start + bytes < end {
            self.free.insert(start + bytes, end);
        }
        Some(start..start + bytes)
    }

    /// Returns a range that was taken.
    pub(crate) fn give_back(&mut self, range: Range<usize>) {
        let Range { mut start, mut end } = range;
        if let Some(after) = self.free.remove(&end) {
            end = after;
        }
        if let Some((&before, &joined)) = self.free.range(..start).next_back()
            && joined == start
        {
            start = before;
        }
        self.free.insert(start, end);
    }
}

/// Divides `len` elements into pieces of `piece` elements and a rest.
pub(crate) fn pieces(len: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(piece.max(1)).map(move |start| start..len.min(start.saturating_add(piece.max(1))))
}

/// Places sections of these sizes one after the other, each at a multiple of `align` bytes. Returns their ranges and
/// the bytes of all; `None` if they exceed the address space.
pub(crate) fn places(sizes: impl IntoIterator<Item = usize>, align: usize) -> Option<(Vec<Range<usize>>, usize)> {
    let mut end = 0usize;
    let mut place = |bytes: usize| {
        let start = end.checked_next_multiple_of(align)?;
        end = start.checked_add(bytes)?;
        Some(start..end)
    };
    let places = sizes.into_iter().map(&mut place).collect::<Option<_>>()?;
    Some((places, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: usize = Ranges::UNIT;

    #[test]
    fn ranges_never_overlap_and_join_again() {
        let units = 64;
        let mut ranges = Ranges::new(units * UNIT + 5);
        let (mut lent, mut state) = (Vec::<Range<usize>>::new(), 1u64);
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..20_000 {
            if random(2) == 0 || lent.is_empty() {
                let bytes = random(9 * UNIT);
                let Some(range) = ranges.take(bytes) else { continue };
                assert!(range.len() >= bytes && range.len() < bytes + UNIT.max(1) + 1, "{range:?} for {bytes}");
                assert!(range.start.is_multiple_of(UNIT) && range.end <= units * UNIT);
                assert!(lent.iter().all(|other| range.end <= other.start || other.end <= range.start), "{range:?}");
                lent.push(range);
            } else {
                ranges.give_back(lent.swap_remove(random(lent.len())));
            }
            let sum: usize = lent.iter().map(Range::len).sum::<usize>()
                + ranges.free.iter().map(|(start, end)| end - start).sum::<usize>();
            assert_eq!(sum, units * UNIT);
        }
        lent.into_iter().for_each(|range| ranges.give_back(range));
        assert_eq!(ranges.free, BTreeMap::from([(0, units * UNIT)]));
        assert_eq!(ranges.take(units * UNIT), Some(0..units * UNIT));
        assert_eq!(ranges.take(0), None);
    }

    #[test]
    fn the_smallest_fitting_range_is_taken() {
        let mut ranges = Ranges::new(10 * UNIT);
        let [a, b, c, d] = [4, 1, 2, 1].map(|units| ranges.take(units * UNIT).unwrap());
        assert_eq!([&a, &b, &c, &d].map(|range| range.start / UNIT), [0, 4, 5, 7]);
        ranges.give_back(a);
        ranges.give_back(c.clone());
        // Free: 0..4, 5..7, 8..10.
        assert_eq!(ranges.take(UNIT + 1), Some(c));
        assert_eq!(ranges.take(4 * UNIT + 1), None);
        assert_eq!(ranges.take(usize::MAX), None);
    }

    #[test]
    fn a_memory_of_less_than_a_unit_lends_nothing() {
        for bytes in [0, 1, UNIT - 1] {
            assert_eq!(Ranges::new(bytes).take(0), None);
        }
    }

    #[test]
    fn pieces_cover_all_elements_in_order() {
        for (len, piece) in [(0, 4), (1, 4), (4, 4), (5, 4), (8, 4), (4097 * 4031, 4 << 20), (3, 0), (7, usize::MAX)] {
            let pieces: Vec<_> = pieces(len, piece).collect();
            let mut at = 0;
            for range in &pieces {
                assert_eq!(range.start, at);
                assert!(range.end > at && range.len() <= piece.max(1));
                at = range.end;
            }
            assert_eq!(at, len);
            // Every piece but the last is whole.
            assert!(pieces.iter().rev().skip(1).all(|range| range.len() == piece.max(1)));
        }
    }

    #[test]
    fn places_are_aligned_and_disjoint() {
        let (ranges, bytes) = places([3, 0, 256, 1], 256).unwrap();
        assert_eq!(ranges, [0..3, 256..256, 256..512, 512..513]);
        assert_eq!(bytes, 513);
        assert_eq!(places([], 256), Some((Vec::new(), 0)));
        assert_eq!(places([1, usize::MAX], 256), None);
    }
}
