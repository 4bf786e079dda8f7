// uw_sm90a_gemm_join_exponent_b8_r1w16p2c2_store
// Y[m,n] = X[m,k] * W[n,k]^T, W from decoded exponents; 8 batch rows x 16 of n per cluster of 2, a ring of 2 per warp.
//
// Blocks of 512 threads, at least 1 per SM, with 98560 B of dynamic shared
// memory. Grid: a cluster of 2 for each of the 8 x 16 tiles of Y. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/gemm_join.cuh"

namespace {

struct Config {
    static constexpr uw::JoinSource kSource = uw::JoinSource::kExponent;
    static constexpr uw::u32 kBatchTile = 8;
    static constexpr uw::u32 kRowBlocks = 1;
    static constexpr uw::u32 kWarps = 16;
    static constexpr uw::u32 kStages = 2;
    static constexpr uw::u32 kCluster = 2;
    static constexpr uw::Epilogue kEpilogue = uw::Epilogue::kStore;
};

using Smem = uw::gemm_join::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::GemmReconArgs) == 320, "GemmReconArgs: host and kernel disagree");
static_assert(uw::gemm_join::kBlockRows == 16, "row blocks: host and kernel disagree");
static_assert(Smem::kRings == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBarriers == 98304, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 98560, "shared memory: plan and kernel disagree");
static_assert(uw::gemm_join::kThreads<Config> == 512, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(512, 1)
uw_sm90a_gemm_join_exponent_b8_r1w16p2c2_store(const __grid_constant__ uw::GemmReconArgs args) {
    uw::gemm_join::run<Config>(args);
}
