//! The packed resident form: a 12-bit container in the order of a tensor core's A operand (`docs/format.md` A.9).
//!
//! Sixteen consecutive exponents cover almost all weights of a trained tensor, so an exponent is a window base plus a nibble and
//! no table is needed. What lies outside is an *escape* and keeps its exact operand beside the container.
//!
//! ```text
//! two rows, g and g + 8, of a row block: 2 x 64 bf16 = 4 registers x 4 steps x 4 lanes x 2 halves
//!   split by 8 columns     -> P0..P3, each 4 steps x 4 lanes
//!   sign, nibble, mantissa -> 12 bits of each half; escapes are looked for only where one was seen
//!   P3 into the free bits  -> 3 words a step and lane
//!   12 words a lane        -> 3 runs of 64 bytes, 512 bytes apart
//! ```
//! Every step is a loop over arrays of fixed size, which the compiler turns into permutations of the processor that it compiles for.

use std::{borrow::Cow, ops::Range};

use rayon::prelude::*;

use super::{
    Extent, Form, FormId, Sample, Section, Sections, StoredTensor, Survey, Unfit,
    sample::fixed_bytes,
    tiles::{check_out, debug_sizes},
};
pub use crate::layout::{
    OPERAND_EXPONENT, PACKED_TILE_BYTES as TILE_BYTES, PACKED_WINDOW_BYTES as WINDOW_BYTES, ROW_BLOCKS,
};
use crate::{
    CodeLimit, CodecError, FloatMatrix, Histogram, Matrix, TileGrid, bf16,
    bits::zeroed,
    layout::{PACKED_BLOCK_BYTES as BLOCK_BYTES, SECTION_ALIGN, TILE, WINDOW_BASE_MAX, WINDOW_BASE_MIN, WORDS_ALIGN},
    safetensors::Dtype,
};

/// The packed form.
#[derive(Debug, Clone, Copy)]
pub struct Packed;

impl FormId {
    /// The 12-bit resident form.
    pub const PACKED: Self = Self::new("packed");
}

impl Section {
    /// u8 `[tiles, 6144]`: the container.
    pub const PACKED: Self = Self::new("packed", Dtype::U8, &[Extent::Tiles, Extent::Fixed(TILE_BYTES)]);
    /// u32 `[tiles, 4]`: one a row block.
    pub const ESCAPE_HEADS: Self = Self::new("escape_heads", Dtype::U32, &[Extent::Tiles, Extent::Fixed(ROW_BLOCKS)]);
    /// u32 `[words]`: lists of escapes.
    pub const ESCAPES: Self = Self::new("escapes", Dtype::U32, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u8 `[16]`: base of the window.
    pub const PACKED_WINDOW: Self = Self::new("packed_window", Dtype::U8, &[Extent::Fixed(WINDOW_BYTES)]);
}

impl Form for Packed {
    const ID: FormId = FormId::PACKED;
    const SECTIONS: &'static [Section] =
        &[Section::PACKED_WINDOW, Section::ESCAPE_HEADS, Section::ESCAPES, Section::PACKED];
    const FALLBACK: FormId = FormId::PALETTE;

    fn fits(grid: TileGrid) -> Result<(), Unfit> {
        Ok(packable_shape(grid)?)
    }

    /// Single escapes without an operand are not looked for.
    fn predict(grid: TileGrid, sample: &Sample) -> Result<u64, Unfit> {
        Self::fits(grid)?;
        Window::covering(sample.histogram())?;
        Ok(fixed_bytes(Self::SECTIONS, grid) + escape_bytes(grid, sample.histogram()))
    }

    fn check(grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        PackedTensor::from_sections(grid, |section| sections.get(section)).map(|_| ())
    }

    fn encode(matrix: FloatMatrix<'_>, survey: &Survey, _: CodeLimit) -> Result<Vec<Vec<u8>>, Unfit> {
        Ok(pack(matrix.bf16()?, &survey.histogram)?.into_sections())
    }

    fn decode(grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        decode_into(&PackedTensor::from_sections(grid, |section| sections.get(section))?, out)
    }
}

impl From<Unpackable> for Unfit {
    fn from(why: Unpackable) -> Self {
        Self::new(why)
    }
}

/// More escapes than one element in this many, and the tensor is not packed.
///
/// It is a limit of time, not of size. Time, in matmuls on an H200 against raw weights (`docs/benchmarks.md`): at half of this limit (a tenth of row segments)
/// packed weights are 1.2 to 1.4 times as fast up to batch 16 and 0.8 at 64 and above; close to it as fast up to batch 16, and 0.6 to 0.7 beyond.
/// Size: four a row block are 0.16 bits per element (1.3 %). Beyond the limit the palette form is smaller if the escapes are of few exponents, such as
/// exact zeros, which its palette takes in, and larger for heavy tails (`docs/benchmarks.md`, resident profile).
pub const ESCAPES_ONE_IN: u64 = 256;

pub(crate) const LANES: usize = 32;
pub(crate) const STEPS: usize = 4;
/// The bits of two halves that a container word leaves free: 14..11 of each.
pub(crate) const FREE: u32 = 0x7800_7800;
const HEAD_LIST: u32 = 1 << 31;
const HEAD_ONE: u32 = 1 << 30;
/// Tiles of a band, the unit of work: as for encoding.
const BAND_TILES: usize = 256;

/// The window of 16 consecutive exponents that a tensor is packed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    base: u8,
}

impl Window {
    /// The window that covers most elements, of equals the lowest, with the number of elements outside.
    pub fn best(histogram: &Histogram) -> (Self, u64) {
        let covered = |base: u8| (base..base + 16).map(|e| histogram.count(e)).sum::<u64>();
        let base = (WINDOW_BASE_MIN..=WINDOW_BASE_MAX).rev().max_by_key(|&base| covered(base)).expect("239 windows");
        (Self { base }, histogram.total() - covered(base))
    }

