//! The compact encoding: classes of exponents are entropy-coded, the other bits are dense, both in the order of a
//! tensor core's A operand (`docs/format.md` A.11). It is as small as the Huffman encoding, and kernels decode it while
//! they multiply.
//!
//! ```text
//! exponent above the window's base = 4 * class + low
//!   classes of 4 elements -> one code of at most 9 bits -> class_streams, two chains per lane and tile
//!   sign, low, mantissa   -> 10 bits per element        -> dense, 8 registers in 5 words
//!   elements without code -> their exact operands       -> class_escapes, found by the tile's head
//! ```

mod book;
mod encode;

use std::borrow::Cow;

pub use self::{
    book::{ClassBook, ClassWindow, QUADS, TABLE},
    encode::{Classes, Coding, encode},
};
use super::{
    Encoding, EncodingId, Extent, NotEncodable, ReadTileRows, Sample, Section, Sections, StoredTensor, Survey,
    TileRows,
    sample::fixed_bytes,
    tiles::{check_out, debug_sizes},
};
use crate::{
    CodeLimit, CodecError, FloatMatrix, Histogram, TileGrid,
    bits::zeroed,
    huffman,
    layout::{
        CLASS_CODE_MAX, CLASS_OPERAND_EXPONENT, CLASS_WINDOW_BYTES, DENSE_TILE_BYTES, LANE_CODES, LANES, ROW_BLOCKS,
        SECTION_ALIGN, STREAM_TILE_BYTES_MAX, TILE,
    },
    packed, parallel,
    safetensors::Dtype,
};

/// The compact encoding.
#[derive(Debug, Clone, Copy)]
pub struct Compact;

impl EncodingId {
    /// Entropy-coded classes of exponents and a dense part with the other bits (`docs/format.md` A.11).
    pub const COMPACT: Self = Self::new("compact");
}

impl Section {
    /// u8 `[16]`: base of the window.
    pub const CLASS_WINDOW: Self = Self::new("class_window", Dtype::U8, &[Extent::Fixed(CLASS_WINDOW_BYTES)]);
    /// u16 `[entries]`: the code of quads of classes.
    pub const CLASS_BOOK: Self = Self::new("class_book", Dtype::U16, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u32 `[entries, 2]`: start of a tile's streams, and its head; one more entry for the end, then zeros.
    pub const CLASS_TILES: Self =
        Self::new("class_tiles", Dtype::U32, &[Extent::Open, Extent::Fixed(2)]).padded_to(SECTION_ALIGN);
    /// u32 `[words]`: lists of escapes.
    pub const CLASS_ESCAPES: Self = Self::new("class_escapes", Dtype::U32, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u32 `[words]`: lengths and codes of the lanes, tile by tile.
    pub const CLASS_STREAMS: Self = Self::new("class_streams", Dtype::U32, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u8 `[tiles, 5120]`: signs, lower bits of exponents, and mantissas.
    pub const DENSE: Self = Self::new("dense", Dtype::U8, &[Extent::Tiles, Extent::Fixed(DENSE_TILE_BYTES)]);
}

impl Compact {
    /// The sections in stored order.
    const SECTIONS: &'static [Section] = &[
        Section::CLASS_WINDOW,
        Section::CLASS_BOOK,
        Section::CLASS_TILES,
        Section::CLASS_ESCAPES,
        Section::CLASS_STREAMS,
        Section::DENSE,
    ];
}

impl Encoding for Compact {
    fn id(&self) -> EncodingId {
        EncodingId::COMPACT
    }

    fn sections(&self) -> &'static [Section] {
        Self::SECTIONS
    }

    fn fallback(&self) -> EncodingId {
        EncodingId::HUFFMAN
    }

    fn fits(&self, grid: TileGrid) -> Result<(), NotEncodable> {
        Ok(whole_tiles(grid)?)
    }

    /// Assumes that exponents are independent of each other. Does not look for single escapes without an operand.
    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable> {
        self.fits(grid)?;
        let histogram = sample.histogram();
        let window = ClassWindow::best(histogram);
        let quads = window.expected_quads(histogram);
        // Scaled to the expected number of elements.
        let outside = u128::from(encode::outside(window, histogram)) * u128::from(book::EXPECTED);
        let outside = (outside / u128::from(histogram.total().max(1))) as u64;
        let chosen = book::covering(&quads, window.ranking(histogram), (outside, book::EXPECTED))?;
        let share = |part: u64| (u128::from(part) * grid.elements() as u128 / u128::from(book::EXPECTED)) as u64;
        // A lane is filled up to 2 bits, a tile up to a word.
        let streams = share(chosen.bits) / 8 + grid.tiles() as u64 * (LANES + LANES / 16 + WORD / 2) as u64;
        let bytes = fixed_bytes(Self::SECTIONS, grid)
            + tiles_bytes(grid) as u64
            + streams
            + share(outside + chosen.escapes) * 4;
        let bytes = bytes + chosen.book.stored().len() as u64;
        Ok(worth_it(grid, histogram, sample.limit(), bytes).map(|()| bytes)?)
    }

    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        CompactTensor::from_sections(grid, |section| sections.get(section)).map(|_| ())
    }

    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable> {
        let tensor = encode(matrix.bf16()?, &survey.histogram)?;
        worth_it(matrix.grid(), &survey.histogram, limit, tensor.stored_bytes())?;
        Ok(tensor.into_sections())
    }

    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        decode_into(&CompactTensor::from_sections(grid, |section| sections.get(section))?, out)
    }

    fn tile_rows(&self) -> Option<ReadTileRows> {
        Some(read_tile_rows)
    }
}

