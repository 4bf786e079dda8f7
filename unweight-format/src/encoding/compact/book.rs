//! The window of 32 exponents, and the code of quads of classes (`docs/format.md` A.11).

use super::Uncompact;
use crate::{
    CodecError, Histogram,
    encoding::{code::package_merge, packed::times_power_of_two},
    layout::{
        CLASS_BASE_MAX, CLASS_BASE_MIN, CLASS_CODE_MAX, CLASS_OPERAND_EXPONENT, CLASS_WINDOW, CLASS_WINDOW_BYTES,
        SECTION_ALIGN,
    },
};

/// Classes of four exponents in a window.
pub(super) const CLASSES: usize = CLASS_WINDOW / 4;
/// The number of quads: four classes of three bits, the first class lowest.
pub const QUADS: usize = 1 << 12;
/// Cost of an escape in bits, when window and book are chosen: its record, and as much again for a kernel's time.
const ESCAPE_BITS: u64 = 64;
/// Bits of an entry of the book.
const ENTRY_BITS: u64 = 16;
/// Book sizes to try, in addition to the size with all quads.
const BOOK_SIZES: [usize; 15] = [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768];
/// Entries of a decode table, and the maximum number of entries of a book.
pub const TABLE: usize = 1 << CLASS_CODE_MAX;

/// The window of 32 consecutive exponents of a compact tensor: eight classes of four.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassWindow {
    base: u8,
}

impl ClassWindow {
    /// The cheapest window, the lowest of equal ones. The cost is the entropy of the classes and 64 bits per element
    /// outside, computed in integers, so that every machine chooses the same window.
    pub fn best(histogram: &Histogram) -> Self {
        let cost = |base: u8| {
            let counts = Self { base }.class_counts(histogram);
            let inside: u64 = counts.iter().sum();
            let bits: u128 = counts
                .iter()
                .filter(|&&count| count > 0)
                .map(|&count| u128::from(count) * u128::from(log2(inside) - log2(count)))
                .sum();
            bits + u128::from(histogram.total() - inside) * u128::from(ESCAPE_BITS << LOG2_SHIFT)
        };
        let base = (CLASS_BASE_MIN..=CLASS_BASE_MAX).min_by_key(|&base| cost(base)).expect("223 windows");
        Self { base }
    }

    /// A window with this lowest exponent.
    ///
    /// # Errors
    /// `base` is not in 1..=223.
    pub fn new(base: u8) -> Result<Self, CodecError> {
        if (CLASS_BASE_MIN..=CLASS_BASE_MAX).contains(&base) {
            Ok(Self { base })
        } else {
            Err(CodecError::Code { section: "class_window", reason: "the base must be from 1 to 223" })
        }
    }

    /// Reads `class_window`.
    ///
    /// # Errors
    /// The base is not in 1..=223, or a byte after it is not 0.
    pub fn from_stored(bytes: [u8; CLASS_WINDOW_BYTES]) -> Result<Self, CodecError> {
        if bytes[1..].iter().any(|&byte| byte != 0) {
            return Err(CodecError::Code { section: "class_window", reason: "the bytes after the base must be 0" });
        }
        Self::new(bytes[0])
    }

    /// Returns the section `class_window`.
    pub fn stored(self) -> [u8; CLASS_WINDOW_BYTES] {
        std::array::from_fn(|i| if i == 0 { self.base } else { 0 })
    }

    /// Lowest exponent of the window.
    pub fn base(self) -> u8 {
        self.base
    }

    /// `2^(base - 96)`: the factor that converts a product with operands to a product with weights.
    pub fn scale(self) -> f32 {
        f32::from_bits(((127 + self.shift()) as u32) << 23)
    }

    /// The exponent less the base, if it is in the window. Its upper three bits are the class, its lower two bits are
    /// in the dense part.
    pub fn above(self, exponent: u8) -> Option<u8> {
        exponent.checked_sub(self.base).filter(|&above| usize::from(above) < CLASS_WINDOW)
    }

    /// The operand of a weight: `weight * 2^(96 - base)`, if it is exact.
    pub fn operand(self, weight: u16) -> Option<u16> {
        times_power_of_two(weight, -self.shift())
    }

    /// The weight of an operand: `operand * 2^(base - 96)`, if it is exact.
    pub fn weight(self, operand: u16) -> Option<u16> {
        times_power_of_two(operand, self.shift())
    }

    fn shift(self) -> i32 {
        i32::from(self.base) - i32::from(CLASS_OPERAND_EXPONENT)
    }

    /// The number of elements of each class.
    fn class_counts(self, histogram: &Histogram) -> [u64; CLASSES] {
        std::array::from_fn(|class| (0..4).map(|low| histogram.count(self.base + (4 * class + low) as u8)).sum())
    }

