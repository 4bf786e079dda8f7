//! Between BF16 and the packed form (docs/format.md A.9): `templates/include/unweight/kernels/repack.cuh`.

use super::{Edge, Entry, Family, Instructions};
use crate::{
    abi::args,
    plan::{Infeasible, LaunchGrid, LaunchPlan, Plan, RolePlan, SmemPlan, Work},
    spec::{Arch, VariantSpec, axes, word_axis},
};
use unweight_format::EncodingId;

word_axis! {
    /// A step of the conversions between BF16 and the packed form (docs/format.md A.9).
    RepackStage, "stage" {
        /// BF16 to packed tiles and escape heads, and the words that the lists need.
        Pack = "pack",
        /// Writes the lists of row blocks with more than one escape.
        Lists = "lists",
        /// Packed form to BF16.
        Unpack = "unpack",
    }
}

axes! {
    /// One kernel of the conversions between BF16 and the packed form.
    pub struct RepackSpec {
        /// Which one.
        stage: RepackStage "",
    }
}

args! {
    /// Arguments of the conversions of the packed form: all stages share one struct.
    pub struct RepackArgs {
        /// bf16 `[n, k]`: read by `pack` and `lists`, written by `unpack`.
        pub weights: u64,
        /// u8 `[tiles, 6144]`.
        pub packed: u64,
        /// u32 `[tiles, 4]`.
        pub escape_heads: u64,
        /// u32 `[escape_words]`; unused by `pack`.
        pub escapes: u64,
        /// u32 `[ceil(tiles / 16)]`, zeroed before `pack`: words of the lists of 64 row blocks each.
        pub group_words: u64,
        /// u64, zeroed before `pack`: `!(row * k + column)` of the first element that no operand can stand for, 0 if
        /// there is none.
        pub inexact: u64,
        /// Words in `escapes`.
        pub escape_words: u32,
        /// Lowest exponent of the window, 1..=239.
        pub base: u32,
        /// Output features, a multiple of 64.
        pub n: u32,
        /// Input features, a multiple of 64.
        pub k: u32,
        /// `n / 64`.
        pub tile_rows: u32,
        /// `k / 64`.
        pub tile_cols: u32,
    }
}

impl VariantSpec {
    /// A step of the conversions to and from the packed form.
    pub const fn repack(arch: Arch, stage: RepackStage) -> Self {
        Self { arch, op: super::Op::Repack(RepackSpec { stage }) }
    }
}

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;
/// A warp takes a row block, a quarter of a tile.
const TILES_PER_BLOCK: u32 = 2;
/// Eight row blocks a warp.
const LIST_TILES_PER_BLOCK: u32 = 16;

impl RepackSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
    }

    pub(crate) const fn plan(&self, spec: &VariantSpec) -> Result<Plan, Infeasible> {
        let op = self;
        let work = Work::WeightTiles;
        let none = SmemPlan::new();
        let (smem, grid) = match op.stage {
            RepackStage::Pack | RepackStage::Unpack => (none, LaunchGrid::Covering { work, per_block: TILES_PER_BLOCK }),
            // Per warp its own words and those of the groups before.
            RepackStage::Lists => {
                (none.section("sums", WARPS, 8, 8), LaunchGrid::Covering { work, per_block: LIST_TILES_PER_BLOCK })
            }
        };
        Ok(Plan {
            spec: *spec,
            smem,
            pipeline: None,
            roles: RolePlan::one("convert", WARPS),
            launch: LaunchPlan::ordinary(WARPS * spec.arch.limits().warp_threads, BLOCKS_PER_SM, grid),
        })
    }
}

impl Family for RepackSpec {
    type Args = RepackArgs;
    const AXES: &'static [crate::spec::Axis] = Self::AXES;
    const EDGES: &'static [Edge] =
        &[Edge { from: EncodingId::RAW, to: EncodingId::PACKED }, Edge { from: EncodingId::PACKED, to: EncodingId::RAW }];

    fn edges(&self) -> &'static [Edge] {
        match self.stage {
            RepackStage::Pack | RepackStage::Lists => &Self::EDGES[..1],
            RepackStage::Unpack => &Self::EDGES[1..],
        }
    }

    fn summary(&self, _: &Plan) -> String {
        let summary = match self.stage {
            RepackStage::Pack => "bf16 [n, k] -> packed tiles, escape heads and sizes of the lists.",
            RepackStage::Lists => "bf16 [n, k] and sizes of the lists -> lists of escapes and their places.",
            RepackStage::Unpack => "Packed tiles and escapes -> bf16 [n, k], row-major.",
        };
        summary.to_owned()
    }

    fn entry(&self, _: &Plan) -> Entry {
        Entry::new().packed_layout()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        RepackStage::ALL.iter().map(move |stage| VariantSpec::repack(arch, *stage))
    }
}