    /// The window that a matrix with these exponents is packed with: [`Window::best`], if few enough elements lie outside.
    ///
    /// # Errors
    /// [`Unpackable::Escapes`].
    pub fn covering(histogram: &Histogram) -> Result<Self, Unpackable> {
        let (window, outside) = Self::best(histogram);
        let elements = histogram.total();
        if u128::from(outside) * u128::from(ESCAPES_ONE_IN) <= u128::from(elements) {
            Ok(window)
        } else {
            Err(Unpackable::Escapes { outside, elements })
        }
    }

    /// Reads `packed_window`.
    ///
    /// # Errors
    /// The base is not in 1..=239, or a byte after it is not 0.
    pub fn from_stored(bytes: [u8; WINDOW_BYTES]) -> Result<Self, CodecError> {
        if bytes[1..].iter().any(|&byte| byte != 0) {
            return Err(CodecError::Code { section: "packed_window", reason: "the bytes after the base must be 0" });
        }
        Self::new(bytes[0])
    }

    /// `packed_window`.
    pub fn stored(self) -> [u8; WINDOW_BYTES] {
        std::array::from_fn(|i| if i == 0 { self.base } else { 0 })
    }

    /// # Errors
    /// `base` is not in 1..=239.
    pub fn new(base: u8) -> Result<Self, CodecError> {
        if (WINDOW_BASE_MIN..=WINDOW_BASE_MAX).contains(&base) {
            Ok(Self { base })
        } else {
            Err(CodecError::Code { section: "packed_window", reason: "the base must be 1..=239" })
        }
    }

    /// Lowest exponent of the window.
    pub fn base(self) -> u8 {
        self.base
    }

    /// `2^(base - 112)`: what a product with operands is multiplied with to be a product with weights.
    pub fn scale(self) -> f32 {
        f32::from_bits(((127 + i32::from(self.base) - i32::from(OPERAND_EXPONENT)) as u32) << 23)
    }

    /// Exponent above the base, if it is in the window.
    pub fn nibble(self, exponent: u8) -> Option<u8> {
        exponent.checked_sub(self.base).filter(|&nibble| nibble < 16)
    }

    /// The operand of a weight: `weight * 2^(112 - base)`, if that is exact.
    pub fn operand(self, weight: u16) -> Option<u16> {
        times_power_of_two(weight, i32::from(OPERAND_EXPONENT) - i32::from(self.base))
    }

    /// The weight of an operand.
    pub fn weight(self, operand: u16) -> Option<u16> {
        times_power_of_two(operand, i32::from(self.base) - i32::from(OPERAND_EXPONENT))
    }
}

/// `value * 2^shift` in bf16, if that is exact; zeros, Inf and NaN stay as they are.
pub(super) fn times_power_of_two(value: u16, shift: i32) -> Option<u16> {
    let (sign, exponent, mantissa) = (value & 0x8000, i32::from(bf16::exponent(value)), value & 0x7f);
    if exponent == 255 || value & 0x7fff == 0 {
        return Some(value);
    }
    // value = significand * 2^(exponent - 134), with a leading one of weight 2^7 if it is normal.
    let (mut significand, mut exponent) =
        if exponent == 0 { (u32::from(mantissa), 1) } else { (u32::from(mantissa) | 0x80, exponent) };
    exponent += shift;
    while significand < 0x80 && exponent > 1 {
        significand <<= 1;
        exponent -= 1;
    }
    while exponent < 1 {
        if significand & 1 == 1 {
            return None;
        }
        significand >>= 1;
        exponent += 1;
    }
    if exponent > 254 || significand == 0 {
        return None;
    }
    let field = if significand < 0x80 { 0 } else { exponent as u16 };
    Some(sign | field << 7 | (significand & 0x7f) as u16)
}

/// Why a matrix stays in another form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unpackable {
    /// `n` or `k` is not a multiple of 64.
    #[error("rows or columns are not a multiple of 64")]
    Shape,
    /// Too many elements lie outside every window ([`ESCAPES_ONE_IN`]).
    #[error("{:.2} % of the elements lie outside the best window of 16 exponents, the limit is {:.2} %", percent(*outside, *elements), percent(1, ESCAPES_ONE_IN))]
    Escapes {
        /// Elements outside the best window.
        outside: u64,
        /// Elements of the matrix.
        elements: u64,
    },
    /// An escape has no exact operand.
    #[error("element [{row}, {col}] has no exact operand")]
    Operand {
        /// Row of the first such element, in row-major order.
        row: usize,
        /// Its column.
        col: usize,
    },
}

impl Unpackable {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        "not-packable"
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}

/// A packed matrix. `B` owns or borrows the bytes; constructing one validates it, so every index inside may be trusted.
#[derive(Clone)]
pub struct PackedTensor<B> {
    grid: TileGrid,
    window: Window,
    packed: B,
    escape_heads: B,
    /// Followed by less than [`WORDS_ALIGN`] zero words.
    escapes: B,
    escape_words: usize,
}

impl<B: AsRef<[u8]>> PackedTensor<B> {
    /// Reads stored sections.
    ///
    /// # Errors
    /// As [`PackedTensor::from_parts`], or the window is not valid.
    pub fn from_sections(grid: TileGrid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let window = section(Section::PACKED_WINDOW);
        Section::PACKED_WINDOW.check(grid, &window)?;
        let window = Window::from_stored(window.as_ref().try_into().expect("its size was checked"))?;
        let (packed, heads) = (section(Section::PACKED), section(Section::ESCAPE_HEADS));
        let escapes = section(Section::ESCAPES);
        Section::ESCAPES.check(grid, &escapes)?;
        Self::from_parts(grid, window, packed, heads, escapes)
    }

