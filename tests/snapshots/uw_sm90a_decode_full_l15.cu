// uw_sm90a_decode_full_l15
// Huffman tensor with codes of at most 15 bits -> bf16 [n, k], row-major.
//
// 1024 threads, at least 1 block per SM, 184832 B of dynamic shared memory.
// Grid: persistent, min(tiles of W, SMs x 1).
// Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/kernels/decode.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kOutput = 0;
    static constexpr uw::u32 kCodeLimit = 15;
    static constexpr uw::u32 kWarps = 32;
};

using Smem = uw::decode::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::DecodeArgs) == 112, "DecodeArgs: host and device disagree");
static_assert(Smem::kTable == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kScratch == 65536, "shared memory: plan and kernel disagree");
static_assert(Smem::kBarriers == 66560, "shared memory: plan and kernel disagree");
static_assert(Smem::kStage == 67072, "shared memory: plan and kernel disagree");
static_assert(Smem::kOutput == 152064, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 184832, "shared memory: plan and kernel disagree");
static_assert(uw::decode::kThreads<Config> == 1024, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(1024, 1)
uw_sm90a_decode_full_l15(const __grid_constant__ uw::DecodeArgs args) {
    uw::decode::run<Config>(args);
}
