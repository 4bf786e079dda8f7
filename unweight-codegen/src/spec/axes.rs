//! The axes of a variant: each a small type that holds legal values only.
//!
//! A number outside an axis is an [`AxisError`]; whether a *combination* of legal values can exist is the plan's question
//! ([`crate::plan::Plan::new`]).

use crate::text::Message;
use std::fmt;

/// A value that its axis does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisError {
    /// The axis as the macro and the messages call it.
    pub axis: &'static str,
    /// What was asked for.
    pub value: u32,
    /// The values that exist, in words.
    pub allowed: &'static str,
}

impl AxisError {
    /// The message of [`fmt::Display`], also in const context.
    pub const fn message(&self) -> Message {
        Message::new().str(self.axis).str(" = ").num(self.value).str(" is not supported; it must be ").str(self.allowed)
    }
}

impl fmt::Display for AxisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message())
    }
}

impl std::error::Error for AxisError {}

/// A newtype over a range of integers.
macro_rules! range_axis {
    ($(#[$doc:meta])* $name:ident, $axis:literal, $min:literal..=$max:literal, $allowed:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u8);

        impl $name {
            /// The smallest value.
            pub const MIN: Self = Self($min);
            /// The largest value.
            pub const MAX: Self = Self($max);

            /// The value, if the axis has it.
            pub const fn new(value: u32) -> Result<Self, AxisError> {
                if value >= $min && value <= $max {
                    Ok(Self(value as u8))
                } else {
                    Err(AxisError { axis: $axis, value, allowed: $allowed })
                }
            }

            /// The value as a number.
            pub const fn get(self) -> u32 {
                self.0 as u32
            }

            /// All values, ascending.
            pub fn all() -> impl DoubleEndedIterator<Item = Self> + Clone {
                ($min..=$max).map(Self)
            }
        }
    };
}

/// A newtype over a short list of integers.
macro_rules! set_axis {
    ($(#[$doc:meta])* $name:ident, $axis:literal, [$($value:literal),+], $allowed:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u16);

        impl $name {
            /// The values that exist, ascending.
            pub const ALL: [Self; [$($value),+].len()] = [$(Self($value)),+];

            /// The value, if the axis has it.
            pub const fn new(value: u32) -> Result<Self, AxisError> {
                match value {
                    $($value => Ok(Self($value)),)+
                    _ => Err(AxisError { axis: $axis, value, allowed: $allowed }),
                }
            }

            /// The smallest value that is not below `least`; `None` beyond the largest.
            pub fn at_least(least: u32) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.get() >= least)
            }

            /// The value as a number.
            pub const fn get(self) -> u32 {
                self.0 as u32
            }
        }
    };
}

/// An enum whose values have tags in names.
macro_rules! tag_axis {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $tag:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$value_doc])* $value),+ }

        impl $name {
            /// All values, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$value),+];

            /// The value as canonical names spell it.
            pub const fn tag(self) -> &'static str {
                match self { $(Self::$value => $tag),+ }
            }

            /// The value that canonical names spell so.
            pub fn from_tag(tag: &str) -> Option<Self> {
                match tag { $($tag => Some(Self::$value),)+ _ => None }
            }
        }
    };
}

tag_axis! {
    /// The architecture that a variant is compiled for.
    Arch {
        /// NVIDIA Hopper (H100, H200) with its architecture-specific instructions (WGMMA, `setmaxnreg`).
        Sm90a = "sm90a",
    }
}

impl Arch {
    /// The name that NVRTC's `--gpu-architecture` takes.
    pub const fn compiler_name(self) -> &'static str {
        match self {
            Self::Sm90a => "sm_90a",
        }
    }
}

tag_axis! {
    /// What a decoder of the preprocess family writes (report section 7).
    DecodeOutput {
        /// bf16 `[n, k]`, row-major: the weights themselves.
        Full = "full",
        /// u8 `[tiles, 64, 64]`: one exponent byte per element.
        Exponent = "exponent",
        /// u8 `[tiles, 64, 32]`: packed 4-bit palette indices.
        Palette = "palette",
    }
}

tag_axis! {
    /// A stage of the encoder (report section 4).
    EncodeStage {
        /// Splits the elements and counts exponents.
        Stats = "stats",
        /// Chooses the palette and the code.
        Table = "table",
        /// Expands the code to the flat decode table.
        DecodeTable = "decode_table",
        /// Row lengths, verbatim rows and tile sizes.
        Rows = "rows",
        /// Tile sizes to offsets.
        Scan = "scan",
        /// Writes the bitstream and the verbatim rows.
        Write = "write",
        /// Writes packed palette indices instead of a bitstream.
        Palette = "palette",
    }
}

tag_axis! {
    /// A step of the conversions between BF16 and the packed form (docs/format.md A.9).
    RepackStage {
        /// BF16 to packed tiles and escape heads, and the words that the lists need.
        Pack = "pack",
        /// Writes the lists of row blocks with more than one escape.
        Lists = "lists",
        /// Packed form to BF16.
        Unpack = "unpack",
    }
}

tag_axis! {
    /// What happens to the product (report section 8.2, finish stage).
    Epilogue {
        /// `Y = X W^T`.
        Store = "store",
        /// `Y = Y + X W^T`, added in fp32 and rounded once.
        StoreAdd = "store_add",
        /// `Y = silu(G) * U`, where 16 columns of the product that are G's and the 16 of U that go with them take turns: half as many
        /// output features. Of op `gemm_mma` only.
        SiluMul = "silu_mul",
    }
}

