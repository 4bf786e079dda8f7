// uw_sm90a_gemm_compact_b8_w8p1c1_t16_store
// Y[m,n] = X[m,k] * W[n,k]^T, W compact; 8 batch rows x 64 of n per block, a ring of 1 per warp.
//
// Blocks of 256 threads, at least 2 per SM, with 106560 B of dynamic shared
// memory. Grid: blocks of 64 rows of W distributed over blocks, at most 1 each, SMs x 1..=2 if that will do; for each 8 batch rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/gemm_compact.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kBatchTile = 8;
    static constexpr uw::u32 kWarps = 8;
    static constexpr uw::u32 kStages = 1;
    static constexpr uw::u32 kCluster = 1;
    static constexpr uw::u32 kTables = 16;
    static constexpr bool kPersistent = false;
    static constexpr bool kPdl = false;
    static constexpr uw::Epilogue kEpilogue = uw::Epilogue::kStore;
};

using Smem = uw::gemm_compact::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::GemmCompactArgs) == 256, "GemmCompactArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(uw::compact::kDenseTileBytes == 5120, "dense tiles: host and kernel disagree");
static_assert(uw::compact::kStreamBytesMax == 1184, "streams: host and kernel disagree");
static_assert(uw::packed::kGateRows == 8, "rows of a gate: host and kernel disagree");
static_assert(Smem::kRings == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kTable == 73728, "shared memory: plan and kernel disagree");
static_assert(Smem::kBarriers == 106496, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 106560, "shared memory: plan and kernel disagree");
static_assert(uw::gemm_compact::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 2)
uw_sm90a_gemm_compact_b8_w8p1c1_t16_store(const __grid_constant__ uw::GemmCompactArgs args) {
    uw::gemm_compact::run<Config>(args);
}
