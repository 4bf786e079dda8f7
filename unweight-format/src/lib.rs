//! The Unweight format: lossless compression of BF16, F16, F32 and FP8 weights, of one tensor and of a model.
//!
//! `docs/format.md` specifies it: part A one tensor, part B a *bundle*. A bundle is a model directory, a third smaller
//! than the model, that standard safetensors tools can open. This crate contains no CUDA code, kernels or launch
//! geometry.
//!
//! ```text
//! bits      bytes, tiles, histograms, digests
//!   ^
//! encoding      raw, huffman, palette, packed, compact, exponents, rans: a module each, one list; an oracle
//!   ^
//! model     safetensors, names to roles
//!   ^
//! bundle    plan, compress, decompress, verify, read      raw                unstable internals, for other crates
//!                                                         testing (feature)  random weights, a demo model
//! ```
//!
//! One tensor:
//! ```
//! use unweight_format::{CodeLimit, EncodingId, Float, Matrix, StoredTensor, Survey};
//! let bf16: Vec<u8> = (0..128 * 64u32).flat_map(|i| (0x3c00 + (i * 37 % 512) as u16).to_le_bytes()).collect();
//! let matrix = Matrix::new(&bf16, 128, 64)?;
//! let survey = Survey::of(Float::Bf16, &bf16);
//! let stored = StoredTensor::encode(EncodingId::HUFFMAN, matrix.into(), &survey, CodeLimit::DEFAULT)?;
//! assert!(stored.stored_bytes() < bf16.len() as u64);
//! let mut back = vec![0; bf16.len()];
//! stored.decode(&mut back)?;
//! assert_eq!(back, bf16);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! A model: [`bundle::compress`], [`bundle::Bundle`].

mod bits;
pub mod bundle;
mod encoding;
mod failpoint;
mod model;
mod placement;
pub mod raw;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub(crate) use bits::{bf16, digest, histogram, layout, named, parallel};
pub use bits::{
    digest::Digest,
    error::CodecError,
    float::Float,
    histogram::Histogram,
    named::UnknownName,
    tile::{FloatMatrix, Matrix, TileGrid},
};
pub use encoding::{ENCODINGS, Encoding, EncodingId, NotEncodable, Sample, StoredTensor, Survey, code::CodeLimit};
pub(crate) use encoding::{compact, huffman, packed, palette, rans};
pub(crate) use model::{glob, roles};
pub use model::{roles::Role, safetensors};
pub use placement::Placement;
pub(crate) use raw::{
    Code, CompactTensor, ExponentsTensor, HuffmanTensor, PackedTensor, PaletteTensor, RansTensor, Section,
    TileMetadata, bitstream,
};
