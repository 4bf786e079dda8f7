// uw_sm90a_matmul_palette_n1p6_v16_store
// Y[m,n] = X[m,k] * W[n,k]^T, W from palette indices with room for 16 verbatim rows per tile; up to 128 x 64 of Y per block, 6 stages.
//
// 384 threads, at least 1 block per SM, 182528 B of dynamic shared memory.
// Grid: persistent, min(128 x 64 tiles of Y, SMs x 1).
// Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/kernels/matmul.cuh"

namespace {

struct Config {
    static constexpr bool kPaletteSource = true;
    static constexpr uw::u32 kNTiles = 1;
    static constexpr uw::u32 kStages = 6;
    static constexpr uw::u32 kVerbatimRows = 16;
    static constexpr bool kStoreAdd = false;
};

using Smem = uw::matmul::Smem<Config>;
using Kernel = uw::matmul::Kernel<Config>;

}  // namespace

static_assert(sizeof(uw::MatmulArgs) == 320, "MatmulArgs: host and device disagree");
static_assert(Smem::kX == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kB == 114688, "shared memory: plan and kernel disagree");
static_assert(Smem::kSign == 139264, "shared memory: plan and kernel disagree");
static_assert(Smem::kExponent == 163840, "shared memory: plan and kernel disagree");
static_assert(Smem::kVerbatim == 176128, "shared memory: plan and kernel disagree");
static_assert(Smem::kMask == 182272, "shared memory: plan and kernel disagree");
static_assert(Smem::kSourceBarriers == 182320, "shared memory: plan and kernel disagree");
static_assert(Smem::kXBarriers == 182416, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 182528, "shared memory: plan and kernel disagree");
static_assert(Kernel::kProducerRegisters == 40, "registers: plan and kernel disagree");
static_assert(Kernel::kConsumerRegisters == 232, "registers: plan and kernel disagree");
static_assert(uw::matmul::kMinBlocksPerSm == 1, "blocks per SM: plan and kernel disagree");
static_assert(uw::matmul::kThreads == 384, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(384, 1)
uw_sm90a_matmul_palette_n1p6_v16_store(const __grid_constant__ uw::MatmulArgs args) {
    uw::matmul::run<Config>(args);
}
