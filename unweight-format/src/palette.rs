//! The palette: the most frequent exponents of a tensor (report section 3.3).

use crate::{CodecError, Histogram, layout::PALETTE_MAX};

/// Up to 16 distinct exponents, most frequent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Palette {
    exponents: [u8; PALETTE_MAX],
    len: u8,
}

impl Palette {
    /// The most frequent exponents; of equal counts the smaller exponent comes first, so that every encoder agrees.
    /// `None` for an empty histogram.
    pub fn from_histogram(histogram: &Histogram) -> Option<Self> {
        let mut order: Vec<u8> = (0..=255u8).filter(|&e| histogram.count(e) > 0).collect();
        order.sort_by_key(|&e| (std::cmp::Reverse(histogram.count(e)), e));
        order.truncate(PALETTE_MAX);
        let mut exponents = [0; PALETTE_MAX];
        exponents[..order.len()].copy_from_slice(&order);
        (!order.is_empty()).then_some(Self { exponents, len: order.len() as u8 })
    }

    /// Reads a stored palette of `len` entries.
    ///
    /// # Errors
    /// Entries repeat, an unused entry is not 0, or `len` is not in 1..=16.
    pub fn from_stored(stored: [u8; PALETTE_MAX], len: usize) -> Result<Self, CodecError> {
        let fail = |reason| Err(CodecError::Code { section: "palette", reason });
        if !(1..=PALETTE_MAX).contains(&len) {
            return fail("it must have 1 to 16 entries");
        }
        let mut seen = [false; 256];
        if stored[..len].iter().any(|&e| std::mem::replace(&mut seen[usize::from(e)], true)) {
            return fail("an exponent appears twice");
        }
        if stored[len..].iter().any(|&e| e != 0) {
            return fail("an unused entry is not 0");
        }
        Ok(Self { exponents: stored, len: len as u8 })
    }

    /// The entries.
    pub fn exponents(&self) -> &[u8] {
        &self.exponents[..self.len.into()]
    }

    /// As stored: unused entries are 0.
    pub fn stored(&self) -> [u8; PALETTE_MAX] {
        self.exponents
    }

    /// Palette index of every exponent, `None` outside the palette (`symbol_to_palette_idx` of the report).
    pub fn index(&self) -> [Option<u8>; 256] {
        let mut index = [None; 256];
        for (i, &exponent) in self.exponents().iter().enumerate() {
            index[usize::from(exponent)] = Some(i as u8);
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_smaller_exponent() {
        let mut histogram = Histogram::default();
        for (exponent, count) in [(9, 5), (3, 5), (200, 7), (0, 1)] {
            histogram.add(exponent, count);
        }
        let palette = Palette::from_histogram(&histogram).unwrap();
        assert_eq!(palette.exponents(), [200, 3, 9, 0]);
        assert_eq!(palette.index()[9], Some(2));
        assert_eq!(palette.index()[10], None);
    }

    #[test]
    fn only_sixteen_fit() {
        let mut histogram = Histogram::default();
        (0..=255u8).for_each(|e| histogram.add(e, 1));
        assert_eq!(Palette::from_histogram(&histogram).unwrap().exponents(), (0..16).collect::<Vec<u8>>());
        assert!(Palette::from_histogram(&Histogram::default()).is_none());
    }

    #[test]
    fn stored_palettes_are_checked() {
        let mut stored = [0; 16];
        assert!(Palette::from_stored(stored, 1).is_ok());
        assert!(Palette::from_stored(stored, 2).is_err(), "0 twice");
        assert!(Palette::from_stored(stored, 0).is_err());
        stored[5] = 7;
        assert!(Palette::from_stored(stored, 1).is_err(), "unused entry set");
    }
}
