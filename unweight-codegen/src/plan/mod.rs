//! What follows from a spec: shared memory by section, pipeline, roles and launch.
//!
//! Pure `const fn`s of a spec. Each kernel header states the same numbers, and the rendered source holds one against
//! the other with `static_assert`, so neither can drift. Whether a variant can exist is decided here and nowhere else.

mod grid;
mod roles;
mod smem;

pub use grid::{GemmShape, LaunchGrid, Work};
pub use roles::{PipelinePlan, Role, RolePlan};
pub use smem::{SmemPlan, SmemSection};

use crate::{family::Instruction, spec::VariantSpec, text::Message};
use std::fmt;

/// Of the values of an axis below the spec's own, the largest that fits, all else being equal. A macro, because a const
/// fn takes no closure.
macro_rules! most_fitting {
    ($fits:ident($spec:ident, $op:ident), $op_type:ident { $field:ident: $axis:ident }) => {{
        let mut value = $op.$field.get();
        loop {
            match $axis::new(value - 1) {
                Ok(less) if $fits($spec, &$op_type { $field: less, ..*$op }) => break Some(less.get()),
                Ok(_) => value -= 1,
                Err(_) => break None,
            }
        }
    }};
}

pub(crate) use most_fitting;

/// A value with the axis that it is of, as messages call it.
pub(crate) const fn named(axis: &'static str, value: Option<u32>) -> Option<(&'static str, u32)> {
    match value {
        Some(value) => Some((axis, value)),
        None => None,
    }
}

/// Everything that launching and reviewing a variant needs. Its `Display` is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The variant.
    pub spec: VariantSpec,
    /// Dynamic shared memory of a block.
    pub smem: SmemPlan,
    /// The ring between loads and work, if the kernel has one.
    pub pipeline: Option<PipelinePlan>,
    /// Who does what in a block.
    pub roles: RolePlan,
    /// Block and grid.
    pub launch: LaunchPlan,
}

/// Block and grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchPlan {
    /// Threads of a block (x only).
    pub threads: u32,
    /// Blocks that must fit one SM: the second number of `__launch_bounds__`.
    pub blocks_per_sm: u32,
    /// How many blocks.
    pub grid: LaunchGrid,
    /// Blocks of a cluster, along x; 1 for none.
    pub cluster: u32,
    /// Programmatic dependent launch: the kernel starts while the stream's previous one still runs, and waits for it
    /// itself.
    pub pdl: bool,
    /// Blocks may wait for other blocks of their grid: all must be resident at once ([`LaunchPlan::blocks_wait`]).
    pub co_resident: bool,
}

impl LaunchPlan {
    /// Without clusters, behind whatever the stream did before.
    pub(crate) const fn ordinary(threads: u32, blocks_per_sm: u32, grid: LaunchGrid) -> Self {
        Self { threads, blocks_per_sm, grid, cluster: 1, pdl: false, co_resident: false }
    }

    /// Whether, in a grid of `blocks`, some wait for others. A grid of a single work unit shares no tile of Y, so
    /// none waits.
    pub fn blocks_wait(&self, problem: GemmShape, blocks: u32) -> bool {
        self.co_resident && self.grid.work_units(problem, blocks) > 1
    }
}

/// Device memory that a launch needs beside its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkspacePlan {
    /// Bytes behind `workspace`.
    pub bytes: u64,
    /// u32 behind `counters`, zero before the first launch; each launch leaves them zero.
    pub counters: u64,
}

impl WorkspacePlan {
    /// What a dump writes: the A operands of all of W, bf16, whichever block decodes them.
    pub(crate) const fn operands(problem: GemmShape) -> Self {
        Self { bytes: Work::WeightTiles.units(problem) * 64 * 64 * 2, counters: 0 }
    }
}

/// Why a variant cannot exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Infeasible {
    /// The sections of shared memory are more than a block may have.
    SharedMemory {
        /// The variant.
        spec: VariantSpec,
        /// What does not depend on the number of stages.
        fixed_bytes: u32,
        /// Stages asked for; 1 for kernels without a ring.
        stages: u32,
        /// What each stage costs.
        stage_bytes: u32,
        /// The limit of the architecture.
        limit_bytes: u32,
        /// The most stages that would fit, all else being equal.
        fitting_stages: Option<u32>,
        /// Another axis, and its largest value that would fit, all else being equal.
        fitting_other: Option<(&'static str, u32)>,
    },
    /// The fp32 sums of a warp are left in its ring to be added up, and are more than the ring.
    SumsExceedRing {
        /// The variant.
        spec: VariantSpec,
        /// The sums of one warp.
        sum_bytes: u32,
        /// The ring of one warp.
        ring_bytes: u32,
        /// Stages with which the ring would hold them.
        fitting_stages: u32,
    },
    /// The architecture lacks an instruction that the kernel is made of.
    Instruction {
        /// The variant.
        spec: VariantSpec,
        /// What it lacks.
        instruction: Instruction,
    },
    /// Two axes that exclude each other.
    Conflict {
        /// The variant.
        spec: VariantSpec,
        /// Which, why, and what to do.
        what: &'static str,
    },
}

