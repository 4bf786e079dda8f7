//! The compact encoder: counts quads, chooses a book, then writes tile by tile.

use super::{
    CompactTensor, HEAD_LIST, HEAD_ONE, REGISTERS, UNIT, Uncompact, WORD,
    book::{self, CLASSES, Chosen, ClassBook, ClassWindow, Code, QUADS},
    dense_offset, record, sort_key, stream_bytes, tiles_bytes, whole_tiles, words_from,
};
use crate::{
    Histogram, Matrix, TileGrid, bf16,
    bits::zeroed,
    encoding::bands::BAND_TILES,
    layout::{DENSE_TILE_BYTES, LANE_CODES, LANES, ROW_BLOCKS, SECTION_ALIGN, STREAM_TILE_BYTES_MAX, TILE},
    packed, parallel,
};

/// The sign bits of two halves.
const SIGNS: u32 = 0x8000_8000;
/// The bits that are set in an exponent less the base if it is above a window of 32 exponents.
const OUTSIDE: u32 = 0x7000_7000;
/// The lower two bits of an exponent less the base.
const LOW: u32 = 0x0180_0180;

/// Encodes a matrix, or returns why it cannot be compact. `histogram` is the histogram of this matrix. It does not
/// compare the size with the Huffman encoding's ([`worth_it`](super::worth_it)).
///
/// # Errors
/// [`Uncompact`], which states the rules.
pub fn encode(matrix: Matrix<'_>, histogram: &Histogram) -> Result<CompactTensor<Vec<u8>>, Uncompact> {
    let grid = matrix.grid();
    let classes = Classes::of(grid, histogram)?;
    let scheme = Scheme { matrix, window: classes.window, filler: classes.filler().into() };
    let bands = grid.tiles().div_ceil(BAND_TILES);
    let tiles_of = |band: usize| band * BAND_TILES..grid.tiles().min((band + 1) * BAND_TILES);
    let quads = parallel::count(bands, QUADS, &|band, quads| {
        tiles_of(band).for_each(|tile| scheme.count(tile, quads));
    });
    let chosen = classes.choose(&quads)?;
    let codes = chosen.book.by_quad();
    let mut dense = zeroed(grid.tiles() * DENSE_TILE_BYTES);
    let bands: Vec<Option<Band>> =
        parallel::map(dense.chunks_mut(BAND_TILES * DENSE_TILE_BYTES).enumerate(), |(band, dense)| {
            scheme.band(tiles_of(band), dense, &chosen, &codes)
        });
    let Some(bands) = bands.into_iter().collect::<Option<Vec<Band>>>() else {
        return Err(scheme.first_without_operand());
    };
    let mut tiles = Vec::with_capacity(tiles_bytes(grid));
    let (mut streams, mut escapes) =
        (Vec::with_capacity(bands.iter().map(|band| band.streams.len()).sum()), Vec::new());
    for band in &bands {
        // A band's offsets count from its own start. At most 2^22 tiles of 328 words, and 2^26 escapes: both fit.
        let (start, list) = ((streams.len() / WORD) as u32, (escapes.len() / 4) as u32);
        for &(offset, head) in &band.tiles {
            tiles.extend_from_slice(&(start + offset).to_le_bytes());
            let head = if head & HEAD_LIST != 0 { head + list } else { head };
            tiles.extend_from_slice(&head.to_le_bytes());
        }
        streams.extend_from_slice(&band.streams);
        escapes.extend(band.lists.iter().flat_map(|word| word.to_le_bytes()));
    }
    tiles.extend_from_slice(&((streams.len() / WORD) as u32).to_le_bytes());
    tiles.resize(tiles_bytes(grid), 0);
    streams.resize(streams.len().next_multiple_of(SECTION_ALIGN), 0);
    escapes.resize(escapes.len().next_multiple_of(SECTION_ALIGN), 0);
    Ok(CompactTensor { grid, window: classes.window, book: chosen.book, tiles, escapes, streams, dense })
}

/// The window and classes chosen for a matrix's exponents: all that an encoder needs to count quads.
#[derive(Debug, Clone)]
pub struct Classes {
    window: ClassWindow,
    ranking: [u8; CLASSES],
    outside: u64,
    elements: u64,
}

