// Packed matmul of a mixture of experts, small batches of each: for every pair of a token and one of its
// experts, Y[pair, n] = X[row of pair, k] * W[expert, n, k]^T from one packed tensor (docs/format.md, A.9) in which the
// experts are one below the other. Routing is on the device: a block reads an item, which names an expert and at most
// kBatchTile entries of a list of pairs that is sorted by expert (kernels/route.cuh), and does with those rows what
// gemm_mma does with neighbours.
//
// Config  that of gemm_mma (kernels/gemm_mma.cuh), whose kernel this is: copies by cp.async, no cluster, not
//         persistent, kEpilogue kStore or kSiluMul
//   bool kPdl   programmatic dependent launch: everything is touched after griddepcontrol.wait, because the items are
//               what a kernel before has written
//
// Launch: kThreads threads, Smem::kBytes of dynamic shared memory,
//   grid = items * ceil(n / 16 / kRowBlocks). The row blocks of an expert are distributed evenly over the groups
//   of each item.
//   A grid is launched for as many items as there may be: those without rows are last, and their blocks leave at once.
//
// Roles, barriers, shared memory: those of gemm_mma with kAsync.
//   Items, pairs and X come from kernels before: griddepcontrol.wait, or the stream's order, stands before their reads.
// Sums: a row of Y is added up over tile columns of a warp, then over warps, whatever the batch tile and the other rows
//   of the item are: its bits follow from the row of X, the expert and kWarps.
// Bound: device memory, 1.5 * n * k bytes for each expert that has pairs, once for every kBatchTile of them.
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
