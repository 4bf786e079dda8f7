//! The Unweight format: bytes in, fewer bytes out, the same bytes back.
//!
//! This crate owns the stored form of one tensor (`docs/format.md`, part A) and of a model (part B). It knows
//! nothing of CUDA, kernels or launch geometry.
//!
//! ```text
//! BF16 [n, k] --survey--> histogram, digest --Palette/Code--> encode --> HuffmanTensor | PaletteTensor
//!                                                               ^                 |
//!                                                               '---- decode <----'
//!                          \--Window--> pack --> PackedTensor --> decode
//! ```
//! Beside every fast path stands [`oracle`]: slow, obvious, and the judge of both.
//!
//! ```
//! use unweight_format::{CodeLimit, Matrix, decode, encode};
//! let bf16: Vec<u8> = (0..128 * 64u32).flat_map(|i| (0x3c00 + (i * 37 % 512) as u16).to_le_bytes()).collect();
//! let matrix = Matrix::new(&bf16, 128, 64)?;
//! let tensor = encode::huffman(matrix, CodeLimit::DEFAULT)?;
//! assert!(tensor.coded_bytes() < bf16.len() as u64);
//! assert_eq!(decode::to_vec(&tensor)?, bf16);
//! # Ok::<(), unweight_format::CodecError>(())
//! ```

pub mod bf16;
pub mod bitstream;
mod buffer;
pub mod bundle;
pub mod decode;
pub mod demo_model;
pub mod digest;
pub mod encode;
pub mod error;
pub mod histogram;
pub mod huffman;
pub mod layout;
pub mod manifest;
pub mod oracle;
pub mod packed;
pub mod palette;
pub mod plan;
pub mod roles;
pub mod safetensors;
pub mod tensor;
pub mod tile;

pub use buffer::keep_freed_memory;
pub use digest::Digest;
pub use error::CodecError;
pub use histogram::Histogram;
pub use huffman::{Code, CodeLimit};
pub use packed::PackedTensor;
pub use palette::Palette;
pub use tensor::{CompressedTensor, HuffmanTensor, PaletteTensor, Section};
pub use tile::{Grid, Matrix, TileMetadata};
