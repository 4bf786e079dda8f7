//! What the symbols of a tensor mean, how probable they are, and where (`docs/format.md` A.13): the section
//! `rans_model`.

use super::{
    Section,
    numbers::{NumberReader, NumberWriter},
};
use crate::{CodecError, TileGrid, layout::SECTION_ALIGN};

/// Bits of a frequency: those of a table add up to `2^12`.
pub const PROBABILITY_BITS: u32 = 12;
/// Sum of the frequencies of a table.
pub const TOTAL: u32 = 1 << PROBABILITY_BITS;
/// Symbols of a tensor at most.
pub const SYMBOLS_MAX: usize = 256;
/// Classes of rows, and of columns. The middle one is the usual.
pub const CLASSES: usize = 16;
/// Contexts: sums of two classes.
pub const CONTEXTS: usize = 2 * CLASSES - 1;
/// Tables of a tensor at most: those of eight fit an L1 cache.
pub const TABLES_MAX: usize = 8;
/// Upper bits of a mantissa that belong to its symbol, or follow it.
pub const TOP_BITS: u32 = 4;
/// Symbols of an exponent of the head.
const STEPS: usize = 1 << TOP_BITS;
/// Bytes before the numbers.
const FIXED_BYTES: usize = 16;

/// The symbols of a tensor, in order of magnitude. An exponent of the head has 16 symbols, one for each value of the
/// mantissa's upper four bits; any other exponent has one, which those four bits follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbols {
    /// The lowest exponent.
    pub first: u8,
    /// Exponents below the head.
    pub below: u8,
    /// Exponents in the head.
    pub head: u8,
    /// Exponents above the head.
    pub above: u8,
}

impl Symbols {
    /// The number of symbols; more than [`SYMBOLS_MAX`] are invalid.
    pub const fn count(self) -> usize {
        self.below as usize + STEPS * self.head as usize + self.above as usize
    }

    /// The first symbol above the head.
    pub const fn head_end(self) -> usize {
        self.below as usize + STEPS * self.head as usize
    }

    /// The exponent of a symbol.
    pub const fn exponent(self, symbol: usize) -> u8 {
        (self.join(symbol as u16, 0) >> TOP_BITS) as u8
    }

    /// Whether the symbol stands for a whole exponent, so that four bits follow it.
    pub const fn is_whole(self, symbol: usize) -> bool {
        symbol < self.below as usize || symbol >= self.head_end()
    }

    /// The symbol of a magnitude (exponent and upper mantissa bits, 12 bits), and the four bits that follow it.
    #[inline(always)]
    pub const fn split(self, magnitude: u16) -> (u16, u16) {
        // Without branches, so that the compiler vectorises it.
        let at = magnitude.wrapping_sub((self.first as u16) << TOP_BITS);
        let (below, head) = ((self.below as u16) << TOP_BITS, (self.head as u16) << TOP_BITS);
        let low = if at < below { at } else { below };
        let middle = at.saturating_sub(below);
        let middle = if middle < head { middle } else { head };
        let high = at.saturating_sub(below + head);
        ((low >> TOP_BITS) + middle + (high >> TOP_BITS), (low + high) & 15)
    }

    /// The magnitude of a symbol with the four bits that follow it (0 in the head).
    #[inline(always)]
    pub const fn join(self, symbol: u16, extra: u16) -> u16 {
        let (below, end) = (self.below as u16, self.head_end() as u16);
        let low = if symbol < below { symbol } else { below };
        let middle = symbol.saturating_sub(below);
        let middle = if middle < end - below { middle } else { end - below };
        let high = symbol.saturating_sub(end);
        (((self.first as u16) + low + high) << TOP_BITS) + middle + extra
    }

    /// Checks that there are 1 to 256 symbols, of exponents up to 255.
    fn check(self) -> Result<Self, CodecError> {
        let exponents = usize::from(self.below) + usize::from(self.head) + usize::from(self.above);
        if exponents == 0 || usize::from(self.first) + exponents > 256 {
            return Err(invalid("it has no exponents, or some above 255"));
        }
        if self.count() > SYMBOLS_MAX { Err(invalid("it has more than 256 symbols")) } else { Ok(self) }
    }
}

/// Which table codes an element: that of the sum of the classes of its row and its column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contexts {
    /// Bit `i`: context `i` begins a new table. Bit 0 is set.
    pub starts: u32,
    /// The class of each row; `None` if all have the middle one.
    pub rows: Option<Vec<u8>>,
    /// The class of each column; `None` if all have the middle one.
    pub cols: Option<Vec<u8>>,
}

impl Contexts {
    /// A single table for all elements.
    pub const fn single() -> Self {
        Self { starts: 1, rows: None, cols: None }
    }

