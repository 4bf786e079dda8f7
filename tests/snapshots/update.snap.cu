// uw_sm90a_update_places
// Places of new elements -> those of each 64 consecutive elements.
//
// Blocks of 256 threads, at least 4 per SM, with 0 B of dynamic shared
// memory. Grid: one block for every 16 tiles of W. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/update.cuh"

namespace {

struct Config {
    static constexpr uw::UpdateStage kStage = uw::UpdateStage::kPlaces;
};

using Smem = uw::update::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::UpdateArgs) == 144, "UpdateArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(Smem::kBytes == 0, "shared memory: plan and kernel disagree");
static_assert(uw::update::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 4)
uw_sm90a_update_places(const __grid_constant__ uw::UpdateArgs args) {
    uw::update::run<Config>(args);
}
