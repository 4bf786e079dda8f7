// uw_sm90a_gemm_grouped_b8_r3w4p2_store
// Y[pair,n] = X[row of pair,k] * W[expert of pair,n,k]^T, W packed to 12 bits, exact escapes; 8 pairs x 48 of n per block, a ring of 2 per warp.
//
// Blocks of 128 threads, at least 2 per SM, with 45056 B of dynamic shared
// memory. Grid: one block for each of the 1 x 48 tiles of Y. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/gemm_grouped.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kBatchTile = 8;
    static constexpr uw::u32 kRowBlocks = 3;
    static constexpr uw::u32 kWarps = 4;
    static constexpr uw::u32 kStages = 2;
    static constexpr bool kBf16 = false;
    static constexpr bool kPdl = false;
    static constexpr uw::Epilogue kEpilogue = uw::Epilogue::kStore;
    static constexpr uw::u32 kCluster = 1;
    static constexpr uw::SmemCopy kCopy = uw::SmemCopy::kAsync;
    static constexpr bool kEscapes = true;
    static constexpr bool kPersistent = false;
    static constexpr bool kDump = false;
};

using Smem = uw::gemm_grouped::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::GemmGroupedArgs) == 96, "GemmGroupedArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(uw::packed::kGateRows == 8, "rows of a gate: host and kernel disagree");
static_assert(Smem::kRings == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 45056, "shared memory: plan and kernel disagree");
static_assert(uw::gemm_grouped::kThreads<Config> == 128, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(128, 2)
uw_sm90a_gemm_grouped_b8_r3w4p2_store(const __grid_constant__ uw::GemmGroupedArgs args) {
    uw::gemm_grouped::run<Config>(args);
}
