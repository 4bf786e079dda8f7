//! Multiplies activations by a factor: `templates/include/unweight/kernels/scale.cuh`.

use super::{Edge, Family, Op, VariantSpec, entry::Entry};
use crate::{
    args::args,
    axes::{Arch, axes, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::{Instruction, Instructions},
};

word_axis! {
    /// The operation on the activations.
    ScaleForm, "form" {
        /// Stores the products as the output.
        Mul = "mul",
        /// Adds the products to the output.
        Add = "add",
        /// Applies a soft cap instead: the output is `factor * tanh(x / factor)`.
        Cap = "cap",
    }
}

axes! {
    /// Activations times a factor.
    pub struct ScaleSpec {
        /// The operation on the activations.
        form: ScaleForm "",
        /// Programmatic dependent launch: its blocks start before the stream's previous kernel has ended.
        pdl: flag "_pdl" = false,
    }
}

args! {
    /// Arguments of `scale`.
    pub struct ScaleArgs {
        /// bf16 `[m, columns]`.
        pub x: u64,
        /// bf16 `[m, columns]`; may be `x`.
        pub y: u64,
        /// Elements from one row of `x` to the next.
        pub x_pitch: u64,
        /// Elements from one row of `y` to the next.
        pub y_pitch: u64,
        /// Columns, a multiple of 8.
        pub columns: u32,
        /// Blocks of a row.
        pub row_blocks: u32,
        /// The factor of every element.
        pub factor: f32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// Returns a variant of the family `scale`.
    pub const fn scale(arch: Arch, spec: ScaleSpec) -> Self {
        Self { arch, op: Op::Scale(spec) }
    }
}

const THREADS: u32 = 128;
/// Columns per thread: 16 bytes.
const CHUNK: u32 = 8;
const BLOCKS_PER_SM: u32 = 8;

impl ScaleSpec {
    /// Columns of a block.
    pub const BLOCK_COLUMNS: u32 = THREADS * CHUNK;

    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.when(self.pdl, Instruction::DependentLaunch)
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        let work = Work::OutputTiles { rows: 1, columns: Self::BLOCK_COLUMNS };
        let grid = LaunchGrid::Covering { work, per_block: 1 };
        Ok(BlockPlan {
            smem: SmemPlan::new(),
            pipeline: None,
            roles: RolePlan::one("scale", THREADS / arch.limits().warp_threads),
            launch: LaunchPlan { pdl: self.pdl, ..LaunchPlan::ordinary(THREADS, BLOCKS_PER_SM, grid) },
        })
    }
}

impl Family for ScaleSpec {
    type Args = ScaleArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[];

    fn summary(&self, _: &BlockPlan) -> String {
        let (sign, of) = match self.form {
            ScaleForm::Mul => ("=", "X[m,n]"),
            ScaleForm::Add => ("+=", "X[m,n]"),
            ScaleForm::Cap => ("=", "tanh(X[m,n] / factor)"),
        };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        format!("Y[m,n] {sign} factor * {of}{pdl}.")
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().check("columns", "uw::scale::kBlockColumns", Self::BLOCK_COLUMNS)
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        ScaleForm::ALL.iter().flat_map(move |&form| {
            [false, true].map(move |pdl| VariantSpec::scale(arch, ScaleSpec { form, pdl }))
        })
    }
}
