//! Formats of other systems that store weights losslessly: read, written, and compared with Unweight's own.
//!
//! ```text
//! dfloat11    BF16: Huffman-coded exponents, byte-wise tables, a gap a thread   LeanModels/DFloat11, arXiv 2504.11651
//! zipserv     BF16: seven exponents in three bitmaps, the rest as it is         HPMLL/ZipServ_ASPLOS26
//! matvans     int8: rANS, one or four elements a symbol, 32 coders a stream     wildug/MatVANS
//! tans        FP8: pairs of exponents by tANS, many short streams               doublewordai/tans-vectoradd
//! ```
//! Each has an encoder whose bytes are those of the system's own program, a decoder that trusts no byte, and an oracle
//! that is slow and obvious. What a format cannot hold is refused by name. `docs/rivals.md` compares them.

#[cfg(feature = "gpu")]
pub mod cuda;
pub mod dfloat11;
pub mod matvans;
pub mod tans;
pub mod zipserv;