    /// Puts a tensor together: u8 `[tiles, 6144]`, u32 `[tiles, 4]`, u32 `[words]`, little-endian; up to 3 zero words may follow the last escape.
    ///
    /// # Errors
    /// The shape cannot be packed, a section has the wrong size, or a head or list is not canonical.
    pub fn from_parts(
        grid: TileGrid,
        window: Window,
        packed: B,
        escape_heads: B,
        escapes: B,
    ) -> Result<Self, CodecError> {
        let (rows, cols) = (grid.rows(), grid.cols());
        if !rows.is_multiple_of(TILE) || !cols.is_multiple_of(TILE) {
            return Err(CodecError::PackedShape { rows, cols });
        }
        Section::PACKED.check(grid, &packed)?;
        Section::ESCAPE_HEADS.check(grid, &escape_heads)?;
        let mut tensor = Self { grid, window, packed, escape_heads, escapes, escape_words: 0 };
        let list_words = tensor.escapes.as_ref().len() / 4;
        for block in 0..grid.tiles() * ROW_BLOCKS {
            let fail = |reason| Err(CodecError::Row { tile: block / ROW_BLOCKS, row: block % ROW_BLOCKS * 16, reason });
            let head = tensor.head(block);
            match head >> 30 {
                0 if head == 0 => continue,
                1 => {}
                2 | 3 => {
                    let next = tensor.escape_words;
                    if (head & (HEAD_LIST - 1)) as usize != next {
                        return fail("its escapes do not follow those before");
                    }
                    let count = word(tensor.escapes.as_ref(), next).unwrap_or(0) as usize;
                    if !(2..=TILE * 16).contains(&count) || next + 1 + count > list_words {
                        return fail("its list of escapes has a wrong length");
                    }
                    tensor.escape_words = next + 1 + count;
                }
                _ => return fail("its head is not 0, one record or a list"),
            }
            let mut last = None;
            for record in tensor.records(block) {
                let place = Some(place_of(record));
                if record >> 26 != 0 || place <= last {
                    return fail("its escapes are not in order");
                }
                let Some(weight) = window.weight(record as u16) else {
                    return fail("an escape's operand has no weight");
                };
                if window.nibble(bf16::exponent(weight)).is_some() {
                    return fail("an escape lies in the window");
                }
                if tensor.half(block, record) != weight & 0x807f {
                    return fail("an escape's place does not hold its sign and mantissa");
                }
                last = place;
            }
        }
        let (used, got) = (tensor.escape_words * 4, tensor.escapes.as_ref().len());
        let padding = &tensor.escapes.as_ref()[used..];
        if padding.len() >= 4 * WORDS_ALIGN || !got.is_multiple_of(4) || padding.iter().any(|&byte| byte != 0) {
            let expected = used.next_multiple_of(4 * WORDS_ALIGN) as u64;
            return Err(if expected == got as u64 {
                CodecError::Code { section: "escapes", reason: "the words after the last list must be 0" }
            } else {
                CodecError::SectionBytes { section: "escapes", expected, got: got as u64 }
            });
        }
        Ok(tensor)
    }

    fn head(&self, block: usize) -> u32 {
        word(self.escape_heads.as_ref(), block).expect("its size was checked")
    }

    fn escape_word(&self, at: usize) -> u32 {
        word(self.escapes.as_ref(), at).expect("inside, checked")
    }

    /// Shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// The window.
    pub fn window(&self) -> Window {
        self.window
    }

    /// u8 `[tiles, 6144]`.
    pub fn packed(&self) -> &[u8] {
        self.packed.as_ref()
    }

    /// u32 `[tiles, 4]`, little-endian.
    pub fn escape_heads(&self) -> &[u8] {
        self.escape_heads.as_ref()
    }

    /// u32 `[words]`, little-endian, without the zero words that follow when it is stored.
    pub fn escapes(&self) -> &[u8] {
        &self.escapes.as_ref()[..self.escape_words * 4]
    }

