//! The packed resident form: a 12-bit container in the order of a tensor core's A operand (`docs/format.md` A.9).
//!
//! Sixteen consecutive exponents cover almost all weights of a trained tensor, so an exponent is a window base plus a nibble and
//! no table is needed. What lies outside is an *escape* and keeps its exact operand beside the container.

use rayon::prelude::*;

use crate::{CodecError, Grid, Histogram, Matrix, bf16, buffer, layout::TILE};

/// Bytes of one packed tile: 64 * 64 * 12 bits.
pub const TILE_BYTES: usize = TILE * TILE * 3 / 2;
/// Row blocks of a tile, 16 rows each.
pub const ROW_BLOCKS: usize = 4;
/// Exponent of an operand with nibble 0: a multiple of 16, so that the nibble is merged by `or`.
pub const OPERAND_EXPONENT: u8 = 112;
/// More escapes than one element in this many, and the tensor is not packed: their lists would cost more than the palette form saves.
pub const ESCAPES_ONE_IN: u64 = 256;

const LANES: usize = 32;
const STEPS: usize = 4;
/// The bits of two halves that a container word leaves free: 14..11 of each.
const FREE: u32 = 0x7800_7800;
const HEAD_LIST: u32 = 1 << 31;
const HEAD_ONE: u32 = 1 << 30;

/// The window of 16 consecutive exponents that a tensor is packed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    base: u8,
}

impl Window {
    /// The window that covers most elements, of equals the lowest, with the number of elements outside.
    pub fn best(histogram: &Histogram) -> (Self, u64) {
        let covered = |base: u8| (base..base + 16).map(|e| histogram.count(e)).sum::<u64>();
        let base = (1..=239u8).rev().max_by_key(|&base| covered(base)).expect("239 windows");
        (Self { base }, histogram.total() - covered(base))
    }

