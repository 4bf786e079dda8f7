//! The plan of a variant: shared memory by section, pipeline, roles and launch.
//!
//! Plans are pure `const fn`s of a spec. Each kernel header states the same numbers, and the rendered source compares
//! both with `static_assert`, so they cannot drift apart. Only this module decides whether a variant can exist.

pub use crate::block::{
    Constraint, GemmShape, LaunchGrid, LaunchPlan, PipelinePlan, Role, RolePlan, SmemPlan, SmemSection, Work,
    WorkspacePlan,
};

use crate::{block::BlockPlan, family::VariantSpec, text::Message};
use std::fmt;

/// Everything that is needed to launch and review a variant. `Display` prints it for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The variant that the plan is for.
    pub spec: VariantSpec,
    /// Dynamic shared memory of a block.
    pub smem: SmemPlan,
    /// The ring between loads and work, if the kernel has one.
    pub pipeline: Option<PipelinePlan>,
    /// Roles of the warps of a block.
    pub roles: RolePlan,
    /// Block and grid.
    pub launch: LaunchPlan,
}

/// The reason why a variant cannot exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Infeasible {
    /// The variant that has no plan.
    pub spec: VariantSpec,
    /// The violated constraint.
    pub constraint: Constraint,
}

impl Infeasible {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "kernel-variant-infeasible"
    }

    /// The message of [`fmt::Display`], available in const context.
    pub const fn message(&self) -> Message {
        let text = Message::new().str("variant ").str(self.spec.name().as_str()).str(": ");
        self.constraint.message(text, self.spec.arch)
    }
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message())
    }
}

impl std::error::Error for Infeasible {}