/// See [`Encoding::tile_rows`].
fn read_tile_rows<'a>(grid: TileGrid, sections: &Sections<'a>) -> Result<TileRows<'a>, CodecError> {
    let tensor = CompactTensor::from_sections(grid, |section| sections.get(section))?;
    Ok(Box::new(move |first, out| decode_tile_rows(&tensor, first, out)))
}

impl From<Uncompact> for NotEncodable {
    fn from(why: Uncompact) -> Self {
        Self::new(why)
    }
}

/// A tensor with more escapes than one element in this number is not compact. As for the packed encoding, the limit
/// bounds a kernel's time.
pub const ESCAPES_ONE_IN: u64 = packed::ESCAPES_ONE_IN;

/// The maximum size above the Huffman encoding, in thousandths.
const ABOVE_HUFFMAN: u64 = 20;

/// Registers of a row block: four steps of four registers.
const REGISTERS: usize = 16;
/// Registers of one dense unit of five words, which holds two steps.
const UNIT: usize = 8;
/// The bits of two halves that a dense word leaves free: 14..9 in each.
const FREE: u32 = 0x7e00_7e00;
/// The bits of a carried register that are rotated (`docs/format.md` A.11).
const ROTATED: u32 = 0x801f_801f;
const HEAD_LIST: u32 = 1 << 31;
const HEAD_ONE: u32 = 1 << 30;
/// Maximum number of records of a list: every element of a tile.
const RECORDS_MAX: usize = TILE * TILE;
/// Bytes of a word; the streams of a tile start and end on words.
const WORD: usize = 4;
/// Room before and after a tile's streams, so that no chain of a damaged tile reads out of bounds.
const STREAM_PAD: usize = 64;

