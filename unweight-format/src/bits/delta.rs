//! Differences between elements of two tensors (`docs/format.md` A.14).
//!
//! Floats are compared by their order: a difference of 1 is the next representable number. It is small where a training
//! step changed a weight a little, whatever the weight's exponent.

use crate::{Float, parallel};

/// Bytes that a task handles.
const SPAN: usize = 1 << 18;

/// Replaces the elements of `base` by the differences of `elements` from them. Both have whole elements, as many.
pub(crate) fn subtract(float: Float, elements: &[u8], base: &mut [u8]) {
    each(float, base, elements, [subtract_1, subtract_2, subtract_4]);
}

/// Replaces differences from the elements of `base` by the elements. Both have whole elements, as many.
pub(crate) fn add(float: Float, differences: &mut [u8], base: &[u8]) {
    each(float, differences, base, [add_1, add_2, add_4]);
}

/// Changes the first elements by the second.
type Change = fn(&mut [u8], &[u8]);

/// Calls the function for elements of 1, 2 or 4 bytes.
fn each(float: Float, changed: &mut [u8], other: &[u8], [one, two, four]: [Change; 3]) {
    assert_eq!(changed.len(), other.len(), "tensors of the same size");
    let function = match float.bytes() {
        1 => one,
        2 => two,
        _ => four,
    };
    parallel::for_each_chunk(changed, SPAN, &|span, changed| {
        function(changed, &other[span * SPAN..][..changed.len()]);
    });
}

/// Defines both directions for elements of the signed integer `$int`, without branches, so that they are vectorised.
macro_rules! directions {
    ($int:ty, $unsigned:ty, $ordered:ident, $subtract:ident, $add:ident) => {
        /// The number whose order is that of the float; its own inverse.
        #[inline(always)]
        const fn $ordered(bits: $int) -> $int {
            bits ^ (bits >> (<$int>::BITS - 1) & <$int>::MAX)
        }

        fn $subtract(base: &mut [u8], elements: &[u8]) {
            const BYTES: usize = size_of::<$int>();
            let elements = elements.as_chunks::<BYTES>().0;
            for (base, element) in base.as_chunks_mut::<BYTES>().0.iter_mut().zip(elements) {
                let (from, to) = (<$int>::from_le_bytes(*base), <$int>::from_le_bytes(*element));
                let difference = $ordered(to).wrapping_sub($ordered(from));
                *base = (difference << 1 ^ difference >> (<$int>::BITS - 1)).to_le_bytes();
            }
        }

        fn $add(differences: &mut [u8], base: &[u8]) {
            const BYTES: usize = size_of::<$int>();
            let base = base.as_chunks::<BYTES>().0;
            for (difference, base) in differences.as_chunks_mut::<BYTES>().0.iter_mut().zip(base) {
                let folded = <$unsigned>::from_le_bytes(*difference);
                let change = (folded >> 1) as $int ^ ((folded & 1) as $int).wrapping_neg();
                *difference = $ordered($ordered(<$int>::from_le_bytes(*base)).wrapping_add(change)).to_le_bytes();
            }
        }
    };
}

directions!(i8, u8, ordered_1, subtract_1, add_1);
directions!(i16, u16, ordered_2, subtract_2, add_2);
directions!(i32, u32, ordered_4, subtract_4, add_4);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    #[test]
    fn differences_come_back() {
        let mut random = Random::new(1);
        for float in Float::ALL {
            let (elements, base) = (random.bytes(1 << 19), random.bytes(1 << 19));
            let mut differences = base.clone();
            subtract(float, &elements, &mut differences);
            add(float, &mut differences, &base);
            assert!(differences == elements, "{}", float.name());
        }
        // All pairs of bytes.
        let elements: Vec<u8> = (0..=u16::MAX).map(|i| i as u8).collect();
        let base: Vec<u8> = (0..=u16::MAX).map(|i| (i >> 8) as u8).collect();
        let mut differences = base.clone();
        subtract(Float::E4M3, &elements, &mut differences);
        add(Float::E4M3, &mut differences, &base);
        assert!(differences == elements);
    }

    #[test]
    fn neighbours_differ_by_one() {
        let difference = |from: u16, to: u16| {
            let mut base = from.to_le_bytes();
            subtract(Float::Bf16, &to.to_le_bytes(), &mut base);
            u16::from_le_bytes(base)
        };
        // Across an octave, and across zero: 0, then -1 and 1.
        assert_eq!([difference(0x3f7f, 0x3f80), difference(0x3f80, 0x3f7f), difference(5, 5)], [2, 1, 0]);
        assert_eq!([difference(0x0000, 0x8000), difference(0x8000, 0x0000), difference(0xbf80, 0xbf81)], [1, 2, 1]);
    }
}
