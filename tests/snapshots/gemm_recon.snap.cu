// uw_sm90a_gemm_recon_exponent_n1p6_store
// Y[m,n] = X[m,k] * W[n,k]^T, W from decoded exponents; up to 128 x 64 of Y per block, 6 stages.
//
// Blocks of 384 threads, at least 1 per SM, with 188624 B of dynamic shared
// memory. Grid: persistent, min(128 x 64 tiles of Y, SMs x 1). Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/gemm_recon.cuh"

namespace {

struct Config {
    static constexpr uw::WeightSource kSource = uw::WeightSource::kExponent;
    static constexpr uw::u32 kNTiles = 1;
    static constexpr uw::u32 kStages = 6;
    static constexpr uw::u32 kSplits = 1;
    static constexpr uw::u32 kVerbatimRows = 0;
    static constexpr uw::Epilogue kEpilogue = uw::Epilogue::kStore;
};

using Smem = uw::gemm_recon::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::GemmReconArgs) == 320, "GemmReconArgs: host and kernel disagree");
static_assert(uw::gemm_recon::Kernel<Config>::kProducerRegisters == 40, "registers: host and kernel disagree");
static_assert(uw::gemm_recon::Kernel<Config>::kConsumerRegisters == 232, "registers: host and kernel disagree");
static_assert(uw::gemm_recon::kMinBlocksPerSm == 1, "blocks per SM: host and kernel disagree");
static_assert(Smem::kX == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kB == 114688, "shared memory: plan and kernel disagree");
static_assert(Smem::kSign == 139264, "shared memory: plan and kernel disagree");
static_assert(Smem::kExponent == 163840, "shared memory: plan and kernel disagree");
static_assert(Smem::kSourceBarriers == 188416, "shared memory: plan and kernel disagree");
static_assert(Smem::kXBarriers == 188512, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 188624, "shared memory: plan and kernel disagree");
static_assert(uw::gemm_recon::kThreads<Config> == 384, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(384, 1)
uw_sm90a_gemm_recon_exponent_n1p6_store(const __grid_constant__ uw::GemmReconArgs args) {
    uw::gemm_recon::run<Config>(args);
}
