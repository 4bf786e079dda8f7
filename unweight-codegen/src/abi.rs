//! The argument structs of every kernel, field for field as in `templates/include/unweight/abi.cuh`.
//!
//! Each kernel takes exactly one of them by value (`__grid_constant__`). Device pointers are `u64`
//! (`CUdeviceptr`), 0 = null. The rendered source asserts `sizeof` against these types.

use bytemuck::{Pod, Zeroable};

/// A `CUtensorMap`: opaque, 128 bytes, 64-byte aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u64; 16]);

/// Arguments of the preprocess family (`decode_full`, `decode_exponent`, `decode_palette`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DecodeArgs {
    /// `[n, k]` u8; read by `decode_full` only.
    pub sign_mantissa: u64,
    /// `[encoded_words]` u32.
    pub encoded_exp: u64,
    /// `[tiles, 64]` u8, bits - 64.
    pub row_lengths: u64,
    /// `[tiles]` of 16 bytes.
    pub tile_metadata: u64,
    /// `[verbatim_rows, 64]` u8.
    pub verbatim_exponents: u64,
    /// `[16]` u8.
    pub palette: u64,
    /// `[16]` u8.
    pub code_lengths: u64,
    /// full: bf16 `[n, k]`; exponent: u8 `[tiles, 64, 64]`; palette: u8 `[tiles, 64, 32]`.
    pub output: u64,
    /// u32; 1 + tile where a tile's metadata is out of bounds.
    pub fault: u64,
    /// Words in `encoded_exp`.
    pub encoded_words: u64,
    /// Rows in `verbatim_exponents`.
    pub verbatim_rows: u32,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// `ceil(n / 64)`.
    pub tile_rows: u32,
    /// `ceil(k / 64)`.
    pub tile_cols: u32,
    /// 0.
    pub reserved: u32,
}

/// Arguments of the report's reconstructive matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct GemmReconArgs {
    /// bf16 `[m, k]`, box 64 x 64, 128-byte swizzle, zero fill.
    pub x: TensorMap,
    /// u8 `[n, k]`, box 64 x 64, no swizzle.
    pub sign_mantissa: TensorMap,
    /// Exponent source: u8 `[tiles, 64, 64]`; palette source: u8 `[tiles, 64, 32]`.
    pub exponents: u64,
    /// Palette source only: `[tiles]` of 16 bytes.
    pub tile_metadata: u64,
    /// Palette source only: u8 `[verbatim_rows, 64]`.
    pub verbatim_exponents: u64,
    /// Palette source only: u8 `[16]`.
    pub palette: u64,
    /// bf16 `[m, n]`.
    pub y: u64,
    /// Rows in `verbatim_exponents`.
    pub verbatim_rows: u32,
    /// Batch rows.
    pub m: u32,
    /// Output features, a multiple of 64 times the variant's N tiles.
    pub n: u32,
    /// Input features, a multiple of 64.
    pub k: u32,
    /// `k / 64`.
    pub tile_cols: u32,
    /// 0.
    pub reserved: u32,
}

/// Arguments of the register-sourced family (`gemm_mma`, `gemm_wgmma`).
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct GemmPackedArgs {
    /// bf16 `[m, k]`, box 64 x the variant's batch tile, 128-byte swizzle, zero fill.
    pub x: TensorMap,
    /// bf16 `[m, n]`, for variants that store by the copy engine.
    pub y_map: TensorMap,
    /// u8 `[tiles, 6144]`.
    pub packed: u64,
    /// u32 `[tiles, 4]`.
    pub escape_heads: u64,
    /// u32 `[escape_words]`.
    pub escapes: u64,
    /// bf16 `[m, n]`.
    pub y: u64,
    /// f32 partial sums; its size follows from the plan.
    pub workspace: u64,
    /// u32, zeroed once; every launch leaves them zero.
    pub counters: u64,
    /// `2^(base - 112)`.
    pub scale: f32,
    /// Words in `escapes`.
    pub escape_words: u32,
    /// Batch rows.
    pub m: u32,
    /// Output features, a multiple of 64.
    pub n: u32,
    /// Input features, a multiple of 64.
    pub k: u32,
    /// `k / 64`.
    pub tile_cols: u32,
    /// 0.
    pub reserved: [u32; 14],
}

/// Arguments of the encoding family: all stages share one struct.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct EncodeArgs {
    /// bf16 `[n, k]`.
    pub weights: u64,
    /// u8 `[n, k]`.
    pub sign_mantissa: u64,
    /// u32 `[256]`, zeroed before `stats`.
    pub histogram: u64,
    /// u8 `[16]`.
    pub palette: u64,
    /// u8 `[16]`.
    pub code_lengths: u64,
    /// u32 `[256]`: code | length << 16 | palette index << 24.
    pub encode_table: u64,
    /// u32 `[2^code_limit]`: exponent | length << 8 | palette index << 16.
    pub decode_table: u64,
    /// u8 `[tiles, 64]`.
    pub row_lengths: u64,
    /// `[tiles]` of 16 bytes.
    pub tile_metadata: u64,
    /// u32 `[capacity_words]`, zeroed before `write`.
    pub encoded_exp: u64,
    /// u8 `[capacity_rows, 64]`.
    pub verbatim_exponents: u64,
    /// u8 `[tiles, 64, 32]`, stage `palette` only.
    pub palette_index: u64,
    /// u64 `[4]`: words, verbatim rows, most verbatim rows in a tile, fault.
    pub totals: u64,
    /// u64 scratch of `scan`, zeroed.
    pub scan_state: u64,
    /// Words that fit in `encoded_exp`.
    pub capacity_words: u64,
    /// Rows that fit in `verbatim_exponents`.
    pub capacity_rows: u32,
    /// Code limit L.
    pub code_limit: u32,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// `ceil(n / 64)`.
    pub tile_rows: u32,
    /// `ceil(k / 64)`.
    pub tile_cols: u32,
}

/// Arguments of the conversions of the packed form: all stages share one struct.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RepackArgs {
    /// bf16 `[n, k]`: read by `pack` and `lists`, written by `unpack`.
    pub weights: u64,
    /// u8 `[tiles, 6144]`.
    pub packed: u64,
    /// u32 `[tiles, 4]`.
    pub escape_heads: u64,
    /// u32 `[escape_words]`; unused by `pack`.
    pub escapes: u64,
    /// u32 `[ceil(tiles / 16)]`, zeroed before `pack`: words of the lists of 64 row blocks each.
    pub group_words: u64,
    /// u64, zeroed before `pack`: `!(row * k + column)` of the first element that no operand can stand for, 0 if there is none.
    pub inexact: u64,
    /// Words in `escapes`.
    pub escape_words: u32,
    /// Lowest exponent of the window, 1..=239.
    pub base: u32,
    /// Output features, a multiple of 64.
    pub n: u32,
    /// Input features, a multiple of 64.
    pub k: u32,
    /// `n / 64`.
    pub tile_rows: u32,
    /// `k / 64`.
    pub tile_cols: u32,
}

const _: () = assert!(size_of::<DecodeArgs>() == 104);
const _: () = assert!(size_of::<GemmReconArgs>() == 320);
const _: () = assert!(size_of::<GemmPackedArgs>() == 384);
const _: () = assert!(size_of::<EncodeArgs>() == 144);
const _: () = assert!(size_of::<RepackArgs>() == 72);
