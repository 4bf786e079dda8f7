// Shared-memory operand descriptors of wgmma.
#pragma once

#include "unweight/ptx/types.cuh"

namespace uw::mma {

// K-major operand in the 128-byte swizzle: rows of 64 bf16, 8-row groups 1024 bytes apart. `address` is 1024-byte
// aligned plus a multiple of 32 bytes below 128, which selects the k16 step inside the row (the swizzle acts on address
// bits, so the start may move). Bits: 0..13 address / 16, 16..29 leading offset / 16 (ignored in this mode), 32..45
// stride / 16, 62..63 swizzle (1 = 128 bytes).
UW_DEVICE u64 k_major_descriptor(u32 address) {
    return u64(1) << 62 | u64(1024 / 16) << 32 | u64(1) << 16 | u64((address & 0x3ffff) >> 4);
}

// From one k16 step to the next: 32 bytes.
constexpr u64 kDescriptorStepK16 = 32 / 16;

}  // namespace uw::mma
