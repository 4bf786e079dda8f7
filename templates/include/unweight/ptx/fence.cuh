// Orderings that the hardware does not give for free.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// Ordinary writes to shared memory before it are seen by wgmma and bulk copies that start after it. Every writing
// thread issues it, then the threads meet at a barrier.
UW_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all state spaces.
UW_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// mbarrier_init before it is visible to bulk copies and to the cluster.
UW_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
UW_DEVICE void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

}  // namespace uw::ptx

#endif  // UW_CPU