impl Classes {
    /// Chooses window and classes for a matrix with this histogram.
    ///
    /// # Errors
    /// [`Uncompact::Shape`], [`Uncompact::Escapes`].
    pub fn of(grid: TileGrid, histogram: &Histogram) -> Result<Self, Uncompact> {
        whole_tiles(grid)?;
        let window = ClassWindow::best(histogram);
        let (ranking, outside) = (window.ranking(histogram), outside(window, histogram));
        let classes = Self { window, ranking, outside, elements: histogram.total() };
        // Check before the quads are counted, which can only add escapes.
        classes.choose(&[0; QUADS])?;
        Ok(classes)
    }

    /// The window of exponents.
    pub fn window(&self) -> ClassWindow {
        self.window
    }

    /// The class, 0..8, as which elements outside the window are coded.
    pub fn filler(&self) -> u8 {
        self.ranking[0]
    }

    /// The code for these counts of quads. The index of a quad has its first class lowest, three bits per class.
    ///
    /// # Errors
    /// [`Uncompact::Escapes`].
    ///
    /// # Panics
    /// `quads` does not have 4096 elements.
    pub fn coding(&self, quads: &[u64]) -> Result<Coding, Uncompact> {
        assert_eq!(quads.len(), QUADS, "a count for each quad");
        self.choose(quads).map(Coding)
    }

    fn choose(&self, quads: &[u64]) -> Result<Chosen, Uncompact> {
        book::covering(quads, self.ranking, (self.outside, self.elements))
    }
}

/// The code that an encoder uses.
#[derive(Debug, Clone)]
pub struct Coding(Chosen);

impl Coding {
    /// The code of the classes.
    pub fn book(&self) -> &ClassBook {
        &self.0.book
    }

    /// The code of each quad in the kernels' format (`templates/include/unweight/kernels/encode_compact.cuh`): its bits
    /// in either direction, its length, and the places whose elements are escapes.
    pub fn kernel_table(&self) -> Vec<u32> {
        let codes = self.0.book.by_quad();
        let entry = |&coded: &u16| {
            let code = codes[usize::from(coded & 0xfff)];
            let (forward, backward, bits) = (code.forward, code.backward, code.bits);
            u32::from(forward) | u32::from(backward) << 10 | u32::from(bits) << 20 | u32::from(coded >> 12) << 24
        };
        self.0.coded.iter().map(entry).collect()
    }
}

/// The number of elements outside a window.
pub(super) fn outside(window: ClassWindow, histogram: &Histogram) -> u64 {
    (0..=255u8).filter(|&exponent| window.above(exponent).is_none()).map(|exponent| histogram.count(exponent)).sum()
}

/// The output of consecutive tiles, with offsets from the band's start.
struct Band {
    /// Start in words and head of each tile.
    tiles: Vec<(u32, u32)>,
    streams: Vec<u8>,
    lists: Vec<u32>,
}

/// The matrix to encode and how its elements are split.
struct Scheme<'a> {
    matrix: Matrix<'a>,
    window: ClassWindow,
    /// The class as which elements outside the window are coded.
    filler: u32,
}

type Lanes = [u32; LANES];

