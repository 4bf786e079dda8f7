// uw_sm90a_rope_d64
// Heads of 64: bias, norm and rotation; K and V to their pages.
//
// Blocks of 256 threads, at least 4 per SM, with 0 B of dynamic shared
// memory. Grid: one block for each of the rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/rope.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kHeadDim = 64;
    static constexpr bool kAdjacent = false;
    static constexpr bool kPlusOne = false;
    static constexpr bool kPdl = false;
};

using Smem = uw::rope::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::RopeArgs) == 104, "RopeArgs: host and kernel disagree");
static_assert(uw::kv::kPageTokens == 64, "tokens of a page: host and kernel disagree");
static_assert(Smem::kBytes == 0, "shared memory: plan and kernel disagree");
static_assert(uw::rope::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 4)
uw_sm90a_rope_d64(const __grid_constant__ uw::RopeArgs args) {
    uw::rope::run<Config>(args);
}
