//! The roles of the warps of a block, and the ring between loads and work.

/// A ring of shared-memory stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelinePlan {
    /// Number of rings: 1 for the block, or one per warp.
    pub rings: u32,
    /// Stages of a ring.
    pub stages: u32,
    /// Shared memory of one stage.
    pub stage_bytes: u32,
    /// Arrivals that complete a stage's `full` barrier, in addition to the bytes that it expects.
    pub full_arrivals: u32,
    /// Arrivals that complete a stage's `empty` barrier; 0 if the ring belongs to one warp, which needs no such
    /// barrier.
    pub empty_arrivals: u32,
}

/// Warps with one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// The task of the warps.
    pub name: &'static str,
    /// Number of these warps.
    pub warps: u32,
    /// Registers per thread that the role requests with `setmaxnreg`; `None` if it keeps those of the launch.
    pub registers: Option<u32>,
}

/// The roles of a block, in the order of their warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolePlan {
    pub(crate) first: Role,
    pub(crate) second: Option<Role>,
}

impl RolePlan {
    pub(crate) const fn one(name: &'static str, warps: u32) -> Self {
        Self { first: Role { name, warps, registers: None }, second: None }
    }

    /// Returns the roles in the order of their warps.
    pub fn roles(&self) -> impl Iterator<Item = &Role> {
        std::iter::once(&self.first).chain(&self.second)
    }

    /// Warps of all roles.
    pub fn warps(&self) -> u32 {
        self.roles().map(|role| role.warps).sum()
    }
}