    /// The number of tables.
    pub const fn tables(&self) -> usize {
        self.starts.count_ones() as usize
    }

    /// The table of a context, which is below [`CONTEXTS`].
    pub const fn table_of(&self, context: usize) -> u8 {
        (self.starts << (31 - context)).count_ones() as u8 - 1
    }

    /// The class of a row.
    pub fn row(&self, row: usize) -> u8 {
        self.rows.as_ref().map_or(CLASSES as u8 / 2, |classes| classes[row])
    }

    /// The class of a column.
    pub fn col(&self, col: usize) -> u8 {
        self.cols.as_ref().map_or(CLASSES as u8 / 2, |classes| classes[col])
    }

    /// The table of an element.
    pub fn table(&self, row: usize, col: usize) -> usize {
        self.table_of(usize::from(self.row(row) + self.col(col))).into()
    }
}

/// The model of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// The symbols of the elements.
    pub symbols: Symbols,
    /// The table of each element.
    pub contexts: Contexts,
    /// Per table the frequency of each symbol, at most [`TOTAL`], which is also their sum.
    pub tables: Vec<Vec<u16>>,
}

impl Model {
    /// The section's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Symbols { first, below, head, above } = self.symbols;
        let Contexts { starts, rows, cols } = &self.contexts;
        let mut bytes = vec![first, below, head, above];
        bytes.extend(starts.to_le_bytes());
        bytes.extend([u8::from(rows.is_some()), u8::from(cols.is_some())]);
        bytes.resize(FIXED_BYTES, 0);
        let mut numbers = NumberWriter::default();
        self.tables.iter().for_each(|table| put_table(&mut numbers, table));
        for &class in [rows, cols].into_iter().flatten().flatten() {
            numbers.push(i32::from(class) - CLASSES as i32 / 2);
        }
        bytes.extend(numbers.finish());
        bytes.resize(bytes.len().next_multiple_of(SECTION_ALIGN), 0);
        bytes
    }

    /// Reads and checks the section of a matrix.
    ///
    /// # Errors
    /// The section is too short or too long, or breaks an invariant.
    pub fn from_bytes(grid: TileGrid, bytes: &[u8]) -> Result<Self, CodecError> {
        let Some((fixed, rest)) = bytes.split_at_checked(FIXED_BYTES) else {
            return Err(invalid("it has less than 16 bytes"));
        };
        let symbols = Symbols { first: fixed[0], below: fixed[1], head: fixed[2], above: fixed[3] }.check()?;
        let starts = u32::from_le_bytes(fixed[4..8].try_into().expect("4 bytes"));
        if starts & 1 == 0 || starts >> CONTEXTS != 0 || starts.count_ones() as usize > TABLES_MAX {
            return Err(invalid("tables must be 1 to 8, of 31 contexts, the first of which begins one"));
        }
        let &[has_rows @ 0..=1, has_cols @ 0..=1, 0, 0, 0, 0, 0, 0] = &fixed[8..] else {
            return Err(invalid("flags must be 0 or 1, and zeros must follow"));
        };
        let mut numbers = NumberReader::new(rest);
        let table = |_| table(&mut numbers, symbols.count());
        let tables = (0..starts.count_ones()).map(table).collect::<Result<Vec<_>, _>>()?;
        let rows = (has_rows == 1).then(|| classes(&mut numbers, grid.rows())).transpose()?;
        let cols = (has_cols == 1).then(|| classes(&mut numbers, grid.cols())).transpose()?;
        if !numbers.rest_is_zero() || numbers.used_bytes().next_multiple_of(SECTION_ALIGN) != rest.len() {
            return Err(invalid("after the numbers, only zeros up to a multiple of 16 bytes may follow"));
        }
        Ok(Self { symbols, contexts: Contexts { starts, rows, cols }, tables })
    }
}

/// Appends the frequencies of a table.
pub(super) fn put_table(numbers: &mut NumberWriter, table: &[u16]) {
    let mut previous = 0;
    for &frequency in table {
        numbers.push(i32::from(frequency) - previous);
        previous = frequency.into();
    }
}

/// Reads the frequencies of a table.
pub(super) fn table(numbers: &mut NumberReader<'_>, symbols: usize) -> Result<Vec<u16>, CodecError> {
    let (mut frequency, mut sum) = (0, 0);
    let mut next = || {
        frequency += numbers.next().ok_or(invalid("a number is missing or too long"))?;
        if !(0..=TOTAL as i32).contains(&frequency) {
            return Err(invalid("a frequency is negative or above 4096"));
        }
        sum += frequency as u32;
        Ok(frequency as u16)
    };
    let table = (0..symbols).map(|_| next()).collect::<Result<Vec<_>, _>>()?;
    if sum == TOTAL { Ok(table) } else { Err(invalid("the frequencies of a table do not add up to 4096")) }
}