    /// The bytes of one section.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        Some(match section {
            Section::PACKED => Cow::Borrowed(self.packed()),
            Section::ESCAPE_HEADS => Cow::Borrowed(self.escape_heads()),
            Section::ESCAPES if self.escapes.as_ref().len().is_multiple_of(4 * WORDS_ALIGN) => {
                Cow::Borrowed(self.escapes.as_ref())
            }
            Section::ESCAPES => {
                let mut padded = self.escapes().to_vec();
                padded.resize(padded.len().next_multiple_of(4 * WORDS_ALIGN), 0);
                Cow::Owned(padded)
            }
            Section::PACKED_WINDOW => Cow::Owned(self.window.stored().to_vec()),
            _ => return None,
        })
    }

    /// Bytes of all sections.
    pub fn stored_bytes(&self) -> u64 {
        Packed::SECTIONS.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// Elements outside the window.
    pub fn escape_count(&self) -> u64 {
        (0..self.grid.tiles() * ROW_BLOCKS).map(|block| self.records_in(block) as u64).sum()
    }

    /// Most escapes of one row block: what its slowest tile has to patch.
    pub fn max_escapes(&self) -> usize {
        (0..self.grid.tiles() * ROW_BLOCKS).map(|block| self.records_in(block)).max().unwrap_or(0)
    }

    /// The operands of a tile as the kernels must see them: `[4 row blocks][4 steps][32 lanes][4 registers]`, two bf16 each.
    ///
    /// # Panics
    /// `tile` is not in the grid.
    pub fn operands(&self, tile: usize) -> Vec<[u32; 4]> {
        let mut operands = vec![[0u32; 4]; ROW_BLOCKS * STEPS * LANES];
        let bytes = &self.packed()[tile * TILE_BYTES..][..TILE_BYTES];
        for (i, registers) in operands.iter_mut().enumerate() {
            let (block, step, lane) = (i / (STEPS * LANES), i / LANES % STEPS, i % LANES);
            let words = words_of(bytes, block, step, lane).map(|word| [word; 16]);
            *registers = registers_from(words)
                .map(|pairs| pairs[0] | u32::from(OPERAND_EXPONENT) << 23 | u32::from(OPERAND_EXPONENT) << 7);
        }
        for block in 0..ROW_BLOCKS {
            for record in self.records(tile * ROW_BLOCKS + block) {
                let (lane, step, register, half) = fields(record);
                let pair = &mut operands[(block * STEPS + step) * LANES + lane][register];
                *pair = *pair & !(0xffff << (16 * half)) | (record & 0xffff) << (16 * half);
            }
        }
        operands
    }

    /// The half of the container in whose place a record is.
    fn half(&self, block: usize, record: u32) -> u16 {
        let (lane, step, register, half) = fields(record);
        let bytes = &self.packed()[block / ROW_BLOCKS * TILE_BYTES..][..TILE_BYTES];
        let words = words_of(bytes, block % ROW_BLOCKS, step, lane).map(|word| [word; 16]);
        (registers_from(words)[register][0] >> (16 * half)) as u16
    }

    fn records_in(&self, block: usize) -> usize {
        match self.head(block) {
            0 => 0,
            list if list & HEAD_LIST != 0 => self.escape_word((list & (HEAD_LIST - 1)) as usize) as usize,
            _ => 1,
        }
    }

    /// The escapes of a row block.
    pub(crate) fn records(&self, block: usize) -> impl Iterator<Item = u32> {
        let head = self.head(block);
        let list = if head & HEAD_LIST != 0 {
            let at = (head & (HEAD_LIST - 1)) as usize;
            at + 1..at + 1 + self.escape_word(at) as usize
        } else {
            0..0
        };
        let one = (head >> 30 == 1).then_some(head & (HEAD_ONE - 1));
        one.into_iter().chain(list.map(|at| self.escape_word(at)))
    }

    /// The matrix of these rows and columns, packed with the same window: what a rank of several takes of it. The tiles and their lists of
    /// escapes are copied; nothing is decoded.
    ///
    /// The window is the tensor's, not the one that [`pack`] would choose for the part, and more than one element of the part in
    /// [`ESCAPES_ONE_IN`] may be an escape.
    ///
    /// # Errors
    /// A range is empty, reaches past the matrix, or is not in multiples of 64.
    pub fn slice(&self, rows: Range<usize>, cols: Range<usize>) -> Result<PackedTensor<Vec<u8>>, CodecError> {
        let (grid, escape_heads, escapes) =
            slice_lists(self.grid, self.escape_heads.as_ref(), self.escapes(), &rows, &cols)?;
        let mut packed = Vec::with_capacity(grid.tiles() * TILE_BYTES);
        for tile_row in rows.start / TILE..rows.end / TILE {
            let first = tile_row * self.grid.tile_cols();
            let tiles = first + cols.start / TILE..first + cols.end / TILE;
            packed.extend_from_slice(&self.packed()[tiles.start * TILE_BYTES..tiles.end * TILE_BYTES]);
        }
        PackedTensor::from_parts(grid, self.window, packed, escape_heads, escapes)
    }

    /// The weights, bit for bit.
    pub fn unpack(&self) -> Vec<u8>
    where
        B: Sync,
    {
        let mut out = zeroed(self.grid.elements() * 2);
        self.unpack_rows(&mut out);
        out
    }

    /// As [`PackedTensor::unpack`], into `n * k * 2` bytes.
    pub(crate) fn unpack_rows(&self, out: &mut [u8])
    where
        B: Sync,
    {
        let (cols, tile_cols) = (self.grid.cols(), self.grid.tile_cols());
        out.par_chunks_mut(TILE * cols * 2).enumerate().for_each(|(tile_row, out)| {
            // Row block by row block: 16 rows are written at a time, not 64, which is kinder to caches and page tables.
            for block in 0..ROW_BLOCKS {
                for tile_col in 0..tile_cols {
                    let tile = tile_row * tile_cols + tile_col;
                    let bytes = self.packed()[tile * TILE_BYTES + block * BLOCK_BYTES..].first_chunk();
                    let out = &mut out[(16 * block * cols + tile_col * TILE) * 2..];
                    unpack_block(bytes.expect("its size was checked"), self.window.base, out, cols * 2);
                    for record in self.records(tile * ROW_BLOCKS + block) {
                        let (lane, step, register, half) = fields(record);
                        let (row, col) = place(0, step, lane, register, half);
                        let weight = self.window.weight(record as u16).expect("checked");
                        let at = (row * cols + col) * 2;
                        out[at..at + 2].copy_from_slice(&weight.to_le_bytes());
                    }
                }
            }
        });
    }
}

/// The grid of these rows and columns of a packed matrix, and the heads and lists of its tiles, as [`PackedTensor::from_parts`] takes them.
///
/// # Errors
/// As [`PackedTensor::slice`], or a list is not inside `escapes`.
pub(crate) fn slice_lists(
    of: TileGrid,
    heads: &[u8],
    escapes: &[u8],
    rows: &Range<usize>,
    cols: &Range<usize>,
) -> Result<(TileGrid, Vec<u8>, Vec<u8>), CodecError> {
    for (axis, range, of) in [("rows", rows, of.rows()), ("columns", cols, of.cols())] {
        let &Range { start, end } = range;
        if start >= end || end > of || !start.is_multiple_of(TILE) || !end.is_multiple_of(TILE) {
            return Err(CodecError::Slice { axis, start, end, of });
        }
    }
    Section::ESCAPE_HEADS.check(of, &heads)?;
    let grid = TileGrid::new(rows.len(), cols.len())?;
    let (mut own_heads, mut own) = (Vec::with_capacity(grid.tiles() * ROW_BLOCKS * 4), Vec::new());
    for tile_row in rows.start / TILE..rows.end / TILE {
        let first = tile_row * of.tile_cols();
        let tiles = first + cols.start / TILE..first + cols.end / TILE;
        for block in tiles.start * ROW_BLOCKS..tiles.end * ROW_BLOCKS {
            let mut head = word(heads, block).expect("their size was checked");
            if head & HEAD_LIST != 0 {
                let at = (head & (HEAD_LIST - 1)) as usize;
                let count = word(escapes, at).filter(|count| (2..=TILE as u32 * 16).contains(count));
                let list = count.and_then(|count| escapes.get(4 * at..)?.get(..4 * (count as usize + 1)));
                let Some(list) = list else {
                    let (tile, row) = (block / ROW_BLOCKS, block % ROW_BLOCKS * 16);
                    return Err(CodecError::Row { tile, row, reason: "its list of escapes has a wrong length" });
                };
                // Not past those of the whole tensor, which fit a head.
                head = HEAD_LIST | (own.len() / 4) as u32;
                own.extend_from_slice(list);
            }
            own_heads.extend_from_slice(&head.to_le_bytes());
        }
    }
    Ok((grid, own_heads, own))
}

