// Canonical codes (docs/format.md A.4), one palette entry per lane. Shared by the decoder's tables and the encoder.
#pragma once

#include "unweight/ptx/core.cuh"

namespace uw {

// LSB-first code word of palette entry `lane`, from the lengths in lanes 0..15 (0 = unused). Called by the whole warp.
// Invalid lengths yield some word of at most 15 bits.
UW_DEVICE u32 canonical_code(u32 length, u32 lane) {
    u32 word = 0, before = ptx::shfl_sync_idx(length, 0), own = 0;
#pragma unroll
    for (u32 i = 1; i < 16; ++i) {
        u32 next = ptx::shfl_sync_idx(length, i);
        u32 step = next > before ? next - before : 0;
        word = step < 16 ? (word + 1) << step : 0;
        before = next;
        own = i == lane ? word : own;
    }
    return length >= 1 && length <= 15 ? ptx::brev(own) >> (32 - length) : 0;
}

}  // namespace uw