    /// The classes by descending frequency, the lower first of equal ones.
    pub(super) fn ranking(self, histogram: &Histogram) -> [u8; CLASSES] {
        let counts = self.class_counts(histogram);
        let mut order: [u8; CLASSES] = std::array::from_fn(|class| class as u8);
        order.sort_by_key(|&class| (std::cmp::Reverse(counts[usize::from(class)]), class));
        order
    }

    /// The expected count of each quad among [`EXPECTED`] elements with independent exponents.
    pub(super) fn expected_quads(self, histogram: &Histogram) -> Vec<u64> {
        let counts = self.class_counts(histogram);
        let inside = counts.iter().sum::<u64>().max(1) as f64;
        let share = |quad: usize, element: usize| counts[quad >> (3 * element) & 7] as f64 / inside;
        let count = |quad: usize| (0..4).map(|element| share(quad, element)).product::<f64>() * (EXPECTED / 4) as f64;
        (0..QUADS).map(|quad| count(quad) as u64).collect()
    }
}

/// Elements assumed in the window for expected counts: enough for rare quads to count.
pub(super) const EXPECTED: u64 = 1 << 32;

/// Fractional bits of [`log2`].
const LOG2_SHIFT: u32 = 16;

/// The binary logarithm of a number above 0, rounded down to a multiple of `2^-16`: by squaring, in integers.
fn log2(number: u64) -> u64 {
    let whole = number.ilog2();
    // 1 <= mantissa < 2, in units of 2^-31.
    let mut mantissa = if whole > 31 { number >> (whole - 31) } else { number << (31 - whole) };
    let mut log = u64::from(whole);
    for _ in 0..LOG2_SHIFT {
        mantissa = (mantissa * mantissa) >> 31;
        let carry = mantissa >> 32;
        mantissa >>= carry;
        log = log << 1 | carry;
    }
    log
}

/// The code of a quad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Code {
    /// The code in the bit order of a lane's forward chain, first bit lowest.
    pub forward: u16,
    /// The code in the bit order of the backward chain.
    pub backward: u16,
    /// Length in bits; 0 if the quad has no code.
    pub bits: u8,
}

/// A complete prefix code over quads of classes, of at most 9 bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassBook {
    /// `quad | bits << 12`, ascending: the order of canonical codes.
    entries: Vec<u16>,
}

impl ClassBook {
    /// Reads `class_book`.
    ///
    /// # Errors
    /// Entries do not ascend, a quad appears twice, a code is longer than 9 bits, the code is not complete, or the last
    /// entry is not followed by the padding to 16 bytes.
    pub fn from_stored(bytes: &[u8]) -> Result<Self, CodecError> {
        let fail = |reason| Err(CodecError::Code { section: "class_book", reason });
        let words: Vec<u16> = bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        let len = words.iter().position(|&word| word == 0).unwrap_or(words.len());
        let (entries, padding) = words.split_at(len);
        if padding.len() >= SECTION_ALIGN / 2 || padding.iter().any(|&word| word != 0) {
            return fail("the padding after the last entry must be less than 16 bytes, all 0");
        }
        if !entries.is_sorted_by(|a, b| a < b) {
            return fail("entries must ascend");
        }
        let mut is_used = [false; QUADS];
        if entries.iter().any(|&entry| std::mem::replace(&mut is_used[quad_of(entry)], true)) {
            return fail("a quad appears twice");
        }
        if entries.iter().any(|&entry| !(1..=CLASS_CODE_MAX).contains(&bits_of(entry))) {
            return fail("a code must have 1 to 9 bits");
        }
        // At most 4096 entries: no overflow.
        if entries.iter().map(|&entry| TABLE >> bits_of(entry)).sum::<usize>() != TABLE {
            return fail("the code is not complete (Kraft sum is not 1)");
        }
        Ok(Self { entries: entries.to_vec() })
    }

    /// Returns the section `class_book`.
    pub fn stored(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        bytes.resize(bytes.len().next_multiple_of(SECTION_ALIGN), 0);
        bytes
    }

    /// The number of quads that have a code.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Always false: a code has at least two quads.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entry of every value of the next 9 bits of a chain, first bit lowest: `quad | bits << 12`.
    pub fn table(&self) -> Vec<u16> {
        let mut table = vec![0; TABLE];
        for (entry, code) in self.codes() {
            (usize::from(code.forward)..TABLE).step_by(1 << code.bits).for_each(|slot| table[slot] = entry);
        }
        table
    }

    /// [`ClassBook::table`] in the kernels' format: the code's length, and the classes at the positions of operands,
    /// those of the second register three bits lower, below the exponent's constant 96
    /// (`templates/include/unweight/encoding/compact.cuh`).
    pub fn kernel_table(&self) -> Vec<u32> {
        const CONSTANT: u32 = (CLASS_OPERAND_EXPONENT as u32) << 7;
        let entry = |entry: u16| {
            let class = |element: usize| u32::from(class_of(quad_of(entry), element));
            let first = class(0) << 9 | class(1) << 25 | CONSTANT | CONSTANT << 16;
            bits_of(entry) | first | class(2) << 6 | class(3) << 22
        };
        self.table().into_iter().map(entry).collect()
    }

