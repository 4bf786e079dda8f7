// The wrappers of include/unweight/ptx on the simulator of simulator.hpp: same names, same meaning, same namespace.
#pragma once

#include "simulator.hpp"
#include "unweight/ptx/types.cuh"

namespace uw::ptx {

// ---- core.cuh ------------------------------------------------------------------------------------------------------
inline u32 tid() { return cpu::self().thread; }
inline u32 ctaid() { return cpu::self().block->index; }
inline u32 nctaid() { return cpu::simulator().grid; }
inline u32 laneid() { return cpu::self().thread % 32; }
inline u32 uniform_warp_index() { return cpu::self().thread / 32; }
inline bool elect_sync() { return laneid() == 0; }

void bar_warp_sync();
u32 shfl_sync_idx(u32 value, u32 source_lane);
u32 shfl_sync_bfly(u32 value, u32 lane_mask);
u32 shfl_sync_up(u32 value, u32 delta);
u32 vote_sync_ballot(bool predicate);
u32 match_any_sync(u32 value);
u32 redux_sync_max(u32 value);
u32 redux_sync_min(u32 value);

inline u32 popc(u32 v) { return static_cast<u32>(__builtin_popcount(v)); }
inline u32 clz(u32 v) { return v == 0 ? 32 : static_cast<u32>(__builtin_clz(v)); }
inline u32 find_first_set(u32 v) { return static_cast<u32>(__builtin_ffs(static_cast<int>(v))); }
inline u32 brev(u32 v) {
    u32 r = 0;
    for (u32 i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
    return r;
}
inline u32 prmt(u32 a, u32 b, u32 selector) {
    u64 bytes = u64(b) << 32 | a;
    u32 d = 0;
    for (u32 i = 0; i < 4; ++i) {
        u32 nibble = selector >> (4 * i) & 15;
        u32 byte = static_cast<u32>(bytes >> (8 * (nibble & 7))) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        d |= byte << (8 * i);
    }
    return d;
}
template <u32 kTable>
inline u32 lop3(u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (u32 row = 0; row < 8; ++row)
        if (kTable >> row & 1) d |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    return d;
}
inline u32 shf_r_wrap(u32 low, u32 high, u32 shift) {
    return static_cast<u32>((u64(high) << 32 | low) >> (shift & 31));
}
inline u32 shf_l_wrap(u32 low, u32 high, u32 shift) {
    return static_cast<u32>((u64(high) << 32 | low) << (shift & 31) >> 32);
}
inline u32 bits_from_float(float v) {
    u32 b;
    memcpy(&b, &v, 4);
    return b;
}
inline float float_from_bits(u32 b) {
    float v;
    memcpy(&v, &b, 4);
    return v;
}
inline u32 bf16_bits(float v) {
    u32 b = bits_from_float(v);
    if (v != v) return 0x7fff;
    return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline float ex2_approx(float v) { return __builtin_exp2f(v); }
inline float rcp_approx(float v) { return 1.0f / v; }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float rsqrt_approx(float v) { return 1.0f / __builtin_sqrtf(v); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float mul(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float div(float a, float b) { return a / b; }
inline u32 cvt_rn_bf16x2(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline void pin(u32&) {}
inline void pin(float&) {}
[[noreturn]] inline void trap() { cpu::fail("trap"); }

// ---- memory.cuh ----------------------------------------------------------------------------------------------------
inline u8* dynamic_smem() { return cpu::self().block->shared; }
u32 cvta_to_shared(const void* pointer);
inline U32x4 ld_shared_x4(u32 a) { return cpu::read_shared<U32x4>(a); }
inline U32x2 ld_shared_x2(u32 a) { return cpu::read_shared<U32x2>(a); }
inline u32 ld_shared(u32 a) { return cpu::read_shared<u32>(a); }
inline u32 ld_shared_u16(u32 a) { return cpu::read_shared<u16>(a); }
inline u32 ld_shared_u8(u32 a) { return cpu::read_shared<u8>(a); }
inline void st_shared_x4(u32 a, U32x4 v) { cpu::write_shared(a, v); }
inline void st_shared_x2(u32 a, U32x2 v) { cpu::write_shared(a, v); }
inline void st_shared(u32 a, u32 v) { cpu::write_shared(a, v); }
inline void st_shared_u16(u32 a, u32 v) { cpu::write_shared(a, static_cast<u16>(v)); }
inline void st_shared_u8(u32 a, u32 v) { cpu::write_shared(a, static_cast<u8>(v)); }
inline u32 atom_add_shared(u32 a, u32 v) {
    u32 old = cpu::read_shared<u32>(a);
    cpu::write_shared(a, old + v);
    return old;
}
inline void red_add_shared(u32 a, u32 v) { atom_add_shared(a, v); }
inline void red_or_shared(u32 a, u32 v) { cpu::write_shared(a, cpu::read_shared<u32>(a) | v); }

inline U32x4 ld_global_x4(const void* p) { return cpu::read_global<U32x4>(p); }
inline U32x2 ld_global_x2(const void* p) { return cpu::read_global<U32x2>(p); }
inline u32 ld_global(const void* p) { return cpu::read_global<u32>(p); }
inline U32x4 ld_global_nc_x4(const void* p) { return cpu::read_global<U32x4>(p); }
inline U32x2 ld_global_nc_x2(const void* p) { return cpu::read_global<U32x2>(p); }
inline u32 ld_global_nc(const void* p) { return cpu::read_global<u32>(p); }
inline u32 ld_global_nc_u16(const void* p) { return cpu::read_global<u16>(p); }
inline u32 ld_global_u16(const void* p) { return cpu::read_global<u16>(p); }
inline u32 ld_global_nc_u8(const void* p) { return cpu::read_global<u8>(p); }
inline void prefetch_global_l2(const void*) {}
inline void st_global_x4(void* p, U32x4 v) { cpu::write_global(p, v); }
inline void st_global_x2(void* p, U32x2 v) { cpu::write_global(p, v); }
inline void st_global(void* p, u32 v) { cpu::write_global(p, v); }
inline void st_global_u16(void* p, u32 v) { cpu::write_global(p, static_cast<u16>(v)); }
inline void st_global_u8(void* p, u32 v) { cpu::write_global(p, static_cast<u8>(v)); }
inline void st_global_cs_x4(void* p, U32x4 v) { cpu::write_global(p, v); }
inline u32 atom_add_global(u32* p, u32 v) {
    u32 old = cpu::read_global<u32>(p);
    cpu::write_global(p, old + v);
    cpu::atomic_speaks(p);
    return old;
}
inline u64 atom_add_global_u64(u64* p, u64 v) {
    u64 old = cpu::read_global<u64>(p);
    cpu::write_global(p, old + v);
    return old;
}
inline void red_add_global(u32* p, u32 v) { atom_add_global(p, v); }
inline void red_max_global_u64(u64* p, u64 v) {
    if (cpu::read_global<u64>(p) < v) cpu::write_global(p, v);
}
void st_release_global_u64(u64* p, u64 v);
void st_release_global(u32* p, u32 v);
// Loads that others may be waiting behind: a turn of a polling loop.
u32 ld_acquire_global(const u32* p);
u64 ld_acquire_global_u64(const u64* p);
inline void fence_acq_rel_gpu() { cpu::fence_device(); }

// ---- barrier.cuh ---------------------------------------------------------------------------------------------------
template <class NamedBarrier>
inline void bar_sync(NamedBarrier barrier, u32 threads) {
    cpu::named_barrier(static_cast<u32>(barrier), threads);
}
inline void bar_sync() { cpu::named_barrier(0, cpu::simulator().block_threads); }
inline u32 cluster_ctarank() { return cpu::self().block->rank; }
inline u32 cluster_nctarank() { return cpu::simulator().cluster; }
void barrier_cluster_arrive();
void barrier_cluster_wait();
inline u32 mapa(u32 address, u32 rank) { return (address & ((1u << cpu::kRankShift) - 1)) | rank << cpu::kRankShift; }
inline U32x2 ld_shared_cluster_x2(u32 a) { return cpu::read_shared<U32x2>(a); }
inline U32x4 ld_shared_cluster_x4(u32 a) { return cpu::read_shared<U32x4>(a); }
inline void st_shared_cluster_x4(u32 a, U32x4 v) { cpu::write_shared(a, v); }

// ---- mbarrier.cuh --------------------------------------------------------------------------------------------------
void mbarrier_init(u32 barrier, u32 arrivals);
void mbarrier_arrive(u32 barrier);
inline void mbarrier_arrive_cluster(u32 barrier) { mbarrier_arrive(barrier); }
// What starts a copy announces it this way, on the barrier that the copy itself completes: that releases nothing.
inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { cpu::mbarrier_arrive_at(barrier, bytes); }
inline void mbarrier_expect_tx(u32 barrier, u32 bytes) { cpu::mbarrier_at(barrier).bytes += static_cast<i32>(bytes); }
bool mbarrier_try_wait_parity(u32 barrier, u32 parity);
bool mbarrier_test_wait_parity(u32 barrier, u32 parity);
inline bool mbarrier_try_wait_parity_cluster(u32 barrier, u32 parity) {
    return mbarrier_try_wait_parity(barrier, parity);
}
void mbarrier_wait_parity(u32 barrier, u32 parity);
inline void mbarrier_wait_parity_cluster(u32 barrier, u32 parity) { mbarrier_wait_parity(barrier, parity); }

// ---- fence.cuh -----------------------------------------------------------------------------------------------------
void fence_proxy_async_shared();
inline void fence_proxy_async() { fence_proxy_async_shared(); }
inline void fence_mbarrier_init() {}

// ---- bulk.cuh ------------------------------------------------------------------------------------------------------
inline u64 createpolicy_l2(L2) { return 0; }

void cp_async_bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, u64 = 0);
template <L2 kPolicy>
inline void cp_async_bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
    cp_async_bulk_load(destination, source, bytes, barrier);
}
void cp_async_bulk_store(void* destination, u32 source, u32 bytes);
void tma_load_2d(u32 destination, const TensorMap& opaque, u32 column, u32 row, u32 barrier, u64 = 0);
void tma_store_2d(const TensorMap& opaque, u32 column, u32 row, u32 source);
void tma_reduce_add_2d(const TensorMap& opaque, u32 column, u32 row, u32 source);
void cp_async_bulk_commit_group();
void cp_async_bulk_wait_group(u32 pending);
template <u32 kPending>
inline void cp_async_bulk_wait_group() {
    cp_async_bulk_wait_group(kPending);
}
template <u32 kPending>
inline void cp_async_bulk_wait_group_read() {
    cp_async_bulk_wait_group<kPending>();
}
inline void prefetch_tensormap(const TensorMap&) {}

// ---- async.cuh -----------------------------------------------------------------------------------------------------
void cp_async_x4(u32 destination, const void* source, bool used = true);
void cp_async_commit_group();
void cp_async_wait_group(u32 pending);
template <u32 kPending>
inline void cp_async_wait_group() {
    cp_async_wait_group(kPending);
}

// ---- control.cuh ---------------------------------------------------------------------------------------------------
template <u32 kRegisters>
inline void setmaxnreg_inc() {}
template <u32 kRegisters>
inline void setmaxnreg_dec() {}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

// ---- mma.cuh -------------------------------------------------------------------------------------------------------
void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
U32x4 ldmatrix_x4(u32 a);
U32x4 ldmatrix_x4_trans(u32 a);
void stmatrix_x4(u32 a, U32x4 v);
void stmatrix_x4_trans(u32 a, U32x4 v);

// ---- wgmma.cuh -----------------------------------------------------------------------------------------------------
inline void wgmma_fence() {}
inline void wgmma_commit_group() { cpu::wgmma_commit(); }
template <u32 kPending>
inline void wgmma_wait_group() {
    cpu::wgmma_wait(kPending);
}
template <u64 kRegisters>
inline void wgmma(float (&d)[kRegisters], u64 a, u64 b) {
    cpu::wgmma_issue(kRegisters * 2, d, nullptr, a, b);
}
template <u64 kRegisters>
inline void wgmma(float (&d)[kRegisters], const u32 (&a)[4], u64 b) {
    cpu::wgmma_issue(kRegisters * 2, d, a, 0, b);
}

}  // namespace uw::ptx
