// uw_sm90a_silu_mul_t128
// Y[m,n] = silu(gate[m,n]) * up[m,n].
//
// Blocks of 128 threads, at least 4 per SM, with 0 B of dynamic shared
// memory. Grid: one block for each of the 1 x 1024 tiles of Y. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/silu_mul.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kThreads = 128;
    static constexpr uw::GateFunction kGate = uw::GateFunction::kSilu;
    static constexpr bool kPdl = false;
};

using Smem = uw::silu_mul::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::SiluMulArgs) == 56, "SiluMulArgs: host and kernel disagree");
static_assert(Config::kThreads * uw::silu_mul::kChunk == 1024, "columns: host and kernel disagree");
static_assert(Smem::kBytes == 0, "shared memory: plan and kernel disagree");
static_assert(uw::silu_mul::kThreads<Config> == 128, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(128, 4)
uw_sm90a_silu_mul_t128(const __grid_constant__ uw::SiluMulArgs args) {
    uw::silu_mul::run<Config>(args);
}
