//! Lossless weight formats of other systems: encoders and decoders, compared with Unweight's own.
//!
//! ```text
//! dfloat11  BF16: Huffman-coded exponents, byte-wise tables, gap per thread    LeanModels/DFloat11, arXiv 2504.11651
//! zipserv   BF16: seven exponents in three bitmaps, the rest uncoded           HPMLL/ZipServ_ASPLOS26
//! matvans   int8: rANS, one or four elements per symbol, 32 coders per stream  wildug/MatVANS
//! tans      FP8: pairs of exponents with tANS, many short streams              doublewordai/tans-vectoradd
//! ```
//! Each format has an encoder with the same output as the system's own program, a decoder that validates every byte,
//! and a slow, obvious oracle. Weights that a format cannot hold are an error. `docs/rivals.md` compares the formats.

#[cfg(feature = "gpu")]
pub mod cuda;
pub mod dfloat11;
pub mod matvans;
pub mod tans;
pub mod zipserv;