    /// The code of every quad.
    pub(super) fn by_quad(&self) -> Vec<Code> {
        let mut codes = vec![Code::default(); QUADS];
        self.codes().for_each(|(entry, code)| codes[quad_of(entry)] = code);
        codes
    }

    /// Assigns canonical codes in the order of the entries.
    fn codes(&self) -> impl Iterator<Item = (u16, Code)> {
        let mut next = 0u16;
        let mut last = 0;
        self.entries.iter().map(move |&entry| {
            let bits = bits_of(entry);
            if last > 0 {
                next = (next + 1) << (bits - last);
            }
            last = bits;
            (entry, Code { forward: next.reverse_bits() >> (16 - bits), backward: next, bits: bits as u8 })
        })
    }
}

fn quad_of(entry: u16) -> usize {
    usize::from(entry & 0xfff)
}

fn bits_of(entry: u16) -> u32 {
    u32::from(entry >> 12)
}

/// The class at a place of a quad.
fn class_of(quad: usize, element: usize) -> u8 {
    (quad >> (3 * element) & 7) as u8
}

/// A book chosen for counts of quads, and the substitutes for the quads that are not in it.
#[derive(Debug, Clone)]
pub(super) struct Chosen {
    pub book: ClassBook,
    /// By quad: the quad coded in its place, with the places (bits 12..15) whose elements are escapes.
    pub coded: Vec<u16>,
    /// Bits of all codes.
    pub bits: u64,
    /// Escapes of quads that are not in the book.
    pub escapes: u64,
}

/// Chooses the cheapest book, the smallest of equal ones. The cost is codes, escapes at [`ESCAPE_BITS`], and the book.
///
/// A book contains the most frequent quads and the quad of only the most frequent class, which replaces the classes of
/// quads that are not in the book.
pub(super) fn choose(quads: &[u64], ranking: [u8; CLASSES]) -> Chosen {
    let filler = usize::from(ranking[0]) * 0o1111;
    let mut order: Vec<usize> = (0..QUADS).filter(|&quad| quads[quad] > 0 && quad != filler).collect();
    order.sort_by_key(|&quad| (std::cmp::Reverse(quads[quad]), quad));
    order.insert(0, filler);
    // A code has at least two entries.
    if order.len() == 1 {
        order.push(filler ^ 1);
    }
    let all = order.len().min(TABLE);
    let sizes = BOOK_SIZES.into_iter().filter(|&size| size < all).chain([all]);
    let cost = |chosen: &Chosen| chosen.bits + chosen.escapes * ESCAPE_BITS + chosen.book.len() as u64 * ENTRY_BITS;
    let books = sizes.map(|size| assemble(quads, &ranking, &order[..size]));
    books.min_by_key(|chosen| (cost(chosen), chosen.book.len())).expect("one size at least")
}

fn assemble(quads: &[u64], ranking: &[u8; CLASSES], members: &[usize]) -> Chosen {
    let mut inside = [false; QUADS];
    members.iter().for_each(|&quad| inside[quad] = true);
    let (mut counts, mut escapes) = (vec![0u64; QUADS], 0);
    let coded: Vec<u16> = (0..QUADS)
        .map(|quad| {
            let (coded, escaped) = substitute(quad, ranking, &inside);
            counts[coded] += quads[quad];
            escapes += quads[quad] * u64::from(escaped.count_ones());
            coded as u16 | escaped << 12
        })
        .collect();
    let mut members: Vec<usize> = members.to_vec();
    members.sort_by_key(|&quad| (std::cmp::Reverse(counts[quad]), quad));
    let weights: Vec<u64> = members.iter().map(|&quad| counts[quad]).collect();
    let lengths = package_merge(&weights, CLASS_CODE_MAX);
    let bits = weights.iter().zip(&lengths).map(|(weight, &bits)| weight * u64::from(bits)).sum();
    let mut entries: Vec<u16> =
        members.iter().zip(&lengths).map(|(&quad, &bits)| quad as u16 | u16::from(bits) << 12).collect();
    entries.sort_unstable();
    Chosen { book: ClassBook { entries }, coded, bits, escapes }
}

/// Returns the quad that is coded, and the places that become escapes. The rarest classes are replaced by the most
/// frequent one, of equal classes the lower place first, until the quad is in the book.
fn substitute(quad: usize, ranking: &[u8; CLASSES], inside: &[bool; QUADS]) -> (usize, u16) {
    let (mut coded, mut escaped) = (quad, 0);
    for &rare in ranking[1..].iter().rev() {
        for element in 0..4 {
            if inside[coded] {
                return (coded, escaped);
            }
            if class_of(quad, element) == rare {
                coded = coded & !(7 << (3 * element)) | usize::from(ranking[0]) << (3 * element);
                escaped |= 1 << element;
            }
        }
    }
    (coded, escaped)
}

