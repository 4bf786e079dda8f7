//! A packed matrix: its validated sections, and what can be read from them without decoding.

use std::{borrow::Cow, ops::Range};

use super::{
    Packed, Window,
    container::{LANES, STEPS, element_at, fields, registers_from, sort_key, unpack_block, word, words_of},
};
use crate::{
    CodecError, EncodingId, Section, StoredTensor, TileGrid, bf16,
    bits::zeroed,
    encoding::tiles::debug_sizes,
    layout::{
        OPERAND_EXPONENT, PACKED_BLOCK_BYTES as BLOCK_BYTES, PACKED_TILE_BYTES as TILE_BYTES, ROW_BLOCKS,
        SECTION_ALIGN, TILE, WORDS_ALIGN,
    },
    parallel,
};

/// A head with this bit contains the index of a list of escapes, in words of `escapes`.
pub(super) const HEAD_LIST: u32 = 1 << 31;
/// A head with this bit contains the record of one escape.
pub(super) const HEAD_ONE: u32 = 1 << 30;

/// A packed matrix. `B` owns or borrows the bytes. Construction validates them, so every index in them can be trusted.
#[derive(Clone)]
pub struct PackedTensor<B> {
    pub(super) grid: TileGrid,
    pub(super) window: Window,
    pub(super) packed: B,
    pub(super) escape_heads: B,
    /// Followed by less than [`WORDS_ALIGN`] zero words.
    pub(super) escapes: B,
    pub(super) escape_words: usize,
}

impl<B: AsRef<[u8]>> PackedTensor<B> {
    /// Reads and validates stored sections.
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

    /// Validates and assembles a tensor from u8 `[tiles, 6144]`, u32 `[tiles, 4]` and u32 `[words]`, little-endian. Up
    /// to 3 zero words may follow the last escape.
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
                        return fail("its escapes do not follow the previous ones");
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
                let key = Some(sort_key(record));
                if record >> 26 != 0 || key <= last {
                    return fail("its escapes are not in order");
                }
                let Some(weight) = window.weight(record as u16) else {
                    return fail("an escape's operand has no weight");
                };
                if window.nibble(bf16::exponent(weight)).is_some() {
                    return fail("an escape is inside the window");
                }
                if tensor.half(block, record) != weight & 0x807f {
                    return fail("the element of an escape does not have its sign and mantissa");
                }
                last = key;
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

    /// The matrix's shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// The window of exponents.
    pub fn window(&self) -> Window {
        self.window
    }

    /// The section `packed`: u8 `[tiles, 6144]`.
    pub fn packed(&self) -> &[u8] {
        self.packed.as_ref()
    }

    /// The section `escape_heads`: u32 `[tiles, 4]`, little-endian.
    pub fn escape_heads(&self) -> &[u8] {
        self.escape_heads.as_ref()
    }

    /// The section `escapes` without its fill: u32 `[words]`, little-endian.
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

    /// Bytes of all sections together.
    pub fn stored_bytes(&self) -> u64 {
        Packed::SECTIONS.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// The number of elements outside the window.
    pub fn escape_count(&self) -> u64 {
        (0..self.grid.tiles() * ROW_BLOCKS).map(|block| self.records_in(block) as u64).sum()
    }

    /// The maximum number of escapes of one row block, which a kernel patches in its slowest tile.
    pub fn max_escapes(&self) -> usize {
        (0..self.grid.tiles() * ROW_BLOCKS).map(|block| self.records_in(block)).max().unwrap_or(0)
    }

    /// The operands of a tile as kernels use them: `[4 row blocks][4 steps][32 lanes][4 registers]`, two bf16 each.
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

    /// The half of the container at the place of a record.
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

    /// A packed matrix of these rows and columns with the same window, such as the shard of one rank. Tiles and lists
    /// of escapes are copied without decoding.
    ///
    /// [`pack`](super::pack()) might choose another window for the part, and more than one element of the part in
    /// [`ESCAPES_ONE_IN`](super::ESCAPES_ONE_IN) may be an escape.
    ///
    /// # Errors
    /// A range is empty, exceeds the matrix, or is not in multiples of 64.
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

    /// Decodes the weights bit for bit.
    pub fn unpack(&self) -> Vec<u8>
    where
        B: Sync,
    {
        let mut out = zeroed(self.grid.elements() * 2);
        self.unpack_rows(0, &mut out);
        out
    }

    /// Like [`PackedTensor::unpack`], for the tile rows from index `first` on that fill `out`.
    pub(crate) fn unpack_rows(&self, first: usize, out: &mut [u8])
    where
        B: Sync,
    {
        let (cols, tile_cols) = (self.grid.cols(), self.grid.tile_cols());
        parallel::for_each_chunk(out, TILE * cols * 2, &|tile_row, out| {
            // Row block by row block: writing 16 instead of 64 rows at a time causes fewer cache and TLB misses.
            for block in 0..ROW_BLOCKS {
                for tile_col in 0..tile_cols {
                    let tile = (first + tile_row) * tile_cols + tile_col;
                    let bytes = self.packed()[tile * TILE_BYTES + block * BLOCK_BYTES..].first_chunk();
                    let out = &mut out[(16 * block * cols + tile_col * TILE) * 2..];
                    unpack_block(bytes.expect("its size was checked"), self.window.base, out, cols * 2);
                    for record in self.records(tile * ROW_BLOCKS + block) {
                        let (lane, step, register, half) = fields(record);
                        let (row, col) = element_at(0, step, lane, register, half);
                        let weight = self.window.weight(record as u16).expect("checked");
                        let at = (row * cols + col) * 2;
                        out[at..at + 2].copy_from_slice(&weight.to_le_bytes());
                    }
                }
            }
        });
    }
}

/// The grid of these rows and columns of a packed matrix, with the heads and lists of its tiles as
/// [`PackedTensor::from_parts`] expects them.
///
/// # Errors
/// The errors of [`PackedTensor::slice`], or a list is not inside `escapes`.
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
    let (mut sliced_heads, mut sliced_escapes) = (Vec::with_capacity(grid.tiles() * ROW_BLOCKS * 4), Vec::new());
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
                // At most the index in the whole tensor, which fits a head.
                head = HEAD_LIST | (sliced_escapes.len() / 4) as u32;
                sliced_escapes.extend_from_slice(list);
            }
            sliced_heads.extend_from_slice(&head.to_le_bytes());
        }
    }
    Ok((grid, sliced_heads, sliced_escapes))
}

impl PackedTensor<Vec<u8>> {
    /// The sections in stored order.
    pub(super) fn into_sections(mut self) -> Vec<Vec<u8>> {
        self.escapes.resize(self.escapes.len().next_multiple_of(SECTION_ALIGN), 0);
        vec![self.window.stored().to_vec(), self.escape_heads, self.escapes, self.packed]
    }
}

impl<B: AsRef<[u8]>> PackedTensor<B> {
    /// The typed view of a stored tensor; `None` if it has another encoding. To keep the tensor, pass
    /// [`StoredTensor::borrowed`].
    pub fn of(tensor: StoredTensor<B>) -> Option<Self> {
        let (grid, section) = tensor.take(EncodingId::PACKED)?;
        Some(Self::from_sections(grid, section).expect("a stored tensor was checked"))
    }
}

impl From<PackedTensor<Vec<u8>>> for StoredTensor<Vec<u8>> {
    fn from(tensor: PackedTensor<Vec<u8>>) -> Self {
        Self::trusted(EncodingId::PACKED, tensor.grid, tensor.into_sections())
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
