// Memory orderings that need an explicit fence.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// Makes preceding generic-proxy writes to shared memory visible to wgmma and bulk copies that start later. Every
// writing thread issues it, then the threads meet at a barrier.
UW_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all state spaces.
UW_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Makes preceding mbarrier_init visible to bulk copies and to the cluster.
UW_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace uw::ptx

#endif  // UW_CPU
