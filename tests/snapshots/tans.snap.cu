// uw_sm90a_tans_add
// Coded e4m3 + coded e4m3 -> e4m3.
//
// Blocks of 256 threads, at least 4 per SM, with 16384 B of dynamic shared
// memory. Grid: ceil(streams / threads). Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "rivals/tans.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kCoded = 1;
    static constexpr uw::u32 kThreads = 256;
};

using Smem = uw::tans::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::TansArgs) == 120, "TansArgs: host and kernel disagree");
static_assert(Smem::kTable == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 16384, "shared memory: plan and kernel disagree");
static_assert(uw::tans::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 4)
uw_sm90a_tans_add(const __grid_constant__ uw::TansArgs args) {
    uw::tans::add<Config>(args);
}
