//! Computes the number of blocks of a launch from the size of its problem.

use std::fmt;

/// The size of a launch's problem, in the terms of `docs/format.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Batch rows; 0 for kernels without a batch.
    pub m: u32,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
}

impl GemmShape {
    /// A problem without weights: `m` units that the blocks of a grid share ([`Work::Rows`]).
    pub const fn rows(m: u32) -> Self {
        Self { m, n: 0, k: 0 }
    }
}

/// The units of work that the blocks of a grid share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Work {
    /// `m` units: rows of activations, or another unit that an activation family defines (docs/adr/0008).
    Rows,
    /// 64x64 tiles of W: `ceil(n/64) * ceil(k/64)`.
    WeightTiles,
    /// `rows` x `columns` of Y: `ceil(m/rows) * ceil(n/columns)`.
    OutputTiles {
        /// Batch rows of one unit.
        rows: u32,
        /// Output features of one unit.
        columns: u32,
    },
    /// Stream-K: the k steps of these output tiles. A step is 64 wide, and a tile has at most 128 steps, so there are
    /// `min(ceil(k/64), 128)` times as many units. A work unit is one block for each of the `ceil(m/rows)` batch tiles,
    /// so there are at least as many blocks.
    OutputSteps {
        /// Batch rows of a tile of Y.
        rows: u32,
        /// Output features of a tile of Y.
        columns: u32,
    },
}

/// The maximum number of peers that share one tile of Y: each thread of a warpgroup waits for one peer's partial tile.
const STEPS_MAX: u32 = 128;

/// The number of blocks of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LaunchGrid {
    /// A constant number of blocks.
    Fixed(u32),
    /// One block for every `per_block` units.
    Covering {
        /// The work that the grid covers.
        work: Work,
        /// Units of one block.
        per_block: u32,
    },
    /// Blocks that loop until the work is done: as many as the device holds at `blocks_per_sm`, but 0 without work.
    Persistent {
        /// The work that the blocks share.
        work: Work,
        /// Units that a block works on at a time.
        per_block: u32,
        /// Resident blocks of one SM.
        blocks_per_sm: u32,
    },
    /// One cluster for each unit. For tiles of Y, the blocks share the 64-wide k steps, and each has at least one.
    Clusters {
        /// The work that the grid covers.
        work: Work,
        /// Blocks of a cluster.
        cluster: u32,
    },
    /// Clusters that loop until the work is done, one unit at a time: as many as the device holds at one block per SM,
    /// at least one, but 0 without work. The blocks share the 64-wide k steps of a unit, and each has at least one.
    PersistentClusters {
        /// The work that the clusters share.
        work: Work,
        /// Blocks of a cluster.
        cluster: u32,
    },
    /// Groups of blocks that share the rows of W evenly, repeated for every `batch_rows` of the batch. There are as few
    /// groups as fill every SM a whole number of times, up to `blocks_per_sm`; more only if a group's share would
    /// exceed `share`. With `share: None`, they fill every SM `blocks_per_sm` times.
    DistributedRowBlocks {
        /// Batch rows of a group.
        batch_rows: u32,
        /// Rows of W in a row block, a multiple of the 16 rows of a tensor core fragment.
        rows: u32,
        /// The maximum number of row blocks of a group; `None` if unlimited.
        share: Option<u32>,
        /// Blocks of a group.
        cluster: u32,
        /// Resident blocks of one SM.
        blocks_per_sm: u32,
    },
}

impl Work {
    /// Returns the number of units of a problem.
    ///
    /// At most 2^64 - 1, which exceeds any grid.
    pub const fn units(self, problem: GemmShape) -> u64 {
        let GemmShape { m, n, k } = problem;
        match self {
            Self::Rows => m as u64,
            Self::WeightTiles => n.div_ceil(64) as u64 * k.div_ceil(64) as u64,
            Self::OutputTiles { rows, columns } => m.div_ceil(rows) as u64 * n.div_ceil(columns) as u64,
            Self::OutputSteps { rows, columns } => {
                let steps = if k.div_ceil(64) < STEPS_MAX { k.div_ceil(64) } else { STEPS_MAX };
                (m.div_ceil(rows) as u64 * n.div_ceil(columns) as u64).saturating_mul(steps as u64)
            }
        }
    }