/// Why a matrix cannot be compact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Uncompact {
    /// `n` or `k` is not a multiple of 64.
    #[error("rows or columns are not a multiple of 64")]
    Shape,
    /// Too many elements have no code ([`ESCAPES_ONE_IN`]).
    #[error("{:.2} % of the elements have no code, the limit is {:.2} %", percent(*escapes, *elements), percent(1, ESCAPES_ONE_IN))]
    Escapes {
        /// Elements outside the window, and those that have no code because their quad is not in the book.
        escapes: u64,
        /// Elements of the matrix.
        elements: u64,
    },
    /// An escape has no exact operand.
    #[error("element [{row}, {col}] has no exact operand")]
    Operand {
        /// Row of the first such element, in row-major order.
        row: usize,
        /// Column of that element.
        col: usize,
    },
    /// The Huffman encoding is smaller by more than the limit.
    #[error("the sections are more than {ABOVE_HUFFMAN} thousandths larger than the Huffman encoding's")]
    Larger {
        /// Bytes of all sections.
        bytes: u64,
        /// Bytes of the Huffman encoding without verbatim rows.
        huffman: u64,
    },
}

impl Uncompact {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "not-compactable"
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}

/// Checks whether a matrix of this shape can have the encoding.
///
/// # Errors
/// [`Uncompact::Shape`].
pub fn whole_tiles(grid: TileGrid) -> Result<(), Uncompact> {
    packed::packable_shape(grid).map_err(|_| Uncompact::Shape)
}

/// Checks that `bytes` does not exceed the size of the Huffman encoding by more than the limit. That size is its fixed
/// sections and the codes of the exponents in its palette, without verbatim rows.
///
/// # Errors
/// [`Uncompact::Larger`].
pub fn worth_it(grid: TileGrid, histogram: &Histogram, limit: CodeLimit, bytes: u64) -> Result<(), Uncompact> {
    let Some(code) = huffman::Code::from_histogram(histogram, limit) else { return Ok(()) };
    let table = code.encode_table();
    let bits: u128 =
        (0..=255u8).map(|e| u128::from(histogram.count(e)) * u128::from(table[usize::from(e)].1)).sum::<u128>();
    let scaled = bits * grid.elements() as u128 / u128::from(histogram.total().max(1));
    // A tile is filled up to a word: 16 bits on average.
    let huffman = fixed_bytes(huffman::Huffman::SECTIONS, grid) + (scaled / 8) as u64 + grid.tiles() as u64 * 2;
    if u128::from(bytes) * 1000 <= u128::from(huffman) * u128::from(1000 + ABOVE_HUFFMAN) {
        Ok(())
    } else {
        Err(Uncompact::Larger { bytes, huffman })
    }
}

/// A compact matrix. `B` owns or borrows the bytes. Construction validates them, so every index in them can be trusted.
/// Only decoding checks that a lane's codes use its stored bits.
#[derive(Clone, PartialEq, Eq)]
pub struct CompactTensor<B> {
    grid: TileGrid,
    window: ClassWindow,
    book: ClassBook,
    tiles: B,
    escapes: B,
    streams: B,
    dense: B,
}

impl<B: AsRef<[u8]>> CompactTensor<B> {
    /// Reads and validates stored sections.
    ///
    /// # Errors
    /// The shape, window or book is not valid, a section has the wrong size, or a tile's start, lengths, head or list
    /// are not those of any matrix.
    pub fn from_sections(grid: TileGrid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let (rows, cols) = (grid.rows(), grid.cols());
        if whole_tiles(grid).is_err() {
            return Err(CodecError::PackedShape { rows, cols });
        }
        let window = section(Section::CLASS_WINDOW);
        Section::CLASS_WINDOW.check(grid, &window)?;
        let window = ClassWindow::from_stored(window.as_ref().try_into().expect("its size was checked"))?;
        let book = section(Section::CLASS_BOOK);
        Section::CLASS_BOOK.check(grid, &book)?;
        let book = ClassBook::from_stored(book.as_ref())?;
        let tensor = Self {
            grid,
            window,
            book,
            tiles: section(Section::CLASS_TILES),
            escapes: section(Section::CLASS_ESCAPES),
            streams: section(Section::CLASS_STREAMS),
            dense: section(Section::DENSE),
        };
        Section::CLASS_TILES.check(grid, &tensor.tiles)?;
        Section::CLASS_ESCAPES.check(grid, &tensor.escapes)?;
        Section::CLASS_STREAMS.check(grid, &tensor.streams)?;
        Section::DENSE.check(grid, &tensor.dense)?;
        tensor.check_tiles()?;
        Ok(tensor)
    }

