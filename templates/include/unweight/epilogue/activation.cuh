// Activations between two linears, in fp32.
#pragma once

#include "unweight/ptx/core.cuh"

namespace uw::packed {

// kGateRows: in the weights of a product with silu_mul, this many rows of the gate alternate with as many of the up
// projection, so one thread holds both in a fragment, 8 rows apart.
constexpr u32 kGateRows = 8;

// v / (1 + e^-v). Relative error below 2^-20 for v above -87, far below the following rounding to bf16; -0 for smaller
// v. An exact division would branch for every element, and the threads would wait for each result in turn.
UW_DEVICE float silu(float v) { return v * ptx::rcp_approx(1.0f + ptx::ex2_approx(v * -1.44269504f)); }

// GELU by its tanh approximation: v / (1 + e^-2u), u = sqrt(2 / pi) * (v + 0.044715 * v^3). Relative error below 2^-18
// for u above -43; -0 for smaller u.
UW_DEVICE float gelu_tanh(float v) {
    const float u = v * (1.0f + 0.044715f * v * v);
    return v * ptx::rcp_approx(1.0f + ptx::ex2_approx(u * -2.30220819f));
}

}  // namespace uw::packed
