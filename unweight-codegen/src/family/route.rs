//! Routing of a mixture of experts: `templates/include/unweight/kernels/route.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::{Instruction, Instructions},
};

word_axis! {
    /// A stage of routing.
    RouteStage, "stage" {
        /// Computes ids and weights of each token's experts from the logits of a router.
        Topk = "topk",
        /// Sorts pairs by expert, and writes the items of the products.
        Sort = "sort",
        /// Adds up the rows of each token's pairs, multiplied by their weights.
        Combine = "combine",
        /// As `topk`, for routers that score by sigmoids and choose by scores with a correction bias.
        TopkSigmoid = "topk_sigmoid",
        /// As `topk`, for routers that choose experts one after the other, each with its share of the near ones.
        TopkSparseMixer = "topk_sparse_mixer",
    }
}

axes! {
    /// A kernel of the routing of a mixture of experts.
    pub struct RouteSpec {
        /// The stage of routing.
        stage: RouteStage "",
        /// Programmatic dependent launch: its blocks start before the stream's previous kernel has ended.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of routing: all stages share one struct. A pair is a token and one of its `top_k` experts: pair
    /// `token * top_k + i`. For `topk`, and below for its variants, too, `experts` and `top_k` are without shared
    /// experts, whose places follow.
    pub struct RouteArgs {
        /// bf16 `[tokens, experts]`, followed by the logit of the gate if `gated`; read by `topk`.
        pub logits: u64,
        /// u32 `[tokens, top_k]`: written by `topk`, otherwise read. An id that is not below `experts` is skipped.
        pub ids: u64,
        /// f32 `[tokens, top_k]`: written by `topk`, read by `combine`.
        pub weights: u64,
        /// u32 `[tokens * top_k]`: written by `sort`.
        pub pairs: u64,
        /// u32 `[items_max, 4]`: written by `sort`, in the layout of
        /// [`GemmGroupedArgs`](super::gemm_grouped::GemmGroupedArgs).
        pub items: u64,
        /// bf16 `[tokens * top_k, columns]`; read by `combine`. For `topk_sigmoid`: the correction bias, f32
        /// `[experts]`.
        pub products: u64,
        /// bf16 `[tokens, columns]`; written by `combine`.
        pub y: u64,
        /// Elements from one row of `logits` to the next.
        pub logits_pitch: u64,
        /// Elements from one row of `y` to the next.
        pub y_pitch: u64,
        /// The number of tokens.
        pub tokens: u32,
        /// The number of experts, 1 to [`RouteSpec::EXPERTS_MAX`].
        pub experts: u32,
        /// 1..=[`RouteSpec::TOP_K_MAX`]; for `topk` at most `experts`.
        pub top_k: u32,
        /// Maximum number of entries of an item: the batch tile of the products.
        pub item_rows: u32,
        /// Items that `sort` writes, including those without entries.
        pub items_max: u32,
        /// Columns of `y`, a multiple of 8.
        pub columns: u32,
        /// Blocks per row of `combine`.
        pub row_blocks: u32,
        /// `topk`: 1 to divide the weights of a token by their sum.
        pub normalized: u32,
        /// `topk`: 1 to round weights to bf16.
        pub rounded: u32,
        /// `combine`: 1 to add to `y`.
        pub adds: u32,
        /// `topk`: the number of experts that every token has in addition, with ids from `experts` on. `top_k + shared`
        /// is at most [`RouteSpec::TOP_K_MAX`].
        pub shared: u32,
        /// `topk`: 1 if their weight is the sigmoid of a logit; otherwise it is 1.
        pub gated: u32,
        /// `topk`: the factor of all weights, after rounding.
        pub scale: f32,
        /// `topk_sigmoid`: the factor of the weights of chosen experts. `topk_sparse_mixer`: the cutoff, the relative
        /// distance between logits from which on one is far from the other.
        pub routed_scale: f32,
    }
}

impl VariantSpec {
    /// Returns a variant of the family `route`.
    pub const fn route(arch: Arch, spec: RouteSpec) -> Self {
        Self { arch, op: Op::Route(spec) }
    }
}

const TOPK_WARPS: u32 = 8;
const SORT_WARPS: u32 = 32;
const COMBINE_WARPS: u32 = 4;
/// Columns per thread of `combine`: 16 bytes.
const CHUNK: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;

/// With 64 registers per thread, NVRTC 13.0.88 spills `topk` and `topk_sparse_mixer`.
const TOPK_BLOCKS_PER_SM: u32 = 3;

impl RouteSpec {
    /// The maximum number of experts.
    pub const EXPERTS_MAX: u32 = 512;
    /// The maximum number of experts of a token.
    pub const TOP_K_MAX: u32 = 32;
    /// Columns of a block of `combine`.
    pub const BLOCK_COLUMNS: u32 = COMBINE_WARPS * 32 * CHUNK;

    /// Returns the maximum number of items, of at most `rows` entries each, that `pairs` pairs form, whatever their
    /// experts.
    ///
    /// ```
    /// # use unweight_codegen::spec::RouteSpec;
    /// assert_eq!(RouteSpec::items_max(8, 128, 8), 8, "each pair may have an expert of its own");
    /// assert_eq!(RouteSpec::items_max(64 * 8, 128, 8), 128 + (512 - 128) / 8);
    /// assert_eq!(RouteSpec::items_max(17, 1, 8), 3);
    /// ```
    pub const fn items_max(pairs: u32, experts: u32, rows: u32) -> u32 {
        // An expert with c entries has at most 1 + (c - 1) / rows items.
        let used = if pairs < experts { pairs } else { experts };
        used + (pairs - used) / rows
    }

    const fn warps(&self) -> u32 {
        match self.stage {
            RouteStage::Topk | RouteStage::TopkSigmoid | RouteStage::TopkSparseMixer => TOPK_WARPS,
            RouteStage::Sort => SORT_WARPS,
            RouteStage::Combine => COMBINE_WARPS,
        }
    }

    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let none = SmemPlan::new();
        let (smem, grid, blocks_per_sm) = match self.stage {
            RouteStage::Topk | RouteStage::TopkSigmoid | RouteStage::TopkSparseMixer => {
                let grid = LaunchGrid::Covering { work: Work::Rows, per_block: TOPK_WARPS };
                (none, grid, TOPK_BLOCKS_PER_SM)
            }
            RouteStage::Sort => {
                let smem = none
                    .section("counts", SORT_WARPS, Self::EXPERTS_MAX * 4, 4)
                    .section("firsts", Self::EXPERTS_MAX, 4, 4)
                    .section("warp_sums", SORT_WARPS, 8, 8);
                (smem, LaunchGrid::Fixed(1), 1)
            }
            RouteStage::Combine => {
                let work = Work::OutputTiles { rows: 1, columns: Self::BLOCK_COLUMNS };
                (none, LaunchGrid::Covering { work, per_block: 1 }, BLOCKS_PER_SM)
            }
        };
        let threads = self.warps() * arch.limits().warp_threads;
        Ok(BlockPlan {
            smem,
            pipeline: None,
            roles: RolePlan::one("route", self.warps()),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(threads, blocks_per_sm, grid) },
        })
    }
}

impl Family for RouteSpec {
    type Args = RouteArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        let summary = match self.stage {
            RouteStage::Topk => "logits[m,experts] -> ids and weights of each token's experts",
            RouteStage::TopkSigmoid => "logits[m,experts] -> ids and weights of each token's experts by sigmoids",
            RouteStage::TopkSparseMixer => "logits[m,experts] -> ids and weights of experts chosen one by one",
            RouteStage::Sort => "ids -> pairs sorted by expert, and items of the products",
            RouteStage::Combine => "Y[m,n] = sum of weight * row over a token's pairs",
        };
        format!("{summary}{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new()
            .check("experts", "uw::route::kExpertsMax", Self::EXPERTS_MAX)
            .check("experts of a token", "uw::route::kTopKMax", Self::TOP_K_MAX)
            .check("columns", "uw::route::kCombineThreads * uw::route::kChunk", Self::BLOCK_COLUMNS)
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        RouteStage::ALL.iter().flat_map(move |stage| {
            [false, true].map(move |pdl| VariantSpec::route(arch, RouteSpec { stage: *stage, pdl }))
        })
    }
}
