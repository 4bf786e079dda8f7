// Reconstructive matmul (report, section 8): Y[m, n] = X[m, k] * W[n, k]^T from weights that are stored as
// sign-mantissa bytes and either exponent bytes or palette nibbles. BF16 is put together in shared memory, right before
// the tensor cores read it.
//
// Config (the axes of unweight-codegen/src/family/gemm_recon.rs)
//   WeightSource kSource   kExponent, or kPalette
//   u32 kNTiles            1..4 tiles of W side by side
//   u32 kStages            >= 2
//   u32 kSplits            1, 2 or 4; above 1 kNTiles = 1: blocks of a cluster that share the k of a task
//   u32 kVerbatimRows      0..64, palette source only
//   Epilogue kEpilogue     kStore or kStoreAdd
// Launch: kThreads<Config> = 384 threads, 1 CTA per SM, clusters of kSplits, grid = min(blocks of the plan, SMs),
// Smem<Config>::kBytes of dynamic shared memory.
//         n is a multiple of 64 * kNTiles, k of 64 and at least 64 * kSplits, m is any.
//
// Two shapes, chosen by kNTiles
//   batch_rows    kNTiles = 1, 3, 4   Y: X owns the rows of wgmma. Task = 128 rows of X by 64 * kNTiles rows of W. All
//                                     consumers share what all have joined.
//   weight_rows   kNTiles = 2         Y^T: W owns the rows of wgmma. Task = 64, 128 or 256 rows of X by 128 rows of W.
//                                     A warpgroup joins and multiplies its own 64.
// Tasks run through m first, so CTAs that work side by side share their weights in L2. Their k steps begin at different
// places (SourceRing::rotated).
//
// Roles, 384 threads: launch 384 x 168 = 64512 registers = 128 x 40 (producer) + 256 x 232 (consumers)
//   warp 0          sources of W: per step and tile one 64x64 box of sign-mantissa (TMA), one bulk copy of 4096 B of
//                   exponents or 2048 B of nibbles;
//                   palette: TileMetadata, read 32 / kNTiles steps at a time one batch ahead, and exactly the tile's
//                   verbatim rows
//   warp 1          X: 64x64 boxes, 128-byte swizzle; only those that hold rows of the batch
//   warps 2, 3      idle (a warpgroup is the unit of setmaxnreg)
//   warps 4..11     two warpgroups: join, then wgmma, with up to two groups in flight
//
// One step t of a consumer
//   join(t) -> B[t%3] | release sources(t) | load sources(t+1) into registers | proxy fence | wait wgmma(t-2) | barrier
//   | release X(t-2) | wgmma(t) on X(t), B[t%3]
// Three B buffers, because join(t+1) starts while wgmma(t) is queued behind wgmma(t-1): with two, the tensor cores
// would fall idle at each barrier.
//   batch_rows     barrier of 256: a lane joins 16 weights of each tile; wgmma m64 n(64*kNTiles) k16. With m <= 64 (or
//                  in a last half-empty task) the second
//                  warpgroup joins but issues no wgmma.
//   weight_rows    barrier of 128: a lane joins 32 weights of its warpgroup's tile; wgmma m64 n(64|128|256) k16. The
//                  warpgroups drift apart, so that one joins while the
//                  other multiplies, and each weight is read by one wgmma instead of two. Tasks that do not fill a
//                  round of the grid are cut in two or four along m where the pieces fit one round.
//
// kSplits > 1 (batch_rows): each block of a cluster has a contiguous share of the k steps of one task, with rings of
// its own. When all are multiplied, the partial sums are exchanged through distributed shared memory, over the drained
// X: a block adds up 64 / kSplits columns of the task and stores them. A cluster meets twice a task: when the sums are
// in shared memory, and when they have been read; the loading warpgroup meets with it, so that X is not filled sooner.
//
// Barriers
//   source full   [kStages]    1 arrival (warp 0) + bytes          source empty   [kStages]    8 arrivals: one per
//                                                                                              consumer warp, once its
//                                                                                              lanes have joined
//   x full        [slots]      1 arrival (warp 1) + bytes          x empty        [slots]      batch_rows 1 arrival,
//                                                                                              weight_rows 2: the first
//                                                                                              thread of the threads
//                                                                                              that met
//   X has a ring of its own: the tensor cores hold it two steps longer than the sources are held.
//
// Shared memory = X + 3 * kNTiles * 8192 (B) + kStages * kNTiles * (4096 + 4096 | 2048 + kVerbatimRows * 64 +
// (kVerbatimRows ? 8 : 0)) + 16 * (kStages + x slots)
//   batch_rows    X = (kStages + 1) * 16384 in kStages + 1 slots
//   weight_rows   X = 98304 in 3, 6 or 12 slots of 256, 128 or 64 rows, whatever kStages is; 12 slots' worth of
//                 barriers
// Every Table 5 variant fits 232448 B at every verbatim budget.
// Global reads per step: kNTiles * (8192 | 6144 + 16 + 64 per verbatim row) + 8192 per 64 rows of X (L2 after the
// first).
//
// Bound: shared memory at 128 B per cycle, and the latency of a join. Per 128 x 256 x 64 of product batch_rows n4 moves
// 80 KB for wgmma and 64 KB for joining (exponents), weight_rows 80 and 32. A wgmma is issued only when the one before
// it has left the queue, so a warpgroup that joins does not multiply: that, not bytes, is what is left. With n = 4096
// there are 32 tasks (n2) or 64 (n1) where m <= 128: such shapes are what kSplits is for. Figures: docs/records; what
// was tried: docs/records/2026-11-20/matmul-reconstructive-log.md.
//
// Sources: report section 8 (roles, sources, variants); ThunderKittens (load-compute-finish). Changed: weights are
// joined while earlier wgmma run, X has its own ring, the palette lookup has no mux (mma/reconstruct.cuh), tiles are
// ordered for reuse of W, and with two tiles the operands change places.
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
