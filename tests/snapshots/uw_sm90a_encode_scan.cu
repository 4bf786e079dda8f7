// uw_sm90a_encode_scan
// Words and rows of each tile -> offsets and totals.
//
// 256 threads, at least 1 block per SM, 1024 B of dynamic shared memory.
// Grid: one block for every 1024 tiles of W.
// Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/kernels/encode.cuh"

static_assert(sizeof(uw::EncodeArgs) == 144, "EncodeArgs: host and device disagree");
static_assert(uw::encode::kScanSmemBytes == 1024, "shared memory: plan and kernel disagree");
static_assert(uw::encode::kScanThreads == 256, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(256, 1)
uw_sm90a_encode_scan(const __grid_constant__ uw::EncodeArgs args) {
    uw::encode::scan(args);
}
