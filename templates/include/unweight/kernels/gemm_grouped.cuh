// Packed GEMM for mixture of experts, with few rows per expert: for every pair of a token and one of its experts,
// Y[pair, n] = X[row of pair, k] * W[expert, n, k]^T, from one packed tensor (docs/format.md, A.9) in which the experts
// are stacked along n, or from one bf16 matrix, for experts that cannot be packed. Routing stays on the device: a block
// reads an item, which names an expert and at most kBatchTile entries of a list of pairs sorted by expert
// (kernels/route.cuh). It processes those rows as gemm_mma processes contiguous rows.
//
// Config  that of gemm_mma (kernels/gemm_mma.cuh), whose kernel this is: cp.async copies, no cluster, not persistent,
//         kEpilogue kStore or kSiluMul
//   bool kBf16  W is bf16 [experts * n, k], row-major, at GemmGroupedArgs::packed: heads and escapes are not read, and
//               the scale is 1. Otherwise W is packed, with escapes
//   bool kPdl   programmatic dependent launch: all global accesses follow griddepcontrol.wait, because a preceding
//               kernel writes the items
//
// Launch: kThreads threads, Smem::kBytes of dynamic shared memory,
//   grid = items * ceil(n / 16 / kRowBlocks). The row blocks of an expert are distributed evenly over the groups
//   of each item.
//   The grid is sized for the maximum number of items. Blocks of items without rows exit at once: in lists these are
//   last; if each pair is an item (GemmGroupedArgs::is_pairs), those of experts that this device does not hold.
//
// Roles, barriers, shared memory: those of gemm_mma with kAsync.
//   Preceding kernels write items, pairs and X: griddepcontrol.wait or stream order precedes their reads.
// Order of sums: a row of Y is summed over the tile columns of a warp, then over warps, whatever the batch tile and the
//   other rows of the item are: its bits depend only on the row of X, the expert and kWarps. Bf16 and packed weights
//   give the same bits, because operands differ from weights by a power of two.
// Bound: device memory, 1.5 * n * k bytes (kBf16: 2 * n * k) for each expert that has pairs, once per kBatchTile of
//   them.
#pragma once

#include "unweight/kernels/gemm_mma.cuh"

namespace uw::gemm_grouped {

template <class Config>
constexpr u32 kThreads = gemm_mma::kThreads<Config>;
template <class Config>
using Smem = gemm_mma::Smem<Config>;

template <class Config>
UW_DEVICE void run(const GemmGroupedArgs& args) {
    if constexpr (Config::kPdl) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    gemm_mma::Kernel<Config, GemmGroupedArgs> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    if (kernel.share.blocks == 0) return;
    kernel.run();
}

}  // namespace uw::gemm_grouped
