// Force-included before a kernel source (`g++ -include prelude.hpp`): the CUDA dialect, the wrappers, and the C ABI of
// a test library.
#pragma once

#define UW_CPU 1
#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Blocks run one after another, so a static object serves as the block's memory. Not for clusters and not for
// addresses: use dynamic_smem().
#define __shared__ static

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

// To the end of the source. Without it the simulator, and statics of inline functions (a kernel's __shared__ objects),
// would be one object for all kernel libraries of a process: GNU ld's unique symbols ignore RTLD_LOCAL.
#pragma GCC visibility push(hidden)

#include "simulator.hpp"
#include "ptx.hpp"

namespace uw::cpu {
struct Dim3 {
    u32 x, y, z;
};
inline Dim3 thread_idx() { return {self().thread, 0, 0}; }
inline Dim3 block_idx() { return {self().block->index, 0, 0}; }
inline Dim3 block_dim() { return {simulator().block_threads, 1, 1}; }
inline Dim3 grid_dim() { return {simulator().grid, 1, 1}; }
}  // namespace uw::cpu
#define threadIdx (::uw::cpu::thread_idx())
#define blockIdx (::uw::cpu::block_idx())
#define blockDim (::uw::cpu::block_dim())
#define gridDim (::uw::cpu::grid_dim())

// The few intrinsics that kernels may use without a wrapper.
inline void __syncthreads() { uw::ptx::bar_sync(); }
inline void __syncwarp() { uw::ptx::bar_warp_sync(); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline unsigned __brev(unsigned v) { return uw::ptx::brev(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) { return uw::ptx::prmt(a, b, s & 0x7777u); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned s) { return uw::ptx::shf_r_wrap(low, high, s); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned s) { return uw::ptx::shf_l_wrap(low, high, s); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline unsigned atomicAdd(unsigned* p, unsigned v) {
    unsigned old = *p;
    *p += v;
    return old;
}
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
    unsigned long long old = *p;
    *p += v;
    return old;
}
inline unsigned atomicMax(unsigned* p, unsigned v) {
    unsigned old = *p;
    if (v > old) *p = v;
    return old;
}
inline unsigned atomicOr(unsigned* p, unsigned v) {
    unsigned old = *p;
    *p |= v;
    return old;
}
template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}

// ---- C ABI of a library built from a kernel source -----------------------------------------------------------------
#define UW_CPU_API __attribute__((used, visibility("default")))
extern "C" {
// Text of the last failed launch of this library.
UW_CPU_API const char* uw_cpu_last_error();
// Once any allocation is registered, every global access through a wrapper must lie inside one.
UW_CPU_API void uw_cpu_register(const void* begin, unsigned long long bytes, const char* name);
UW_CPU_API void uw_cpu_clear_registered();
// Fills a tensor map: row-major [rows, columns], `row_bytes` from row to row, box [box_rows, box_columns], swizzle 0,
// 64 or 128 bytes.
UW_CPU_API void uw_cpu_tensor_map_2d(void* map, void* base, unsigned element_bytes, unsigned long long columns,
                                     unsigned long long rows, unsigned long long row_bytes, unsigned box_columns,
                                     unsigned box_rows, unsigned swizzle_bytes);
}

// Exports `int SYMBOL(grid, block, smem_bytes, cluster, seed, args*)` for kernel KERNEL(ARGS). 0 = success.
#define UW_CPU_EXPORT(SYMBOL, KERNEL, ARGS)                                                                      \
    extern "C" UW_CPU_API int SYMBOL(unsigned grid, unsigned block, unsigned smem_bytes, unsigned cluster,       \
                                     unsigned long long seed, const void* arguments) {                           \
        return uw::cpu::run_grid(                                                                                \
            grid, block, smem_bytes, cluster, seed, [](const void* a) { KERNEL(*static_cast<const ARGS*>(a)); }, \
            arguments);                                                                                          \
    }
