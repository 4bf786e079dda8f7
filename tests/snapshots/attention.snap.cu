// uw_sm90a_attention_decode_d16_w4p4c1
// A[m, h * 16] = attention of each row's newest token over its pages; a block for a row and KV head, a ring of 4 x 16 tokens per warp.
//
// Blocks of 128 threads, at least 9 per SM, with 17600 B of dynamic shared
// memory. Grid: one block for each of the rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/attention/decode.cuh"

namespace {

struct Config {
    static constexpr uw::AttentionStep kStep = uw::AttentionStep::kDecode;
    static constexpr uw::u32 kHeadDim = 16;
    static constexpr uw::u32 kWarps = 4;
    static constexpr uw::u32 kStages = 4;
    static constexpr uw::u32 kCluster = 1;
    static constexpr bool kSplit = false;
    static constexpr uw::KvCache kCache = uw::KvCache::kBf16;
    static constexpr uw::SmemCopy kCopy = uw::SmemCopy::kBulk;
    static constexpr bool kAdjacent = false;
    static constexpr bool kSoftcap = false;
    static constexpr bool kPlusOne = false;
    static constexpr bool kPdl = false;
};

using Smem = uw::attention::decode::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::AttentionArgs) == 208, "AttentionArgs: host and kernel disagree");
static_assert(Smem::kRings == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kQueries == 16384, "shared memory: plan and kernel disagree");
static_assert(Smem::kFresh == 16896, "shared memory: plan and kernel disagree");
static_assert(Smem::kStates == 16960, "shared memory: plan and kernel disagree");
static_assert(Smem::kBarriers == 17472, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 17600, "shared memory: plan and kernel disagree");
static_assert(uw::attention::decode::kThreads<Config> == 128, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(128, 9)
uw_sm90a_attention_decode_d16_w4p4c1(const __grid_constant__ uw::AttentionArgs args) {
    uw::attention::decode::run<Config>(args);
}
