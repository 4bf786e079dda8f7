//! Unstable internals of the encodings, for kernels, loaders and converters of other formats. Any release may change
//! them.
//!
//! - One module per encoding with what its kernels need: windows, codes, tables, and a typed view of a stored tensor.
//! - [`Section`]: the parts that an encoding stores, each with a name, a type and a shape.
//! - [`oracle`]: slow encoders and decoders, written directly from the specification, to test the fast ones against.
//! - [`layout`]: the constants of `docs/format.md`.
//! - [`Input`], [`OutputDir`]: reading a source that must not change, and writing a directory that appears only when it
//!   is
//!   complete. [`discard_partial`] removes what a failed run left.
//! - [`RawReason`]: why a tensor is raw, as a type. [`encoding_totals`]: sums by encoding, for reports.
//! - [`Trace`], [`StageTime`]: where the time of a run goes.
//! - [`CARD_NAME`], [`CARD_SOURCE_NAME`]: the model cards of a bundle and of its source.

#[cfg(feature = "failpoints")]
pub use crate::failpoint::{FAILPOINTS, FAULTS};
pub use crate::{
    bits::{
        bf16, bitstream,
        digest::{Digester, LEAF_BYTES},
        keep_freed_memory, layout, return_freed_memory,
        tile::TileMetadata,
        zeroed,
    },
    bundle::{
        files::Input,
        names::{CARD_NAME, CARD_SOURCE_NAME},
        output::{OutputDir, OutputFile, walk},
        plan::RawReason,
        report::encoding_totals,
        stage::discard_partial,
        trace::{StageTime, Trace},
    },
    encoding::{
        Section, Sections,
        compact::{self, CompactTensor},
        exponents::{self, ExponentsTensor},
        huffman::{self, Code, HuffmanTensor},
        oracle,
        packed::{self, PackedTensor},
        palette::{self, Palette, PaletteTensor},
        rans::{self, RansTensor},
    },
    model::{glob, roles},
};
