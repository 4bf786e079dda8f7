// uw_sm90a_gemm_wgmma_b64_g2p10_esc_store
// Y[m,n] = X[m,k] * W[n,k]^T, W packed to 12 bits, exact escapes; 64 x 128 of Y at a time, whole output tiles, a ring of 10.
//
// Blocks of 384 threads, at least 1 per SM, with 226480 B of dynamic shared
// memory. Grid: persistent, min(64 x 128 tiles of Y, SMs x 1). Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/gemm_wgmma.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kBatchTile = 64;
    static constexpr uw::u32 kWarpgroups = 2;
    static constexpr uw::u32 kStages = 10;
    static constexpr uw::u32 kCluster = 1;
    static constexpr bool kStreamK = false;
    static constexpr bool kEscapes = true;
    static constexpr bool kPdl = false;
    static constexpr uw::Epilogue kEpilogue = uw::Epilogue::kStore;
    static constexpr bool kDump = false;
};

using Smem = uw::gemm_wgmma::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::GemmPackedArgs) == 384, "GemmPackedArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(uw::packed::kGateRows == 8, "rows of a gate: host and kernel disagree");
static_assert(Smem::kXBoxRows == 32, "boxes of X: host and kernel disagree");
static_assert(uw::gemm_wgmma::Kernel<Config>::kBudgets == 1, "registers: host and kernel disagree");
static_assert(uw::gemm_wgmma::Kernel<Config>::kProducerRegisters == 56, "registers: host and kernel disagree");
static_assert(uw::gemm_wgmma::Kernel<Config>::kConsumerRegisters == 224, "registers: host and kernel disagree");
static_assert(Smem::kX == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kW == 81920, "shared memory: plan and kernel disagree");
static_assert(Smem::kStaging == 204800, "shared memory: plan and kernel disagree");
static_assert(Smem::kRecords == 221184, "shared memory: plan and kernel disagree");
static_assert(Smem::kBarriers == 226304, "shared memory: plan and kernel disagree");
static_assert(Smem::kOldBarriers == 226464, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 226480, "shared memory: plan and kernel disagree");
static_assert(uw::gemm_wgmma::kThreads<Config> == 384, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(384, 1)
uw_sm90a_gemm_wgmma_b64_g2p10_esc_store(const __grid_constant__ uw::GemmPackedArgs args) {
    uw::gemm_wgmma::run<Config>(args);
}
