//! Unpacks a packed tensor to BF16 (docs/format.md A.9): `templates/include/unweight/kernels/unpack.cuh`.

use super::{Edge, Family, VariantSpec, entry::Entry, pack::PackArgs};
use crate::{
    axes::{Arch, axes},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, RolePlan, SmemPlan, Work},
    limits::Instructions,
};
use unweight_format::EncodingId;

axes! {
    /// The kernel that unpacks. It has no axes.
    pub struct UnpackSpec {}
}

impl VariantSpec {
    /// Returns the kernel that unpacks.
    pub const fn unpack(arch: Arch) -> Self {
        Self { arch, op: super::Op::Unpack(UnpackSpec {}) }
    }
}

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;
/// A warp processes one row block, a quarter of a tile.
const TILES_PER_BLOCK: u32 = 2;

impl UnpackSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        Ok(BlockPlan {
            smem: SmemPlan::new(),
            pipeline: None,
            roles: RolePlan::one("convert", WARPS),
            launch: LaunchPlan::ordinary(
                WARPS * arch.limits().warp_threads,
                BLOCKS_PER_SM,
                LaunchGrid::Covering { work: Work::WeightTiles, per_block: TILES_PER_BLOCK },
            ),
        })
    }
}

impl Family for UnpackSpec {
    type Args = PackArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[Edge { from: EncodingId::PACKED, to: EncodingId::RAW }];

    fn summary(&self, _: &BlockPlan) -> String {
        "Packed tiles and escapes -> bf16 [n, k], row-major.".to_owned()
    }

    fn entry(&self, _: &BlockPlan) -> Entry {
        Entry::new().packed_layout()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        std::iter::once(VariantSpec::unpack(arch))
    }
}
