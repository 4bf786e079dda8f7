// A ring of shared-memory slots between one producer and many consumers.
//
// Each slot has two mbarriers: `full` (its bytes have landed) and `empty` (its readers are done). Producer and
// consumers walk the ring with cursors of their own; a cursor is a slot and the parity of its current lap.
#pragma once

#include "unweight/ptx/core.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"

namespace uw::pipeline {

// By a converged warp, between its last ordinary load (ld.shared, ldmatrix) from shared memory and a copy that it
// starts itself into the same bytes. The copy engine does not wait for loads in flight: __syncwarp alone lets the next
// tile's bytes overtake them, a few times in a hundred launches. The fence of every lane makes its own loads come
// before copies that start later; the meeting extends that to the lane that starts them. Where another warp refills the
// slot, its readers arrive on the `empty` mbarrier instead (Ring::release).
UW_DEVICE void release_to_copy_engine() {
    ptx::fence_proxy_async_shared();
    ptx::bar_warp_sync();  // orders every lane's fence before the copy of the one that starts it
}

template <u32 kSlots>
struct Cursor {
    u32 slot = 0;
    u32 parity = 0;

    UW_DEVICE void advance() {
        if (++slot == kSlots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

template <u32 kSlots>
struct Ring {
    // full[kSlots], then empty[kSlots].
    static constexpr u32 kBarrierBytes = kSlots * 16;
    u32 barriers;

    UW_DEVICE u32 full(u32 slot) const { return barriers + slot * 8; }
    UW_DEVICE u32 empty(u32 slot) const { return barriers + (kSlots + slot) * 8; }

    // One thread, before the block's first barrier.
    UW_DEVICE void init(u32 full_arrivals, u32 empty_arrivals) const {
        for (u32 slot = 0; slot < kSlots; ++slot) {
            ptx::mbarrier_init(full(slot), full_arrivals);
            ptx::mbarrier_init(empty(slot), empty_arrivals);
        }
    }
    // The first lap finds every slot empty: the phase before the first has, by definition, completed.
    UW_DEVICE void wait_empty(const Cursor<kSlots>& c) const { ptx::mbarrier_wait_parity(empty(c.slot), c.parity ^ 1); }
    UW_DEVICE void wait_full(const Cursor<kSlots>& c) const { ptx::mbarrier_wait_parity(full(c.slot), c.parity); }
    // One arrival for readers that have met (__syncwarp or a barrier) after their last load: the arrival releases what
    // came before it, and the producer's wait for the phase acquires it, so its copy cannot overtake their loads.
    UW_DEVICE void release(u32 slot) const { ptx::mbarrier_arrive(empty(slot)); }
};

}  // namespace uw::pipeline