    /// Checks that starts are the sums of the sizes before, lists follow each other, and records are in order and match
    /// their places.
    fn check_tiles(&self) -> Result<(), CodecError> {
        let size = |section, expected: usize, got: usize| {
            Err(CodecError::SectionBytes { section, expected: expected as u64, got: got as u64 })
        };
        if self.tiles.as_ref().len() != tiles_bytes(self.grid) {
            return size("class_tiles", tiles_bytes(self.grid), self.tiles.as_ref().len());
        }
        let streams = self.streams.as_ref();
        let (mut at, mut list) = (0usize, 0usize);
        for tile in 0..self.grid.tiles() {
            let fail = |reason| Err(CodecError::Row { tile, row: 0, reason });
            let start = self.tile_word(tile, 0);
            if start as usize != at / WORD {
                let expected = (at / WORD) as u64;
                return Err(CodecError::TileMetadata { tile, field: "start", expected, got: start.into() });
            }
            let Some(lengths) = streams[at..].first_chunk::<LANES>() else {
                return fail("its streams are outside the section");
            };
            if lengths.iter().any(|&length| !(LANE_UNITS_MIN..=LANE_UNITS_MAX).contains(&length)) {
                return fail("a lane has fewer or more bits than any codes");
            }
            at += stream_bytes(lengths);
            if at > streams.len() {
                return fail("its streams are outside the section");
            }
            let head = self.tile_word(tile, 1);
            match head >> 30 {
                0 if head == 0 => continue,
                1 => {}
                2 | 3 => {
                    if (head & (HEAD_LIST - 1)) as usize != list {
                        return fail("its escapes do not follow the previous ones");
                    }
                    let count = word(self.escapes.as_ref(), list).unwrap_or(0) as usize;
                    if !(2..=RECORDS_MAX).contains(&count) || list + 1 + count > self.escapes.as_ref().len() / 4 {
                        return fail("its list of escapes has a wrong length");
                    }
                    list += 1 + count;
                }
                _ => return fail("its head is not 0, one record or a list"),
            }
            let mut last = None;
            for record in self.records(tile) {
                let key = Some(sort_key(record));
                if record >> 28 != 0 || key <= last {
                    return fail("its escapes are not in order");
                }
                let Some(weight) = self.window.weight(record as u16) else {
                    return fail("an escape's operand has no weight");
                };
                if (self.dense_half(tile, record) ^ weight) & 0x807f != 0 {
                    return fail("the element of an escape does not have its sign and mantissa");
                }
                last = key;
            }
        }
        if at.next_multiple_of(SECTION_ALIGN) != streams.len() {
            return size("class_streams", at.next_multiple_of(SECTION_ALIGN), streams.len());
        }
        if streams[at..].iter().any(|&byte| byte != 0) {
            return Err(CodecError::Code {
                section: "class_streams",
                reason: "the words after the last tile must be 0",
            });
        }
        let end = self.grid.tiles() * 8;
        if word(self.tiles.as_ref(), end / 4) != Some((at / WORD) as u32)
            || self.tiles.as_ref()[end + 4..].iter().any(|&byte| byte != 0)
        {
            return Err(CodecError::Code {
                section: "class_tiles",
                reason: "the entry after the last tile is not the end",
            });
        }
        let escapes = self.escapes.as_ref();
        let expected = (list * 4).next_multiple_of(SECTION_ALIGN);
        if expected != escapes.len() {
            return size("class_escapes", expected, escapes.len());
        }
        if escapes[list * 4..].iter().any(|&byte| byte != 0) {
            return Err(CodecError::Code {
                section: "class_escapes",
                reason: "the words after the last list must be 0",
            });
        }
        Ok(())
    }