impl Infeasible {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "kernel-variant-infeasible"
    }

    /// `epilogue = silu_mul` for a family that does not have it.
    pub(crate) const fn without_silu_mul(spec: &VariantSpec) -> Self {
        Self::Conflict {
            spec: *spec,
            what: "epilogue = silu_mul is of ops gemm_mma, gemm_wgmma, gemm_compact and gemm_grouped alone; take store",
        }
    }

    /// The message of [`fmt::Display`], also in const context.
    pub const fn message(&self) -> Message {
        match *self {
            Self::SharedMemory {
                spec,
                fixed_bytes,
                stages,
                stage_bytes,
                limit_bytes,
                fitting_stages,
                fitting_other,
            } => {
                let text = Message::new().str("variant ").str(spec.name().as_str()).str(": shared memory ");
                let text = text.num(fixed_bytes + stages * stage_bytes).str(" B = ").num(fixed_bytes).str(" + ");
                let text = text.num(stages).str(" stages x ").num(stage_bytes).str(" exceeds the ");
                let text = text.str(spec.arch.compiler_name()).str(" limit of ").num(limit_bytes).str(" B");
                let text = match fitting_stages {
                    Some(stages) => text.str("; try stages <= ").num(stages),
                    None => text.str("; no number of stages fits"),
                };
                match fitting_other {
                    Some((axis, value)) => text.str(" or ").str(axis).str(" <= ").num(value),
                    None => text,
                }
            }
            Self::SumsExceedRing { spec, sum_bytes, ring_bytes, fitting_stages } => {
                let text = Message::new().str("variant ").str(spec.name().as_str()).str(": the sums of a warp, ");
                let text = text.num(sum_bytes).str(" B, exceed its ring of ").num(ring_bytes).str(" B");
                text.str("; try stages >= ").num(fitting_stages).str(" or persistent = true")
            }
            Self::Instruction { spec, instruction } => {
                let text = Message::new().str("variant ").str(spec.name().as_str()).str(": ");
                text.str(spec.arch.compiler_name()).str(" ").str(instruction.lack())
            }
            Self::Conflict { spec, what } => {
                Message::new().str("variant ").str(spec.name().as_str()).str(": ").str(what)
            }
        }
    }
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message())
    }
}

impl std::error::Error for Infeasible {}

impl Plan {
    /// The plan of a variant, or why the variant cannot exist.
    ///
    /// ```
    /// # use unweight_codegen::{plan::Plan, spec::*};
    /// let six_stages: VariantSpec = "uw_sm90a_gemm_recon_palette_n4p6_v8_store".parse()?;
    /// let why = Plan::new(&six_stages).unwrap_err().to_string();
    /// assert!(why.contains("exceeds the sm_90a limit of 232448 B; try stages <= "), "{why}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn new(spec: &VariantSpec) -> Result<Self, Infeasible> {
        match spec.op.instructions().missing_from(spec.arch.limits().instructions) {
            Some(instruction) => Err(Infeasible::Instruction { spec: *spec, instruction }),
            None => match spec.op.plan(spec) {
                Ok(plan) => Ok(plan.on_its_sm()),
                refused => refused,
            },
        }
    }

    /// With as many blocks per SM as there is room for: families state what suits Hopper's.
    const fn on_its_sm(mut self) -> Self {
        let most = self.spec.arch.limits().blocks_by_smem_and_threads(self.launch.threads, self.smem.bytes());
        if self.launch.blocks_per_sm > most {
            self.launch.blocks_per_sm = most;
        }
        if let LaunchGrid::Persistent { blocks_per_sm, .. } = &mut self.launch.grid
            && *blocks_per_sm > most
        {
            *blocks_per_sm = most;
        }
        self
    }

    /// The workspace of a launch for this problem on a device with `sms` multiprocessors: for partial sums, or for the
    /// operands that a dump writes.
    pub fn workspace(&self, problem: GemmShape, sms: u32) -> WorkspacePlan {
        self.spec.op.workspace(self, problem, sms)
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

    /// What every plan must satisfy for its kernel to start at all.
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
            // Registers that no role gave up are waited for without end.
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
        assert_eq!(needs("uw_sm90a_repack_pack"), WorkspacePlan::default());
        // Every operand as the 16 bits that it is.
        let operands = WorkspacePlan { bytes: 4096 * 1024 * 2, counters: 0 };
        assert_eq!(needs("uw_sm90a_gemm_mma_b8_r4w8p2c1_esc_store_dump"), operands);
        assert_eq!(needs("uw_sm90a_gemm_wgmma_b128_g2p6_esc_store_dump"), operands);
        // fp32 sums of two tiles of 128 x 128 of Y for each block, and a counter for each warpgroup of each.
        let sums = WorkspacePlan { bytes: 132 * 2 * 128 * 128 * 4, counters: 132 * 2 * 2 };
        assert_eq!(needs("uw_sm90a_gemm_wgmma_b128_g2p6_streamk_esc_store"), sums);
    }

    #[test]
    fn incompatible_cluster_options_are_rejected() {
        let why = |name: &str| Plan::new(&name.parse().unwrap()).unwrap_err().to_string();
        assert!(why("uw_sm90a_gemm_wgmma_b128_g2p6c2_streamk_esc_store").contains("both share out k"));
        // 3 * 64 x 192 fp32 sums are 147456 B, three stages of X and W 129024 B.
        assert!(why("uw_sm90a_gemm_wgmma_b192_g3p3c2_esc_store").contains("exceed the ring"));
        let plan = plan_of("uw_sm90a_gemm_wgmma_b128_g2p6c4_esc_store");
        let blocks = |k| plan.launch.grid.blocks(GemmShape { m: 129, n: 1024, k }, 132);
        assert_eq!((plan.launch.cluster, blocks(256), blocks(192)), (4, Some(64), None));
        assert_eq!(plan.workspace(GemmShape { m: 129, n: 1024, k: 256 }, 132), WorkspacePlan::default());
    }
}
