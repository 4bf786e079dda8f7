// uw_sm90a_norm_t256
// Y[m,d] = gamma * X * rsqrt(mean(X^2) + eps), a block a row.
//
// Blocks of 256 threads, at least 2 per SM, with 32 B of dynamic shared
// memory. Grid: one block for each of the rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/norm.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kThreads = 256;
    static constexpr uw::NormKind kKind = uw::NormKind::kRms;
    static constexpr bool kAdd = false;
    static constexpr bool kPdl = false;
};

using Smem = uw::norm::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::NormArgs) == 72, "NormArgs: host and kernel disagree");
static_assert(uw::norm::kColumnsMax == 16384, "columns: host and kernel disagree");
static_assert(Smem::kSums == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 32, "shared memory: plan and kernel disagree");
static_assert(uw::norm::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 2)
uw_sm90a_norm_t256(const __grid_constant__ uw::NormArgs args) {
    uw::norm::run<Config>(args);
}
