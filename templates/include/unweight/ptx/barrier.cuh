// Barriers of the block, of named subsets of its threads, and of the cluster.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

UW_DEVICE void bar_sync() { __syncthreads(); }

// Named barrier for `threads` threads, a multiple of 32. Orders shared memory among them. `barrier` is an enumerator of
// the kernel's own `enum class NamedBarrier : u32`, in 1..15; 0 is bar_sync.
template <class NamedBarrier>
UW_DEVICE void bar_sync(NamedBarrier barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(static_cast<u32>(barrier)), "r"(threads) : "memory");
}

UW_DEVICE u32 cluster_ctarank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
UW_DEVICE u32 cluster_nctarank() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
UW_DEVICE void barrier_cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
UW_DEVICE void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address, in the cluster's shared window, of this block's shared address in block `rank`.
UW_DEVICE u32 mapa(u32 address, u32 rank) {
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
UW_DEVICE U32x4 ld_shared_cluster_x4(u32 address) {
    U32x4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
UW_DEVICE U32x2 ld_shared_cluster_x2(u32 address) {
    U32x2 v;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
UW_DEVICE void st_shared_cluster_x4(u32 address, U32x4 v) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

}  // namespace uw::ptx

#endif  // UW_CPU