impl Scheme<'_> {
    /// The registers of a row block, two elements each.
    #[inline(always)]
    fn gather(&self, tile: usize, block: usize) -> [Lanes; REGISTERS] {
        let grid = self.matrix.grid();
        let (top, left) = (tile / grid.tile_cols() * TILE + 16 * block, tile % grid.tile_cols() * TILE);
        let mut registers = [[0; LANES]; REGISTERS];
        for (i, lanes) in registers.iter_mut().enumerate() {
            for (group, pairs) in lanes.chunks_exact_mut(4).enumerate() {
                let (row, col) = packed::element_at(0, i / 4, 4 * group, i % 4, 0);
                let at = ((top + row) * grid.cols() + left + col) * 2;
                let bytes: [u8; 16] = self.matrix.bytes()[at..at + 16].try_into().expect("16 bytes");
                pairs.copy_from_slice(&bytemuck::cast::<_, [u32; 4]>(bytes).map(u32::from_le));
            }
        }
        registers
    }

    /// Splits registers into their dense part and, in bits 11..9 of each half, their classes. Calls `outside` for each
    /// element outside the window.
    #[inline(always)]
    fn split(
        &self,
        registers: &mut [Lanes; REGISTERS],
        mut outside: impl FnMut(usize, usize, usize, u16),
    ) -> [Lanes; REGISTERS] {
        let base = u32::from(self.window.base());
        let bases = base << 7 | base << 23;
        let mut classes = [[0; LANES]; REGISTERS];
        let mut any = 0;
        for (pairs, classes) in registers.iter_mut().zip(&mut classes) {
            for (pair, class) in pairs.iter_mut().zip(classes) {
                // The sign bit absorbs a borrow from the other half. An element outside has one of the bits 14..12 set.
                *class = (*pair | SIGNS) - bases;
                any |= *class & OUTSIDE;
                *pair = *pair & 0x807f_807f | *class & LOW;
            }
        }
        if any != 0 {
            self.split_outside(registers, &mut classes, &mut outside);
        }
        classes
    }

    /// Sets elements outside the window to the filler's class and low bits of 0.
    #[cold]
    fn split_outside(
        &self,
        registers: &mut [Lanes; REGISTERS],
        classes: &mut [Lanes; REGISTERS],
        outside: &mut impl FnMut(usize, usize, usize, u16),
    ) {
        for (register, (pairs, classes)) in registers.iter_mut().zip(classes).enumerate() {
            for (lane, (pair, class)) in pairs.iter_mut().zip(classes).enumerate() {
                for half in 0..2 {
                    let above = *class >> (16 * half) & 0xffff;
                    if above & OUTSIDE & 0xffff != 0 {
                        let exponent = ((above & 0x7fff) >> 7) as i32 + i32::from(self.window.base());
                        // The difference wrapped below the window's base: an exponent has 256 values.
                        let exponent = (if above & 0x8000 == 0 { exponent - 256 } else { exponent }) as u16;
                        let sign_mantissa = (*pair >> (16 * half)) as u16 & 0x807f;
                        outside(register, lane, half, sign_mantissa | exponent << 7);
                        *pair &= !(LOW & 0xffff << (16 * half));
                        *class = *class & !(0xffff << (16 * half)) | self.filler << 9 << (16 * half);
                    }
                }
            }
        }
    }

    /// The quad of two registers' classes.
    #[inline(always)]
    fn quad(a: u32, b: u32) -> u16 {
        (a >> 9 & 7 | a >> 22 & 0x38 | b >> 3 & 0x1c0 | b >> 16 & 0xe00) as u16
    }

    fn count(&self, tile: usize, quads: &mut [u64]) {
        for block in 0..ROW_BLOCKS {
            let classes = self.split(&mut self.gather(tile, block), |_, _, _, _| {});
            for pair in classes.chunks_exact(2) {
                for (a, b) in pair[0].iter().zip(&pair[1]) {
                    quads[usize::from(Self::quad(*a, *b))] += 1;
                }
            }
        }
    }

    /// Encodes consecutive tiles; `None` if an escape has no operand.
    fn band(&self, tiles: std::ops::Range<usize>, dense: &mut [u8], chosen: &Chosen, codes: &[Code]) -> Option<Band> {
        let mut band = Band { tiles: Vec::with_capacity(tiles.len()), streams: Vec::new(), lists: Vec::new() };
        let mut records = Vec::new();
        for (tile, dense) in tiles.zip(dense.chunks_exact_mut(DENSE_TILE_BYTES)) {
            let start = (band.streams.len() / WORD) as u32;
            self.tile(tile, dense, chosen, codes, &mut band.streams, &mut records)?;
            records.sort_unstable_by_key(|&record| sort_key(record));
            let head = match records.as_slice() {
                [] => 0,
                [one] => HEAD_ONE | one,
                _ => {
                    let at = band.lists.len() as u32;
                    band.lists.push(records.len() as u32);
                    band.lists.extend_from_slice(&records);
                    HEAD_LIST | at
                }
            };
            records.clear();
            band.tiles.push((start, head));
        }
        Some(band)
    }

    /// Writes a tile and appends its escapes, unsorted; `None` if an escape has no operand.
    fn tile(
        &self,
        tile: usize,
        dense: &mut [u8],
        chosen: &Chosen,
        codes: &[Code],
        streams: &mut Vec<u8>,
        records: &mut Vec<u32>,
    ) -> Option<()> {
        let mut chains = [[Code::default(); LANES]; LANE_CODES];
        let mut exact = true;
        for block in 0..ROW_BLOCKS {
            let mut escape = |register: usize, lane: usize, half: usize, weight: u16| match self.window.operand(weight)
            {
                Some(operand) => records.push(record(operand, block, lane, register, half)),
                None => exact = false,
            };
            let mut registers = self.gather(tile, block);
            let classes = self.split(&mut registers, &mut escape);
            for (code, pair) in classes.chunks_exact(2).enumerate() {
                for lane in 0..LANES {
                    let quad = Self::quad(pair[0][lane], pair[1][lane]);
                    let direct_code = codes[usize::from(quad)];
                    chains[8 * block + code][lane] = direct_code;
                    if direct_code.bits > 0 {
                        continue;
                    }
                    let coded = chosen.coded[usize::from(quad)];
                    chains[8 * block + code][lane] = codes[usize::from(coded & 0xfff)];
                    for element in (0..4).filter(|element| coded >> (12 + element) & 1 == 1) {
                        let register = 2 * code + element / 2;
                        let half = (registers[register][lane] >> (16 * (element % 2))) as u16;
                        let class = quad >> (3 * element) & 7;
                        let above = class << 9 | half & LOW as u16;
                        let weight = half & 0x807f | (above + (u16::from(self.window.base()) << 7));
                        escape(register, lane, element % 2, weight);
                    }
                }
            }
            for (unit, registers) in registers.chunks_exact(UNIT).enumerate() {
                let unit_of = |lane: usize| std::array::from_fn(|i| registers[i][lane]);
                for lane in 0..LANES {
                    let words = words_from(unit_of(lane));
                    for (i, word) in words.into_iter().enumerate() {
                        let at = dense_offset(block, unit, i, lane);
                        dense[at..at + 4].copy_from_slice(&word.to_le_bytes());
                    }
                }
            }
        }
        write_streams(&chains, streams);
        exact.then_some(())
    }

    /// Finds the first element, in row-major order, that prevents the encoding.
    #[cold]
    fn first_without_operand(&self) -> Uncompact {
        let cols = self.matrix.grid().cols();
        let lacks_operand =
            |bits: u16| self.window.above(bf16::exponent(bits)).is_none() && self.window.operand(bits).is_none();
        let elements = self.matrix.bytes().chunks_exact(2).map(|e| u16::from_le_bytes([e[0], e[1]]));
        let at = elements.enumerate().find(|&(_, bits)| lacks_operand(bits)).map_or(0, |(at, _)| at);
        Uncompact::Operand { row: at / cols, col: at % cols }
    }
}

