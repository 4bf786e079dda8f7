// uw_sm90a_encode_compact_quads
// bf16 [n, k] -> how often each quad of classes occurs.
//
// Blocks of 256 threads, at least 4 per SM, with 16384 B of dynamic shared
// memory. Grid: one block for every 16 tiles of W. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/encode_compact.cuh"

namespace {

struct Config {
    static constexpr uw::EncodeCompactStage kStage = uw::EncodeCompactStage::kQuads;
};

using Smem = uw::encode_compact::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::EncodeCompactArgs) == 104, "EncodeCompactArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(uw::compact::kDenseTileBytes == 5120, "dense tiles: host and kernel disagree");
static_assert(uw::compact::kStreamBytesMax == 1184, "streams: host and kernel disagree");
static_assert(Smem::kQuads == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 16384, "shared memory: plan and kernel disagree");
static_assert(uw::encode_compact::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 4)
uw_sm90a_encode_compact_quads(const __grid_constant__ uw::EncodeCompactArgs args) {
    uw::encode_compact::run<Config>(args);
}
