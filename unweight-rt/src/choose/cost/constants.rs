//! What the model of times was fitted to: measurements on an H200
//! (docs/records/2026-11-21/matmul-packed-log.md).

/// Multiprocessors of an H200.
pub(super) const H200_SMS: f64 = 132.0;
/// Plain reads of an H200's memory, bytes per us, with enough of them in flight.
pub(super) const MEMORY: f64 = 4.6e6;
/// What one multiprocessor can read of it.
pub(super) const MEMORY_PER_SM: f64 = 60e3;
/// How long a byte is in flight at the full rate, us: rings that hold less than their product cannot reach it.
pub(super) const MEMORY_LATENCY_US: f64 = 1.2;
/// What a launch costs beside its work, us: ramp, last tiles' latency, reduction.
pub(super) const LAUNCH_US: f64 = 4.2;
/// The same where the kernel before hides the ramp.
pub(super) const DEPENDENT_LAUNCH_US: f64 = 1.9;
/// X from the second-level cache as `gemm_mma` reads it beside the weights: bytes per us that its time grows with.
pub(super) const CACHED_X: f64 = 22e6;
/// A row block by 64 of k: us for the decode, and for each 8 batch rows.
pub(super) const SMALL_STEP_US: (f64, f64) = (2.6e-3, 1.6e-3);
/// Where not all blocks fit at once, the last to come keep some multiprocessors waiting, us: all of each one, or half.
pub(super) const SMALL_WAVE_US: (f64, f64) = (2.0, 0.4);
/// What meeting across a cluster costs, us.
pub(super) const CLUSTER_US: f64 = 1.0;
/// Of what tensor cores could do (4096 operations a clock of a Hopper's multiprocessor), what cuBLAS got of an H200:
/// 7.0e8 a us of 10.7e8.
pub(super) const CUBLAS_SHARE: f64 = 0.654;
/// Bytes of a compact weight (docs/adr/0013-compact.md: 10.83 to 10.92 bits).
pub(super) const COMPACT_BYTES: f64 = 1.36;
/// A tile of 64 x 64 that `gemm_compact` decodes: us of a multiprocessor that always has a warp to run, and us of one
/// warp by itself.
pub(super) const COMPACT_TILE_US: (f64, f64) = (0.149, 1.79);
/// What 8 batch rows more add to a warp's tile, us; to a multiprocessor's an eighth of it.
pub(super) const COMPACT_ROWS_US: f64 = 0.175;
/// What meeting across a cluster costs there, us, each time that blocks come and go.
pub(super) const COMPACT_CLUSTER_US: f64 = 2.34;
/// The start and the end of a wave of blocks: tables, first copies, the last warp's tile, us.
pub(super) const COMPACT_WAVE_US: f64 = 1.95;
/// The rate at which such products read, as a share of the memory's.
pub(super) const COMPACT_READS: f64 = 0.896;
/// Up to this batch `gemm_wgmma` multiplies mostly zeros and was hardly ever best.
pub(in crate::choose) const SMALL_BATCH: u32 = 32;
/// A launch of `gemm_wgmma` beside its steps, us.
pub(super) const WIDE_LAUNCH_US: f64 = 5.5;
/// And the rate at which it reads weights, bytes per us.
pub(super) const WIDE_MEMORY: f64 = 4.4e6;
/// What meeting across a cluster costs there where 128 features by 256 batch rows are summed, us.
pub(super) const WIDE_CLUSTER_US: f64 = 4.0;
/// Of the multiprocessors, those that clusters of more than 2 can have: 120 of 132.
pub(super) const WIDE_CLUSTERED: f64 = 10.0 / 11.0;
