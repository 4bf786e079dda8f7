// uw_sm90a_decode_compact_full
// Compact tensor -> bf16 [n, k], row-major.
//
// Blocks of 256 threads, at least 3 per SM, with 11904 B of dynamic shared
// memory. Grid: one block for every 8 tiles of W. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/decode_compact.cuh"

namespace {

struct Config {
    static constexpr uw::DecodeCompactStage kStage = uw::DecodeCompactStage::kFull;
};

using Smem = uw::decode_compact::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::DecodeCompactArgs) == 128, "DecodeCompactArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(uw::compact::kDenseTileBytes == 5120, "dense tiles: host and kernel disagree");
static_assert(uw::compact::kStreamBytesMax == 1184, "streams: host and kernel disagree");
static_assert(Smem::kTable == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kSlots == 2048, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 11904, "shared memory: plan and kernel disagree");
static_assert(uw::decode_compact::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 3)
uw_sm90a_decode_compact_full(const __grid_constant__ uw::DecodeCompactArgs args) {
    uw::decode_compact::run<Config>(args);
}
