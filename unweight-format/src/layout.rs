//! Constants of the format, shared with the kernels.

/// Rows and columns of a tile.
pub const TILE: usize = 64;
/// Elements of a tile.
pub const TILE_ELEMENTS: usize = TILE * TILE;
/// Most entries of a palette.
pub const PALETTE_MAX: usize = 16;
/// Longest code that any encoder may use, bits (report section 3.4).
pub const CODE_LENGTH_MAX: u32 = 15;
/// A coded row has 64 symbols of at least one bit: the bias of `row_lengths`.
pub const ROW_BITS_MIN: u32 = 64;
/// A row that would need more bits is verbatim; the bound makes a row's length fit one byte.
pub const ROW_BITS_MAX: u32 = ROW_BITS_MIN + u8::MAX as u32;
/// Most 32-bit words of one tile.
pub const TILE_WORDS_MAX: usize = (TILE * ROW_BITS_MAX as usize).div_ceil(32);
/// `encoded_exp` is padded with zero words to a multiple of this many.
pub const WORDS_ALIGN: usize = 4;
/// Bytes of one tile of `palette_index`.
pub const PALETTE_TILE_BYTES: usize = TILE_ELEMENTS / 2;

const _: () = assert!(TILE == 64, "the verbatim bitmask is a u64");
const _: () = assert!(TILE * ROW_BITS_MAX as usize <= u16::MAX as usize, "row_end_offsets fit u16");
