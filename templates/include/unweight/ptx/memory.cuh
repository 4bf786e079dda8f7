// Loads, stores and atomics. Shared memory is addressed by 32 bits (`cvta_to_shared`), global memory by pointer.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// First byte of the dynamic shared memory of the block, 1024-byte aligned (the period of the 128-byte swizzle).
UW_DEVICE u8* dynamic_smem() {
    extern __shared__ __align__(1024) u8 uw_dynamic_smem[];
    return uw_dynamic_smem;
}

UW_DEVICE u32 cvta_to_shared(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- shared memory -------------------------------------------------------------------------------------------------
UW_DEVICE U32x4 ld_shared_x4(u32 address) {
    U32x4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}
UW_DEVICE U32x2 ld_shared_x2(u32 address) {
    U32x2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
UW_DEVICE u32 ld_shared(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
UW_DEVICE u32 ld_shared_u16(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}
UW_DEVICE u32 ld_shared_u8(u32 address) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
UW_DEVICE void st_shared_x4(u32 address, U32x4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
UW_DEVICE void st_shared_x2(u32 address, U32x2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
UW_DEVICE void st_shared(u32 address, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
UW_DEVICE void st_shared_u16(u32 address, u32 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(v)) : "memory");
}
UW_DEVICE void st_shared_u8(u32 address, u32 v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
UW_DEVICE u32 atom_add_shared(u32 address, u32 v) {
    u32 old;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(address), "r"(v) : "memory");
    return old;
}
UW_DEVICE void red_add_shared(u32 address, u32 v) {
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
UW_DEVICE void red_or_shared(u32 address, u32 v) {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// ---- global memory -------------------------------------------------------------------------------------------------
UW_DEVICE U32x4 ld_global_x4(const void* p) {
    U32x4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
UW_DEVICE U32x2 ld_global_x2(const void* p) {
    U32x2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
UW_DEVICE u32 ld_global(const void* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// The data must be read-only during the whole kernel, including the part before `griddepcontrol_wait`.
UW_DEVICE U32x4 ld_global_nc_x4(const void* p) {
    U32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
UW_DEVICE U32x2 ld_global_nc_x2(const void* p) {
    U32x2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
UW_DEVICE u32 ld_global_nc(const void* p) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
UW_DEVICE u32 ld_global_u16(const void* p) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
UW_DEVICE u32 ld_global_nc_u16(const void* p) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
UW_DEVICE u32 ld_global_nc_u8(const void* p) {
    u32 v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// Prefetches the line of `p` into L2.
UW_DEVICE void prefetch_global_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
UW_DEVICE void st_global_x4(void* p, U32x4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
UW_DEVICE void st_global_x2(void* p, U32x2 v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
UW_DEVICE void st_global(void* p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
UW_DEVICE void st_global_u16(void* p, u32 v) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(static_cast<u16>(v)) : "memory");
}
UW_DEVICE void st_global_u8(void* p, u32 v) { asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// .cs: streaming, evicted first.
UW_DEVICE void st_global_cs_x4(void* p, U32x4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
UW_DEVICE u32 atom_add_global(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
UW_DEVICE u64 atom_add_global_u64(u64* p, u64 v) {
    u64 old;
    asm volatile("atom.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
    return old;
}
UW_DEVICE void red_add_global(u32* p, u32 v) {
    asm volatile("red.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
UW_DEVICE void red_max_global_u64(u64* p, u64 v) {
    asm volatile("red.global.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Release store of a flag that publishes earlier writes, and the acquire load that reads it.
UW_DEVICE void st_release_global_u64(u64* p, u64 v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
UW_DEVICE u64 ld_acquire_global_u64(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
UW_DEVICE void st_release_global(u32* p, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
UW_DEVICE u32 ld_acquire_global(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
UW_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace uw::ptx

#endif  // UW_CPU
