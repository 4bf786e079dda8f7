// uw_sm90a_matvans_rows
// int8 [cols] x rANS rows -> int8 [rows].
//
// Blocks of 128 threads, at least 8 per SM, with 4608 B of dynamic shared
// memory. Grid: a warp a stream. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "rivals/matvans.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kParts = 128;
    static constexpr uw::u32 kRing = 256;
};

using Smem = uw::matvans::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::MatvansArgs) == 80, "MatvansArgs: host and kernel disagree");
static_assert(Smem::kTable == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kRings == 512, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 4608, "shared memory: plan and kernel disagree");
static_assert(uw::matvans::kThreads<Config> == 128, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(128, 8)
uw_sm90a_matvans_rows(const __grid_constant__ uw::MatvansArgs args) {
    uw::matvans::rows<Config>(args);
}
