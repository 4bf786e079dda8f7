// uw_sm90a_gemm_wgmma_b128_g1p8c2_esc_store
// Y[m,n] = X[m,k] * W[n,k]^T, W packed to 12 bits, exact escapes; 128 x 64 of Y at a time, by a cluster of 2 that shares k, a ring of 8.
//
// Blocks of 256 threads, at least 1 per SM, with 194696 B of dynamic shared memory.
// Grid: a cluster of 2 for each of the 128 x 64 tiles of Y.
// Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/kernels/gemm_wgmma.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kBatchTile = 128;
    static constexpr uw::u32 kStages = 8;
    static constexpr uw::u32 kWarpgroups = 1;
    static constexpr uw::u32 kCluster = 2;
    static constexpr bool kStreamK = false;
    static constexpr bool kEscapes = true;
    static constexpr bool kStoreAdd = false;
    static constexpr bool kSiluMul = false;
    static constexpr bool kPdl = false;
    static constexpr bool kDumpOperands = false;
};

using Smem = uw::gemm_wgmma::Smem<Config>;
using Kernel = uw::gemm_wgmma::Kernel<Config>;

}  // namespace

static_assert(uw::packed::kTile == 64, "tiles: format and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: format and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: format and kernel disagree");
static_assert(uw::packed::kGateRows == 8, "gates and ups: epilogue and kernel disagree");
static_assert(Smem::kXBoxRows == 32, "boxes of X: host and device disagree");
static_assert(sizeof(uw::GemmPackedArgs) == 384, "GemmPackedArgs: host and device disagree");
static_assert(Smem::kX == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kW == 131072, "shared memory: plan and kernel disagree");
static_assert(Smem::kStaging == 180224, "shared memory: plan and kernel disagree");
static_assert(Smem::kRecords == 192512, "shared memory: plan and kernel disagree");
static_assert(Smem::kBarriers == 194560, "shared memory: plan and kernel disagree");
static_assert(Smem::kOldBarriers == 194688, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 194696, "shared memory: plan and kernel disagree");
static_assert(!Kernel::kBudgets, "registers: plan and kernel disagree");
static_assert(uw::gemm_wgmma::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 1)
uw_sm90a_gemm_wgmma_b128_g1p8c2_esc_store(const __grid_constant__ uw::GemmPackedArgs args) {
    uw::gemm_wgmma::run<Config>(args);
}