    /// Returns the blocks of a stream-K work unit; 0 for other work.
    const fn unit_blocks(self, problem: GemmShape) -> u64 {
        match self {
            Self::OutputSteps { rows, .. } if problem.n != 0 && problem.k != 0 => problem.m.div_ceil(rows) as u64,
            _ => 0,
        }
    }
}

impl LaunchGrid {
    /// Returns the stream-K work units of a launch of `blocks` blocks ([`Work::OutputSteps`]); 0 for other work.
    pub(super) fn work_units(self, problem: GemmShape, blocks: u32) -> u64 {
        match self {
            Self::Persistent { work, .. } => u64::from(blocks).checked_div(work.unit_blocks(problem)).unwrap_or(0),
            _ => 0,
        }
    }

    /// Returns the number of blocks for a problem on a device with `sms` multiprocessors; 0 if there is no work.
    ///
    /// Returns `None` if the grid exceeds its limit (2^31 - 1), or if `k` has fewer steps than a cluster has blocks.
    ///
    /// ```
    /// # use unweight_codegen::plan::{LaunchGrid, GemmShape, Work};
    /// let work = Work::OutputTiles { rows: 128, columns: 128 };
    /// let grid = LaunchGrid::Persistent { work, per_block: 1, blocks_per_sm: 1 };
    /// assert_eq!(grid.blocks(GemmShape { m: 1, n: 4096, k: 4096 }, 132), Some(32));
    /// assert_eq!(grid.blocks(GemmShape { m: 300, n: 14336, k: 4096 }, 132), Some(132));
    /// ```
    pub fn blocks(self, problem: GemmShape, sms: u32) -> Option<u32> {
        let blocks = match self {
            Self::Fixed(blocks) => u64::from(blocks),
            Self::Covering { work, per_block } => work.units(problem).div_ceil(u64::from(per_block)),
            Self::Persistent { work, per_block, blocks_per_sm } => {
                let needed = work.units(problem).div_ceil(u64::from(per_block));
                needed.min(u64::from(sms) * u64::from(blocks_per_sm)).max(work.unit_blocks(problem))
            }
            Self::Clusters { work, cluster } => match work.units(problem) {
                0 => 0,
                _ if !matches!(work, Work::Rows) && problem.k.div_ceil(64) < cluster => return None,
                units => units.saturating_mul(u64::from(cluster)),
            },
            Self::PersistentClusters { work, cluster } => match work.units(problem) {
                0 => 0,
                _ if problem.k.div_ceil(64) < cluster => return None,
                units => units.min(u64::from(sms / cluster).max(1)) * u64::from(cluster),
            },
            Self::DistributedRowBlocks { batch_rows, rows, share, cluster, blocks_per_sm } => {
                let batch_tiles = u64::from(problem.m.div_ceil(batch_rows));
                let all = u64::from(problem.n.div_ceil(rows));
                if batch_tiles == 0 || all == 0 {
                    return Some(0);
                }
                let copies = batch_tiles * u64::from(cluster);
                let groups_filling = |times: u32| (u64::from(sms) * u64::from(times) / copies).clamp(1, all);
                let groups = match share.map(u64::from) {
                    None => groups_filling(blocks_per_sm),
                    Some(max_share) => (1..=blocks_per_sm)
                        .map(groups_filling)
                        .find(|groups| all.div_ceil(*groups) <= max_share)
                        .unwrap_or(all.div_ceil(max_share)),
                };
                groups * copies
            }
        };
        // 2^31 - 1: the limit of gridDim.x since compute capability 3.0.
        i32::try_from(blocks).ok().map(|blocks| blocks.unsigned_abs())
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows => f.write_str("rows"),
            Self::WeightTiles => f.write_str("tiles of W"),
            Self::OutputTiles { rows, columns } => write!(f, "{rows} x {columns} tiles of Y"),
            Self::OutputSteps { rows, columns } => {
                write!(f, "{rows} x {columns} tiles of Y x min(k / 64, {STEPS_MAX})")
            }
        }
    }
}

