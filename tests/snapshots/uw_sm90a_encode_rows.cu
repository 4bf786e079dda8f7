// uw_sm90a_encode_rows
// Elements -> row lengths, verbatim rows, and words and rows of each tile.
//
// 256 threads, at least 4 blocks per SM, 1024 B of dynamic shared memory.
// Grid: persistent, min(tiles of W / 8, SMs x 4).
// Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/kernels/encode.cuh"

static_assert(sizeof(uw::EncodeArgs) == 144, "EncodeArgs: host and device disagree");
static_assert(uw::encode::kRowsSmemBytes == 1024, "shared memory: plan and kernel disagree");
static_assert(uw::encode::kTileThreads == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 4)
uw_sm90a_encode_rows(const __grid_constant__ uw::EncodeArgs args) {
    uw::encode::rows(args);
}
