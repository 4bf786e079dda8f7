//! What a variant must satisfy to exist.

use crate::{axes::Arch, limits::Instruction, text::Message};

/// The constraint that a variant violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Constraint {
    /// The sections of shared memory are more than a block may have.
    SharedMemory {
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
        /// The sums of one warp.
        sum_bytes: u32,
        /// The ring of one warp.
        ring_bytes: u32,
        /// Stages with which the ring would hold them.
        fitting_stages: u32,
    },
    /// The architecture lacks an instruction that the kernel is made of.
    Instruction {
        /// What it lacks.
        instruction: Instruction,
    },
    /// Two axes that exclude each other.
    Conflict {
        /// Which, why, and what to do.
        what: &'static str,
    },
}

impl Constraint {
    /// `epilogue = silu_mul` for a family that does not have it.
    pub(crate) const fn without_silu_mul() -> Self {
        Self::Conflict {
            what: "epilogue = silu_mul is of ops gemm_mma, gemm_wgmma, gemm_compact and gemm_grouped alone; take store",
        }
    }

    /// `text`, which names the variant, and the constraint.
    pub(crate) const fn message(&self, text: Message, arch: Arch) -> Message {
        match *self {
            Self::SharedMemory { fixed_bytes, stages, stage_bytes, limit_bytes, fitting_stages, fitting_other } => {
                let text = text.str("shared memory ").num(fixed_bytes + stages * stage_bytes).str(" B = ");
                let text = text.num(fixed_bytes).str(" + ");
                let text = text.num(stages).str(" stages x ").num(stage_bytes).str(" exceeds the ");
                let text = text.str(arch.compiler_name()).str(" limit of ").num(limit_bytes).str(" B");
                let text = match fitting_stages {
                    Some(stages) => text.str("; try stages <= ").num(stages),
                    None => text.str("; no number of stages fits"),
                };
                match fitting_other {
                    Some((axis, value)) => text.str(" or ").str(axis).str(" <= ").num(value),
                    None => text,
                }
            }
            Self::SumsExceedRing { sum_bytes, ring_bytes, fitting_stages } => {
                let text = text.str("the sums of a warp, ").num(sum_bytes).str(" B, exceed its ring of ");
                let text = text.num(ring_bytes).str(" B");
                text.str("; try stages >= ").num(fitting_stages).str(" or persistent = true")
            }
            Self::Instruction { instruction } => text.str(arch.compiler_name()).str(" ").str(instruction.lack()),
            Self::Conflict { what } => text.str(what),
        }
    }
}
