// uw_sm90a_sample_t1024_c1
// A token of each row of logits: temperature, top-k, top-p, min-p; a block a row.
//
// Blocks of 1024 threads, at least 1 per SM, with 39200 B of dynamic shared
// memory. Grid: one block for each of the rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/sample.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kCluster = 1;
    static constexpr bool kAdjusted = false;
    static constexpr bool kPdl = false;
};

using Smem = uw::sample::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::SampleArgs) == 80, "SampleArgs: host and kernel disagree");
static_assert(sizeof(uw::SampleRow) == 24, "SampleRow: host and kernel disagree");
static_assert(sizeof(uw::AdjustRow) == 24, "AdjustRow: host and kernel disagree");
static_assert(sizeof(uw::TokenState) == 8, "TokenState: host and kernel disagree");
static_assert(uw::sample::kInPrompt == 2147483648, "tokens of the prompt: host and kernel disagree");
static_assert(uw::sample::kEnds == 1073741824, "end tokens: host and kernel disagree");
static_assert(uw::sample::kVocabularyMax == 1048576, "vocabulary: host and kernel disagree");
static_assert(Smem::kLow == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kHigh == 16384, "shared memory: plan and kernel disagree");
static_assert(Smem::kSums == 32768, "shared memory: plan and kernel disagree");
static_assert(Smem::kMerged == 36864, "shared memory: plan and kernel disagree");
static_assert(Smem::kWarps == 38912, "shared memory: plan and kernel disagree");
static_assert(Smem::kBest == 39168, "shared memory: plan and kernel disagree");
static_assert(Smem::kFound == 39184, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 39200, "shared memory: plan and kernel disagree");
static_assert(uw::sample::kThreads<Config> == 1024, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(1024, 1)
uw_sm90a_sample_t1024_c1(const __grid_constant__ uw::SampleArgs args) {
    uw::sample::run<Config>(args);
}