impl PackedTensor<Vec<u8>> {
    /// In stored order.
    fn into_sections(mut self) -> Vec<Vec<u8>> {
        self.escapes.resize(self.escapes.len().next_multiple_of(SECTION_ALIGN), 0);
        vec![self.window.stored().to_vec(), self.escape_heads, self.escapes, self.packed]
    }
}

impl<B: AsRef<[u8]>> PackedTensor<B> {
    /// The view of a stored tensor; `None` if it has another form. [`StoredTensor::borrowed`] keeps the tensor.
    pub fn of(tensor: StoredTensor<B>) -> Option<Self> {
        let (grid, section) = tensor.take(FormId::PACKED)?;
        Some(Self::from_sections(grid, section).expect("a stored tensor was checked"))
    }
}

impl From<PackedTensor<Vec<u8>>> for StoredTensor<Vec<u8>> {
    fn from(tensor: PackedTensor<Vec<u8>>) -> Self {
        Self::trusted(FormId::PACKED, tensor.grid, tensor.into_sections())
    }
}

debug_sizes!(PackedTensor, Packed::SECTIONS);

impl<B: AsRef<[u8]>> PartialEq for PackedTensor<B> {
    fn eq(&self, other: &Self) -> bool {
        let parts = |t: &Self| (t.grid, t.window);
        parts(self) == parts(other)
            && self.packed() == other.packed()
            && self.escape_heads() == other.escape_heads()
            && self.escapes() == other.escapes()
    }
}

impl<B: AsRef<[u8]>> Eq for PackedTensor<B> {}

/// Packs a matrix, or says why it stays in another form. `histogram` is that of the matrix.
///
/// # Errors
/// [`Unpackable`]; the rule is stated there.
pub fn pack(matrix: Matrix<'_>, histogram: &Histogram) -> Result<PackedTensor<Vec<u8>>, Unpackable> {
    let grid = matrix.grid();
    packable_shape(grid)?;
    let window = Window::covering(histogram)?;
    let mut packed = zeroed(grid.tiles() * TILE_BYTES);
    let mut heads = vec![0; grid.tiles() * ROW_BLOCKS * 4];
    let bands: Vec<Option<Vec<u32>>> = packed
        .par_chunks_mut(BAND_TILES * TILE_BYTES)
        .zip(heads.par_chunks_mut(BAND_TILES * ROW_BLOCKS * 4))
        .enumerate()
        .map(|(band, (packed, heads))| pack_band(matrix, window, band * BAND_TILES, packed, heads))
        .collect();
    let Some(bands) = bands.into_iter().collect::<Option<Vec<Vec<u32>>>>() else {
        return Err(first_without_operand(matrix, window));
    };
    // The bands counted their lists from their own start; move them to the tensor's.
    let (mut words, mut starts) = (0usize, Vec::with_capacity(bands.len()));
    for band in &bands {
        starts.push(words as u32);
        words += band.len();
    }
    if words > HEAD_LIST as usize {
        let (_, outside) = Window::best(histogram);
        return Err(Unpackable::Escapes { outside, elements: histogram.total() });
    }
    heads.par_chunks_mut(BAND_TILES * ROW_BLOCKS * 4).zip(starts).filter(|&(_, start)| start > 0).for_each(
        |(heads, start)| {
            for head in heads.chunks_exact_mut(4) {
                let value = u32::from_le_bytes((&*head).try_into().expect("4 bytes"));
                if value & HEAD_LIST != 0 {
                    head.copy_from_slice(&(value + start).to_le_bytes());
                }
            }
        },
    );
    let mut escapes: Vec<u8> = bands.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
    escapes.resize(escapes.len().next_multiple_of(4 * WORDS_ALIGN), 0);
    Ok(PackedTensor { grid, window, packed, escape_heads: heads, escapes, escape_words: words })
}

/// Bytes of the lists of escapes, if escapes are scattered evenly: clustered ones take less.
fn escape_bytes(grid: TileGrid, histogram: &Histogram) -> u64 {
    let (_, outside) = Window::best(histogram);
    let row_blocks = (grid.tiles() * ROW_BLOCKS) as f64;
    let mean = grid.elements() as f64 / row_blocks * outside as f64 / histogram.total().max(1) as f64;
    // Poisson: a row block with two and more has a word for each and one for their number.
    let (none, one) = ((-mean).exp(), mean * (-mean).exp());
    (row_blocks * (mean - one + (1.0 - none - one))) as u64 * 4
}

/// Decodes the packed resident form into `out`, on the current rayon pool.
///
/// # Errors
/// `out` is not `n * k * 2` bytes long.
pub fn decode_into<B: AsRef<[u8]> + Sync>(tensor: &PackedTensor<B>, out: &mut [u8]) -> Result<(), CodecError> {
    check_out(tensor.grid(), out)?;
    tensor.unpack_rows(out);
    Ok(())
}