    /// # Errors
    /// `base` is not in 1..=239.
    pub fn new(base: u8) -> Result<Self, CodecError> {
        if (1..=239).contains(&base) {
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

    fn nibble(self, exponent: u8) -> Option<u8> {
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
fn times_power_of_two(value: u16, shift: i32) -> Option<u16> {
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unpackable {
    /// `n` or `k` is not a multiple of 64.
    Shape,
    /// Too many elements lie outside every window ([`ESCAPES_ONE_IN`]).
    Escapes {
        /// Elements outside the best window.
        outside: u64,
    },
    /// An escape has no exact operand.
    Operand {
        /// Row of the first such element.
        row: usize,
        /// Its column.
        col: usize,
    },
}

/// A packed matrix. `B` owns or borrows the bytes; constructing one validates it, so every index inside may be trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedTensor<B> {
    grid: Grid,
    window: Window,
    packed: B,
    escape_heads: B,
    escapes: B,
}

impl<B: AsRef<[u8]>> PackedTensor<B> {
    /// Reads stored sections: u8 `[tiles, 6144]`, u32 `[tiles, 4]`, u32 `[words]`, little-endian.
    ///
    /// # Errors
    /// The shape cannot be packed, a section has the wrong size, or a head or list is not canonical.
    pub fn from_parts(grid: Grid, window: Window, packed: B, escape_heads: B, escapes: B) -> Result<Self, CodecError> {
        if !grid.rows().is_multiple_of(TILE) || !grid.cols().is_multiple_of(TILE) {
            return Err(CodecError::MatrixShape { rows: grid.rows(), cols: grid.cols() });
        }
        let size = |section, expected: usize, got: usize| {
            if expected == got {
                Ok(())
            } else {
                Err(CodecError::SectionBytes { section, expected: expected as u64, got: got as u64 })
            }
        };
        size("packed", grid.tiles() * TILE_BYTES, packed.as_ref().len())?;
        size("escape_heads", grid.tiles() * ROW_BLOCKS * 4, escape_heads.as_ref().len())?;
        let list_bytes = escapes.as_ref().len();
        size("escapes", list_bytes / 4 * 4, list_bytes)?;
        let tensor = Self { grid, window, packed, escape_heads, escapes };
        let mut next = 0usize;
        for block in 0..grid.tiles() * ROW_BLOCKS {
            let fail = |reason| Err(CodecError::Row { tile: block / ROW_BLOCKS, row: block % ROW_BLOCKS * 16, reason });
            let head = tensor.head(block);
            let records = match head >> 30 {
                0 if head == 0 => continue,
                1 => vec![head & (HEAD_ONE - 1)],
                2 | 3 => {
                    if (head & (HEAD_LIST - 1)) as usize != next {
                        return fail("its escapes do not follow those before");
                    }
                    let count = tensor.escape_word(next).unwrap_or(0) as usize;
                    if !(2..=TILE * 16).contains(&count) || next + 1 + count > list_bytes / 4 {
                        return fail("its list of escapes has a wrong length");
                    }
                    next += 1 + count;
                    (next - count..next).map(|at| tensor.escape_word(at).expect("inside, checked")).collect()
                }
                _ => return fail("its head is not 0, one record or a list"),
            };
            let place = |record: u32| (record >> 21 & 15, record >> 16 & 31, record >> 25 & 1);
            if records.iter().any(|r| r >> 26 != 0) || !records.is_sorted_by(|a, b| place(*a) < place(*b)) {
                return fail("its escapes are not in order");
            }
            if records.iter().any(|&r| window.weight(r as u16).is_none()) {
                return fail("an escape's operand has no weight");
            }
        }
        size("escapes", next * 4, list_bytes)?;
        Ok(tensor)
    }

    fn head(&self, block: usize) -> u32 {
        word(self.escape_heads.as_ref(), block).expect("its size was checked")
    }

    fn escape_word(&self, at: usize) -> Option<u32> {
        word(self.escapes.as_ref(), at)
    }

    /// Shape and tiling.
    pub fn grid(&self) -> Grid {
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

    /// u32 `[words]`, little-endian.
    pub fn escapes(&self) -> &[u8] {
        self.escapes.as_ref()
    }

    /// Bytes of all parts, with the 16 of `packed_window`.
    pub fn stored_bytes(&self) -> u64 {
        (self.packed().len() + self.escape_heads().len() + self.escapes().len() + 16) as u64
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
            *registers = registers_of(words_of(bytes, block, step, lane))
                .map(|pair| pair | u32::from(OPERAND_EXPONENT) << 23 | u32::from(OPERAND_EXPONENT) << 7);
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

    /// The escapes of a row block.
    fn records(&self, block: usize) -> impl Iterator<Item = u32> {
        let head = self.head(block);
        let range = if head & HEAD_LIST != 0 {
            let at = (head & (HEAD_LIST - 1)) as usize;
            at + 1..at + 1 + self.escape_word(at).expect("checked") as usize
        } else {
            0..0
        };
        let one = (head & HEAD_ONE != 0 && head & HEAD_LIST == 0).then_some(head & (HEAD_ONE - 1));
        one.into_iter().chain(range.map(|at| self.escape_word(at).expect("checked")))
    }

    /// The weights, bit for bit.
    pub fn unpack(&self) -> Vec<u8>
    where
        B: Sync,
    {
        let (cols, tile_cols) = (self.grid.cols(), self.grid.tile_cols());
        let mut out = buffer::zeroed(self.grid.elements() * 2);
        out.par_chunks_mut(TILE * cols * 2).enumerate().for_each(|(tile_row, out)| {
            for tile_col in 0..tile_cols {
                let tile = tile_row * tile_cols + tile_col;
                let bytes = &self.packed()[tile * TILE_BYTES..][..TILE_BYTES];
                let mut put = |block, step, lane, register, half, weight: u16| {
                    let (row, col) = place(block, step, lane, register, half);
                    let at = (row * cols + tile_col * TILE + col) * 2;
                    out[at..at + 2].copy_from_slice(&weight.to_le_bytes());
                };
                for block in 0..ROW_BLOCKS {
                    for step in 0..STEPS {
                        for lane in 0..LANES {
                            let registers = registers_of(words_of(bytes, block, step, lane));
                            for (register, pair) in registers.into_iter().enumerate() {
                                for half in 0..2 {
                                    let weight = (pair >> (16 * half)) as u16 + (u16::from(self.window.base) << 7);
                                    put(block, step, lane, register, half, weight);
                                }
                            }
                        }
                    }
                    for record in self.records(tile * ROW_BLOCKS + block) {
                        let (lane, step, register, half) = fields(record);
                        let weight = self.window.weight(record as u16).expect("checked");
                        put(block, step, lane, register, half, weight);
                    }
                }
            }
        });
        out
    }
}

/// Packs a matrix, or says why it stays in another form.
///
/// # Errors
/// [`Unpackable`]; the rule is stated there.
pub fn pack(matrix: Matrix<'_>, histogram: &Histogram) -> Result<PackedTensor<Vec<u8>>, Unpackable> {
    let grid = matrix.grid();
    if !grid.rows().is_multiple_of(TILE) || !grid.cols().is_multiple_of(TILE) {
        return Err(Unpackable::Shape);
    }
    let (window, outside) = Window::best(histogram);
    if outside * ESCAPES_ONE_IN > grid.elements() as u64 {
        return Err(Unpackable::Escapes { outside });
    }
    let mut packed = buffer::zeroed(grid.tiles() * TILE_BYTES);
    let tiles: Vec<[Vec<u32>; ROW_BLOCKS]> = packed
        .par_chunks_mut(TILE_BYTES)
        .enumerate()
        .map(|(tile, bytes)| pack_tile(matrix, window, tile, bytes))
        .collect::<Result<_, _>>()?;
    let (mut heads, mut escapes) = (Vec::with_capacity(grid.tiles() * ROW_BLOCKS * 4), Vec::<u8>::new());
    for records in tiles.iter().flatten() {
        let head = match records.as_slice() {
            [] => 0,
            [one] => HEAD_ONE | one,
            many => {
                let at = (escapes.len() / 4) as u32;
                escapes.extend((many.len() as u32).to_le_bytes());
                escapes.extend(many.iter().flat_map(|record| record.to_le_bytes()));
                HEAD_LIST | at
            }
        };
        heads.extend(head.to_le_bytes());
    }
    Ok(PackedTensor { grid, window, packed, escape_heads: heads, escapes })
}

fn pack_tile(
    matrix: Matrix<'_>,
    window: Window,
    tile: usize,
    bytes: &mut [u8],
) -> Result<[Vec<u32>; ROW_BLOCKS], Unpackable> {
    let grid = matrix.grid();
    let (top, left) = (tile / grid.tile_cols() * TILE, tile % grid.tile_cols() * TILE);
    let mut escapes: [Vec<u32>; ROW_BLOCKS] = Default::default();
    for (block, escapes) in escapes.iter_mut().enumerate() {
        for step in 0..STEPS {
            let mut words = [[0u32; 4]; LANES];
            // Register before lane: the order of the records.
            for register in 0..4 {
                for (lane, registers) in words.iter_mut().enumerate() {
                    for half in 0..2 {
                        let (row, col) = place(block, step, lane, register, half);
                        let (row, col) = (top + row, left + col);
                        let weight = matrix.get(row, col);
                        let nibble = window.nibble(bf16::exponent(weight));
                        if nibble.is_none() {
                            let operand = window.operand(weight).ok_or(Unpackable::Operand { row, col })?;
                            let at = (4 * step + register) as u32;
                            escapes.push(u32::from(operand) | (lane as u32) << 16 | at << 21 | (half as u32) << 25);
                        }
                        let packed = weight & 0x807f | u16::from(nibble.unwrap_or(0)) << 7;
                        registers[register] |= u32::from(packed) << (16 * half);
                    }
                }
            }
            for (lane, [p0, p1, p2, p3]) in words.into_iter().enumerate() {
                let container = [p0 | p3 << 4 & FREE, p1 | p3 << 8 & FREE, p2 | p3.rotate_right(4) & FREE];
                for (i, word) in container.into_iter().enumerate() {
                    let at = word_offset(block, 3 * step + i, lane);
                    bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
                }
            }
        }
    }
    Ok(escapes)
}

/// Row and column in the tile of one operand.
fn place(block: usize, step: usize, lane: usize, register: usize, half: usize) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    (16 * block + group + 8 * (register % 2), 16 * step + 2 * thread + 8 * (register / 2) + half)
}

/// Byte offset in a tile of lane word `q`.
fn word_offset(block: usize, q: usize, lane: usize) -> usize {
    1536 * block + 512 * (q / 4) + 16 * lane + 4 * (q % 4)
}

fn words_of(tile: &[u8], block: usize, step: usize, lane: usize) -> [u32; 3] {
    std::array::from_fn(|i| word(tile, word_offset(block, 3 * step + i, lane) / 4).expect("inside the tile"))
}

/// P0..P3 without an exponent base.
fn registers_of([w0, w1, w2]: [u32; 3]) -> [u32; 4] {
    let p3 = (w0 & FREE) >> 4 | (w1 & FREE) >> 8 | (w2 & FREE).rotate_left(4);
    [w0 & !FREE, w1 & !FREE, w2 & !FREE, p3]
}

/// Lane, step, register and half of a record.
fn fields(record: u32) -> (usize, usize, usize, usize) {
    let at = (record >> 21 & 15) as usize;
    ((record >> 16 & 31) as usize, at / 4, at % 4, (record >> 25 & 1) as usize)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(4 * at..4 * at + 4)?.try_into().expect("4 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(rows: usize, cols: usize, outliers: impl Fn(usize) -> Option<u16>) -> Vec<u8> {
        let mut state = 7u64;
        (0..rows * cols)
            .flat_map(|i| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let exponent = 121 - (state >> 40 & 0xffff | 1 << 15).trailing_zeros() as u16;
                let bits = (state >> 20) as u16 & 0x807f | exponent.max(106) << 7;
                outliers(i).unwrap_or(bits).to_le_bytes()
            })
            .collect()
    }

    fn round_trip(bytes: &[u8], rows: usize, cols: usize) -> PackedTensor<Vec<u8>> {
        let matrix = Matrix::new(bytes, rows, cols).unwrap();
        let packed = pack(matrix, &Histogram::of(bytes)).unwrap();
        assert!(packed.unpack() == bytes);
        let PackedTensor { grid, window, packed: p, escape_heads, escapes } = packed.clone();
        assert_eq!(PackedTensor::from_parts(grid, window, p, escape_heads, escapes).unwrap(), packed);
        // Operands times the scale are the weights, straight from the definition of the fragment.
        for tile in 0..grid.tiles() {
            for (i, registers) in packed.operands(tile).into_iter().enumerate() {
                for (register, pair) in registers.into_iter().enumerate() {
                    for half in 0..2 {
                        let (row, col) = place(i / 128, i / 32 % 4, i % 32, register, half);
                        let (row, col) = (tile / grid.tile_cols() * 64 + row, tile % grid.tile_cols() * 64 + col);
                        let operand = half::bf16::from_bits((pair >> (16 * half)) as u16);
                        let weight = half::bf16::from_bits(matrix.get(row, col));
                        let product = operand.to_f64() * f64::from(window.scale());
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
    fn what_cannot_be_packed_is_said() {
        let pack = |bytes: &[u8], rows, cols| pack(Matrix::new(bytes, rows, cols).unwrap(), &Histogram::of(bytes));
        assert_eq!(pack(&weights(64, 65, |_| None), 64, 65), Err(Unpackable::Shape));
        let many = weights(64, 64, |i| (i % 100 == 0).then_some(0));
        assert_eq!(pack(&many, 64, 64), Err(Unpackable::Escapes { outside: 41 }));
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
        assert!(with(heads.clone(), [escapes.as_slice(), &[0; 4]].concat()).is_err());
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
