//! Constants of the time model, fitted to measurements on an H200 (docs/records/2026-11-21/matmul-packed-log.md; of
//! `gemm_wgmma`: 2026-11-27/matmul-wgmma.csv).

/// Multiprocessors of an H200.
pub(super) const H200_SMS: f64 = 132.0;
/// Read bandwidth of an H200's memory with enough bytes in flight, bytes per us.
pub(super) const MEMORY: f64 = 4.6e6;
/// Read bandwidth of one multiprocessor, bytes per us.
pub(super) const MEMORY_PER_SM: f64 = 60e3;
/// Time in flight of a byte at the full rate, us: rings smaller than rate times latency cannot reach that rate.
pub(super) const MEMORY_LATENCY_US: f64 = 1.2;
/// Overhead of a launch in us: ramp, latency of the last tiles, reduction.
pub(super) const LAUNCH_US: f64 = 4.2;
/// Overhead of a launch in us if the previous kernel hides the ramp.
pub(super) const DEPENDENT_LAUNCH_US: f64 = 1.9;
/// Rate at which `gemm_mma` reads X from the L2 cache while it reads weights, bytes per us.
pub(super) const CACHED_X: f64 = 22e6;
/// Time of a row block by 64 of k in `gemm_mma`: us to decode, and us per 8 batch rows.
pub(super) const SMALL_STEP_US: (f64, f64) = (2.6e-3, 1.6e-3);
/// Idle time of multiprocessors per additional wave of blocks, us: with one block per multiprocessor, and with several.
pub(super) const SMALL_WAVE_US: (f64, f64) = (2.0, 0.4);
/// Cost of the exchange across a cluster, us.
pub(super) const CLUSTER_US: f64 = 1.0;
/// Share of the tensor cores' peak that cuBLAS reached on an H200: 7.0e8 of 10.7e8 operations per us (4096 operations
/// per clock and Hopper multiprocessor).
pub(super) const CUBLAS_SHARE: f64 = 0.654;
/// Bytes per compact weight (docs/adr/0013-compact.md: 10.83 to 10.92 bits).
pub(super) const COMPACT_BYTES: f64 = 1.36;
/// Time to decode a 64 x 64 tile in `gemm_compact`: us on a multiprocessor that always has a warp ready, and us for one
/// warp alone.
pub(super) const COMPACT_TILE_US: (f64, f64) = (0.149, 1.79);
/// Time that 8 more batch rows add to a warp's tile, us; to a multiprocessor's tile they add an eighth.
pub(super) const COMPACT_ROWS_US: f64 = 0.175;
/// Cost of the exchange across a cluster in `gemm_compact`, us per wave of blocks.
pub(super) const COMPACT_CLUSTER_US: f64 = 2.34;
/// Start and end of a wave of blocks in `gemm_compact`, us: tables, first copies, the last warp's tile.
pub(super) const COMPACT_WAVE_US: f64 = 1.95;
/// Read bandwidth of `gemm_compact` as a share of the memory's.
pub(super) const COMPACT_READS: f64 = 0.896;
/// Up to this batch `gemm_wgmma` multiplies mostly zeros and was rarely the fastest.
pub(in crate::choose) const SMALL_BATCH: u32 = 32;
/// Up to this batch, batch tiles of 8 and 16 rows are considered.
pub(in crate::choose) const SMALL_TILES_BATCH: u32 = 128;
/// Overhead of a `gemm_wgmma` launch in us if the previous kernel hides the ramp, and what is added if it does not.
pub(super) const WIDE_LAUNCH_US: (f64, f64) = (1.5, 2.3);
/// Added by a cooperative launch, us: it waits until the previous kernel ends.
pub(super) const WIDE_COOPERATIVE_US: f64 = 1.4;
/// Rate at which `gemm_wgmma` reads weights, bytes per us.
pub(super) const WIDE_MEMORY: f64 = 4.4e6;
/// Time of the tensor cores for 64 features by 64 of k of one batch row in `gemm_wgmma`, us.
pub(super) const WIDE_ROW_US: f64 = 1.3e-3;
/// Time to decode 64 of k in `gemm_wgmma`, us, by the number of warpgroups less one: each decodes a tile, and more of
/// them hide more of each other's waits.
pub(super) const WIDE_DECODE_US: [f64; 3] = [0.254, 0.300, 0.376];
/// Factor of a step if multiprocessors have several tiles and the card gets warm.
pub(super) const WIDE_WARM: f64 = 1.12;
/// Otherwise, a step is longer by the first factor times the busy share of the multiprocessors less the second: with
/// idle ones, the clock is higher.
pub(super) const WIDE_BUSY: (f64, f64) = (0.28, 0.75);
/// Time to pass sums from block to block in stream-K, us: once, and for 128 features by 256 batch rows.
pub(super) const WIDE_FIXUP_US: (f64, f64) = (5.1, 7.4);
/// Share by which stream-K's steps are longer if X has the size of the L2 cache: its blocks are at different k.
pub(super) const WIDE_X_MISSES: f64 = 0.068;
/// Bytes of X at which [`WIDE_X_MISSES`] holds in full.
pub(super) const WIDE_X_BYTES: f64 = 60e6;
/// Time to exchange sums across a cluster in `gemm_wgmma`, us: once, and for 128 features by 256 batch rows.
pub(super) const WIDE_CLUSTER_US: (f64, f64) = (1.4, 3.4);
/// Share of the multiprocessors that clusters of more than 2 can use: 120 of 132.
pub(super) const WIDE_CLUSTERED: f64 = 10.0 / 11.0;
