//! DFloat11 0.5: saves a third of BF16 with a Huffman code of the exponents (`docs/rivals.md`).
//!
//! A unit holds the concatenated weights of one module of the model: a decoder layer, the embedding, or the head. Its
//! sections:
//! ```text
//! luts              U8 [rows + 1, 256]     one row per prefix of whole bytes; the last row: code lengths of exponents
//! encoded_exponent  U8 [bytes]             codes, most significant bit first; the first bits of the end code fill the
//!                                          last byte
//! sign_mantissa     U8 [elements]          sign << 7 | mantissa
//! output_positions  U8 [4 * (blocks + 1)]  u32, little-endian: the first element of each block, then the element count
//! gaps              U8 [5 bits per window] where the first code of a window of 8 bytes begins, most significant bit
//!                                          first
//! split_positions   I64 [weights - 1]      where each weight except the first begins
//! ```
//! One thread of the kernel decodes a window, and `threads` of them decode a block. An entry of a row is the exponent
//! whose code the bits begin with, or 256 - i: continue in row i with the next byte. So exponents from 240 on cannot be
//! stored.
//!
//! ```text
//! code    frequencies -> code -> tables, and back        unit      encodes and decodes the sections of a unit
//! oracle  the slow reference                             model     converts a model to a DFloat11 directory
//!                                                        restore   converts a DFloat11 directory to a BF16 model
//! ```

mod code;
mod config;
mod error;
mod model;
pub mod oracle;
mod restore;
mod tensors;
mod unit;

pub use code::{Code, Codeword};
pub use error::{ConvertError, NotEncodable, UnitError};
pub use model::{ConvertOptions, ConvertReport, Kept, convert};
pub use restore::{RestoreReport, is_model, restore};
pub use unit::{Decoder, Encoder, Sections, Sizes, Unit};

/// Bytes of codes that one thread of the kernel decodes.
pub const WINDOW_BYTES: usize = 8;
/// Threads per block of the current package; the paper has 256.
pub const THREADS: usize = 512;
/// The maximum number of threads per block.
pub const THREADS_MAX: usize = 1024;
/// Table entries from this value on are jumps, not exponents.
pub const FIRST_JUMP: u8 = 240;
/// The longest code, in bits: a thread holds this many bits beyond its window.
pub const CODE_BITS_MAX: u8 = 32;
/// The maximum number of elements of a unit, and of bytes of its codes: the kernel counts in 31 bits.
pub const COUNT_MAX: u64 = i32::MAX as u64;
