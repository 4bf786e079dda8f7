//! Constants of the format, shared with the kernels.

/// Rows and columns of a tile.
pub const TILE: usize = 64;
/// Elements of a tile.
pub const TILE_ELEMENTS: usize = TILE * TILE;
/// Maximum number of elements of a tensor that is not raw; it bounds what a reader must hold at once (32 GiB of
/// weights).
pub const ELEMENTS_MAX: u64 = 1 << 34;
/// Maximum number of entries of a palette.
pub const PALETTE_MAX: usize = 16;
/// Maximum length of a code in bits, for any encoder (report section 3.4).
pub const CODE_LENGTH_MAX: u32 = 15;
/// Minimum bits of a coded row: 64 symbols of at least one bit. The bias of `row_lengths`.
pub const ROW_BITS_MIN: u32 = 64;
/// Maximum bits of a coded row, so that a row's length fits one byte. A longer row is verbatim.
pub const ROW_BITS_MAX: u32 = ROW_BITS_MIN + u8::MAX as u32;
/// Maximum 32-bit words of one tile.
pub const TILE_WORDS_MAX: usize = (TILE * ROW_BITS_MAX as usize).div_ceil(32);
/// `encoded_exp` is padded with zero words to a multiple of this number of words.
pub const WORDS_ALIGN: usize = 4;
/// Bytes of one tile of `palette_index`.
pub const PALETTE_TILE_BYTES: usize = TILE_ELEMENTS / 2;
/// Bytes of one tile of `packed`: 64 * 64 * 12 bits.
pub const PACKED_TILE_BYTES: usize = TILE_ELEMENTS * 3 / 2;
/// Row blocks of a packed tile, 16 rows each.
pub const ROW_BLOCKS: usize = 4;
/// Bytes of a row block in a packed tile.
pub const PACKED_BLOCK_BYTES: usize = PACKED_TILE_BYTES / ROW_BLOCKS;
/// Bytes of `packed_window`.
pub const PACKED_WINDOW_BYTES: usize = 16;
/// Exponent of a packed operand with nibble 0: a multiple of 16, so that the nibble is merged with a bitwise or.
pub const OPERAND_EXPONENT: u8 = 112;
/// Lowest base of a window of 16 exponents.
pub const WINDOW_BASE_MIN: u8 = 1;
/// Highest base of a window of 16 exponents, which then ends below the exponent of Inf and NaN.
pub const WINDOW_BASE_MAX: u8 = 239;
/// Bytes of one tile of `dense`: 64 * 64 * 10 bits.
pub const DENSE_TILE_BYTES: usize = TILE_ELEMENTS * 10 / 8;
/// Exponents in the window of the compact encoding: 8 classes of 4.
pub const CLASS_WINDOW: usize = 32;
/// Bytes of `class_window`.
pub const CLASS_WINDOW_BYTES: usize = 16;
/// Lowest base of a window of 32 exponents.
pub const CLASS_BASE_MIN: u8 = 1;
/// Highest base of a window of 32 exponents, which then ends below the exponent of Inf and NaN.
pub const CLASS_BASE_MAX: u8 = 223;
/// Exponent of a compact operand whose weight has the lowest exponent of the window: a multiple of 32, so that class
/// and `low` are merged with a bitwise or.
pub const CLASS_OPERAND_EXPONENT: u8 = 96;
/// Maximum bits of the code of a quad of classes; decoders have a table of `2^9` entries.
pub const CLASS_CODE_MAX: u32 = 9;
/// Lanes of a warp; each has its own stream.
pub const LANES: usize = 32;
/// Codes of a lane in a tile, four elements each: half of them are read forwards, half backwards.
pub const LANE_CODES: usize = TILE_ELEMENTS / LANES / 4;
/// Maximum bytes of one tile of `class_streams`: the lanes' lengths and their longest codes.
pub const STREAM_TILE_BYTES_MAX: usize = LANES + LANES * LANE_CODES * CLASS_CODE_MAX as usize / 8;
/// Bytes of `float_format`.
pub const FLOAT_FORMAT_BYTES: usize = 16;
/// Bytes of one record of `tile_metadata`.
pub const TILE_METADATA_BYTES: usize = 16;
/// Sections of variable size are padded to a multiple of this number of bytes, as the kernels' bulk copies require.
pub const SECTION_ALIGN: usize = 4 * WORDS_ALIGN;

const _: () = assert!(TILE == 64, "the verbatim bitmask is a u64");
const _: () = assert!(TILE * ROW_BITS_MAX as usize <= u16::MAX as usize, "row_end_offsets fit u16");
const _: () = assert!(PACKED_TILE_BYTES == 6144 && PACKED_BLOCK_BYTES == 1536, "stated in docs/format.md A.9");
const _: () = assert!(DENSE_TILE_BYTES == 5120 && STREAM_TILE_BYTES_MAX == 1184, "stated in docs/format.md A.11");
const _: () = assert!(LANE_CODES * CLASS_CODE_MAX as usize / 2 <= u8::MAX as usize, "a lane's length fits a byte");
const _: () = assert!(SECTION_ALIGN == 16, "sections end on 16 bytes, as the kernels' bulk copies need");
