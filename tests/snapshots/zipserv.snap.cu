// uw_sm90a_zipserv_decompress
// TCA-TBE -> bf16 [n, k], row-major.
//
// Blocks of 128 threads, at least 8 per SM, with 16512 B of dynamic shared
// memory. Grid: what fits the machine. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "rivals/zipserv.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kBatchTile = 0;
    static constexpr uw::u32 kStages = 2;
};

using Smem = uw::zipserv::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::ZipservArgs) == 128, "ZipservArgs: host and kernel disagree");
static_assert(Smem::kStages == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 16512, "shared memory: plan and kernel disagree");
static_assert(uw::zipserv::kThreads<Config> == 128, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(128, 8)
uw_sm90a_zipserv_decompress(const __grid_constant__ uw::ZipservArgs args) {
    uw::zipserv::decompress<Config>(args);
}
