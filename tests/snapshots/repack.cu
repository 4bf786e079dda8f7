// uw_sm90a_repack_pack
// bf16 [n, k] -> packed tiles, escape heads and sizes of the lists.
//
// Blocks of 256 threads, at least 4 per SM, with 0 B of dynamic shared memory.
// Grid: one block for every 2 tiles of W.
// Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/kernels/repack.cuh"

static_assert(uw::packed::kTile == 64, "tiles: format and kernel disagree");
static_assert(uw::packed::kTileBytes == 6144, "packed tiles: format and kernel disagree");
static_assert(uw::packed::kBlockBytes == 1536, "row blocks: format and kernel disagree");
static_assert(sizeof(uw::RepackArgs) == 72, "RepackArgs: host and device disagree");
static_assert(uw::repack::kPackSmemBytes == 0, "shared memory: plan and kernel disagree");
static_assert(uw::repack::kPackThreads == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 4)
uw_sm90a_repack_pack(const __grid_constant__ uw::RepackArgs args) {
    uw::repack::pack(args);
}
