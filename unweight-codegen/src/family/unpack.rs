//! A packed tensor to BF16 (docs/format.md A.9): `templates/include/unweight/kernels/unpack.cuh`.

use super::{Edge, Entry, Family, Instructions, pack::PackArgs};
use crate::{
    plan::{Infeasible, LaunchGrid, LaunchPlan, Plan, RolePlan, SmemPlan, Work},
    spec::{Arch, VariantSpec, axes},
};
use unweight_format::EncodingId;

axes! {
    /// The kernel that unpacks: it has no axes.
    pub struct UnpackSpec {}
}

impl VariantSpec {
    /// The kernel that unpacks.
    pub const fn unpack(arch: Arch) -> Self {
        Self { arch, op: super::Op::Unpack(UnpackSpec {}) }
    }
}

const WARPS: u32 = 8;
const BLOCKS_PER_SM: u32 = 4;
/// A warp takes a row block, a quarter of a tile.
const TILES_PER_BLOCK: u32 = 2;

impl UnpackSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE
    }

    pub(crate) const fn plan(&self, spec: &VariantSpec) -> Result<Plan, Infeasible> {
        Ok(Plan {
            spec: *spec,
            smem: SmemPlan::new(),
            pipeline: None,
            roles: RolePlan::one("convert", WARPS),
            launch: LaunchPlan::ordinary(
                WARPS * spec.arch.limits().warp_threads,
                BLOCKS_PER_SM,
                LaunchGrid::Covering { work: Work::WeightTiles, per_block: TILES_PER_BLOCK },
            ),
        })
    }
}

impl Family for UnpackSpec {
    type Args = PackArgs;
    const AXES: &'static [crate::spec::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[Edge { from: EncodingId::PACKED, to: EncodingId::RAW }];

    fn summary(&self, _: &Plan) -> String {
        "Packed tiles and escapes -> bf16 [n, k], row-major.".to_owned()
    }

    fn entry(&self, _: &Plan) -> Entry {
        Entry::new().packed_layout()
    }

    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        std::iter::once(VariantSpec::unpack(arch))
    }
}
