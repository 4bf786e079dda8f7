//! Formats of other systems that store weights losslessly: read, written and judged beside Unweight's own.
//!
//! ```text
//! dfloat11    Huffman-coded exponents, byte-wise tables, a gap a thread        LeanModels/DFloat11, arXiv 2504.11651
//! ```
//! Each has an encoder whose bytes are those of the system's own program, a decoder that trusts no byte, and an oracle
//! that is slow and obvious. What a format cannot hold is refused by name. `docs/rivals.md` compares them.

pub mod dfloat11;
