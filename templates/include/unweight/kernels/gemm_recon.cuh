// Reconstructive GEMM (report, section 8): Y[m, n] = X[m, k] * W[n, k]^T, from weights stored as sign-mantissa bytes
// and either exponent bytes or palette nibbles. BF16 weights are joined in shared memory right before the tensor cores
// read them.
//
// Config (the axes of unweight-codegen/src/family/gemm_recon.rs)
//   WeightSource kSource   kExponent, or kPalette
//   u32 kNTiles            1..4 adjacent tiles of W
//   u32 kStages            >= 2
//   u32 kSplits            1, 2 or 4; above 1 kNTiles = 1: split-K over this many blocks of a cluster
//   u32 kVerbatimRows      0..64, palette source only
//   Epilogue kEpilogue     kStore or kStoreAdd
// Launch: kThreads<Config> = 384 threads, 1 CTA per SM, clusters of kSplits, grid = min(blocks of the plan, SMs),
// Smem<Config>::kBytes of dynamic shared memory.
//         n is a multiple of 64 * kNTiles, k of 64 and at least 64 * kSplits, m is any.
//
// Two shapes, chosen by kNTiles
//   batch_rows    kNTiles = 1, 3, 4   Y: X is on the rows of wgmma. Task = 128 rows of X by 64 * kNTiles rows of W. All
//                                     consumers share the weights that all of them joined.
//   weight_rows   kNTiles = 2         Y^T: W is on the rows of wgmma. Task = 64, 128 or 256 rows of X by 128 rows of W.
//                                     A warpgroup joins and multiplies its own 64.
// Tasks are ordered along m first, so CTAs that run at the same time share their weights in L2. Their k steps start at
// different places (SourceRing::rotated).
//
// Roles, 384 threads: launch 384 x 168 = 64512 registers = 128 x 40 (producer) + 256 x 232 (consumers)
//   warp 0          sources of W: per step and tile one 64x64 box of sign-mantissa (TMA), one bulk copy of 4096 B of
//                   exponents or 2048 B of nibbles;
//                   palette: TileMetadata, read 32 / kNTiles steps at a time one batch ahead, and exactly the tile's
//                   verbatim rows
//   warp 1          X: 64x64 boxes, 128-byte swizzle; only boxes with rows of the batch
//   warps 2, 3      idle (a warpgroup is the unit of setmaxnreg)
//   warps 4..11     two warpgroups: join, then wgmma, with up to two groups in flight
//
// One step t of a consumer
//   join(t) -> B[t%3] | release sources(t) | load sources(t+1) into registers | proxy fence | wait wgmma(t-2) | barrier
//   | release X(t-2) | wgmma(t) on X(t), B[t%3]
// Three B buffers, because join(t+1) starts while wgmma(t) is queued behind wgmma(t-1): with two, the tensor cores
// would be idle at each barrier.
//   batch_rows     barrier of 256: a lane joins 16 weights of each tile; wgmma m64 n(64*kNTiles) k16. With m <= 64, or
//                  in a half-empty last task, the second warpgroup joins but issues no wgmma.
//   weight_rows    barrier of 128: a lane joins 32 weights of its warpgroup's tile; wgmma m64 n(64|128|256) k16. The
//                  warpgroups drift apart, so that one joins while the other multiplies, and each weight is read by one
//                  wgmma instead of two. Tasks that do not fill a wave of the grid are cut in two or four along m if
//                  the pieces fit one wave.
//
// kSplits > 1 (batch_rows): each block of a cluster has a contiguous share of the k steps of one task, with its own
// rings. After the last step, the partial sums are exchanged through distributed shared memory, over the drained X:
// each block reduces and stores 64 / kSplits columns of the task. There are two cluster barriers per task: when the
// sums are in shared memory, and when they have been read. The loading warpgroup takes part, so that X is not refilled
// earlier.
//
// Barriers
//   source full   [kStages]    1 arrival (warp 0) + bytes          source empty   [kStages]    8 arrivals: one per
//                                                                                              consumer warp, after its
//                                                                                              lanes have joined
//   x full        [slots]      1 arrival (warp 1) + bytes          x empty        [slots]      batch_rows 1 arrival,
//                                                                                              weight_rows 2: by the
//                                                                                              first thread of those
//                                                                                              that met
//   X has its own ring: the tensor cores hold it two steps longer than the sources are held.
//
// Shared memory = X + 3 * kNTiles * 8192 (B) + kStages * kNTiles * (4096 + 4096 | 2048 + kVerbatimRows * 64 +
// (kVerbatimRows ? 8 : 0)) + 16 * (kStages + x slots)
//   batch_rows    X = (kStages + 1) * 16384 in kStages + 1 slots
//   weight_rows   X = 98304 in 3, 6 or 12 slots of 256, 128 or 64 rows, whatever kStages is; barriers for 12 slots
// Every variant of Table 5 fits in 232448 B for any kVerbatimRows.
// Global reads per step: kNTiles * (8192 | 6144 + 16 + 64 per verbatim row) + 8192 per 64 rows of X (from L2 after the
// first).
//
// Bound: shared memory at 128 B per cycle, and the latency of a join. Per 128 x 256 x 64 of product, batch_rows n4
// moves 80 KB for wgmma and 64 KB for joining (exponents), weight_rows 80 and 32. A wgmma issues only after the
// previous one has left the queue, so a warpgroup that joins does not multiply: that, not bytes, is the remaining cost.
// With n = 4096 there are 32 tasks (n2) or 64 (n1) for m <= 128; kSplits is for such shapes. Measurements:
// docs/records; experiments: docs/records/2026-11-20/matmul-reconstructive-log.md.
//
// Sources: report section 8 (roles, sources, variants); ThunderKittens (load-compute-finish). Changed: weights are
// joined while earlier wgmma run, X has its own ring, the palette lookup has no mux (mma/reconstruct.cuh), tiles are
// ordered for reuse of W, and with two tiles the operands are swapped.
#pragma once

#include "unweight/kernels/gemm_recon/batch_rows.cuh"
#include "unweight/kernels/gemm_recon/weight_rows.cuh"

namespace uw::gemm_recon {

template <class Config, bool kWeightRows = Config::kNTiles == 2>
struct Shape {
    using Smem = batch_rows::Smem<Config>;
    using Kernel = batch_rows::Kernel<Config, Config::kSplits>;
};
template <class Config>
struct Shape<Config, true> {
    static_assert(Config::kSplits == 1, "splits are of one tile");
    using Smem = weight_rows::Smem<Config>;
    using Kernel = weight_rows::Kernel<Config>;
};

template <class Config>
using Smem = typename Shape<Config>::Smem;
template <class Config>
using Kernel = typename Shape<Config>::Kernel;

template <class Config>
UW_DEVICE void run(const GemmReconArgs& args) {
    pipeline::run<Kernel<Config>>(args);
}

}  // namespace uw::gemm_recon
