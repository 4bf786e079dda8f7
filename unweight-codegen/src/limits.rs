//! Hardware limits of each architecture. No other file contains such a number.
//!
//! Source: CUDA C++ Programming Guide 13.0, "Compute Capabilities" (technical specifications per compute capability),
//! the PTX ISA 9.0, and the release notes of CUDA 12.8 and 12.9 for the compilers.

use crate::axes::Arch;

/// An instruction, or a group of related instructions, that some architectures lack or that a kernel is built around:
/// without it, compiled code is not that kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Instruction {
    /// Multiplies by a warpgroup from shared memory: `wgmma.mma_async`.
    Wgmma,
    /// `mma.sync` of BF16.
    Mma,
    /// `cp.async` of 16 bytes, issued by every thread.
    AsyncCopy,
    /// `cp.async.bulk` of a contiguous range of memory.
    BulkCopy,
    /// Copies a tile by the tensor memory accelerator: `cp.async.bulk.tensor`.
    TensorCopy,
    /// Clusters of blocks, and distributed shared memory.
    Cluster,
    /// `griddepcontrol`: programmatic dependent launch.
    DependentLaunch,
    /// Changes the registers per thread of a warp: `setmaxnreg`.
    SetMaxRegisters,
}

impl Instruction {
    const ALL: [Self; 8] = [
        Self::Wgmma,
        Self::Mma,
        Self::AsyncCopy,
        Self::BulkCopy,
        Self::TensorCopy,
        Self::Cluster,
        Self::DependentLaunch,
        Self::SetMaxRegisters,
    ];

    /// Returns the message for an architecture without the instruction, with the alternative.
    pub(crate) const fn lack(self) -> &'static str {
        match self {
            Self::Wgmma => "has no wgmma; use op gemm_mma",
            Self::Mma => "has no mma.sync of bf16",
            Self::AsyncCopy => "has no cp.async",
            Self::BulkCopy | Self::TensorCopy => "has no copy engine; use copy = async where the op has that axis",
            Self::Cluster => "has no clusters; use cluster = 1",
            Self::DependentLaunch => "has no programmatic dependent launch; use pdl = false",
            Self::SetMaxRegisters => "cannot move registers between warps",
        }
    }
}

/// A set of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instructions(u16);

impl Instructions {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns these instructions and one more.
    pub const fn with(self, instruction: Instruction) -> Self {
        Self(self.0 | 1 << instruction as u16)
    }

    /// Returns these instructions, and one more if `used`.
    pub const fn when(self, used: bool, instruction: Instruction) -> Self {
        if used { self.with(instruction) } else { self }
    }

    /// Returns whether the set contains the instruction.
    pub const fn has(self, instruction: Instruction) -> bool {
        self.0 >> instruction as u16 & 1 != 0
    }

    /// Returns the first instruction of this set that is not in `others`.
    pub const fn missing_from(self, others: Self) -> Option<Instruction> {
        let mut i = 0;
        while i < Instruction::ALL.len() {
            let instruction = Instruction::ALL[i];
            if self.has(instruction) && !others.has(instruction) {
                return Some(instruction);
            }
            i += 1;
        }
        None
    }
}

/// The hardware limits that plans are checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchLimits {
    /// Instructions of the architecture that others may lack.
    pub instructions: Instructions,
    /// Shared memory that one block may use, dynamic and static together.
    pub smem_bytes_per_block: u32,
    /// Shared memory of one SM.
    pub smem_bytes_per_sm: u32,
    /// Shared memory that the system reserves on the SM for every resident block.
    pub smem_reserved_bytes_per_block: u32,
    /// Dynamic shared memory that needs no opt-in at load time.
    pub smem_bytes_without_opt_in: u32,
    /// 32-bit registers of one SM, which is also the limit of one block.
    pub registers_per_sm: u32,
    /// 32-bit registers that one thread can address.
    pub registers_per_thread: u32,
    /// Threads of one block.
    pub threads_per_block: u32,
    /// Threads that one SM holds.
    pub threads_per_sm: u32,
    /// Blocks that one SM holds.
    pub blocks_per_sm: u32,
    /// Blocks of a cluster that every device of the architecture can place (the portable size).
    pub blocks_per_cluster: u32,
    /// Threads of a warp.
    pub warp_threads: u32,
    /// Warps of a warpgroup, the unit that issues WGMMA.
    pub warpgroup_warps: u32,
    /// Named barriers of a block, number 0 included, which `__syncthreads` uses.
    pub named_barriers: u32,
    /// The minimum of registers per thread for `setmaxnreg`; 0 without `setmaxnreg`.
    pub setmaxnreg_min: u32,
    /// The maximum of registers per thread for `setmaxnreg`; 0 without `setmaxnreg`.
    pub setmaxnreg_max: u32,
    /// Registers per thread for `setmaxnreg` are a multiple of this.
    pub setmaxnreg_step: u32,
    /// The largest `n` of a WGMMA instruction; 0 without WGMMA.
    pub wgmma_n_max: u32,
    /// The first NVRTC (major, minor) that supports the architecture; at least 12.0, the oldest supported NVRTC.
    pub first_nvrtc: (u32, u32),
}