    /// The matrix's shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// The window of exponents.
    pub fn window(&self) -> ClassWindow {
        self.window
    }

    /// The code of the classes.
    pub fn book(&self) -> &ClassBook {
        &self.book
    }

    /// The section `class_tiles`: u32 `[entries, 2]`, little-endian: start in words, and head; then the end.
    pub fn tiles(&self) -> &[u8] {
        self.tiles.as_ref()
    }

    /// The section `class_escapes`: u32 `[words]`, little-endian.
    pub fn escapes(&self) -> &[u8] {
        self.escapes.as_ref()
    }

    /// The section `class_streams`: lengths and codes of all tiles.
    pub fn streams(&self) -> &[u8] {
        self.streams.as_ref()
    }

    /// The section `dense`: u8 `[tiles, 5120]`.
    pub fn dense(&self) -> &[u8] {
        self.dense.as_ref()
    }

    /// The bytes of one section.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        Some(match section {
            Section::CLASS_WINDOW => Cow::Owned(self.window.stored().to_vec()),
            Section::CLASS_BOOK => Cow::Owned(self.book.stored()),
            Section::CLASS_TILES => Cow::Borrowed(self.tiles()),
            Section::CLASS_ESCAPES => Cow::Borrowed(self.escapes()),
            Section::CLASS_STREAMS => Cow::Borrowed(self.streams()),
            Section::DENSE => Cow::Borrowed(self.dense()),
            _ => return None,
        })
    }

    /// Bytes of all sections together.
    pub fn stored_bytes(&self) -> u64 {
        Compact::SECTIONS.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// The number of elements without a code.
    pub fn escape_count(&self) -> u64 {
        (0..self.grid.tiles()).map(|tile| self.records(tile).count() as u64).sum()
    }

    /// The streams of a tile: 32 lengths, then the lanes' codes.
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn stream(&self, tile: usize) -> &[u8] {
        let at = self.tile_word(tile, 0) as usize * WORD;
        let bytes = &self.streams.as_ref()[at..];
        &bytes[..stream_bytes(bytes.first_chunk().expect("checked"))]
    }

    fn tile_word(&self, tile: usize, at: usize) -> u32 {
        word(self.tiles.as_ref(), 2 * tile + at).expect("its size was checked")
    }

    /// The escapes of a tile.
    pub(crate) fn records(&self, tile: usize) -> impl Iterator<Item = u32> {
        let head = self.tile_word(tile, 1);
        let word = |at| word(self.escapes.as_ref(), at).expect("inside, checked");
        let list = if head & HEAD_LIST != 0 {
            let at = (head & (HEAD_LIST - 1)) as usize;
            at + 1..at + 1 + word(at) as usize
        } else {
            0..0
        };
        (head >> 30 == 1).then_some(head & (HEAD_ONE - 1)).into_iter().chain(list.map(word))
    }

    fn dense_tile(&self, tile: usize) -> &[u8; DENSE_TILE_BYTES] {
        self.dense.as_ref()[tile * DENSE_TILE_BYTES..].first_chunk().expect("its size was checked")
    }

    /// The half of the dense part at the place of a record.
    fn dense_half(&self, tile: usize, record: u32) -> u16 {
        let (block, lane, step, register, half) = fields(record);
        let bytes = self.dense_tile(tile);
        let words =
            std::array::from_fn(|i| word(bytes, dense_offset(block, step / 2, i, lane) / 4).expect("inside the tile"));
        (registers_from(words)[4 * (step % 2) + register] >> (16 * half)) as u16
    }

    /// The operands of a tile as kernels use them: `[4 row blocks][4 steps][32 lanes][4 registers]`, two bf16 each.
    ///
    /// # Errors
    /// The codes of a lane do not use its stored bits.
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn operands(&self, tile: usize) -> Result<Vec<[u32; 4]>, CodecError> {
        let table = self.book.table();
        let registers = self.registers(tile, &table, u32::from(CLASS_OPERAND_EXPONENT))?;
        let at = |block: usize, step: usize, lane: usize| (block * 4 + step) * LANES + lane;
        let mut operands = vec![[0; 4]; ROW_BLOCKS * 4 * LANES];
        for (block, registers) in registers.iter().enumerate() {
            for (i, lanes) in registers.iter().enumerate() {
                lanes.iter().enumerate().for_each(|(lane, &pair)| operands[at(block, i / 4, lane)][i % 4] = pair);
            }
        }
        for record in self.records(tile) {
            let (block, lane, step, register, half) = fields(record);
            let pair = &mut operands[at(block, step, lane)][register];
            *pair = *pair & !(0xffff << (16 * half)) | (record & 0xffff) << (16 * half);
        }
        Ok(operands)
    }

    /// The registers of a tile, with exponents above `base`; escapes are not patched.
    fn registers(
        &self,
        tile: usize,
        table: &[u16],
        base: u32,
    ) -> Result<[[[u32; LANES]; REGISTERS]; ROW_BLOCKS], CodecError> {
        let mut registers = [[[0; LANES]; REGISTERS]; ROW_BLOCKS];
        let quads = self.quads(tile, table)?;
        let (dense, bases) = (self.dense_tile(tile), base << 7 | base << 23);
        for (block, registers) in registers.iter_mut().enumerate() {
            for unit in 0..2 {
                let mut words = [[0u32; LANES]; 5];
                for (i, words) in words.iter_mut().enumerate() {
                    for (lane, value) in words.iter_mut().enumerate() {
                        *value = word(dense, dense_offset(block, unit, i, lane) / 4).expect("inside the tile");
                    }
                }
                for lane in 0..LANES {
                    let pairs = registers_from(words.map(|words| words[lane]));
                    for (i, pair) in pairs.into_iter().enumerate() {
                        let quad = u32::from(quads[8 * block + 4 * unit + i / 2][lane]) >> (6 * (i % 2));
                        registers[8 * unit + i][lane] = (pair | (quad & 7) << 9 | (quad >> 3 & 7) << 25) + bases;
                    }
                }
            }
        }
        Ok(registers)
    }

    /// The quads of a tile, `[row block, step, pair of registers][lane]`, decoded from its streams; every bit of the
    /// streams is checked.
    fn quads(&self, tile: usize, table: &[u16]) -> Result<[[u16; LANES]; LANE_CODES], CodecError> {
        let stream = self.stream(tile);
        let mut buffer = [0u8; STREAM_PAD + STREAM_TILE_BYTES_MAX + STREAM_PAD];
        buffer[STREAM_PAD..STREAM_PAD + stream.len()].copy_from_slice(stream);
        let mut quads = [[0; LANES]; LANE_CODES];
        let mut start = 8 * (STREAM_PAD + LANES);
        for lane in 0..LANES {
            let end = start + 2 * usize::from(stream[lane]);
            let (mut up, mut down) = (start, end);
            for code in 0..LANE_CODES / 2 {
                let ahead = load(&buffer, up / 8) >> (up % 8);
                let entry = table[ahead as usize % TABLE];
                up += usize::from(entry >> 12);
                quads[code][lane] = entry & 0xfff;
                // Backwards: the eight bytes that end with the bit before `down`, mirrored.
                let last = down.div_ceil(8);
                let ahead = (load(&buffer, last - 8) << (8 * last - down)).reverse_bits();
                let entry = table[ahead as usize % TABLE];
                down -= usize::from(entry >> 12);
                quads[LANE_CODES / 2 + code][lane] = entry & 0xfff;
            }
            // At most one bit may be left between the chains, because lengths are in units of two bits.
            let slack_is_0 = up == down || load(&buffer, up / 8) >> (up % 8) & 1 == 0;
            if !(up == down || up + 1 == down) || !slack_is_0 {
                let reason = "the codes of a lane do not use its stored bits";
                return Err(CodecError::Row { tile, row: lane / 4, reason });
            }
            start = end;
        }
        let bits_left = 8 * (STREAM_PAD + stream.len()) - start;
        let last = load(&buffer, start / 8) >> (start % 8);
        // Less than a word is left: the rest of this byte and the bytes after it.
        if last & 0xff >> (start % 8) != 0 || buffer[start.div_ceil(8)..][..bits_left / 8].iter().any(|&byte| byte != 0)
        {
            return Err(CodecError::Row { tile, row: TILE - 1, reason: "bits after the last code are not 0" });
        }
        Ok(quads)
    }
}

