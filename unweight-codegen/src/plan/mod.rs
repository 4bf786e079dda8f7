//! What follows from a spec: shared memory by section, pipeline, roles and launch.
//!
//! Pure `const fn`s of a spec. Each kernel header states the same numbers, and the rendered source holds one against the other with
//! `static_assert`, so neither can drift. Whether a variant can exist is decided here and nowhere else.

mod decode;
mod encode;
mod grid;
mod matmul;
mod smem;

pub use grid::{Grid, Problem, Work};
pub use smem::{SmemPlan, SmemSection};

use crate::{
    spec::{NTiles, Op, Stages, VariantSpec},
    text::Message,
};
use std::fmt;

/// Everything that launching and reviewing a variant needs. Its `Display` is the plan file of the snapshots.
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

/// A ring of shared-memory stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelinePlan {
    /// Rings side by side: 1 for the block, or one per warp.
    pub rings: u32,
    /// Stages of a ring.
    pub stages: u32,
    /// Shared memory of one stage.
    pub stage_bytes: u32,
    /// Arrivals that complete a stage's `full` barrier, besides the bytes it waits for.
    pub full_arrivals: u32,
    /// Arrivals that complete a stage's `empty` barrier; 0 where the ring belongs to one warp and needs none.
    pub empty_arrivals: u32,
}

/// Warps with one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// The task.
    pub name: &'static str,
    /// Warps that have it.
    pub warps: u32,
    /// Registers per thread that the role asks for with `setmaxnreg`; `None` where it keeps those of the launch.
    pub registers: Option<u32>,
}

/// The roles of a block, in the order of their warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolePlan {
    first: Role,
    second: Option<Role>,
}

impl RolePlan {
    const fn one(name: &'static str, warps: u32) -> Self {
        Self { first: Role { name, warps, registers: None }, second: None }
    }

    /// The roles.
    pub fn roles(&self) -> impl Iterator<Item = &Role> {
        std::iter::once(&self.first).chain(&self.second)
    }

    /// Warps of all roles.
    pub fn warps(&self) -> u32 {
        self.roles().map(|role| role.warps).sum()
    }
}

/// Block and grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchPlan {
    /// Threads of a block (x only).
    pub threads: u32,
    /// Blocks that must fit one SM: the second number of `__launch_bounds__`.
    pub blocks_per_sm: u32,
    /// How many blocks.
    pub grid: Grid,
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
        fitting_stages: Option<Stages>,
        /// The most tiles that would fit, all else being equal.
        fitting_n: Option<NTiles>,
    },
}

impl Infeasible {
    /// The message of [`fmt::Display`], also in const context.
    pub const fn message(&self) -> Message {
        let Self::SharedMemory { spec, fixed_bytes, stages, stage_bytes, limit_bytes, fitting_stages, fitting_n } =
            *self;
        let text = Message::new().str("variant ").str(spec.name().as_str()).str(": shared memory ");
        let text = text.num(fixed_bytes + stages * stage_bytes).str(" B = ").num(fixed_bytes).str(" + ");
        let text = text.num(stages).str(" stages x ").num(stage_bytes).str(" exceeds the ");
        let text = text.str(spec.arch.compiler_name()).str(" limit of ").num(limit_bytes).str(" B");
        let text = match fitting_stages {
            Some(stages) => text.str("; try stages <= ").num(stages.get()),
            None => text.str("; no number of stages fits"),
        };
        match fitting_n {
            Some(n) => text.str(" or n <= ").num(n.get()),
            None => text,
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
    /// let six_stages: VariantSpec = "uw_sm90a_matmul_palette_n4p6_v8_store".parse()?;
    /// let why = Plan::new(&six_stages).unwrap_err().to_string();
    /// assert!(why.contains("exceeds the sm_90a limit of 232448 B; try stages <= "), "{why}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn new(spec: &VariantSpec) -> Result<Self, Infeasible> {
        match spec.op {
            Op::Decode(op) => Ok(decode::plan(spec, &op)),
            Op::Matmul(op) => matmul::plan(spec, &op),
            Op::Encode(op) => Ok(encode::plan(spec, &op)),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.spec)?;
        writeln!(f, "launch   {} threads, at least {} per SM", self.launch.threads, self.launch.blocks_per_sm)?;
        writeln!(f, "grid     {}", self.launch.grid)?;
        for role in self.roles.roles() {
            write!(f, "role     {}: {} warps", role.name, role.warps)?;
            match role.registers {
                Some(registers) => writeln!(f, ", {registers} registers")?,
                None => writeln!(f)?,
            }
        }
        if let Some(PipelinePlan { rings, stages, stage_bytes, full_arrivals, empty_arrivals }) = self.pipeline {
            write!(
                f,
                "pipeline {rings} x {stages} stages of {stage_bytes} B; full: {full_arrivals} arrival and the bytes"
            )?;
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
    use crate::spec::catalog;

    /// What every plan must satisfy for its kernel to start at all.
    #[test]
    fn plans_stay_within_the_limits() {
        let feasible = catalog::all();
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
            for pair in plan.smem.sections().windows(2) {
                assert!(pair[0].offset + pair[0].bytes() <= pair[1].offset, "{plan}");
            }
        }
    }
}