/// Instructions of every architecture here.
const AMPERE: Instructions = Instructions::NONE.with(Instruction::Mma).with(Instruction::AsyncCopy);
/// The above, and those that Hopper introduced and later architectures kept.
const COPY_ENGINE: Instructions = AMPERE
    .with(Instruction::BulkCopy)
    .with(Instruction::TensorCopy)
    .with(Instruction::Cluster)
    .with(Instruction::DependentLaunch)
    .with(Instruction::SetMaxRegisters);

/// Compute capability 9.0, and the limits that all architectures share.
const SM90A: ArchLimits = ArchLimits {
    instructions: COPY_ENGINE.with(Instruction::Wgmma),
    smem_bytes_per_block: 232_448,
    smem_bytes_per_sm: 233_472,
    smem_reserved_bytes_per_block: 1024,
    smem_bytes_without_opt_in: 49_152,
    registers_per_sm: 65_536,
    registers_per_thread: 255,
    threads_per_block: 1024,
    threads_per_sm: 2048,
    blocks_per_sm: 32,
    blocks_per_cluster: 8,
    warp_threads: 32,
    warpgroup_warps: 4,
    named_barriers: 16,
    setmaxnreg_min: 24,
    setmaxnreg_max: 256,
    setmaxnreg_step: 8,
    wgmma_n_max: 256,
    first_nvrtc: (12, 0),
};

/// Compute capability 8.0: 164 KB of shared memory.
const SM80: ArchLimits = ArchLimits {
    instructions: AMPERE,
    smem_bytes_per_block: 166_912,
    smem_bytes_per_sm: 167_936,
    blocks_per_cluster: 1,
    setmaxnreg_min: 0,
    setmaxnreg_max: 0,
    wgmma_n_max: 0,
    ..SM90A
};

/// Compute capability 8.6: 100 KB, and three quarters of the threads.
const SM86: ArchLimits = ArchLimits {
    smem_bytes_per_block: 101_376,
    smem_bytes_per_sm: 102_400,
    threads_per_sm: 1536,
    blocks_per_sm: 16,
    ..SM80
};

/// Compute capability 8.9.
const SM89: ArchLimits = ArchLimits { blocks_per_sm: 24, ..SM86 };

/// Compute capability 10.0: Hopper's limits. No kernel uses its tensor core instructions (tcgen05).
const SM100A: ArchLimits = ArchLimits { instructions: COPY_ENGINE, wgmma_n_max: 0, first_nvrtc: (12, 8), ..SM90A };

/// Compute capability 10.3.
const SM103A: ArchLimits = ArchLimits { first_nvrtc: (12, 9), ..SM100A };

/// Compute capability 12.0: shared memory and threads of 8.9, with a copy engine.
const SM120A: ArchLimits = ArchLimits {
    smem_bytes_per_block: SM89.smem_bytes_per_block,
    smem_bytes_per_sm: SM89.smem_bytes_per_sm,
    threads_per_sm: SM89.threads_per_sm,
    blocks_per_sm: SM89.blocks_per_sm,
    ..SM100A
};

impl Arch {
    /// The limits of this architecture.
    pub const fn limits(self) -> &'static ArchLimits {
        match self {
            Self::Sm80 => &SM80,
            Self::Sm86 => &SM86,
            Self::Sm89 => &SM89,
            Self::Sm90a => &SM90A,
            Self::Sm100a => &SM100A,
            Self::Sm103a => &SM103A,
            Self::Sm120a => &SM120A,
        }
    }

    /// Returns whether the architecture has this instruction.
    pub const fn has(self, instruction: Instruction) -> bool {
        self.limits().instructions.has(instruction)
    }
}

impl ArchLimits {
    /// Returns the registers per thread, a multiple of 8, that the compiler may use so that `blocks_per_sm` blocks of
    /// `threads` threads fit one SM.
    pub const fn registers_for(&self, threads: u32, blocks_per_sm: u32) -> u32 {
        let registers = self.registers_per_sm / (threads * blocks_per_sm) / 8 * 8;
        if registers < self.registers_per_thread { registers } else { self.registers_per_thread }
    }

    /// Returns how many blocks of `threads` threads and `smem_bytes` of shared memory one SM holds, ignoring registers.
    pub const fn blocks_by_smem_and_threads(&self, threads: u32, smem_bytes: u32) -> u32 {
        let by_smem = self.smem_bytes_per_sm / (smem_bytes + self.smem_reserved_bytes_per_block);
        let by_threads = self.threads_per_sm / threads;
        let blocks = if by_smem < by_threads { by_smem } else { by_threads };
        if blocks < self.blocks_per_sm { blocks } else { self.blocks_per_sm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_agree_with_each_other() {
        for arch in Arch::ALL {
            let limits = arch.limits();
            assert_eq!(limits.smem_bytes_per_block + limits.smem_reserved_bytes_per_block, limits.smem_bytes_per_sm);
            assert_eq!(limits.blocks_by_smem_and_threads(1024, limits.smem_bytes_per_block), 1);
            assert_eq!(limits.registers_for(384, 1), 168);
            assert_eq!(limits.registers_for(32, 1), limits.registers_per_thread);
            assert_eq!(limits.setmaxnreg_max % limits.setmaxnreg_step, 0);
            assert_eq!(limits.setmaxnreg_max > 0, arch.has(Instruction::SetMaxRegisters));
            assert_eq!(limits.wgmma_n_max > 0, arch.has(Instruction::Wgmma));
            assert_eq!(limits.blocks_per_cluster > 1, arch.has(Instruction::Cluster));
            assert!(limits.first_nvrtc >= (12, 0));
        }
    }
}
