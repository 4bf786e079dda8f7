// uw_sm90a_dfloat11_t512
// DFloat11 unit -> bf16.
//
// Blocks of 512 threads, at least 4 per SM, with 57344 B of dynamic shared
// memory. Grid: what fits the machine. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "rivals/dfloat11.cuh"

namespace {

struct Config {
    static constexpr uw::u32 kThreads = 512;
};

using Smem = uw::dfloat11::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::Dfloat11Args) == 96, "Dfloat11Args: host and kernel disagree");
static_assert(Smem::kStarts == 0, "shared memory: plan and kernel disagree");
static_assert(Smem::kSymbols == 8192, "shared memory: plan and kernel disagree");
static_assert(Smem::kSums == 24576, "shared memory: plan and kernel disagree");
static_assert(Smem::kExponents == 24640, "shared memory: plan and kernel disagree");
static_assert(Smem::kParked == 40960, "shared memory: plan and kernel disagree");
static_assert(Smem::kBytes == 57344, "shared memory: plan and kernel disagree");
static_assert(uw::dfloat11::kThreads<Config> == 512, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(512, 4)
uw_sm90a_dfloat11_t512(const __grid_constant__ uw::Dfloat11Args args) {
    uw::dfloat11::run<Config>(args);
}
