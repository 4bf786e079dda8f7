// uw_sm90a_logprobs_t1024
// Log probabilities of the sampled token and the likeliest ones of each row; a block a row.
//
// Blocks of 1024 threads, at least 1 per SM, with 512 B of dynamic shared
// memory. Grid: one block for each of the rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/logprobs.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kThreads = 1024;
    static constexpr bool kPdl = false;
};

using Smem = uw::logprobs::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::LogprobsArgs) == 48, "LogprobsArgs: host and kernel disagree");
static_assert(uw::logprobs::kTopMax == 20, "tokens: host and kernel disagree");
static_assert(uw::sample::kVocabularyMax == 1048576, "vocabulary: host and kernel disagree");
static_assert(Smem::kWarps == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 512, "shared memory: plan and kernel disagree");
static_assert(uw::logprobs::kThreads<Config> == 1024, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(1024, 1)
uw_sm90a_logprobs_t1024(const __grid_constant__ uw::LogprobsArgs args) {
    uw::logprobs::run<Config>(args);
}
