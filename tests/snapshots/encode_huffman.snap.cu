// uw_sm90a_encode_huffman_stats
// Elements -> sign_mantissa and the histogram of exponents.
//
// Blocks of 512 threads, at least 4 per SM, with 32768 B of dynamic shared
// memory. Grid: persistent, min(tiles of W, SMs x 4). Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/encode_huffman.cuh"

namespace {

struct Config {
    static constexpr uw::EncodeHuffmanStage kStage = uw::EncodeHuffmanStage::kStats;
};

using Smem = uw::encode_huffman::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::EncodeHuffmanArgs) == 144, "EncodeHuffmanArgs: host and kernel disagree");
static_assert(Smem::kHistogram == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 32768, "shared memory: plan and kernel disagree");
static_assert(uw::encode_huffman::kThreads<Config> == 512, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(512, 4)
uw_sm90a_encode_huffman_stats(const __grid_constant__ uw::EncodeHuffmanArgs args) {
    uw::encode_huffman::run<Config>(args);
}
