// uw_sm90a_encode_table
// Histogram -> palette, code lengths and encode table.
//
// 256 threads, at least 1 block per SM, 4096 B of dynamic shared memory.
// Grid: 1 block.
// Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/kernels/encode.cuh"

static_assert(sizeof(uw::EncodeArgs) == 144, "EncodeArgs: host and device disagree");
static_assert(uw::encode::kTableSmemBytes == 4096, "shared memory: plan and kernel disagree");
static_assert(uw::encode::kTableThreads == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 1)
uw_sm90a_encode_table(const __grid_constant__ uw::EncodeArgs args) {
    uw::encode::table(args);
}
