// uw_sm90a_encode_decode_table
// Palette and code lengths -> flat decode table.
//
// Blocks of 256 threads, at least 1 per SM, with 0 B of dynamic shared memory.
// Grid: 128 blocks.
// Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/kernels/encode.cuh"

static_assert(sizeof(uw::EncodeArgs) == 144, "EncodeArgs: host and device disagree");
static_assert(uw::encode::kDecodeTableThreads == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 1)
uw_sm90a_encode_decode_table(const __grid_constant__ uw::EncodeArgs args) {
    uw::encode::decode_table(args);
}
