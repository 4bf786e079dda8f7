// uw_sm90a_kv_unpack_d16
// Packed pages of heads of 16 to BF16 pages.
//
// Blocks of 128 threads, at least 4 per SM, with 2048 B of dynamic shared
// memory. Grid: one block for each of the rows. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/kv_unpack.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kHeadDim = 16;
    static constexpr bool kPdl = false;
};

using Smem = uw::kv_unpack::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::KvUnpackArgs) == 64, "KvUnpackArgs: host and kernel disagree");
static_assert(uw::kv::kPageTokens == 64, "tokens of a page: host and kernel disagree");
static_assert(uw::kv::Packed<16>::kOperandBytes == 384, "bytes of K or V of a tile: host and kernel disagree");
static_assert(uw::kv::Packed<16>::kRecordBytes == 32, "bytes of a record: host and kernel disagree");
static_assert(uw::kv::Packed<16>::kUnitBytes == 2048, "bytes of a unit: host and kernel disagree");
static_assert(Smem::kTiles == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 2048, "shared memory: plan and kernel disagree");
static_assert(uw::kv_unpack::kThreads<Config> == 128, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(128, 4)
uw_sm90a_kv_unpack_d16(const __grid_constant__ uw::KvUnpackArgs args) {
    uw::kv_unpack::run<Config>(args);
}