range_axis! {
    /// The longest code, in bits, that a decoder accepts: it sizes the decode table.
    CodeLimit, "code_limit", 6..=15, "6..=15 (bits)"
}

range_axis! {
    /// 64-row tiles of `W` that one CTA multiplies at a time: columns of `Y` in units of 64, and `n` of the WGMMA instruction.
    NTiles, "n", 1..=4, "1..=4 (tiles of 64 output features; wgmma has n <= 256)"
}

range_axis! {
    /// Stages of the shared-memory ring between producer and consumers.
    Stages, "stages", 2..=8, "2..=8 (one stage cannot overlap loads with work; 8 fill the shared memory at n = 1)"
}

set_axis! {
    /// The most verbatim rows of a tile for which a palette variant has room (report: `MAX_VERBATIM_ROWS`).
    ///
    /// A tensor needs the smallest budget that is not below its largest count of verbatim rows in a tile.
    VerbatimRows, "verbatim", [0, 4, 8, 16, 32, 64], "0, 4, 8, 16, 32 or 64 (rows per tile)"
}

set_axis! {
    /// Batch rows that a `gemm_mma` variant multiplies at a time: `n` of `mma.m16n8k16`, eight rows a fragment.
    SmallBatchTile, "batch_tile", [8, 16, 32, 64], "8, 16, 32 or 64 (batch rows of op gemm_mma)"
}

set_axis! {
    /// Batch rows of a `gemm_wgmma` variant's tile of Y: `n` of WGMMA, whose widths are those of `ptx/wgmma.cuh`.
    WideBatchTile, "batch_tile", [32, 64, 128, 192, 256], "32, 64, 128, 192 or 256 (batch rows of op gemm_wgmma)"
}

set_axis! {
    /// Blocks that share the k of one output tile and add their sums through distributed shared memory; 1 for none.
    ClusterSize, "cluster", [1, 2, 4, 8], "1, 2, 4 or 8 (blocks; 8 is what every device of the architecture runs)"
}

range_axis! {
    /// 16-row blocks of W that one task of a `gemm_mma` variant multiplies.
    RowBlocks, "row_blocks", 1..=8, "1..=8 (blocks of 16 output features, whose sums one warp keeps)"
}

range_axis! {
    /// Warps of a `gemm_mma` block; each has a ring of its own.
    Warps, "warps", 1..=32, "1..=32 (a block has at most 1024 threads)"
}

range_axis! {
    /// Warpgroups of a `gemm_wgmma` block that multiply, 64 output features each.
    Warpgroups, "warpgroups", 1..=3, "1..=3 (of 64 output features; a fourth loads)"
}

range_axis! {
    /// Stages of each warp's ring in a `gemm_mma` block. One can do: other warps' rings load while one is worked on.
    SmallStages, "stages", 1..=16, "1..=16 (stages of op gemm_mma)"
}

range_axis! {
    /// Stages of the ring of a `gemm_wgmma` block.
    WideStages, "stages", 3..=16, "3..=16 (stages of op gemm_wgmma: one step multiplies, one is decoded, one is read)"
}

/// Where a matmul takes the exponents from (report section 8.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightSource {
    /// Decoded exponents, u8 `[tiles, 64, 64]`.
    Exponent,
    /// Packed palette indices, u8 `[tiles, 64, 32]`, with verbatim rows beside them.
    Palette {
        /// Rows for which each stage has room.
        verbatim: VerbatimRows,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_outside_an_axis_are_refused_in_words() {
        assert_eq!(
            CodeLimit::new(16).unwrap_err().to_string(),
            "code_limit = 16 is not supported; it must be 6..=15 (bits)"
        );
        assert!(NTiles::new(0).is_err() && NTiles::new(5).is_err() && NTiles::new(u32::MAX).is_err());
        assert!(Stages::new(1).is_err() && Stages::new(9).is_err());
        assert!(VerbatimRows::new(7).is_err() && VerbatimRows::new(64).is_ok());
        assert_eq!(
            WideBatchTile::new(8).unwrap_err().to_string(),
            "batch_tile = 8 is not supported; it must be 32, 64, 128, 192 or 256 (batch rows of op gemm_wgmma)"
        );
        for value in 0..300 {
            assert_eq!(WideBatchTile::new(value).is_ok(), WideBatchTile::ALL.iter().any(|tile| tile.get() == value));
        }
    }

    #[test]
    fn budgets_are_rounded_up() {
        for rows in 0..=64 {
            let budget = VerbatimRows::at_least(rows).unwrap();
            assert!(budget.get() >= rows && VerbatimRows::ALL.iter().all(|b| b.get() < rows || *b >= budget));
        }
        assert_eq!(VerbatimRows::at_least(65), None);
        assert_eq!(SmallBatchTile::at_least(9).map(SmallBatchTile::get), Some(16));
    }

    #[test]
    fn tags_come_back() {
        for stage in EncodeStage::ALL {
            assert_eq!(EncodeStage::from_tag(stage.tag()), Some(*stage));
        }
        assert_eq!(EncodeStage::from_tag("Stats"), None);
    }
}
