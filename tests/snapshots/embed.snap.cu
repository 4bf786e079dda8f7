// uw_sm90a_embed_bf16
// Y[m,d] = rows ids[m] of a table, bf16.
//
// Blocks of 256 threads, at least 2 per SM, with 0 B of dynamic shared
// memory. Grid: one block for each of the rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/embed.cuh"

namespace {

struct Config {
    static constexpr uw::EmbedSource kSource = uw::EmbedSource::kBf16;
    static constexpr bool kPdl = false;
};

using Smem = uw::embed::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::EmbedArgs) == 96, "EmbedArgs: host and kernel disagree");
static_assert(uw::packed::kTile == 64, "tiles: host and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: host and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: host and kernel disagree");
static_assert(Smem::kBytes == 0, "shared memory: plan and kernel disagree");
static_assert(uw::embed::kThreads<Config> == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 2)
uw_sm90a_embed_bf16(const __grid_constant__ uw::EmbedArgs args) {
    uw::embed::run<Config>(args);
}
