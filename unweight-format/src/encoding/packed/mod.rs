//! The packed encoding: a 12-bit container in the order of a tensor core's A operand (`docs/format.md` A.9).
//!
//! Sixteen consecutive exponents cover almost all weights of a trained tensor. So an exponent is a window base plus a
//! nibble, without a table. An element outside the window is an *escape*: a list next to the container stores its exact
//! operand.

mod container;
mod pack;
mod tensor;
mod window;

pub use pack::pack;
pub use tensor::PackedTensor;
pub use window::Window;

use super::{
    Encoding, EncodingId, Extent, NotEncodable, ReadTileRows, Sample, Section, Sections, Survey, TileRows,
    sample::fixed_bytes, tiles::check_out,
};
pub use crate::layout::{
    OPERAND_EXPONENT, PACKED_TILE_BYTES as TILE_BYTES, PACKED_WINDOW_BYTES as WINDOW_BYTES, ROW_BLOCKS,
};
use crate::{
    CodeLimit, CodecError, FloatMatrix, Histogram, TileGrid,
    layout::{SECTION_ALIGN, TILE},
    safetensors::Dtype,
};
pub(crate) use container::{FREE, LANES, STEPS, element_at, fields, word_offset};
pub(crate) use tensor::slice_lists;
pub(super) use window::times_power_of_two;

/// The packed encoding.
#[derive(Debug, Clone, Copy)]
pub struct Packed;

impl EncodingId {
    /// The 12-bit encoding, which kernels multiply by directly.
    pub const PACKED: Self = Self::new("packed");
}

impl Section {
    /// u8 `[tiles, 6144]`: the container.
    pub const PACKED: Self = Self::new("packed", Dtype::U8, &[Extent::Tiles, Extent::Fixed(TILE_BYTES)]);
    /// u32 `[tiles, 4]`: one head per row block.
    pub const ESCAPE_HEADS: Self = Self::new("escape_heads", Dtype::U32, &[Extent::Tiles, Extent::Fixed(ROW_BLOCKS)]);
    /// u32 `[words]`: lists of escapes.
    pub const ESCAPES: Self = Self::new("escapes", Dtype::U32, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u8 `[16]`: base of the window.
    pub const PACKED_WINDOW: Self = Self::new("packed_window", Dtype::U8, &[Extent::Fixed(WINDOW_BYTES)]);
}

impl Packed {
    /// The sections in stored order.
    const SECTIONS: &'static [Section] =
        &[Section::PACKED_WINDOW, Section::ESCAPE_HEADS, Section::ESCAPES, Section::PACKED];
}

impl Encoding for Packed {
    fn id(&self) -> EncodingId {
        EncodingId::PACKED
    }

    fn sections(&self) -> &'static [Section] {
        Self::SECTIONS
    }

    fn fallback(&self) -> EncodingId {
        EncodingId::PALETTE
    }

    fn fits(&self, grid: TileGrid) -> Result<(), NotEncodable> {
        Ok(packable_shape(grid)?)
    }

    /// Does not look for single escapes without an operand.
    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable> {
        self.fits(grid)?;
        Window::covering(sample.histogram())?;
        Ok(fixed_bytes(Self::SECTIONS, grid) + escape_bytes(grid, sample.histogram()))
    }

    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        PackedTensor::from_sections(grid, |section| sections.get(section)).map(|_| ())
    }

    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, _: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable> {
        Ok(pack(matrix.bf16()?, &survey.histogram)?.into_sections())
    }

    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        decode_into(&PackedTensor::from_sections(grid, |section| sections.get(section))?, out)
    }

    fn tile_rows(&self) -> Option<ReadTileRows> {
        Some(read_tile_rows)
    }
}

/// See [`Encoding::tile_rows`].
fn read_tile_rows<'a>(grid: TileGrid, sections: &Sections<'a>) -> Result<TileRows<'a>, CodecError> {
    let tensor = PackedTensor::from_sections(grid, |section| sections.get(section))?;
    Ok(Box::new(move |first, out| {
        tensor.unpack_rows(first, out);
        Ok(())
    }))
}

impl From<Unpackable> for NotEncodable {
    fn from(why: Unpackable) -> Self {
        Self::new(why)
    }
}

/// A tensor with more escapes than one element in this number is not packed.
///
/// The limit bounds time, not size. Time of matmuls on an H200 against raw weights (`docs/benchmarks.md`): at half of
/// the limit (a tenth of row segments) packed weights are 1.2 to 1.4 times as fast up to batch 16, and 0.8 times at 64
/// and above; close to the limit they are as fast up to batch 16, and 0.6 to 0.7 times as fast beyond. Size: four
/// escapes per row block are 0.16 bits per element (1.3 %). Above the limit the palette encoding is smaller if the
/// escapes have few exponents, such as exact zeros, which fit its palette, and larger for heavy tails
/// (`docs/benchmarks.md`, packed profile).
pub const ESCAPES_ONE_IN: u64 = 256;

/// Why a matrix cannot be packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unpackable {
    /// `n` or `k` is not a multiple of 64.
    #[error("rows or columns are not a multiple of 64")]
    Shape,
    /// Too many elements are outside every window ([`ESCAPES_ONE_IN`]).
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
        /// Column of that element.
        col: usize,
    },
}

impl Unpackable {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "not-packable"
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}

/// Bytes of the lists of escapes, if escapes are scattered evenly; clustered escapes need less.
fn escape_bytes(grid: TileGrid, histogram: &Histogram) -> u64 {
    let (_, outside) = Window::best(histogram);
    let row_blocks = (grid.tiles() * ROW_BLOCKS) as f64;
    let mean = grid.elements() as f64 / row_blocks * outside as f64 / histogram.total().max(1) as f64;
    // Poisson: a row block with two or more escapes has a word for each and one for their number.
    let (none, one) = ((-mean).exp(), mean * (-mean).exp());
    (row_blocks * (mean - one + (1.0 - none - one))) as u64 * 4
}

/// Decodes a packed matrix into `out` on the current rayon pool.
///
/// # Errors
/// `out` is not `n * k * 2` bytes long.
pub fn decode_into<B: AsRef<[u8]> + Sync>(tensor: &PackedTensor<B>, out: &mut [u8]) -> Result<(), CodecError> {
    check_out(tensor.grid(), out)?;
    tensor.unpack_rows(0, out);
    Ok(())
}

/// Checks whether a matrix of this shape can be packed.
///
/// # Errors
/// [`Unpackable::Shape`].
pub fn packable_shape(grid: TileGrid) -> Result<(), Unpackable> {
    let whole = grid.rows().is_multiple_of(TILE) && grid.cols().is_multiple_of(TILE);
    if whole { Ok(()) } else { Err(Unpackable::Shape) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Matrix, testing::Random};

    fn weights(rows: usize, cols: usize, outliers: impl Fn(usize) -> Option<u16>) -> Vec<u8> {
        // Arbitrary signs and mantissas; exponents 106 - 121, the highest most often.
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
        // By the definition of the fragment, operands times the scale are the weights.
        for tile in 0..grid.tiles() {
            for (i, registers) in packed.operands(tile).into_iter().enumerate() {
                for (register, pair) in registers.into_iter().enumerate() {
                    for half in 0..2 {
                        let (row, col) = element_at(i / 128, i / 32 % 4, i % 32, register, half);
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
    fn unpackable_matrices_name_the_reason() {
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
