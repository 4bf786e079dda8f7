//! The Unweight format: bytes in, fewer bytes out, the same bytes back.
//!
//! This crate owns the stored form of one tensor (`docs/format.md`, part A) and of a model (part B). It knows
//! nothing of CUDA, kernels or launch geometry.
//!
//! ```text
//! bits      bytes, tiles, histograms, digests
//!   ^
//! form      raw, huffman, palette, packed, compact, exponents: one file each, one list; oracle judges them
//!   ^
//! model     safetensors, names to roles, a form per tensor
//!   ^
//! bundle    compress, decompress, verify, read            testing (feature)  random weights, a demo model
//! ```
//!
//! ```
//! use unweight_format::{CodeLimit, Matrix, huffman};
//! let bf16: Vec<u8> = (0..128 * 64u32).flat_map(|i| (0x3c00 + (i * 37 % 512) as u16).to_le_bytes()).collect();
//! let matrix = Matrix::new(&bf16, 128, 64)?;
//! let tensor = huffman::encode(matrix, CodeLimit::DEFAULT)?;
//! assert!(tensor.coded_bytes() < bf16.len() as u64);
//! assert_eq!(huffman::decode(&tensor)?, bf16);
//! # Ok::<(), unweight_format::CodecError>(())
//! ```

mod bits;
pub mod bundle;
pub mod error;
mod failpoint;
pub mod form;
mod model;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use bits::{bf16, bitstream, digest, float, histogram, keep_freed_memory, layout, named, tile};
pub use bundle::plan;
pub use compact::CompactTensor;
pub use digest::Digest;
pub use error::CodecError;
pub use exponents::ExponentsTensor;
#[cfg(feature = "failpoints")]
pub use failpoint::{FAILPOINTS, FAULTS};
pub use float::Float;
pub use form::{FormId, Section, StoredTensor, Survey, compact, exponents, huffman, oracle, packed, palette};
pub use histogram::Histogram;
pub use huffman::{Code, CodeLimit, HuffmanTensor};
pub use model::{glob, roles, safetensors};
pub use packed::PackedTensor;
pub use palette::{Palette, PaletteTensor};
pub use tile::{FloatMatrix, Matrix, TileGrid, TileMetadata};