/// Reads the classes of rows or columns.
fn classes(numbers: &mut NumberReader<'_>, count: usize) -> Result<Vec<u8>, CodecError> {
    // A number takes at least one bit: reading ends before more than eight classes per stored byte are held.
    let mut classes = Vec::new();
    for _ in 0..count {
        let number = numbers.next().ok_or(invalid("a number is missing or too long"))?;
        match number + CLASSES as i32 / 2 {
            class @ 0..16 => classes.push(class as u8),
            _ => return Err(invalid("a class is below 0 or above 15")),
        }
    }
    Ok(classes)
}

fn invalid(reason: &'static str) -> CodecError {
    CodecError::Code { section: Section::RANS_MODEL.name(), reason }
}

/// The table of each element in the order of the matrix, without a sum per element.
#[derive(Debug)]
pub(super) struct TableIds<'a> {
    cols: usize,
    contexts: &'a Contexts,
    /// Per class of rows, the table of each column; empty for a class that no row has, and if columns have no classes.
    by_class: Vec<Vec<u8>>,
}

impl<'a> TableIds<'a> {
    /// Computes the tables of all columns for each class of rows.
    pub fn new(contexts: &'a Contexts, cols: usize) -> Self {
        let used = |class: u8| match &contexts.rows {
            Some(rows) => rows.contains(&class),
            None => usize::from(class) == CLASSES / 2,
        };
        let of = |class: u8| match &contexts.cols {
            Some(classes) if used(class) => classes.iter().map(|col| contexts.table_of((class + col).into())).collect(),
            _ => Vec::new(),
        };
        Self { cols, contexts, by_class: (0..CLASSES as u8).map(of).collect() }
    }

    /// Whether all elements have table 0.
    pub fn is_single(&self) -> bool {
        self.contexts.tables() == 1
    }

    /// Writes the tables of the elements from `first` on.
    pub fn fill(&self, first: usize, ids: &mut [u8]) {
        let (mut row, mut col, mut at) = (first / self.cols, first % self.cols, 0);
        while at < ids.len() {
            let count = (self.cols - col).min(ids.len() - at);
            let (class, target) = (self.contexts.row(row), &mut ids[at..at + count]);
            match &self.contexts.cols {
                Some(_) => target.copy_from_slice(&self.by_class[usize::from(class)][col..col + count]),
                None => target.fill(self.contexts.table_of(usize::from(class) + CLASSES / 2)),
            }
            (row, col, at) = (row + 1, 0, at + count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_split_into_symbols_and_come_back() {
        for (first, below, head, above) in
            [(0, 120, 4, 10), (0, 0, 16, 0), (3, 253, 0, 0), (100, 1, 1, 1), (250, 0, 6, 0)]
        {
            let symbols = Symbols { first, below, head, above }.check().unwrap();
            let exponents = u16::from(below) + u16::from(head) + u16::from(above);
            let mut last = None;
            for magnitude in u16::from(first) * 16..(u16::from(first) + exponents) * 16 {
                let (symbol, extra) = symbols.split(magnitude);
                assert!(usize::from(symbol) < symbols.count() && extra < 16);
                assert!(symbols.is_whole(symbol.into()) || extra == 0);
                assert_eq!(symbols.join(symbol, extra), magnitude, "{symbols:?}");
                assert!(last < Some((symbol, extra)), "in order of magnitude");
                last = Some((symbol, extra));
            }
            assert_eq!(last.map(|(symbol, _)| usize::from(symbol) + 1), Some(symbols.count()));
        }
    }

    #[test]
    fn tables_of_elements_follow_from_the_classes() {
        let contexts = Contexts {
            starts: 0b1000_0000_0000_0101_0001,
            rows: Some(vec![0, 15, 7]),
            cols: Some(vec![8, 0, 4, 15, 3]),
        };
        assert_eq!(
            (contexts.table_of(3), contexts.table_of(4), contexts.table_of(6), contexts.table_of(30)),
            (0, 1, 2, 3)
        );
        for contexts in [
            Contexts { rows: None, ..contexts.clone() },
            Contexts { cols: None, ..contexts.clone() },
            contexts,
            Contexts::single(),
        ] {
            let ids = TableIds::new(&contexts, 5);
            let expected: Vec<u8> = (0..15).map(|i| contexts.table(i / 5, i % 5) as u8).collect();
            for (first, end) in [(0, 15), (3, 9), (5, 10), (14, 15), (2, 2)] {
                let mut got = vec![99; end - first];
                ids.fill(first, &mut got);
                assert_eq!(got, expected[first..end]);
            }
        }
    }
}
