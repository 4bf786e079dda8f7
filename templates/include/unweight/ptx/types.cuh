// Scalar and vector types, and the qualifiers of a device function. No CUDA header is needed: NVRTC knows the
// qualifiers, and a CPU build gets them from tests/simulator/prelude.hpp, which is included before everything else.
#pragma once

#include "unweight/abi.cuh"

#define UW_DEVICE __device__ __forceinline__

namespace uw {

// Sixteen bytes that are accessed by one instruction.
struct alignas(16) U32x4 {
    u32 x, y, z, w;
};

// Eight bytes that are accessed by one instruction.
struct alignas(8) U32x2 {
    u32 x, y;
};

// L2 eviction priority of a bulk copy (see bulk.cuh).
enum class L2 : u32 {
    kNormal,
    kEvictFirst,  // read once: weights
    kEvictLast,   // read by every CTA: activations
};

}  // namespace uw
