// uw_sm90a_scale_mul
// Y[m,n] = factor * X[m,n].
//
// Blocks of 128 threads, at least 8 per SM, with 0 B of dynamic shared
// memory. Grid: one block for each of the 1 x 1024 tiles of Y. Rendered by unweight-codegen; edit templates/, not this text.
#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/kernels/scale.cuh"

namespace {

struct Config {
    static constexpr uw::ScaleForm kForm = uw::ScaleForm::kMul;
    static constexpr bool kPdl = false;
};

using Smem = uw::scale::Smem<Config>;

}  // namespace

static_assert(sizeof(uw::ScaleArgs) == 48, "ScaleArgs: host and kernel disagree");
static_assert(uw::scale::kBlockColumns == 1024, "columns: host and kernel disagree");
static_assert(Smem::kBytes == 0, "shared memory: plan and kernel disagree");
static_assert(uw::scale::kThreads<Config> == 128, "threads: plan and kernel disagree");

extern "C" __global__ void __launch_bounds__(128, 8)
uw_sm90a_scale_mul(const __grid_constant__ uw::ScaleArgs args) {
    uw::scale::run<Config>(args);
}
