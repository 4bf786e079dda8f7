// uw_sm90a_gemm_mma_b8_r1w16p2c2_esc_store
// Y[m,n] = X[m,k] * W[n,k]^T, W packed to 12 bits, exact escapes; 8 batch rows x 16 of n per cluster of 2, one task, a ring of 2 per warp.
//
// Blocks of 512 threads, at least 1 per SM, with 82176 B of dynamic shared
// memory. Grid: blocks of 16 rows of W distributed over clusters of 2, at most 1 each, SMs x 1..=1 if that will do; for each 8 batch rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/gemm_mma.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kBatchTile = 8;
    static constexpr uw::u32 kRowBlocks = 1;
    static constexpr uw::u32 kWarps = 16;
    static constexpr uw::u32 kStages = 2;
    static constexpr uw::u32 kCluster = 2;
    static constexpr uw::SmemCopy kCopy = uw::SmemCopy::kBulk;
    static constexpr bool kPersistent = false;
    static constexpr bool kEscapes = true;
    static constexpr bool kPdl = false;
    static constexpr uw::Epilogue kEpilogue = uw::Epilogue::kStore;
    static constexpr bool kDump = false;
    static constexpr bool kBf16 = false;
};

using Smem = uw::gemm_mma::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::GemmPackedArgs) == 384, "GemmPackedArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(uw::packed::kGateRows == 8, "rows of a gate: host and kernel disagree");
static_assert(Smem::kRings == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBarriers == 81920, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 82176, "shared memory: plan and kernel disagree");
static_assert(uw::gemm_mma::kThreads<Config> == 512, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(512, 1)
uw_sm90a_gemm_mma_b8_r1w16p2c2_esc_store(const __grid_constant__ uw::GemmPackedArgs args) {
    uw::gemm_mma::run<Config>(args);
}
