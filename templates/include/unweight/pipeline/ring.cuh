// A ring of shared-memory slots between one producer and many consumers.
//
// Each slot has two mbarriers: `full` (its bytes have landed) and `empty` (its readers are done). Producer and
// consumers each walk the ring with their own cursor: a slot and the phase parity of its current lap.
#pragma once

#include "unweight/ptx/core.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"

namespace uw::pipeline {

// Called by a converged warp between its last generic-proxy load (ld.shared, ldmatrix) from shared memory and a copy to
// the same bytes that it issues itself. The async proxy does not wait for loads in flight: with __syncwarp alone, the
// next tile's bytes overtake them in a few of a hundred launches. Each lane's proxy fence orders its own loads before
// later copies; __syncwarp extends that to the lane that issues them. If another warp refills the slot, its readers
// arrive on the `empty` mbarrier instead (Ring::release).
UW_DEVICE void release_to_copy_engine() {
    ptx::fence_proxy_async_shared();
    ptx::bar_warp_sync();  // orders every lane's fence before the copy that one of them issues
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
    // Layout: full[kSlots], then empty[kSlots].
    static constexpr u32 kBarrierBytes = kSlots * 16;
    u32 barriers;

    UW_DEVICE u32 full(u32 slot) const { return barriers + slot * 8; }
    UW_DEVICE u32 empty(u32 slot) const { return barriers + (kSlots + slot) * 8; }

    // Called by one thread, before the block's first barrier.
    UW_DEVICE void init(u32 full_arrivals, u32 empty_arrivals) const {
        for (u32 slot = 0; slot < kSlots; ++slot) {
            ptx::mbarrier_init(full(slot), full_arrivals);
            ptx::mbarrier_init(empty(slot), empty_arrivals);
        }
    }
    // In the first lap every slot is empty: waiting for the phase before the first one succeeds at once.
    UW_DEVICE void wait_empty(const Cursor<kSlots>& c) const { ptx::mbarrier_wait_parity(empty(c.slot), c.parity ^ 1); }
    UW_DEVICE void wait_full(const Cursor<kSlots>& c) const { ptx::mbarrier_wait_parity(full(c.slot), c.parity); }
    UW_DEVICE bool is_full(const Cursor<kSlots>& c) const {
        return ptx::mbarrier_test_wait_parity(full(c.slot), c.parity);
    }
    // One arrival for a group of readers, after they met (__syncwarp or a barrier) behind their last load: the arrival
    // releases their loads, and the producer's wait for the phase acquires them, so its copy cannot overtake them.
    UW_DEVICE void release(u32 slot) const { ptx::mbarrier_arrive(empty(slot)); }
};

}  // namespace uw::pipeline