impl Plan {
    /// Returns the plan of a variant, or the reason why the variant cannot exist.
    ///
    /// ```
    /// # use unweight_codegen::{plan::Plan, spec::*};
    /// let six_stages: VariantSpec = "uw_sm90a_gemm_recon_palette_n4p6_v8_store".parse()?;
    /// let why = Plan::new(&six_stages).unwrap_err().to_string();
    /// assert!(why.contains("exceeds the sm_90a limit of 232448 B; try stages <= "), "{why}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn new(spec: &VariantSpec) -> Result<Self, Infeasible> {
        match spec.block() {
            Ok(BlockPlan { smem, pipeline, roles, launch }) => Ok(Self { spec: *spec, smem, pipeline, roles, launch }),
            Err(constraint) => Err(Infeasible { spec: *spec, constraint }),
        }
    }

    /// Returns the plan of the block, as the family computed it.
    pub(crate) const fn block(&self) -> BlockPlan {
        BlockPlan { smem: self.smem, pipeline: self.pipeline, roles: self.roles, launch: self.launch }
    }

    /// Returns the workspace of a launch for this problem on a device with `sms` multiprocessors, for partial sums or
    /// for the operands of a dump.
    pub fn workspace(&self, problem: GemmShape, sms: u32) -> WorkspacePlan {
        self.spec.op.workspace(&self.block(), problem, sms)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.spec)?;
        write!(f, "launch   {} threads, at least {} per SM", self.launch.threads, self.launch.blocks_per_sm)?;
        if self.launch.cluster > 1 {
            write!(f, ", clusters of {}", self.launch.cluster)?;
        }
        writeln!(f, "{}", if self.launch.pdl { ", pdl" } else { "" })?;
        writeln!(f, "grid     {}", self.launch.grid)?;
        for role in self.roles.roles() {
            write!(f, "role     {}: {} warps", role.name, role.warps)?;
            match role.registers {
                Some(registers) => writeln!(f, ", {registers} registers")?,
                None => writeln!(f)?,
            }
        }
        if let Some(PipelinePlan { rings, stages, stage_bytes, full_arrivals, empty_arrivals }) = self.pipeline {
            write!(f, "pipeline {rings} x {stages} stages of {stage_bytes} B; full: ")?;
            match full_arrivals {
                0 => write!(f, "every lane's group of copies")?,
                1 => write!(f, "1 arrival and the bytes")?,
                _ => write!(f, "{full_arrivals} arrivals and the bytes")?,
            }
            match empty_arrivals {
                0 => writeln!(f, "; empty: known to the warp")?,
                _ => writeln!(f, "; empty: {empty_arrivals} arrivals")?,
            }
        }
        writeln!(f, "shared memory")?;
        self.smem.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Arch, catalog};

    /// Every plan must satisfy this for its kernel to start at all.
    #[test]
    fn plans_stay_within_the_limits() {
        let feasible: Vec<_> = Arch::ALL.iter().flat_map(|arch| catalog::all(*arch)).collect();
        assert!(!feasible.is_empty());
        for spec in feasible {
            let limits = spec.arch.limits();
            let plan = Plan::new(&spec).unwrap();
            let LaunchPlan { threads, blocks_per_sm, .. } = plan.launch;
            assert!(plan.smem.bytes() <= limits.smem_bytes_per_block, "{plan}");
            assert_eq!(plan.roles.warps() * limits.warp_threads, threads, "{plan}");
            assert!(threads <= limits.threads_per_block, "{plan}");
            assert!(
                blocks_per_sm >= 1 && blocks_per_sm <= limits.blocks_by_smem_and_threads(threads, plan.smem.bytes()),
                "{plan}"
            );
            let mut raised = 0;
            for role in plan.roles.roles() {
                if let Some(registers) = role.registers {
                    assert!(role.warps % limits.warpgroup_warps == 0, "setmaxnreg is for whole warpgroups: {plan}");
                    assert!(registers % limits.setmaxnreg_step == 0, "{plan}");
                    assert!(registers >= limits.setmaxnreg_min && registers <= limits.setmaxnreg_max, "{plan}");
                    raised += registers * role.warps * limits.warp_threads;
                }
            }
            // `setmaxnreg` waits forever for registers that no role released.
            assert!(raised <= limits.registers_for(threads, blocks_per_sm) * threads, "{plan}");
            assert!(limits.blocks_per_cluster.is_multiple_of(plan.launch.cluster), "{plan}");
            for pair in plan.smem.sections().windows(2) {
                assert!(pair[0].offset + pair[0].bytes() <= pair[1].offset, "{plan}");
            }
        }
    }

    fn plan_of(name: &str) -> Plan {
        Plan::new(&name.parse().unwrap()).unwrap()
    }

    #[test]
    fn workspace_plans_match_the_kernels() {
        let problem = GemmShape { m: 100, n: 4096, k: 1024 };
        let needs = |name: &str| plan_of(name).workspace(problem, 132);
        assert_eq!(needs("uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_store"), WorkspacePlan::default());
        assert_eq!(needs("uw_sm90a_gemm_wgmma_b128_g2p6_esc_store"), WorkspacePlan::default());
        assert_eq!(needs("uw_sm90a_pack_tiles"), WorkspacePlan::default());
        // Every operand in 16 bits.
        let operands = WorkspacePlan { bytes: 4096 * 1024 * 2, counters: 0 };
        assert_eq!(needs("uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_store_dump"), operands);
        assert_eq!(needs("uw_sm90a_gemm_wgmma_b128_g2p6_esc_store_dump"), operands);
        // fp32 sums of two 128 x 128 tiles of Y for each block, and a counter for each warpgroup of each tile.
        let sums = WorkspacePlan { bytes: 132 * 2 * 128 * 128 * 4, counters: 132 * 2 * 2 };
        assert_eq!(needs("uw_sm90a_gemm_wgmma_b128_g2p6_streamk_esc_store"), sums);
    }

    #[test]
    fn incompatible_cluster_options_are_rejected() {
        let why = |name: &str| Plan::new(&name.parse().unwrap()).unwrap_err().to_string();
        assert!(why("uw_sm90a_gemm_wgmma_b128_g2p6c2_streamk_esc_store").contains("both split k"));
        // 3 * 64 x 192 fp32 sums are 147456 B, three stages of X and W 129024 B.
        assert!(why("uw_sm90a_gemm_wgmma_b192_g3p3c2_esc_store").contains("exceed the ring"));
        let plan = plan_of("uw_sm90a_gemm_wgmma_b128_g2p6c4_esc_store");
        let blocks = |k| plan.launch.grid.blocks(GemmShape { m: 129, n: 1024, k }, 132);
        assert_eq!((plan.launch.cluster, blocks(256), blocks(192)), (4, Some(64), None));
        assert_eq!(plan.workspace(GemmShape { m: 129, n: 1024, k: 256 }, 132), WorkspacePlan::default());
    }
}
