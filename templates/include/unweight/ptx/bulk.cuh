// Asynchronous bulk copies and TMA. One thread issues for the whole block.
//
// Loads report their bytes to an mbarrier; stores belong to the issuing thread's bulk groups (commit, then wait).
// Plain bulk copies: both addresses and the size are multiples of 16 bytes.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// A cache policy for the loads below. Create it once per thread; it costs an instruction.
UW_DEVICE u64 createpolicy_l2(L2 wanted) {
    u64 policy;
    if (wanted == L2::kEvictFirst) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else if (wanted == L2::kEvictLast) {
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}

// global -> shared.
UW_DEVICE void cp_async_bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}
UW_DEVICE void cp_async_bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

template <L2 kPolicy>
UW_DEVICE void cp_async_bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
    cp_async_bulk_load(destination, source, bytes, barrier, createpolicy_l2(kPolicy));
}

// shared -> global; part of the current bulk group.
UW_DEVICE void cp_async_bulk_store(void* destination, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source),
                 "r"(bytes)
                 : "memory");
}

// TMA load of the box at (column, row) of a 2-D map, in the map's swizzle. Elements outside the tensor are zero, and
// all bytes of the box are counted.
UW_DEVICE void tma_load_2d(u32 destination, const TensorMap& map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
UW_DEVICE void tma_load_2d(u32 destination, const TensorMap& map, u32 column, u32 row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// TMA store of a box to a 2-D map; nothing is written outside the tensor.
UW_DEVICE void tma_store_2d(const TensorMap& map, u32 column, u32 row, u32 source) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(source)
                 : "memory");
}
// The same as a reduction: adds in the map's element type.
UW_DEVICE void tma_reduce_add_2d(const TensorMap& map, u32 column, u32 row, u32 source) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
        "r"(column), "r"(row), "r"(source)
        : "memory");
}

UW_DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the newest kPending groups are complete; `_read`: until they have read their shared memory.
template <u32 kPending>
UW_DEVICE void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
template <u32 kPending>
UW_DEVICE void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

UW_DEVICE void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace uw::ptx

#endif  // UW_CPU