/// Whether a matrix of this shape can be packed.
///
/// # Errors
/// [`Unpackable::Shape`].
pub fn packable_shape(grid: TileGrid) -> Result<(), Unpackable> {
    let whole = grid.rows().is_multiple_of(TILE) && grid.cols().is_multiple_of(TILE);
    if whole { Ok(()) } else { Err(Unpackable::Shape) }
}

/// The first element, in row-major order, that keeps a matrix from being packed with this window.
#[cold]
fn first_without_operand(matrix: Matrix<'_>, window: Window) -> Unpackable {
    let cols = matrix.grid().cols();
    let without = |bits: u16| window.nibble(bf16::exponent(bits)).is_none() && window.operand(bits).is_none();
    let elements = matrix.bytes().chunks_exact(2).map(|e| u16::from_le_bytes([e[0], e[1]]));
    let at = elements.enumerate().find(|&(_, bits)| without(bits)).map_or(0, |(at, _)| at);
    Unpackable::Operand { row: at / cols, col: at % cols }
}

/// Packs consecutive tiles: heads with indices from the band's start, and its lists; `None` if an escape has no operand.
fn pack_band(
    matrix: Matrix<'_>,
    window: Window,
    first: usize,
    packed: &mut [u8],
    heads: &mut [u8],
) -> Option<Vec<u32>> {
    let mut lists = Vec::new();
    let mut records = [const { Vec::new() }; ROW_BLOCKS];
    for (i, bytes) in packed.chunks_exact_mut(TILE_BYTES).enumerate() {
        let bytes = bytes.try_into().expect("a tile");
        if !pack_tile(matrix, window, first + i, bytes, &mut records) {
            continue;
        }
        for (records, head) in records.iter_mut().zip(heads[i * ROW_BLOCKS * 4..].chunks_exact_mut(4)) {
            if records.contains(&NO_OPERAND) {
                return None;
            }
            let value = match records.as_slice() {
                [] => 0,
                [one] => HEAD_ONE | one,
                _ => {
                    records.sort_unstable_by_key(|&record| place_of(record));
                    let at = lists.len() as u32;
                    lists.push(records.len() as u32);
                    lists.extend_from_slice(records);
                    HEAD_LIST | at
                }
            };
            head.copy_from_slice(&value.to_le_bytes());
            records.clear();
        }
    }
    Some(lists)
}

/// In place of the record of an escape without an operand.
const NO_OPERAND: u32 = u32::MAX;
/// Halves of one register in four steps and four lanes.
const HALVES: usize = 32;