impl<B: AsRef<[u8]> + Sync> CompactTensor<B> {
    /// Decodes the weights bit for bit.
    ///
    /// # Errors
    /// The codes of a lane do not use its stored bits.
    pub fn decode(&self) -> Result<Vec<u8>, CodecError> {
        let mut out = zeroed(self.grid.elements() * 2);
        decode_into(self, &mut out)?;
        Ok(out)
    }
}

/// Decodes the compact encoding into `out` on the current rayon pool.
///
/// # Errors
/// `out` is not `n * k * 2` bytes long, or the codes of a lane do not use its stored bits.
pub fn decode_into<B: AsRef<[u8]> + Sync>(tensor: &CompactTensor<B>, out: &mut [u8]) -> Result<(), CodecError> {
    check_out(tensor.grid(), out)?;
    decode_tile_rows(tensor, 0, out)
}

/// Decodes the tile rows from index `first` on that fill `out`.
fn decode_tile_rows<B: AsRef<[u8]> + Sync>(
    tensor: &CompactTensor<B>,
    first: usize,
    out: &mut [u8],
) -> Result<(), CodecError> {
    let grid = tensor.grid();
    let (cols, tile_cols, table) = (grid.cols(), grid.tile_cols(), tensor.book.table());
    parallel::try_for_each_chunk(out, TILE * cols * 2, |tile_row, out| {
        for tile_col in 0..tile_cols {
            let tile = (first + tile_row) * tile_cols + tile_col;
            let registers = tensor.registers(tile, &table, tensor.window.base().into())?;
            for (block, registers) in registers.iter().enumerate() {
                for (i, lanes) in registers.iter().enumerate() {
                    for (group, pairs) in lanes.chunks_exact(4).enumerate() {
                        let (row, col) = packed::element_at(block, i / 4, 4 * group, i % 4, 0);
                        let at = (row * cols + tile_col * TILE + col) * 2;
                        let bytes = bytemuck::cast::<[u32; 4], [u8; 16]>(std::array::from_fn(|t| pairs[t].to_le()));
                        out[at..at + 16].copy_from_slice(&bytes);
                    }
                }
            }
            for record in tensor.records(tile) {
                let (block, lane, step, register, half) = fields(record);
                let (row, col) = packed::element_at(block, step, lane, register, half);
                let weight = tensor.window.weight(record as u16).expect("checked");
                let at = (row * cols + tile_col * TILE + col) * 2;
                out[at..at + 2].copy_from_slice(&weight.to_le_bytes());
            }
        }
        Ok(())
    })
}

