//! The constraints that a variant must satisfy to exist.

use crate::{axes::Arch, limits::Instruction, text::Message};

/// The constraint that a variant violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Constraint {
    /// The sections of shared memory exceed the limit of a block.
    SharedMemory {
        /// Bytes that do not depend on the number of stages.
        fixed_bytes: u32,
        /// Requested number of stages; 1 for kernels without a ring.
        stages: u32,
        /// Bytes of each stage.
        stage_bytes: u32,
        /// The limit of the architecture, in bytes.
        limit_bytes: u32,
        /// The largest number of stages that fits with the other axes unchanged.
        fitting_stages: Option<u32>,
        /// Another axis, and its largest value that fits with the other axes unchanged.
        fitting_other: Option<(&'static str, u32)>,
    },
    /// The fp32 sums of a warp, which are stored in its ring for the reduction, exceed the ring.
    SumsExceedRing {
        /// Bytes of the sums of one warp.
        sum_bytes: u32,
        /// Bytes of the ring of one warp.
        ring_bytes: u32,
        /// The smallest number of stages whose ring holds the sums.
        fitting_stages: u32,
    },
    /// The architecture lacks an instruction that the kernel needs.
    Instruction {
        /// The missing instruction.
        instruction: Instruction,
    },
    /// Two axes that exclude each other.
    Conflict {
        /// The axes, the reason, and the next step.
        what: &'static str,
    },
}

impl Constraint {
    /// The error for `epilogue = silu_mul` in a family that does not support it.
    pub(crate) const fn without_silu_mul() -> Self {
        Self::Conflict {
            what: "only ops gemm_mma, gemm_wgmma, gemm_compact and gemm_grouped support epilogue = silu_mul; use store",
        }
    }

    /// Returns `text`, which names the variant, followed by a description of the constraint.
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
                match (fitting_stages, fitting_other) {
                    (Some(_), Some((axis, value))) => text.str(" or ").str(axis).str(" <= ").num(value),
                    (None, Some((axis, value))) => text.str("; try ").str(axis).str(" <= ").num(value),
                    (_, None) => text,
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