/// The same code for another instruction set.
macro_rules! compile_for {
    ($best:ident, $any:ident, $name:ident, ($($argument:ident: $type:ty),*) $(-> $result:ty)?) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,bmi1,bmi2,lzcnt,popcnt")]
        fn $name($($argument: $type),*) $(-> $result)? {
            $any($($argument),*)
        }

        fn $best($($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512dq") {
                // SAFETY: the processor has the instructions; those with bit manipulation are older.
                return unsafe { $name($($argument),*) };
            }
            $any($($argument),*)
        }
    };
}
compile_for!(
    pack_tile,
    pack_tile_any,
    pack_tile_avx512,
    (matrix: Matrix<'_>, window: Window, tile: usize, bytes: &mut [u8; TILE_BYTES], records: &mut [Vec<u32>; ROW_BLOCKS]) -> bool
);
compile_for!(
    unpack_block,
    unpack_block_any,
    unpack_block_avx512,
    (bytes: &[u8; BLOCK_BYTES], base: u8, out: &mut [u8], stride: usize)
);

/// Packs a tile; adds the escapes of each row block, in no order. Returns whether there are any.
#[inline(always)]
fn pack_tile_any(
    matrix: Matrix<'_>,
    window: Window,
    tile: usize,
    bytes: &mut [u8; TILE_BYTES],
    records: &mut [Vec<u32>; ROW_BLOCKS],
) -> bool {
    let grid = matrix.grid();
    let (top, left) = (tile / grid.tile_cols() * TILE, tile % grid.tile_cols() * TILE);
    let row = |row: usize| -> &[u8; 2 * TILE] {
        let at = ((top + row) * grid.cols() + left) * 2;
        matrix.bytes()[at..at + 2 * TILE].try_into().expect("64 elements")
    };
    let base = u16::from(window.base) << 7;
    let mut escaped = false;
    for (block, records) in records.iter_mut().enumerate() {
        for group in 0..8 {
            let rows = [row(16 * block + group), row(16 * block + group + 8)];
            let weights: [[u16; HALVES]; 4] = std::array::from_fn(|register| {
                let row = rows[register % 2];
                let column = |i: usize| 16 * (i / 8) + 8 * (register / 2) + i % 8;
                std::array::from_fn(|i| u16::from_le_bytes([row[2 * column(i)], row[2 * column(i) + 1]]))
            });
            let mut outside = [0u16; 4];
            let halves: [[u16; HALVES]; 4] = std::array::from_fn(|register| {
                std::array::from_fn(|i| {
                    let weight = weights[register][i];
                    let nibble = (weight & 0x7f80).wrapping_sub(base);
                    let inside = nibble < 16 << 7;
                    outside[register] |= u16::from(!inside);
                    weight & 0x807f | if inside { nibble } else { 0 }
                })
            });
            if outside.iter().any(|&any| any != 0) {
                escaped = true;
                add_escapes(window, group, &weights, outside, records);
            }
            let words = words_from(halves.map(pairs));
            for j in 0..3 {
                let run: [u32; 16] = std::array::from_fn(|i| {
                    let (lane, q) = (i / 4, 4 * j + i % 4);
                    words[q % 3][4 * (q / 3) + lane]
                });
                let at = BLOCK_BYTES * block + 512 * j + 64 * group;
                bytes[at..at + 64].copy_from_slice(bytemuck::bytes_of(&run.map(u32::to_le)));
            }
        }
    }
    escaped
}

/// The inverse of [`pack_tile`] for one row block, but for escapes; rows of `out` are `stride` bytes apart.
#[inline(always)]
fn unpack_block_any(bytes: &[u8; BLOCK_BYTES], base: u8, out: &mut [u8], stride: usize) {
    let base = u16::from(base) << 7;
    for group in 0..8 {
        let runs: [[u32; 16]; 3] = std::array::from_fn(|j| {
            let run: [u8; 64] = bytes[512 * j + 64 * group..][..64].try_into().expect("64 bytes");
            bytemuck::cast::<_, [u32; 16]>(run).map(u32::from_le)
        });
        // Word i of step s is lane word q = 3s + i.
        let mut words = [[0u32; 16]; 3];
        for (word, words) in words.iter_mut().enumerate() {
            for step in 0..STEPS {
                let q = 3 * step + word;
                for lane in 0..4 {
                    words[4 * step + lane] = runs[q / 4][4 * lane + q % 4];
                }
            }
        }
        let weights: [[u16; HALVES]; 4] = registers_from(words).map(|pairs| {
            let halves: [u16; HALVES] = bytemuck::cast(pairs.map(u32::to_le));
            halves.map(|half| u16::from_le(half).wrapping_add(base))
        });
        for half in 0..2 {
            let mut row = [0u16; TILE];
            for (i, run) in row.chunks_exact_mut(8).enumerate() {
                run.copy_from_slice(&weights[half + 2 * (i % 2)][8 * (i / 2)..][..8]);
            }
            let at = (group + 8 * half) * stride;
            out[at..at + 2 * TILE].copy_from_slice(bytemuck::bytes_of(&row.map(u16::to_le)));
        }
    }
}

/// Notes the escapes of a row group; `outside` is 0 for registers without any.
#[cold]
fn add_escapes(window: Window, group: usize, weights: &[[u16; HALVES]; 4], outside: [u16; 4], records: &mut Vec<u32>) {
    for (register, weights) in weights.iter().enumerate().filter(|&(register, _)| outside[register] != 0) {
        for (i, &weight) in weights.iter().enumerate() {
            if window.nibble(bf16::exponent(weight)).is_some() {
                continue;
            }
            let (step, lane, half) = (i / 8, 4 * group + i % 8 / 2, i % 2);
            records.push(window.operand(weight).map_or(NO_OPERAND, |bits| record(bits, lane, step, register, half)));
        }
    }
}

/// Two halves a word, the first one low.
#[inline(always)]
fn pairs(halves: [u16; HALVES]) -> [u32; 16] {
    std::array::from_fn(|i| u32::from(halves[2 * i]) | u32::from(halves[2 * i + 1]) << 16)
}

/// w0, w1, w2 of 16 places.
#[inline(always)]
fn words_from([p0, p1, p2, p3]: [[u32; 16]; 4]) -> [[u32; 16]; 3] {
    let mut words = [[0; 16]; 3];
    for i in 0..16 {
        words[0][i] = p0[i] | p3[i] << 4 & FREE;
        words[1][i] = p1[i] | p3[i] << 8 & FREE;
        words[2][i] = p2[i] | p3[i].rotate_right(4) & FREE;
    }
    words
}

/// P0..P3 of 16 places, without an exponent base.
#[inline(always)]
fn registers_from([w0, w1, w2]: [[u32; 16]; 3]) -> [[u32; 16]; 4] {
    let mut registers = [[0; 16]; 4];
    for i in 0..16 {
        registers[0][i] = w0[i] & !FREE;
        registers[1][i] = w1[i] & !FREE;
        registers[2][i] = w2[i] & !FREE;
        registers[3][i] = (w0[i] & FREE) >> 4 | (w1[i] & FREE) >> 8 | (w2[i] & FREE).rotate_left(4);
    }
    registers
}

/// Row and column in the tile of one operand.
pub(crate) fn place(block: usize, step: usize, lane: usize, register: usize, half: usize) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    (16 * block + group + 8 * (register % 2), 16 * step + 2 * thread + 8 * (register / 2) + half)
}

/// Byte offset in a tile of lane word `q`.
pub(crate) fn word_offset(block: usize, q: usize, lane: usize) -> usize {
    BLOCK_BYTES * block + 512 * (q / 4) + 16 * lane + 4 * (q % 4)
}

fn words_of(tile: &[u8], block: usize, step: usize, lane: usize) -> [u32; 3] {
    std::array::from_fn(|i| word(tile, word_offset(block, 3 * step + i, lane) / 4).expect("inside the tile"))
}

fn record(operand: u16, lane: usize, step: usize, register: usize, half: usize) -> u32 {
    u32::from(operand) | (lane as u32) << 16 | ((4 * step + register) as u32) << 21 | (half as u32) << 25
}

/// Lane, step, register and half of a record.
pub(crate) fn fields(record: u32) -> (usize, usize, usize, usize) {
    let at = (record >> 21 & 15) as usize;
    ((record >> 16 & 31) as usize, at / 4, at % 4, (record >> 25 & 1) as usize)
}

