// uw_sm90a_route_topk
// logits[m,experts] -> ids and weights of each token's experts.
//
// Blocks of 256 threads, at least 3 per SM, with 0 B of dynamic shared
// memory. Grid: one block for every 8 rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/route.cuh"

namespace {

struct Config {
    static constexpr uw::RouteStage kStage = uw::RouteStage::kTopk;
    static constexpr bool kPdl = false;
};

using Smem = uw::route::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::RouteArgs) == 128, "RouteArgs: host and kernel disagree");
static_assert(uw::route::kExpertsMax == 512, "experts: host and kernel disagree");
static_assert(uw::route::kTopKMax == 32, "experts of a token: host and kernel disagree");
static_assert(uw::route::kCombineThreads * uw::route::kChunk == 1024, "columns: host and kernel disagree");
static_assert(Smem::kBytes == 0, "shared memory: plan and kernel disagree");
static_assert(uw::route::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 3)
uw_sm90a_route_topk(const __grid_constant__ uw::RouteArgs args) {
    uw::route::run<Config>(args);
}
