// A ring of shared-memory slots that one warp fills and reads itself.
//
// A slot that the copy engine fills has an mbarrier with one arrival and the bytes. With kAsync there are none: a slot
// is one cp.async group of every lane, so each load commits a group, also without copies. There is no `empty` barrier:
// the warp releases a slot before it starts the copies that refill it. The kernel keeps the slot that is filled next,
// and the slot that is read next with the parity of its lap.
#pragma once

#include "unweight/pipeline/ring.cuh"
#include "unweight/ptx/async.cuh"

namespace uw::pipeline {

template <u32 kSlots, bool kAsync>
struct WarpRing {
    u32 barriers;

    UW_DEVICE u32 full(u32 s) const { return barriers + s * 8; }

    // By a converged warp, before its first copy.
    UW_DEVICE void init() const {
        if constexpr (!kAsync) {
            if (ptx::elect_sync()) {
#pragma unroll
                for (u32 s = 0; s < kSlots; ++s) ptx::mbarrier_init(full(s), 1);
                ptx::fence_mbarrier_init();
            }
            ptx::bar_warp_sync();  // orders the barriers before the other lanes' waits
        }
    }

    // By a converged warp: the bytes of the slot are there.
    UW_DEVICE void wait(u32 slot, u32 parity) const {
        if constexpr (kAsync) {
            // Each lane waits for its own copies, then all meet.
            ptx::cp_async_wait_group<kSlots - 1>();
            ptx::bar_warp_sync();  // orders the copies of every lane before the warp's loads
        } else {
            ptx::mbarrier_wait_parity(full(slot), parity);
        }
    }

    // By a converged warp after its last load from a slot, and before the copies that refill it.
    UW_DEVICE static void release() {
        if constexpr (kAsync) {
            ptx::bar_warp_sync();  // orders the lanes' loads before copies that any of them starts (ptx/async.cuh)
        } else {
            release_to_copy_engine();
        }
    }
};

}  // namespace uw::pipeline
