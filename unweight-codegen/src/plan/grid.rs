//! From a problem to a number of blocks.

use std::fmt;

/// The size of the problem that a launch is for, in the terms of `docs/format.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Batch rows; 0 for kernels without a batch.
    pub m: u32,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
}

/// What the blocks of a grid share out among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// 64x64 tiles of W: `ceil(n/64) * ceil(k/64)`.
    WeightTiles,
    /// `rows` x `columns` of Y: `ceil(m/rows) * ceil(n/columns)`.
    OutputTiles {
        /// Batch rows of one unit.
        rows: u32,
        /// Output features of one unit.
        columns: u32,
    },
}

/// How many blocks a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// This many, whatever the problem.
    Fixed(u32),
    /// One block for every `per_block` units.
    Covering {
        /// What is covered.
        work: Work,
        /// Units of one block.
        per_block: u32,
    },
    /// Blocks that loop until the work is done: as many as the device holds at `blocks_per_sm`, but none without work.
    Persistent {
        /// What is shared out.
        work: Work,
        /// Units that a block works on at a time.
        per_block: u32,
        /// Resident blocks of one SM.
        blocks_per_sm: u32,
    },
}

impl Work {
    /// Units of a problem.
    pub const fn units(self, problem: Problem) -> u64 {
        let Problem { m, n, k } = problem;
        match self {
            Self::WeightTiles => n.div_ceil(64) as u64 * k.div_ceil(64) as u64,
            Self::OutputTiles { rows, columns } => m.div_ceil(rows) as u64 * n.div_ceil(columns) as u64,
        }
    }
}

impl Grid {
    /// Blocks for a problem on a device with `sms` multiprocessors; 0 if there is nothing to do.
    ///
    /// `None` if it is more than a grid may have (2^31 - 1).
    ///
    /// ```
    /// # use unweight_codegen::plan::{Grid, Problem, Work};
    /// let grid = Grid::Persistent { work: Work::OutputTiles { rows: 128, columns: 128 }, per_block: 1, blocks_per_sm: 1 };
    /// assert_eq!(grid.blocks(Problem { m: 1, n: 4096, k: 4096 }, 132), Some(32));
    /// assert_eq!(grid.blocks(Problem { m: 300, n: 14336, k: 4096 }, 132), Some(132));
    /// ```
    pub fn blocks(self, problem: Problem, sms: u32) -> Option<u32> {
        let blocks = match self {
            Self::Fixed(blocks) => u64::from(blocks),
            Self::Covering { work, per_block } => work.units(problem).div_ceil(u64::from(per_block)),
            Self::Persistent { work, per_block, blocks_per_sm } => {
                let needed = work.units(problem).div_ceil(u64::from(per_block));
                needed.min(u64::from(sms) * u64::from(blocks_per_sm))
            }
        };
        // 2^31 - 1: the limit of gridDim.x since compute capability 3.0.
        i32::try_from(blocks).ok().map(|blocks| blocks.unsigned_abs())
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WeightTiles => f.write_str("tiles of W"),
            Self::OutputTiles { rows, columns } => write!(f, "{rows} x {columns} tiles of Y"),
        }
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(1) => f.write_str("1 block"),
            Self::Fixed(blocks) => write!(f, "{blocks} blocks"),
            Self::Covering { work, per_block: 1 } => write!(f, "one block for each of the {work}"),
            Self::Covering { work, per_block } => write!(f, "one block for every {per_block} {work}"),
            Self::Persistent { work, per_block, blocks_per_sm } => {
                let units = if *per_block == 1 { work.to_string() } else { format!("{work} / {per_block}") };
                write!(f, "persistent, min({units}, SMs x {blocks_per_sm})")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_the_work_and_stay_within_the_limit() {
        let problem = Problem { m: 129, n: 130, k: 65 };
        assert_eq!(Grid::Covering { work: Work::WeightTiles, per_block: 4 }.blocks(problem, 132), Some(2));
        assert_eq!(Work::OutputTiles { rows: 128, columns: 64 }.units(problem), 6);
        let nothing = Problem { m: 0, n: 0, k: 0 };
        let persistent = Grid::Persistent { work: Work::WeightTiles, per_block: 4, blocks_per_sm: 2 };
        assert_eq!(persistent.blocks(nothing, 132), Some(0));
        let huge = Problem { m: 1, n: u32::MAX, k: u32::MAX };
        assert_eq!(persistent.blocks(huge, 132), Some(264));
        assert_eq!(Grid::Covering { work: Work::WeightTiles, per_block: 1 }.blocks(huge, 132), None);
    }
}