impl fmt::Display for LaunchGrid {
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
            Self::Clusters { work, cluster } => write!(f, "a cluster of {cluster} for each of the {work}"),
            Self::PersistentClusters { work, cluster } => {
                write!(f, "persistent, clusters of {cluster}, min({work}, SMs / {cluster})")
            }
            Self::DistributedRowBlocks { batch_rows, rows, share, cluster, blocks_per_sm } => {
                write!(f, "blocks of {rows} rows of W distributed over ")?;
                match cluster {
                    1 => f.write_str("blocks")?,
                    _ => write!(f, "clusters of {cluster}")?,
                }
                match share {
                    Some(share) => write!(f, ", at most {share} each, SMs x 1..={blocks_per_sm} if that will do")?,
                    None => write!(f, ", SMs x {blocks_per_sm}")?,
                }
                write!(f, "; for each {batch_rows} batch rows")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_the_work_and_stay_within_the_limit() {
        let problem = GemmShape { m: 129, n: 130, k: 65 };
        assert_eq!(LaunchGrid::Covering { work: Work::WeightTiles, per_block: 4 }.blocks(problem, 132), Some(2));
        assert_eq!(Work::OutputTiles { rows: 128, columns: 64 }.units(problem), 6);
        let empty = GemmShape { m: 0, n: 0, k: 0 };
        let persistent = LaunchGrid::Persistent { work: Work::WeightTiles, per_block: 4, blocks_per_sm: 2 };
        assert_eq!(persistent.blocks(empty, 132), Some(0));
        let huge = GemmShape { m: 1, n: u32::MAX, k: u32::MAX };
        assert_eq!(persistent.blocks(huge, 132), Some(264));
        assert_eq!(LaunchGrid::Covering { work: Work::WeightTiles, per_block: 1 }.blocks(huge, 132), None);
        let clusters = |cluster| LaunchGrid::Clusters { work: Work::OutputTiles { rows: 128, columns: 64 }, cluster };
        assert_eq!(clusters(2).blocks(problem, 132), Some(12));
        assert_eq!(clusters(4).blocks(problem, 132), None, "65 of k are two steps");
        assert_eq!(clusters(4).blocks(empty, 132), Some(0));
        assert_eq!(clusters(64).blocks(huge, 132), None);
        let looping =
            |cluster| LaunchGrid::PersistentClusters { work: Work::OutputTiles { rows: 128, columns: 64 }, cluster };
        assert_eq!(looping(2).blocks(problem, 132), Some(12));
        assert_eq!(looping(2).blocks(problem, 7), Some(6), "on a part of the device: three clusters for six tiles");
        assert_eq!(looping(2).blocks(problem, 1), Some(2), "one cluster at least");
        assert_eq!(looping(4).blocks(problem, 132), None, "65 of k are two steps");
        assert_eq!(looping(4).blocks(empty, 132), Some(0));
        assert_eq!(looping(4).blocks(huge, 132), Some(132));
    }

    #[test]
    fn rows_of_activations_need_no_weights() {
        let (work, rows) = (Work::Rows, GemmShape::rows);
        let covering = |per_block| LaunchGrid::Covering { work, per_block };
        assert_eq!(covering(1).blocks(rows(257), 132), Some(257));
        assert_eq!(covering(8).blocks(rows(257), 132), Some(33));
        assert_eq!(covering(1).blocks(rows(0), 132), Some(0));
        assert_eq!(covering(1).blocks(rows(u32::MAX), 132), None);
        let clusters = LaunchGrid::Clusters { work, cluster: 8 };
        assert_eq!(clusters.blocks(rows(3), 132), Some(24), "no k to share");
        assert_eq!(LaunchGrid::Persistent { work, per_block: 1, blocks_per_sm: 2 }.blocks(rows(300), 132), Some(264));
    }

    #[test]
    fn shares_of_k_have_a_block_for_every_batch_tile() {
        let work = Work::OutputSteps { rows: 64, columns: 128 };
        let grid = LaunchGrid::Persistent { work, per_block: 1, blocks_per_sm: 1 };
        assert_eq!(grid.blocks(GemmShape { m: 1, n: 128, k: 4096 }, 132), Some(64));
        assert_eq!(grid.blocks(GemmShape { m: 1, n: 128, k: 16384 }, 132), Some(128));
        assert_eq!(grid.blocks(GemmShape { m: 256, n: 4096, k: 4096 }, 132), Some(132));
        assert_eq!(grid.blocks(GemmShape { m: 64 * 200, n: 64, k: 64 }, 132), Some(200));
        assert_eq!(grid.blocks(GemmShape { m: 64, n: 0, k: 64 }, 132), Some(0));
        // A single work unit has whole tiles, whatever its number of blocks.
        assert_eq!(grid.work_units(GemmShape { m: 64 * 200, n: 64, k: 64 }, 200), 1);
        assert_eq!(grid.work_units(GemmShape { m: 256, n: 4096, k: 4096 }, 132), 33);
        assert_eq!(grid.work_units(GemmShape { m: 0, n: 0, k: 0 }, 0), 0);
    }

    /// The grids with which docs/records/2026-11-21/matmul-packed-log.md measured each shape: (n, maximum row blocks of
    /// a group, cluster, blocks per SM) -> blocks.
    #[test]
    fn stream_k_grids_match_the_measured_ones() {
        let cases = [
            (1024, 1, 2, 2, 128),
            (4096, 2, 1, 1, 132),
            (4096, 2, 1, 2, 132),
            (6144, 2, 1, 2, 264),
            (6144, 3, 1, 2, 132),
            (8192, 4, 1, 1, 132),
            (8192, 2, 1, 2, 264),
            (10240, 5, 1, 1, 132),
            (10240, 3, 1, 2, 264),
            (14336, 4, 1, 2, 264),
            (28672, 4, 1, 2, 448),
            (128_256, 4, 1, 2, 2004),
        ];
        for (n, share, cluster, blocks_per_sm, blocks) in cases {
            let grid = LaunchGrid::DistributedRowBlocks {
                batch_rows: 8,
                rows: 16,
                share: Some(share),
                cluster,
                blocks_per_sm,
            };
            assert_eq!(grid.blocks(GemmShape { m: 1, n, k: 4096 }, 132), Some(blocks), "n = {n}, {grid}");
        }
        let stream =
            LaunchGrid::DistributedRowBlocks { batch_rows: 8, rows: 16, share: None, cluster: 1, blocks_per_sm: 2 };
        assert_eq!(stream.blocks(GemmShape { m: 8, n: 28672, k: 64 }, 132), Some(264));
    }

    /// Kernels rely on this on devices of any size: a group has at most `share` row blocks, and every batch tile has
    /// the same number of groups.
    #[test]
    fn groups_have_at_most_share_row_blocks() {
        for sms in [1, 7, 78, 114, 132] {
            for cluster in [1, 2, 4, 8] {
                for n in (64..=4096).step_by(64).chain([128_256]) {
                    for (m, max_share) in [(1, 1), (8, 3), (9, 4), (1000, 8)] {
                        let grid = LaunchGrid::DistributedRowBlocks {
                            batch_rows: 8,
                            rows: 16,
                            share: Some(max_share),
                            cluster,
                            blocks_per_sm: 2,
                        };
                        let blocks = grid.blocks(GemmShape { m, n, k: 64 }, sms).unwrap();
                        let copies = cluster * m.div_ceil(8);
                        assert_eq!(blocks % copies, 0);
                        let groups = blocks / copies;
                        assert!(
                            groups >= 1 && groups <= n / 16 && (n / 16).div_ceil(groups) <= max_share,
                            "{grid}: {groups}"
                        );
                    }
                }
            }
        }
        let grid =
            LaunchGrid::DistributedRowBlocks { batch_rows: 8, rows: 16, share: Some(4), cluster: 1, blocks_per_sm: 2 };
        assert_eq!(grid.blocks(GemmShape { m: 0, n: 64, k: 64 }, 132), Some(0));
        assert_eq!(grid.blocks(GemmShape { m: u32::MAX, n: u32::MAX, k: 64 }, 132), None);
    }
}