/// Appends a tile's streams: lengths, then each lane's two chains, one from each end.
fn write_streams(chains: &[[Code; LANES]; LANE_CODES], streams: &mut Vec<u8>) {
    let mut bits = [0u16; LANES];
    for codes in chains {
        for (bits, code) in bits.iter_mut().zip(codes) {
            *bits += u16::from(code.bits);
        }
    }
    let lengths = bits.map(|bits| bits.div_ceil(2) as u8);
    let mut buffer = [0u8; STREAM_TILE_BYTES_MAX + 8];
    buffer[..LANES].copy_from_slice(&lengths);
    let mut put_code = |at: usize, value: u16| {
        let bytes = &mut buffer[at / 8..][..4];
        let old = u32::from_le_bytes((&*bytes).try_into().expect("4 bytes"));
        bytes.copy_from_slice(&(old | u32::from(value) << (at % 8)).to_le_bytes());
    };
    let mut start = 8 * LANES;
    for lane in 0..LANES {
        let end = start + 2 * usize::from(lengths[lane]);
        let (mut up, mut down) = (start, end);
        for code in 0..LANE_CODES / 2 {
            let (forward, backward) = (chains[code][lane], chains[LANE_CODES / 2 + code][lane]);
            put_code(up, forward.forward);
            up += usize::from(forward.bits);
            down -= usize::from(backward.bits);
            put_code(down, backward.backward);
        }
        start = end;
    }
    streams.extend_from_slice(&buffer[..stream_bytes(&lengths)]);
}
