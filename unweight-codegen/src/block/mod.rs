//! The plan of a block: sections of shared memory, warp roles, the ring between loads and work, and the launch.
//!
//! A family computes its plan from its axes and the architecture, in `const fn`s. This module is independent of
//! families.

mod constraint;
mod grid;
mod roles;
mod smem;

pub use constraint::Constraint;
pub use grid::{GemmShape, LaunchGrid, Work};
pub use roles::{PipelinePlan, Role, RolePlan};
pub use smem::{SmemPlan, SmemSection};

use crate::limits::ArchLimits;

/// The largest value of an axis below the spec's that fits with the other axes unchanged. A macro, because a const fn
/// accepts no closure.
macro_rules! largest_fitting {
    ($fits:ident($arch:ident, $spec:ident), $spec_type:ident { $field:ident: $axis:ident }) => {{
        let mut value = $spec.$field.get();
        loop {
            match $axis::new(value - 1) {
                Ok(smaller) if $fits($arch, &$spec_type { $field: smaller, ..*$spec }) => break Some(smaller.get()),
                Ok(_) => value -= 1,
                Err(_) => break None,
            }
        }
    }};
}

pub(crate) use largest_fitting;

/// A value with the name of its axis in messages.
pub(crate) const fn with_axis(axis: &'static str, value: Option<u32>) -> Option<(&'static str, u32)> {
    match value {
        Some(value) => Some((axis, value)),
        None => None,
    }
}

/// The plan of a family for one variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPlan {
    /// Dynamic shared memory of a block.
    pub smem: SmemPlan,
    /// The ring between loads and work, if the kernel has one.
    pub pipeline: Option<PipelinePlan>,
    /// Tasks of the warps.
    pub roles: RolePlan,
    /// Block and grid.
    pub launch: LaunchPlan,
}

impl BlockPlan {
    /// Limits the blocks per SM to what fits on this architecture; families state the number for Hopper.
    pub(crate) const fn within(mut self, limits: &ArchLimits) -> Self {
        let max_blocks = limits.blocks_by_smem_and_threads(self.launch.threads, self.smem.bytes());
        if self.launch.blocks_per_sm > max_blocks {
            self.launch.blocks_per_sm = max_blocks;
        }
        if let LaunchGrid::Persistent { blocks_per_sm, .. } = &mut self.launch.grid
            && *blocks_per_sm > max_blocks
        {
            *blocks_per_sm = max_blocks;
        }
        self
    }
}

/// Block and grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchPlan {
    /// Threads of a block (x only).
    pub threads: u32,
    /// Blocks that must fit one SM: the second number of `__launch_bounds__`.
    pub blocks_per_sm: u32,
    /// Number of blocks.
    pub grid: LaunchGrid,
    /// Blocks of a cluster, along x; 1 for none.
    pub cluster: u32,
    /// Programmatic dependent launch: the kernel starts while the stream's previous kernel still runs, and waits for it
    /// itself.
    pub pdl: bool,
    /// Blocks may wait for other blocks of the grid, so all must be resident at once ([`LaunchPlan::blocks_wait`]).
    pub co_resident: bool,
}

impl LaunchPlan {
    /// A launch without clusters that starts after all earlier work of the stream.
    pub(crate) const fn ordinary(threads: u32, blocks_per_sm: u32, grid: LaunchGrid) -> Self {
        Self { threads, blocks_per_sm, grid, cluster: 1, pdl: false, co_resident: false }
    }

    /// Returns whether some blocks wait for others in a grid of `blocks` blocks. A grid of a single work unit shares no
    /// tile of Y, so no block waits.
    pub fn blocks_wait(&self, problem: GemmShape, blocks: u32) -> bool {
        self.co_resident && self.grid.work_units(problem, blocks) > 1
    }
}

/// Device memory that a launch needs in addition to its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkspacePlan {
    /// Size of the buffer `workspace` in bytes.
    pub bytes: u64,
    /// Number of u32 counters in the buffer `counters`: zero before the first launch, and each launch leaves them zero.
    pub counters: u64,
}

impl WorkspacePlan {
    /// The output of a dump: the A operands of all of W, bf16, whichever block decodes them.
    pub(crate) const fn operands(problem: GemmShape) -> Self {
        Self { bytes: Work::WeightTiles.units(problem) * 64 * 64 * 2, counters: 0 }
    }
}
