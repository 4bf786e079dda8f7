// uw_sm90a_pack_tiles
// bf16 [n, k] -> packed tiles, escape heads and sizes of the lists.
//
// Blocks of 256 threads, at least 4 per SM, with 0 B of dynamic shared
// memory. Grid: one block for every 2 tiles of W. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/pack.cuh"

namespace {

struct Config {
    static constexpr uw::PackStage kStage = uw::PackStage::kTiles;
};

using Smem = uw::pack::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::PackArgs) == 72, "PackArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(Smem::kBytes == 0, "shared memory: plan and kernel disagree");
static_assert(uw::pack::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 4)
uw_sm90a_pack_tiles(const __grid_constant__ uw::PackArgs args) {
    uw::pack::run<Config>(args);
}