impl CompactTensor<Vec<u8>> {
    /// The sections in stored order.
    fn into_sections(self) -> Vec<Vec<u8>> {
        vec![self.window.stored().to_vec(), self.book.stored(), self.tiles, self.escapes, self.streams, self.dense]
    }
}

impl<B: AsRef<[u8]>> CompactTensor<B> {
    /// The typed view of a stored tensor; `None` if it has another encoding. To keep the tensor, pass
    /// [`StoredTensor::borrowed`].
    pub fn of(tensor: StoredTensor<B>) -> Option<Self> {
        let (grid, section) = tensor.take(EncodingId::COMPACT)?;
        Some(Self::from_sections(grid, section).expect("a stored tensor was checked"))
    }
}

impl From<CompactTensor<Vec<u8>>> for StoredTensor<Vec<u8>> {
    fn from(tensor: CompactTensor<Vec<u8>>) -> Self {
        Self::trusted(EncodingId::COMPACT, tensor.grid, tensor.into_sections())
    }
}

debug_sizes!(CompactTensor, Compact::SECTIONS);

/// Minimum and maximum length of a lane's codes, in units of two bits.
const LANE_UNITS_MIN: u8 = (LANE_CODES / 2) as u8;
const LANE_UNITS_MAX: u8 = (LANE_CODES * CLASS_CODE_MAX as usize / 2) as u8;