/// What the records of a row block are ordered by: step, register, lane, half.
fn place_of(record: u32) -> u32 {
    (record >> 21 & 15) << 6 | (record >> 16 & 31) << 1 | record >> 25 & 1
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(4 * at..4 * at + 4)?.try_into().expect("4 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    fn weights(rows: usize, cols: usize, outliers: impl Fn(usize) -> Option<u16>) -> Vec<u8> {
        // One sign and mantissa after another; exponents 106 - 121, the highest most often.
        let mut random = Random::new(7);
        (0..rows * cols)
            .flat_map(|i| {
                let bits = random.bits();
                let exponent = 121 - (bits >> 40 & 0xffff | 1 << 15).trailing_zeros() as u16;
                let bits = bits as u16 & 0x807f | exponent.max(106) << 7;
                outliers(i).unwrap_or(bits).to_le_bytes()
            })
            .collect()
    }

    fn round_trip(bytes: &[u8], rows: usize, cols: usize) -> PackedTensor<Vec<u8>> {
        let matrix = Matrix::new(bytes, rows, cols).unwrap();
        let packed = pack(matrix, &Histogram::of(bytes)).unwrap();
        assert!(packed.unpack() == bytes);
        let grid = packed.grid();
        let stored = PackedTensor::from_sections(grid, |s| packed.section(s).unwrap().into_owned()).unwrap();
        assert_eq!(stored, packed);
        // Operands times the scale are the weights, straight from the definition of the fragment.
        for tile in 0..grid.tiles() {
            for (i, registers) in packed.operands(tile).into_iter().enumerate() {
                for (register, pair) in registers.into_iter().enumerate() {
                    for half in 0..2 {
                        let (row, col) = place(i / 128, i / 32 % 4, i % 32, register, half);
                        let (row, col) = (tile / grid.tile_cols() * 64 + row, tile % grid.tile_cols() * 64 + col);
                        let operand = half::bf16::from_bits((pair >> (16 * half)) as u16);
                        let weight = half::bf16::from_bits(matrix.get(row, col));
                        let product = operand.to_f64() * f64::from(packed.window().scale());
                        assert!(product == weight.to_f64() || operand.is_nan() && weight.is_nan(), "{row}, {col}");
                        assert_eq!(product.is_sign_negative(), weight.is_sign_negative());
                    }
                }
            }
        }
        packed
    }

    #[test]
    fn ordinary_weights_have_no_escapes() {
        let packed = round_trip(&weights(128, 192, |_| None), 128, 192);
        assert_eq!(packed.window().base(), 106);
        assert!(packed.escapes().is_empty());
        assert_eq!(packed.stored_bytes(), 128 * 192 * 3 / 2 + 6 * 16 + 16);
    }

    #[test]
    fn escapes_survive_alone_and_in_lists() {
        let special = [0, 0x8000, 1, 0x807f, 0x7f80, 0xff80, 0x7fc1, 0xffff, 0x0080, 0x4000];
        for every in [300, 1031] {
            let bytes = weights(128, 256, |i| (i % every == 0).then(|| special[i / every % special.len()]));
            let packed = round_trip(&bytes, 128, 256);
            assert!(packed.escape_heads().iter().any(|&b| b != 0));
            assert!(every > 300 || !packed.escapes().is_empty(), "close enough for lists");
        }
    }

    #[test]
    fn misfits_of_the_packed_encoding_are_named() {
        let pack = |bytes: &[u8], rows, cols| pack(Matrix::new(bytes, rows, cols).unwrap(), &Histogram::of(bytes));
        assert_eq!(pack(&weights(64, 65, |_| None), 64, 65), Err(Unpackable::Shape));
        let many = weights(64, 64, |i| (i % 100 == 0).then_some(0));
        assert_eq!(pack(&many, 64, 64), Err(Unpackable::Escapes { outside: 41, elements: 4096 }));
        // A window above 112 would lose bits of the smallest subnormal.
        let high: Vec<u8> = (0..4096u32).flat_map(|i| if i == 70 { [1, 0] } else { 0x4000u16.to_le_bytes() }).collect();
        assert_eq!(pack(&high, 64, 64), Err(Unpackable::Operand { row: 1, col: 6 }));
    }

    #[test]
    fn scaling_is_exact_or_refused() {
        for value in 0..=u16::MAX {
            for shift in [-40, -3, -1, 0, 1, 5, 30] {
                let exact = half::bf16::from_bits(value).to_f64() * 2f64.powi(shift);
                match times_power_of_two(value, shift) {
                    Some(scaled) => {
                        let got = half::bf16::from_bits(scaled).to_f64();
                        assert!(got == exact || got.is_nan() && exact.is_nan(), "{value:#x} {shift}");
                        assert_eq!(times_power_of_two(scaled, -shift), Some(value), "{value:#x} {shift}");
                    }
                    None => assert_ne!(half::bf16::from_f64(exact).to_f64(), exact, "{value:#x} {shift}"),
                }
            }
        }
    }

    #[test]
    fn damaged_parts_are_refused() {
        let bytes = weights(64, 64, |i| (i % 300 == 0).then_some(0));
        let tensor = round_trip(&bytes, 64, 64);
        let with = |heads: Vec<u8>, escapes: Vec<u8>| {
            PackedTensor::from_parts(tensor.grid(), tensor.window(), tensor.packed().to_vec(), heads, escapes)
        };
        let (heads, escapes) = (tensor.escape_heads().to_vec(), tensor.escapes().to_vec());
        assert!(with(heads.clone(), escapes.clone()).is_ok());
        let followed_by = |more: &[u8]| with(heads.clone(), [escapes.as_slice(), more].concat());
        assert!(followed_by(&[0; 4]).is_ok(), "padding");
        for more in [&[0; 16][..], &[0; 3], &[0, 0, 0, 1]] {
            assert!(followed_by(more).is_err(), "{more:?}");
        }
        assert!(with(heads.clone(), escapes[..escapes.len() - 4].to_vec()).is_err());
        assert!(with(heads[..12].to_vec(), escapes.clone()).is_err());
        for bit in [0, 24, 30, 31] {
            let mut broken = heads.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(with(broken, escapes.clone()).is_err(), "head bit {bit}");
        }
        let mut swapped = escapes.clone();
        swapped[4..12].rotate_left(4);
        assert!(with(heads, swapped).is_err());
        assert!(Window::new(0).is_err() && Window::new(240).is_err());
    }
}