/// Chooses the book for counts of quads, if few enough elements are escapes; `outside` elements are outside the window.
pub(super) fn covering(
    quads: &[u64],
    ranking: [u8; CLASSES],
    (outside, elements): (u64, u64),
) -> Result<Chosen, Uncompact> {
    let chosen = choose(quads, ranking);
    let escapes = outside + chosen.escapes;
    if u128::from(escapes) * u128::from(super::ESCAPES_ONE_IN) <= u128::from(elements) {
        Ok(chosen)
    } else {
        Err(Uncompact::Escapes { escapes, elements })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integer_logarithm_agrees_with_floating_point() {
        for number in (1..5000).chain([1 << 31, 1 << 32, (1 << 33) + 12345, u64::MAX >> 1, u64::MAX]) {
            let got = log2(number) as f64 / f64::from(1 << LOG2_SHIFT);
            let want = (number as f64).log2();
            assert!(got <= want + 1e-9 && got > want - 2e-4, "{number}: {got} {want}");
        }
    }

    #[test]
    fn a_stored_book_is_checked() {
        let entry = |bits: u16, quad: u16| bits << 12 | quad;
        let read = |entries: &[u16]| {
            let mut bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
            bytes.resize(bytes.len().next_multiple_of(16), 0);
            ClassBook::from_stored(&bytes)
        };
        let good = [entry(1, 0o7777), entry(2, 0o7776), entry(2, 0o7777 - 8)];
        assert!(read(&[entry(1, 5), entry(1, 9)]).is_ok());
        let book = read(&[entry(1, 0o7777), entry(2, 0o7767), entry(2, 0o7776)]).unwrap();
        assert_eq!(ClassBook::from_stored(&book.stored()), Ok(book.clone()));
        assert_eq!(book.len(), 3);
        for (entries, message) in [
            (&good[..], "ascend"),
            (&[entry(1, 5), entry(1, 5)], "ascend"),
            (&[entry(1, 5), entry(2, 5), entry(2, 6)], "twice"),
            (&[entry(1, 5), entry(2, 6)], "Kraft"),
            (&[entry(1, 5), entry(1, 6), entry(1, 7)], "Kraft"),
            (&[entry(1, 5), entry(10, 6)], "1 to 9 bits"),
            (&[entry(0, 5), entry(1, 6)], "1 to 9 bits"),
            (&[], "Kraft"),
        ] {
            let error = read(entries).unwrap_err().to_string();
            assert!(error.contains(message), "{entries:?}: {error}");
        }
        let mut long = book.stored();
        long.resize(32, 0);
        assert!(ClassBook::from_stored(&long).is_err(), "a block of padding");
        let mut set = book.stored();
        set[14] = 1;
        assert!(ClassBook::from_stored(&set).is_err(), "padding that is not 0");
    }

    #[test]
    fn the_table_inverts_the_codes() {
        let mut quads = vec![0u64; QUADS];
        for (i, count) in quads.iter_mut().enumerate().step_by(3) {
            *count = 1 << (i % 40);
        }
        let chosen = choose(&quads, std::array::from_fn(|class| class as u8));
        let (codes, table) = (chosen.book.by_quad(), chosen.book.table());
        let mut slots = 0;
        for (quad, code) in codes.iter().enumerate().filter(|(_, code)| code.bits > 0) {
            assert_eq!(code.backward, code.forward.reverse_bits() >> (16 - code.bits));
            for rest in 0..TABLE >> code.bits {
                assert_eq!(
                    usize::from(table[usize::from(code.forward) | rest << code.bits]),
                    quad | usize::from(code.bits) << 12
                );
                slots += 1;
            }
        }
        assert_eq!(slots, TABLE);
    }

    #[test]
    fn quads_without_a_code_drop_their_rarest_classes() {
        // 7 is the most frequent class, 0 the rarest.
        let ranking: [u8; 8] = std::array::from_fn(|i| 7 - i as u8);
        let mut inside = [false; QUADS];
        inside[0o7777] = true;
        inside[0o7775] = true;
        assert_eq!(substitute(0o7775, &ranking, &inside), (0o7775, 0));
        assert_eq!(substitute(0o7275, &ranking, &inside), (0o7775, 0b0100));
        assert_eq!(substitute(0o2775, &ranking, &inside), (0o7775, 0b1000));
        assert_eq!(substitute(0o2223, &ranking, &inside), (0o7777, 0b1111));
        assert_eq!(substitute(0o7776, &ranking, &inside), (0o7777, 0b0001));
    }
}