/// Bytes of `class_tiles`: one entry more than tiles.
fn tiles_bytes(grid: TileGrid) -> usize {
    ((grid.tiles() + 1) * 8).next_multiple_of(SECTION_ALIGN)
}

/// Bytes of the streams of a tile whose lanes have these lengths.
fn stream_bytes(lengths: &[u8; LANES]) -> usize {
    let units: usize = lengths.iter().map(|&length| usize::from(length)).sum();
    LANES + (2 * units).div_ceil(8 * WORD) * WORD
}

/// Eight bytes from `at` as a little-endian number.
fn load(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(4 * at..4 * at + 4)?.try_into().expect("4 bytes")))
}

/// Byte offset, in a dense tile, of word `i` of a unit (two steps) of a row block.
pub(crate) fn dense_offset(block: usize, unit: usize, i: usize, lane: usize) -> usize {
    let q = 10 * block + 5 * unit + i;
    512 * (q / 4) + 16 * lane + 4 * (q % 4)
}

/// Unpacks eight registers without classes from five words.
#[inline(always)]
fn registers_from([w0, w1, w2, w3, w4]: [u32; 5]) -> [u32; UNIT] {
    let in_place = |w: u32| w & !FREE;
    let rotated = |w: u32| w.rotate_right(10) & ROTATED;
    [
        in_place(w0),
        in_place(w1),
        in_place(w2),
        in_place(w3),
        in_place(w4),
        rotated(w0) | w1 >> 6 & 0x01e0_01e0,
        rotated(w2) | w1 >> 2 & 0x0180_0180 | w3 >> 4 & 0x0060_0060,
        rotated(w4) | w3 >> 6 & 0x01e0_01e0,
    ]
}

/// Packs eight registers without classes into five words.
#[inline(always)]
fn words_from([p0, p1, p2, p3, p4, p5, p6, p7]: [u32; UNIT]) -> [u32; 5] {
    let rotated = |p: u32| (p & ROTATED).rotate_left(10);
    [
        p0 | rotated(p5),
        p1 | (p5 & 0x01e0_01e0) << 6 | (p6 & 0x0180_0180) << 2,
        p2 | rotated(p6),
        p3 | (p6 & 0x0060_0060) << 4 | (p7 & 0x01e0_01e0) << 6,
        p4 | rotated(p7),
    ]
}

fn record(operand: u16, block: usize, lane: usize, register: usize, half: usize) -> u32 {
    u32::from(operand) | (lane as u32) << 16 | (register as u32) << 21 | (half as u32) << 25 | (block as u32) << 26
}

/// Row block, lane, step, register and half of a record.
pub(crate) fn fields(record: u32) -> (usize, usize, usize, usize, usize) {
    let at = (record >> 21 & 15) as usize;
    ((record >> 26 & 3) as usize, (record >> 16 & 31) as usize, at / 4, at % 4, (record >> 25 & 1) as usize)
}

/// The sort key of the records of a tile: row block, step, register, lane, half.
fn sort_key(record: u32) -> u32 {
    (record >> 26 & 3) << 10 | (record >> 21 & 15) << 6 | (record >> 16 & 31) << 1 | record >> 25 & 1
}
