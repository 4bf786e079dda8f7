//! DFloat11 0.5: a third less of BF16 by a Huffman code of the exponents (`docs/rivals.md`).
//!
//! A unit is a module of the model whose weights lie end to end: a decoder layer, the embedding, the head. Its
//! sections:
//! ```text
//! luts              U8 [rows + 1, 256]     a row a prefix of whole bytes; the last one: lengths of exponents' codes
//! encoded_exponent  U8 [bytes]             codes, most significant bit first; the end of a code without symbol fills
//!                                          the last byte
//! sign_mantissa     U8 [elements]          sign << 7 | mantissa
//! output_positions  U8 [4 * (blocks + 1)]  u32, little-endian: the first element of each block, then their number
//! gaps              U8 [5 bits a window]   where the first code of a window of 8 bytes begins, highest bit first
//! split_positions   I64 [weights - 1]      where each weight but the first begins
//! ```
//! A window is what one thread of the kernel decodes, a block what `threads` of them do. An entry of a row is the
//! exponent whose code the bits begin with, or 256 - i: continue in row i with the next byte. So exponents from 240 on
//! have no place.
//!
//! ```text
//! code    frequencies -> code -> tables, and back        unit   a unit's sections, encoded and decoded
//! oracle  the same, slow and obvious                     model  directories: restored, made
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

/// Bytes of the codes that one thread of the kernel decodes.
pub const WINDOW_BYTES: usize = 8;
/// Threads a block of the package that makes them now; the paper has 256.
pub const THREADS: usize = 512;
/// Most threads of a block.
pub const THREADS_MAX: usize = 1024;
/// From here on an entry of a row is a jump, so no exponent.
pub const FIRST_JUMP: u8 = 240;
/// Longest code, bits: a thread holds that many beyond its window.
pub const CODE_BITS_MAX: u8 = 32;
/// Most elements of a unit, and bytes of its codes: the kernel counts in 31 bits.
pub const COUNT_MAX: u64 = i32::MAX as u64;
