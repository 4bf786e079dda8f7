// uw_sm90a_kv_pack_step_d16
// Pages that rows have filled, of all layers, heads of 16: BF16 to 12 bits.
//
// Blocks of 128 threads, at least 3 per SM, with 2288 B of dynamic shared
// memory. Grid: persistent, min(rows, SMs x 3). Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/kv_pack.cuh"

namespace {

struct Config {
    static constexpr uw::KvPackStage kStage = uw::KvPackStage::kStep;
    static constexpr uw::u32 kHeadDim = 16;
    static constexpr bool kPdl = false;
};

using Smem = uw::kv_pack::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::KvPackArgs) == 136, "KvPackArgs: host and kernel disagree");
static_assert(uw::kv::kPageTokens == 64, "tokens of a page: host and kernel disagree");
static_assert(uw::kv::Packed<16>::kOperandBytes == 384, "bytes of K or V of a tile: host and kernel disagree");
static_assert(uw::kv::Packed<16>::kRecordBytes == 32, "bytes of a record: host and kernel disagree");
static_assert(uw::kv::Packed<16>::kUnitBytes == 2048, "bytes of a unit: host and kernel disagree");
static_assert(Smem::kTiles == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kCounts == 2048, "shared memory: plan and kernel disagree");
static_assert(Smem::kRecord == 2240, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 2288, "shared memory: plan and kernel disagree");
static_assert(uw::kv_pack::kThreads<Config> == 128, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(128, 3)
uw_sm90a_kv_pack_step_d16(const __grid_constant__ uw::KvPackArgs args) {
    uw::kv_pack::run<Config>(args);
}
