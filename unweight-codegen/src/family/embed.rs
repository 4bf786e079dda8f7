//! Looks up rows of an embedding: `templates/include/unweight/kernels/embed.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::{Instruction, Instructions},
};

word_axis! {
    /// The encoding of the table of an embedding.
    EmbedSource, "source" {
        /// BF16, row-major.
        Bf16 = "bf16",
        /// Packed (docs/format.md A.9).
        Packed = "packed",
    }
}

axes! {
    /// A lookup of rows, one block per row.
    pub struct EmbedSpec {
        /// The encoding of the table.
        source: EmbedSource "",
        /// Programmatic dependent launch: its blocks start before the stream's previous kernel has ended.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of a lookup of rows.
    pub struct EmbedArgs {
        /// u32 `[m]`.
        pub ids: u64,
        /// bf16 `[vocabulary, d]`; `source = bf16` only.
        pub table: u64,
        /// u8 `[tiles, 6144]`; `source = packed` only, as are the next two.
        pub packed: u64,
        /// u32 `[tiles, 4]`.
        pub escape_heads: u64,
        /// u32 `[escape_words]`.
        pub escapes: u64,
        /// bf16 `[m, d]`.
        pub y: u64,
        /// u32, set to `1 + row` if the id of that row of `y` is not a row of the table.
        pub fault: u64,
        /// Elements from one row of `table` to the next.
        pub table_pitch: u64,
        /// Elements from one row of `y` to the next.
        pub y_pitch: u64,
        /// Rows of the table.
        pub vocabulary: u32,
        /// Columns, a multiple of 8.
        pub d: u32,
        /// Tiles in a row of a packed table.
        pub tile_cols: u32,
        /// Words in `escapes`.
        pub escape_words: u32,
        /// Lowest exponent of the window of a packed table.
        pub base: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// Returns a kernel that looks up rows of an embedding.
    pub const fn embed(arch: Arch, spec: EmbedSpec) -> Self {
        Self { arch, op: Op::Embed(spec) }
    }
}

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 2;

impl EmbedSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let grid = LaunchGrid::Covering { work: Work::Rows, per_block: 1 };
        let threads = WARPS * arch.limits().warp_threads;
        Ok(BlockPlan {
            smem: SmemPlan::new(),
            pipeline: None,
            roles: RolePlan::one("look up", WARPS),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(threads, BLOCKS_PER_SM, grid) },
        })
    }
}

impl Family for EmbedSpec {
    type Args = EmbedArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let table = match self.source {
            EmbedSource::Bf16 => "bf16",
            EmbedSource::Packed => "packed to 12 bits",
        };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        format!("Y[m,d] = rows ids[m] of a table, {table}{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().packed_layout()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        EmbedSource::ALL.iter().flat_map(move |&source| {
            [false, true].map(move |pdl| VariantSpec::embed(arch, EmbedSpec { source, pdl }))
        })
    }
}
