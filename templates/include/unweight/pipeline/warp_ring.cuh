// A ring of shared-memory slots that one warp both fills and reads.
//
// With bulk copies, each slot has an mbarrier, which expects one arrival and the bytes. With kAsync there are no
// mbarriers: a slot is one cp.async group of every lane, so each load commits a group, even an empty one. There is no
// `empty` barrier: the warp releases a slot before it issues the copies that refill it. The kernel tracks the slot to
// fill next, and the slot to read next with its phase parity.
#pragma once

#include "unweight/pipeline/ring.cuh"
#include "unweight/ptx/async.cuh"

namespace uw::pipeline {

template <u32 kSlots, bool kAsync>
struct WarpRing {
    u32 barriers;

    UW_DEVICE u32 full(u32 s) const { return barriers + s * 8; }

    // Called by a converged warp before its first copy.
    UW_DEVICE void init() const {
        if constexpr (!kAsync) {
            if (ptx::elect_sync()) {
#pragma unroll
                for (u32 s = 0; s < kSlots; ++s) ptx::mbarrier_init(full(s), 1);
                ptx::fence_mbarrier_init();
            }
            ptx::bar_warp_sync();  // orders the initialization before the other lanes' waits
        }
    }

    // Called by a converged warp: waits until the bytes of the slot are visible to all lanes.
    UW_DEVICE void wait(u32 slot, u32 parity) const {
        if constexpr (kAsync) {
            // Each lane waits for its own copies; __syncwarp combines them.
            ptx::cp_async_wait_group<kSlots - 1>();
            ptx::bar_warp_sync();  // orders the copies of every lane before the warp's loads
        } else {
            ptx::mbarrier_wait_parity(full(slot), parity);
        }
    }

    // Called by a converged warp after its last load from a slot and before the copies that refill it.
    UW_DEVICE static void release() {
        if constexpr (kAsync) {
            ptx::bar_warp_sync();  // orders the lanes' loads before copies that any of them issues (ptx/async.cuh)
        } else {
            release_to_copy_engine();
        }
    }
};

}  // namespace uw::pipeline
