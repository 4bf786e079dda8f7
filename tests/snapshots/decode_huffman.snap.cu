// uw_sm90a_decode_huffman_full_l6
// Huffman tensor with codes of at most 6 bits -> bf16 [n, k], row-major.
//
// Blocks of 1024 threads, at least 1 per SM, with 127488 B of dynamic shared
// memory. Grid: persistent, min(tiles of W, SMs x 1). Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/decode_huffman.cuh"

namespace {

struct Config {
    static constexpr uw::DecodeOutput kOutput = uw::DecodeOutput::kFull;
    static constexpr uw::DecodeElement kElement = uw::DecodeElement::kBf16;
    static constexpr uw::u32 kCodeLimit = 6;
    static constexpr uw::SmemCopy kCopy = uw::SmemCopy::kBulk;
    static constexpr uw::u32 kWarps = 32;
};

using Smem = uw::decode_huffman::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::DecodeHuffmanArgs) == 104, "DecodeHuffmanArgs: host and kernel disagree");
static_assert(Smem::kTable == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kScratch == 8192, "shared memory: plan and kernel disagree");
static_assert(Smem::kBarriers == 9216, "shared memory: plan and kernel disagree");
static_assert(Smem::kStage == 9728, "shared memory: plan and kernel disagree");
static_assert(Smem::kOutput == 94720, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 127488, "shared memory: plan and kernel disagree");
static_assert(uw::decode_huffman::kThreads<Config> == 1024, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(1024, 1)
uw_sm90a_decode_huffman_full_l6(const __grid_constant__ uw::DecodeHuffmanArgs args) {
    uw::decode_huffman::run<Config>(args);
}
